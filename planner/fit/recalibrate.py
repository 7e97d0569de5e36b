"""Constants that planner.validate fitted to measured runs, put in place of a cluster's data sheet shares."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster, Shares, between

# The fitted constants that a plan uses; the ratios describe the measured system's own messages.
SHARES = tuple(field.name for field in dataclasses.fields(Shares) if field.name not in ("stored_scores", "eager"))
LINKS = ("intra_efficiency", "intra_latency", "inter_efficiency", "inter_latency", "spread")
_HUGE = 1e100  # above all constants


def fitted_shares(
    values: Mapping[str, float], speed: float = 1.0, stored_scores: bool = False, eager: bool = False
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
    )


def recalibrated(cluster: Cluster, path: str | pathlib.Path, name: str = "") -> Cluster:
    """Return the cluster with fitted shares of its data sheets and of its nominal link rates.

    Args:
        cluster: a cluster with one nominal bandwidth per link and without a compute profile.
        path: constants.json of planner.validate.
        name: name of the fitted cluster; may be empty if the file has only one.

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
    try:
        value = {key: clusters[name]["constants"][key]["value"] for key in (*SHARES, *LINKS, "host_seconds")}
    except (KeyError, TypeError) as error:
        raise UserError(
            f"the constants of {name} in {path} lack {error}; fit them anew with planner.validate"
        ) from error
    wrong = [f"{key}={x!r}" for key, x in value.items() if type(x) not in (int, float) or not 0 < x < _HUGE]
    if wrong:
        raise UserError(f"the constants of {name} in {path} must be above 0, got {', '.join(wrong)}; fit them anew")
    value = {key: float(x) for key, x in value.items()}
    return dataclasses.replace(
        fitted_links(cluster, value),
        shares=fitted_shares(value),
        host_seconds=value["host_seconds"],
        source=f"{cluster.source}; constants fitted to {clusters[name].get('rows_fitted', 'measured')} runs of {name}",
    )
