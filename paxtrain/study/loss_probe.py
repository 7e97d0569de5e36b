"""The loss probe: short training of a user's own model with each codec at each place, beside dense training.

`python -m paxtrain.study --probe` writes probe.json (loss_probe_file.py), which `planner.plan --probe` takes, and
probe.md. Runs of a seed begin alike and see the same batches, so the difference of two losses is the codec's.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from paxtrain.config import Config
from paxtrain.config.axes import DATA, PIPE
from paxtrain.config.compress import LOW_RANK
from paxtrain.config.options import NO_OPTIONS, PLACES, PROBED
from paxtrain.errors import UserError, command
from paxtrain.model import parameters
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import FILE, WORDS, LossProbe, ProbedCodec
from paxtrain.study.report import VariantResult, by_run, differences, markdown
from paxtrain.study.variants import Variant, bare, require_alike, shortened

PAGE = "probe.md"
CODECS, RANKS = ("int8", "int4", "fp8", LOW_RANK), (16,)
STEPS, SEEDS = 50, 3
_DENSE = "dense"


def places(config: Config, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the places whose codecs are probed.

    Args:
        config: configuration whose mesh has the links.
        asked: some of config.options.PROBED; empty: all of PLACES at which the mesh sends something.

    Raises:
        UserError: a place is unknown, or the mesh sends nothing there.
    """
    if unknown := [place for place in asked if place not in PROBED]:
        raise UserError(f"--axes must be some of {', '.join(PROBED)} with --probe, got {unknown[0]!r}")
    mesh = config.mesh
    axes = {place: PIPE if place in ("backward", "forward") else DATA for place in PROBED}
    if config.model.tied_head and mesh.pipe > 1:
        axes["embedding"] = PIPE
    found = tuple(place for place in asked or PLACES if mesh.sizes[axes[place]] > 1)
    missing = [place for place in asked if place not in found]
    if missing or not found:
        place = missing[0] if missing else "backward"
        what = f"--axes={place} probes {WORDS[place]}" if missing else "--probe needs messages between stages or data"
        raise UserError(
            f"{what}, but mesh.data={mesh.data} and mesh.pipe={mesh.pipe} send none; choose mesh.{axes[place]} of 2 or "
            "more: one device emulates the mesh"
        )
    return found


def settled(config: Config, steps: int) -> Config:
    """Return a configuration for short runs: evaluated at the end, with a warm-up and a decay that fit.

    Args:
        config: the user's configuration.
        steps: optimizer steps of each run.

    Raises:
        UserError: the study cannot emulate the mesh, or validation has several data sets.
    """
    require_alike(config)
    c = config.compress
    # Over data from the first step on, so that each run is one program.
    changed = bare(c).changed(
        data={"start": 0.0, "adapt_every": 0},
        embedding={"sync": "auto"},
        error=c.error,
        backward={"ranks": ""},  # each run has one rank
    )
    return shortened(dataclasses.replace(config, compress=changed), steps)


def variants(
    config: Config, own: Config, where: Sequence[str], codecs: Sequence[str], ranks: Sequence[int]
) -> list[Variant]:
    """Return dense training, and each codec at each place.

    Args:
        config: configuration that `settled` returned.
        own: the user's configuration; a codec that it names for a place keeps its options there.
        where: places to probe.
        codecs: names of codecs, as the configuration takes them.
        ranks: ranks at which lowrank is probed.

    Raises:
        UserError: a name is empty, which would stand for low rank.
    """
    if not all(codecs):
        raise UserError(f"--codecs must be names joined by commas, got {','.join(codecs)!r}")
    found = [Variant(_DENSE, _DENSE, config)]
    for place in where:
        ranked = place in PLACES  # others do not take low rank
        for codec in (codec for codec in dict.fromkeys(codecs) if ranked or codec != LOW_RANK):
            for rank in dict.fromkeys(ranks) if codec == LOW_RANK else (0,):
                one = _codec(own, place, codec, rank)
                part = own.compress.at(place)
                changes: dict[str, Any] = {part.asked: "all"} if ranked else {}
                changes |= {"rank": rank} if rank else {"codec": codec, "options": one.options}
                if place == "data":
                    changes |= {"inside": part.inside, "rank_min": min(rank or part.rank_min, part.rank_min)}
                changed = dataclasses.replace(config, compress=config.compress.changed(**{place: changes}))
                found.append(Variant(f"{place}: {one.label}", f"{one.label}, {WORDS[place]}", changed))
    return found


def _codec(own: Config, place: str, codec: str, rank: int) -> ProbedCodec:
    """Return a codec at a place, before it has losses."""
    part = own.compress.at(place)
    return ProbedCodec(place, codec, (), rank, part.options if part.codec == codec else NO_OPTIONS)


def probed(config: Config, trained: Sequence[Variant], outcomes: list[VariantResult]) -> LossProbe:
    """Return what the runs say. Codecs with which a run diverged are left out.

    Args:
        config: configuration that `settled` returned.
        trained: the variants, dense training first.
        outcomes: results of all runs.

    Raises:
        UserError: dense training diverged, so that nothing can be compared.
    """
    runs, codecs = by_run(outcomes), []
    dense = tuple(outcome.final for outcome in runs[_DENSE])
    if not all(map(math.isfinite, dense)):
        raise UserError(
            f"dense training diverged within {config.run.steps} steps, so there is nothing to compare codecs with; "
            f"a smaller optimizer.learning_rate than {config.optimizer.learning_rate:g} would help"
        )
    for variant in trained[1:]:
        place = variant.name.partition(":")[0]
        part = variant.config.compress.at(place)
        ranked = place in PLACES and part.low_rank
        losses = tuple(x / 100 for x in differences(runs, variant.name, _DENSE))
        if all(map(math.isfinite, losses)):
            codec, rank = (LOW_RANK, part.rank) if ranked else (part.codec, 0)
            codecs.append(ProbedCodec(place, codec, losses, rank, part.options))
    return LossProbe(
        model=dataclasses.asdict(config.model),
        mesh=(config.mesh.data, config.mesh.pipe),
        micro_batch=config.batch.micro_batch,
        steps=config.run.steps,
        tokens=config.batch.global_batch * config.model.sequence,
        seeds=tuple(outcome.seed for outcome in runs[_DENSE]),
        dense=dense,
        codecs=tuple(codecs),
    )


def table(probe: LossProbe, trained: Sequence[Variant]) -> list[list[str]]:
    """Return the table as rows of cells, those with the lowest loss first at each place; the first has the headings.

    Args:
        probe: the losses.
        trained: the variants, of which those without losses diverged.
    """
    cells = [["what", "codec", "loss against dense, %", "standard error", "lowest", "highest"]]
    for place in dict.fromkeys(one.place for one in probe.codecs):
        for one in sorted(probe.at(place), key=lambda one: one.mean):
            found = (one.mean, one.noise, min(one.losses), max(one.losses))
            words = [f"{100 * x:{'.2f' if n == 1 else '+.2f'}}" for n, x in enumerate(found)]
            cells.append([WORDS[place], one.label, *words])
    names = {f"{one.place}: {one.label}" for one in probe.codecs}
    for variant in trained[1:]:
        if variant.name not in names:
            place, _, label = variant.name.partition(": ")
            cells.append([WORDS[place], label, "diverges", "", "", ""])
    return cells


def write(config: Config, trained: Sequence[Variant], outcomes: list[VariantResult], out: pathlib.Path) -> str:
    """Write probe.json and the page, and return the table as Markdown.

    Args:
        config: configuration that `settled` returned.
        trained: the variants, dense training first.
        outcomes: results of all runs.
        out: folder to write to.
    """
    probe = probed(config, trained, outcomes)
    loss_probe_file.save(probe, out / FILE)
    made, m = markdown(table(probe, trained), words=2), config.model
    setting = (
        f"{parameters.published(m):,} parameters ({m.layers} layers of {m.hidden}, {m.dtype}) on a mesh of "
        f"{config.mesh.data} data ranks x {config.mesh.pipe} stages, {config.run.steps} steps of {probe.tokens:,} "
        f"tokens, {len(probe.seeds)} seeds. Losses are validation losses after the last step, against dense training "
        "with the same seed and the same batches. Each codec takes all that is sent at its place, from the first step "
        "on. A short run says little of a long one: the loss still falls quickly here."
    )
    use = (
        f"    {command('planner.plan')} --compress=auto --probe={out / FILE} --loss_budget=0.01 ...\n\n"
        "chooses codecs by these losses. It counts a mean below zero as zero, and adds a standard error."
    )
    (out / PAGE).write_text("\n\n".join(["# What codecs cost on this model", setting, made, use]) + "\n")
    return made
