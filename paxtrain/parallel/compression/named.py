"""Codecs and reducers that a configuration names, and the implementation of their kernels on a device."""

from typing import Any

import jax

from compress.codec import Codec
from compress.codecs import named
from compress.kernels import largest_kernel_rank, on_gpu
from compress.reducer import Reducer, Scattered
from paxtrain.config import CompressConfig, Config
from paxtrain.config.options import PLACES, REDUCED
from paxtrain.errors import UserError


def settle_implementation(config: Config, device: jax.Device, codec: Codec | None = None) -> str:
    """Return the implementation of the compression's kernels, not "auto", for a configuration and a device.

    Args:
        config: the configuration; its compress.implementation may be "auto".
        device: any device of the mesh.
        codec: codec of the gradients between stages, if it is not the configuration's.

    Raises:
        UserError: compress.implementation names kernels, and the device or a rank does not allow them.
    """
    c, asked = config.compress, config.compress.implementation
    ranks = [0]
    low = {place for place in PLACES if c.at(place).low_rank and c.at(place).chosen != "none"}
    ranks += c.backward.link_ranks(config.links) if "backward" in low and codec is None else ()
    ranks += [c.forward.rank] if "forward" in low else []
    ranks += [c.data.rank] if "data" in low else []
    capability = float(getattr(device, "compute_capability", "0")) if device.platform == "gpu" else 0.0
    here, largest = on_gpu(capability), largest_kernel_rank(capability)
    if asked == "auto":
        # Other GPUs of the A100's generation have less shared memory than an A100.
        return here[0] if (capability == 8 or capability >= 9) and max(ranks) <= largest else "xla"
    if asked == "xla":
        return asked
    if asked not in here:
        raise UserError(
            f"compress.implementation={asked} needs NVIDIA A100, H100, H200 or B200 GPUs, got {device.device_kind}; "
            "auto or xla would work"
        )
    if max(ranks) > largest:
        raise UserError(
            f"compress.implementation={asked} takes ranks up to {largest} on {device.device_kind}, got {max(ranks)}; "
            "auto or xla would work"
        )
    return asked


def named_codec(compress: CompressConfig, place: str) -> Any:
    """Return the codec, or the reducer, that a configuration names for a place.

    Raises:
        UserError: there is none of that name, or its options do not fit.
    """
    part = compress.at(place)
    try:
        return named.build(part.codec, part.options, (Codec, Reducer) if place in REDUCED else (Codec,))
    except ValueError as error:
        raise UserError(f"compress.{place}.codec={error}") from error


def named_reducer(compress: CompressConfig, place: str) -> Reducer:
    """Return the reducer that a configuration names for a place, or the one that its codec makes.

    Args:
        compress: section of the configuration.
        place: "data" or "outer".

    Raises:
        UserError: there is none of that name, or its options do not fit.
    """
    made = named_codec(compress, place)
    return made if isinstance(made, Reducer) else Scattered(made)
