"""The cross-entropy of a vocabulary-parallel head, without the logits of all tokens.

Tokens pass in pieces. The float32 logits of a piece are made, read once for the normalizer and once for their gradient,
whose products with the table and with the input follow at once. So no product runs twice, and what is held is the
logits of one piece. The table's gradient is added to its accumulator by the product that makes it.

References:
    Shoeybi et al. 2019, Megatron-LM (vocabulary-parallel cross-entropy).
    Hsu et al. 2024, Liger Kernel (the head's gradient in its forward, by pieces of tokens).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain.model.tensor_parallel import local_ids, reduce

# Tokens of a piece: on an H100, with fewer, adding to the table's gradient takes longer than its products.
PIECE = 2048

_LOWEST = float(jnp.finfo(jnp.float32).min)


def project(x: jax.Array, table: jax.Array, cap: float = 0.0) -> jax.Array:
    """Return the logits of x [..., H] and a table [V, H], accumulated and returned in float32.

    Args:
        x: [..., H].
        table: [V, H].
        cap: c of logits that are c tanh(logits / c); 0: they are as they are.
    """
    logits = jnp.einsum("...h,vh->...v", x, table, preferred_element_type=jnp.float32)
    return cap * jnp.tanh(logits / cap) if cap else logits


def _once(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `_largest_and_sum` does by one reduction, whose pairs are merged."""

    def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest = jnp.maximum(a[0], b[0])
        return largest, a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)

    return lax.reduce((logits, jnp.ones_like(logits)), (jnp.float32(_LOWEST), jnp.float32(0)), merge, (1,))


def _twice(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `_largest_and_sum` does by two reductions."""
    largest = logits.max(axis=1)
    return largest, jnp.exp(logits - largest[:, None]).sum(axis=1)


def _largest_and_sum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest logit of each token, and the sum of all exp(logit - largest): [t] each, for logits [t, V]."""
    # What counts on GPUs is how often the logits are read; CPUs take longer for exponentials inside of a reduction.
    return lax.platform_dependent(logits, cpu=_twice, default=_once)


class _PieceLogits:
    """The logits of a piece of tokens, with what their loss and their gradient need."""

    def __init__(
        self, x: jax.Array, table: jax.Array, targets: jax.Array, vocab_size: int, axis: str | None, cap: float
    ) -> None:
        rows, self.cap = table.shape[0], cap
        ids = jnp.arange(rows) + (lax.axis_index(axis) * rows if axis else 0)
        logits = project(x, table, cap)
        # Padding gets no probability. A finite number, because the difference of two infinities is none.
        self.logits = jnp.where(ids < vocab_size, logits, _LOWEST)
        self.local, self.here = local_ids(targets, rows, axis)
        largest, total = _largest_and_sum(self.logits)
        if axis:
            everywhere = lax.pmax(largest, axis)
            largest, total = everywhere, total * jnp.exp(largest - everywhere)
        target = jnp.where(self.here, jnp.take_along_axis(logits, self.local[:, None], axis=1)[:, 0], 0)
        total, target = reduce(jnp.stack([total, target]), axis)
        self.normalizer = jnp.log(total) + largest
        self.loss = (self.normalizer - target).sum()

    def gradient(self, scale: float) -> jax.Array:
        """Return the gradient of `scale` times the loss with respect to the logits, float32."""
        wanted = (jnp.arange(self.logits.shape[1]) == self.local[:, None]) & self.here[:, None]
        g = (jnp.exp(self.logits - self.normalizer[:, None]) - wanted) * scale
        # Padding's logits are far below the cap.
        return g * (1 - jnp.square(jnp.clip(self.logits / self.cap, -1, 1))) if self.cap else g


def _pieces(x: jax.Array, targets: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return the pieces of [t, H] and [t], stacked, and the tokens that are left over."""
    count = x.shape[0] // PIECE
    whole = count * PIECE
    stacked = x[:whole].reshape(count, PIECE, x.shape[1]), targets[:whole].reshape(count, PIECE)
    return stacked, (x[whole:], targets[whole:])


def losses(
    x: jax.Array, table: jax.Array, targets: jax.Array, vocab_size: int, axis: str | None, cap: float = 0.0
) -> jax.Array:
    """Return the sum of all tokens' cross-entropy, in nats.

    Args:
        x: input of the head, [..., H].
        table: this rank's shard of the head's table, [V/T, H].
        targets: token ids, int [...].
        vocab_size: number of token ids; ids from here on are padding and get no probability.
        axis: mesh axis that splits the vocabulary; None: it is whole.
        cap: see `project`.
    """

    def add(total: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _PieceLogits(piece[0], table, piece[1], vocab_size, axis, cap).loss, None

    stacked, rest = _pieces(x.reshape(-1, x.shape[-1]), targets.reshape(-1))
    total = jnp.float32(0)
    if stacked[0].shape[0]:
        total, _ = lax.scan(add, total, stacked)
    return add(total, rest)[0] if rest[1].size else total


def losses_and_gradients(
    x: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    axis: str | None,
    scale: float,
    total: jax.Array,
    cap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sum of all tokens' cross-entropy, see `losses`, and the gradients of `scale` times this sum.

    Args:
        scale: factor of the gradients.
        total: accumulator of the table's gradient, float32 [V/T, H].
        cap: see `project`.

    Returns:
        The sum; the gradient of x, this rank's part of a sum over the axis; and the accumulator with the table's
        gradient added.
    """

    def add(carry: tuple, piece: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        loss, total = carry
        own, targets = piece
        found = _PieceLogits(own, table, targets, vocab_size, axis, cap)
        # In the compute dtype, so that both products run at its speed.
        g = found.gradient(scale).astype(x.dtype)
        total = total + jnp.einsum("tv,th->vh", g, own, preferred_element_type=jnp.float32)
        return (loss + found.loss, total), jnp.einsum("tv,vh->th", g, table)

    stacked, rest = _pieces(x.reshape(-1, x.shape[-1]), targets.reshape(-1))
    carry, gradients = (jnp.float32(0), total), []
    if stacked[0].shape[0]:
        carry, g = lax.scan(add, carry, stacked)
        gradients.append(g.reshape(-1, x.shape[-1]))
    if rest[1].size:
        carry, g = add(carry, rest)
        gradients.append(g)
    return carry[0], jnp.concatenate(gradients).reshape(x.shape), carry[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def cross_entropy(
    x: jax.Array, table: jax.Array, targets: jax.Array, vocab_size: int, axis: str | None, cap: float = 0.0
) -> jax.Array:
    """Return the mean cross-entropy of all tokens, in nats; the arguments are those of `losses`."""
    return losses(x, table, targets, vocab_size, axis, cap) / targets.size


def _forward(
    x: jax.Array, table: jax.Array, targets: jax.Array, vocab_size: int, axis: str | None, cap: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    nothing, scale = jnp.zeros(table.shape, jnp.float32), 1 / targets.size
    loss, own, total = losses_and_gradients(x, table, targets, vocab_size, axis, scale, nothing, cap)
    return loss / targets.size, (own, total.astype(table.dtype))


def _backward(
    vocab_size: int, axis: str | None, cap: float, kept: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    own, total = kept
    return (g * own).astype(own.dtype), (g * total).astype(total.dtype), None


cross_entropy.defvjp(_forward, _backward)
