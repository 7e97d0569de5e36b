"""Simulated annealing over placements, many chains at once.

A chain's state has two levels, so that a good layout of slots is kept while hosts are exchanged. `layout` [D, P] puts
every tensor group on a virtual host, and `order` [H] gives the host behind each virtual one.

Pipette's five moves change either of the two, read along the pipeline or along the data ring. They reverse a slice,
migrate one element, swap two elements, move a slice, or move a slice reversed. Each move is a gather by an index row,
so a batch of moves is one gather. If the hosts are in racks, some hosts of two racks may also change places together.

References:
    Pipette (Yim et al., DATE 2024) for the moves. Its temperatures are not used: here they have the objective's unit
    and follow from how much random moves change it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Objective = Callable[[Array], Array]  # hosts [batch, D, P] -> [batch]

_WARM = 0.25  # first temperature, as a multiple of the median change that a move makes
_COOLED = 1e-2  # last temperature, as a share of the first
_ROUNDS = 8  # after each round except the last, half of the chains continue from the best states
_REGROUP = 0.3  # share of the moves that change the layout, if it may change
_RACKS = 0.2  # share of the moves of hosts that exchange hosts of two racks, if there are racks
_FLAT = 8  # if this many batches of random moves change nothing, all placements count as equal


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """A placement at which a chain may begin.

    Attributes:
        layout: [D, P] virtual host of each tensor group.
        order: [H] host behind each virtual host.
        grid: rows and columns of the grid of virtual hosts. They are numbered row by row, and those in one column are
            neighbors too.
    """

    layout: Array
    order: Array
    grid: tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class AnnealedPlacement:
    """The best placement that was found.

    Attributes:
        hosts: [D, P] host of each tensor group.
        value: value of the objective.
        started: whether it is one of the starts, so that no move improved on it.
        evaluations: number of placements that were evaluated.
    """

    hosts: Array
    value: float
    started: bool
    evaluations: int


# --- Starts -----------------------------------------------------------------------------------------------------------


def layouts(data: int, pipe: int, slots: int) -> list[tuple[Array, tuple[int, int]]]:
    """Return the ways to lay tensor groups on virtual hosts.

    In most layouts every host takes a tile of data ranks x stages. The others are the two plain orders of a mesh, cut
    into hosts; they are no tiles if a host's slots cross the end of a row.

    Args:
        data: size D of the data axis.
        pipe: size P of the pipe axis.
        slots: tensor groups per host.

    Returns:
        Each layout, [D, P] virtual host of each group, with the rows and columns of the grid of virtual hosts.
    """
    found = []
    for ranks in range(slots, 0, -1):
        stages = slots // ranks
        if ranks * stages == slots and data % ranks == 0 and pipe % stages == 0:
            grid = data // ranks, pipe // stages
            rows, columns = np.arange(data)[:, None] // ranks, np.arange(pipe)[None] // stages
            found.append((rows * grid[1] + columns, grid))
    groups = np.arange(data * pipe)
    for plain in (groups.reshape(data, pipe), groups.reshape(pipe, data).T):
        layout = plain // slots
        if not any(_same(layout, other) for other, _ in found):
            found.append((layout, (1, data * pipe // slots)))
    return found


def _same(a: Array, b: Array) -> bool:
    """Return whether two layouts differ at most in the numbering of the virtual hosts."""
    pairs = len(set(zip(a.ravel().tolist(), b.ravel().tolist())))
    return pairs == a.max() + 1


def tour(per_byte: Array, first: int) -> Array:
    """Return all hosts [H] from `first` on, each followed by the one that it reaches fastest among those left."""
    cost = per_byte.copy()
    path = np.empty(len(cost), int)
    path[0] = here = first
    for i in range(1, len(cost)):
        cost[:, here] = np.inf
        path[i] = here = int(np.argmin(cost[here]))
    return path


def starts(
    shape: tuple[int, int, int],
    per_byte: Array,
    speed: Array,
    load: Array,
    rng: np.random.Generator,
    most_tours: int = 4,
    rack: Array | None = None,
) -> list[Start]:
    """Return placements to begin with, on all layouts.

    The hosts come in host order, in nearest-neighbor tours, with fast hosts under heavy stages, and in random order.

    Args:
        shape: D, P and the slots of a host.
        per_byte: [H, H] seconds per byte of each link.
        speed: [H] seconds that each host takes for the same work.
        load: [P] work of each stage.
        rng: random numbers for the first hosts of the tours and for the random orders.
        most_tours: most tours that are made.
        rack: [H] rack of each host, whose hosts then also come together; None: there are no racks.
    """
    hosts = len(per_byte)
    firsts = rng.choice(hosts, min(hosts, most_tours), replace=False)
    tours = [tour(per_byte, int(first)) for first in firsts]
    if rack is not None and rack.max() > 0:
        tours.append(np.lexsort((rng.permutation(hosts), rng.permutation(rack.max() + 1)[rack])))
    found = []
    for layout, grid in layouts(*shape):
        across = _transposed(grid)
        orders = [np.arange(hosts)]
        for path in tours:
            along = np.empty(hosts, int)
            along[across] = path
            orders += [path, along]
        if np.ptp(speed) > 0:
            # The heaviest stage on a virtual host decides how fast the host behind it should be.
            heaviest = np.zeros(hosts)
            np.maximum.at(heaviest, layout, np.broadcast_to(load, layout.shape))
            fitting = np.empty(hosts, int)
            fitting[np.argsort(-heaviest[across], kind="stable")] = np.argsort(speed, kind="stable")
            along = np.empty(hosts, int)
            along[across] = fitting
            orders.append(along)
        orders.append(rng.permutation(hosts))
        found += [Start(layout, order, grid) for order in orders]
    return found


def _transposed(grid: tuple[int, int]) -> Array:
    """Return the indices of a grid's elements, column after column."""
    return np.arange(grid[0] * grid[1]).reshape(grid).T.ravel()


# --- Moves ------------------------------------------------------------------------------------------------------------


class Moves(NamedTuple):
    """One of the five moves for each chain, drawn but not made; arrays [chains].

    Attributes:
        first: first position of the slice that moves.
        length: its elements.
        cut: where it is cut into two parts, A B; moving A past B makes B A.
        kind: 0: reverse, 1: migrate, 2: swap, 3: move, 4: move and reverse.
        other: which of two ways.
    """

    first: Array
    length: Array
    cut: Array
    kind: Array
    other: Array

    def take(self, chains: Array) -> "Moves":
        """Return the moves of some chains."""
        return Moves(*(x[chains] for x in self))

    def sources(self, size: int) -> Array:
        """Return the old position of every new element, [chains, size].

        A move reads each of the two parts of its slice either onwards or backwards.

        Args:
            size: elements of a state.
        """
        first, length, kind = self.first, self.length, self.kind
        cut = np.where(kind == 1, np.where(self.other, 1, length - 1), np.where(kind == 2, 0, self.cut))
        begin, border, end = (x[:, None] for x in (first, first + length - cut, first + length))
        # The parts that the state then has: the first begins at the cut, the second ends there. Moved reversed it is
        # B A' or B' A.
        onward = kind != 0
        ways = onward & ((kind != 4) | (self.other == 1)), onward & ((kind != 4) | (self.other == 0))
        position, backward = np.arange(size)[None], begin + end - 1
        parts = [
            np.where(way[:, None], position + by[:, None], backward - position)
            for way, by in zip(ways, (cut, cut - length))
        ]
        found = np.where(position < border, *parts)
        found = np.where((position >= begin) & (position < end), found, position)
        swaps = np.flatnonzero(kind == 2)
        ends = first[swaps], (first + length - 1)[swaps]
        found[swaps, ends[0]], found[swaps, ends[1]] = ends[1], ends[0]
        return found


def moves(rng: np.random.Generator, chains: int, size: int) -> Moves:
    """Draw one of the five moves for each chain.

    The logarithms of the slices' lengths are drawn uniformly, since in a large state only small moves are likely to be
    accepted.

    Args:
        rng: random numbers.
        chains: number of chains.
        size: elements of a state.
    """
    length = np.exp(rng.uniform(np.log(2), np.log(size + 1), chains)).astype(int)
    first = rng.integers(0, size - length + 1)
    cut = rng.integers(1, length)
    return Moves(first, length, cut, kind=rng.integers(0, 5, chains), other=rng.integers(0, 2, chains))


class _Turns(NamedTuple):
    """Moves, each along the state as it is or along the order in which `across` reads it (`turned`, bool [chains])."""

    moves: Moves
    turned: Array

    def made(self, state: Array, across: Array, chains: Array) -> Array:
        """Return the states [chains, size] of some chains after their moves.

        Args:
            state: [chains, size] of all chains.
            across: indices [chains, size] that read the states in another order.
            chains: numbers of the chains.
        """
        size, row = state.shape[1], np.arange(len(chains))[:, None] * state.shape[1]
        view = row + np.where(self.turned[chains, None], across[chains], np.arange(size)[None])
        old, new = state[chains], np.empty((len(chains), size), state.dtype)
        read = view.ravel().take(row + self.moves.take(chains).sources(size))
        new.ravel()[view] = old.ravel().take(read)
        return new


def _turns(rng: np.random.Generator, state: Array) -> _Turns:
    """Draw a move for each state [chains, size]."""
    return _Turns(moves(rng, *state.shape), rng.random((len(state), 1))[:, 0] < 0.5)


class _Chains:
    """The states of all C chains.

    Attributes:
        layout: [C, D * P] virtual host of each tensor group.
        order: [C, H] host behind each virtual host.
        across: [C, H] indices that read a grid of virtual hosts column by column.
        rings: [C, D * P] indices that read a layout along the data rings.
        shape: shape of the placements, (-1, D, P).
        regroup: whether the layouts may change.
        rng: random numbers of the moves.
        racks: hosts of each rack; empty if there is one rack.
    """

    def __init__(self, chosen: list[Start], regroup: bool, rng: np.random.Generator, rack: Array | None) -> None:
        data, pipe = chosen[0].layout.shape
        self.layout = np.array([start.layout.ravel() for start in chosen])
        self.order = np.array([start.order for start in chosen])
        self.across = np.array([_transposed(start.grid) for start in chosen])
        self.rings = np.broadcast_to(_transposed((data, pipe)), self.layout.shape)
        self.shape, self.regroup, self.rng = (-1, data, pipe), regroup, rng
        self.racks: list[Array] = []
        if rack is not None and rack.max() > 0:
            self.racks = [np.flatnonzero(rack == i) for i in range(rack.max() + 1)]

    def hosts(self, layout: Array, order: Array) -> Array:
        """Return the placements [C, D, P] of some layouts and orders."""
        return np.take_along_axis(order, layout, 1).reshape(self.shape)

    def proposals(self) -> tuple[Array, Array]:
        """Return new layouts and orders; in every chain one of the two has changed."""
        chains, several = np.arange(len(self.order)), self.order.shape[1] > 1
        of_hosts = _turns(self.rng, self.order) if several else None
        exchanged = {}
        if self.racks:
            for chain in np.flatnonzero(self.rng.random(len(chains)) < _RACKS).tolist():
                exchanged[chain] = self._exchanged()[self.order[chain]]
        of_groups = _turns(self.rng, self.layout) if self.regroup else None
        inner = np.zeros(len(chains), bool)
        if of_groups:
            inner = self.rng.random((len(chains), 1))[:, 0] < _REGROUP
        layout, order, outer = self.layout, self.order, chains[~inner]
        if of_hosts:
            order = order.copy()
            order[outer] = of_hosts.made(self.order, self.across, outer)
            for chain, hosts in exchanged.items():
                if not inner[chain]:
                    order[chain] = hosts
        if of_groups:
            layout = layout.copy()
            layout[inner] = of_groups.made(self.layout, self.rings, chains[inner])
        return layout, order

    def _exchanged(self) -> Array:
        """Return the new number of each host [H] after some hosts of two racks have changed places."""
        found = np.arange(self.order.shape[1])
        a, b = self.rng.choice(len(self.racks), 2, replace=False)
        count = int(self.rng.integers(1, min(len(self.racks[a]), len(self.racks[b])) + 1))
        some, other = (self.rng.choice(self.racks[i], count, replace=False) for i in (a, b))
        found[some], found[other] = other, some
        return found

    def take(self, where: Array, layout: Array, order: Array) -> None:
        """Replace the states of some chains.

        Args:
            where: bool [C], the chains.
            layout: [C, D * P] new layouts; those of other chains are ignored.
            order: [C, H] new orders; those of other chains are ignored.
        """
        self.layout[where], self.order[where] = layout[where], order[where]

    def copy_from(self, other: "_Chains", where: Array, source: Array) -> None:
        """Replace the states of some chains by those of others.

        Args:
            other: chains to copy from.
            where: indices or mask of the chains to replace.
            source: indices or mask of the chains to copy.
        """
        for name in ("layout", "order", "across"):
            getattr(self, name)[where] = getattr(other, name)[source]


def anneal(
    objective: Objective,
    begin: list[Start],
    regroup: bool,
    rng: np.random.Generator,
    chains: int,
    iterations: int,
    enough: float = 0.0,
    rack: Array | None = None,
) -> AnnealedPlacement:
    """Anneal placements from the given starts.

    The result depends on `rng` alone.

    Args:
        objective: function from placements [batch, D, P] to the values [batch] that are minimized.
        begin: placements to begin with.
        regroup: whether groups also move between hosts; otherwise only whole hosts are exchanged.
        rng: random numbers.
        chains: number of chains that are annealed at once.
        iterations: moves of each chain.
        enough: value at which the search stops, since no placement can be better.
        rack: [H] rack of each host, whose hosts also change places together; None: there are no racks.
    """
    values = objective(np.array([start.order[start.layout] for start in begin]))
    ranked = np.argsort(values, kind="stable")
    top, evaluations = begin[ranked[0]], len(begin)
    first = AnnealedPlacement(top.order[top.layout], float(values[ranked[0]]), True, evaluations)
    if first.value <= enough:
        return first
    picks = _picks(ranked, chains)
    state, kept = (_Chains([begin[i] for i in picks], regroup, rng, rack) for _ in range(2))
    value, kept_value = values[picks], values[picks]
    warm, batches = _temperature(objective, state, value)
    evaluations += batches * chains
    if warm == 0:
        return dataclasses.replace(first, evaluations=evaluations)
    step = 0
    while step < iterations and kept_value.min() > enough:
        progress = step / iterations
        layout, order = state.proposals()
        proposed = objective(state.hosts(layout, order))
        taken = proposed - value <= warm * _COOLED**progress * rng.exponential(size=chains)
        state.take(taken, layout, order)
        value = np.where(taken, proposed, value)
        better = value < kept_value
        kept.copy_from(state, better, better)
        kept_value = np.minimum(kept_value, value)
        step += 1
        if int(progress * _ROUNDS) < int(step / iterations * _ROUNDS) < _ROUNDS:
            _restart(state, value, kept, kept_value)
    evaluations += step * chains
    winner = int(np.argmin(kept_value))
    if kept_value[winner] >= first.value:
        return dataclasses.replace(first, evaluations=evaluations)
    hosts = kept.hosts(kept.layout[[winner]], kept.order[[winner]])[0]
    return AnnealedPlacement(hosts, float(kept_value[winner]), False, evaluations)


def _picks(ranked: Array, chains: int) -> Array:
    """Return the start of each chain: half take the best quarter of the starts, the others all starts in turn."""
    few = ranked[: max(len(ranked) // 4, 1)]
    return np.concatenate([np.resize(few, chains // 2), np.resize(ranked, chains - chains // 2)])


def _restart(state: _Chains, value: Array, kept: _Chains, kept_value: Array) -> None:
    """Continue the worse half of the chains from the best eighth of the states that were kept, with their values."""
    worst = np.argsort(value, kind="stable")[(len(value) + 1) // 2 :]
    source = np.resize(np.argsort(kept_value, kind="stable")[: max(len(value) // 8, 1)], len(worst))
    state.copy_from(kept, worst, source)
    value[worst] = kept_value[source]


def _temperature(objective: Objective, state: _Chains, value: Array) -> tuple[float, int]:
    """Return the first temperature and the number of batches tried.

    The temperature follows from the median change of random moves; it is 0 if no move changes anything.
    """
    for batch in range(1, _FLAT + 1):
        change = np.abs(objective(state.hosts(*state.proposals())) - value)
        change = change[change > 1e-12 * value]
        if len(change):
            return _WARM * float(np.median(change)), batch
    return 0.0, _FLAT
