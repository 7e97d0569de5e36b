"""Compression of data-parallel reductions: PowerSGD with error feedback, and many small reductions packed in one.

All functions run per device, inside shard_map or under vmap with the same axis names.

References:
    Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from compress import kernels, subspace
from compress.codec import FORMS

Factors = tuple[jax.Array, jax.Array]


class PowerState(NamedTuple):
    """What PowerSGD carries from step to step, for each matrix [n, k].

    Attributes:
        error: [n, k] float32, what this data rank has not sent yet.
        q: [k, at most r_max] float32, right factors to start from, the same bits on all data ranks.
    """

    error: list[jax.Array]
    q: list[jax.Array]


class PowerStats(NamedTuple):
    """Squared norms over all of a data rank's matrices, float32 []: the relative residual is sqrt(left / total).

    Attributes:
        left: of the errors left by this step.
        total: of what was to be sent, gradients plus the errors before.
    """

    left: jax.Array
    total: jax.Array


def init_power(shapes: Sequence[tuple[int, int]], rank: int, seed: int) -> PowerState:
    """No error, and right factors for ranks up to `rank` or the matrix's own: equal shapes start from equal ones."""
    ranks = [min(rank, n, k) for n, k in shapes]
    first = {(k, r): subspace.initial(k, r, seed) for (_, k), r in zip(shapes, ranks)}
    return PowerState(
        error=[jnp.zeros(shape, jnp.float32) for shape in shapes],
        q=[first[k, r] for (_, k), r in zip(shapes, ranks)],
    )


def packed(reduce: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """[reduce(x) for x in arrays], with one call on all of them flattened into one [size].

    Args:
        reduce: an elementwise reduction such as lax.pmean over an axis.
        arrays: of one dtype, any shapes.
    """
    if not arrays:
        return []
    flat = reduce(lax.concatenate([x.reshape(-1) for x in arrays], 0))
    return [part.reshape(x.shape) for part, x in zip(_split(flat, [x.size for x in arrays], 0), arrays)]


def packed_scatter(arrays: Sequence[jax.Array], dims: Sequence[int], axis: str) -> list[jax.Array]:
    """lax.psum_scatter (tiled) of each array over its own dim, with one collective for all of them.

    Args:
        arrays: of one dtype, any shapes.
        dims: the dim that each is scattered over; its size is a multiple of the axis's.
        axis: of the mesh.
    """
    if not arrays:
        return []
    ranks = lax.axis_size(axis)
    fronts = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    rows = lax.concatenate([x.reshape(ranks, -1) for x in fronts], 1)
    shard = lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)
    parts = _split(shard, [x.size // ranks for x in fronts], 1)
    return [
        jnp.moveaxis(part.reshape(x.shape[0] // ranks, *x.shape[1:]), 0, dim)
        for part, x, dim in zip(parts, fronts, dims)
    ]


def packed_gather(arrays: Sequence[jax.Array], dims: Sequence[int], axis: str) -> list[jax.Array]:
    """lax.all_gather (tiled) of each array along its own dim, with one collective for all of them.

    Args:
        arrays: shards of one dtype, any shapes.
        dims: the dim that each is gathered along.
        axis: of the mesh.
    """
    if not arrays:
        return []
    ranks = lax.axis_size(axis)
    fronts = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    rows = lax.all_gather(lax.concatenate([x.reshape(-1) for x in fronts], 0), axis)
    return [
        jnp.moveaxis(part.reshape(ranks * x.shape[0], *x.shape[1:]), 0, dim)
        for part, x, dim in zip(_split(rows, [x.size for x in fronts], 1), fronts, dims)
    ]


def _split(x: jax.Array, sizes: list[int], dim: int) -> list[jax.Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1], dim)


def _by_shape(function: Callable[..., jax.Array], *columns: Sequence[jax.Array]) -> list[jax.Array]:
    """[function(*row) for row in zip(*columns)], with one batched call for all rows of the same shapes."""
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        groups.setdefault(tuple(x.shape for x in row), []).append(i)
    results = {}
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
    """Factors of the mean over data ranks of many matrices, in two all-reduces for all of them.

    With g_w a rank's gradient and e_w its error: M_w = g_w + e_w; P = mean M_w Q, its columns then made
    well-conditioned; W_w = M_w^T P (P^T P)^-1, so that P W_w^T is M_w projected onto what P spans; W = mean W_w. The
    mean is P W^T, and each rank keeps what is missing of its own, e_w = M_w - P W_w^T. What is sent and what is kept
    add up over ranks and time: the sum of all P W^T plus the last mean e_w is that of all mean g_w plus the first mean
    e_w. That holds however P came about, and W_w is taken from it before the mean: no rank's solve has to be exact.

    Memory: the new errors take the place of the old where the state is donated; each M_w is held from one all-reduce to
    the next, in the place of its gradient if that is not used elsewhere.

    Args:
        matrices: [n, k] float32 gradients of this data rank.
        state: of the same matrices, in the same order.
        rank: of the factors, at most as many columns as state.q have; a lower one leaves q's last columns as they are.
        axis: of the data ranks; None: there is only this one, and no collective.
        implementation: "xla" or "triton", see compress.kernels.
        form: "solve", or "qr" with P orthonormalised, the same product at more cost.
        keep: the old errors are needed later as well, by whoever may drop the step; this spares a copy of them.

    Returns:
        (p [n, r], w [k, r]) of the mean of each matrix p w^T, the same bits on all ranks (p as far as equal devices
        compute equal bits of equal input); the new state; and statistics of this rank, free where they are not used.
    """
    mean = (lambda x: x) if axis is None else (lambda x: lax.pmean(x, axis))
    passes = {"implementation": implementation}
    projected = [
        kernels.project(g, q[:, :rank], kernels.Explicit(e), keep=keep, **passes)
        for g, q, e in zip(matrices, state.q, state.error, strict=True)
    ]
    ms = [m for m, _ in projected]
    ps = _by_shape(FORMS[form], packed(mean, [product for _, product in projected]))
    backprojected = [kernels.backproject(m, p, **passes) for m, p in zip(ms, ps)]
    own = [s for s, _ in backprojected] if form == "qr" else _by_shape(subspace.solve, *zip(*backprojected))
    ws = packed(mean, own)
    errors = [kernels.residual(m, p, w, **passes) for m, p, w in zip(ms, ps, own)]
    qs = [lax.dynamic_update_slice(q, new, (0, 0)) for q, new in zip(state.q, _by_shape(_warm_start, ws))]
    return list(zip(ps, ws)), PowerState(errors, qs), PowerStats(_squares(errors), _squares(ms))


def _warm_start(w: jax.Array) -> jax.Array:
    # Cheaper made anew than kept: only the shape decides, and it need not be orthonormal.
    k, r = w.shape[-2:]
    return subspace.warm_start(w, jax.random.normal(jax.random.key(0), (k, r)) * k**-0.5)


def _squares(arrays: Sequence[jax.Array]) -> jax.Array:
    return sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.float32(0))
