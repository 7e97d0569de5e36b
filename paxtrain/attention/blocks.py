"""Attention of a block of queries to a block of keys, and the merge of what several blocks give.

Dims: B sequences, T queries, S keys, N heads of queries, K of keys, D of a head. No array has more than `_TILE` scores
a head, whatever the length of the blocks.

References:
    Milakov and Gimelshein 2018 (softmax in parts); Dao 2023, FlashAttention-2 (the backward from log-sum-exps).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain.attention import flash

_TILE = 2**22  # scores of a head that exist at once
_UNSEEN = jnp.finfo(jnp.float32).min / 2


class Rule(NamedTuple):
    """The facts of attention that are known when it is traced.

    Attributes:
        scale: factor of the scores.
        cap: bound of the scores s, which are then cap tanh(s / cap); 0: none.
        flash: whether cuDNN's kernel runs, which has no bound.
    """

    scale: float
    cap: float = 0.0
    flash: bool = False


class Marks(NamedTuple):
    """The facts of tokens by which they see each other.

    Attributes:
        position: index in the row, int32 [B, S].
        start: index at which the token's document begins, int32 [B, S]; None: all tokens see all before them.
    """

    position: jax.Array
    start: jax.Array | None


class Seen(NamedTuple):
    """The keys that the queries of a block see.

    Attributes:
        queries, keys: marks of both.
        causal: whether some keys are behind some queries; if not, all are before all.
        window: number of tokens that each sees, itself among them, int32 []; None: all before it.
    """

    queries: Marks
    keys: Marks
    causal: bool
    window: jax.Array | None = None

    @property
    def masks(self) -> bool:
        """True if more than the order of tokens hides keys."""
        return self.queries.start is not None or self.window is not None

    def mask(self) -> jax.Array | None:
        """Return which query sees which key, bool [B, T, S]; None: all see all."""
        q, k = self.queries, self.keys
        apart = q.position[:, :, None] - k.position[:, None, :]
        rules = [apart >= 0] if self.causal else []
        if self.window is not None:
            rules.append(apart < self.window)
        if q.start is not None and k.start is not None:
            rules.append(q.start[:, :, None] == k.start[:, None, :])
        return functools.reduce(jnp.logical_and, rules) if rules else None


def forward(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Return attention of a block, [B, T, N, D], and the logarithms of its scores' exponentials' sums.

    The sums are float32 [B, T, N]. A query that sees no key of the block has one of about -1e38, so that it weighs
    nothing beside others.

    Args:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, D].
        seen: the keys that each query sees.
        rule: facts of attention.
    """
    if rule.flash:
        return flash.forward(q, k, v, seen.mask() if seen.masks else None, seen.causal, rule.scale)

    def tile(q: jax.Array, marks: Marks) -> tuple[jax.Array, jax.Array]:
        scores = _scores(_grouped(q, k), k, seen._replace(queries=marks), rule)
        top = scores.max(axis=-1, keepdims=True)
        shares = jnp.exp(scores - top)
        total = shares.sum(axis=-1)
        out = jnp.einsum("bkgts,bskd->btkgd", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
        out = out / jnp.moveaxis(total, 3, 1)[..., None]
        sums = jnp.moveaxis(top[..., 0] + jnp.log(total), 3, 1)
        return out.astype(q.dtype).reshape(q.shape), sums.reshape(q.shape[:3])

    tiles = _tiles(q.shape[1], k.shape[1])
    if tiles == 1:
        return tile(q, seen.queries)
    found = lax.map(lambda part: tile(*part), _cut((q, seen.queries), tiles))
    return jax.tree.map(_joined, found)


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, sums: jax.Array, g: jax.Array, seen: Seen, rule: Rule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the block's part of the gradients of q, k and v, in float32 unless cuDNN's kernel runs.

    Args:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, D].
        out: attention to all blocks together, [B, T, N, D].
        sums: its log-sum-exps, float32 [B, T, N].
        g: its gradient, [B, T, N, D].
        seen: the keys that each query sees.
        rule: facts of attention.
    """
    if rule.flash:
        return flash.backward(q, k, v, out, sums, g, seen.mask() if seen.masks else None, seen.causal, rule.scale)

    def tile(q: jax.Array, marks: Marks, out: jax.Array, sums: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        queries, cotangents = _grouped(q, k), _grouped(g, k)
        own = seen._replace(queries=marks)
        scores = _scores(queries, k, own, rule)
        shares = jnp.exp(scores - _rows(sums, k))
        total = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
        ofv = jnp.einsum("btkgd,bskd->bkgts", cotangents, v, preferred_element_type=jnp.float32)
        slopes = shares * (ofv - _rows(total, k))
        if rule.cap:
            slopes = slopes * (1 - jnp.square(jnp.maximum(scores, -rule.cap) / rule.cap))
        slopes = (slopes * rule.scale).astype(q.dtype)
        of_q = jnp.einsum("bkgts,bskd->btkgd", slopes, k, preferred_element_type=jnp.float32)
        of_k = jnp.einsum("bkgts,btkgd->bskd", slopes, queries, preferred_element_type=jnp.float32)
        of_v = jnp.einsum("bkgts,btkgd->bskd", shares.astype(g.dtype), cotangents, preferred_element_type=jnp.float32)
        return of_q.reshape(q.shape), of_k, of_v

    tiles = _tiles(q.shape[1], k.shape[1])
    if tiles == 1:
        of_q, of_k, of_v = tile(q, seen.queries, out, sums, g)
        return of_q, of_k, of_v

    def turn(totals: tuple, part: Any) -> tuple[tuple, jax.Array]:
        of_q, *others = tile(*part)
        return tuple(total + one for total, one in zip(totals, others, strict=True)), of_q

    zero = jnp.zeros(k.shape, jnp.float32)
    (of_k, of_v), of_q = lax.scan(turn, (zero, zero), _cut((q, seen.queries, out, sums, g), tiles))
    return _joined(of_q), of_k, of_v


def merge(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return attention to two blocks of keys together, in float32, given attention and log-sum-exps of each."""
    (a, of_a), (b, of_b) = first, second
    both = jnp.logaddexp(of_a, of_b)
    return a * jnp.exp(of_a - both)[..., None] + b * jnp.exp(of_b - both)[..., None], both


def _scores(q: jax.Array, k: jax.Array, seen: Seen, rule: Rule) -> jax.Array:
    """Return the scores of grouped queries [B, T, K, N / K, D], float32 [B, K, N / K, T, S]."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * rule.scale
    if rule.cap:
        scores = rule.cap * jnp.tanh(scores / rule.cap)
    mask = seen.mask()
    return scores if mask is None else jnp.where(mask[:, None, None], scores, _UNSEEN)


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """Return heads [B, T, N, D] by the head of keys that they see, [B, T, K, N / K, D]."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])


def _rows(x: jax.Array, k: jax.Array) -> jax.Array:
    """Return a number of each query and head [B, T, N] as scores have them, [B, K, N / K, T, 1]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], k.shape[2], -1), 1, 3)[..., None]


def _tiles(queries: int, keys: int) -> int:
    """Return the number of equal tiles of queries whose scores are few enough."""
    return next(n for n in range(1, queries + 1) if queries % n == 0 and queries // n * keys <= max(_TILE, keys))


def _cut(tree: Any, tiles: int) -> Any:
    """Return arrays [B, T, ...] as tiles [n, B, T / n, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], tiles, -1, *x.shape[2:]), 1, 0), tree)


def _joined(x: jax.Array) -> jax.Array:
    """Return tiles [n, B, T / n, ...] as [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
