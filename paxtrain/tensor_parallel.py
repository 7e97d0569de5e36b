"""Tensor parallelism by hand: the two conjugate operators, and the vocabulary-parallel embedding and cross-entropy.

Under shard_map with check_vma=False a psum is its own transpose, which would multiply gradients by the size of the
axis, so each operator carries its own backward. `axis` is the mesh axis, or None where tensors are whole.

References:
    Shoeybi et al. 2019, Megatron-LM (f and g; vocabulary-parallel cross-entropy).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


@jax.named_scope("tensor")
def _sum(x: jax.Array, axis: str | None) -> jax.Array:
    return lax.psum(x, axis) if axis else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy(x: jax.Array, axis: str | None) -> jax.Array:
    """Hands a replicated x to column-parallel weights: identity forward, sum over the axis backward."""
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce(x: jax.Array, axis: str | None) -> jax.Array:
    """Completes row-parallel partial sums: sum over the axis forward, identity backward."""
    return _sum(x, axis)


copy.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (_sum(g, axis),))
reduce.defvjp(lambda x, axis: (reduce(x, axis), None), lambda axis, _, g: (g,))


def local_ids(ids: jax.Array, rows: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Token ids as rows of this rank's vocabulary shard.

    Args:
        ids: int [...].
        rows: rows of the shard.

    Returns:
        ([...] row in the shard, clipped into it; [...] whether the id lives here).
    """
    local = ids - (lax.axis_index(axis) * rows if axis else 0)
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


def embedding_lookup(table: jax.Array, ids: jax.Array, axis: str | None) -> jax.Array:
    """Rows of a vocabulary-parallel table [V/T, H] for ids [B, S]; [B, S, H] on every rank."""
    if axis is None:
        return table[ids]
    local, here = local_ids(ids, table.shape[0], axis)
    return reduce(jnp.where(here[..., None], table[local], 0), axis)


@jax.custom_vjp
def project(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [..., H] times table [V, H] transposed, accumulated and returned in float32.

    The backward casts the float32 gradient to the compute dtype first, so that its two matrix products run at the
    speed of that dtype.
    """
    return jnp.einsum("...h,vh->...v", x, table, preferred_element_type=jnp.float32)


def _project_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, table = saved
    g = g.astype(x.dtype)
    return jnp.einsum("...v,vh->...h", g, table), jnp.einsum("...v,...h->vh", g, x)


project.defvjp(lambda x, table: (project(x, table), (x, table)), _project_backward)


def cross_entropy(logits: jax.Array, targets: jax.Array, vocab_size: int, axis: str | None) -> jax.Array:
    """Cross-entropy in nats [B, S] of vocabulary-parallel logits [B, S, V/T] (float32) for targets [B, S].

    Full logits are never gathered. Ids from vocab_size on are padding and get no probability.
    """
    rows = logits.shape[-1]
    ids = jnp.arange(rows) + (lax.axis_index(axis) * rows if axis else 0)
    logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
    largest = lax.stop_gradient(logits).max(axis=-1)
    if axis:
        largest = lax.pmax(largest, axis)
    total = reduce(jnp.exp(logits - largest[..., None]).sum(axis=-1), axis)
    target = reduce(jnp.where(ids == targets[..., None], logits, 0).sum(axis=-1), axis)
    return jnp.log(total) + largest - target
