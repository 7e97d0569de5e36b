"""The interface of a reduction of gradients over data, and `Scattered`, the one that any codec makes.

All functions run per device, inside shard_map or under vmap with the same axis names.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from compress.codec import Codec, Like, Passes, State, Tree, Wire, array_bytes, codec_name, refusal
from compress.collectives import Axis, all_gather, all_to_all, axis_index, joined, parted


class Shard(NamedTuple):
    """Part of the mean of an array that a data rank keeps.

    Attributes:
        axis: name of the data axis; None if there is one data rank. Between groups of data ranks (`Hierarchical`) it is
            a `collectives.SubAxis`, which the functions of compress.collectives take in place of a name.
        members: number D of ranks of the axis.
        dim: dim along which each rank keeps its part of the mean; -1: each rank keeps all of it.
    """

    axis: Axis | None
    members: int
    dim: int


Shards = Sequence[Shard]  # one for each array
Context: TypeAlias = Any  # what a reducer's `encode` keeps for its other functions, arrays or not
Arrived: TypeAlias = Any  # what a reducer's `exchange` returns, likewise


class LeftOut(NamedTuple):
    """Squared Frobenius norms over all arrays of a data rank, float32 []. The relative error is sqrt(left / total).

    Attributes:
        left: squared norm of what this step leaves out.
        total: squared norm of the gradients plus what earlier steps left out, which were to be sent.
    """

    left: jax.Array
    total: jax.Array


@runtime_checkable
class Reducer(Protocol):
    """Functions that reduce a list of gradients over data ranks.

        wire, kept = reducer.encode(states, arrays, shards)         on each rank
        arrived = reducer.exchange(wire, kept, shards)              all collectives are here
        states, left_out = reducer.update(arrived, kept, shards)    what the rank keeps until the next step
        means = reducer.decode(arrived, kept, shards)               the rank's parts of the means

    Arrays are float32 gradients of kernels, as one device has them. Derive a reducer from this class. Like a codec it
    must be hashable, with a `repr` that shows every setting, and its functions are traced. If an array is not finite,
    its mean must not be finite either, because the trainer then skips the step. A reducer that exchanges by the
    functions of compress.collectives also reduces between groups of ranks.

    Arguments of its functions:
        shape, like, x: shape of an array, an array or shape of it, and the gradient of this rank.
        shard, shards: what each rank keeps of the mean of an array, and of those of all arrays.
        state, states: state of an array, and of all arrays.
        wire, kept: what `encode` returns first and second.
        arrived: what `exchange` returns.
        min_ratio: factor by which the configuration asks arrays to become smaller.
    """

    def init(self, shape: tuple[int, ...], shard: Shard) -> State:
        """Return the state of one array before the first step; it has the same structure for all arrays."""

    def takes(self, shape: tuple[int, ...], shard: Shard, min_ratio: float) -> bool:
        """Return whether an array should be reduced by this reducer; if not, it is reduced as it is."""

    def refusal(self, shape: tuple[int, ...], shard: Shard) -> str:
        """Return a sentence about why an array's parts cannot go through the reducer's codec; "" if they can.

        `takes` may raise for an array of which this says something.
        """
        return ""

    def encode(self, states: list[State], arrays: list[jax.Array], shards: Shards) -> tuple[Wire, Context]:
        """Return what a rank sends first, and what it keeps for the other functions."""

    def exchange(self, wire: Wire, kept: Context, shards: Shards) -> Arrived:
        """Return what has arrived at this rank after all exchanges."""

    def update(self, arrived: Arrived, kept: Context, shards: Shards) -> tuple[list[State], LeftOut]:
        """Return the next state of each array, and how much this rank has left out."""

    def decode(self, arrived: Arrived, kept: Context, shards: Shards) -> list[jax.Array]:
        """Return this rank's part of the mean of each array, in float32."""

    def residual(self, state: State, like: Like, shard: Shard) -> jax.Array:
        """Return what this rank has left out of an array so far; zeros without error feedback.

        The sum of all means plus the mean of the ranks' residuals is the sum of the gradients' means.
        """
        return jnp.zeros(like.shape, jnp.float32)

    def release(self, state: State, x: jax.Array, shard: Shard) -> tuple[jax.Array, State]:
        """Return the array plus what earlier steps left out, and a state that has left out nothing.

        The trainer calls it for an array that the present level leaves as it is, and another level does not.
        """
        return x + self.residual(state, x, shard), jax.tree.map(jnp.zeros_like, state)

    @property
    def level(self) -> int:
        """Number that says how much travels; a run's stages may have different ones. 0 stands for all, uncompressed."""
        return 1

    def at(self, level: int) -> "Reducer":
        """Return the reducer at another level, above 0."""
        return self

    def traffic(self, shape: tuple[int, ...], shard: Shard) -> tuple[tuple[str, float], ...]:
        """Return the collectives of one array, and the bytes that a rank sends in each if they run over rings.

        Returns:
            Kinds, of "all-reduce", "all-to-all" and "all-gather", with bytes. Arrays share collectives. Those inside
            groups of neighbouring ranks are in `inside_traffic`.
        """

    def inside_traffic(self, shape: tuple[int, ...], shard: Shard) -> tuple[tuple[str, float], ...]:
        """Return what `traffic` says of the collectives inside groups of neighbouring ranks: none without groups."""
        return ()

    def wire_bytes(self, shape: tuple[int, ...], shard: Shard) -> float:
        """Return the bytes that a rank sends for one array, in all collectives of `traffic`."""
        return sum(sent for _, sent in self.traffic(shape, shard))

    def passes(self) -> Passes:
        """Return what a reduction costs a device, in passes over the gradients and launches for each array."""

    def describe(self) -> str:
        """Return what the reducer does, for tables."""
        return codec_name(self)


def mean(
    reducer: Reducer, states: list[State], arrays: list[jax.Array], shards: Shards
) -> tuple[list[jax.Array], list[State], LeftOut]:
    """Return this rank's parts of the means of gradients, the next states, and how much this rank has left out.

    Args:
        reducer: reducer of the arrays.
        states: state of each array.
        arrays: gradients of this rank.
        shards: what ranks keep of the means.
    """
    wire, kept = reducer.encode(states, arrays, shards)
    arrived = reducer.exchange(wire, kept, shards)
    states, left_out = reducer.update(arrived, kept, shards)
    return reducer.decode(arrived, kept, shards), states, left_out


def stored(states: list[State]) -> Tree:
    """Return states of equal structure as one tree, with a list of arrays for each array; () if there are none."""
    return jax.tree.map(lambda *arrays: list(arrays), *states) if states else ()


def each(together: Tree, structure: jax.tree_util.PyTreeDef, count: int) -> list[State]:
    """Return the states that `stored` has put together.

    Args:
        together: the tree of lists.
        structure: structure of one state.
        count: number of states.
    """
    if not count:
        return []
    columns = structure.flatten_up_to(together)
    rows = zip(*columns, strict=True) if columns else [()] * count
    return [structure.unflatten(row) for row in rows]


def gather(codec: Codec, arrays: list[jax.Array], shards: Shards) -> list[jax.Array]:
    """Return arrays of which each rank has a part, gathered as messages of a codec in one collective.

    The codec keeps no state, and so no error feedback: a new message begins with each call. All ranks decode all parts,
    also their own, so they have the same bits.

    Args:
        codec: codec of the parts.
        arrays: this rank's parts.
        shards: axis, and the dim along which each array is cut.
    """
    wires = [codec.encode(codec.init(x.shape, x.dtype), x)[0] for x in arrays]
    return gather_wires(codec, wires, arrays, shards)


def gather_wires(codec: Codec, wires: list[Wire], arrays: Sequence[Like], shards: Shards) -> list[jax.Array]:
    """Return arrays of which each rank has encoded a part, gathered in one collective.

    Args:
        codec: codec of the parts.
        wires: wires of this rank's parts.
        arrays: the parts, or their shapes.
        shards: axis, and the dim along which each array is cut.
    """
    if not wires:
        return []
    own = [jax.tree.map(lambda leaf: leaf[None], wire) for wire in wires]
    axis, found = shards[0].axis, []
    assert axis is not None
    for wire, x, shard in zip(_together(lambda rows: all_gather(rows, axis), own), arrays, shards, strict=True):
        parts = jax.vmap(lambda one, x=x: codec.decode(one, x))(wire)
        shape = tuple(n * (shard.members if d == shard.dim else 1) for d, n in enumerate(x.shape))
        found.append(_whole(parts, shape, shard))
    return found


def squares(arrays: list[jax.Array]) -> jax.Array:
    """Return the sum of all squares, float32 []."""
    return sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.float32(0))


class ScatteredState(NamedTuple):
    """State of `Scattered` for one array.

    Attributes:
        sent: the codec's states of the parts that this rank sends, [D, *shape].
        owned: the codec's state of the part of the mean that this rank sends to all; () if it keeps the part alone.
    """

    sent: State
    owned: State


class Cut(NamedTuple):
    """Values of one array that a rank keeps during a reduction by `Scattered`.

    Attributes:
        shape: shape of the array.
        old: state before.
        sent: the codec's new states of the parts.
        parts: gradient as one part for each rank, [D, *part].
        wire: wires of these parts.
    """

    shape: tuple[int, ...]
    old: ScatteredState
    sent: State
    parts: jax.Array
    wire: Wire

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """Shape of a part."""
        return jax.ShapeDtypeStruct(self.parts.shape[1:], jnp.float32)


def _place(shape: tuple[int, ...], shard: Shard) -> int:
    """Return the dim along which an array is cut into parts, -1 if none can be cut; see `Reducer.init`."""
    return shard.dim if shard.dim >= 0 else next((d for d, n in enumerate(shape) if n and n % shard.members == 0), -1)


def _part(shape: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """Return the shape of a part; see `Reducer.init`."""
    place = _place(shape, shard)
    return tuple(n // shard.members if d == place else n for d, n in enumerate(shape))


def _parts(x: jax.Array, shard: Shard) -> jax.Array:
    """Return an array as one part for each rank, [D, *part]."""
    place = _place(x.shape, shard)
    return jnp.moveaxis(x.reshape(*x.shape[:place], shard.members, -1, *x.shape[place + 1 :]), place, 0)


def _whole(parts: jax.Array, shape: tuple[int, ...], shard: Shard) -> jax.Array:
    """Return the array of a shape that `_parts` has cut."""
    return jnp.moveaxis(parts, 0, _place(shape, shard)).reshape(shape)


def _together(exchange: Callable[[jax.Array], jax.Array], wires: list[Wire]) -> list[Wire]:
    """Return wires after an exchange of arrays [D, size], in one collective for all of them.

    Args:
        exchange: function of an array [D, size], or [1, size] if it gathers, that returns an array [D, size].
        wires: trees of arrays [D, *shape], or [1, *shape].
    """
    leaves, structure = jax.tree.flatten(wires)
    if not leaves:
        return wires
    rows = exchange(jax.vmap(joined)(leaves))
    one = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, jax.vmap(lambda row: parted(row, one))(rows))


@dataclasses.dataclass(frozen=True)
class Scattered(Reducer):
    """Reducer that sends each rank its part of a gradient as a message of a codec, by one all-to-all.

    Each rank decodes and adds up what the others send. If all ranks need the whole mean, each then encodes its part of
    it, with a second state, and gathers the others'. Every part has the codec's error feedback, so nothing is lost over
    ranks and time.

    Attributes:
        codec: codec of the parts.

    References:
        Wang et al. 2023, ZeRO++: a quantised all-to-all in place of a reduce-scatter. Xie et al. 2024, LoCo, and Jia et
        al. 2024, SDP4Bit: the same at 4 bits with error feedback.
    """

    codec: Codec

    def refusal(self, shape: tuple[int, ...], shard: Shard) -> str:
        """Return why the codec does not take an array's parts; see `Reducer.refusal`."""
        return refusal(self.codec, _part(shape, shard), jnp.float32) if _place(shape, shard) >= 0 else ""

    def init(self, shape: tuple[int, ...], shard: Shard) -> ScatteredState:
        """Return the states of all parts; see `Reducer.init`."""
        one = self.codec.init(_part(shape, shard), jnp.float32)
        sent = jax.tree.map(lambda x: jnp.broadcast_to(x, (shard.members, *jnp.shape(x))), one)
        return ScatteredState(sent, () if shard.dim >= 0 else one)

    def takes(self, shape: tuple[int, ...], shard: Shard, min_ratio: float) -> bool:
        """Return whether an array can be cut into equal parts that become small enough; see `Reducer.takes`."""
        if _place(shape, shard) < 0:
            return False
        part = _part(shape, shard)
        return array_bytes(part, jnp.float32) >= min_ratio * self.codec.wire_bytes(part, jnp.float32)

    def encode(
        self, states: list[ScatteredState], arrays: list[jax.Array], shards: Shards
    ) -> tuple[list[Wire], list[Cut]]:
        """Return the wires of all parts of each array, and what the rank keeps of it; see `Reducer.encode`."""
        kept = []
        for state, x, shard in zip(states, arrays, shards, strict=True):
            parts = _parts(x, shard)
            wire, sent = jax.vmap(self.codec.encode)(state.sent, parts)
            kept.append(Cut(x.shape, state, sent, parts, wire))
        return [cut.wire for cut in kept], kept

    def exchange(self, wire: list[Wire], kept: list[Cut], shards: Shards) -> list[tuple[Wire, State]]:
        """Return each array's arrived wires, and the codec's new state of the owned part; see `Reducer.exchange`."""
        axis = shards[0].axis
        received = _together(lambda rows: all_to_all(rows, axis), wire) if axis else wire
        arrived: list[tuple[Wire, State]] = [(wires, ()) for wires in received]
        # Those that all ranks need whole.
        second = [i for i, shard in enumerate(shards) if shard.dim < 0]
        encoded = [self.codec.encode(kept[i].old.owned, self._mean(received[i], kept[i])) for i in second]
        own = [jax.tree.map(lambda leaf: leaf[None], wires) for wires, _ in encoded]
        gathered = _together(lambda rows: all_gather(rows, axis), own) if axis else own
        for i, wires, (_, owned) in zip(second, gathered, encoded, strict=True):
            arrived[i] = wires, owned
        return arrived

    def _decoded(self, wires: Wire, cut: Cut) -> jax.Array:
        """Return the parts that wires encode, [D, *part]."""
        return jax.vmap(lambda wire: self.codec.decode(wire, cut.like))(wires)

    def _mean(self, wires: Wire, cut: Cut) -> jax.Array:
        """Return the mean of the parts that wires encode, added in the ranks' order."""
        parts = self._decoded(wires, cut)
        return functools.reduce(jnp.add, [parts[i] for i in range(len(parts))]) / len(parts)

    def _residuals(self, states: State, cut: Cut) -> jax.Array:
        """Return what the codec has left out of each part, [D, *part]."""
        run = jax.vmap(lambda state: self.codec.residual(state, cut.like), axis_size=len(cut.parts))
        return run(states)

    def update(
        self, arrived: list[tuple[Wire, State]], kept: list[Cut], shards: Shards
    ) -> tuple[list[ScatteredState], LeftOut]:
        """Return the next states, and how far this rank's messages are from what was to be sent; see `Reducer`."""
        asked = [cut.parts + self._residuals(cut.old.sent, cut) for cut in kept]
        left = [x - self._decoded(cut.wire, cut) for x, cut in zip(asked, kept, strict=True)]
        states = [ScatteredState(cut.sent, owned) for cut, (_, owned) in zip(kept, arrived, strict=True)]
        return states, LeftOut(squares(left), squares(asked))

    def decode(self, arrived: list[tuple[Wire, State]], kept: list[Cut], shards: Shards) -> list[jax.Array]:
        """Return this rank's part of each mean, or all of it; see `Reducer.decode`."""
        means = []
        for (wires, _), cut, shard in zip(arrived, kept, shards, strict=True):
            whole = shard.dim < 0
            means.append(_whole(self._decoded(wires, cut), cut.shape, shard) if whole else self._mean(wires, cut))
        return means

    def residual(self, state: ScatteredState, like: Like, shard: Shard) -> jax.Array:
        """Return what this rank has left out of its gradient, and of its part of the mean; see `Reducer.residual`."""
        part = jax.ShapeDtypeStruct(_part(like.shape, shard), jnp.float32)
        parts = jax.vmap(lambda one: self.codec.residual(one, part), axis_size=shard.members)(state.sent)
        if shard.dim < 0:
            own = axis_index(shard.axis) if shard.axis else 0
            # In the mean over ranks it must count once.
            parts = parts.at[own].add(shard.members * self.codec.residual(state.owned, part))
        return _whole(parts, like.shape, shard)

    def traffic(self, shape: tuple[int, ...], shard: Shard) -> tuple[tuple[str, float], ...]:
        """Return the bytes of the parts for the other ranks, and of the part that goes to all of them."""
        sent = (shard.members - 1) * self.codec.wire_bytes(_part(shape, shard), jnp.float32)
        return (("all-to-all", sent),) if shard.dim >= 0 else (("all-to-all", sent), ("all-gather", sent))

    def passes(self) -> Passes:
        """Return the codec's passes, and one for the sum; XLA makes the log's error where the codec makes its own."""
        one = self.codec.passes()
        return Passes(one.encode, one.decode + 1, one.launches + 4)

    def describe(self) -> str:
        """Return the codec's name."""
        return codec_name(self.codec)
