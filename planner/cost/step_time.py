"""The step time of a candidate on placements: compute, transfers, data-parallel reductions and the optimizer, joined.

A step is what paxtrain.parallel.step runs. Weights are gathered over data (ZeRO-1), and the pipeline runs
(planner.pipeline.simulator). Each stage reduces its gradients over data when its last op is done, and the tied
embedding's two gradients are exchanged (planner.cost.data_axis). When all is reduced, the optimizer updates. With
compression over data, the stages are chosen for each placement by the trainer's rule (compress.policy.selective).

On GPUs a stage whose last op is in the last row reduces each layer's gradient under that op's other layers
(`Problem.hides`). Over gloo nothing is counted as hidden.

Groups that train apart are predicted each by itself, on links that all of them use at once. The step is that of the
slowest group, and a share of what the exchange between groups adds (planner.cost.outer).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.model import parameters
from paxtrain.schedule.schedules import build, spec_of
from planner.cluster.cluster import PAXTRAIN, Cluster, TrainerExecution, with_crossing
from planner.cost import compute as costs
from planner.cost import data_axis, outer
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import DataLinks, Fabric, LinkSeconds, Paths, paths
from planner.cost.sizes import MASTER, Sizes
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table
from planner.program.kinds import on_stages

Array = np.ndarray

# gloo (CPU backend) has one connection per pair of ranks, on which "ready to receive" waits behind what is being sent.
# So when two ranks exchange messages, the first to come cannot send before the other one's message has arrived. An
# all-gather sends its message as two halves, and the first rank's may follow the first of the other one's.
EXCHANGE = 1.5


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A batch of predicted steps, in seconds; of groups that train apart those of the slowest one.

    Attributes:
        total: [batch] whole step, with the seconds of the host.
        gather: [batch, P] all-gather of the weights before the first row.
        finish: [batch, P] time when a stage's last data rank has left its last row.
        reduce: [batch, P] reduction of a stage's gradients, including the embedding's, as far as it comes after the
            stage's last row.
        compressed: [batch, P] bool, stages whose reduction is compressed.
        optimizer: [batch] update.
        outer: [batch, fragments] seconds for which groups wait for the exchange of each fragment; None without groups.
    """

    total: Array
    gather: Array
    finish: Array
    reduce: Array
    compressed: Array
    optimizer: Array
    outer: Array | None = None


class Problem(Sizes):
    """One candidate on one cluster, to be evaluated on many placements.

    Arrays [kinds, ...] have a row for each kind of device, and so for each split of the layers, if there are several.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelConfig,
        candidate: Candidate,
        splits: Sequence[tuple[int, ...]] = (),
        layer: Sequence[costs.LayerCosts] = (),
    ) -> None:
        """Prepare what does not depend on the placement.

        Args:
            cluster: cluster.
            model: model to train.
            candidate: candidate; its layers are split as `splits` say, if there are any.
            splits: layers of each virtual stage, of each split.
            layer: costs of a layer on each kind of device, and so for each of several settings of the constants; (): as
                the cluster has them.
        """
        super().__init__(model, candidate)
        self.cluster, self.overlap = cluster, cluster.overlaps
        c, kinds = candidate, sorted(set(cluster.kinds))
        self.kind_of_host = np.array([kinds.index(kind) for kind in cluster.kinds])
        how = (c.layer_sizes, c.micro_batch, c.save, c.sequence_parallel)
        priced = with_crossing(cluster, c.tensor) if self.crosses else cluster
        self.layer = list(layer) or [costs.layer(priced, kind, model, *how) for kind in kinds]
        packed = c.backward, c.backward_links
        self.table = Table(c.schedule, c.pipe, c.micro_batches, c.chunks, *packed, skips=bool(c.data_micro_batches))
        every, settings = splits or [c.counts], len(self.layer) // len(kinds)
        numbers = np.repeat(np.array(every, float), len(self.layer), axis=0)  # of layers, [kinds, V]
        differ = parameters.differ(model)
        self.of_layers = [costs.of_layers(priced, kind, model, *how) for kind in kinds if differ]

        def layers(name: str) -> Array:  # as many mean ones as take their time
            some = [[on_stages(own[name], counts) for own in self.of_layers] * settings for counts in every]
            return np.concatenate(some) if differ else numbers

        self.layer = self.layer * max(len(splits), 1)
        first = np.eye(1, len(c.counts))[0] / 2  # half of the embedding's time is its look-up, half its gradient
        names = [field.name for field in dataclasses.fields(costs.LayerCosts)]
        unit = {name: np.array([getattr(x, name) for x in self.layer]) for name in names}
        divided = spec_of(c.schedule).splits and c.pipe > 1
        table = unit["embedding"][:, None] * first + unit["chunk"][:, None]
        backward, closing = "backward_input" if divided else "backward", "backward_weights" if divided else "backward"
        self.forward = unit["forward"][:, None] * layers("forward") + table
        self.backward = unit[backward][:, None] * layers(backward) + table
        self.weights = unit["backward_weights"][:, None] * layers("backward_weights") * divided
        self.head, self.pass_per_byte = unit["head"], unit["byte"]
        self.hides = self._hidden(layers(closing), numbers) * unit[closing][:, None]  # [kinds, P]

    @functools.cached_property
    def crosses(self) -> bool:
        """True if stages exchange messages across hosts: on any placement if a host cannot hold a pipeline."""
        c = self.candidate
        return c.pipe > 1 and c.pipe * c.seat > self.cluster.devices_per_host

    def _hidden(self, layers: Array, numbers: Array) -> Array:
        """Return the number of layers [kinds, P] that a stage's last op runs while other layers' gradients are reduced.

        A layer's gradient is reduced under the layers that follow. Other chunks' gradients are final before the op.

        Args:
            layers: layers of each virtual stage, as many mean ones as take their time, [kinds, V].
            numbers: layers of each virtual stage, [kinds, V].
        """
        c = self.candidate
        reduced_under = ("zero1" if c.zero1 else "none") in self.cluster.execution.overlaps
        if not (self.overlap and reduced_under) or c.together == 1 or c.shards_sums:
            return np.zeros((len(layers), c.pipe))
        few = min(c.micro_batches, 2 * c.pipe + c.micro_batches % c.pipe)  # further ones only repeat rows
        closing = _closing(c.schedule, c.pipe, c.micro_batches if spec_of(c.schedule).size else few, c.chunks)
        one = np.divide(layers, numbers, out=np.ones_like(layers), where=numbers > 0)
        return closing * (layers - (c.chunks == 1) * one)[:, : c.pipe]

    @property
    def work(self) -> Array:
        """Seconds of one micro-batch, F, B and W together, [kinds, V]."""
        return self.forward + self.backward + self.weights

    @functools.cached_property
    def meets(self) -> Array:
        """Stages whose data ranks gather and reduce an embedding, bool [P]; over gloo all do (weights.on_edges)."""
        stages = np.arange(self.candidate.pipe)
        everywhere = not self.overlap and len(self.cluster.hosts) > 1
        return (stages == 0) | (stages == self.candidate.stage_map.last) | everywhere

    @functools.cached_property
    def sums(self) -> Array:
        """Seconds [P] of the sums of a stage's gradients over axes besides data, see `data_axis.seat_sums`."""
        return data_axis.seat_sums(self, self.cluster, self.meets)

    def links(self, paths: Paths) -> LinkSeconds:
        """Return the seconds of the candidate's messages on the paths of some placements."""
        c, paths = self.candidate, self.as_run(paths)

        def on(path: tuple[Array, Array], size: float) -> Array:
            seconds = path[0] + size * path[1]
            return seconds.reshape(-1, c.together, seconds.shape[-1])

        def stages(x: Array) -> Array:
            return x.reshape(-1, c.pipe)

        def data(latency: Array, per_byte: Array, scatter_latency: Array, scatter_per_byte: Array) -> DataLinks:
            # Devices that share sequences send a part each of what crosses hosts.
            bytes_each = (stages(x) / c.shared for x in (per_byte, scatter_per_byte))
            return DataLinks(stages(latency), next(bytes_each), stages(scatter_latency), next(bytes_each))

        swap = np.zeros(len(paths.swap[0]) * c.apart)
        if self.swaps:
            both = on(paths.swap, self.swapped)
            swap = (both.max(axis=-1) if self.overlap else both.sum(axis=-1)).max(axis=1)
        gradient, activation = on(paths.backward, self.message), on(paths.forward, self.activation)
        if c.forward_links:
            coded = np.isin(np.arange(c.pipe), c.forward_links)
            activation = np.where(coded, activation, on(paths.forward, self.message))
        return LinkSeconds(
            activation=activation,
            gradient=gradient,
            packed=gradient if c.backward == "none" else on(paths.backward, self.packed),
            **data(*paths.ring, *paths.scatter)._asdict(),
            swap=swap,
            inside=data(*paths.inside) if c.inside > 1 else None,
            between=data(*paths.between) if c.inside > 1 else None,
            outer=outer.seconds(self, self.pass_per_byte.max(), *paths.outer) if c.apart > 1 else None,
        )

    def as_run(self, where: Paths) -> Paths:
        """Return paths on which messages count as the cluster's trainer sends them."""
        by, c = self.cluster.execution, self.candidate
        if by == PAXTRAIN:
            return where
        whole = self.whole_tables(by)
        turns = 1 + by.buckets * int(c.stage_map.by_stage(c.counts).sum(axis=0).max())
        overhead = by.message_seconds if self.crosses else 0.0
        return counted(where, by.hop_ratio, overhead, by.data_ratio, turns, by.tied_ratio * whole)

    def whole_tables(self, by: TrainerExecution) -> float:
        """Return the bytes of the tied embedding's exchange over those of this trainer, which sends a rank's part."""
        return self.candidate.together * costs.ITEM[self.model.dtype] / MASTER if by.whole_tables else 1.0

    def replayed(self, table: Table, seconds: simulator.Seconds, rough: bool = False) -> Array:
        """Return the seconds [pipelines, P] at which stages end their last op, as the cluster's trainer runs a table.

        Args:
            table: table of the candidate's schedule.
            seconds: durations of pipelines.
            rough: see `simulator.pipeline`.
        """
        if self.cluster.execution.rows:
            return simulator.pipeline(table, seconds, self.overlap, rough)
        return ideal.pipeline(table, seconds)

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
        return paths(fabric, hosts, c.seat, c.shard_group or c.coded.grouped(c.together), c.apart)

    def seconds(self, links: LinkSeconds, kinds: Array) -> simulator.Seconds:
        """Return the simulator's durations, with all pipelines of all placements as one batch."""
        c = self.candidate

        def flat(x: Array) -> Array:
            return x.reshape(-1, c.pipe)

        stage = np.arange(c.pipe * c.chunks)
        on = flat(kinds) if c.chunks == 1 else flat(kinds)[:, c.stage_map.stage_of]  # [pipelines, V]
        gather = self._gather(links)
        compute = {}
        if c.backward != "none":
            encode, decode = self._codec_seconds("backward", flat(kinds))
            compute = {"packed": flat(links.packed), "encode": encode, "decode": decode}

        def taken(x: Array) -> Array:
            return np.broadcast_to(x[0], on.shape) if len(self.layer) == 1 else x[on, stage]

        forward, backward = taken(self.forward), taken(self.backward)
        if c.shards_sums:
            how = self.layer, self.cluster, self.overlap, self.pass_per_byte, kinds
            waits = data_axis.shards(self, links, self.meets, *how)
            each = (np.repeat(x[:, c.stage_map.stage_of], kinds.size // gather.size, axis=0) for x in waits)
            forward, backward = forward + next(each), backward + next(each)
        if c.compresses_forward:  # F decodes what it gets and encodes what it sends
            encode, decode = self._codec_seconds("forward", on)
            forward = forward + encode * (stage < len(stage) - 1) + decode * (stage > 0)
        return simulator.Seconds(
            forward=forward,
            backward=backward,
            weights=taken(self.weights),
            activation=flat(links.activation),
            gradient=flat(links.gradient),
            head=self.head[flat(kinds)[:, c.stage_map.last]],
            start=np.repeat(gather, kinds.size // gather.size, axis=0),
            **compute,
        )

    def _codec_seconds(self, place: str, kinds: Array) -> tuple[Array, Array]:
        """Return the seconds to encode and to decode a message of a place on devices of some kinds."""
        encode, decode, launches = self.candidate.coded.message_passes(place)
        passes = self.message * self.pass_per_byte[kinds]
        return encode * passes + launches * costs.LAUNCH, decode * passes + launches * costs.LAUNCH

    def _gather(self, links: LinkSeconds) -> Array:
        """Return the seconds [batch, P] of the all-gather of the weights."""
        alone = self.candidate.together == 2 and not self.overlap
        return data_axis.gather(self, links, self.meets) * (EXCHANGE if alone else 1.0)

    def reductions(self, links: LinkSeconds, kinds: Array) -> data_axis.Reductions:
        """Return the seconds of the reduction of each stage's gradients.

        Args:
            links: seconds of the messages.
            kinds: device kinds [rows, D / G, P] (indices) of all tensor groups, in the rows of the links.
        """
        found = data_axis.reduction(self, links, self.meets, self.pass_per_byte, kinds)
        return found._replace(embedding=found.embedding + self.sums)

    def evaluate(self, links: LinkSeconds, kinds: Array) -> Step:
        """Return the steps for link seconds.

        Args:
            links: seconds of the messages.
            kinds: device kinds [batch, D, P] (indices) of all groups.
        """
        return self.finish(links, kinds, self.pipelines(self.seconds(links, kinds)))

    def rank_table(self, rank: int) -> Table:
        """Return the table that a data rank replays."""
        return dataclasses.replace(self.table, first=self.table.micro_batches - self.candidate.rank_micro_batches[rank])

    def tables(self, pipelines: int) -> list[tuple[Table, Array | slice]]:
        """Return each table that data ranks replay, and which of some pipelines [batch * D] do."""
        c = self.candidate
        if not c.data_micro_batches:
            return [(self.table, slice(None))]
        counts = np.tile(c.data_micro_batches, pipelines // c.data)
        return [(self.rank_table(c.data_micro_batches.index(n)), counts == n) for n in np.unique(counts).tolist()]

    def pipelines(self, seconds: simulator.Seconds) -> Array:
        """Return the seconds [batch * D, P] at which stages leave their last rows, for the simulator's durations."""
        found = np.empty((len(seconds.forward), self.candidate.pipe))
        for table, where in self.tables(len(found)):
            found[where] = self.replayed(table, simulator.take(seconds, where))
        return found

    def finish(self, links: LinkSeconds, kinds: Array, pipelines: Array) -> Step:
        """Return the steps for the simulator's seconds of all pipelines.

        Args:
            links: seconds of the messages.
            kinds: device kinds [batch, D, P] (indices) of all groups.
            pipelines: seconds [batch * D, P] at which stages leave their last rows.
        """
        step = self.of_groups(links, kinds, pipelines)
        return step if links.outer is None else self._of_slowest(step, links.outer)

    def _of_slowest(self, step: Step, exchanges: Array) -> Step:
        """Return the steps of groups that train apart: each is that of the slowest group, and waits for exchanges.

        Args:
            step: steps of all groups, [batch * G, ...].
            exchanges: seconds [batch, fragments] of the exchange of each fragment.
        """
        slowest = step.total.reshape(len(exchanges), -1).argmax(axis=1)
        rows = slowest + np.arange(len(exchanges)) * self.candidate.apart
        one = Step(*(getattr(step, field.name)[rows] for field in dataclasses.fields(Step) if field.name != "outer"))
        waits = outer.exposed(self.candidate, exchanges, (one.finish - one.gather).min(axis=1), self.overlap)
        return dataclasses.replace(one, total=one.total + waits.sum(axis=1) / self.candidate.outer.every, outer=waits)

    def of_groups(self, links: LinkSeconds, kinds: Array, pipelines: Array) -> Step:
        """Return the steps of groups that train apart, of each group as a row; the arguments are those of `finish`."""
        c = self.candidate
        kinds = kinds.reshape(len(links.ring_latency), -1, c.pipe)
        ranks = pipelines.reshape(*kinds.shape)
        finish = ranks.max(axis=1)
        dense, factors, passes, edge = self.reductions(links, kinds)
        # A layer is reduced once all data ranks have its gradient; the last layer's reduction comes after the last op.
        alike = len(self.layer) == 1  # all devices, so that nothing need be looked up for each
        hides = self.hides[0] if alike else self.hides[kinds, np.arange(c.pipe)]
        begin = (ranks - hides).max(axis=1)

        def end(seconds: Array, begin: Array) -> Array:
            return np.maximum(finish + seconds / self.slots, begin + seconds) + edge

        whole = end(dense, begin)
        # In a loop over layers factors are not reduced: the loop's layers share one array, but not their states.
        small = end(factors, finish if c.scans else begin) + passes
        ends = np.minimum(whole, small).max(axis=1, keepdims=True)
        compressed = whole > ends
        reduce = np.where(compressed, small, whole) - finish
        held = (self.layer_parameters + self.embedding_parameters) / (c.together * c.shared if c.zero1 else 1)
        per_parameter = np.array([x.optimizer for x in self.layer])
        optimizer = held * (np.full(len(kinds), per_parameter[0]) if alike else per_parameter[kinds].max(axis=(1, 2)))
        # All stages know the global norm before any may update.
        total = (finish + reduce).max(axis=1) + optimizer + self.cluster.host_seconds
        return Step(total, self._gather(links), finish, reduce, compressed, optimizer)


@functools.lru_cache(maxsize=65536)
def _closing(schedule: str, stages: int, micro_batches: int, chunks: int) -> Array:
    """Return whether each stage's gradients become final in the last row, bool [P]; see `Schedule.closing`."""
    if stages == 1:
        return np.ones(1, bool)
    return np.isin(np.arange(stages), build(schedule, stages, micro_batches, chunks, True).closing)


def counted(
    where: Paths,
    hop: Array | float,
    overhead: Array | float,
    data: Array | float,
    turns: Array | float,
    tied: Array | float,
) -> Paths:
    """Return paths whose messages count as often as a trainer's do; factors are numbers or have one for each placement.

    What only this trainer has, sets of data ranks and groups, stays as it is.

    Args:
        where: paths [batch, ...].
        hop: factor on the bytes of messages between stages.
        overhead: seconds more of each of these.
        data: factor on the bytes of collectives over data.
        turns: collectives in which one array travels.
        tied: factor on the bytes of the exchange of the tied embedding's gradients.
    """

    def times(
        path: tuple[Array, Array], factor: Array | float, many: Array | float = 1.0, more: Array | float = 0.0
    ) -> tuple[Array, Array]:
        def of(x: Array | float) -> Array:
            return np.reshape(x, (-1, *[1] * (path[0].ndim - 1)))

        return path[0] * of(many) + of(more), path[1] * of(factor)

    return dataclasses.replace(
        where,
        forward=times(where.forward, hop, more=overhead),
        backward=times(where.backward, hop, more=overhead),
        ring=times(where.ring, data, turns),
        scatter=times(where.scatter, data, turns),
        swap=times(where.swap, tied),
    )


Executor = Callable[[Table, simulator.Seconds, bool], Array]  # see planner.pipeline.simulator.pipeline


def steps(problems: list[Problem], placements: list[tuple[Paths, Array]], replay: Executor | None = None) -> list[Step]:
    """Return the steps of many candidates, each on a batch of placements.

    Candidates that run the same table are simulated together.

    Args:
        problems: candidates.
        placements: each problem's paths, and the device kinds [batch, D, P] (indices) of its groups.
        replay: what replays the table; None: what the cluster's trainer does.
    """
    links = [problem.links(where) for problem, (where, _) in zip(problems, placements, strict=True)]
    seconds = [p.seconds(x, kinds) for p, x, (_, kinds) in zip(problems, links, placements)]
    members: dict[Table, list[tuple[int, Array | slice]]] = {}
    pipelines = [np.empty((len(s.forward), p.candidate.pipe)) for p, s in zip(problems, seconds)]
    for n, problem in enumerate(problems):
        for table, where in problem.tables(len(pipelines[n])):
            members.setdefault(table, []).append((n, where))
    for table, some in members.items():
        parts = [simulator.take(seconds[n], where) for n, where in some]
        one, every = problems[some[0][0]], simulator.concatenate(parts)
        replayed = replay(table, every, one.overlap) if replay else one.replayed(table, every)
        ends = np.cumsum([len(part.forward) for part in parts])
        for (n, where), part in zip(some, np.split(replayed, ends[:-1])):
            pipelines[n][where] = part
    each = zip(problems, links, placements, pipelines)
    return [problem.finish(x, kinds, ends) for problem, x, (_, kinds), ends in each]


def of_splits(problem: Problem, splits: Sequence[tuple[int, ...]], where: Paths, kinds: Array) -> Array:
    """Return the steps [splits, batch] in seconds of a candidate with each of some splits of its layers.

    Args:
        problem: the candidate.
        splits: layers of each virtual stage, of each split.
        where: paths of the placements.
        kinds: device kinds [batch, D, P] (indices) of their groups.
    """
    found = np.empty((len(splits), len(kinds)))
    alike: dict[tuple, list[int]] = {}
    for n, counts in enumerate(splits):
        c = dataclasses.replace(problem.candidate, counts=counts)
        slots = tuple(Sizes(problem.model, c).rooms.values())
        alike.setdefault((slots, c.scans, outer.layers(problem.model, c)), []).append(n)
    for members in alike.values():
        some = [splits[n] for n in members]
        candidate = dataclasses.replace(problem.candidate, counts=some[0])
        one = Problem(problem.cluster, problem.model, candidate, some)
        first = np.arange(0, len(one.layer), len(one.layer) // len(some))  # kind of each split
        on = first[:, None, None, None] + kinds
        links = one.links(where.take(np.tile(np.arange(len(kinds)), len(some))))
        found[members] = one.evaluate(links, on.reshape(-1, *kinds.shape[1:])).total.reshape(len(some), -1)
    return found
