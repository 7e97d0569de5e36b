"""Does a model fit a cluster, what takes how much of a device's memory, on how few devices, and what to change.

All figures are those of the closed form with its margin (planner/memory/), for layers that are spread evenly; nothing
is simulated or compiled.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.config.axes import AXES, MAIN
from paxtrain.config.checks import divisors
from paxtrain.devices.gpus import GPUS
from paxtrain.errors import UserError
from paxtrain.model import parameters
from paxtrain.schedule.schedules import name_of
from planner.answers.free_choice import freed
from planner.cluster.cluster import Cluster, of_hosts
from planner.cluster.cluster_file import MOST_HOSTS
from planner.cluster.device_sheets import SHEETS
from planner.cluster.variants import parts_of_a_host, with_devices
from planner.cost.candidate import Candidate
from planner.memory import closed_form
from planner.pipeline import layer_split
from planner.planning.inputs import Values, search_for
from planner.planning.options import PlanOptions
from planner.report.text import aligned, hosts, labelled, longer, mesh, schedule, sharded
from planner.search.enumeration import enumerate_candidates
from planner.search.search import Search
from planner.search.space import Space, candidate_of

# What changes together besides the mesh, as columns of the space, and the flags that choose it.
_CHOICES = {
    ("micro_batch",): ("micro_batch",),
    ("schedule", "chunks"): ("schedules", "virtual_stages"),
    ("save",): ("saves",),
    ("shard", "shard_group"): ("shard",),
    ("sequence_parallel",): ("sequence_parallel",),
}
_KEPT = ("backward", "backward_rank", "data_rank")
_WORTH = 0.01  # share of the memory that a change must save to be told
_NAMES = {
    "weights": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "activations": "activations (ring)",
    "messages": "messages (rings)",
    "workspace": "workspace",
    "compression": "codec states",
}


class Use(NamedTuple):
    """The memory that a plan takes on each device.

    Attributes:
        candidate: the plan, with its layers spread evenly.
        parts: bytes by purpose, named like the fields of closed_form.Memory.
        margin: bytes of the safety margin.
        bound: seconds that its step takes at least; inf if it does not fit.
    """

    candidate: Candidate
    parts: dict[str, float]
    margin: float
    bound: float

    @property
    def total(self) -> float:
        """Bytes of a device, including the margin."""
        return sum(self.parts.values()) + self.margin


class Change(NamedTuple):
    """Another plan, model or cluster.

    Attributes:
        what: the change, in words or as flags.
        bytes: bytes that a device then takes.
        limit: bytes that it may take.
        slower: how much longer a step takes at least, as a share of the bound of what it is compared with; None:
            something else is trained, or on other devices.
    """

    what: str
    bytes: float
    limit: float
    slower: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryAnswer:
    """The memory of a model on a cluster.

    Attributes:
        cluster: the cluster.
        model: the model.
        global_batch: sequences per step.
        limit: bytes that a device may hold.
        source: origin of the figures.
        candidates: number of plans that the flags allow.
        fitting: number of those that fit.
        uses: memory of some plans, by what they are.
        fewest: plan on the fewest devices that it fits, with their number of hosts; None if it fits on no number tried.
        changes: changes of the first of `uses` that save memory, and, if nothing fits, what would.
        named: name of the model; "": not known.
    """

    cluster: Cluster
    model: ModelConfig
    global_batch: int
    limit: float
    source: str
    candidates: int
    fitting: int
    uses: dict[str, Use]
    fewest: tuple[int, int, Use] | None
    changes: tuple[Change, ...]
    named: str = ""

    @property
    def fits(self) -> bool:
        """Return whether any plan fits."""
        return self.fitting > 0

    def text(self) -> str:
        """Return the answer for a terminal: whether, on how few devices, what to change; then what takes how much."""
        cluster, least = self.cluster, min(self.uses.values(), key=lambda use: use.total)
        kinds = ", ".join(dict.fromkeys(cluster.kinds))
        where = f"{cluster.name}: {hosts(len(cluster.hosts))} x {cluster.devices_per_host} {kinds}"
        words = f"it fits: {self.fitting:,} of {self.candidates:,} plans take at most {_gb(self.limit)} a device"
        if not self.fits:
            over = _gb(least.total - self.limit)
            words = (
                f"it does not fit: the leanest of {self.candidates:,} plans takes {over} more than {_gb(self.limit)}"
            )
        lines = [
            *labelled("answer", words),
            *labelled("fewest", self._fewest()),
            *(line for change in self.changes for line in labelled("change", _change_words(change))),
            "",
            *aligned(self._table(), words=(0,)),
            "",
            *labelled(
                "model",
                f"{f'{self.named}, ' * bool(self.named)}{parameters.published(self.model):,} parameters, "
                f"global batch {self.global_batch}",
            ),
            *labelled("cluster", where),
            *labelled("source", f"{self.source}; the limit is {self.limit / cluster.memory.min():.0%} of a device"),
        ]
        return "\n".join(lines)

    def _table(self) -> list[list[str]]:
        uses = list(self.uses.values())
        rows = [["GB a device", *self.uses]]
        rows.append([" x ".join(MAIN), *(mesh(use.candidate) for use in uses)])
        rows.append(["micro-batch", *(str(use.candidate.micro_batch) for use in uses)])
        rows.append(["schedule", *(_schedule(use.candidate) for use in uses)])
        rows.append(["save", *(use.candidate.save for use in uses)])
        rows.append(["optimizer state", *(_state(use.candidate) for use in uses)])
        for name, words in _NAMES.items():
            if any(use.parts[name] for use in uses):
                rows.append([f"  {words}", *(f"{use.parts[name] / 1e9:.2f}" for use in uses)])
        if any(use.margin for use in uses):
            rows.append(["  safety margin", *(f"{use.margin / 1e9:.2f}" for use in uses)])
        rows.append(["together", *(f"{use.total / 1e9:.2f}" for use in uses)])
        rows.append([f"left of {_gb(self.limit)}", *(f"{(self.limit - use.total) / 1e9:.2f}" for use in uses)])
        return rows

    def _fewest(self) -> str:
        if self.cluster.parts is not None:
            return "not looked for, since groups span hosts"
        if self.fewest is None:
            return f"of the numbers of devices tried, up to {self.cluster.devices}, none is enough"
        number, devices, use = self.fewest
        on = f"{devices} device{'s' * (devices > 1)} on {hosts(number)}"
        return f"{on}: {_plan_words(use.candidate)}, {_gb(use.total)}"

    def json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""

        def of(use: Use) -> dict[str, Any]:
            plan = {name: value for name, value in use.candidate.figures().items() if name != "coded"}
            bound = use.bound if np.isfinite(use.bound) else None
            return {"plan": plan, "bytes": use.parts, "margin": use.margin, "total": use.total, "bound_seconds": bound}

        fewest = self.fewest and {"hosts": self.fewest[0], "devices": self.fewest[1], **of(self.fewest[2])}
        return {
            "fits": self.fits,
            "limit_bytes": self.limit,
            "candidates": self.candidates,
            "fitting": self.fitting,
            "plans": {name: of(use) for name, use in self.uses.items()},
            "fewest": fewest,
            "changes": [change._asdict() for change in self.changes],
            "source": self.source,
        }


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _plan_words(c: Candidate) -> str:
    zero = f", {sharded(c)}" if c.zero1 and c.together > 1 else ""
    order = f", {schedule(c)}" if c.pipe > 1 else ""
    return f"{mesh(c)}, micro-batch {c.micro_batch}{order}, save={c.save}{zero}"


def _schedule(c: Candidate) -> str:
    return schedule(c) if c.pipe > 1 else "none (one stage)"


def _state(c: Candidate) -> str:
    return f"split ({sharded(c)})" if c.zero1 and c.together > 1 else "whole"


def _change_words(change: Change) -> str:
    left = change.limit - change.bytes
    fits = f"{_gb(left)} left" if left >= 0 else f"{_gb(-left)} too much"
    slower = "" if change.slower is None else f", step's bound {longer(change.slower)}"
    return f"{change.what}: {_gb(change.bytes)}, {fits}{slower}"


# --- The answer -------------------------------------------------------------------------------------------------------


def memory_answer(values: Values, cluster: Cluster, options: PlanOptions, global_batch: int = 0) -> MemoryAnswer:
    """Return what a model takes of the memory of a cluster's devices.

    Args:
        values: sections of the configuration, nested.
        cluster: the cluster.
        options: options of planning, which narrow the plans that are looked at.
        global_batch: sequences per step; 0 for the configuration's.

    Raises:
        UserError: the planner does not support the configuration, or no mesh divides the model and the batch.
    """
    search = search_for(values, cluster, options, global_batch)
    leanest, fitting = int(np.argmin(search.bytes)), np.isfinite(search.bounds)
    shown = {"leanest": use_of(search, leanest)}
    first = leanest
    if fitting.any():
        first = int(np.argmin(search.scores))
        shown = {"quickest by its bound": use_of(search, first), **shown}
    if first == leanest and len(shown) > 1:
        del shown["leanest"]
    free = search_for(values, cluster, dataclasses.replace(freed(options), sequence_parallel="both"), global_batch)
    changes = list(_other_plans(free, use_of(search, first)))
    if not fitting.any():
        changes += _other_tasks(free)
    return MemoryAnswer(
        cluster=search.cluster,
        model=search.model,
        global_batch=search.global_batch,
        limit=search.limit,
        source=search.budget.source(search.cluster, search.model),
        candidates=len(search.space),
        fitting=int(fitting.sum()),
        uses=shown,
        fewest=_fewest(search),
        changes=tuple(changes),
    )


def use_of(search: Search, i: int) -> Use:
    """Return the memory of a candidate of a search, by purpose.

    Args:
        search: search that has the candidate.
        i: its place in the space.
    """
    parts = _parts(search, search.cluster, search.model, search.space, i)
    candidate = _even(search, search.model, search.space, i)
    return Use(candidate, parts, float(search.bytes[i]) - sum(parts.values()), float(search.bounds[i]))


def _parts(search: Search, cluster: Cluster, model: ModelConfig, space: Space, i: int) -> dict[str, float]:
    """Return the bytes of a candidate by purpose."""
    memory = closed_form.analytic(search.budget.shape(cluster, model, space.take(np.array([i]))))
    fields = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
    return {name: float(np.broadcast_to(value, 1)[0]) for name, value in fields.items()}


def _even(search: Search, model: ModelConfig, space: Space, i: int) -> Candidate:
    """Return a candidate with its layers spread evenly."""
    return candidate_of(space, i, layer_split.even(model.layers, int(space.pipe[i] * space.chunks[i])), search.choices)


def _fewest(search: Search) -> tuple[int, int, Use] | None:
    """Return hosts and devices of the fewest devices on which a plan fits, and the leanest plan there."""
    cluster = search.cluster
    if cluster.parts is not None:
        return None
    spacious = np.argsort(-cluster.memory, kind="stable")
    some = [parts_of_a_host(cluster, n) for n in divisors(cluster.devices_per_host)[:-1]]
    hosts = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, *_doubled(64)) if n < len(cluster.hosts)})
    some += [of_hosts(cluster, [cluster.hosts[i] for i in sorted(spacious[:n])]) for n in hosts]
    for one in [*some, cluster]:
        use = _leanest(search, one, search.model, search.global_batch)
        if use is not None and use.total <= search.budget.limit(one):
            return len(one.hosts), one.devices, use
    return None


def _doubled(first: int) -> list[int]:
    return [first * 2**n for n in range(1, 15)]


def _leanest(search: Search, cluster: Cluster, model: ModelConfig, global_batch: int) -> Use | None:
    """Return the leanest plan for another cluster, model or batch; None if no mesh divides them."""
    try:
        space = enumerate_candidates(cluster, model, global_batch, search.choices)
    except UserError:
        return None
    total = search.budget.bytes(cluster, model, space)
    i = int(np.argmin(total))
    parts = _parts(search, cluster, model, space, i)
    return Use(_even(search, model, space, i), parts, float(total[i]) - sum(parts.values()), np.inf)


# --- What to change ---------------------------------------------------------------------------------------------------


def _other_plans(free: Search, use: Use) -> Iterator[Change]:
    """Yield plans that differ from one in one choice and take less memory, for each choice the leanest."""
    space, c = free.space, use.candidate
    here = _place_of(free, c)
    if here is None:
        return
    choices = {tuple(AXES): tuple(AXES), **_CHOICES}
    every = [column for columns in choices for column in columns]
    same = {name: space.column(name) == space.column(name)[here] for name in (*every, *_KEPT)}
    kept = np.logical_and.reduce([same[name] for name in _KEPT])
    for columns, flags in choices.items():
        others = [same[name] for name in every if name not in columns]
        some = np.flatnonzero(np.logical_and.reduce([kept, *others]))
        best = int(some[np.argmin(free.bytes[some])])
        if free.bytes[best] > free.bytes[here] * (1 - _WORTH):
            continue
        known = np.isfinite(free.bounds[[best, here]]).all()
        slower = float(free.bounds[best] / free.bounds[here] - 1) if known else None
        yield Change(_flags(space, best, columns, flags), float(free.bytes[best]), free.limit, slower)


def _place_of(free: Search, c: Candidate) -> int | None:
    """Return the place of a candidate in a search's space."""
    space = free.space
    alike = np.logical_and.reduce([space.column(name) == size for name, size in c.sizes.items()])
    some = np.flatnonzero(alike & (space.micro_batch == c.micro_batch)).tolist()
    c = dataclasses.replace(c, backward_links=(), forward_links=())  # which links compress takes no memory
    return next((i for i in some if candidate_of(space, i, c.counts, free.choices) == c), None)


def _flags(space: Space, i: int, columns: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """Return the flags that choose some columns of a candidate."""
    candidate = candidate_of(space, i, ())
    c: Mapping[str, Any] = candidate.__dict__ | candidate.sizes
    words = []
    for column, flag in zip(columns, flags):
        value = c[column]
        if column == "chunks" and value == 1:
            continue
        shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        words.append(f"--{flag}={name_of(int(space.schedule[i])) if column == 'schedule' else shown}")
    return " ".join(words)


def _other_tasks(free: Search) -> Iterator[Change]:
    """Yield what else would make it fit: other devices, more of them, a shorter sequence."""
    cluster, model, batch = free.cluster, free.model, free.global_batch
    tried: list[tuple[str, Cluster, ModelConfig]] = []
    if cluster.parts is None:
        for factor in (2, 4, 8):
            if factor * len(cluster.hosts) <= MOST_HOSTS:
                tried.append((f"{factor} times as many hosts", _several(cluster, factor), model))
        if not cluster.compute and "cpu" not in cluster.kinds:
            for kind in sorted(GPUS, key=lambda kind: SHEETS[kind].memory):
                if SHEETS[kind].memory > cluster.memory.min():
                    tried.append((f"{kind} instead", with_devices(cluster, kind), model))
    shorter = dataclasses.replace(model, sequence=model.sequence // 2)
    tried.append((f"a sequence of {shorter.sequence}", cluster, shorter))
    for what, other, smaller in tried:
        use = _leanest(free, other, smaller, batch)
        if use is not None:
            yield Change(what, use.total, free.budget.limit(other))


def _several(cluster: Cluster, factor: int) -> Cluster:
    """Return a cluster with `factor` times the hosts. The rates of its links mean nothing."""
    names = tuple(f"{name}.{n}" for n in range(factor) for name in cluster.hosts)
    links = len(names), len(names)
    return dataclasses.replace(
        cluster,
        hosts=names,
        kinds=cluster.kinds * factor,
        memory=np.tile(cluster.memory, factor),
        alpha=np.broadcast_to(cluster.alpha[:1, :1], links),  # a view, which takes no memory
        samples=np.broadcast_to(cluster.samples[:1, :1, :1], (1, *links)),
        measured=None,
        sites=cluster.sites * factor,
        trunks=None,
    )
