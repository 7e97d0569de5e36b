"""Checks of the settled compression, before anything is compiled."""

import math
from collections.abc import Iterable

from compress import policy
from compress.codec import Codec, codec_name, refusal
from compress.codecs.on_links import OnLinks
from compress.hierarchical import Hierarchical
from compress.powersgd import PowerSGD, largest_rank
from compress.reducer import Reducer, Shard
from paxtrain.errors import UserError
from paxtrain.parallel.compression.settled import Compression


def check(compression: Compression) -> None:
    """Refuse codecs that do not fit and ranks that compress nothing, before anything is compiled.

    Raises:
        UserError: a codec has nothing to encode or returns wrong shapes, or saves too little.
    """
    if compression.codec is not None and compression.config.mesh.pipe == 1:
        raise UserError(
            f"the codec {codec_name(compression.codec)} needs messages between stages, but mesh.pipe=1; choose "
            "mesh.pipe of 2 or more, or codec=None"
        )
    if compression.codec is not None and compression.config.stage_map.folded:
        raise UserError(
            f"the codec {codec_name(compression.codec)} takes gradients that go one way over each link, but "
            f"pipeline.schedule={compression.config.pipeline.schedule} sends them both ways; choose another schedule, "
            "or codec=None"
        )
    ranks = compression.config.compress.backward.ranks
    if compression.codec is not None and ranks:
        raise UserError(
            f"compress.backward.ranks={ranks} gives a rank to each link, which the codec "
            f"{codec_name(compression.codec)} does not take; leave it empty, or codec=None for the low-rank codec"
        )
    if compression.backward != "none":
        _check_link(compression, "backward", compression.backward_codec)
    if compression.forward != "none":
        codec = compression.forward_codec
        _check_link(compression, "forward", codec.codec if isinstance(codec, OnLinks) else codec)
    if compression.reducer is not None:
        _check_reducer(compression, compression.reducer)
    if compression.tables is not None:
        _require_none(compression.tables.problem(compression.config.compress.min_ratio))
    if compression.weights_codec is not None:
        for path, shape in compression.kernels.items():
            shard = compression.shards[path]
            part = tuple(n // (shard.members if d == shard.dim else 1) for d, n in enumerate(shape))
            _require_none(refusal(compression.weights_codec, part, compression.config.model.dtype))
    if (keys := compression.layout.keys_codec) is not None:
        _require_none(refusal(keys, compression.keys, compression.config.model.dtype))


def _check_link(compression: Compression, place: str, codec: Codec) -> None:
    """Require that a codec takes the messages between stages.

    Raises:
        UserError: the codec does not.
    """
    c, message = compression.config.compress, compression.message
    given = place == "backward" and compression.codec is not None
    if isinstance(codec, Codec) and (problem := codec.problem(message.shape, message.dtype, c.min_ratio)):
        if c.at(place).low_rank and not given:
            several = place == "backward" and c.backward.ranks
            name = f"compress.{place}.{problem.replace('rank=', 'ranks=', 1) if several else problem}"
            raise UserError(name)
        raise UserError(f"the codec {codec_name(codec)}: {problem}")
    if given or not c.at(place).low_rank:
        _require_none(refusal(codec, message.shape, message.dtype))


def _check_reducer(compression: Compression, reducer: Reducer) -> None:
    """Require that a reducer takes at least one kernel.

    Raises:
        UserError: it takes none, or its codec does not fit a kernel's part.
    """
    c = compression.config.compress
    groups = reducer if isinstance(reducer, Hierarchical) else None
    within = groups.reducer if groups else reducer
    require_parts(reducer, compression.over_data.values())
    taken = compression.compressed_kernels(compression.level)
    if groups and taken and (problem := groups.problem(*compression.over_data[taken[0]])):
        raise UserError(f"compress.data.inside={c.data.inside}: {problem}, or leave compress.data.inside out")
    if taken:
        return
    if not compression.reduced:
        raise UserError(
            f"compress.data.inside={c.data.inside} cuts no kernel of a layer on a device into equal parts; choose "
            "another number of ranks, or leave compress.data.inside out"
        )
    if isinstance(within, PowerSGD):
        useful = {path: largest_rank(shape, c.min_ratio) for path, (shape, _) in compression.reduced.items()}
        n, *rest = compression.reduced[max(useful, key=useful.__getitem__)][0]
        what = f"the largest kernel of a layer on a device is {n} x {math.prod(rest)}"
        what += f" in {c.data.inside} parts (compress.data.inside)" if groups else ""
        raise UserError(policy.too_large(f"compress.data.rank={c.data.rank}", what, max(useful.values()), c.min_ratio))
    mesh = compression.config.mesh
    parts = mesh.copies if mesh.copies > 1 else mesh.replicas
    raise UserError(
        f"compress.data.codec={c.data.codec} makes no kernel of a layer {c.min_ratio:g} times smaller "
        f"(compress.min_ratio) in {parts} equal parts; choose other options or a smaller "
        "min_ratio"
    )


def require_parts(reducer: Reducer, arrays: Iterable[tuple[tuple[int, ...], Shard]]) -> None:
    """Require that a reducer's codec takes the parts of arrays.

    Args:
        reducer: the reducer.
        arrays: shape of each array, and what a rank keeps of its mean.

    Raises:
        UserError: it does not.
    """
    for shape, shard in arrays:
        _require_none(reducer.refusal(shape, shard))


def _require_none(problem: str) -> None:
    """Raise UserError if there is a problem."""
    if problem:
        raise UserError(problem)
