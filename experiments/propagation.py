"""Lazy error propagation, with it and without, at several ranks: python -m experiments.propagation --out=runs/lep.

It writes lep.csv and lep.md. All gradients between stages are compressed; everything else is dense. Runs of a seed
begin alike and see the same batches, so they are compared pair by pair.
"""

import csv
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from absl import flags

from paxtrain import flags as shared_flags
from paxtrain.command_line import OVERRIDES, run
from paxtrain.config import Config, from_dict
from paxtrain.model import parameters
from paxtrain.study.report import VariantResult, by_run, differences, effect, markdown
from paxtrain.study.runs import Study
from paxtrain.study.variants import Variant, bare, settled, shortened

HINT = OVERRIDES
PAGE = "lep.md"
RANKS = (2, 4, 8)
STEPS, SEEDS = 60, 3
_DENSE = "dense"
_KINDS = {"lazy": "with", "none": "without"}  # by compress.error


def variants(config: Config, ranks: Sequence[int], steps: int) -> list[Variant]:
    """Return dense training, and compressed training with lazy error propagation and without at each rank.

    Args:
        config: configuration of the study.
        ranks: ranks of the gradients between stages.
        steps: optimizer steps of each run, over which the learning rate falls.
    """
    config = shortened(config, steps)
    c = bare(config.compress).changed(embedding={"sync": "auto"}, backward={"ranks": ""})
    config = dataclasses.replace(config, compress=c)
    found = [Variant(_DENSE, _DENSE, config)]
    for rank in dict.fromkeys(ranks):
        for error, word in _KINDS.items():
            compressed = c.changed(backward={"messages": "all", "rank": rank}, error=error)
            changed = dataclasses.replace(config, compress=compressed)
            found.append(Variant(f"{rank} {error}", f"rank {rank} {word}", changed))
    return found


def _ranks(runs: dict[str, list[VariantResult]]) -> list[int]:
    """Return the ranks that were trained, rising."""
    return sorted({int(name.partition(" ")[0]) for name in runs if name != _DENSE})


def _percents(values: Sequence[float]) -> str:
    """Return a mean with the lowest and the highest value."""
    return f"{statistics.fmean(values):+.2f} ({min(values):+.2f} to {max(values):+.2f})"


def table(outcomes: list[VariantResult]) -> list[list[str]]:
    """Return the table as rows of cells; the first row has the headings."""
    runs = by_run(outcomes)
    cells = [["rank", "without, against dense, %", "with, against dense, %", "with against without, %"]]
    for rank in _ranks(runs):
        lazy, none = f"{rank} lazy", f"{rank} none"
        found = (differences(runs, none), differences(runs, lazy), differences(runs, lazy, none))
        cells.append([str(rank), *map(_percents, found)])
    return cells


def sentences(outcomes: list[VariantResult]) -> list[str]:
    """Return for each rank whether the propagation lowers the loss."""
    runs = by_run(outcomes)
    return [
        effect(f"At rank {rank} lazy error propagation", differences(runs, f"{rank} lazy", f"{rank} none"))
        for rank in _ranks(runs)
    ]


def write(config: Config, outcomes: list[VariantResult], out: pathlib.Path) -> str:
    """Write lep.csv and the page, and return the table and the sentences as Markdown.

    Args:
        config: configuration of the runs.
        outcomes: results of all runs.
        out: folder to write to.
    """
    runs = by_run(outcomes)
    with (out / "lep.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "seed", "validation_loss", "percent_above_dense"])
        for name, group in runs.items():
            for outcome, percent in zip(group, differences(runs, name), strict=True):
                writer.writerow([name, outcome.seed, f"{outcome.final:.7g}", f"{percent:.5g}"])
    made = "\n\n".join([markdown(table(outcomes)), "\n".join(f"- {one}" for one in sentences(outcomes))])
    m, seeds = config.model, len(runs[_DENSE])
    setting = (
        f"A GPT of {parameters.published(m):,} parameters ({m.layers} layers of {m.hidden}) on a mesh of "
        f"{config.mesh.data} data ranks x {config.mesh.pipe} stages, {config.run.steps} steps of "
        f"{config.batch.global_batch * m.sequence:,} tokens, {seeds} seed{'s' if seeds > 1 else ''}: mean, lowest and "
        "highest of the validation loss after the last step, with the same seed on both sides. All gradients between "
        "stages travel with the rank."
    )
    (out / PAGE).write_text("\n\n".join(["# Lazy error propagation", setting, made]) + "\n")
    return made


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("out", "runs/lep", "The folder for the page and the CSV file.")
    shared_flags.define_config("config", "study", "The configuration: a file, or the name of one in configs/.")


def main(_: Sequence[str]) -> None:
    """Train with lazy error propagation and without, and write the page."""
    made = variants(settled(from_dict(flags.FLAGS.config)), RANKS, STEPS)
    study = Study(made[0].config, flags.FLAGS.out, SEEDS, made, real_mesh=False, examined=False, counted=False)
    study.keep_programs()
    print(write(study.config, study.run(workers=3), study.out))


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
