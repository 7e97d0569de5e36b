"""The record of a planned run: rows for planner.validate, and a correction for later plans of the same folder.

trials.csv         a row for each start that was timed, as planner/fit/trials.py describes them, with the predicted
                   and the measured seconds of each term in further columns
corrections.json   the factor by which compute takes longer than its profile says, with its standard error
"""

import csv
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from paxtrain import files
from paxtrain.config import Config
from paxtrain.config.plan import COMPUTE, OPTIMIZER
from paxtrain.profiling.terms import StepComparison
from planner.cluster.cluster import Cluster
from planner.cost.compute import PARTS, TIMES
from planner.fit import trials
from planner.measure.machines import Machines

TRIALS, CORRECTIONS = "trials.csv", "corrections.json"
_RECOMPUTES = ("inputs", "layer_inputs")  # save modes whose backward runs the layers' forward again


def _row(config: Config, machines: Machines, found: StepComparison) -> dict[str, object]:
    """Return the row of a start; links between hosts differ, so none is named."""
    m, mesh, batch = config.model, config.mesh, config.batch
    row: dict[str, object] = {
        "cluster": pathlib.Path(config.run.out).name,
        "devices": mesh.devices,
        "devices_per_host": machines.per_host,
        "device_kinds": ";".join(machines.kinds),
        "hidden": m.hidden,
        "heads": m.heads,
        "layers": m.layers,
        "seq": m.sequence,
        "vocab": m.vocab_size,
        "global_batch": batch.global_batch,
        "micro_batch": batch.micro_batch,
        "tp": mesh.tensor,
        "dp": mesh.data,
        "pp": mesh.pipe,
        "recompute": int(config.pipeline.save in _RECOMPUTES),
        "dtype": m.dtype,
        "seconds": f"{found.measured:.6g}",
        "schedule": config.pipeline.schedule,
        "steps": found.steps,
    }
    return row | {name: f"{value:.6g}" for name, value in found.figures().items()}


def _former(path: pathlib.Path) -> list[dict[str, str]]:
    try:
        with open(path, newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error):  # a record that is lost costs no training
        return []


def read_correction(out: pathlib.Path) -> tuple[float, float]:
    """Return by which factor compute takes longer than profiled, and its standard error; 1 and 0 without a record."""
    try:
        told = json.loads((out / CORRECTIONS).read_text())[COMPUTE]
        factor, error = float(told["factor"]), float(told["error"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 1.0, 0.0
    known = math.isfinite(factor) and 0.01 < factor < 100 and math.isfinite(error)
    return (factor, error) if known else (1.0, 0.0)


def corrected(cluster: Cluster, out: pathlib.Path) -> tuple[Cluster, dict[str, Any]]:
    """Return the cluster with its compute profile corrected by what a run in the folder measured, and what was done.

    A factor within two standard errors of 1 corrects nothing.

    Args:
        cluster: profiled cluster.
        out: folder of the run.
    """
    factor, error = read_correction(out)
    if abs(factor - 1) <= 2 * error or not cluster.compute:
        return cluster, {}

    def scaled(row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value * factor if key in (*TIMES, *PARTS) else value for key, value in row.items()}

    rows = tuple(map(scaled, cluster.compute))
    source = f"{cluster.source}; compute x {factor:.3g} +- {error:.2g}, as the run in {out} measured"
    return dataclasses.replace(cluster, compute=rows, source=source), {"correction": {COMPUTE: factor}}


def record(out: pathlib.Path, config: Config, machines: Machines, found: StepComparison, correction: object) -> None:
    """Add a start to the folder's record.

    Args:
        out: folder of the run.
        config: its configuration, with the plan's sections.
        machines: its nodes.
        found: its prediction and measurement.
        correction: the correction that its plan was made with, as `corrected` told it; None: it had none.
    """
    rows: list[dict[str, Any]] = [*_former(out / TRIALS), _row(config, machines, found)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [{name: row.get(name, "") for name in columns} for row in rows]
    trials.write(out / TRIALS, table)
    if COMPUTE not in found.terms:
        return
    (planned, measured), (update, updated) = (found.terms[name] for name in (COMPUTE, OPTIMIZER))
    ratios = (measured + updated) / (planned + update)
    made_with = correction.get(COMPUTE, 1.0) if isinstance(correction, dict) else 1.0
    factor = float(np.mean(measured + updated) / np.mean(planned + update)) * made_with
    # Stages and devices that differ from each other, and steps that do, say how much it is to be trusted.
    error = factor * math.hypot(float(np.std(ratios)) / math.sqrt(len(ratios)), found.spread)
    files.write(out / CORRECTIONS, json.dumps({COMPUTE: {"factor": factor, "error": error}}) + "\n")
