"""A lower bound of the step time over all placements of a candidate.

The predicted step is monotone in every duration. So the step with all link times at their least is a lower bound. H is
the number of hosts, G the tensor groups per host, and D the number of data ranks.

    rings      A data ring that does not fit into a host leaves each host that it touches once. So there is a least
               value of k, the largest number of rings on any host, and flows share the NICs accordingly. All possible
               k are tried. If every host carries the same number of rings, their links hold a permutation of the
               hosts. Its slowest link is at least the bottleneck of the best assignment, without pairs of hosts that
               send to each other if each host has one ring, over three hosts or more. In any case every host must
               be left and entered. The slowest ring is put on the stage where it does the least harm.
    all-to-all What the reduction is over gloo. If the D ranks of a stage do not fit into a host, each host sends to
               ceil((D-G)/G) others at least, with flows for D-G ranks.
    hops       A host that carries k stages holds chains of at most k neighbors of a pipeline, so at least
               H ceil(G/k) - D messages leave hosts. If each host sends and receives one message, the assignment
               problem bounds their total time. If hosts send more, each host's fastest links and the convexity of NIC
               sharing bound it.
    cycles     If each host has one group, a pipeline's messages there and back and the exchange between its ends go
               over the links of a cycle through its hosts. So the links of all pipelines touch each host twice. The
               fractional 2-matching of these links bounds what messages and exchanges take in total.
    pipeline   The step is a maximum of sums, hence convex in the hops' times, and the slowest of the D pipelines
               counts. So the step is at least that of a pipeline whose hops take the mean over D, and the sum of these
               means is bounded by "hops" and "cycles". Sums along critical paths give linear cuts of the step as a
               function of the hops. The least values of these cuts on that set are linear programs.
    devices    Each stage runs on the fastest kind of device. In addition, the groups of a slow kind must lie on some
               stages.
    groups     Groups of data ranks that train apart have rings of their own, and the step is that of the slowest group.
               Its rings need not be the slowest, nor its devices, so all of them count as the least there are. An
               exchange between groups takes its bytes on the fastest link.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from planner.cost import outer
from planner.cost.link_seconds import DataLinks, Fabric, LinkSeconds
from planner.cost.step_time import Problem
from planner.placement.least import MANY, CaseLinks, all_hops, all_to_all, bottleneck, case_links, cycles

Array = np.ndarray

ROUNDING = 1e-9  # relative rounding error of the simulator's sums
_STEP = 1e-3  # change of a hop's time, as a share of it, in the differences that count a critical path's hops
_CUTS = 4  # linear cuts of the pipeline's time in each case
_WORST = 8  # most stages for which the slowest ring is tried on each stage
_SUBSETS = 64  # most sets of stages that are tried for slow devices


@dataclasses.dataclass(frozen=True)
class _Case:
    """A class of placements, with the least that their rings take.

    Attributes:
        latency: least seconds of latency of every ring.
        per_byte: least seconds per byte of every ring.
        worst: least seconds per byte of the slowest ring.
        stages: most stages on a host.
    """

    latency: float
    per_byte: float
    worst: float
    stages: int


@functools.lru_cache(maxsize=64)
def _slowest(fabric: Fabric, both: bool, one_way: bool) -> float:
    """Return the least seconds per byte of the slowest link of rings that touch all hosts; see `bottleneck`.

    Args:
        fabric: links of the cluster.
        both: whether a ring uses both directions of its links.
        one_way: whether it uses at most one of them.
    """
    per_byte = np.where(np.eye(len(fabric.per_byte), dtype=bool), np.inf, fabric.per_byte)
    return bottleneck(np.maximum(per_byte, per_byte.T) if both else per_byte, one_way)


def _cases(problem: Problem, fabric: Fabric, links: CaseLinks, slots: int) -> Iterator[_Case]:
    """Yield cases that together cover all placements."""
    c, hosts = problem.candidate, len(links.inside_alpha)
    ranks, rings, most = c.together, c.apart * c.pipe, min(slots, c.pipe)
    if ranks == 1:
        yield _Case(0.0, 0.0, 0.0, most)
        return
    turn = ranks - 1
    inside = links.inside_per_byte
    if ranks <= slots and slots % ranks == 0:
        yield _Case(turn * links.inside_alpha.min(), inside.min(), inside.max(), min(slots // ranks, most))
    if hosts == 1:
        return
    alpha, fastest = turn * links.alpha.min(), links.per_byte.min()
    if ranks <= slots:
        crossing = fastest * links.share(1)
        least = min(alpha, turn * links.inside_alpha.min()), min(crossing, inside.min())
        yield _Case(*least, float(crossing), most)
        return
    touched = rings * -(-ranks // slots)  # least number of pairs of a ring and a host that it touches
    every = max(links.per_byte.min(axis=0).max(), links.per_byte.min(axis=1).max()) * links.share(1)
    for k in range(-(-touched // hosts), min(slots, rings) + 1):
        least = fastest * links.share(k)
        if k * hosts == touched:
            # A ring over two hosts uses both directions of their link, and a ring over more hosts at most one.
            slowest = _slowest(fabric, rings * 2 == touched, k == 1 and ranks > 2 * slots)
            yield _Case(alpha, float(least), float(slowest * links.share(k)), min(k, c.pipe))
        else:
            yield _Case(alpha, float(fastest * links.share(1)), float(max(every, least)), min(k, c.pipe))


def _fastest_kind(problem: Problem) -> Problem:
    """Return the problem with one more device kind, first of all, which is as fast at everything as the fastest kind.

    Its optimizer is as slow as the slowest kind's, since all devices are in use and the step waits for the slowest, if
    all data ranks train together.
    """
    best = copy.copy(problem)
    for name in ("forward", "backward", "weights", "head", "hides", "pass_per_byte"):
        values = getattr(problem, name)
        setattr(best, name, np.concatenate([values.min(axis=0, keepdims=True), values]))
    waited_for = (max if problem.candidate.apart == 1 else min)(problem.layer, key=lambda x: x.optimizer)
    best.layer = [waited_for] * (len(problem.layer) + 1)
    return best


class _Bound:
    """The bounds of one problem, evaluated on given link times with one pipeline in place of D.

    Arrays [W] hold a value for each stage that the slowest ring may be on. If there are too many stages, W is 1, and
    the slowest ring is on none.

    Attributes:
        problem: the problem, with the fastest kind of device added as kind 0.
        pipe: number of stages P.
        fabric: links of the cluster.
        links: the same as the problem uses them.
        hosts: number of hosts.
        slots: tensor groups per host.
        worst: W.
        kind_of_host: [H] device kind of each host, as the problem without the added kind numbers them.
        sizes: bytes of each message between stages, by name.
        wraps: entry of each message's array [P] that is no hop of the pipeline, by name: activations have none behind
            the last stage, gradients none before the first.
    """

    def __init__(self, problem: Problem, fabric: Fabric) -> None:
        c = problem.candidate
        self.problem, self.pipe = _fastest_kind(problem), c.pipe
        self.fabric, self.links = fabric, case_links(problem, fabric)
        self.hosts = len(fabric.alpha)
        self.slots = c.groups // self.hosts
        self.worst = c.pipe if c.pipe <= _WORST else 1
        self.rings = fabric.rings
        self.kind_of_host = problem.kind_of_host
        self.sizes = {"activation": problem.activation, "gradient": problem.message, "packed": problem.packed}
        self.wraps = {"activation": c.pipe - 1, "gradient": 0, "packed": 0}
        if c.backward == "none":
            del self.sizes["packed"], self.wraps["packed"]
        elif c.backward == "all":
            del self.sizes["gradient"], self.wraps["gradient"]

    def least(self, case: _Case, size: float, groups: int) -> float:
        """Return the least seconds of a message to another stage.

        Args:
            case: class of placements.
            size: bytes.
            groups: groups that send from one host at once, if the message goes between hosts.
        """
        across = float(self.links.across(size, groups).min())
        return across if case.stages == 1 else min(self.links.inside(size), across)

    def swap(self, case: _Case, size: float) -> float:
        """Return the least seconds of the exchange between the first and the last stage."""
        across = float(self.links.exchange(size).min())
        return across if case.stages == 1 else min(self.links.inside(size), across)

    def totals(self, cases: list[_Case], hops: list[dict[str, Array]], kinds: Array | None = None) -> Array:
        """Return step times [batches, W] in seconds, of all cases one after another.

        Args:
            cases: classes of placements.
            hops: [batch, P] seconds of each message, by name, of each case.
            kinds: [batches, P] device kind of each stage; None: the fastest kind everywhere.
        """
        links = [self._links(case, some) for case, some in zip(cases, hops, strict=True)]
        batches = sum(len(some["activation"]) for some in hops)
        kinds = np.zeros((batches, self.pipe), int) if kinds is None else kinds
        every = self.problem.evaluate(_joined(links), np.repeat(kinds, self.worst, axis=0)[:, None])
        return every.total.reshape(batches, self.worst)

    def _links(self, case: _Case, hops: dict[str, Array]) -> LinkSeconds:
        """Return the seconds of messages, a row for each point of `hops` and each stage of the slowest ring."""
        c, p = self.problem.candidate, self.pipe
        batch = len(hops["activation"])
        apart = c.apart > 1

        def over_data(least: float, worst: float) -> Array:
            per_byte = np.full((self.worst, p), least)
            if self.worst == p and not apart:
                per_byte[np.diag_indices(p)] = max(worst, least)
            return np.tile(per_byte, (batch, 1))

        turn = (c.together - 1) / c.together
        scatter = (case.latency, turn * case.per_byte, turn * case.worst)
        if c.together > 1 and not self.rings:
            scatter = all_to_all(self.links, c.together, self.slots)

        zero = np.zeros((batch, p))
        # Of groups of data ranks nothing is known here.
        free = DataLinks(*(np.zeros((batch * self.worst, p)),) * 4) if c.inside > 1 else None
        messages = {name: hops.get(name, zero) for name in ("activation", "gradient", "packed")}
        return LinkSeconds(
            **{name: np.repeat(x, self.worst, axis=0)[:, None] for name, x in messages.items()},
            ring_latency=np.full((batch * self.worst, p), case.latency),
            ring_per_byte=over_data(case.per_byte, case.worst),
            scatter_latency=np.full((batch * self.worst, p), scatter[0]),
            scatter_per_byte=over_data(*scatter[1:]),
            swap=np.repeat(hops["swap"][:, 0], self.worst),
            inside=free,
            between=free,
        )

    def flat_hops(self, case: _Case, batch: int = 1) -> dict[str, Array]:
        """Return seconds [batch, P] of each message, by name, with every message as fast as any can be.

        Those of "swap" are [batch, 1], of the exchange between the first and the last stage.
        """
        swap = self.swap(case, self.problem.swapped) if self.problem.swaps else 0.0
        found = {"swap": np.full((batch, 1), swap)}
        for name, size in self.sizes.items():
            found[name] = np.full((batch, self.pipe), self.hop(case, size))
            found[name][:, self.wraps[name]] = self.least(case, size, 1)
        return found

    def hop(self, case: _Case, size: float) -> float:
        """Return the least seconds of a message to the next stage; all groups of a host send if they hold one stage."""
        return self.least(case, size, self.slots if case.stages == 1 else 1)

    # --- Slow devices -------------------------------------------------------------------------------------------------

    def slow_kinds(self, case: _Case) -> Array:
        """Return lower bounds [W] of the step in seconds, with slow groups together on the stages that suit best."""
        found = np.zeros(self.worst)
        if len(set(self.kind_of_host.tolist())) == 1:
            return found
        for kind in set(self.kind_of_host.tolist()):
            groups = int((self.kind_of_host == kind).sum()) * self.slots
            some = -(-groups // self.problem.candidate.data)  # least number in the pipeline that has most of them
            while math.comb(self.pipe, some) > _SUBSETS and some > 1:
                some -= 1
            stages = list(itertools.combinations(range(self.pipe), some))
            kinds = np.zeros((len(stages), self.pipe), int)
            for row, where in zip(kinds, stages):
                row[list(where)] = kind + 1
            found = np.maximum(found, self.totals([case], [self.flat_hops(case, len(stages))], kinds).min(axis=0))
        return found

    # --- Hops ---------------------------------------------------------------------------------------------------------

    def hops(self, case: _Case, found: Array) -> Array:
        """Return lower bounds [W] of the step in seconds from the hops of a mean pipeline.

        Args:
            case: class of placements.
            found: [W] steps with every message as fast as any can be.
        """
        c, p = self.problem.candidate, self.pipe
        if p == 1:
            return found
        base = self.flat_hops(case)
        chain = min(case.stages, p)
        crossing = max(self.hosts * -(-self.slots // chain) - c.data, c.data * (-(-p // chain) - 1), 0)
        spare = {}  # seconds that a mean pipeline's hops together take beyond their least, by name
        for name, size in self.sizes.items():
            together = all_hops(self.links, size, self.slots, crossing, c.data * (p - 1)) / c.data
            spare[name] = max(together - (p - 1) * self.hop(case, size), 0.0)
        free = {name: [s for s in range(p) if s != self.wraps[name]] for name in self.sizes}
        if self.problem.swaps:
            spare["swap"], free["swap"] = 0.0, [0]
        if self.slots == 1 and self.hosts <= MANY:
            every = cycles(self.links, self.sizes, self.problem.swapped * self.problem.swaps, c.data) / c.data
            least = sum(base[name][0, free[name]].sum() + spare[name] for name in free)
            spare["any"] = max(every - least, 0.0)
        if not any(spare.values()):
            return found
        rng, points = np.random.default_rng(0), []
        for _ in range(_CUTS):
            # The point is uneven: if two paths took equally long, differences would count the hops of neither.
            at = {name: x.copy() for name, x in base.items()}
            for name in self.sizes:
                at[name][0, free[name]] += rng.dirichlet(np.full(p - 1, 50.0)) * spare[name]
            points.append(at)
        around = [self._around(at, free) for at in points]
        values = self.totals([case], [{name: np.concatenate([x[name] for x in around]) for name in base}])
        for at, some in zip(points, np.split(values, _CUTS)):
            found = np.maximum(found, self._cut(some, at, base, spare, free))
        return found

    def _around(self, at: dict[str, Array], free: dict[str, list]) -> dict[str, Array]:
        """Return a point [1, P] of hops, by name, and the points with one hop a little longer and a little shorter."""
        moved = [(name, s) for name in free for s in free[name]]
        points = {name: np.repeat(x, 2 * len(moved) + 1, axis=0) for name, x in at.items()}
        for i, (name, s) in enumerate(moved):
            points[name][2 * i + 1, s] += _STEP * at[name][0, s]
            points[name][2 * i + 2, s] -= _STEP * at[name][0, s]
        return points

    def _cut(
        self,
        values: Array,
        at: dict[str, Array],
        base: dict[str, Array],
        spare: dict[str, float],
        free: dict[str, list],
    ) -> Array:
        """Return the least values [W] of the linear cuts at a point, in seconds; 0 if the point gives no valid cut.

        Args:
            values: [points, W] steps in seconds at the point and around it.
            at: [1, P] seconds of each message at the point, by name.
            base: [1, P] least seconds of each message, by name.
            spare: seconds that the hops together take beyond `base`, by name; "any": that all of them take besides.
            free: stages whose entries are hops of the pipeline, by name.
        """
        moved = [(name, s) for name in free for s in free[name]]
        steps = np.array([_STEP * at[name][0, s] for name, s in moved])
        up, down = (values[1::2] - values[0]) / steps[:, None], (values[0] - values[2::2]) / steps[:, None]
        counts = np.round(up)
        # A convex function with equal slopes on both sides is straight between them. These are then one path's counts.
        sound = (np.abs(up - counts) < 1e-3).all(axis=0) & (np.abs(down - counts) < 1e-3).all(axis=0)
        cut = values[0].copy()
        for (name, s), count in zip(moved, counts):
            cut += count * (base[name] - at[name])[0, s]
        for name, extra in spare.items():
            own = [i for i, (other, _) in enumerate(moved) if name in (other, "any")]
            cut += extra * counts[own].min(axis=0)
        return np.where(sound, cut, 0.0)

    def lower(self, enough: float) -> float:
        """Return the lower bound of the step in seconds over all placements; see the function `lower`."""
        cases = list(_cases(self.problem, self.fabric, self.links, self.slots))
        flat = self.totals(cases, [self.flat_hops(case) for case in cases])  # [cases, W]
        least, later = math.inf, self.exchanges()
        if flat.min() + later >= enough:
            return float(flat.min()) + later
        for i in np.argsort(flat.min(axis=1), kind="stable"):
            if flat[i].min() >= least:  # nor is what its hops say below that
                break
            least = min(least, float(np.maximum(self.hops(cases[i], flat[i]), self.slow_kinds(cases[i])).min()))
        return least + later

    def exchanges(self) -> float:
        """Return the least seconds of a step for which it waits for exchanges between groups; 0 if it may hide them."""
        problem, fastest = self.problem, min(self.links.per_byte.min(), self.links.inside_per_byte.min())
        if outer.hides(problem.candidate, problem.overlap):
            return 0.0
        return float(sum(size for size, _ in outer.sent(problem)) * fastest / max(problem.candidate.outer.every, 1))


def _joined(links: list[LinkSeconds]) -> LinkSeconds:
    """Return the rows of several as those of one."""

    def joined(name: str) -> Any:
        parts = [getattr(one, name) for one in links]
        if isinstance(parts[0], DataLinks):
            return DataLinks(*map(np.concatenate, zip(*parts)))
        return None if parts[0] is None else np.concatenate(parts)

    return LinkSeconds(**{field.name: joined(field.name) for field in dataclasses.fields(LinkSeconds)})


def lower(problem: Problem, fabric: Fabric, enough: float = math.inf) -> float:
    """Return seconds that no placement's predicted step is below, on these links.

    Args:
        problem: candidate to place, on its cluster.
        fabric: links of the cluster.
        enough: seconds; a bound that is not below them need not be the closest one.
    """
    ease = problem.cluster.execution.ease
    least = fabric if ease == 1.0 else dataclasses.replace(fabric, per_byte=ease * fabric.per_byte)
    return _Bound(problem, least).lower(enough * (1 + 2 * ROUNDING)) * (1 - ROUNDING)
