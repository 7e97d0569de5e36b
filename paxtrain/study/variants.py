"""The variants of a study: one configuration, with more and more of the traffic between devices compressed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paxtrain.config import CompressConfig, Config
from paxtrain.config.axes import DATA, PIPE
from paxtrain.config.options import LINKED, NO_OPTIONS, OTHERS, PLACES
from paxtrain.errors import UserError
from paxtrain.parallel.compressed_stages import StageTimes

# What goes through a codec, in labels.
_WORDS = {"backward": "gradients", "forward": "activations", "data": "over data"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kind of compression to compare.

    Attributes:
        name: name in files.
        label: name in tables and figures.
        config: configuration of its runs.
    """

    name: str
    label: str
    config: Config


def bare(compress: CompressConfig) -> CompressConfig:
    """Return compression that compresses nothing, with the same ranks and thresholds."""
    codec = {"codec": "", "options": NO_OPTIONS}
    messages, data = {"messages": "none", "links": "", **codec}, {"stages": "none", "inside": 1, **codec}
    return compress.changed(
        **dict.fromkeys(LINKED, messages),
        **dict.fromkeys(OTHERS, codec) | {"embedding": {"sync": "unfused", **codec}},
        data=data,
        error="lazy",
    )


def variants(config: Config, sweep: Sequence[int]) -> list[Variant]:
    """Return the variants: dense, those that compress more and more, and one for each further rank of the sweep.

    Codecs other than low rank that the configuration names have a variant for each place.

    Args:
        config: configuration that gives ranks, the stages of selective stage compression and when it starts.
        sweep: further ranks of compressed backpropagation.
    """
    found: dict[str, Variant] = {}

    own = config.compress

    def add(name: str, label: str, **changes: Any) -> None:
        changes |= {place: {"links": own.at(place).links, **changes[place]} for place in LINKED if place in changes}
        found[name] = Variant(name, label, dataclasses.replace(config, compress=bare(own).changed(**changes)))

    every, epilogue, fused = {"messages": "all"}, {"messages": "epilogue"}, {"sync": "fused"}
    add("dense", "dense")
    add("cb_naive", "CB naive", backward=every, error="none")
    add("cb", "CB", backward=every)
    add("cb_epilogue", "CB epilogue", backward=epilogue)
    add("cb_fe", "CB + FE", backward=epilogue, embedding=fused)
    inside, stages = {"inside": own.data.inside}, own.data.stages
    add("cb_fe_sc", "CB + FE + SC", backward=epilogue, embedding=fused, data={"stages": stages, **inside})
    add("everything", "everything", backward=every, forward=every, embedding=fused, data={"stages": "all", **inside})
    for place in (place for place in PLACES if not own.at(place).low_rank):
        part = own.at(place)
        chosen = {part.asked: part.chosen, "codec": part.codec, "options": part.options}
        chosen |= inside if place == "data" else {}
        add(f"codec_{place}", f"{part.codec} {_WORDS[place]}", embedding=fused, **{place: chosen})
    for place in ("weights", "embedding"):
        if (part := own.at(place)).codec:
            codec = {"codec": part.codec, "options": part.options}
            changes = {"embedding": fused} | {place: codec | (fused if place == "embedding" else {})}
            add(f"codec_{place}", f"{part.codec} {place}", **changes)
    for rank in sweep:
        if rank != own.backward.rank:
            add(f"cb_rank_{rank}", f"CB rank {rank}", backward={"rank": rank, "ranks": "", **every})
    return list(found.values())


def chosen(config: Config, sweep: Sequence[int], only: Sequence[str] = ()) -> list[Variant]:
    """Return the variants of some names, or all of them if no name is given; see `variants`.

    Raises:
        UserError: a rank of the sweep is below 1, or there is no such variant.
    """
    if any(rank < 1 for rank in sweep):
        raise UserError(f"--ranks must be positive, got {','.join(map(str, sweep))}")
    every = {variant.name: variant for variant in variants(config, sweep)}
    if unknown := [name for name in only if name not in every]:
        raise UserError(f"there is no variant {unknown[0]!r} here; there are {', '.join(every)}")
    return [every[name] for name in only or every]


def require_alike(config: Config) -> None:
    """Require that one device can emulate the mesh, and that there is one validation loss.

    Raises:
        UserError: the mesh has what neither changes losses nor is emulated, or validation has several data sets.
    """
    others = {f"mesh.{name}": n for name, n in config.mesh.sizes.items() if name not in (DATA, PIPE)}
    others["pipeline.virtual_stages"] = config.pipeline.virtual_stages
    if wrong := [f"{name}={n}" for name, n in others.items() if n > 1]:
        raise UserError(
            f"the study takes 1 of {', '.join(others)}, none of which changes what is compressed, got "
            f"{' and '.join(wrong)}; leave {'it' if len(wrong) == 1 else 'them'} out"
        )
    if config.uneven:
        raise UserError(
            f"the study takes equal data ranks, got batch.data_micro_batches={config.batch.data_micro_batches}; leave "
            "it out"
        )
    if len(config.data.validation_sets) > 1:
        raise UserError(
            "the study compares one validation loss, but data.validation names "
            f"{len(config.data.validation_sets)} data sets; name one"
        )


# Most of a short run's steps that warm up.
_WARMUP = 0.2


def shortened(config: Config, steps: int) -> Config:
    """Return a configuration for runs of some steps, evaluated at the end, with a warm-up and a decay that fit.

    Args:
        config: configuration of longer runs.
        steps: optimizer steps of each run.
    """
    warmup = min(config.optimizer.warmup_steps, int(_WARMUP * steps))
    decay = min(config.optimizer.decay_steps, steps - warmup)
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, steps=steps, eval_every=0),
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup, decay_steps=decay),
    )


def settled(config: Config) -> Config:
    """Return the configuration with the stages of selective stage compression named by their numbers.

    Raises:
        UserError: a study has nothing to compare with this configuration, or could not count its bytes.
    """
    c, mesh = config.compress, config.mesh
    if mesh.pipe < 2:
        raise UserError(
            f"mesh.pipe={mesh.pipe} has no messages between stages to compress; choose a mesh.pipe of 2 or more"
        )
    require_alike(config)
    if config.micro_batches < 2:
        raise UserError(
            "the study compares the errors of neighbouring micro-batches, but there is 1 per step; "
            f"batch.global_batch={2 * config.batch.global_batch} would make 2"
        )
    if c.data.adapt_every:
        raise UserError(f"the study keeps ranks as they are, got compress.data.adapt_every={c.data.adapt_every}; use 0")
    data = c.data.stages
    if data == "selective" and c.data.seconds[0]:
        data = ",".join(map(str, StageTimes(*c.data.seconds).chosen())) or "none"
    if data in ("none", "selective"):
        raise UserError(
            f"compress.data.stages={c.data.stages} does not say which stages the run with selective stage compression "
            "compresses; name them, as --config.compress.data.stages=0,1"
        )
    return dataclasses.replace(config, compress=c.changed(data={"stages": data}))
