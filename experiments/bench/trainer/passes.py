"""Memory passes of the codecs: bytes that their programs for GPUs read and write, beside what each codec declares."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from compress.codec import Codec, array_bytes
from compress.codecs import named
from compress.lowrank import LowRank
from compress.powersgd import PowerSGD
from compress.reducer import Reducer, Scattered, Shard, mean
from paxtrain.config.axes import DATA
from paxtrain.devices.gpus import GPUS
from paxtrain.profiling.ledger import gpus
from paxtrain.xla import aot, costs

MESSAGE = (2, 2048, 4096)  # micro-batch, sequence and hidden size
KERNEL = (4096, 4096)
RANKS = 2
RANK = 16
_LAUNCHED = 2**12  # bytes from which on a kernel counts as one that passes over something


@dataclasses.dataclass(frozen=True)
class CodecCase:
    """A codec of the library in the table.

    Attributes:
        label: name in the table.
        codec: codec of messages between stages.
        reducer: reducer of gradients over data.
    """

    label: str
    codec: Codec
    reducer: Reducer


def cases(implementation: str = "triton") -> list[CodecCase]:
    """Return every codec of the library that changes messages, with error feedback as it is by default.

    Args:
        implementation: implementation of low rank's kernels.
    """
    options: dict[str, tuple[Mapping[str, Any], ...]] = {"int4": ({}, {"rotate": True})}
    found = []
    for name in named.NAMES:
        for given in options.get(name, (MappingProxyType({}),)) if name != "identity" else ():
            codec = named.build(name, given)
            found.append(CodecCase(" ".join([name, *given]), codec, Scattered(codec)))
    low = LowRank(RANK, factors="bfloat16", implementation=implementation)
    return [*found, CodecCase(f"rank {RANK}", low, PowerSGD(RANK, implementation=implementation))]


@dataclasses.dataclass(frozen=True)
class Counted:
    """Passes over memory that a codec's compiled programs make.

    Attributes:
        encode: bytes to encode, in multiples of the message's.
        decode: bytes to decode, likewise; for a reduction encode has all.
        kernels: kernels that are launched, without those of a few numbers.
    """

    encode: float
    decode: float
    kernels: int


def _counted(mesh: Mesh, function: Callable, arguments: Sequence[Any], donate: Sequence[int] = ()) -> tuple[int, int]:
    """Return the bytes that a function of one device reads and writes there, and its number of kernels."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    lowered = jax.jit(mapped, donate_argnums=donate).lower(*arguments)
    text = aot.compile(lowered).as_text()
    assert text is not None
    run = [kernel for kernel in costs.kernels(text) if kernel.bytes >= _LAUNCHED]
    return sum(kernel.bytes * kernel.executions for kernel in run), sum(kernel.executions for kernel in run)


def between(codec: Codec, mesh: Mesh, dtype: DTypeLike, shape: tuple[int, ...] = MESSAGE) -> Counted:
    """Return what encoding and decoding a message read and write.

    Args:
        codec: the codec.
        mesh: mesh of a GPU, see `gpus`.
        dtype: dtype of the message.
        shape: its shape.
    """
    message = jax.ShapeDtypeStruct(shape, dtype)
    state = jax.eval_shape(lambda: codec.init(shape, dtype))
    wire, _ = jax.eval_shape(codec.encode, state, message)
    active = jax.ShapeDtypeStruct((), bool)
    # The state comes first among the results, since donated memory goes to them in their order.
    encode = _counted(mesh, lambda *a: codec.encode(*a)[::-1], (state, message, active), donate=(0,))
    decode = _counted(mesh, lambda wire: codec.decode(wire, message), (wire,))
    whole = array_bytes(shape, dtype)
    return Counted(encode[0] / whole, decode[0] / whole, max(encode[1], decode[1]))


def over_data(reducer: Reducer, mesh: Mesh, shape: tuple[int, ...] = KERNEL) -> Counted:
    """Return what the reduction of a kernel's float32 gradient reads and writes, if each rank keeps a part of the mean.

    Args:
        reducer: the reducer.
        mesh: mesh of GPUs along "data", see `gpus`.
        shape: shape of the kernel.
    """
    shard = Shard(DATA, mesh.size, 0)
    state = jax.eval_shape(lambda: reducer.init(shape, shard))

    def reduce(state: Any, gradient: jax.Array) -> Any:
        means, states, left_out = mean(reducer, [state], [gradient], [shard])
        return states[0], means[0], left_out

    gradient = jax.ShapeDtypeStruct(shape, jnp.float32)
    # A step keeps the old state until it knows that its gradients are finite, so nothing is donated.
    moved, kernels = _counted(mesh, reduce, (state, gradient))
    return Counted(moved / (4 * math.prod(shape)), 0, kernels)


def mesh_of(kind: str, count: int) -> Mesh:
    """Return a mesh of GPUs of a kind, which need not be there, along "data"."""
    return Mesh(np.array(gpus(kind, count)), (DATA,))


def passes(kind: str = "h100") -> None:
    """Print for each codec the passes that it declares, and those of its programs.

    Args:
        kind: key of paxtrain.devices.gpus.GPUS.
    """
    one, several = mesh_of(kind, 1), mesh_of(kind, RANKS)
    shapes = [" x ".join(map(str, shape)) for shape in (MESSAGE, KERNEL)]
    print(f"\npasses on one {GPUS[kind].name}, to encode and decode a message of {shapes[0]}; of the reduction of a")
    print(f"kernel of {shapes[1]} over {RANKS} data ranks; and kernels of more than {_LAUNCHED} bytes")
    columns = ("declared", "bfloat16", "float32", "kernels", "over data", "counted", "kernels")
    print(f"  {'':<14}" + "".join(f"{column:>13}" for column in columns))
    for case in cases():
        half, full = (between(case.codec, one, dtype) for dtype in ("bfloat16", "float32"))
        reduced, declared = over_data(case.reducer, several), case.reducer.passes()
        cells = [f"{found.encode:.1f} + {found.decode:.1f}" for found in (case.codec.passes(), half, full)]
        cells += [f"{half.kernels}", f"{declared.encode + declared.decode:.1f}", f"{reduced.encode:.1f}"]
        cells.append(f"{reduced.kernels}")
        print(f"  {case.label:<14}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
