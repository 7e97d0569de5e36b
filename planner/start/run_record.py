"""The record of a planned run: rows for planner.validate, and a correction for later plans of the same folder.

trials.csv         a row for each start that was timed, as planner/runs/trials.py describes them, with the predicted
                   and the measured seconds of each term in further columns; none for what that table cannot say
corrections.json   for each kind of work that is profiled, the factor by which it takes longer than its profile says,
                   and the seconds of a step that are the host's, each with its standard error
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
from paxtrain.config import Config, MeshConfig
from paxtrain.config.plan import BACKWARD, FORWARD, HEAD, HOST, OPTIMIZER, Plan
from paxtrain.errors import UserError
from paxtrain.profiling.terms import StepComparison
from paxtrain.schedule.schedules import FILE
from planner.cluster.cluster import Cluster
from planner.cost.compute import PARTS
from planner.measure.machines import Machines
from planner.runs import trials

TRIALS, CORRECTIONS = "trials.csv", "corrections.json"
# Columns of the compute profile that a term's factor corrects; it has no time of the embedding's of its own.
_CORRECTED = {
    FORWARD: ("forward", "embedding"),
    BACKWARD: ("backward", *PARTS),
    HEAD: ("head",),
    OPTIMIZER: ("optimizer",),
}
_FIGURE = dict.fromkeys(_CORRECTED, "factor") | {HOST: "seconds"}  # what is recorded of a term, beside its error
_LIMITS = {"factor": (0.01, 100.0), "seconds": (0.0, 3600.0)}  # figures beyond are no measurement
_RECOMPUTES = ("inputs", "layer_inputs")  # save modes whose backward runs the layers' forward again


def _unsaid(config: Config) -> str:
    """Return what of a run a row of the table cannot say, as a clause; empty: nothing."""
    m, compress, mesh = config.model, config.compress, config.mesh
    if config.groups > 1:
        return f"{config.groups} groups train apart, and a row has one ring over all data ranks"
    if m.module or m.family != "gpt2" or m.ffn != 4 * m.hidden:
        of = f"{m.module or m.family} with a feed-forward part of {m.ffn}"
        return f"the model is a {of}, and a row's layers are GPT-2's with 4 x hidden"
    between = mesh.pipe > 1 and any(compress.at(place).chosen != "none" for place in ("backward", "forward"))
    between = between or compress.embedding.codec != ""
    over = mesh.data > 1 and (compress.data.over(mesh.data) != "none" or compress.weights.codec != "")
    if between or over:
        return "messages are compressed, and a row's are not"
    if config.pipeline.schedule.endswith(FILE):
        return f"its schedule is the file {config.pipeline.schedule}, and a row names a schedule that others know"
    return ""


def _placement(plan: Plan, mesh: MeshConfig, per_host: int) -> str:
    """Return the host of each tensor group in the order of a row's ranks; empty: these fill host after host.

    Args:
        plan: plan of the run.
        mesh: its mesh.
        per_host: devices per host.

    Raises:
        UserError: tensor groups span hosts in another order.
    """
    order = np.array(plan.device_order or range(mesh.devices))
    hosts = order.reshape(mesh.data, mesh.pipe, -1).transpose(1, 0, 2) // per_host
    if (hosts.ravel() == np.arange(mesh.devices) // per_host).all():
        return ""
    if (hosts != hosts[..., :1]).any():
        raise UserError("tensor groups span hosts that are not in order, and a row places whole groups")
    return ";".join(map(str, hosts[..., 0].ravel().tolist()))


def _row(config: Config, machines: Machines, found: StepComparison, plan: Plan) -> dict[str, object]:
    """Return the row of a start; links between hosts differ, so none is named.

    Raises:
        UserError: the table cannot say it.
    """
    if problem := _unsaid(config):
        raise UserError(problem)
    m, mesh, batch, pipeline = config.model, config.mesh, config.batch, config.pipeline
    kinds = dict(zip(machines.hosts, machines.kinds, strict=True))
    row: dict[str, object] = {
        "cluster": pathlib.Path(config.run.out).resolve().name or "run",
        "devices": mesh.devices,
        "devices_per_host": machines.per_host,
        "device_kinds": ";".join(kinds[host] for host in plan.hosts or machines.hosts),
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
        "stage_layers": ";".join(map(str, config.stage_map.by_stage(config.stage_layers).sum(axis=0))),
        "schedule": pipeline.schedule_key,
        "virtual_stages": pipeline.virtual_stages,
        "data_micro_batches": ";".join(map(str, config.rank_micro_batches)) if config.uneven else "",
        "placement": _placement(plan, mesh, machines.per_host),
        "recompute": int(pipeline.save in _RECOMPUTES),
        "dtype": m.dtype,
        "seconds": f"{found.measured:.6g}",
        "steps": found.steps,
    }
    row |= {name: f"{value:.6g}" for name, value in found.figures().items()}
    cells = {name: str(value) for name, value in row.items()}
    trials.parse(cells)
    longest, most = max(map(len, cells.values())), csv.field_size_limit()
    if longest > most:
        raise UserError(f"a cell would have {longest:,} characters, more than the {most:,} of a table")
    return row


def _readable(row: dict[str, str]) -> bool:
    """Return whether planner.validate can read a row that is there, since one that it cannot costs it all others."""
    try:
        trials.parse(row)
    except UserError:
        return False
    return None not in row  # cells beyond the columns


def _former(path: pathlib.Path) -> list[dict[str, str]]:
    try:
        with open(path, newline="") as file:
            return [row for row in csv.DictReader(file) if _readable(row)]
    except (OSError, UnicodeDecodeError, csv.Error):  # a record that is lost costs no training
        return []


def read_corrections(out: pathlib.Path) -> dict[str, tuple[float, float]]:
    """Return each term's factor, or the host's seconds, and its standard error; empty without a record."""
    found = {}
    try:
        told = json.loads((out / CORRECTIONS).read_text())
        for term in set(told) & set(_FIGURE):
            least, most = _LIMITS[_FIGURE[term]]
            x, error = float(told[term][_FIGURE[term]]), float(told[term]["error"])
            if least < x < most and math.isfinite(error):
                found[term] = x, error
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found


def corrected(cluster: Cluster, out: pathlib.Path) -> tuple[Cluster, dict[str, Any]]:
    """Return the cluster with its compute profile corrected by what a run in the folder measured, and what was done.

    A factor within two standard errors of 1 corrects nothing, nor do seconds within two of 0.

    Args:
        cluster: profiled cluster.
        out: folder of the run.
    """
    found = {
        term: (x, error)
        for term, (x, error) in read_corrections(out).items()
        if abs(x - (term != HOST)) > 2 * error and (cluster.compute or term == HOST)
    }
    if not found:
        return cluster, {}
    factors = {column: x for term, (x, _) in found.items() for column in _CORRECTED.get(term, ())}

    def scaled(row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value * factors[key] if key in factors else value for key, value in row.items()}

    said = ", ".join(
        f"host {x:.3g} +- {error:.2g} s" if term == HOST else f"{term} x {x:.3g} +- {error:.2g}"
        for term, (x, error) in sorted(found.items())
    )
    source = f"{cluster.source}; {said}, as the run in {out} measured"
    told = {"correction": {term: x for term, (x, _) in found.items()}}
    host = found[HOST][0] if HOST in found else 0.0
    compute = tuple(map(scaled, cluster.compute))
    return dataclasses.replace(cluster, compute=compute, source=source, host_seconds=host), told


def record(out: pathlib.Path, config: Config, machines: Machines, found: StepComparison, plan: Plan) -> str:
    """Add a start to the folder's record, and return why it got no row; empty: it got one.

    Args:
        out: folder of the run.
        config: its configuration, with the plan's sections.
        machines: its nodes.
        found: its prediction and measurement.
        plan: its plan, which tells the corrections that it was made with, as `corrected` told it.

    Raises:
        OSError: the record cannot be written.
    """
    problem = ""
    try:
        rows: list[dict[str, Any]] = [*_former(out / TRIALS), _row(config, machines, found, plan)]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        trials.write(out / TRIALS, [{name: row.get(name, "") for name in columns} for row in rows])
    except UserError as error:
        problem = str(error)
    _record_corrections(out, found, plan.predicted.get("correction"))
    return problem


def _record_corrections(out: pathlib.Path, found: StepComparison, correction: object) -> None:
    """Write by which factor each kind of work takes longer than profiled, and the host's seconds, if measured.

    Args:
        out: folder of the run.
        found: prediction and measurement.
        correction: the corrections that the plan was made with; None: it had none.
    """
    made_with = correction if isinstance(correction, dict) else {}
    corrections = {
        term: _correction(*found.terms[term], made_with.get(term, 1.0), found.spread)
        for term in _CORRECTED
        if term in found.terms and found.terms[term][0].any()
    }
    if HOST in found.terms and (seconds := found.terms[HOST][1]).any():
        # Stages that differ from each other say how much it is to be trusted.
        error = float(np.std(seconds)) / math.sqrt(len(seconds))
        corrections[HOST] = {"seconds": float(np.mean(seconds)), "error": error}
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
