"""PowerSGD: compression of data-parallel reductions with error feedback.

All functions run per device, inside shard_map or under vmap with the same axis names.

References:
    Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress import kernels, policy, subspace
from compress.codec import Like, Passes
from compress.collectives import Axis, mean_of_ranks, own_part, packed
from compress.reducer import LeftOut, Reducer, Shard, Shards, squares


class PowerState(NamedTuple):
    """State of PowerSGD for one matrix [n, k] between steps.

    Attributes:
        error: [n, k] float32 part of the gradient that this data rank has not sent yet.
        q: [k, at most r_max] float32 right factor to start from, the same bits on all data ranks.
    """

    error: jax.Array
    q: jax.Array


class Projected(NamedTuple):
    """Values of its matrices that a rank keeps during a reduction.

    Attributes:
        m: [n, k] gradients plus errors.
        product: [n, r] their products with the right factors, which travel first.
        q: right factors of the state.
        shapes: shapes of the gradients, before they were matrices.
    """

    m: list[jax.Array]
    product: list[jax.Array]
    q: list[jax.Array]
    shapes: list[tuple[int, ...]]


class ReducedFactors(NamedTuple):
    """Factors behind both all-reduces.

    Attributes:
        p: left factor [n, r] of each matrix.
        w: right factor [k, r] of the mean.
        own: right factor [k, r] of this rank's matrix.
    """

    p: list[jax.Array]
    w: list[jax.Array]
    own: list[jax.Array]


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of an array as a matrix."""
    return shape[0], math.prod(shape[1:])


def largest_rank(shape: tuple[int, ...], min_ratio: float) -> int:
    """Return the largest rank whose factors are `min_ratio` times smaller than an array; 0 if there is none."""
    return policy.largest_rank(*_matrix(shape), min_ratio)


@dataclasses.dataclass(frozen=True)
class PowerSGD(Reducer):
    """Reducer by two thin factors with error feedback; an array is a matrix of its rows.

    Data rank w has the gradient g_w and the error e_w. Then

        M_w = g_w + e_w
        P   = precondition(mean M_w Q)          all-reduce of [n, r]
        W_w = M_w^T P (P^T P)^-1                so that P W_w^T projects M_w onto the span of P
        W   = mean W_w                          all-reduce of [k, r]
        e_w = M_w - P W_w^T                     kept for the next step

    The mean of the gradients is P W^T. Nothing is lost over ranks and time: the sum of all P W^T plus the last mean
    e_w is the sum of all mean g_w plus the first mean e_w. That holds for every P. Each rank's error
    subtracts the rank's own W_w, so no rank's solve has to be exact.

    All ranks have the same bits of W, and of P if equal devices compute equal bits of equal input. Each M_w is held
    between the all-reduces.

    Attributes:
        rank: columns of the factors; the highest rank of a run whose ranks change. A matrix's factors have at most
            min(n, k) columns.
        implementation: implementation of the passes over matrices, one of kernels.IMPLEMENTATIONS.
        highest: columns of the state, if `rank` is one of lower levels, which leave q's last columns as they are; 0:
            those of `rank`.
        keep: whether old errors stay until the new ones count, because a step may be dropped; this saves a copy then.

    References:
        Vogels et al. 2019, PowerSGD, algorithm 1, with the least-squares fit of compress.subspace in place of
        orthogonalisation.
    """

    rank: int
    implementation: str = "xla"
    highest: int = 0
    keep: bool = True

    @property
    def level(self) -> int:
        """The rank."""
        return self.rank

    def at(self, level: int) -> "PowerSGD":
        """Return the reducer of another rank, with the same state."""
        return dataclasses.replace(self, rank=level, highest=self.highest or self.rank)

    def init(self, shape: tuple[int, ...], shard: Shard) -> PowerState:
        """Return no error, and a random right factor, the same for equal shapes; see `Reducer.init`."""
        n, k = _matrix(shape)
        first = subspace.initial(k, min(self.highest or self.rank, n, k), seed=0)
        return PowerState(jnp.zeros((n, k), jnp.float32), first)

    def takes(self, shape: tuple[int, ...], shard: Shard, min_ratio: float) -> bool:
        """Return whether the factors are small enough; see `Reducer.takes`."""
        return self.rank <= largest_rank(shape, min_ratio)

    def encode(
        self, states: list[PowerState], arrays: list[jax.Array], shards: Shards
    ) -> tuple[list[jax.Array], Projected]:
        """Return the products that travel first, and what the rank keeps; see `Reducer.encode`."""
        run = functools.partial(kernels.project, keep=self.keep, implementation=self.implementation)
        projected = [
            run(x.reshape(_matrix(x.shape)), state.q[:, : self.rank], kernels.Explicit(state.error))
            for x, state in zip(arrays, states, strict=True)
        ]
        products = [product for _, product in projected]
        kept = Projected([m for m, _ in projected], products, [s.q for s in states], [x.shape for x in arrays])
        return products, kept

    def exchange(self, wire: list[jax.Array], kept: Projected, shards: Shards) -> ReducedFactors:
        """Return the factors, behind two all-reduces for all arrays; see `Reducer.exchange`."""
        axis, run = shards[0].axis if shards else None, self.implementation
        mean = functools.partial(_mean, axis=axis)
        ps = _by_shape(functools.partial(subspace.precondition, implementation=run), packed(mean, kept.product))
        products = [kernels.backproject(m, p, implementation=run) for m, p in zip(kept.m, ps)]
        own = _by_shape(functools.partial(subspace.solve, implementation=run), *zip(*products))
        return ReducedFactors(ps, packed(mean, own), own)

    def update(self, arrived: ReducedFactors, kept: Projected, shards: Shards) -> tuple[list[PowerState], LeftOut]:
        """Return the next states and this rank's errors; see `Reducer.update`."""
        run = functools.partial(kernels.residual, implementation=self.implementation)
        errors = [run(m, p, w) for m, p, w in zip(kept.m, arrived.p, arrived.own)]
        qs = [lax.dynamic_update_slice(q, new, (0, 0)) for q, new in zip(kept.q, _by_shape(_warm_start, arrived.w))]
        return [PowerState(*one) for one in zip(errors, qs)], LeftOut(squares(errors), squares(kept.m))

    def decode(self, arrived: ReducedFactors, kept: Projected, shards: Shards) -> list[jax.Array]:
        """Return this rank's parts of the products of the factors; see `Reducer.decode`.

        Of an array whose rows are split only the rank's rows are computed.
        """
        means = []
        for p, w, shape, shard in zip(arrived.p, arrived.w, kept.shapes, shards, strict=True):
            rows = shape
            if shard.dim == 0:
                p, rows = own_part(p, shard.axis, 0), (shape[0] // shard.members, *shape[1:])
            product = kernels.decode(p, w, jnp.float32, implementation=self.implementation).reshape(rows)
            means.append(product if shard.dim <= 0 else own_part(product, shard.axis, shard.dim))
        return means

    def residual(self, state: PowerState, like: Like, shard: Shard) -> jax.Array:
        """Return the error; see `Reducer.residual`."""
        return state.error.reshape(like.shape)

    def release(self, state: PowerState, x: jax.Array, shard: Shard) -> tuple[jax.Array, PowerState]:
        """Return the array plus its error, and the state without it; see `Reducer.release`."""
        return x + state.error.reshape(x.shape), state._replace(error=jnp.zeros_like(state.error))

    def traffic(self, shape: tuple[int, ...], shard: Shard) -> tuple[tuple[str, float], ...]:
        """Return both all-reduces, one of each factor."""
        ring = 2 * (shard.members - 1) / shard.members
        return tuple(("all-reduce", ring * self.rank * side * 4) for side in _matrix(shape))

    def passes(self) -> Passes:
        """Return the passes: add the error, project and back-project; keep what is left out, and decode."""
        return Passes(*policy.POWER_SGD_PASSES)

    def describe(self) -> str:
        """Return the rank."""
        return f"rank {self.rank}"


def _by_shape(function: Callable[..., jax.Array], *columns: Sequence[jax.Array]) -> list[jax.Array]:
    """Return [function(*row) for row in zip(*columns)], with one batched call for all rows of the same shapes."""
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        groups.setdefault(tuple(x.shape for x in row), []).append(i)
    results: dict[int, jax.Array] = {}
    for group in groups.values():
        batch = function(*(jnp.stack([column[i] for i in group]) for column in columns))
        results |= dict(zip(group, batch))
    return [results[i] for i in range(len(results))]


def _mean(x: jax.Array, axis: Axis | None) -> jax.Array:
    """Return the mean of x over the data axis, or x itself if there is only one data rank."""
    return x if axis is None else mean_of_ranks(x, axis)


def _warm_start(w: jax.Array) -> jax.Array:
    """Return the q [k, r] of the next step after a step with right factor w [k, r]."""
    # Its random share is a draw that depends on the shape alone and need not be orthonormal. Making it anew is cheaper
    # than keeping the first q.
    k, r = w.shape[-2:]
    return subspace.warm_start(w, jax.random.normal(jax.random.key(0), (k, r)) * k**-0.5)
