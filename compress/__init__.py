"""compress: codecs for traffic over slow links. It imports neither paxtrain nor planner.

    codec.py                                the interface of a codec; codec_error, wire_bytes
    reducer.py                              the interface of a reduction over data; Scattered: that of any codec
    lowrank.py                              the codec LowRank: messages between pipeline stages
    powersgd.py                             the reducer PowerSGD: gradients over data
    hierarchical.py                         the reducer Hierarchical: dense inside groups of ranks, another between
    codecs/                                 codecs by name, and others than low rank
    testing.py                              properties that every codec has
    collectives.py                          collectives over an axis or groups of its ranks, and many packed into one
    policy.py                               rules for what to compress, when to start, and to which rank
    kernels.py                              passes over whole matrices: public op and jnp reference
    gpu/                                    kernels for NVIDIA GPUs: of the passes, and of the algebra on thin factors
    subspace.py                             subspace iteration on thin factors

    error = compress.codec_error(compress.LowRank(16), gradients, steps=8)      # [8] relative errors

A codec of one's own is a class derived from `Codec`, which flags name as package.module:Class; it needs no change here.
docs/codecs.md has one of 30 lines. Importing this package does not import jax; each name below does when it is first
used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.codec import Codec as Codec
    from compress.codec import Identity as Identity
    from compress.codec import Passes as Passes
    from compress.codec import codec_error as codec_error
    from compress.codec import wire_bytes as wire_bytes
    from compress.hierarchical import Hierarchical as Hierarchical
    from compress.lowrank import LowRank as LowRank
    from compress.powersgd import PowerSGD as PowerSGD
    from compress.reducer import Reducer as Reducer
    from compress.reducer import Scattered as Scattered
    from compress.reducer import Shard as Shard

_EXPORTS = {
    "Codec": "compress.codec",
    "Hierarchical": "compress.hierarchical",
    "Identity": "compress.codec",
    "LowRank": "compress.lowrank",
    "Passes": "compress.codec",
    "PowerSGD": "compress.powersgd",
    "Reducer": "compress.reducer",
    "Scattered": "compress.reducer",
    "Shard": "compress.reducer",
    "codec_error": "compress.codec",
    "wire_bytes": "compress.codec",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'compress' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
