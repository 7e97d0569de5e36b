"""Attention over a sequence that a mesh axis splits.

Of a sequence in 2n parts each of n devices has two, the i-th from the beginning and the i-th from the end. So all
devices have as many pairs of tokens that see each other: those of its own tokens, and with each other device those of
two parts with two, or of one with one and again one with one. Three forms of exchange:

    ring      keys and values go round, a neighbour's under the products of those that came before
    gather    all devices' keys and values are gathered once; cheap if there are few heads of keys
    heads     queries, keys and values are exchanged: a device then has all tokens and a part of the heads

References:
    Liu et al. 2023, Ring Attention; Zhu 2024, zig-zag ring attention (balance of causal attention).
    Grattafiori et al. 2024, "The Llama 3 Herd of Models" (gather); Jacobs et al. 2023, DeepSpeed Ulysses (heads).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from compress.codec import Codec, Identity, Wire
from paxtrain.attention import blocks
from paxtrain.attention.blocks import Marks, Rule, Seen

_KeysValues = tuple[jax.Array, jax.Array]  # keys and values, or their gradients


class KeyExchange(NamedTuple):
    """The way in which devices see each other's tokens.

    Attributes:
        axis: mesh axis that splits the sequence.
        form: "ring" or "gather".
        codec: codec of the keys and values that travel. Each device encodes its own once in F and once in B, and
            others pass the wires on as they are, so that the error does not grow with the distance. Its own tokens see
            them as they are, and gradients travel as they are.
    """

    axis: str
    form: str
    codec: Codec = Identity()

    def encode(self, pair: _KeysValues) -> tuple[Wire, ...]:
        """Return the wires of a device's keys and values; each is a first message, so no error is fed back."""
        with jax.named_scope("compression"):
            return tuple(self.codec.encode(self.codec.init(x.shape, x.dtype), x)[0] for x in pair)

    def decode(self, wires: tuple[Wire, ...], like: _KeysValues) -> _KeysValues:
        """Return the keys and values that the wires encode."""
        with jax.named_scope("compression"):
            keys, values = (self.codec.decode(wire, x) for wire, x in zip(wires, like, strict=True))
        return keys, values


def part(x: jax.Array, dim: int, rank: jax.Array, ranks: int) -> jax.Array:
    """Return a device's two parts of an array that has the whole sequence.

    Args:
        x: any array.
        dim: dim of the sequence.
        rank: position of the device on the axis.
        ranks: size of the axis.
    """
    size = x.shape[dim] // (2 * ranks)
    starts = (rank * size, (2 * ranks - 1 - rank) * size)
    return jnp.concatenate([lax.dynamic_slice_in_dim(x, start, size, dim) for start in starts], dim)


def to_heads(x: jax.Array, axis: str) -> jax.Array:
    """Return a part of the heads of all tokens in their order, [B, S, N / n, D], for all heads of a part of them.

    Args:
        x: [B, S / n, N, D].
        axis: mesh axis of n devices that splits the sequence.
    """
    with jax.named_scope("context"):
        x = lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
    return _reordered(x, np.argsort(_order(lax.axis_size(axis))))


def to_tokens(x: jax.Array, axis: str) -> jax.Array:
    """Return the inverse of `to_heads`, [B, S / n, N, D], of x [B, S, N / n, D]."""
    x = _reordered(x, _order(lax.axis_size(axis)))
    with jax.named_scope("context"):
        return lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)


def _order(ranks: int) -> np.ndarray:
    """Return the number of each part of the sequence in the order in which devices have them."""
    first = np.arange(ranks)
    return np.stack([first, 2 * ranks - 1 - first], axis=1).reshape(-1)


def _reordered(x: jax.Array, order: np.ndarray) -> jax.Array:
    """Return x [B, S, ...] with its parts in another order."""
    parts = x.reshape(x.shape[0], len(order), -1, *x.shape[2:])
    return parts[:, order].reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array | None,
    window: jax.Array | None,
    exchange: KeyExchange,
    rule: Rule,
) -> jax.Array:
    """Return causal attention of a device's tokens to all tokens, [B, S / n, N, D].

    Args:
        q: [B, S / n, N, D], of the tokens that `part` says.
        k: [B, S / n, K, D].
        v: [B, S / n, K, D].
        starts: index at which each token's document begins, int32 [B, S]; None: all tokens see all before them.
        window: number of tokens that each sees, itself among them, int32 []; None: all before it.
        exchange: how the tokens of others are seen.
        rule: facts of attention.
    """
    return _forward(q, k, v, starts, window, exchange, rule)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array | None,
    window: jax.Array | None,
    exchange: KeyExchange,
    rule: Rule,
) -> tuple[jax.Array, tuple]:
    """Return attention, and what its backward needs."""
    own = _SharedBlocks(q, starts, window, exchange.axis)
    out, sums = blocks.forward(q, k, v, own.diagonal, rule)

    def turn(distance: Any, pair: _KeysValues, found: tuple) -> tuple:
        keys, values = own.keys(pair, distance)
        first, second = _cut(blocks.forward(own.queries(q, distance), keys, values, own.seen(distance), rule))
        early, late = found
        late = blocks.merge(late, first)
        both = blocks.merge(_either(own.before(distance), early, late), second)
        return _either(own.before(distance), (both, late), (early, both))

    early, late = _visit(exchange, (k, v), turn, _halves((out.astype(jnp.float32), sums)))
    out, sums = (jnp.concatenate(both, axis=1) for both in zip(early, late, strict=True))
    out = checkpoint_name(out.astype(q.dtype), "context")
    sums = checkpoint_name(sums, "sums")
    return out, (q, k, v, starts, window, out, sums)


def _backward(exchange: KeyExchange, rule: Rule, kept: tuple, g: jax.Array) -> tuple:
    q, k, v, starts, window, out, sums = kept
    own = _SharedBlocks(q, starts, window, exchange.axis)
    of_q, *of_own = blocks.backward(q, k, v, out, sums, g, own.diagonal, rule)

    def turn(distance: Any, pair: _KeysValues, of_q: tuple) -> tuple[tuple, _KeysValues]:
        each = (own.queries(x, distance) for x in (q, out, sums, g))
        queries, outs, totals, cotangents = each
        keys, values = own.keys(pair, distance)
        found = blocks.backward(queries, keys, values, outs, totals, cotangents, own.seen(distance), rule)
        one, two = _cut(jax.tree.map(lambda x: x.astype(jnp.float32), found))
        before, (early, late) = own.before(distance), of_q
        nothing = jax.tree.map(jnp.zeros_like, two)
        to_early, to_late = _either(before, (two, nothing), (nothing, two))
        # A pair's keys: the part that both blocks see, or the second block's.
        of_k, of_v = (
            jnp.concatenate([a + b, c], axis=1) for a, b, c in zip(one[1:], to_early[1:], to_late[1:], strict=True)
        )
        return (early + to_early[0], late + one[0] + to_late[0]), (of_k, of_v)

    carry = _halves(of_q.astype(jnp.float32))
    (early, late), (of_k, of_v) = _visit_back(exchange, (k, v), turn, carry, (of_own[0], of_own[1]))
    of_q = jnp.concatenate([early, late], axis=1)
    return of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype), None, None


attend.defvjp(_forward, _backward)


class _SharedBlocks:
    """The blocks of a device's queries with the keys of devices at some distance on the axis.

    With a device before it, at a distance of up to its own position, both parts of its queries see the first part of
    the keys. With one behind it the second part of its queries sees both parts of the keys. Two blocks are one with
    twice the sequences: the second part's queries with the first part's keys, and the other pair.
    """

    def __init__(self, q: jax.Array, starts: jax.Array | None, window: jax.Array | None, axis: str) -> None:
        self.rank, self.ranks = lax.axis_index(axis), lax.axis_size(axis)
        length = q.shape[1] * self.ranks
        self._row = jnp.broadcast_to(jnp.arange(length), (q.shape[0], length))
        self._starts, self._window = starts, window

    def before(self, distance: Any) -> jax.Array:
        """Return whether the device at a distance is before this one on the axis."""
        return self.rank >= distance

    def _marks(self, rank: jax.Array) -> Marks:
        starts = self._starts
        return Marks(
            part(self._row, 1, rank, self.ranks), None if starts is None else part(starts, 1, rank, self.ranks)
        )

    @property
    def diagonal(self) -> Seen:
        """The keys that the device's tokens see of its own."""
        own = self._marks(self.rank)
        return Seen(own, own, True, self._window)

    def queries(self, x: jax.Array, distance: Any) -> jax.Array:
        """Return what the queries of both blocks have of an array of the device's tokens, [2 B, S / (2 n), ...]."""
        early, late = _halves(x)
        return jnp.concatenate([late, jnp.where(self.before(distance), early, late)])

    def keys(self, tree: Any, distance: Any) -> Any:
        """Return the same of keys."""

        def one(x: jax.Array) -> jax.Array:
            early, late = _halves(x)
            return jnp.concatenate([early, jnp.where(self.before(distance), early, late)])

        return jax.tree.map(one, tree)

    def seen(self, distance: Any) -> Seen:
        """Return the keys that queries see in both blocks."""
        own, other = self._marks(self.rank), self._marks((self.rank - distance) % self.ranks)
        queries = jax.tree.map(lambda x: self.queries(x, distance), own)
        return Seen(queries, self.keys(other, distance), False, self._window)


def _halves(tree: Any) -> tuple[Any, Any]:
    """Return both parts of arrays of a device's tokens, [B, S / (2 n), ...]."""
    middle = jax.tree.leaves(tree)[0].shape[1] // 2
    return jax.tree.map(lambda x: x[:, :middle], tree), jax.tree.map(lambda x: x[:, middle:], tree)


def _cut(tree: Any) -> tuple[Any, Any]:
    """Return what two blocks give, each for itself."""
    middle = jax.tree.leaves(tree)[0].shape[0] // 2
    return jax.tree.map(lambda x: x[:middle], tree), jax.tree.map(lambda x: x[middle:], tree)


def _either(condition: jax.Array, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


@jax.named_scope("context")
def _passed(tree: Any, axis: str) -> Any:
    """Return what the device before this one on the axis has."""
    ranks = lax.axis_size(axis)
    return jax.tree.map(lambda x: lax.ppermute(x, axis, [(i, (i + 1) % ranks) for i in range(ranks)]), tree)


@jax.named_scope("context")
def _all(tree: Any, axis: str) -> Any:
    return jax.tree.map(lambda x: lax.all_gather(x, axis), tree)


def _visit(exchange: KeyExchange, pair: _KeysValues, turn: Callable[[Any, _KeysValues, Any], Any], found: Any) -> Any:
    """Return what turns make of a value, with the pairs of the devices at the distances 1, 2, ... n - 1.

    Args:
        exchange: how their pairs come here.
        pair: the device's own keys and values.
        turn: function (distance, pair, value) -> value.
        found: the first value.
    """
    axis, ranks = exchange.axis, lax.axis_size(exchange.axis)
    wires = exchange.encode(pair)

    def visit(distance: Any, wires: tuple[Wire, ...], found: Any) -> Any:
        return turn(distance, exchange.decode(wires, pair), found)

    if exchange.form == "gather":
        every, rank = _all(wires, axis), lax.axis_index(axis)
        return lax.fori_loop(1, ranks, lambda d, found: visit(d, _of(every, (rank - d) % ranks), found), found)

    def body(distance: Any, carry: tuple) -> tuple:
        wires, found = carry
        return lax.optimization_barrier((_passed(wires, axis), visit(distance, wires, found)))

    # Barriers end transfers behind the products that they lie under; XLA would wait for them at once.
    following, found = lax.optimization_barrier((_passed(wires, axis), found))
    wires, found = lax.fori_loop(1, ranks - 1, body, (following, found))
    return visit(ranks - 1, wires, found)


def _visit_back(
    exchange: KeyExchange,
    pair: _KeysValues,
    turn: Callable[[Any, _KeysValues, Any], tuple[Any, _KeysValues]],
    found: Any,
    own: _KeysValues,
) -> tuple[Any, _KeysValues]:
    """Return what `_visit` does, and the gradients of this device's pair, which all devices have parts of.

    Args:
        exchange: how their pairs come here.
        pair: the device's own keys and values.
        turn: function (distance, pair, value) -> (value, gradients of the pair).
        found: the first value.
        own: the pair's gradients by the device's own queries.
    """
    axis, ranks = exchange.axis, lax.axis_size(exchange.axis)
    own = jax.tree.map(lambda x: x.astype(jnp.float32), own)
    wires = exchange.encode(pair)

    def visit(distance: Any, wires: tuple[Wire, ...], found: Any) -> tuple[Any, _KeysValues]:
        return turn(distance, exchange.decode(wires, pair), found)

    if exchange.form == "gather":
        every, rank = _all(wires, axis), lax.axis_index(axis)
        totals = jax.tree.map(lambda x: jnp.zeros((ranks, *x.shape), x.dtype).at[rank].set(x), own)

        def one(distance: Any, carry: tuple) -> tuple:
            found, totals = carry
            at = (rank - distance) % ranks
            found, gradients = visit(distance, _of(every, at), found)
            return found, jax.tree.map(lambda total, x: total.at[at].set(x), totals, gradients)

        found, totals = lax.fori_loop(1, ranks, one, (found, totals))
        with jax.named_scope("context"):
            return found, jax.tree.map(lambda x: lax.psum_scatter(x, axis), totals)

    def body(distance: Any, carry: tuple) -> tuple:
        wires, found, total = carry
        # Neither transfer waits for this turn's products.
        moved = _passed(wires, axis), _passed(total, axis)
        (following, arrived), (found, gradients) = lax.optimization_barrier((moved, visit(distance, wires, found)))
        return following, found, jax.tree.map(jnp.add, arrived, gradients)

    following, (found, own) = lax.optimization_barrier((_passed(wires, axis), (found, own)))
    wires, found, total = lax.fori_loop(1, ranks - 1, body, (following, found, own))
    arrived, (found, gradients) = lax.optimization_barrier((_passed(total, axis), visit(ranks - 1, wires, found)))
    return found, _passed(jax.tree.map(jnp.add, arrived, gradients), axis)


def _of(tree: Any, place: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), tree)
