"""compress: codecs for traffic over slow links. It imports neither paxtrain nor planner.

    codec.py                                the interface of a codec; codec_error, wire_bytes
    lowrank.py                              the codec LowRank: messages between pipeline stages
    powersgd.py                             mean_lowrank: gradients over data (PowerSGD)
    collectives.py                          reduce_scatter, right on CPUs, too; many collectives packed into one
    policy.py                               rules for what to compress, when to start, and to which rank
    kernels.py                              passes over whole matrices: public op and jnp reference
    gpu/                                    kernels for NVIDIA GPUs: of the passes, and of the algebra on thin factors
    kernel_times.py bench.py                benchmark of the kernels, and its main
    subspace.py                             subspace iteration on thin factors
    recorder.py                             a record of a link's messages, for studies

    error = compress.codec_error(compress.LowRank(16), gradients, steps=8)      # [8] relative errors

A codec of one's own is a class with the methods of `Codec`, given to `paxtrain.train(config, codec=...)`; it needs no
change here. Importing this package does not import jax; each name below does when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.codec import Codec as Codec
    from compress.codec import Identity as Identity
    from compress.codec import codec_error as codec_error
    from compress.codec import wire_bytes as wire_bytes
    from compress.lowrank import LowRank as LowRank
    from compress.powersgd import init_power as init_power
    from compress.powersgd import mean_lowrank as mean_lowrank

_EXPORTS = {
    "Codec": "compress.codec",
    "Identity": "compress.codec",
    "LowRank": "compress.lowrank",
    "codec_error": "compress.codec",
    "init_power": "compress.powersgd",
    "mean_lowrank": "compress.powersgd",
    "wire_bytes": "compress.codec",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'compress' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
