"""Constants that planner.validate fitted to measured runs, put in place of a cluster's data sheet shares."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.cluster import ASSUMED, PAXTRAIN, Cluster, Shares, TrainerExecution, between
from planner.fit.constants import CONSTANTS
from planner.runs.trainers import TRAINERS

# The fitted constants that price layers.
SHARES = tuple(field.name for field in dataclasses.fields(Shares) if field.name not in ("stored_scores", "eager"))
LINKS = ("intra_efficiency", "intra_latency", "inter_efficiency", "inter_latency", "spread")
# Those of how a trainer sends messages, which a plan uses if the runs were of the trainer that it is for.
EXECUTED = ("crossing_launch", "message_seconds", "buckets", "hop_ratio", "data_ratio", "tied_ratio")
STALL = "stall_seconds"
OF_CLUSTERS = tuple(c.name for c in CONSTANTS if c.owner == "cluster" and c.name in SHARES)
_HUGE = 1e100  # above all constants


def fitted_shares(
    values: Mapping[str, Any], speed: Any = 1.0, stored_scores: bool = False, eager: bool = False
) -> Shares:
    """Return fitted shares of data sheets.

    Args:
        values: fitted constants by name.
        speed: speed of a device kind over its data sheet's.
        stored_scores: see Shares.
        eager: see Shares.
    """
    shares: dict[str, float] = {name: values[name] for name in SHARES}
    shares |= {name: speed * values[name] for name in ("matmul", "memory")}
    return Shares(**shares, stored_scores=stored_scores, eager=eager)


def fitted_links(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Return a cluster with fitted latencies and shares of its nominal link rates; farther hosts stay as much farther.

    Args:
        cluster: cluster with one nominal bandwidth per link.
        values: fitted constants by name.
    """
    apart = between(cluster)
    shared = values["inter_efficiency"] * len(cluster.hosts) ** -values["spread"]
    farther = cluster.alpha - cluster.alpha[apart].min(initial=np.inf) if apart.any() else 0.0
    return dataclasses.replace(
        cluster,
        alpha=np.where(apart, values["inter_latency"] + farther, values["intra_latency"]),
        samples=cluster.samples * np.where(apart, shared, values["intra_efficiency"]),
        nominal=(),
    )


def profile(trainer: str) -> dict[str, float]:
    """Return a trainer's constants: what published runs say of it, else what is typical of any.

    Args:
        trainer: one of planner/runs/trainers.py.
    """
    typical = {constant.name: constant.typical for constant in CONSTANTS}
    # Devices reach what they are known to reach, unless the trainer's own runs say otherwise.
    typical |= {"matmul": ASSUMED.matmul, "memory": ASSUMED.memory}
    return typical | {name: value for name, (value, _) in TRAINERS[trainer].published.items()}


def profile_source(trainer: str) -> str:
    """Return where a trainer's constants are from, in words for reports.

    Args:
        trainer: one of planner/runs/trainers.py.
    """
    known = ", ".join(TRAINERS[trainer].published)
    return f"{known} from published runs, others as typical of any" if known else "as typical of any, none published"


def run_by(cluster: Cluster, values: Mapping[str, float], trainer: str) -> Cluster:
    """Return a cluster whose plans another trainer runs.

    Args:
        cluster: the cluster, whose rates stay.
        values: constants by name.
        trainer: one of planner/runs/trainers.py.
    """
    facts = TRAINERS[trainer]
    own = {name: values[name] for name in EXECUTED}
    execution = TrainerExecution(
        trainer,
        rows=False,
        overlaps=facts.overlaps,
        whole_tables=True,
        stalls=facts.stalls,
        stall_seconds=values[STALL],
        **own,
    )
    shares = fitted_shares(values, stored_scores=not facts.flash, eager=facts.eager)
    return dataclasses.replace(cluster, shares=shares, execution=execution, host_seconds=values["host_seconds"])


def priced(cluster: Cluster, trainer: str) -> Cluster:
    """Return a cluster as a trainer's plans are priced on it.

    Args:
        cluster: the cluster; constants that were fitted to runs stay.
        trainer: paxtrain, or one of planner/runs/trainers.py.

    Raises:
        UserError: the cluster has CPUs, for which no other trainer is known.
    """
    if trainer == cluster.execution.trainer:
        return cluster
    if "cpu" in cluster.kinds:
        raise UserError(
            f"--trainer={trainer} trains on GPUs, and {cluster.name} has CPUs; leave --trainer out, or name a cluster "
            "of GPUs"
        )
    values = profile(trainer)
    if cluster.shares != ASSUMED:
        values |= {name: getattr(cluster.shares, name) for name in OF_CLUSTERS}
    # A compute profile has the times of this trainer's programs.
    return run_by(dataclasses.replace(cluster, compute=()), values, trainer)


def recalibrated(
    cluster: Cluster, path: str | pathlib.Path, name: str = "", trainer: str = PAXTRAIN.trainer
) -> Cluster:
    """Return the cluster with fitted shares of its data sheets and of its nominal link rates.

    Of runs of a known trainer, another one takes what is the cluster's alone.

    Args:
        cluster: a cluster with one nominal bandwidth per link and without a compute profile.
        path: constants.json of planner.validate.
        name: name of the fitted cluster; may be empty if the file has only one.
        trainer: who is to run the plan; paxtrain also takes what runs of an unknown trainer say.

    Raises:
        UserError: the file cannot be read, lacks the cluster or a constant, or the given cluster was measured.
    """
    if cluster.compute or len(cluster.samples) > 1:
        raise UserError(
            f"cluster {cluster.name} was measured, which constants fitted to runs would contradict; leave --constants "
            "out, or give a cluster file with one nominal bandwidth per link and without a compute profile"
        )
    try:
        clusters = json.loads(pathlib.Path(path).read_text())["clusters"]
        names = list(clusters.keys())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"cannot read the constants {path} ({error!r}); name a constants.json of planner.validate"
        ) from error
    if not name and len(names) == 1:
        [name] = names
    if name not in names:
        raise UserError(f"--constants_of must be one of {', '.join(names)}, which {path} has, got {name!r}")
    made_by = clusters[name].get("trainer", "") if isinstance(clusters[name], dict) else ""
    own = made_by == trainer
    used = (*SHARES, *LINKS, "host_seconds", *((*EXECUTED, STALL) if own else ()))
    try:
        value = {key: clusters[name]["constants"][key]["value"] for key in used}
        others = {key: entry["value"] for key, entry in clusters[name]["constants"].items() if key not in used}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the constants of {name} in {path} lack {error}; fit them anew with planner.validate"
        ) from error
    wrong = [f"{key}={x!r}" for key, x in value.items() if type(x) not in (int, float) or not 0 < x < _HUGE]
    # Those that this trainer's plans do not use may be 0.
    wrong += [f"{key}={x!r}" for key, x in others.items() if type(x) not in (int, float) or not 0 <= x < _HUGE]
    if wrong:
        raise UserError(f"the constants of {name} in {path} must be above 0, got {', '.join(wrong)}; fit them anew")
    value = {key: float(x) for key, x in value.items()}
    rows = clusters[name].get("rows_fitted", "measured")
    entries = {key: entry for key, entry in clusters[name]["constants"].items() if key in value}
    deviations = {key: entry["deviation"] for key, entry in entries.items() if "deviation" in entry}
    if any(type(x) not in (int, float) or not 0 <= x < _HUGE for x in deviations.values()):
        raise UserError(f"the deviations of {name} in {path} must be numbers from 0 on; fit them anew")
    found = dataclasses.replace(
        fitted_links(cluster, value),
        source=f"{cluster.source}; constants fitted to {rows} runs of {name}",
        deviations=deviations,
    )
    if own:
        return run_by(found, value, trainer)
    if trainer == PAXTRAIN.trainer and not made_by:
        return dataclasses.replace(found, shares=fitted_shares(value), host_seconds=value["host_seconds"])
    return dataclasses.replace(found, shares=dataclasses.replace(ASSUMED, **{key: value[key] for key in OF_CLUSTERS}))
