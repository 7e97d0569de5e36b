"""The thin algebra of compress/subspace.py for NVIDIA GPUs, in few launches, as kernels for Pallas's Triton backend.

    gram    p^T p of each block of rows, and the largest magnitude of each of its columns
    left    the preconditioned p: every program adds up the blocks, factorises the sum, and applies that to its rows
    fit     w = s (g + ridge)^-1 in the same way, and the norm of each column of its rows
    right   what follows from w: the factor that is sent, and the next q

All take partial sums as the passes leave them. A launch ends where a program needs what all others have found. Each
program makes the r x r factorisation for itself, which costs no launch. Beyond rank 64 a program needs a multiprocessor
of its own for that. If there are more programs than multiprocessors, the factorisation is a launch by itself instead
(`_left_factor_kernel`, `_fit_factor_kernel`), in quarters, which stay in registers.

The largest magnitude of a column is known only when all blocks are. So each block is scaled by its own, and the blocks'
products are brought to the common scale when they are added up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from compress.gpu.cholesky import QUARTER, diagonal, eye, inverse_cholesky, write_inverse_cholesky
from compress.gpu.sums import HELD, add_blocks, largest_of_columns, one_if_zero, sum_parts
from compress.gpu.tiles import Ref, Result, call, dot, load, matrices, multiprocessors, store, thin_columns, zero_index

_ROWS = 64  # rows of a program's tile: the least that Hopper's matrix instruction takes

Flag = jax.Array | bool


def _lengths(gram: jax.Array, dim: int) -> jax.Array:
    """Return what scales columns to at most unit length, as a column [r, 1] if `dim` is 0, or as a row [1, r]."""
    return lax.rsqrt(jnp.maximum(diagonal(gram, dim), 1))


def _keep(active: Ref | None, new: jax.Array, old: Ref, kept: Ref, row: jax.Array) -> None:
    """Write a tile to `kept`, or that of `old` if the message is inactive.

    Args:
        active: flag [1], or None if the message is active.
        new: tile to write.
        old: matrix before.
        kept: matrix after.
        row: first row of the tile.
    """
    start = (row, zero_index())
    new = new.astype(kept.dtype)
    store(kept, start, new if active is None else jnp.where(active[0], new, load(old, start, (_ROWS, new.shape[1]))))


def _gram_kernel(y: Ref, largest: Ref, gram: Ref, *, chunk: int, thin: int, interpret: bool) -> None:
    """Compute a block's largest magnitudes [1, r], and its Gram matrix [r, r] in units of them.

    Args:
        y: partial sums [parts, n, r] of the factor.
        largest: result [1, r].
        gram: result [r, r].
        chunk: number of row tiles of a block.
        thin: columns of the factor's tile.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    first, zero = pl.program_id(1) * chunk, zero_index()
    trips = jnp.minimum(chunk, pl.cdiv(y.shape[1], _ROWS) - first)

    def rows(trip: jax.Array) -> jax.Array:
        return sum_parts(y, (first + trip) * _ROWS, zero, (_ROWS, thin))

    def widen(trip: jax.Array, found: jax.Array) -> jax.Array:
        return jnp.maximum(found, jnp.max(jnp.abs(rows(trip)), axis=0, keepdims=True))

    scale = lax.fori_loop(0, trips, widen, jnp.zeros((1, thin), jnp.float32))

    def step(trip: jax.Array, total: jax.Array) -> jax.Array:
        tile = rows(trip) / one_if_zero(scale)
        return total + dot(tile, tile, interpret, trans_a=True)

    store(largest, (zero, zero), scale)
    store(gram, (zero, zero), lax.fori_loop(0, trips, step, jnp.zeros((thin, thin), jnp.float32)))


def _left_factor_kernel(
    largest: Ref, grams: Ref, scale: Ref, length: Ref, inverse: Ref, *, shift: float, thin: int, interpret: bool
) -> None:
    """Compute what turns the factor into the preconditioned p: scale and length of its columns, and their inverse.

    Args:
        largest: largest magnitudes [blocks, r].
        grams: Gram matrices [blocks, r, r].
        scale: result [1, r], by which columns are divided.
        length: result [1, r], by which they are multiplied then.
        inverse: result [r, r], by whose transpose they are multiplied then.
        shift: what is added to the diagonal of unit columns' Gram matrix.
        thin: columns of the factor's tile.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    starts = [zero_index() + half * QUARTER for half in range(thin // QUARTER)]
    on = [add_blocks(largest, grams, start, start, QUARTER) for start in starts]
    for start, (columns, gram) in zip(starts, on):
        store(scale, (zero_index(), start), columns)
        store(length, (zero_index(), start), _lengths(gram, 1))

    def quarter(row: int, column: int) -> jax.Array:
        gram = on[row][1] if row == column else add_blocks(largest, grams, starts[row], starts[column], QUARTER)[1]
        unit = _lengths(on[row][1], 0) * gram * _lengths(on[column][1], 1)
        return unit + jnp.where(eye(QUARTER), shift, 0.0) if row == column else unit

    write_inverse_cholesky(quarter, inverse, interpret)


def _left_kernel(
    active: Ref | None,
    y: Ref,
    largest: Ref | None,
    grams: Ref | None,
    scale: Ref | None,
    length: Ref | None,
    inverse: Ref | None,
    old: Ref | None,
    p: Ref,
    kept: Ref | None,
    *,
    shift: float,
    thin: int,
    interpret: bool,
) -> None:
    """Compute the program's rows of the preconditioned p, and of what is kept.

    Args:
        active: flag [1].
        y: partial sums [parts, n, r] of the factor.
        largest: largest magnitudes [blocks, r].
        grams: Gram matrices [blocks, r, r].
        scale: result [1, r] of `_left_factor_kernel`, in place of the last two.
        length: result [1, r] of it.
        inverse: result [r, r] of it.
        old: factor [n, r] that an inactive message keeps.
        p: result [n, r].
        kept: p or old [n, r].
        shift: what is added to the diagonal of unit columns' Gram matrix.
        thin: columns of the factor's tile.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    row, zero = pl.program_id(0) * _ROWS, zero_index()
    if inverse is None:
        divisor, gram = add_blocks(largest, grams, zero, zero, thin)
        unit = _lengths(gram, 0) * gram * _lengths(gram, 1) + jnp.where(eye(thin), shift, 0.0)
        factor, found = _lengths(gram, 1), inverse_cholesky(unit, interpret)
    else:
        # Columns beyond the rank are zeros, whatever they are divided by.
        divisor = one_if_zero(load(scale, (zero, zero), (1, thin)))
        factor, found = load(length, (zero, zero), (1, thin)), load(inverse, (zero, zero), (thin, thin))
    tile = dot(sum_parts(y, row, zero, (_ROWS, thin)) / divisor * factor, found, interpret, trans_b=True)
    store(p, (row, zero), tile)
    if kept is not None:
        _keep(active, tile, old, kept, row)


def _fit_factor_kernel(g: Ref, scale: Ref, inverse: Ref, *, ridge: float, thin: int, interpret: bool) -> None:
    """Compute what turns s into w: the scale of g, and the inverse of the Cholesky factor of g / scale + ridge.

    Args:
        g: partial sums [parts, r, r].
        scale: result [1, 1].
        inverse: result [r, r].
        ridge: what is added to g's diagonal, in units of the largest element of that.
        thin: columns of the factor's tile.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    starts = [zero_index() + half * QUARTER for half in range(thin // QUARTER)]
    on = [sum_parts(g, start, start, (QUARTER, QUARTER)) for start in starts]
    largest = one_if_zero(functools.reduce(jnp.maximum, [jnp.max(diagonal(gram, 1)) for gram in on]))
    store(scale, (zero_index(), zero_index()), jnp.full((1, 1), largest))

    def quarter(row: int, column: int) -> jax.Array:
        if row != column:
            return sum_parts(g, starts[row], starts[column], (QUARTER, QUARTER)) / largest
        return on[row] / largest + jnp.where(eye(QUARTER), ridge, 0.0)

    write_inverse_cholesky(quarter, inverse, interpret)


def _fit_kernel(
    s: Ref,
    g: Ref | None,
    scale: Ref | None,
    inverse: Ref | None,
    w: Ref,
    largest: Ref,
    squares: Ref,
    *,
    ridge: float,
    thin: int,
    interpret: bool,
) -> None:
    """Compute the program's rows of w = s (g + ridge)^-1, and their columns' largest magnitudes and squared norms.

    Args:
        s: partial sums [parts, k, r].
        g: partial sums [parts, r, r].
        scale: result [1, 1] of `_fit_factor_kernel`, in place of g.
        inverse: result [r, r] of it.
        w: result [k, r].
        largest: largest magnitudes [1, r].
        squares: squared norms [1, r], in units of the largest magnitudes.
        ridge: what is added to g's diagonal, in units of the largest element of that.
        thin: columns of the factor's tile.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    row, zero = pl.program_id(1) * _ROWS, zero_index()
    divisor: jax.Array
    if inverse is None:
        gram = sum_parts(g, zero, zero, (thin, thin))
        divisor = one_if_zero(jnp.max(diagonal(gram, 1)))
        found = inverse_cholesky(gram / divisor + jnp.where(eye(thin), ridge, 0.0), interpret)
    else:
        divisor, found = load(scale, (zero, zero), (1, 1)), load(inverse, (zero, zero), (thin, thin))
    tile = dot(sum_parts(s, row, zero, (_ROWS, thin)) / divisor, found, interpret, trans_b=True)
    tile = dot(tile, found, interpret)
    highest = jnp.max(jnp.abs(tile), axis=0, keepdims=True)
    store(w, (row, zero), tile)
    store(largest, (zero, zero), highest)
    store(squares, (zero, zero), jnp.sum(jnp.square(tile / one_if_zero(highest)), axis=0, keepdims=True))


def _right_kernel(
    active: Ref | None,
    w: Ref,
    largest: Ref,
    squares: Ref,
    first: Ref,
    old_q: Ref,
    old: Ref | None,
    q: Ref,
    sent: Ref | None,
    kept: Ref | None,
    *,
    mix: float,
    thin: int,
) -> None:
    """Compute the program's rows of the next q, of the factor that is sent, and of what is kept.

    Args:
        active: flag [1].
        w: factor [k, r].
        largest: largest magnitudes [blocks, r] of w's columns.
        squares: squared norms [blocks, r] of w's columns, in units of the largest magnitudes.
        first: first q [k, r].
        old_q: q [k, r] of this message.
        old: factor [k, r] that an inactive message keeps.
        q: next q [k, r].
        sent: w in the dtype of messages [k, r].
        kept: w or old [k, r].
        mix: share of the first q.
        thin: columns of the factor's tile.
    """
    row, zero = pl.program_id(0) * _ROWS, zero_index()
    blocks = largest.shape[0]
    held = min(pl.next_power_of_2(blocks), HELD // thin)
    scale = largest_of_columns(largest, zero, thin, held)

    def step(trip: jax.Array, total: jax.Array) -> jax.Array:
        block = (trip * held, zero), (held, thin)
        units = jnp.square(load(largest, *block) / scale)
        return total + jnp.sum(load(squares, *block) * units, axis=0, keepdims=True)

    norm = lax.fori_loop(0, pl.cdiv(blocks, held), step, jnp.zeros((1, thin), jnp.float32))
    tile = load(w, (row, zero), (_ROWS, thin))
    unit = tile / scale * lax.rsqrt(jnp.maximum(norm, 1))
    _keep(active, unit + mix * load(first, (row, zero), (_ROWS, thin)).astype(jnp.float32), old_q, q, row)
    if sent is not None:
        store(sent, (row, zero), tile)
    if kept is not None:
        _keep(active, tile, old, kept, row)


def _launch(
    kernel: Callable[..., None],
    name: str,
    rank: int,
    grid: tuple[int, int, int],
    ins: tuple,
    outs: tuple,
    **options: object,
) -> Sequence[Result]:
    """Run a kernel of this module.

    Args:
        kernel: function of the references to `ins` and `outs`, and of `thin`.
        name: name of the kernel in profiles.
        rank: columns of a factor.
        grid: numbers of (row tiles, blocks, batch).
        ins: arrays [b, ...], flags [1], or None.
        outs: shapes, as `tiles.call` takes them.
        options: further arguments of pallas_call.
    """
    thin = thin_columns(rank)
    warps = 8 if thin > 32 else 4
    return call(functools.partial(kernel, thin=thin), name, (warps, 1), grid, ins, outs, **options)


def _flag(active: Flag) -> jax.Array | None:
    return None if active is True else jnp.asarray(active, bool).reshape(1)


def _apart(rank: int, programs: int) -> bool:
    """Return whether the factorisation is a launch by itself, before as many programs that use it."""
    return rank > QUARTER and programs > multiprocessors()


def _batched(parts: jax.Array) -> jax.Array:
    """Return partial sums [*, parts, n, r] reshaped to [b, parts, n, r]."""
    return parts.reshape(-1, *parts.shape[-3:])


def left(
    parts: jax.Array,
    shift: float,
    dtype: DTypeLike,
    old: jax.Array | None = None,
    active: Flag = True,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the preconditioned p [*, n, r], as subspace.precondition does, and what is kept of it.

    Args:
        parts: partial sums [*, parts, n, r] of m q, float32.
        shift: what is added to the diagonal of unit columns' Gram matrix.
        dtype: dtype of p.
        old: factor [*, n, r] whose memory the kept one takes; None keeps none.
        active: if it is False, `old` is kept, bit for bit.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    *lead, _, n, r = parts.shape
    y, f32 = _batched(parts), jnp.float32
    batch, tiles = len(y), pl.cdiv(n, _ROWS)
    # Every program of the second launch reads all blocks' Gram matrices: 1 MB of them at most.
    chunk = pl.cdiv(tiles, max(1, 2048 // thin_columns(r)))
    blocks = pl.cdiv(tiles, chunk)
    largest, grams = _launch(
        functools.partial(_gram_kernel, chunk=chunk, interpret=interpret),
        "lowrank_gram",
        r,
        (1, blocks, batch),
        (y,),
        (jax.ShapeDtypeStruct((batch, blocks, 1, r), f32), jax.ShapeDtypeStruct((batch, blocks, r, r), f32)),
        interpret=interpret,
    )
    largest = largest.reshape(batch, blocks, r)
    found: tuple = (largest, grams, None, None, None)
    if _apart(r, batch * tiles):
        row = jax.ShapeDtypeStruct((batch, 1, r), f32)
        factor = _launch(
            functools.partial(_left_factor_kernel, shift=shift, interpret=interpret),
            "lowrank_left_factor",
            r,
            (1, 1, batch),
            (largest, grams),
            (row, row, jax.ShapeDtypeStruct((batch, r, r), f32)),
            interpret=interpret,
        )
        found = (None, None, *factor)
    flag = None if old is None else _flag(active)
    at = 1 + (flag is not None) + sum(operand is not None for operand in found)
    p, kept = _launch(
        functools.partial(_left_kernel, shift=shift, interpret=interpret),
        "lowrank_left",
        r,
        (tiles, 1, batch),
        (flag, y, *found, matrices(old)),
        (
            jax.ShapeDtypeStruct((batch, n, r), dtype),
            old if old is None else jax.ShapeDtypeStruct((batch, n, r), old.dtype),
        ),
        input_output_aliases={} if old is None else {at: 1},
        interpret=interpret,
    )
    return p.reshape(*lead, n, r), kept if kept is None else kept.reshape(*lead, n, r)


class Fitted(NamedTuple):
    """A right factor, and what its columns' norms follow from.

    Attributes:
        w: factor [*, k, r], float32.
        largest: largest magnitudes [b, blocks, r] of its columns, by blocks of rows.
        squares: squared norms [b, blocks, r] of its columns, in units of the largest magnitudes.
    """

    w: jax.Array
    largest: jax.Array
    squares: jax.Array


def fit(s: jax.Array, g: jax.Array, ridge: float, *, interpret: bool = False) -> Fitted:
    """Return w = s (g + ridge)^-1 [*, k, r] in float32, as subspace.solve does.

    Args:
        s: partial sums [*, parts, k, r] of m^T p.
        g: partial sums [*, parts, r, r] of p^T p.
        ridge: what is added to g's diagonal, in units of the largest element of that.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    *lead, _, k, r = s.shape
    s, g, f32 = _batched(s), _batched(g), jnp.float32
    batch, tiles = len(s), pl.cdiv(k, _ROWS)
    norm = jax.ShapeDtypeStruct((batch, tiles, 1, r), f32)
    found: tuple = (g, None, None)
    if _apart(r, batch * tiles):
        factor = _launch(
            functools.partial(_fit_factor_kernel, ridge=ridge, interpret=interpret),
            "lowrank_fit_factor",
            r,
            (1, 1, batch),
            (g,),
            (jax.ShapeDtypeStruct((batch, 1, 1), f32), jax.ShapeDtypeStruct((batch, r, r), f32)),
            interpret=interpret,
        )
        found = (None, *factor)
    w, largest, squares = _launch(
        functools.partial(_fit_kernel, ridge=ridge, interpret=interpret),
        "lowrank_fit",
        r,
        (1, tiles, batch),
        (s, *found),
        (jax.ShapeDtypeStruct((batch, k, r), f32), norm, norm),
        interpret=interpret,
    )
    return Fitted(w.reshape(*lead, k, r), largest.reshape(batch, tiles, r), squares.reshape(batch, tiles, r))


def right(
    fitted: Fitted,
    first: jax.Array,
    q: jax.Array,
    mix: float,
    *,
    dtype: DTypeLike | None = None,
    old: jax.Array | None = None,
    active: Flag = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return the q of the next message, as subspace.warm_start does, w as it is sent, and what is kept of it.

    Args:
        fitted: w [k, r] of `fit`, with its norms.
        first: q [k, r] of the first message.
        q: q [k, r] of this message, whose memory the next one takes.
        mix: share of the first q in the next one.
        dtype: dtype of w as it is sent; None sends none.
        old: factor [k, r] whose memory the kept w takes; None keeps none.
        active: if it is False, `q` and `old` are kept, bit for bit.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    k, r = fitted.w.shape
    flag = _flag(active)
    dtypes = q.dtype, dtype, None if old is None else old.dtype
    at = 4 + (flag is not None)
    found = _launch(
        functools.partial(_right_kernel, mix=mix),
        "lowrank_right",
        r,
        (pl.cdiv(k, _ROWS), 1, 1),
        (
            flag,
            fitted.w[None],
            fitted.largest,
            fitted.squares,
            first[None],
            q[None],
            None if old is None else old[None],
        ),
        tuple(None if kind is None else jax.ShapeDtypeStruct((1, k, r), kind) for kind in dtypes),
        input_output_aliases={at: 0} | ({} if old is None else {at + 1: 1 + (dtype is not None)}),
        interpret=interpret,
    )
    return found[0][0], *(x if x is None else x[0] for x in found[1:])
