"""The plan for the nodes that a job got: the one that was made for them before, or a new one from their links.

Process 0 decides and searches; all processes measure. The run's folder keeps plan.json, report.html, and every profile
in profile/.
"""

import dataclasses
import gc
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from paxtrain import files, tables
from paxtrain.config import (
    BatchConfig,
    CompressConfig,
    Config,
    MeshConfig,
    OuterConfig,
    PipelineConfig,
    from_dict,
    read_section,
)
from paxtrain.config import plan as plans
from paxtrain.config.axes import in_words
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError, printable
from paxtrain.process.progress import Progress
from planner.cluster import cluster as clusters
from planner.cluster.cluster import Cluster
from planner.measure import profile_cluster, profile_compute
from planner.measure.machines import Machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup
from planner.planning import loss_budget
from planner.planning.options import PlanOptions
from planner.planning.planning import PLAN, REPORT, plan_sections
from planner.start import allocation, run_record

Asked = TypeVar("Asked")
Told = TypeVar("Told")

PROFILES = "profile"
# Measured at a job's start: two sizes, chosen by how slow the links are, and as much compute as there is time for.
_REPEATS, _MICRO_BATCHES = 3, (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Attributes:
        values: the whole configuration, nested.
        options: choices of the search.
        out: folder of the run.
        seconds: seconds that profiling may take.
        age: seconds after which a kept profile is measured again.
        compute_hosts: as ProfileOptions has it.
    """

    values: Mapping[str, Mapping[str, object]]
    options: PlanOptions
    out: pathlib.Path
    seconds: float
    age: float
    compute_hosts: int = 0

    def asked(self) -> dict[str, object]:
        """Return what a plan depends on besides the nodes, as JSON values.

        Raises:
            UserError: a probe that the options name cannot be read.
        """
        found = {name: self.values[name] for name in ("model", "pipeline", "batch", "compress")}
        if read_section(OuterConfig, self.values.get("outer", {}), "outer").every:
            found["outer"] = self.values["outer"]
        dtype = self.values.get("mesh", {}).get("reduce_dtype", MeshConfig.reduce_dtype)
        if dtype != MeshConfig.reduce_dtype:  # plans that were made with the default stay valid
            found["mesh"] = {"reduce_dtype": dtype}
        found["search"] = dataclasses.asdict(self.options)
        if self.options.probe:  # whose content may change under its name
            found["probe"] = dataclasses.asdict(loss_budget.read(self.options))
        return json.loads(json.dumps(found))


@dataclasses.dataclass(frozen=True)
class Decision:
    """A plan and where it is from.

    Attributes:
        plan: the plan.
        source: origin of the plan, in words.
        seconds: time that deciding took.
        given: the user gave the plan.
    """

    plan: Plan
    source: str
    seconds: float
    given: bool = False


def measurable(values: Mapping[str, Any]) -> Config:
    """Return the configuration without what a plan decides, as it is measured whatever its mesh is.

    Raises:
        UserError: a value makes no sense, also in a section that a plan decides.
    """
    for name, kind in (("mesh", MeshConfig), ("batch", BatchConfig), ("compress", CompressConfig)):
        read_section(kind, values.get(name, {}), name)
    save = read_section(PipelineConfig, values.get("pipeline", {}), "pipeline").save
    return from_dict({**values, "mesh": {}, "pipeline": {"save": save}, "batch": {}, "compress": {}, "outer": {}})


def decide(group: ProcessGroup, machines: Machines, request: PlanRequest, why: str, progress: Progress) -> Decision:
    """Decide on the plan, the same on every process.

    Args:
        group: processes of the job.
        machines: nodes of the job.
        request: what to plan, within which limits.
        why: reason why a given plan is not taken ("plan.json is not for these nodes"); empty: none was given.
        progress: reports what the process is doing.

    Raises:
        UserError: on every process: nothing fits, or a process was lost.
    """
    began, config = time.monotonic(), measurable(request.values)
    kept: list[allocation.Kept] = []  # on process 0

    def look(_: object) -> tuple[Any, str, bool]:
        plan, reason = _former(machines, request)
        found = allocation.kept_profile(request.out / PROFILES, machines, config.model, request.age)
        kept.extend([found] if found else [])
        return plan and plans.to_json(plan), _source(plan is not None, reason, why), bool(kept)

    former, reason, profiled = group.gather(None, look)
    if former:
        return Decision(plans.from_json(former), reason, time.monotonic() - began)
    measured: tuple[Cluster, str] | None = None
    if not profiled:
        if group.process == 0:
            print(f"measuring the nodes' links and compute, about {request.seconds:.0f} s", flush=True)
        with progress.doing("measuring the nodes' links and compute"):
            measured = _profile(group, machines, config, request)
    seconds = time.monotonic() - began

    def search(_: object) -> dict[str, object]:
        if measured is None:
            [found] = kept
            more = f", which is of {found.hosts} hosts" * (found.hosts > len(machines.hosts))
            return _search(found.cluster, request, {"source": f"{found.path}{more}", "measured": found.measured})
        cluster, missing = measured
        allocation.keep_profile(cluster, request.out / PROFILES)
        links = {"source": f"measured in {seconds:.0f} s{missing}", "measured": time.time()}
        return _search(cluster, request, links)

    with progress.doing("planning"):
        plan = plans.from_json(group.gather(None, _told(search, request.out)))
    return Decision(plan, reason, time.monotonic() - began)


def _source(again: bool, reason: str, why: str) -> str:
    """Return the origin of the plan, in words."""
    if not why:
        return reason
    return f"{reason} (--replan: {why})" if again else f"made anew (--replan): {why}"


def _told(write: Callable[[Asked], Told], out: pathlib.Path) -> Callable[[Asked], Told]:
    """Return the same function, except that it reports a folder that cannot be written as bad input."""

    def told(values: Asked) -> Told:
        with files.writable(f"--out={out}", "name a folder that can be written"):
            return write(values)

    return told


def _former(machines: Machines, request: PlanRequest) -> tuple[Plan | None, str]:
    """Return the plan of an earlier start if it is still the right one, and the reason why it is or is not."""
    path = request.out / PLAN
    for name in (PLAN, REPORT, PROFILES):
        if (request.out / name).exists() and (request.out / name).is_dir() != (name == PROFILES):
            kind = "file" if name == PROFILES else "folder"
            raise UserError(f"{request.out / name} is a {kind}, which is in the plan's way; choose another --out")
    if not path.exists():
        return None, "made now, the first one of this run"
    try:
        plan = plans.load(path)
    except UserError as error:
        return None, f"made anew: {error}"
    if reason := allocation.why_not(plan, machines):
        return None, f"made anew: the former one is for other nodes: {reason}"
    if plan.predicted.get("asked") != request.asked() or not plan.hosts:
        return None, "made anew: configuration or search flags are others than before"
    return plan, f"{path} again: same nodes, configuration and search flags"


def _profile(group: ProcessGroup, machines: Machines, config: Config, request: PlanRequest) -> tuple[Cluster, str]:
    """Measure the cluster; return it, and the links for which there was no time."""
    allowed = request.options.tensor
    tensor = tuple(
        t for t in profile_compute.tensor_sizes(config, machines.per_host, ()) if not allowed or t in allowed
    )
    options = ProfileOptions(
        sizes=(),
        repeats=_REPEATS,
        micro_batches=tuple(sorted(request.options.micro_batch)[:3]) or _MICRO_BATCHES,
        tensor=tensor,
        time_limit=request.seconds,
        least="cpu" in machines.kinds,  # of which there is no data sheet
        compute_hosts=request.compute_hosts,
    )
    cluster, said = profile_cluster.profile(group, machines, config, options, "job")
    # Training needs the memory of what was measured with.
    gc.collect()
    jax.clear_caches()
    return cluster, "".join(f"; {text}" for what, text in said if what == "left out" and "links" in text)


def _ends(cluster: Cluster) -> dict[str, object]:
    """Return the slowest and the fastest link between hosts: from, to, bytes/s and seconds of latency."""
    off = clusters.between(cluster)
    if not off.any():
        return {}
    bandwidth = cluster.bandwidth
    places = {"slowest": np.where(off, bandwidth, np.inf).argmin(), "fastest": np.where(off, bandwidth, 0).argmax()}
    ends = {name: np.unravel_index(place, off.shape) for name, place in places.items()}
    return {
        name: [cluster.hosts[a], cluster.hosts[b], float(bandwidth[a, b]), float(cluster.alpha[a, b])]
        for name, (a, b) in ends.items()
    }


def _search(cluster: Cluster, request: PlanRequest, links: dict[str, object]) -> dict[str, object]:
    """Search, and write plan and report; return the plan as JSON values."""
    cluster, correction = run_record.corrected(cluster, request.out)
    more = {"links": links | _ends(cluster), "asked": request.asked(), **correction}
    found = plan_sections(request.values, cluster, request.options, predicted=more)
    found.save(request.out)
    return plans.to_json(found.plan)


# --- Words ------------------------------------------------------------------------------------------------------------


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit} ago"
    return "just now"


def _is_figure(*values: Any) -> bool:
    """Return whether all values, which are of a file that others may have written, are finite numbers."""
    return all(type(value) in (int, float) and abs(value) < 1e300 for value in values)


def _link_rows(links: object) -> list[tuple[str, str]]:
    """Return the rows about the links that a plan was made for, without those that its file lacks."""
    if not isinstance(links, dict):
        return []
    rows: list[tuple[str, str]] = []
    source: Any = links.get("source")
    measured: Any = links.get("measured")
    if isinstance(source, str) and _is_figure(measured):
        rows.append(("links", f"{printable(source)}, {_ago(time.time() - measured)}"))
    for name in ("slowest", "fastest"):
        match links.get(name):
            case [str(a), str(b), rate, alpha] if _is_figure(rate, alpha):
                ends = f"{printable(a)} to {printable(b)}"
                rows.append((name, f"{ends}: {tables.size(rate, 'B/s')}, {alpha * 1e6:.0f} us"))
    return rows


def _memory_row(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row about a device's memory, or none; `told` is `Plan.predicted`."""
    bytes_: list[Any] = [told.get("memory_bytes"), told.get("memory_limit_bytes")]
    source: Any = told.get("memory_source")
    if not _is_figure(*bytes_) or not isinstance(source, str):
        return []
    used, limit = (tables.size(each, "B") for each in bytes_)
    return [("memory", f"{used} of {limit} per device ({printable(source)})")]


def describe(decision: Decision, machines: Machines) -> str:
    """Return the decision in ten lines, or fewer if the plan does not say where its figures are from."""
    plan, told = decision.plan, decision.plan.predicted
    names = ", ".join(machines.hosts[:8]) + (", ..." if len(machines.hosts) > 8 else "")
    kinds = ", ".join(dict.fromkeys(machines.kinds))
    rows = [("nodes", f"{len(machines.hosts)} x {machines.per_host} {kinds}: {names}"), ("plan", decision.source)]
    rows += _link_rows(told.get("links"))
    mesh, pipeline, batch, compress = plan.mesh, plan.pipeline, plan.batch, plan.compress
    how = "ZeRO-1" if mesh.zero1 else "replicated optimizer"
    how += ", sequence parallel" if mesh.sequence_parallel else ""
    rows.append(("mesh", f"{in_words(mesh.sizes)}, {how}"))
    if apart := plan.outer:
        of = f"{apart.groups} of {mesh.data // apart.groups} data ranks"
        rows.append(("groups", f"{of}, which exchange every {apart.every} steps"))
    layers = f", layers {pipeline.pipe_layers}" if pipeline.pipe_layers else ""
    by_rank = f", data ranks of {batch.data_micro_batches} micro-batches" if batch.data_micro_batches else ""
    rows.append(
        (
            "schedule",
            f"{pipeline.schedule}, micro-batch {batch.micro_batch} of {batch.global_batch}{by_rank}{layers}, "
            f"save={pipeline.save}",
        )
    )
    backward, data = compress.backward.chosen, compress.data.chosen
    ranks = {"backward": compress.backward.rank, "data": compress.data.rank}
    words = {
        place: f"at rank {rank}" if compress.at(place).low_rank else f"by {compress.at(place).codec}"
        for place, rank in ranks.items()
    }
    between = f"{backward} gradients between stages {words['backward']}"
    groups = f" between groups of {compress.data.inside} ranks" if compress.data.inside > 1 else ""
    over = f"gradients over data of stages {data} {words['data']}{groups}"
    parts = [between] * (backward != "none") + [over] * (data != "none")
    rows.append(("compressed", " and ".join(parts) or "nothing"))
    rows += _memory_row(told)
    took = f"decided in {decision.seconds:.1f} s"
    step: Any = told.get("step_seconds")
    order: Any = told.get("host_order_seconds")
    if _is_figure(step, order) and step > 0:
        took = f"{step:.3g} s predicted, {order:.3g} s in host order ({order / step - 1:+.1%}); {took}"
    rows.append(("step", took))
    if machines.most_crowded:
        processes, cores = machines.most_crowded
        rows.append(
            ("", f"{processes} processes share {cores} cores; their waits for each other's turns are not predicted")
        )
    return tables.table(rows)
