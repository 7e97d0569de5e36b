"""The step time of a candidate on placements: compute, transfers, data-parallel reductions and the optimizer, joined.

A step is what paxtrain.parallel.step runs. Weights are gathered over data (ZeRO-1), and the pipeline runs
(planner.pipeline.simulator). Each stage reduces its gradients over data when its last op is done, and the tied embedding's
two gradients are exchanged. When all is reduced, the optimizer updates. With compression over data, the stages are
chosen for each placement by the trainer's rule (compress.policy.selective).

On GPUs a stage whose last op is in the last row reduces each layer's gradient under that op's other layers
(`Problem.hidden`). Over gloo nothing is counted as hidden.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxtrain.config import ModelConfig, parallel
from paxtrain.schedule.schedules import SPECS, build
from planner.cluster.cluster import Cluster
from planner.cost import compute as costs
from planner.cost.coded import LOW_RANK, Coded
from planner.cost.link_seconds import Fabric, Paths, paths
from planner.pipeline import simulator
from planner.pipeline.rows import Table

Array = np.ndarray

MASTER = 4  # bytes of a float32 gradient or master weight
# PowerSGD with error feedback: add the error, project, back-project, decode, keep what is left out.
POWER_PASSES = 7
POWER_LAUNCHES = 12  # kernels per matrix

# gloo (CPU backend) has one connection per pair of ranks, on which "ready to receive" waits behind what is being sent.
# So when two ranks exchange messages, the first to come cannot send before the other one's message has arrived. An
# all-gather sends its message as two halves, and the first rank's may follow the first of the other one's.
EXCHANGE = 1.5


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan without its placement.

    Attributes:
        data: size of the data axis.
        pipe: size of the pipe axis.
        tensor: size of the tensor axis.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches per data rank and step.
        schedule: PipelineConfig.schedule.
        counts: layers of each virtual stage.
        chunks: PipelineConfig.virtual_stages.
        save: PipelineConfig.save.
        zero1: MeshConfig.zero1.
        sequence_parallel: MeshConfig.sequence_parallel.
        backward: compressed gradients between stages, "none", "epilogue" or "all".
        backward_rank: rank of their factors.
        reduce_dtype: MeshConfig.reduce_dtype.
        data_rank: rank of the factors over data of the stages whose reduction ends the step; 0: none is compressed.
        coded: codecs other than low rank; with one, the rank of its place only says whether it compresses. What
            activations between stages go through is here, too.
    """

    data: int
    pipe: int
    tensor: int
    micro_batch: int
    micro_batches: int
    schedule: str
    counts: tuple[int, ...]
    chunks: int = 1
    save: str = "dots"
    zero1: bool = True
    sequence_parallel: bool = False
    backward: str = "none"
    backward_rank: int = 16
    data_rank: int = 0
    reduce_dtype: str = "float32"
    coded: Coded = LOW_RANK

    @property
    def groups(self) -> int:
        """Number of tensor groups, each of which lies on one host."""
        return self.data * self.pipe

    @property
    def inside(self) -> int:
        """Data ranks of a group, inside which gradients are summed as they are; 1 without groups."""
        return self.coded.grouped(self.data) if self.data_rank else 1

    @property
    def parts(self) -> int:
        """Number of parts of the sequence; a device keeps and sends one."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def compresses_forward(self) -> bool:
        """Return whether activations between stages are compressed."""
        return self.pipe > 1 and self.coded.compresses_forward

    @property
    def slots(self) -> int:
        """Layer slots of a stage, padding included."""
        return max(self.counts) * self.chunks


class DataLinks(NamedTuple):
    """Seconds of collectives among data ranks of each stage, [batch, P]; see `LinkSeconds`."""

    ring_latency: Array
    ring_per_byte: Array
    scatter_latency: Array
    scatter_per_byte: Array


@dataclasses.dataclass(frozen=True, eq=False)
class LinkSeconds:
    """Seconds of a candidate's messages on a batch of placements.

    Attributes:
        activation: [batch, D, P] of a message with activations, by sender.
        gradient: [batch, D, P] of a message with a gradient, by sender.
        packed: [batch, D, P] of a compressed gradient, by sender.
        ring_latency: [batch, P] latency of one turn of a stage's data-parallel ring.
        ring_per_byte: [batch, P] seconds per byte of that turn.
        scatter_latency: [batch, P] latency of a stage's reduce-scatter over data.
        scatter_per_byte: [batch, P] its seconds per byte of a rank's whole array.
        swap: [batch] of the exchange of the tied embedding's gradients; 0 if it is not tied.
        inside: the same four inside groups of data ranks; None if there are no groups.
        between: the same four between groups.
    """

    activation: Array
    gradient: Array
    packed: Array
    ring_latency: Array
    ring_per_byte: Array
    scatter_latency: Array
    scatter_per_byte: Array
    swap: Array
    inside: DataLinks | None = None
    between: DataLinks | None = None

    @property
    def compressed(self) -> DataLinks:
        """Links over which compressed gradients travel: those between groups, or those of all data ranks."""
        every = DataLinks(self.ring_latency, self.ring_per_byte, self.scatter_latency, self.scatter_per_byte)
        return self.between or every


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A batch of predicted steps, in seconds.

    Attributes:
        total: [batch] whole step.
        gather: [batch, P] all-gather of the weights before the first row.
        finish: [batch, P] time when a stage's last data rank has left its last row.
        reduce: [batch, P] reduction of a stage's gradients, including the embedding's, as far as it comes after the
            stage's last row.
        compressed: [batch, P] bool, stages whose reduction is compressed.
        optimizer: [batch] update.
    """

    total: Array
    gather: Array
    finish: Array
    reduce: Array
    compressed: Array
    optimizer: Array


class Problem:
    """One candidate on one cluster, to be evaluated on many placements.

    Arrays [kinds, ...] have a row for each kind of device. With several splits of the layers they have such rows for
    each split, one split after the other.
    """

    def __init__(
        self, cluster: Cluster, model: ModelConfig, candidate: Candidate, splits: Sequence[tuple[int, ...]] = ()
    ) -> None:
        self.cluster, self.model, self.candidate = cluster, model, candidate
        kinds = sorted(set(cluster.kinds))
        self.kind_of_host = np.array([kinds.index(kind) for kind in cluster.kinds])
        c = candidate
        how = (c.tensor, c.micro_batch, c.save, c.sequence_parallel)
        self.layer = [costs.layer(cluster, kind, model, *how) for kind in kinds]
        self.overlap = cluster.overlaps
        self.table = Table(c.schedule, c.pipe, c.micro_batches, c.chunks, c.backward)
        counts = np.repeat(np.array(splits or [c.counts], float), len(self.layer), axis=0)  # [kinds, V]
        self.layer = self.layer * max(len(splits), 1)
        first = np.zeros(counts.shape[1])
        first[0] = 0.5  # half of the embedding's time is its look-up, half its gradient
        names = ("forward", "backward", "embedding", "backward_input", "backward_weights", "head", "optimizer")
        unit = {name: np.array([getattr(x, name) for x in self.layer]) for name in names}
        divided = SPECS[c.schedule].splits and c.pipe > 1
        table, last = unit["embedding"][:, None] * first, unit["backward_weights" if divided else "backward"]
        self.forward = unit["forward"][:, None] * counts + table
        self.backward = unit["backward_input" if divided else "backward"][:, None] * counts + table
        self.weights = unit["backward_weights"][:, None] * counts * divided
        self.head = unit["head"]
        self.hides = self._hidden(counts) * last[:, None]  # [kinds, P]
        # The optimizer is passes over memory, so its speed is also that of the other passes.
        self.pass_per_byte = unit["optimizer"] / cluster.shares.optimizer_bytes

    def _hidden(self, counts: Array) -> Array:
        """Return on how many layers [kinds, P] a stage's last op runs while the reduction of others can run.

        A layer's gradient is reduced under the layers that follow. Other chunks' gradients are final before the op.

        Args:
            counts: layers of each virtual stage, [kinds, V].
        """
        c = self.candidate
        if not self.overlap or c.data == 1:
            return np.zeros((len(counts), c.pipe))
        few = min(c.micro_batches, 2 * c.pipe + c.micro_batches % c.pipe)  # further ones only repeat rows
        closing = _closing(c.schedule, c.pipe, c.micro_batches if SPECS[c.schedule].size else few, c.chunks)
        return closing * (counts[:, : c.pipe] - (c.chunks == 1))

    @property
    def work(self) -> Array:
        """Seconds of one micro-batch, F, B and W together, [kinds, V]."""
        return self.forward + self.backward + self.weights

    # --- Sizes --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def message(self) -> int:
        """Bytes of a message between stages, as it is."""
        return costs.message_bytes(self.model, self.candidate.micro_batch, self.candidate.parts)

    @property
    def _message_shape(self) -> tuple[int, int, int]:
        """Shape of a message between stages."""
        c = self.candidate
        return c.micro_batch, self.model.sequence // c.parts, self.model.hidden

    @functools.cached_property
    def activation(self) -> int:
        """Bytes of a message with activations on the wire."""
        c = self.candidate
        if c.coded.forward is not None:
            return c.coded.message_bytes(self._message_shape, self.model.dtype, "forward")
        rank = c.coded.forward_rank
        return costs.packed_bytes(self.model, c.micro_batch, rank, c.parts) if rank else self.message

    @functools.cached_property
    def packed(self) -> int:
        """Bytes of a compressed gradient between stages."""
        c, model = self.candidate, self.model
        if c.coded.backward is not None:
            return c.coded.message_bytes(self._message_shape, model.dtype)
        return costs.packed_bytes(model, c.micro_batch, c.backward_rank, c.parts)

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of a stage's layer slots on one device."""
        return self.candidate.slots * costs.layer_parameters(self.model, self.candidate.tensor)

    @functools.cached_property
    def embedding_parameters(self) -> int:
        return costs.embedding_parameters(self.model, self.candidate.tensor, self.candidate.pipe)

    @property
    def swaps(self) -> bool:
        """The first and the last stage exchange the gradients of the tied embedding."""
        return self.candidate.pipe > 1 and self.model.tied_head

    @property
    def meets(self) -> Array:
        """Stages whose data ranks gather and reduce an embedding, bool [P]; over gloo all do (weights.on_edges)."""
        stages = np.arange(self.candidate.pipe)
        everywhere = not self.overlap and len(self.cluster.hosts) > 1
        return (stages == 0) | (stages == stages[-1]) | everywhere

    @functools.cached_property
    def factor_bytes(self) -> int:
        """Bytes of a stage's gradients over data, as factors or, for what is not compressed, as they are.

        In groups of data ranks they are those between groups, where only factors travel.
        """
        c, kernels = self.candidate, costs.kernels(self.model, self.candidate.tensor)
        parts = [c.coded.part(shape, c.data, c.zero1) for shape in kernels]
        factors = sum(c.data_rank * int(n + k) for n, k in parts)
        rest = self._rest if c.inside == 1 else 0
        return c.slots * (factors * MASTER + rest * costs.ITEM[c.reduce_dtype])

    # --- Seconds ------------------------------------------------------------------------------------------------------

    def links(self, paths: Paths) -> LinkSeconds:
        """Return the seconds of the candidate's messages on the paths of some placements."""
        c = self.candidate

        def on(path: tuple[Array, Array], size: float) -> Array:
            return path[0] + size * path[1]

        both = on(paths.swap, self.embedding_parameters * MASTER / c.data)
        swap = (both.max(axis=-1) if self.overlap else both.sum(axis=-1)).max(axis=1)
        return LinkSeconds(
            activation=on(paths.forward, self.activation),
            gradient=on(paths.backward, self.message),
            packed=on(paths.backward, self.packed),
            ring_latency=paths.ring[0],
            ring_per_byte=paths.ring[1],
            scatter_latency=paths.scatter[0],
            scatter_per_byte=paths.scatter[1],
            swap=swap if self.swaps else np.zeros_like(swap),
            inside=DataLinks(*paths.inside) if c.inside > 1 else None,
            between=DataLinks(*paths.between) if c.inside > 1 else None,
        )

    def step(self, fabric: Fabric, hosts: Array) -> Step:
        """Return the predicted steps on placements.

        Args:
            fabric: links of the cluster.
            hosts: int [batch, D, P].
        """
        return self.evaluate(self.links(self.paths(fabric, hosts)), self.kind_of_host[hosts])

    def paths(self, fabric: Fabric, hosts: Array) -> Paths:
        """Return the paths of placements as candidates of this mesh need them, whether or not they compress.

        Args:
            fabric: links of the cluster.
            hosts: int [batch, D, P].
        """
        c = self.candidate
        return paths(fabric, hosts, c.tensor, c.coded.grouped(c.data))

    def seconds(self, links: LinkSeconds, kinds: Array) -> simulator.Seconds:
        """Return the simulator's durations, with all pipelines of all placements as one batch."""
        c = self.candidate

        def flat(x: Array) -> Array:
            return x.reshape(-1, c.pipe)

        stage = np.tile(np.arange(c.pipe), c.chunks) + np.repeat(np.arange(c.chunks), c.pipe) * c.pipe
        on = np.tile(flat(kinds), (1, c.chunks))  # [pipelines, V]
        gather = self._gather(links)
        compute = {}
        if c.backward != "none":
            encode, decode = self._codec_seconds("backward", flat(kinds))
            compute = {"packed": flat(links.packed), "encode": encode, "decode": decode}
        forward = self.forward[on, stage]
        if c.compresses_forward:  # F decodes what it gets and encodes what it sends
            encode, decode = self._codec_seconds("forward", on)
            forward = forward + encode * (stage < len(stage) - 1) + decode * (stage > 0)
        return simulator.Seconds(
            forward=forward,
            backward=self.backward[on, stage],
            weights=self.weights[on, stage],
            activation=flat(links.activation),
            gradient=flat(links.gradient),
            head=self.head[flat(kinds)[:, -1]],
            start=np.repeat(gather, kinds.shape[1], axis=0),
            **compute,
        )

    def _codec_seconds(self, place: str, kinds: Array) -> tuple[Array, Array]:
        """Return the seconds to encode and to decode a message of a place on devices of some kinds."""
        encode, decode, launches = self.candidate.coded.message_passes(place)
        passes = self.message * self.pass_per_byte[kinds]
        return encode * passes + launches * costs.LAUNCH, decode * passes + launches * costs.LAUNCH

    def _gather(self, links: LinkSeconds) -> Array:
        """Return the seconds [batch, P] of the all-gather of the weights, including the embedding, in compute dtype."""
        c = self.candidate
        if not c.zero1 or c.data == 1:
            return np.zeros(links.ring_latency.shape)
        weights = np.full(c.pipe, self._layer_weights())
        weights[self.meets] += self.embedding_parameters * costs.ITEM[self.model.dtype]
        seconds = links.ring_latency + (c.data - 1) / c.data * weights * links.ring_per_byte
        return seconds * (EXCHANGE if c.data == 2 and not self.overlap else 1.0)

    def _layer_weights(self) -> int:
        """Return the bytes of a stage's layers as they are gathered, those of all ranks together."""
        c, dtype = self.candidate, self.model.dtype
        whole = self.layer_parameters * costs.ITEM[dtype]
        if c.coded.weights is None:
            return whole
        kernels = costs.kernels(self.model, c.tensor)
        sent = sum(c.data * c.coded.weight_bytes(shape, c.data, dtype) for shape in kernels)
        return whole - c.slots * (sum(n * k for n, k in kernels) * costs.ITEM[dtype] - sent)

    def _reductions(self, links: LinkSeconds, kinds: Array) -> tuple[Array, Array, Array, Array]:
        """Return seconds [batch, P]: to reduce a stage's layers, or their factors; to make these; for the embedding."""
        c = self.candidate
        shape = links.ring_latency.shape
        edge = np.zeros(shape)
        if c.pipe > 1:
            edge[:, 0] = edge[:, -1] = links.swap
        none = np.zeros(shape)
        if c.data == 1:
            return none, np.full(shape, np.inf), none, edge
        turn = (c.data - 1) / c.data * links.ring_per_byte
        size = costs.ITEM[c.reduce_dtype]

        def reduced(parameters: int) -> Array:
            if c.zero1:
                return links.scatter_latency + parameters * size * links.scatter_per_byte
            return 2 * (links.ring_latency + parameters * size * turn)  # an all-reduce

        dense, table = reduced(self.layer_parameters), reduced(self.embedding_parameters)
        edge[:, self.meets] += table[:, self.meets]
        if not c.data_rank:
            return dense, np.full(shape, np.inf), none, edge
        slowest = self.pass_per_byte[kinds].max(axis=1)
        small, work = (self._coded if c.coded.data is not None else self._low_rank)(links, slowest)
        if links.inside is not None:
            small = small + self._inside_groups(links.inside)
        if links.inside is not None or c.coded.data is not None:  # what no factors travel with
            small = small + reduced(c.slots * self._rest)
        return dense, small, work, edge

    @property
    def _rest(self) -> int:
        """Parameters of a layer that are never compressed, on one device."""
        kernels = costs.kernels(self.model, self.candidate.tensor)
        return costs.layer_parameters(self.model, self.candidate.tensor) - sum(n * k for n, k in kernels)

    def _inside_groups(self, links: DataLinks) -> Array:
        """Return the seconds [batch, P] of the reduction of a stage's kernels inside groups of data ranks.

        Args:
            links: seconds of collectives inside groups.
        """
        c = self.candidate
        numbers = c.slots * sum(n * k for n, k in costs.kernels(self.model, c.tensor))
        seconds = links.scatter_latency + numbers * costs.ITEM[c.reduce_dtype] * links.scatter_per_byte
        if c.zero1:
            return seconds
        turn = (c.inside - 1) / c.inside * links.ring_per_byte
        return seconds + links.ring_latency + numbers * MASTER * turn  # the means are gathered

    def _low_rank(self, links: LinkSeconds, slowest: Array) -> tuple[Array, Array]:
        """Return the seconds [batch, P] of the all-reduces of a stage's factors, and of the work to make them.

        Args:
            links: seconds of the messages.
            slowest: seconds [batch, P] of a pass over a byte.
        """
        c, over = self.candidate, links.compressed
        matrices = c.slots * len(costs.kernels(self.model, c.tensor))
        # In groups the passes are over a rank's part. Two more cut gradients and one sums them, as Hierarchical says.
        passes = POWER_PASSES if c.inside == 1 else 3 + POWER_PASSES / c.inside
        work = passes * self.layer_parameters * MASTER * slowest + matrices * POWER_LAUNCHES * costs.LAUNCH
        ranks = c.data // c.inside
        turn = (ranks - 1) / ranks * over.ring_per_byte
        return 2 * (2 * over.ring_latency + self.factor_bytes * turn), work  # two all-reduces, one for either factor

    def _coded(self, links: LinkSeconds, slowest: Array) -> tuple[Array, Array]:
        """Return the seconds [batch, P] of a stage's exchanges by its codec, and of the codec's work.

        Args:
            links: seconds of the messages.
            slowest: seconds [batch, P] of a pass over a byte.
        """
        c, kernels, over = self.candidate, costs.kernels(self.model, self.candidate.tensor), links.compressed
        sent: dict[str, float] = {}
        count: dict[str, int] = {}
        for shape in kernels:
            for kind, size, number in c.coded.exchanges(shape, c.data, c.zero1):
                sent[kind] = sent.get(kind, 0.0) + size * c.slots
                count[kind] = max(count.get(kind, 0), number)  # arrays share collectives
        seconds, ranks = np.zeros_like(slowest), c.data // c.inside
        for kind, size in sent.items():
            if kind == "all-to-all":
                whole = size * ranks / (ranks - 1)  # with the rank's part for itself
                seconds = seconds + count[kind] * over.scatter_latency + whole * over.scatter_per_byte
            else:
                turns = 2 if kind == "all-reduce" else 1
                seconds = seconds + count[kind] * turns * over.ring_latency + size * over.ring_per_byte
        passes, launches = c.coded.reduction_passes(c.data)
        matrices = c.slots * len(kernels)
        work = passes * self.layer_parameters * MASTER * slowest + matrices * launches * costs.LAUNCH
        return seconds, work

    def evaluate(self, links: LinkSeconds, kinds: Array) -> Step:
        """Return the steps for link seconds.

        Args:
            links: seconds of the messages.
            kinds: device kinds [batch, D, P] (indices) of all groups.
        """
        pipelines = simulator.pipeline(self.table, self.seconds(links, kinds), self.overlap)
        return self.finish(links, kinds, pipelines)

    def finish(self, links: LinkSeconds, kinds: Array, pipelines: Array) -> Step:
        """Return the steps for the simulator's seconds of all pipelines.

        Args:
            links: seconds of the messages.
            kinds: device kinds [batch, D, P] (indices) of all groups.
            pipelines: seconds [batch * D, P] at which stages leave their last rows.
        """
        c = self.candidate
        ranks = pipelines.reshape(*kinds.shape)
        finish = ranks.max(axis=1)
        dense, factors, passes, edge = self._reductions(links, kinds)
        # A layer is reduced once all data ranks have its gradient; the last layer's reduction comes after the last op.
        begin = (ranks - self.hides[kinds, np.arange(c.pipe)]).max(axis=1)
        scans = parallel.scans("auto", min(c.counts))

        def end(seconds: Array, begin: Array) -> Array:
            return np.maximum(finish + seconds / c.slots, begin + seconds) + edge

        whole = end(dense, begin)
        # In a loop over layers factors are not reduced: the loop's layers share one array, but not their states.
        small = end(factors, finish if scans else begin) + passes
        ends = np.minimum(whole, small).max(axis=1, keepdims=True)
        compressed = whole > ends
        reduce = np.where(compressed, small, whole) - finish
        held = (self.layer_parameters + self.embedding_parameters) / (c.data if c.zero1 else 1)
        per_parameter = np.array([x.optimizer for x in self.layer])
        optimizer = held * per_parameter[kinds].max(axis=(1, 2))
        # All stages know the global norm before any may update.
        total = (finish + reduce).max(axis=1) + optimizer
        return Step(total, self._gather(links), finish, reduce, compressed, optimizer)


@functools.lru_cache(maxsize=65536)
def _closing(schedule: str, stages: int, micro_batches: int, chunks: int) -> Array:
    """Return whether each stage's gradients become final in the last row, bool [P]; see `Schedule.closing`."""
    if stages == 1:
        return np.ones(1, bool)
    return np.isin(np.arange(stages), build(schedule, stages, micro_batches, chunks, True).closing)


def steps(problems: list[Problem], placements: list[tuple[Paths, Array]]) -> list[Step]:
    """Return the steps of many candidates, each on a batch of placements.

    Candidates that run the same table are simulated together.

    Args:
        problems: candidates.
        placements: each problem's paths, and the device kinds [batch, D, P] (indices) of its groups.
    """
    links = [problem.links(where) for problem, (where, _) in zip(problems, placements, strict=True)]
    seconds = [p.seconds(x, kinds) for p, x, (_, kinds) in zip(problems, links, placements)]
    tables: dict[Table, list[int]] = {}
    for n, problem in enumerate(problems):
        tables.setdefault(problem.table, []).append(n)
    found: list[Step | None] = [None] * len(problems)
    for table, members in tables.items():
        together = simulator.concatenate([seconds[n] for n in members])
        pipelines = simulator.pipeline(table, together, problems[members[0]].overlap)
        ends = np.cumsum([len(seconds[n].forward) for n in members])
        for n, part in zip(members, np.split(pipelines, ends[:-1])):
            found[n] = problems[n].finish(links[n], placements[n][1], part)
    return found


def of_splits(problem: Problem, splits: Sequence[tuple[int, ...]], where: Paths, kinds: Array) -> Array:
    """Return the steps [splits, batch] in seconds of a candidate with each of some splits of its layers.

    Args:
        problem: the candidate.
        splits: layers of each virtual stage, of each split.
        where: paths of the placements.
        kinds: device kinds [batch, D, P] (indices) of their groups.
    """
    found, alike = np.empty((len(splits), len(kinds))), {}
    for n, counts in enumerate(splits):
        alike.setdefault((max(counts), parallel.scans("auto", min(counts))), []).append(n)
    for members in alike.values():
        some = [splits[n] for n in members]
        candidate = dataclasses.replace(problem.candidate, counts=some[0])
        one = Problem(problem.cluster, problem.model, candidate, some)
        first = np.arange(0, len(one.layer), len(one.layer) // len(some))  # kind of each split
        on = first[:, None, None, None] + kinds
        links = one.links(where.take(np.tile(np.arange(len(kinds)), len(some))))
        found[members] = one.evaluate(links, on.reshape(-1, *kinds.shape[1:])).total.reshape(len(some), -1)
    return found


def host_order(candidate: Candidate, per_host: int) -> Array:
    """Return the placement of a mesh over devices in order, int [1, D, P], as a run without a plan has it."""
    groups = np.arange(candidate.groups).reshape(1, candidate.data, candidate.pipe)
    return groups // (per_host // candidate.tensor)
