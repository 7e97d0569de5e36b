"""The record of a planned run: rows for planner.validate, and a correction for later plans of the same folder.

trials.csv         a row for each start that was timed, as planner/fit/trials.py describes them, with the predicted
                   and the measured seconds of each term in further columns
corrections.json   for each kind of work that is profiled, the factor by which it takes longer than its profile says,
                   with the factor's standard error
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
from paxtrain.config.plan import BACKWARD, FORWARD, HEAD, OPTIMIZER
from paxtrain.profiling.terms import StepComparison
from planner.cluster.cluster import Cluster
from planner.cost.compute import PARTS
from planner.fit import trials
from planner.measure.machines import Machines

TRIALS, CORRECTIONS = "trials.csv", "corrections.json"
# Columns of the compute profile that a term's factor corrects; it has no time of the embedding's of its own.
_CORRECTED = {
    FORWARD: ("forward", "embedding"),
    BACKWARD: ("backward", *PARTS),
    HEAD: ("head",),
    OPTIMIZER: ("optimizer",),
}
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


def read_corrections(out: pathlib.Path) -> dict[str, tuple[float, float]]:
    """Return by which factor each term takes longer than profiled, and its standard error; empty without a record."""
    found = {}
    try:
        told = json.loads((out / CORRECTIONS).read_text())
        for term in set(told) & set(_CORRECTED):
            found[term] = float(told[term]["factor"]), float(told[term]["error"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {term: (x, error) for term, (x, error) in found.items() if 0.01 < x < 100 and math.isfinite(error)}


def corrected(cluster: Cluster, out: pathlib.Path) -> tuple[Cluster, dict[str, Any]]:
    """Return the cluster with its compute profile corrected by what a run in the folder measured, and what was done.

    A factor within two standard errors of 1 corrects nothing.

    Args:
        cluster: profiled cluster.
        out: folder of the run.
    """
    found = {term: (x, error) for term, (x, error) in read_corrections(out).items() if abs(x - 1) > 2 * error}
    if not found or not cluster.compute:
        return cluster, {}
    factors = {column: x for term, (x, _) in found.items() for column in _CORRECTED[term]}

    def scaled(row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value * factors[key] if key in factors else value for key, value in row.items()}

    said = ", ".join(f"{term} x {x:.3g} +- {error:.2g}" for term, (x, error) in sorted(found.items()))
    source = f"{cluster.source}; {said}, as the run in {out} measured"
    told = {"correction": {term: x for term, (x, _) in found.items()}}
    return dataclasses.replace(cluster, compute=tuple(map(scaled, cluster.compute)), source=source), told


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
    made_with = correction if isinstance(correction, dict) else {}
    corrections = {
        term: _correction(*found.terms[term], made_with.get(term, 1.0), found.spread)
        for term in _CORRECTED
        if term in found.terms and found.terms[term][0].any()
    }
    if corrections:
        files.write(out / CORRECTIONS, json.dumps(corrections) + "\n")


def _correction(planned: np.ndarray, measured: np.ndarray, made_with: float, spread: float) -> dict[str, float]:
    """Return a term's factor and its standard error.

    Args:
        planned: seconds [P] that were planned.
        measured: seconds [P] that were measured.
        made_with: factor that the plan was made with.
        spread: standard error of the median step, as a share of it.
    """
    does = planned > 0  # only the last stage has a head
    planned, measured = planned[does], measured[does]
    factor = float(np.mean(measured) / np.mean(planned)) * made_with
    # Stages and devices that differ from each other, and steps that do, say how much it is to be trusted.
    ratios = measured / planned
    error = factor * math.hypot(float(np.std(ratios)) / math.sqrt(len(ratios)), spread)
    return {"factor": factor, "error": error}
