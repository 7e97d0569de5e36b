"""Constants that planner.validate fitted to measured runs, put in place of a cluster's data sheet shares."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster, Shares, between

# The fitted constants that a plan uses; the others describe the measured system's own program.
_SHARES = {
    "matmul": "compute_efficiency",
    "memory": "memory_efficiency",
    "layer_launch": "layer_launch",
    "backward": "backward_ratio",
    "optimizer_bytes": "optimizer_bytes",
}
_HUGE = 1e100  # above all constants
_LINKS = ("intra_efficiency", "intra_latency", "inter_efficiency", "inter_latency")


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
        value = {key: clusters[name]["constants"][key]["value"] for key in (*_SHARES.values(), *_LINKS)}
    except (KeyError, TypeError) as error:
        raise UserError(
            f"the constants of {name} in {path} lack {error}; fit them anew with planner.validate"
        ) from error
    wrong = [f"{key}={x!r}" for key, x in value.items() if type(x) not in (int, float) or not 0 < x < _HUGE]
    if wrong:
        raise UserError(f"the constants of {name} in {path} must be above 0, got {', '.join(wrong)}; fit them anew")
    value = {key: float(x) for key, x in value.items()}
    apart = between(cluster)
    # Farther hosts are as much farther as before.
    farther = cluster.alpha - cluster.alpha[apart].min(initial=np.inf) if apart.any() else 0.0
    # The fitted model has one share for products of all shapes.
    shares: dict[str, Any] = {ours: value[theirs] for ours, theirs in _SHARES.items()} | {"of_reach": False}
    return dataclasses.replace(
        cluster,
        shares=Shares(**shares),
        alpha=np.where(apart, value["inter_latency"] + farther, value["intra_latency"]),
        samples=cluster.samples * np.where(apart, value["inter_efficiency"], value["intra_efficiency"]),
        source=f"{cluster.source}; constants fitted to {clusters[name].get('rows_fitted', 'measured')} runs of {name}",
    )
