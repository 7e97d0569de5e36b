"""The least that messages, rings and all-to-alls take on a cluster's links, wherever the groups lie.

Nothing here knows a schedule; `bounds.py` makes step times of these.
"""

import bisect
import dataclasses
from collections.abc import Mapping

import numpy as np

from planner.cost.link_seconds import IN_TURN, Fabric
from planner.cost.step_time import Problem

Array = np.ndarray

MANY = 64  # most hosts for which linear programs with variables for pairs of hosts are solved, which take 0.1 to 0.3 s
_SOLVED = 1e-6  # relative error of linear programs, ten times what their solver allows


@dataclasses.dataclass(frozen=True)
class CaseLinks:
    """The links of a fabric, as a candidate uses them.

    Attributes:
        alpha: [H, H] seconds of latency between hosts; inf on the diagonal.
        per_byte: [H, H] seconds per byte between hosts; inf on the diagonal.
        inside_alpha: [H] seconds of latency inside each host.
        inside_per_byte: [H] seconds per byte inside each host.
        tensor: flows that a tensor group sends at once.
        nics: flows that a host sends at full speed.
        rails: whether each device uses its own rail's NIC, so that groups need not share one.
        fan_out: hosts with which a host exchanges data at once at full speed.
    """

    alpha: Array
    per_byte: Array
    inside_alpha: Array
    inside_per_byte: Array
    tensor: int
    nics: int
    rails: bool
    fan_out: float

    def share(self, groups: Array | float) -> Array:
        """Return the least factor by which flows slow down if `groups` groups of a host send at once."""
        groups = np.minimum(groups, 1) if self.rails else groups
        return np.maximum(np.asarray(groups, float) * self.tensor / self.nics, 1.0)

    def across(self, size: float, groups: int = 1) -> Array:
        """Return seconds [H, H] of a message between hosts while `groups` groups of the sender send; 0: one flow."""
        return self.alpha + size * self.per_byte * self.share(groups)

    def exchange(self, size: float) -> Array:
        """Return seconds [H, H] of two messages between hosts at once, one each way, with one group at either end."""
        one = self.across(size)
        return np.maximum(one, one.T)

    def inside(self, size: float) -> float:
        """Return the seconds of a message inside the fastest host."""
        return float((self.inside_alpha + size * self.inside_per_byte).min())


def case_links(problem: Problem, fabric: Fabric) -> CaseLinks:
    apart = ~np.eye(len(fabric.alpha), dtype=bool)
    return CaseLinks(
        np.where(apart, fabric.alpha, np.inf),
        np.where(apart, fabric.per_byte, np.inf),
        np.diagonal(fabric.alpha),
        np.diagonal(fabric.per_byte),
        problem.candidate.seat,
        fabric.nics,
        fabric.rails is not None,
        fabric.fan_out,
    )


def bottleneck(cost: Array, one_way: bool = False) -> float:
    """Return a value that the largest element of a permutation of a square matrix cannot be below.

    Args:
        cost: the matrix, with inf where no element may be taken.
        one_way: whether the permutation takes at most one of two elements that mirror each other, as a ring over three
            hosts or more does. Then the value is the least of fractional permutations, otherwise that of permutations.
    """
    from scipy import sparse  # here, since many plans need none of it: it takes a good part of a second
    from scipy.sparse import csgraph

    def permutes(most: float) -> bool:
        return bool((csgraph.maximum_bipartite_matching(sparse.csr_array(cost <= most)) >= 0).all())

    def goes_round(most: float) -> bool:
        from scipy.optimize import linprog

        row, column = np.nonzero(cost <= most)
        number, hosts = np.arange(len(row)), len(cost)
        pairs = np.unique(np.minimum(row, column) * hosts + np.maximum(row, column), return_inverse=True)[1]
        once = sparse.csr_array((np.ones(2 * len(row)), (np.r_[row, hosts + column], np.r_[number, number])))
        either = sparse.csr_array((np.ones(len(row)), (pairs, number)))
        wanted = {"A_eq": once, "b_eq": np.ones(2 * hosts), "A_ub": either, "b_ub": np.ones(either.shape[0])}
        return linprog(np.zeros(len(row)), **wanted).status != 2  # 2: proven to be infeasible

    values = np.unique(cost[np.isfinite(cost)])
    least = bisect.bisect_left(values, True, key=permutes)
    if one_way and len(cost) <= MANY and not goes_round(values[least]):
        least = bisect.bisect_left(values, True, lo=least + 1, key=goes_round)
    return float(values[least])


def all_to_all(links: CaseLinks, ranks: int, slots: int) -> tuple[float, float, float]:
    """Return the least that all-to-alls over data take: seconds of latency, and per byte of every and of the slowest.

    Seconds per byte are those of a rank's whole array.

    Args:
        links: links of the fabric.
        ranks: data ranks D, at least 2.
        slots: tensor groups per host.
    """
    inside = links.inside_per_byte.min()
    if len(links.inside_alpha) == 1:
        return float(links.inside_alpha.min()), float(inside) / ranks, float(inside) / ranks
    if ranks <= slots:
        least = float(min(inside, links.per_byte.min() * links.share(1))) / ranks
        return float(min(links.alpha.min(), links.inside_alpha.min())), least, least
    others = -(-(ranks - slots) // slots)  # hosts, at least, with which every host exchanges data
    share = max(IN_TURN * float(links.share(1)), float(links.share((ranks - slots) / links.fan_out)))
    needed = [np.partition(links.per_byte, others - 1, axis=axis).take(others - 1, axis).max() for axis in (0, 1)]
    return float(links.alpha.min()), float(links.per_byte.min()) * share / ranks, float(max(needed)) * share / ranks


def all_hops(links: CaseLinks, size: float, slots: int, crossing: int, count: int) -> float:
    """Return the least total seconds of the hops of one direction.

    Args:
        links: links of the fabric.
        size: bytes of a message.
        slots: tensor groups per host.
        crossing: least number of messages that go between hosts.
        count: number of messages.
    """
    each = links.across(size)
    rest = (count - crossing) * min(links.inside(size), float(each.min()))
    if not crossing:
        return rest
    if slots == 1:
        # The padding holds rows and columns without cost, for the hosts that send or receive no message.
        from scipy.optimize import linear_sum_assignment

        hosts = len(each)
        spare = hosts - crossing
        padded = np.zeros((hosts + spare,) * 2)
        padded[:hosts, :hosts] = np.where(np.isfinite(each), each, 1e9)
        padded[hosts:, hosts:] = 1e9
        rows, columns = linear_sum_assignment(padded)
        return rest + float(padded[rows, columns].sum())
    # The n-th group of a host that sends adds n share(n) - (n-1) share(n-1) to the host's total, which grows with n.
    n = np.arange(1, slots + 1)
    adds = n * links.share(n) - (n - 1) * links.share(n - 1)
    totals = []
    for axis in (0, 1):
        marginal = links.alpha.min() + size * links.per_byte.min(axis=axis)[:, None] * adds
        totals.append(np.partition(marginal.ravel(), crossing - 1)[:crossing].sum())
    return rest + float(max(totals))


def cycles(links: CaseLinks, sizes: Mapping[str, float], swapped: float, pipelines: int) -> float:
    """Return the least total seconds of all hops and of the exchanges between ends, with one group on each host.

    Args:
        links: links of the fabric.
        sizes: bytes of each message between stages, by name; those of activations go one way, others the other way.
        swapped: bytes of the exchange between a pipeline's ends; 0: there is none.
        pipelines: number of pipelines.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    hosts = len(links.alpha)
    pairs = np.triu_indices(hosts, 1)
    count = len(pairs[0])
    along = sum(links.across(size) if name == "activation" else links.across(size).T for name, size in sizes.items())
    hop = np.minimum(along, np.transpose(along))[pairs]
    swap = links.exchange(swapped)[pairs] if swapped else np.zeros(count)
    touches = sparse.csr_array((np.ones(2 * count), (np.concatenate(pairs), np.tile(np.arange(count), 2))))
    found = linprog(
        np.concatenate([hop, swap]) / hop.min(),
        A_ub=sparse.hstack([touches, touches]),
        b_ub=np.full(hosts, 2),
        A_eq=sparse.csr_array(np.repeat(np.eye(2), count, axis=1)),
        b_eq=[hosts - pipelines, pipelines],
        bounds=(0, 1),
    )
    return float(found.fun * hop.min()) * (1 - _SOLVED)
