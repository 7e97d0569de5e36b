"""A cluster: hosts, their devices, and what every link between hosts was measured to do."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxtrain.errors import UserError
from planner.cluster import cluster_file, hostlist
from planner.cluster.device_sheets import SHEETS, DeviceSheet
from planner.cluster.rails import Rails
from planner.cluster.trunks import Trunks


@dataclasses.dataclass(frozen=True)
class Shares:
    """Shares of its data sheet that an unmeasured device reaches; planner.fit.applied takes them from runs.

    The default of `memory` is fitted to half of the published runs of docs/accuracy.md, which other trainers made.

    Attributes:
        matmul: FLOP/s of the largest products over what the device reaches in training (DeviceSheet.reach); smaller
            products take what their shapes say (planner.cluster.products).
        memory: share of the bandwidth in passes over memory.
        layer_launch: least seconds of a layer's forward, which its kernels' launches take.
        backward: time of a layer's backward over its forward's, without recomputation.
        scores: passes over stored attention scores over those that planner.cost.compute counts.
        attention: time of attention that keeps no scores over the data sheet's.
        head: time of the head and the loss over the data sheet's.
        chunk_seconds: constant part of F and of B of a chunk.
        optimizer_bytes: bytes read and written per parameter. AdamW reads p, m, v, g and writes p, m, v, after one more
            pass over g each for the norm and its clipping.
        stored_scores: whether attention's scores go through memory, as without flash attention.
        eager: whether a host launches each kernel and collective, as PyTorch does.
    """

    matmul: float = 1.0
    memory: float = 0.80
    layer_launch: float = 1.2e-4
    backward: float = 2.0
    scores: float = 1.0
    attention: float = 1.0
    head: float = 1.0
    chunk_seconds: float = 0.0
    optimizer_bytes: float = 40.0
    stored_scores: bool = False
    eager: bool = False


ASSUMED = Shares()


@dataclasses.dataclass(frozen=True)
class TrainerExecution:
    """The way a trainer runs a plan, besides the shares of data sheets that it reaches; the default is this trainer.

    Attributes:
        trainer: its name, one of planner/runs/trainers.py.
        rows: stages exchange messages row by row, as this trainer's do; otherwise ops begin as soon as their messages
            are there (planner.pipeline.ideal).
        overlaps: shardings over data with which gradients are reduced under the last backward.
        whole_tables: the tied embedding's gradients are exchanged whole, in the dtype of the weights.
        crossing_launch: seconds by which Shares.layer_launch is longer for each tensor rank if stages exchange messages
            across hosts.
        message_seconds: seconds of a message between stages on different hosts, besides its bytes.
        buckets: collectives over data for each layer of a stage, beside one.
        hop_ratio: bytes of messages between stages, over those that planner.cost counts.
        data_ratio: the same of collectives over data.
        tied_ratio: the same of the exchange of the tied embedding's gradients.
        stalls: rates at which its runs stall, see planner/fit/stalls.py.
        stall_seconds: seconds that each message then takes longer.
    """

    trainer: str = "paxtrain"
    rows: bool = True
    overlaps: tuple[str, ...] = ("none", "zero1")
    whole_tables: bool = False
    crossing_launch: float = 0.0
    message_seconds: float = 0.0
    buckets: float = 0.0
    hop_ratio: float = 1.0
    data_ratio: float = 1.0
    tied_ratio: float = 1.0
    stalls: tuple[float, float, float] = (0.0, 0.0, 0.0)
    stall_seconds: float = 0.0

    @property
    def ease(self) -> float:
        """Factor on bytes that no message is below."""
        return min(1.0, self.hop_ratio, self.data_ratio, self.tied_ratio * (0.5 if self.whole_tables else 1.0))


PAXTRAIN = TrainerExecution()


# Shares of nominal rates that links reach in training, by the class of the link, fitted to half of the published runs
# of docs/accuracy.md.
ATTAINED = {"inside": 0.82, "between": 0.70}


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """A cluster, as the planner knows it.

    Attributes:
        name: name of the cluster.
        source: where the figures are from.
        hosts: names of the H hosts.
        devices_per_host: devices of each host.
        kinds: device kind of each host, one that `sheets` or device_sheets.py has, or "cpu".
        memory: [H] bytes of one device of the host.
        nics: flows that leave a host, and that enter it, at full speed.
        fan_out: hosts with which a host can exchange data at once, each at the full speed of their link; below 1: its
            NICs are not full both ways at once.
        sheets: devices that the file describes itself, by kind.
        sites: site of each host, numbered from 0; empty: all hosts are at one.
        trunks: uplinks that several hosts share; None: there are none.
        host_seconds: seconds of a step that are no device's, as a run measured them (planner.start.run_record).
        rails: how flows that change rails travel; None: all flows of a host share its NICs equally.
        alpha: [H, H] seconds of latency from host to host; on the diagonal inside a host.
        samples: [R, H, H] bytes/s of a single flow, likewise; R repeated measurements.
        measured: [H, H] whether the link was measured or follows from others; None: all were.
        nominal: classes of links whose rates are a data sheet's, "inside" and "between" hosts; see `attained`.
        reached: classes of links whose rates are a share of nominal ones.
        compute: rows of the compute profile, which planner/cost/compute.py reads.
        named: whether the hosts' names are the real ones, not made up from a count.
        shares: shares of the data sheet that devices reach if there is no compute profile.
        execution: how the trainer that plans are made for runs them.
        deviations: standard deviations of logarithms of constants that were fitted to its runs, by their names in
            planner/fit/constants.py.
        parts: the cluster whose hosts are taken several at a time here, see `merged`.
        blocks: hosts of `parts` that each host stands for, in the order of their devices; (): there are no parts.
    """

    name: str
    source: str
    hosts: tuple[str, ...]
    devices_per_host: int
    kinds: tuple[str, ...]
    memory: np.ndarray
    nics: int
    alpha: np.ndarray
    samples: np.ndarray
    measured: np.ndarray | None = None
    nominal: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()
    compute: tuple[dict[str, Any], ...] = ()
    named: bool = True
    shares: Shares = ASSUMED
    execution: TrainerExecution = PAXTRAIN
    deviations: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parts: "Cluster | None" = None
    blocks: tuple[tuple[int, ...], ...] = ()
    fan_out: float = 1.0
    sheets: Mapping[str, DeviceSheet] = dataclasses.field(default_factory=dict)
    sites: tuple[int, ...] = ()
    trunks: Trunks | None = None
    rails: Rails | None = None
    host_seconds: float = 0.0

    @classmethod
    def load(cls, name: str | pathlib.Path) -> "Cluster":
        """Return the cluster of a file, given by its path or by the name of a shipped one, such as "a100_16x8".

        Raises:
            UserError: the file cannot be read, or a link, host or device in it makes no sense.
        """
        return cls(**cluster_file.read(name))

    @classmethod
    def of(cls, given: "Cluster | str | pathlib.Path") -> "Cluster":
        """Return a cluster as it is, and a file's as `load` does.

        Raises:
            UserError: it is neither a cluster nor the name of a file, or `load` refuses the file.
        """
        if isinstance(given, (str, pathlib.Path)):
            return cls.load(given)
        if not isinstance(given, cls):
            raise UserError(f"cluster must be a planner.Cluster, a path or a shipped name, got {type(given).__name__}")
        return given

    @classmethod
    def parse(cls, values: object, folder: pathlib.Path = pathlib.Path()) -> "Cluster":
        """Return the cluster that a file's values describe.

        Args:
            values: values of the JSON, see cluster_file.py.
            folder: folder of the .npz that they may name.

        Raises:
            UserError: a key is unknown or missing, or a link, host or device makes no sense.
        """
        return cls(**cluster_file.parse(values, folder))

    def save(self, path: str | pathlib.Path) -> None:
        """Write a cluster file, and beside it an .npz with the links if there are many."""
        fields = cluster_file.Fields(
            name=self.name,
            source=self.source,
            hosts=self.hosts,
            devices_per_host=self.devices_per_host,
            kinds=self.kinds,
            memory=self.memory,
            nics=self.nics,
            fan_out=self.fan_out,
            alpha=self.alpha,
            samples=self.samples,
            measured=self.measured,
            nominal=self.nominal,
            compute=self.compute,
            named=self.named,
            sheets=self.sheets,
            sites=self.sites,
            trunks=self.trunks,
            rails=self.rails,
        )
        cluster_file.write(fields, path)

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return len(self.hosts) * self.devices_per_host

    def sheet(self, kind: str) -> DeviceSheet | None:
        """Return the data sheet of a device kind; None if there is none, as for CPUs."""
        return self.sheets.get(kind) or SHEETS.get(kind)

    @property
    def overlaps(self) -> bool:
        """Return whether transfers run beside compute: on GPUs they do, on the CPU backend they do not."""
        return "cpu" not in self.kinds

    @functools.cached_property
    def bandwidth(self) -> np.ndarray:
        """Return the median over the samples, [H, H] bytes/s."""
        return np.median(self.samples, axis=0)

    def quantile(self, q: float) -> np.ndarray:
        """Return the bytes/s [H, H] that a link exceeds in all but a share `q` of its samples."""
        return np.quantile(self.samples, q, axis=0)


@functools.lru_cache(maxsize=64)
def with_crossing(cluster: Cluster, tensor: int) -> Cluster:
    """Return the cluster as its trainer's layers are priced on it if messages between stages cross hosts.

    Args:
        cluster: the cluster.
        tensor: tensor ranks, for each of which the host launches later.
    """
    if not cluster.execution.crossing_launch:
        return cluster
    launch = cluster.shares.layer_launch + tensor * cluster.execution.crossing_launch
    return dataclasses.replace(cluster, shares=dataclasses.replace(cluster.shares, layer_launch=launch))


def between(cluster: Cluster) -> np.ndarray:
    """Return True for the pairs of different hosts, bool [H, H]."""
    return ~np.eye(len(cluster.hosts), dtype=bool)


def inside(cluster: Cluster, kind: str) -> tuple[float, float]:
    """Return latency and bandwidth inside the slowest host of a kind."""
    hosts = np.array([i for i, k in enumerate(cluster.kinds) if k == kind])
    return float(cluster.alpha[hosts, hosts].max()), float(cluster.bandwidth[hosts, hosts].min())


class HostSpan(NamedTuple):
    """The hosts that are taken as one, over which devices that share layers may lie.

    Attributes:
        latency: seconds between neighbours in the ring of these hosts, at most; a number or an array.
        rate: bytes/s of a flow between them that is alone, at least; likewise.
        devices: devices of each host.
        nics: flows that leave each host at full speed.
    """

    latency: Any
    rate: Any
    devices: int
    nics: int


@functools.lru_cache(maxsize=256)
def span(cluster: Cluster, kind: str) -> HostSpan | None:
    """Return what joins the hosts that are taken as one, those of a kind; None if each is one by itself."""
    if (parts := cluster.parts) is None:
        return None
    blocks = np.array([block for block in cluster.blocks if parts.kinds[block[0]] == kind])
    links = blocks, np.roll(blocks, -1, axis=1)
    return HostSpan(
        float(parts.alpha[links].max()), float(parts.bandwidth[links].min()), parts.devices_per_host, parts.nics
    )


def seat_links(cluster: Cluster, kind: str) -> tuple[tuple[float, float], HostSpan | None]:
    """Return the links of devices for which layers wait: those inside a host of a kind, and what joins its hosts."""
    return inside(cluster.parts or cluster, kind), span(cluster, kind)


def attained(cluster: Cluster) -> Cluster:
    """Return the cluster with the rates that its links reach in training: of nominal ones a share, others as they are.

    Trunks are links between hosts.
    """
    if not cluster.nominal:
        return cluster
    inside, outside = (ATTAINED[name] if name in cluster.nominal else 1.0 for name in ("inside", "between"))
    trunks = cluster.trunks
    return dataclasses.replace(
        cluster,
        samples=cluster.samples * np.where(between(cluster), outside, inside),
        trunks=trunks and dataclasses.replace(trunks, bandwidth=trunks.bandwidth * outside),
        nominal=(),
        reached=cluster.nominal,
    )


def merged(cluster: Cluster, together: int, blocks: Sequence[Sequence[int]] = ()) -> Cluster:
    """Return the cluster as if each `together` hosts were one, for groups of devices that span hosts.

    A pair of such hosts is as slow as the slowest pair of the hosts in them, i-th to i-th. Such a host is inside as
    slow as the slowest link that a ring over all of its devices takes.

    Args:
        cluster: cluster of single hosts.
        together: hosts that become one, a divisor of the number of hosts.
        blocks: hosts that become one, in the order of a ring over them; (): those in a row.

    Raises:
        UserError: the hosts do not divide, or hosts that would be one differ in their devices or trunks.
    """
    count = len(cluster.hosts)
    if count % together:
        raise UserError(f"{count} hosts cannot be taken {together} at a time; a divisor of {count} would do")
    some = np.array(blocks or range(count)).reshape(-1, together)
    for block in some:
        if len({cluster.kinds[i] for i in block}) > 1:
            names = ", ".join(cluster.hosts[i] for i in block)
            raise UserError(f"tensor groups cannot span {names}, whose devices differ in kind")
        if cluster.trunks is not None and cluster.trunks.splits(block):
            names = ", ".join(cluster.hosts[i] for i in block)
            raise UserError(f"tensor groups cannot span {names}, which are behind different trunks")
    following = np.roll(some, -1, axis=1)

    def join(x: np.ndarray, worst: Callable[..., np.ndarray]) -> np.ndarray:
        pairs = worst(x[..., some[:, None], some[None]], axis=-1)
        within = worst(np.concatenate([x[..., some, following], x[..., some, some]], axis=-1), axis=-1)
        return np.where(np.eye(len(some), dtype=bool), within[..., None], pairs)

    first = some[:, 0]
    return dataclasses.replace(
        cluster,
        hosts=tuple("+".join(cluster.hosts[i] for i in block) for block in some),
        devices_per_host=cluster.devices_per_host * together,
        kinds=tuple(cluster.kinds[i] for i in first),
        memory=cluster.memory[some].min(axis=1),
        nics=cluster.nics * together,
        alpha=join(cluster.alpha, np.max),
        samples=join(cluster.samples, np.min),
        measured=None,
        sites=tuple(cluster.sites[i] for i in first) if cluster.sites else (),
        trunks=None if cluster.trunks is None else cluster.trunks.of_hosts(first),
        parts=cluster,
        blocks=tuple(map(tuple, some.tolist())),
    )


def without(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """Return the cluster as it is when these hosts are gone.

    Args:
        cluster: cluster that is not merged.
        names: names of the hosts to leave out, or hostlists.

    Raises:
        UserError: there is no such host, or none would be left.
        ValueError: the hosts are taken several at a time already; `merged` comes after this.
    """
    if cluster.parts is not None:
        raise ValueError("leave hosts out before they are merged")
    names = hostlist.expand(names)
    for name in names:
        if name not in cluster.hosts:
            known = ", ".join(cluster.hosts[:8]) + (", ..." if len(cluster.hosts) > 8 else "")
            raise UserError(f"there is no host {name!r} to leave out; the cluster has {known}")
    left = [name for name in cluster.hosts if name not in names]
    if not left:
        raise UserError(f"all {len(cluster.hosts)} hosts are left out; leave one at least")
    return of_hosts(cluster, left)


def of_hosts(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """Return the cluster of some of its hosts, in the order of their names here."""
    where = [cluster.hosts.index(name) for name in names]
    kinds = tuple(cluster.kinds[i] for i in where)
    grid = np.ix_(where, where)
    return dataclasses.replace(
        cluster,
        hosts=tuple(names),
        kinds=kinds,
        memory=cluster.memory[where],
        alpha=cluster.alpha[grid],
        samples=cluster.samples[:, grid[0], grid[1]],
        measured=None if cluster.measured is None else cluster.measured[grid],
        compute=tuple(row for row in cluster.compute if row["kind"] in kinds),
        sites=tuple(cluster.sites[i] for i in where) if cluster.sites else (),
        trunks=None if cluster.trunks is None else cluster.trunks.of_hosts(where),
    )
