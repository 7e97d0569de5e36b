"""In-place building blocks of the executor: slots of rings, accumulators, and work that may be skipped."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Tree

RingIndex = tuple[jax.Array | int, ...]
T = TypeVar("T")  # a pytree of arrays


def read(ring: T, index: RingIndex) -> T:
    """Return ring[index] of every leaf; an empty index means the whole leaf."""

    def read_leaf(r: jax.Array) -> jax.Array:
        starts = (*index, *[0] * (r.ndim - len(index)))
        return lax.dynamic_slice(r, starts, (*[1] * len(index), *r.shape[len(index) :])).reshape(r.shape[len(index) :])

    return jax.tree.map(read_leaf, ring) if index else ring


def write(ring: T, index: RingIndex, value: Tree) -> T:
    """Return the ring after ring[index] = value, in place if XLA can.

    Args:
        ring: tree of arrays [slots, ...].
        index: leading indices; if empty, the value replaces the ring.
        value: tree of arrays without the indexed dims.
    """

    def write_leaf(r: jax.Array, v: jax.Array) -> jax.Array:
        starts = (*index, *[0] * v.ndim)
        return lax.dynamic_update_slice(r, v.astype(r.dtype).reshape(*[1] * len(index), *v.shape), starts)

    return jax.tree.map(write_leaf, ring, value) if index else value


def write_front(ring: T, index: RingIndex, value: Tree) -> T:
    """Return the ring after `write` of values that fill only the front of their slot.

    Args:
        ring: tree of arrays [*slots, ...].
        index: leading indices; may be empty.
        value: tree of arrays without the indexed dims, each dim as large as the slot's or smaller.
    """

    def write_leaf(r: jax.Array, v: jax.Array) -> jax.Array:
        if r.shape == v.shape:
            return v
        starts = (*index, *[0] * v.ndim)
        return lax.dynamic_update_slice(r, v.astype(r.dtype).reshape(*[1] * len(index), *v.shape), starts)

    return jax.tree.map(write_leaf, ring, value)


def write_some(ring: T, index: RingIndex, values: dict[int, jax.Array]) -> T:
    """Return the ring after `write` to some of its leaves.

    Args:
        ring: tree of arrays [slots, ...].
        index: leading indices.
        values: value by number of the leaf.
    """
    leaves, structure = jax.tree.flatten(ring)
    new = [write(leaf, index, values[n]) if n in values else leaf for n, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, new)


def add(total: T, delta: Tree) -> T:
    """Return total + delta, leaf by leaf, in the dtypes of total."""
    return jax.tree.map(lambda t, d: t + d.astype(t.dtype), total, delta)


def add_some(total: T, index: RingIndex, deltas: dict[int, jax.Array]) -> T:
    """Return the total with deltas added to some of its leaves.

    Args:
        total: tree of arrays.
        index: leading indices in the leaves.
        deltas: delta by number of the leaf.
    """
    leaves = jax.tree.leaves(total)
    return write_some(total, index, {n: add(read(leaves[n], index), delta) for n, delta in deltas.items()})


def some(tree: T, leaves: Mapping[int, jax.Array]) -> T:
    """Return a tree with some leaves, by number, and None in place of the others."""
    every, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [leaves.get(n) for n in range(len(every))])


def numbered(tree: Tree, numbers: Iterable[int]) -> dict[int, jax.Array]:
    """Return the leaves of what has become of `some`, by number."""
    return dict(zip(sorted(numbers), jax.tree.leaves(tree), strict=True))


def only_if(condition: jax.Array, body: Callable[[T], T], carry: T) -> T:
    """Return body(carry) if the condition holds, else carry: a loop of 0 or 1 trips, which copies nothing.

    Args:
        condition: bool [].
        body: carry -> carry of the same shapes.
        carry: tree of arrays.
    """
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, c: body(c), carry)


def always(condition: jax.Array, body: Callable[[T], T], carry: T) -> T:
    """Return body(carry) whatever the condition is, in place of `only_if` where all stages run the body.

    Args:
        condition: not used; see `only_if`.
        body: carry -> carry.
        carry: tree of arrays.
    """
    return body(carry)


def behind(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return x, but not before `other` is made, whatever XLA makes of barriers.

    If the first number of `other` is no number, neither is x; such a step is lost anyway.
    """
    first = other[(0,) * other.ndim]
    return jnp.where(first == first, x, first.astype(x.dtype))
