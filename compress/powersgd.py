"""PowerSGD: compression of data-parallel reductions with error feedback.

All functions run per device, inside shard_map or under vmap with the same axis names.

References:
    Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress import kernels, subspace
from compress.collectives import packed

Factors = tuple[jax.Array, jax.Array]


class PowerState(NamedTuple):
    """State of PowerSGD between steps, with one array for each matrix [n, k].

    Attributes:
        error: [n, k] float32 parts of the gradients that this data rank has not sent yet.
        q: [k, at most r_max] float32 right factors to start from, the same bits on all data ranks.
    """

    error: list[jax.Array]
    q: list[jax.Array]


class PowerStats(NamedTuple):
    """Squared Frobenius norms over all matrices of a data rank, float32 [].

    The relative residual is sqrt(left / total).

    Attributes:
        left: squared norm of the errors that this step leaves.
        total: squared norm of the gradients plus the previous errors, which were to be sent.
    """

    left: jax.Array
    total: jax.Array


def init_power(shapes: Sequence[tuple[int, int]], rank: int, seed: int) -> PowerState:
    """Return the state before the first step: no error, and random right factors.

    Matrices of equal shapes start from equal factors.

    Args:
        shapes: shape (n, k) of each matrix.
        rank: highest rank of the run; a matrix's factors have at most min(n, k) columns.
        seed: seed of the right factors, the same on all data ranks.
    """
    ranks = [min(rank, n, k) for n, k in shapes]
    first = {(k, r): subspace.initial(k, r, seed) for (_, k), r in zip(shapes, ranks)}
    return PowerState(
        error=[jnp.zeros(shape, jnp.float32) for shape in shapes],
        q=[first[k, r] for (_, k), r in zip(shapes, ranks)],
    )


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


def mean_lowrank(
    matrices: Sequence[jax.Array],
    state: PowerState,
    rank: int,
    axis: str | None,
    implementation: str = "xla",
    form: str = "solve",
    keep: bool = False,
) -> tuple[list[Factors], PowerState, PowerStats]:
    """Return low-rank factors of the mean of many matrices over data ranks, with two all-reduces for all of them.

    Data rank w has the gradient g_w and the error e_w. Then

        M_w = g_w + e_w
        P   = precondition(mean M_w Q)          all-reduce of [n, r]
        W_w = M_w^T P (P^T P)^-1                so that P W_w^T projects M_w onto the span of P
        W   = mean W_w                          all-reduce of [k, r]
        e_w = M_w - P W_w^T                     kept for the next step

    The result stands for the mean P W^T. Nothing is lost over ranks and time: the sum of all P W^T plus the last mean
    e_w is the sum of all mean g_w plus the first mean e_w. That holds for every P. Each rank's error
    subtracts the rank's own W_w, so no rank's solve has to be exact.

    New errors take the memory of donated old ones. Each M_w is held between the all-reduces, in the memory of its
    gradient if nothing else uses that.

    Args:
        matrices: [n, k] float32 gradients of this data rank.
        state: state of the same matrices, in the same order.
        rank: rank r of the factors, at most the columns of state.q; a lower one leaves q's last columns as they are.
        axis: name of the data axis; None if there is only one data rank, which needs no collective.
        implementation: implementation of the passes over matrices, one of kernels.IMPLEMENTATIONS.
        form: "solve", or "qr" with an orthonormal P: the same product at a higher cost.
        keep: whether the old errors are needed later as well, because the step may be dropped; this saves a copy.

    Returns:
        (p [n, r], w [k, r]) of each matrix, float32, whose product p w^T is the mean. All ranks have the same bits of
        w, and of p if equal devices compute equal bits of equal input.
        The new state, and statistics of this rank, which cost nothing if they are not used.

    References:
        Vogels et al. 2019, PowerSGD, algorithm 1, with the least-squares fit of compress.subspace in place of
        orthogonalisation.
    """
    mean = functools.partial(_mean, axis=axis)
    projected = [
        kernels.project(g, q[:, :rank], kernels.Explicit(e), keep=keep, implementation=implementation)
        for g, q, e in zip(matrices, state.q, state.error, strict=True)
    ]
    ms = [m for m, _ in projected]
    basis = (
        subspace.orthonormal
        if form == "qr"
        else functools.partial(subspace.precondition, implementation=implementation)
    )
    solve = functools.partial(subspace.solve, implementation=implementation)
    ps = _by_shape(basis, packed(mean, [product for _, product in projected]))
    backprojected = [kernels.backproject(m, p, implementation=implementation) for m, p in zip(ms, ps)]
    own = [s for s, _ in backprojected] if form == "qr" else _by_shape(solve, *zip(*backprojected))
    ws = packed(mean, own)
    errors = [kernels.residual(m, p, w, implementation=implementation) for m, p, w in zip(ms, ps, own)]
    qs = [lax.dynamic_update_slice(q, new, (0, 0)) for q, new in zip(state.q, _by_shape(_warm_start, ws))]
    return list(zip(ps, ws)), PowerState(errors, qs), PowerStats(_squares(errors), _squares(ms))


def _mean(x: jax.Array, axis: str | None) -> jax.Array:
    """Return the mean of x over the data axis, or x itself if there is only one data rank."""
    return x if axis is None else lax.pmean(x, axis)


def _warm_start(w: jax.Array) -> jax.Array:
    """Return the q [k, r] of the next step after a step with right factor w [k, r]."""
    # The first q is made anew, which is cheaper than keeping it: it depends on the shape alone and need not be
    # orthonormal.
    k, r = w.shape[-2:]
    return subspace.warm_start(w, jax.random.normal(jax.random.key(0), (k, r)) * k**-0.5)


def _squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of all squares, float32 []."""
    return sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.float32(0))
