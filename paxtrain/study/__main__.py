"""Study what compression does to training: python -m paxtrain.study --out=runs/study [--seeds=3] [--config.x.y=...].

The program trains one model several times, from the same start on the same data, and compresses more of the traffic
each time. It then writes a page with a table, figures and conclusions. One device emulates all devices of the mesh and
computes the same values. Bytes on the wire are read from the step compiled for the real mesh.
"""

import dataclasses
import os
import time
from collections.abc import Sequence

import jax
from absl import flags

from paxtrain import flags as shared_flags
from paxtrain.command_line import OVERRIDES, run
from paxtrain.config import Config, from_dict
from paxtrain.errors import UserError, whole
from paxtrain.study import frontier, plots, report
from paxtrain.study.runs import Study
from paxtrain.study.variants import settled

HINT = OVERRIDES
_STEPS, _SEEDS = 100, 3  # of the frontier


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("out", "runs/study", "The folder for the page, the figures and the CSV files.")
    description = "Runs of each kind, with the seeds from run.seed on; default: 1, and 3 with --frontier."
    flags.DEFINE_integer("seeds", None, description)
    description = "Optimizer steps of each run; default: the configuration's, and 100 with --frontier."
    flags.DEFINE_integer("steps", None, description)
    flags.DEFINE_list("ranks", ["4", "8", "16"], "Ranks of compressed backpropagation to compare.")
    flags.DEFINE_bool("real_mesh", False, "Train on as many devices as the mesh has, not on one that emulates them.")
    flags.DEFINE_bool("frontier", False, "Compare all codecs of the library instead: loss against bytes, on each axis.")
    flags.DEFINE_list("axes", list(frontier.AXES), "Axes of --frontier: between stages, over data, or both.")
    flags.DEFINE_list("codecs", list(frontier.CODECS), "Codecs of --frontier.")
    flags.DEFINE_integer("workers", 2, "Runs at a time; one with --real_mesh.", lower_bound=1)
    shared_flags.define_config("config", "study", "The configuration: a file, or the name of one in configs/.")


def _frontier(config: Config, began: float) -> None:
    """Train all codecs of the library, and write the page of the frontier."""
    f = flags.FLAGS
    for name, given, known in (("axes", f.axes, frontier.AXES), ("codecs", f.codecs, frontier.CODECS)):
        if unknown := [value for value in given if value not in known]:
            raise UserError(f"--{name} must be some of {', '.join(known)}, got {unknown[0]!r}")
    seeds = _SEEDS if f.seeds is None else f.seeds
    study = Study(config, f.out, seeds, (), f.real_mesh, others=frontier.variants(config, f.axes, f.codecs))
    outcomes = study.run(1 if f.real_mesh else f.workers)
    print(frontier.write(study.config, outcomes, study.out))
    print(f"\n{study.out / frontier.PAGE} after {time.perf_counter() - began:.0f} s")


def main(argv: Sequence[str]) -> None:
    """Read the configuration, train all runs and write the page."""
    f = flags.FLAGS
    if not all(whole(rank) for rank in f.ranks):
        raise UserError(f"--ranks must be numbers joined by commas, got {','.join(f.ranks)}")
    # On CPUs scipy's OpenBLAS factorises the small matrices; with more threads it would spend its time on waking them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    config = settled(from_dict(f.config))
    steps = (_STEPS if f.frontier else None) if f.steps is None else f.steps
    if steps is not None:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=steps))
    jax.config.update("jax_num_cpu_devices", config.mesh.devices)
    began = time.perf_counter()
    if f.frontier:
        _frontier(config, began)
        return
    seeds = 1 if f.seeds is None else f.seeds
    study = Study(config, f.out, seeds, list(map(int, f.ranks)), f.real_mesh)
    outcomes = study.run(1 if f.real_mesh else f.workers)
    report.write_csv(outcomes, study.out)
    figures = plots.draw(study.config, outcomes, study.out)
    report.write_page(study.config, outcomes, figures, study.out)
    print(report.summary(outcomes))
    print(f"\n{study.out / report.PAGE} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
