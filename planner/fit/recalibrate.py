"""Takes constants that planner.validate has fitted to measured runs into a cluster that is known by its data sheets."""

import dataclasses
import json
import math
import pathlib

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster, Shares, between

# What of a cluster's fitted constants a plan goes by; the rest belongs to the measured system's own program.
_SHARES = {
    "matmul": "compute_efficiency",
    "memory": "memory_efficiency",
    "layer_launch": "layer_launch",
    "backward": "backward_ratio",
    "optimizer_bytes": "optimizer_bytes",
}
_LINKS = ("intra_efficiency", "intra_latency", "inter_efficiency", "inter_latency")


def recalibrated(cluster: Cluster, path: str | pathlib.Path, name: str = "") -> Cluster:
    """The cluster with constants that were fitted to runs on its like: shares of data sheet and nominal link rates.

    Args:
        path: constants.json of planner.validate.
        name: of the fitted cluster; may be left out where there is one.

    Raises:
        UserError: the file cannot be read, does not have the cluster or all constants, or this cluster was measured.
    """
    if cluster.compute or len(cluster.samples) > 1:
        raise UserError(
            f"cluster {cluster.name} was measured, which constants fitted to runs would contradict; leave --constants "
            "out, or give a cluster file with one nominal bandwidth per link and without a compute profile"
        )
    try:
        clusters = json.loads(pathlib.Path(path).read_text())["clusters"]
        names = list(clusters.keys())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read the constants {path} ({error!r}); name a constants.json of planner.validate"
        ) from error
    if not name and len(names) == 1:
        [name] = names
    if name not in names:
        raise UserError(f"--constants_of must be one of {', '.join(names)}, which {path} has, got {name!r}")
    try:
        value = {key: float(clusters[name]["constants"][key]["value"]) for key in (*_SHARES.values(), *_LINKS)}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the constants of {name} in {path} lack {error}; fit them anew with planner.validate"
        ) from error
    wrong = [f"{key}={x:g}" for key, x in value.items() if not (math.isfinite(x) and x > 0)]
    if wrong:
        raise UserError(f"the constants of {name} in {path} must be above 0, got {', '.join(wrong)}; fit them anew")
    apart = between(cluster)
    return dataclasses.replace(
        cluster,
        shares=Shares(**{ours: value[theirs] for ours, theirs in _SHARES.items()}),
        alpha=np.where(apart, value["inter_latency"], value["intra_latency"]),
        samples=cluster.samples * np.where(apart, value["inter_efficiency"], value["intra_efficiency"]),
        source=f"{cluster.source}; constants fitted to {clusters[name].get('rows_fitted', 'measured')} runs of {name}",
    )
