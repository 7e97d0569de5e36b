"""The runs to make next on a cluster, in words and as rows of the table of runs."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError, command
from planner.cluster.cluster import Cluster
from planner.fit import design, fitting
from planner.fit.calibration import Calibration
from planner.fit.layouts import layouts
from planner.runs.trials import Trial

_SHARE = 4  # a run takes one of so many parts of the hosts at most


def _label(trial: Trial) -> str:
    sharded = ", ZeRO-1" if trial.sharding == "zero1" else ""
    return (
        f"{trial.hosts} host{'s' * (trial.hosts > 1)}, data {trial.dp} x pipe {trial.pp} x tensor {trial.tp}, "
        f"micro-batch {trial.micro_batch}, batch {trial.global_batch}{sharded}"
    )


def _fitting(calibration: Calibration, some: Sequence[Trial]) -> list[Trial]:
    """Return the layouts that are likely to fit into memory."""
    return [trial for trial, chance in zip(some, calibration.fits(some)) if chance >= 0.5]


def proposals(
    cluster: Cluster, model: ModelConfig, trainer: str, batch: int, measured: Sequence[Trial], number: int
) -> tuple[list[str], list[Trial], list[float]]:
    """Return what is told, the runs to make next, and the regrets expected before the first and after each.

    Args:
        cluster: the cluster.
        model: model that is trained.
        trainer: who runs it, one of planner/runs/trainers.py.
        batch: sequences of a step on all hosts.
        measured: runs so far.
        number: runs to propose at most.

    Raises:
        UserError: nothing fits into memory, or no layout divides the model.
    """
    hosts = len(cluster.hosts)
    plans = layouts(cluster, model, trainer, hosts, batch)
    smaller = [n for n in (2**i for i in range(12)) if n <= max(hosts // _SHARE, 1)]
    runs = [trial for n in smaller for trial in layouts(cluster, model, trainer, n, max(batch * n // hosts, 1))]
    known = [trial for trial in measured if trial.seconds is not None and not trial.beyond]
    found = fitting.fit(known, [*known, *plans])
    plans, runs = _fitting(found, plans), _fitting(found, runs)
    if not plans:
        raise UserError(
            f"no layout of the model fits the memory of {cluster.name}; {command('planner.memory')} says what would"
        )
    done = {dataclasses.replace(trial, seconds=None, memory=None, failed=False) for trial in measured}
    runs = [trial for trial in runs if trial not in done]
    forecast = found.forecast(plans)
    best = int(np.argmin(forecast.chosen_by))
    belief = design.belief(found, plans, runs, known)
    regret = belief.regrets()[0]
    lines = [
        f"{len(known)} measured runs; best of {len(plans)} layouts on {hosts} hosts: {_label(plans[best])}",
        f"it takes {forecast.seconds[best]:.4g} s a step, {forecast.low[best]:.4g} to {forecast.high[best]:.4g} s with "
        f"80%; the true best is expected to be {regret:.1%} quicker",
    ]
    proposed = design.propose(belief, np.array([trial.hosts for trial in runs], float), number)
    if not proposed:
        lines.append("more runs would not pay")
    for i, one in enumerate(proposed, 1):
        lines.append(f"run {i}: {_label(runs[one.run])}; expected loss {one.before:.1%}, then {one.after:.1%}")
    return lines, [runs[one.run] for one in proposed], [regret, *(one.after for one in proposed)]
