"""The steps of measured runs by the model that plans, planner.cost, for many settings of its constants at once.

A run becomes a model, a candidate, a cluster and a placement. Ranks count tensor fastest, then data, then pipe, and
fill host after host unless the run says where they are. A tensor group waits for its slowest device. Hosts that a
tensor group spans are taken together.

Runs of other systems, such as Megatron-LM, differ from this trainer's: ops begin as soon as their messages are there
(planner.pipeline.ideal), the tied embedding's gradients are exchanged whole, and what planner/runs/trainers.py says of
their trainers: attention may keep its scores in memory, and gradients may be reduced once a stage has done its last op.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paxtrain.config.axes import AXES, more_axes
from paxtrain.devices import gpus
from paxtrain.devices.datasheets import UNKNOWN, UNKNOWN_HOST, datasheet
from paxtrain.schedule.schedules import spec_of
from planner.cluster.cluster import Cluster, HostSpan, inside, merged, span
from planner.cluster.device_sheets import SHEETS, DeviceSheet
from planner.cost import closed_forms, compute
from planner.cost.candidate import Candidate
from planner.cost.compute import LayerCosts
from planner.cost.link_seconds import Fabric, Paths, fabric, paths
from planner.cost.simulate import sharded_step
from planner.cost.sizes import MASTER
from planner.cost.step_time import Executor, Problem, counted, steps
from planner.fit.applied import LINKS, SHARES, fitted_links, fitted_shares
from planner.fit.constants import NAMES
from planner.fit.stalls import messages
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table
from planner.runs.trainers import TRAINERS
from planner.runs.trials import Trial

Array = np.ndarray
# What narrower products gain over 16-bit ones: 2 and 4 by the data sheets, to the power of 0.7, because kernels that
# convert and scale stay as they are.
_GAINS = {"fp8": 2**0.7, "mxfp8": 2**0.7, "nvfp4": 4**0.7}
_LAYERS = (*SHARES, *LINKS, "crossing_launch")  # constants that a layer's costs depend on


def _places(names: Sequence[str]) -> list[int]:
    """Return where constants stand in CONSTANTS."""
    return [NAMES.index(name) for name in names]


EXECUTORS = {"ideal": "simulate", "paxtrain": "rows"}  # the method that simulates each


def _closed_form(table: Table, seconds: simulator.Seconds, form: str) -> Array:
    """Return what `simulator.pipeline` does by a closed form of 1f1b, which stands for any schedule."""

    def of_stages(x: Array | float) -> Array:
        return table.stage_map.by_stage(np.broadcast_to(x, seconds.forward.shape)).sum(axis=1)

    forward, backward = of_stages(seconds.forward), of_stages(seconds.backward) + of_stages(seconds.weights)
    forward[:, table.stage_map.last] += seconds.head
    hops = np.asarray(seconds.activation)[:, :-1] + np.asarray(seconds.gradient)[:, 1:]
    m = table.micro_batches - table.first
    if form == "pipette":
        total = closed_forms.pipette(forward, backward, hops, 0.0, m, table.stages)
    else:
        total = closed_forms.amp(forward, backward, hops, 0.0, m)
    return np.repeat(total[:, None], table.stages, axis=1)


REPLAYS: Mapping[str, Executor] = {
    "simulate": ideal.pipeline,
    "rows": simulator.pipeline,
    "pipette": lambda table, seconds, overlap: _closed_form(table, seconds, "pipette"),
    "amp": lambda table, seconds, overlap: _closed_form(table, seconds, "amp"),
}
METHODS = tuple(REPLAYS)


def kinds(trial: Trial) -> list[str]:
    """Return the device kinds of a run, each once."""
    return sorted(set(trial.device_kinds))


def candidate(trial: Trial, own: bool) -> Candidate:
    """Return the plan that a run followed.

    Args:
        trial: the run.
        own: whether this trainer ran it.
    """
    v, trainer = trial.virtual_stages, TRAINERS[trial.trainer]
    counts = np.array([[(n + chunk) // v for n in trial.stage_layers] for chunk in reversed(range(v))])
    saves = {"none": "residuals", "full": "layer_inputs" if own else "layers"}  # which others run again as a whole
    return Candidate(
        data=trial.dp,
        pipe=trial.pp,
        tensor=trial.tp,
        micro_batch=trial.micro_batch,
        micro_batches=trial.micro_batches,
        schedule=trial.schedule,
        counts=tuple(spec_of(trial.schedule).place(trial.pp, v).by_model(counts).tolist()),
        chunks=v,
        save=saves.get(trial.recompute, trial.recompute),
        shard="optimizer" if own or trial.sharding != "none" else "none",
        sequence_parallel=trial.sequence_parallel,
        reduce_dtype="float32" if own or trainer.float32 else trial.model.dtype,
        data_micro_batches=trial.data_micro_batches,
        others=tuple(trial.context if AXES[axis].sequence else 1 for axis in more_axes()),
    )


def sheet(kind: str) -> DeviceSheet:
    """Return the planner's data sheet of a module whose products' shapes were measured, else one of rates alone."""
    rates, key = datasheet(kind) or UNKNOWN, gpus.find(kind)
    if key in gpus.GPUS:
        return dataclasses.replace(SHEETS[key], single_flops=rates.single)
    return DeviceSheet(rates.half, rates.single, rates.memory_bandwidth, memory=0.0)


def cluster_of(trial: Trial) -> Cluster:
    """Return the hosts of a run with their nominal rates and no latency; those of a tensor group have its slowest kind.

    Messages of a host share its network.
    """
    sheets = {kind: sheet(kind) for kind in kinds(trial)}
    together = max(trial.seat // trial.devices_per_host, 1)
    names, hosts = trial.device_kinds, range(trial.hosts)
    blocks = [names[i - i % together : i - i % together + together] for i in hosts]
    net = np.array(trial.host_bytes or (UNKNOWN_HOST,) * trial.hosts)
    intra = np.array(trial.intra_bytes or [(datasheet(kind) or UNKNOWN).intra for kind in names])
    return Cluster(
        name=trial.cluster,
        source="measured runs",
        hosts=tuple(f"h{i}" for i in hosts),
        devices_per_host=trial.devices_per_host,
        kinds=tuple(min(block, key=lambda kind: sheets[kind].peak_flops) for block in blocks),
        memory=np.zeros(trial.hosts),
        nics=1,
        alpha=np.zeros((trial.hosts, trial.hosts)),
        samples=np.where(np.eye(trial.hosts, dtype=bool), intra, np.minimum(net[:, None], net))[None],
        sheets=sheets,
    )


class _TrialRun:
    """One run, with everything that does not depend on the constants.

    Attributes:
        trial: the run.
        candidate: the plan that it followed.
        cluster: its hosts.
        together: hosts that a tensor group spans, or devices that share sequences.
        rings: the latter, by rings of tensor groups inside hosts.
        hosts: int [D, P], host of each tensor group, or which of the hosts that are taken together.
        kinds: device kinds, sorted as a problem sorts them.
        slots: index of each of these among all kinds of the run.
    """

    def __init__(self, trial: Trial, own: bool) -> None:
        self.trial, self.candidate = trial, candidate(trial, own)
        self.cluster = cluster_of(trial)
        self.together = max(trial.seat // trial.devices_per_host, 1)
        groups = trial.placement or np.arange(trial.dp * trial.pp) * trial.seat // (
            trial.devices_per_host * self.together
        )
        self.hosts = np.reshape(groups, (trial.pp, trial.dp)).T
        self.kinds = sorted(set(self.cluster.kinds))
        self.slots = [kinds(trial).index(kind) for kind in self.kinds]
        self.trainer = TRAINERS[trial.trainer]
        self.rings = trial.context > 1 and self.together > 1  # over these hosts, of tensor groups inside them
        # Messages between stages cross hosts, which keeps the hosts of a tensor group's ranks busy.
        self.crosses = bool(np.any(self.hosts != np.roll(self.hosts, 1, axis=1)))
        self.sequence_parallel = trial.sequence_parallel and trial.tp > 1
        # Runs with equal keys have the same links, the same paths, and the same costs.
        nodes = (trial.devices_per_host, trial.device_kinds, trial.host_bytes, trial.intra_bytes, trial.host_nics)
        where = (*nodes, self.together)
        self.keys: tuple[Any, Any, Any] = (
            ("links", *where),
            ("paths", *where, trial.seat, trial.dp, trial.pp, trial.placement),
            (
                *("costs", *self.kinds, trial.model, trial.tp, trial.context, trial.micro_batch, self.candidate.save),
                *(self.crosses, self.sequence_parallel, trial.trainer, trial.precision),
            ),
        )

    @property
    def stalls(self) -> int:
        """Messages that a run which stalls waits for."""
        return messages(self.trial.pp, self.trial.micro_batches)


class TrialSteps:
    """Steps of a list of measured runs, for many settings of the constants at once."""

    def __init__(self, trials: Sequence[Trial], method: str = "simulate") -> None:
        """Prepare everything that does not depend on the constants.

        Args:
            trials: the runs.
            method: one of METHODS: "simulate" with ops that begin as soon as their messages are there, "rows" in this
                trainer's rows, or the closed form "pipette" or "amp".
        """
        self.own, self.replay = method == EXECUTORS["paxtrain"], REPLAYS[method]
        self.slots = max((len(kinds(trial)) for trial in trials), default=1)
        self.runs = [_TrialRun(trial, self.own) for trial in trials]
        numbered: dict[Any, int] = {}  # numbers are quicker to compare
        for run in self.runs:
            links, where, costs = (numbered.setdefault(key, len(numbered)) for key in run.keys)
            run.keys = links, where, costs

    def seconds(self, constants: Array, speed: Array, factor: Array) -> Array:
        """Return the predicted seconds of a step [B, trials].

        Args:
            constants: [B, trials, constants] in the order of CONSTANTS.
            speed: [B, trials, slots] speed of each device kind of a trial over its datasheet's.
            factor: [B, trials, slots] factor on a layer's cost on each device kind of a trial.
        """
        known: dict[tuple, Any] = {}
        problems, placements = [], []
        for n, run in enumerate(self.runs):
            settings = _Settings(constants[:, n], speed[:, n], known)
            layer = settings.layer(run, not (self.own or run.trainer.flash), not self.own and run.trainer.eager)
            layer = [_scaled(one, x) for one, x in zip(layer, factor[:, n][:, run.slots].ravel().tolist())]
            problem = Problem(settings.cluster(run, 0), run.trial.model, run.candidate, layer=layer)
            if not self.own and run.trial.sharding not in run.trainer.overlaps:
                problem.hides = np.zeros_like(problem.hides)
            problems.append(problem)
            placed = problem.kind_of_host[run.hosts] + len(run.kinds) * np.arange(len(constants))[:, None, None]
            placements.append((settings.paths(run, self.own), placed))
        # Those whose weights are sharded have no pipeline to replay.
        whole = [run.trial.sharding == "zero3" for run in self.runs]
        piped = [n for n, alone in enumerate(whole) if not alone]
        found = np.empty(constants.shape[:2])
        for n, step in zip(piped, steps([problems[n] for n in piped], [placements[n] for n in piped], self.replay)):
            found[:, n] = step.total
        for n in (n for n, alone in enumerate(whole) if alone):
            found[:, n] = sharded_step(problems[n], placements[n][0])
        return found + constants[..., NAMES.index("host_seconds")]


class _Settings:
    """Settings of one run's constants, by each of which a batch has one row; what other runs share is known."""

    def __init__(self, constants: Array, speed: Array, known: dict[tuple, Any]) -> None:
        self.known, self.speed = known, speed
        self.key = self._once(("settings", constants.tobytes()), lambda: len(known))  # quicker to compare
        self.values: list[dict[str, float]] = self._once(
            ("values", self.key), lambda: [dict(zip(NAMES, row)) for row in constants.tolist()]
        )
        # What a layer's costs depend on, and what links do; settings differ in one constant, so most have the same.
        self.of_layers, self.of_links = self._once(
            ("parts", self.key), lambda: [constants[:, _places(names)].tolist() for names in (_LAYERS, LINKS)]
        )

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def cluster(self, run: _TrialRun, setting: int) -> Cluster:
        """Return the hosts of a run with the links of one setting."""
        values = self.values[setting]

        def make() -> Cluster:
            found = fitted_links(run.cluster, values)
            return merged(found, run.together) if run.together > 1 else found

        return self._once((run.keys[0], *self.of_links[setting]), make)

    def _inside(self, run: _TrialRun, setting: int, kind: str) -> tuple[float, float]:
        """Return latency and bandwidth of a tensor group's links; of all hosts it shares only those that it spans."""
        here = self.cluster(run, setting)
        if run.rings:
            return inside(here.parts or here, kind)
        latency, rate = inside(here, kind)
        if run.together == 1:
            return latency, rate
        values = self.values[setting]
        alone = rate * (len(run.cluster.hosts) / run.together) ** values["spread"]
        within = values["intra_efficiency"] * float(np.diagonal(run.cluster.samples[0]).min())
        return latency, max(min(alone, within), rate)

    def _spans(self, run: _TrialRun, settings: list[int], kind: str) -> HostSpan | None:
        """Return what joins the hosts over which devices share sequences, in some settings; None: they are on one."""
        found = [span(self.cluster(run, n), kind) for n in settings] if run.rings else [None]
        some = [one for one in found if one is not None]
        if not some:
            return None
        latency, rate = (np.array([getattr(one, name) for one in some]) for name in ("latency", "rate"))
        return HostSpan(latency, rate, some[0].devices, some[0].nics)

    def _links(self, run: _TrialRun) -> tuple[Fabric, Array]:
        """Return the links of a run in all settings that differ in them, stacked, and which each setting has."""

        def make() -> tuple[Fabric, Array]:
            each = [self.cluster(run, setting) for setting in range(len(self.values))]
            different = {id(one): one for one in each}
            place = {one: n for n, one in enumerate(different)}
            return _stacked([fabric(one) for one in different.values()]), np.array([place[id(one)] for one in each])

        return self._once(("fabric", run.keys[0], self.key), make)

    def layer(self, run: _TrialRun, stored_scores: bool, eager: bool) -> list[LayerCosts]:
        """Return a layer's costs on each device kind of a run, in each setting in turn."""
        t, c, speeds = run.trial, run.candidate, self.speed[:, run.slots]

        def links() -> Array:  # latency and rate [2, settings, kinds]
            each = [[self._inside(run, n, kind) for kind in run.kinds] for n in range(len(self.values))]
            return np.moveaxis(np.array(each), 2, 0)

        inside = self._once(("inside", run.keys[0], self.key), links)

        def make() -> list[LayerCosts]:
            different: dict[tuple[float, ...], int] = {}
            place, first = list[int](), list[int]()
            for n, (of, speed) in enumerate(zip(self.of_layers, speeds.tolist())):
                place.append(different.setdefault((*of, *speed), len(different)))
                if place[-1] == len(first):
                    first.append(n)
            by_name = {name: np.array([self.values[n][name] for n in first]) for name in NAMES}
            costs = []
            for slot, kind in enumerate(run.kinds):
                shares = fitted_shares(by_name, speeds[first, slot], stored_scores, eager)
                launch: Any = shares.layer_launch + run.crosses * t.tp * by_name["crossing_launch"]
                matmul = shares.matmul * _GAINS.get(t.precision, 1.0)
                shares = dataclasses.replace(shares, matmul=matmul, layer_launch=launch)
                how = (c.layer_sizes, t.micro_batch, c.save, tuple(inside[:, first, slot]), shares)
                over = self._spans(run, first, kind)
                found = compute.sheet(t.model, run.cluster.sheets[kind], *how, run.sequence_parallel, span=over)
                each = [getattr(found, field.name).tolist() for field in dataclasses.fields(LayerCosts)]
                costs.append([LayerCosts(*values) for values in zip(*each)])
            return [of_kind[n] for n in place for of_kind in costs]

        links_too = run.keys[0] if run.rings else None
        return self._once((run.keys[2], self.key, speeds.tobytes(), inside.tobytes(), links_too), make)

    def paths(self, run: _TrialRun, own: bool) -> Paths:
        """Return the paths of a run in each setting, whose bytes count as often as the ratios say."""

        def along() -> Paths:
            links, of = self._links(run)
            different = int(of.max()) + 1
            starts = np.arange(different) * (len(links.alpha) // different)
            return paths(links, run.hosts[None] + starts[:, None, None], run.trial.seat).take(of)

        # Each layer of weights in shards has its own collectives, which `sharded_step` counts.
        buckets = 0 if run.trial.sharding == "zero3" else max(run.trial.stage_layers)

        def make() -> Paths:
            found = self._once((run.keys[1], self.key), along)
            # Other systems exchange the whole table, not a data rank's float32 part.
            whole = 1.0 if own else run.trial.dp * run.trial.element_bytes / MASTER

            def value(name: str) -> Array:
                return np.array([one[name] for one in self.values])

            lone = max(run.trial.host_nics / run.trial.tp, 1.0) if run.crosses else 1.0  # a flow has one NIC
            return counted(
                found,
                hop=value("hop_ratio") * lone,
                overhead=run.crosses * value("message_seconds"),
                data=value("data_ratio"),
                turns=1 + buckets * value("buckets"),
                tied=value("tied_ratio") * whole,
            )

        return self._once((run.keys[1], self.key, run.trial.element_bytes, buckets), make)


def _scaled(costs: LayerCosts, factor: float) -> LayerCosts:
    """Return costs with a factor on those of a layer."""
    if factor == 1.0:
        return costs
    names = ("forward", "backward", "backward_input", "backward_weights")
    return dataclasses.replace(costs, **{name: factor * getattr(costs, name) for name in names})


def _stacked(some: Sequence[Fabric]) -> Fabric:
    """Return clusters of equal size as one, without links between them: the hosts of one follow those of another.

    Args:
        some: their links, without trunks or rails.
    """
    count = len(some[0].alpha)
    alpha, per_byte = np.zeros((2, len(some) * count, len(some) * count))
    for n, one in enumerate(some):
        own = slice(n * count, (n + 1) * count)
        alpha[own, own], per_byte[own, own] = one.alpha, one.per_byte
    return dataclasses.replace(some[0], alpha=alpha, per_byte=per_byte)
