"""The lab: python -m experiments.lab [--experiments=placements,...] [--scenario=two_racks --hosts=8 --steps=20].

Without --scenario the experiments of USUAL run, an hour and a half, one after another, each into a file of raw records;
what has been measured already is not measured again (--fresh forgets it). Then the records are copied beside
docs/results.md, and the page is written. The others, half an hour more, run if they are named:
--experiments=paper,sooner,adaptive. With --scenario one cluster is brought up, profiled, planned for and trained on,
plan after plan, and the plans are compared.
"""

import os
import pathlib
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Sequence

import jax
from absl import flags

from experiments.hosts import hosts, scenario
from experiments.lab import records
from experiments.lab.laboratory import Lab
from experiments.lab.measuring import (
    adaptive,
    compression,
    demonstration,
    growth,
    links,
    paper,
    peer,
    placements,
    schedules,
    sooner,
)
from experiments.lab.page import results
from experiments.lab.session import SessionError
from paxtrain.command_line import run
from paxtrain.errors import UserError, command
from paxtrain.run import checkpoint

# Records by experiment.
FILES = {
    "links": ("links",),
    "growth": ("growth",),
    "schedules": ("schedules",),
    "placements": ("placements", "joint"),
    "compression": ("compression",),
    "paper": ("paper",),
    "sooner": ("sooner",),
    "adaptive": ("adaptive",),
    "peer": ("peer",),
}
# In the order in which they run, with about how many seconds each takes.
EXPERIMENTS = {
    "links": (links.run, 50),
    "growth": (growth.run, 70),
    "schedules": (schedules.run, 430),
    "placements": (placements.run, 2050),
    "compression": (compression.run, 1700),
    "paper": (paper.run, 760),
    "sooner": (sooner.run, 560),
    "adaptive": (adaptive.run, 600),
    "peer": (peer.run, 900),
}
BUDGET = 5400.0  # seconds, of which USUAL takes no more
LATER = ("paper", "sooner", "adaptive")  # run if they are named
USUAL = tuple(name for name in EXPERIMENTS if name not in LATER)


_RESTARTS = 2  # of an experiment whose session broke
_WORK = 10.0  # seconds: what takes less has found its records


def _begun(lab: Lab, name: str) -> bool:
    """Return whether there are records of an experiment."""
    return any((lab.out / f"{file}.jsonl").exists() for file in FILES[name])


def _check_seed(lab: Lab) -> None:
    """Raise UserError if records in the folder were made with another seed."""
    for line in lab.records(records.ENVIRONMENTS):
        if line["seed"] != lab.seed and _begun(lab, line["key"]):
            raise UserError(
                f"{lab.out} holds records of --seed={line['seed']}, got --seed={lab.seed}; name another --out, or "
                "forget all of them with --fresh"
            )


def _note_environment(lab: Lab, name: str) -> None:
    """Record on which machine an experiment is run; the date of earlier records stays in front."""
    environments = lab.records(records.ENVIRONMENTS)
    today = time.strftime("%Y-%m-%d")
    first = environments[name]["date"].partition(" to ")[0] if name in environments and _begun(lab, name) else today
    environment = {
        "date": today if first == today else f"{first} to {today}",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "repeats": lab.repeats,
        "seed": lab.seed,
    }
    environments.add(name, **environment)


def _data(prefix: str) -> None:
    if missing := [name for name in ("train", "validation") if not pathlib.Path(f"{prefix}/{name}.idx").exists()]:
        raise UserError(
            f"there is no {missing[0]}.idx in --data={prefix}; make it: {command('paxtrain.prepare')} "
            f"--input=stdlib --out={prefix}"
        )


def _insist(lab: Lab, experiment: Callable[[Lab], None]) -> list[str]:
    """Run an experiment, and the rest of it again if a session breaks: a collective of gloo's fails now and then.

    Returns:
        Why sessions broke.
    """
    broken: list[str] = []
    while True:
        try:
            experiment(lab)
            return broken
        except SessionError as error:
            if len(broken) == _RESTARTS:
                raise
            lab.say(f"again, for {error}")
            broken.append(str(error))


def estimate(names: Iterable[str]) -> float:
    """Return about how many seconds experiments take."""
    return sum(EXPERIMENTS[name][1] for name in names)


def main(argv: Sequence[str]) -> None:
    """Run the experiments that the flags name, and write the page."""
    f = flags.FLAGS
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; experiments are named with --experiments=NAME,...")
    unknown = [name for name in f.experiments if name not in EXPERIMENTS]
    if unknown:
        raise UserError(f"--experiments={unknown[0]} is unknown; known are {', '.join(EXPERIMENTS)}")
    _data(f.data)
    out = pathlib.Path(f.out)
    checkpoint.ensure_writable(out)
    names = [name for name in EXPERIMENTS if name in (f.experiments or USUAL)]
    lab = Lab(out, f.data, f.repeats, f.budget or max(BUDGET, estimate(names)), f.seed)
    if reason := hosts.why_not():
        print(f"this machine cannot be a cluster with slow links: {reason}; hosts are plain processes", flush=True)
    if f.scenario:
        demonstration.run(lab, scenario.load(f.scenario, f.hosts, f.seed), f.steps)
        return
    if reason:
        raise UserError(f"the experiments need links of chosen rates, and {reason}; --scenario=uniform runs without")
    chosen = {name: EXPERIMENTS[name] for name in names}
    forgotten = [file for name in f.experiments or EXPERIMENTS for file in FILES[name]] if f.fresh else []
    for file in forgotten if f.experiments else [path.stem for path in out.glob("*.jsonl") if f.fresh]:
        (out / f"{file}.jsonl").unlink(missing_ok=True)
    if f.fresh:
        shutil.rmtree(out / "logs", ignore_errors=True)
    _check_seed(lab)
    rest = estimate(chosen)
    lab.say(f"{', '.join(chosen)}: about {rest / 60:.0f} minutes of a budget of {lab.budget / 60:.0f}")
    try:
        for name, (experiment, seconds) in chosen.items():
            lab.plan_for(rest)
            rest -= seconds
            lab.say(f"{name}: {lab.repeats} repeats, about {seconds / 60:.0f} minutes")
            began = time.monotonic()
            if not _begun(lab, name):
                _note_environment(lab, name)
            broken = _insist(lab, experiment)
            if (taken := time.monotonic() - began) > _WORK:
                _note_environment(lab, name)
                lab.records(records.TIMES).add(name, seconds=taken, broken=broken)
    finally:  # what there is of it where one has failed
        published = results.folder(pathlib.Path(f.page))
        records.publish(out, published)
        results.write(published, pathlib.Path(f.page))
        lab.say(f"wrote {f.page}")
    if not f.experiments:
        others = ",".join(LATER)
        lab.say(f"left out: {others}; --experiments={others} runs them, in {estimate(LATER) / 60:.0f} minutes")


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_list(
        "experiments",
        [],
        f"Some of {', '.join(EXPERIMENTS)}; if empty, all but {', '.join(LATER)}: an hour and a half.",
    )
    flags.DEFINE_string("scenario", None, "One cluster instead: a scenario by name, or a JSON file.")
    flags.DEFINE_integer("hosts", 8, "With --scenario: how many.", lower_bound=2, upper_bound=16)
    flags.DEFINE_integer("steps", 20, "With --scenario: of training under each plan.", lower_bound=2)
    flags.DEFINE_string("out", "runs/lab", "Folder of records, logs and compiled programs.")
    flags.DEFINE_string("page", "docs/results.md", "The page that is written, figures beside it.")
    flags.DEFINE_string("data", "runs/data", "Folder of paxtrain.prepare's token files.")
    flags.DEFINE_integer("repeats", 5, "Of every measured time; cut first where time is short.", lower_bound=1)
    flags.DEFINE_float(
        "budget",
        None,
        "Seconds for all of it; if not given, an hour and a half, or more for named experiments.",
        lower_bound=1,
    )
    flags.DEFINE_integer("seed", 0, "Of rates, orders and data.", lower_bound=0)
    flags.DEFINE_bool("fresh", False, "Forget the records of the named experiments, or all, first.")


if __name__ == "__main__":
    run(main, define_flags)
