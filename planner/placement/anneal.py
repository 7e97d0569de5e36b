"""Simulated annealing over placements, many chains at once.

A chain's state has two levels, so that a good layout of slots is kept while hosts are exchanged: `layout` [D, P] puts
every tensor group on a virtual host, `order` [H] says which host each virtual one is. Pipette's five moves are made on
the sequence of either, read along the pipeline or along the data ring: reverse a slice, migrate one element, swap two,
move a slice, move a slice reversed. All five are a gather by an index row, so a batch of them is one gather.

References:
    Pipette (Yim et al., DATE 2024) for the moves. Its temperatures are not taken: here they are in the objective's
    unit, from what random moves do to it.
"""

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np

Array = np.ndarray
Objective = Callable[[Array], Array]  # hosts [batch, D, P] -> [batch]

_WARM, _COOLED = 0.5, 1e-2  # first temperature over the usual change of a move, last over first
_ROUNDS = 2  # after each but the last, half of the chains go on from the best states
_REGROUP = 0.3  # share of the moves that change the layout where it may change
_FLAT = 8  # batches of random moves that must change nothing before all placements are taken to be equal


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """A placement at which a chain may begin.

    Attributes:
        layout: [D, P] virtual host of each group.
        order: [H] host of each virtual one.
        grid: (rows, columns) if the virtual hosts are numbered by rows of a grid whose columns are neighbours, too.
    """

    layout: Array
    order: Array
    grid: tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class AnnealedPlacement:
    """The best placement.

    Attributes:
        hosts: [D, P]. value: of the objective.
        started: it is one of the starts, no move made it better.
        evaluations: placements that were evaluated.
    """

    hosts: Array
    value: float
    started: bool
    evaluations: int


# --- Starts -----------------------------------------------------------------------------------------------------------


def layouts(data: int, pipe: int, slots: int) -> list[tuple[Array, tuple[int, int]]]:
    """Ways to lay D x P groups on virtual hosts of `slots`, each with the grid of its virtual hosts.

    Every host takes a tile of data ranks times stages; besides, the two plain orders of a mesh cut into hosts, which
    are no tiles where a host's slots cross the end of a row.
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
    """Two layouts differ at most in the numbering of the virtual hosts."""
    pairs = len(set(zip(a.ravel().tolist(), b.ravel().tolist())))
    return pairs == a.max() + 1


def tour(per_byte: Array, first: int) -> Array:
    """[H] hosts from `first` on, each followed by the one that it reaches fastest of those left."""
    cost = per_byte.copy()
    path = np.empty(len(cost), int)
    path[0] = here = first
    for i in range(1, len(cost)):
        cost[:, here] = np.inf
        path[i] = here = int(np.argmin(cost[here]))
    return path


def starts(
    shape: tuple[int, int, int], per_byte: Array, speed: Array, load: Array, rng: np.random.Generator
) -> list[Start]:
    """Host order, nearest-neighbour tours, fast hosts under heavy stages, and chance, on all layouts.

    Args:
        shape: D, P and the slots of a host.
        per_byte: [H, H] seconds per byte. speed: [H] seconds that a host takes for the same work. load: [P] work.
    """
    hosts = len(per_byte)
    firsts = rng.choice(hosts, min(hosts, 4), replace=False)
    tours = [tour(per_byte, int(first)) for first in firsts]
    found = []
    for layout, grid in layouts(*shape):
        across = _transposed(grid)
        orders = [np.arange(hosts)]
        for path in tours:
            along = np.empty(hosts, int)
            along[across] = path
            orders += [path, along]
        if np.ptp(speed) > 0:
            # The heaviest stage on each virtual host decides how fast a host should lie there.
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
    """Indices of a grid's elements, column after column."""
    return np.arange(grid[0] * grid[1]).reshape(grid).T.ravel()


# --- Moves ------------------------------------------------------------------------------------------------------------


def moves(rng: np.random.Generator, chains: int, size: int) -> Array:
    """[chains, size] one of the five moves each, as the old position of every new element.

    Lengths of slices are drawn evenly in their logarithm: in a large state most moves must be small to be taken.
    """
    column = lambda x: x[:, None]  # noqa: E731
    length = np.exp(rng.uniform(np.log(2), np.log(size + 1), chains)).astype(int)
    first = column(rng.integers(0, size - length + 1))
    cut = column(rng.integers(1, length))
    kind, other = column(rng.integers(0, 5, chains)), column(rng.integers(0, 2, chains))
    length = column(length)
    at = np.arange(size)[None] - first
    reverse = length - 1 - at
    # A slice is A B, cut in two; moving A past B makes B A.
    cut = np.where(kind == 1, np.where(other, 1, length - 1), cut)
    rotate = (at + cut) % length
    swap = np.where(at == 0, length - 1, np.where(at == length - 1, 0, at))
    reversed_a = np.where(at < length - cut, at + cut, reverse)  # B A'
    reversed_b = np.where(at < length - cut, reverse, at - length + cut)  # B' A
    turned = np.where(other, reversed_a, reversed_b)
    chosen = np.where(kind == 0, reverse, np.where(kind == 2, swap, np.where(kind == 4, turned, rotate)))
    return np.where((at >= 0) & (at < length), first + chosen, first + at)


def _moved(rng: np.random.Generator, state: Array, across: Array) -> Array:
    """Every row of a state after a move along itself or along its reading `across` [chains, size]."""
    chains, size = state.shape
    source = moves(rng, chains, size)
    turned = rng.random(chains) < 0.5
    rows = np.arange(chains)[:, None]
    view = np.where(turned[:, None], across, np.arange(size)[None])
    new = np.empty_like(state)
    new[rows, view] = state[rows, view[rows, source]]
    return new


class _Chains:
    """States of all chains: layout [C, D*P], order [C, H]."""

    def __init__(self, chosen: list[Start], regroup: bool, rng: np.random.Generator) -> None:
        data, pipe = chosen[0].layout.shape
        self.layout = np.array([start.layout.ravel() for start in chosen])
        self.order = np.array([start.order for start in chosen])
        self.across = np.array([_transposed(start.grid) for start in chosen])
        self.rings = np.broadcast_to(_transposed((data, pipe)), self.layout.shape)
        self.shape, self.regroup, self.rng = (-1, data, pipe), regroup, rng

    def hosts(self, layout: Array, order: Array) -> Array:
        return np.take_along_axis(order, layout, 1).reshape(self.shape)

    def proposals(self) -> tuple[Array, Array]:
        """Layouts and orders, of which one has changed in every chain."""
        order = _moved(self.rng, self.order, self.across) if self.order.shape[1] > 1 else self.order
        if not self.regroup:
            return self.layout, order
        layout = _moved(self.rng, self.layout, self.rings)
        inner = self.rng.random((len(order), 1)) < _REGROUP
        return np.where(inner, layout, self.layout), np.where(inner, self.order, order)

    def take(self, where: Array, layout: Array, order: Array) -> None:
        self.layout[where], self.order[where] = layout[where], order[where]

    def copy_from(self, other: "_Chains", where: Array, source: int | Array) -> None:
        for name in ("layout", "order", "across"):
            getattr(self, name)[where] = getattr(other, name)[source]


def anneal(
    objective: Objective,
    begin: list[Start],
    regroup: bool,
    rng: np.random.Generator,
    chains: int,
    iterations: int,
    seconds: float = math.inf,
    enough: float = 0.0,
) -> AnnealedPlacement:
    """Anneals `chains` chains from the best of the starts.

    The result depends on `rng` alone unless `seconds` cut it short.

    Args:
        regroup: also move groups between hosts, not only whole hosts.
        seconds: of wall clock, at most; the temperature falls with whichever of time and iterations is used up faster.
        enough: stop at this value: it cannot be undercut.
    """
    clock = time.monotonic()
    values = objective(np.array([start.order[start.layout] for start in begin]))
    ranked = np.argsort(values, kind="stable")
    top, evaluations = begin[ranked[0]], len(begin)
    first = AnnealedPlacement(top.order[top.layout], float(values[ranked[0]]), True, evaluations)
    if first.value <= enough:
        return first
    # Half of the chains begin with the best starts, the others with one after the other.
    few = ranked[: max(len(ranked) // 4, 1)]
    picks = np.concatenate([np.resize(few, chains // 2), np.resize(ranked, chains - chains // 2)])
    state, kept = (_Chains([begin[i] for i in picks], regroup, rng) for _ in range(2))
    value, kept_value = values[picks], values[picks]
    warm, batches = _temperature(objective, state, value)
    evaluations += batches * chains
    if warm == 0:
        return dataclasses.replace(first, evaluations=evaluations)
    progress, step = 0.0, 0
    while progress < 1 and kept_value.min() > enough:
        layout, order = state.proposals()
        proposed = objective(state.hosts(layout, order))
        taken = proposed - value <= warm * _COOLED**progress * rng.exponential(size=chains)
        state.take(taken, layout, order)
        value = np.where(taken, proposed, value)
        better = value < kept_value
        kept.copy_from(state, better, better)
        kept_value = np.minimum(kept_value, value)
        step += 1
        stretch = int(progress * _ROUNDS)
        progress = max(step / iterations, (time.monotonic() - clock) / seconds)
        if stretch < int(progress * _ROUNDS) < _ROUNDS:
            worst = np.argsort(value, kind="stable")[(chains + 1) // 2 :]
            source = np.resize(np.argsort(kept_value, kind="stable")[: max(chains // 8, 1)], len(worst))
            state.copy_from(kept, worst, source)
            value[worst] = kept_value[source]
    evaluations += step * chains
    winner = int(np.argmin(kept_value))
    if kept_value[winner] >= first.value:
        return dataclasses.replace(first, evaluations=evaluations)
    hosts = kept.hosts(kept.layout[[winner]], kept.order[[winner]])[0]
    return AnnealedPlacement(hosts, float(kept_value[winner]), False, evaluations)


def _temperature(objective: Objective, state: _Chains, value: Array) -> tuple[float, int]:
    """The first temperature, from the median change of random moves, 0 if none changes anything; and batches tried."""
    for batch in range(1, _FLAT + 1):
        change = np.abs(objective(state.hosts(*state.proposals())) - value)
        change = change[change > 1e-12 * value]
        if len(change):
            return _WARM * float(np.median(change)), batch
    return 0.0, _FLAT
