"""Study what compression does to training: python -m paxtrain.study --out=runs/study [--seeds=3] [--config.x.y=...].

The program trains one model several times, from the same start on the same data, and compresses more of the traffic
each time. It then writes a page with a table, figures and conclusions. One device emulates all devices of the mesh and
computes the same values. Bytes on the wire are read from the step as traced for the real mesh. --frontier and --probe
ask other questions with the same runs.
"""

import dataclasses
import os
import time
from collections.abc import Sequence

import jax
from absl import flags

from paxtrain.command_line import OVERRIDES, define_config, run
from paxtrain.config import Config, from_dict
from paxtrain.config.options import PLACES, PROBED
from paxtrain.errors import UserError, command, whole
from paxtrain.parallel.mesh import MOST_CPU_DEVICES
from paxtrain.study import frontier, loss_probe, plots, report
from paxtrain.study.loss_probe_file import FILE
from paxtrain.study.report import VariantResult
from paxtrain.study.runs import Study
from paxtrain.study.variants import chosen, settled

HINT = OVERRIDES
_RANKS = (4, 8, 16)  # of the study
_LONG = 100  # steps from which the study compares ranks; after fewer, seeds differ by more than ranks
_MODES = ("frontier", "probe")


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("out", "runs/study", "The folder for the page, the figures and the CSV files.")
    description = "Runs of each kind, with the seeds from run.seed on; default: 1, and 3 with --frontier or --probe."
    flags.DEFINE_integer("seeds", None, description, upper_bound=1000)
    description = f"Optimizer steps of each run; default: the configuration's, {frontier.STEPS} with --frontier, "
    description += f"{loss_probe.STEPS} with --probe."
    flags.DEFINE_integer("steps", None, description, lower_bound=1)
    words = [",".join(map(str, ranks)) for ranks in (_RANKS, loss_probe.RANKS)]
    description = "Ranks of compressed backpropagation to compare; default: {} from {} steps on, {} with --probe."
    flags.DEFINE_list("ranks", [], description.format(words[0], _LONG, *words[1:]))
    flags.DEFINE_bool("real_mesh", False, "Train on as many devices as the mesh has, not on one that emulates them.")
    flags.DEFINE_bool("frontier", False, "Compare codecs instead: loss against bytes, on each axis.")
    flags.DEFINE_bool("probe", False, f"Write {FILE} for planner.plan instead: what codecs cost on this model.")
    description = f"Axes of --frontier, of {', '.join(frontier.AXES)}, default: {', '.join(frontier.DEFAULT_AXES)}; "
    description += f"or of --probe, of {', '.join(PROBED)}, default: {', '.join(PLACES)}."
    flags.DEFINE_list("axes", [], description)
    description = "Codecs of --frontier, default: all of the library; or of --probe: "
    description += f"{','.join(loss_probe.CODECS)}. Classes of your own as package.module:Class."
    flags.DEFINE_list("codecs", [], description)
    flags.DEFINE_bool(
        "resume", False, "Take from --out the runs that an earlier start has finished with the same values."
    )
    flags.DEFINE_integer("workers", 3, "Runs at a time; one with --real_mesh.", 1, 1024)
    define_config("config", "study", "The configuration: a file, or the name of one in configs/.")


def _ranks(default: Sequence[int]) -> list[int]:
    """Return the ranks that the flags give, or the default."""
    given = flags.FLAGS.ranks
    if not all(whole(rank) and int(rank) > 0 for rank in given):
        raise UserError(f"--ranks must be numbers from 1 on, joined by commas, got {','.join(given)}")
    return list(map(int, given)) or list(default)


def _given(value: int | None, default: int) -> int:
    """Return a flag's value, or the default."""
    return default if value is None else value


def _trained(study: Study) -> list[VariantResult]:
    """Return the results of a study's runs."""
    study.keep_programs()
    return study.run(1 if flags.FLAGS.real_mesh else flags.FLAGS.workers)


def _frontier(config: Config) -> str:
    """Train codecs on each axis, write the page of the frontier, and return its name."""
    f = flags.FLAGS
    axes, codecs = f.axes or list(frontier.DEFAULT_AXES), f.codecs or list(frontier.CODECS)
    if unknown := [axis for axis in axes if axis not in frontier.AXES]:
        raise UserError(f"--axes must be some of {', '.join(frontier.AXES)}, got {unknown[0]!r}")
    if unknown := [codec for codec in codecs if codec not in frontier.CODECS and ":" not in codec]:
        known = ", ".join(frontier.CODECS)
        raise UserError(f"--codecs must be some of {known}, or classes as package.module:Class, got {unknown[0]!r}")
    others = frontier.variants(settled(config), axes, codecs, _given(f.steps, frontier.STEPS))
    seeds = _given(f.seeds, frontier.SEEDS)
    study = Study(others[0].config, f.out, seeds, others, f.real_mesh, examined=False, resume=f.resume)
    print(frontier.write(study.config, others, _trained(study), study.out))
    return frontier.PAGE


def _probe(own: Config) -> str:
    """Train the probed codecs, write probe.json and its page, and return the page's name."""
    f = flags.FLAGS
    where = loss_probe.places(own, f.axes)
    seeds = _given(f.seeds, loss_probe.SEEDS)
    if seeds < 2:
        raise UserError(f"--seeds must be 2 or more with --probe, since one says nothing of the noise, got {seeds}")
    config = loss_probe.settled(own, _given(f.steps, loss_probe.STEPS))
    ranks = _ranks(loss_probe.RANKS)
    others = loss_probe.variants(config, own, where, f.codecs or loss_probe.CODECS, ranks)
    study = Study(config, f.out, seeds, others, f.real_mesh, examined=False, counted=False, resume=f.resume)
    print(loss_probe.write(config, others, _trained(study), study.out))
    print(f"\nwrote {study.out / FILE}, which {command('planner.plan')} takes as --probe")
    return loss_probe.PAGE


def _study(config: Config) -> str:
    """Train all variants, write the page of the study, and return its name."""
    f = flags.FLAGS
    config = settled(config)
    if f.steps is not None:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=f.steps))
    sweep = _ranks(_RANKS if config.run.steps >= _LONG else ())
    study = Study(config, f.out, _given(f.seeds, 1), chosen(config, sweep), f.real_mesh, resume=f.resume)
    if not sweep:
        print(
            f"other ranks are compared from {_LONG} steps on, or with --ranks={','.join(map(str, _RANKS))}", flush=True
        )
    outcomes = _trained(study)
    report.write_csv(outcomes, study.out)
    figures = plots.draw(study.config, outcomes, study.out)
    report.write_page(study.config, outcomes, figures, study.out)
    print(report.summary(outcomes))
    return report.PAGE


def main(argv: Sequence[str]) -> None:
    """Read the configuration, train all runs and write the page."""
    f = flags.FLAGS
    asked = [name for name in _MODES if f[name].value]
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} are different studies; choose one")
    for name, of in (("axes", ("frontier", "probe")), ("codecs", ("frontier", "probe"))):
        if f[name].value and not set(asked) & set(of):
            raise UserError(f"--{name} is of {' and '.join(f'--{mode}' for mode in of)}; add one of them")
    # On CPUs scipy's OpenBLAS factorises the small matrices; with more threads it would spend its time on waking them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    config = from_dict(f.config)
    if config.init:
        raise UserError(
            f"a study begins with each seed's weights, and the configuration has init={config.init}; leave it out"
        )
    if config.mesh.devices > MOST_CPU_DEVICES:
        raise UserError(
            f"the mesh has {config.mesh.devices:,} devices, and a study traces steps on {MOST_CPU_DEVICES:,} at most; "
            "choose a smaller mesh.data, mesh.pipe or mesh.tensor"
        )
    jax.config.update("jax_num_cpu_devices", config.mesh.devices)
    began = time.perf_counter()
    made = {"frontier": _frontier, "probe": _probe, "": _study}[asked[0] if asked else ""](config)
    print(f"\n{os.path.join(f.out, made)} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
