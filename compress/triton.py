"""The passes of kernels.py for NVIDIA GPUs: Pallas kernels on its Triton backend.

Two kernels do all of it. The row kernel goes along the rows of a matrix, forms each tile in registers (of x, an error
and a product p w^T, what a pass adds up), writes it and multiplies it by q. The column kernel goes down the columns and
accumulates m^T p; further programs of it do the same with p in place of m, for p^T p.

Long sums are split among programs that write their own partial sums, which XLA then adds up: without atomics the order
of summation is fixed, so that equal inputs give equal bits. docs/gpu.md has the reasons for the block sizes.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pt


class Blocks(NamedTuple):
    """How a kernel cuts a matrix up.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        warps: of a program.
        stages: of Triton's software pipeline, tiles in flight.
        programs: how many to aim at by splitting rows or columns: as many as the multiprocessors hold at once.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


LARGEST_RANK = 128
_SMS = 132  # of an H100 or H200
# By the columns of a thin factor's tile, at most, and the bytes of the larger of its and the matrix's numbers. These
# alone decide the blocks of the row kernel, so that all its passes form the same bits of p w^T.
_ROW_BLOCKS = {
    (32, 2): Blocks(64, 64, warps=4, stages=3, programs=4 * _SMS),
    (64, 2): Blocks(128, 64, warps=8, stages=2, programs=2 * _SMS),
    (128, 2): Blocks(128, 64, warps=8, stages=3, programs=_SMS),
    (32, 4): Blocks(64, 64, warps=4, stages=2, programs=3 * _SMS),
    (64, 4): Blocks(128, 32, warps=8, stages=2, programs=_SMS),
    (128, 4): Blocks(128, 32, warps=8, stages=2, programs=_SMS),
}
_COLUMN_BLOCKS = {
    (32, 2): Blocks(128, 64, warps=4, stages=3, programs=3 * _SMS),
    (64, 2): Blocks(64, 128, warps=8, stages=3, programs=2 * _SMS),
    (128, 2): Blocks(64, 128, warps=8, stages=3, programs=2 * _SMS),
    (32, 4): Blocks(64, 64, warps=4, stages=3, programs=3 * _SMS),
    (64, 4): Blocks(32, 128, warps=8, stages=3, programs=3 * _SMS),
    (128, 4): Blocks(32, 128, warps=8, stages=3, programs=3 * _SMS),
}


def _thin(rank: int) -> int:
    """Columns of a thin factor's tile: a power of two, and at least the 16 that a tensor core's instruction takes."""
    return max(16, pl.next_power_of_2(rank))


def _blocks(table: dict[tuple[int, int], Blocks], thin: jax.Array, dtype: Any) -> Blocks:
    """The table's entry for a thin factor and a matrix of dtype."""
    if thin.shape[-1] > LARGEST_RANK:
        raise ValueError(f"the kernels take ranks up to {LARGEST_RANK}, not {thin.shape[-1]}")
    return table[max(32, _thin(thin.shape[-1])), 4 if jnp.float32 in (thin.dtype, dtype) else 2]


def _split(programs: int, tiles: int, target: int, most: int) -> tuple[int, int]:
    """Splits the `tiles` tiles of each of `programs` programs into parts, for about `target` programs in all.

    Returns:
        The number of parts, at most `most`, and the tiles of a part.
    """
    chunk = pl.cdiv(tiles, max(1, min(target // programs, most)))
    return pl.cdiv(tiles, chunk), chunk


def _zero() -> jax.Array:
    """0 that jax does not see through: it refuses slices that reach beyond an edge from a constant, masked or not."""
    return 0 * pl.program_id(0)


def _mask(start: Any, block: int, size: int, dim: int) -> jax.Array | None:
    """Which of `block` indices from `start` on lie within `size`, along `dim` of two; None where all always do."""
    return None if size % block == 0 else jnp.expand_dims(start + jnp.arange(block) < size, 1 - dim)


def _tile(ref: Any, start: tuple[Any, Any], block: tuple[int, int]) -> tuple[Any, jax.Array | None]:
    """A tile of ref [rows, columns], and the mask of what of it lies within."""
    rows, columns = (_mask(*bounds, dim) for dim, bounds in enumerate(zip(start, block, ref.shape)))
    mask = rows if columns is None else columns if rows is None else rows & columns
    return ref.at[tuple(pl.ds(*bounds) for bounds in zip(start, block))], mask


def _load(ref: Any, start: tuple[Any, Any], block: tuple[int, int]) -> jax.Array:
    """A tile of ref [rows, columns], zero beyond the edges."""
    tile, mask = _tile(ref, start, block)
    return pt.load(tile, mask=mask, other=None if mask is None else 0)


def _store(ref: Any, start: tuple[Any, Any], value: jax.Array) -> None:
    """Writes what of a tile lies within ref [rows, columns]."""
    tile, mask = _tile(ref, start, value.shape)
    pt.store(tile, value.astype(ref.dtype), mask=mask)


def _dot(a: jax.Array, b: jax.Array, interpret: bool, **transposed: bool) -> jax.Array:
    """a b in float32; float32 operands as three products of their TF32 halves, which lose less than float32 sums do."""
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return pt.dot(a.astype(b.dtype), b, precision=exact if b.dtype == jnp.float32 else None, **transposed)


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b, added in float32, in a's dtype."""
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def _row_kernel(active, x, m, p, w, q, out, y, *, size, blocks: Blocks, chunk: int, dtype, interpret: bool) -> None:
    """out = x + (m - p w^T), of which only the operands that are not None count, and y = out q.

    Inactive, out stays as it is and y is zero.
    """
    shape, zero = (blocks.rows, blocks.columns), _zero()
    row, first = pl.program_id(0) * blocks.rows, pl.program_id(1) * chunk
    trips = jnp.minimum(chunk, pl.cdiv(size[1], blocks.columns) - first)
    if active is not None:
        trips *= active[0].astype(jnp.int32)
    p_tile = None if p is None else _load(p, (row, zero), (blocks.rows, _thin(p.shape[1])))

    def step(trip, total):
        column = (first + trip) * blocks.columns
        value = None if m is None else _load(m, (row, column), shape)
        if p is not None:
            w_tile = _load(w, (column, zero), (blocks.columns, p_tile.shape[1]))
            product = _dot(p_tile, w_tile, interpret, trans_b=True).astype(dtype)
            value = product if value is None else _add(value, -product)
        if x is not None:
            x_tile = _load(x, (row, column), shape)
            value = x_tile if value is None else _add(x_tile, value)
        if out is not None:
            _store(out, (row, column), value)
        if q is not None:
            total += _dot(value, _load(q, (column, zero), (blocks.columns, total.shape[1])), interpret)
        return total

    if q is None:
        lax.fori_loop(0, trips, step, None)
    else:
        total = lax.fori_loop(0, trips, step, jnp.zeros((blocks.rows, _thin(q.shape[1])), jnp.float32))
        _store(y, (row, zero), total)


def _column_kernel(m, p, s, g, *, blocks: Blocks, chunk: int, interpret: bool) -> None:
    """s = m^T p, and by the programs beyond m's last column g = p^T p."""
    block, first = pl.program_id(0), pl.program_id(1) * chunk
    trips = jnp.minimum(chunk, pl.cdiv(m.shape[0], blocks.rows) - first)
    zero, thin, last = _zero(), _thin(p.shape[1]), pl.cdiv(m.shape[1], blocks.columns)

    def accumulate(a, column, width, out):
        def step(trip, total):
            row = (first + trip) * blocks.rows
            a_tile = _load(a, (row, column), (blocks.rows, width))
            return total + _dot(a_tile, _load(p, (row, zero), (blocks.rows, thin)), interpret, trans_a=True)

        _store(out, (column, zero), lax.fori_loop(0, trips, step, jnp.zeros((width, thin), jnp.float32)))

    pl.when(block < last)(lambda: accumulate(m, block * blocks.columns, blocks.columns, s))
    pl.when(block == last)(lambda: accumulate(p, zero, thin, g))


def _call(
    kernel: Any, name: str, blocks: Blocks, grid: tuple[int, ...], ins: tuple, outs: tuple, **keywords: Any
) -> Any:
    """Runs `kernel` over a grid (blocks, parts, batch) of programs, which get the whole matrices of their batch index.

    Args:
        ins: arrays [b, n, k], flags [1], or None.
        outs: shapes [b, n, k], of partial sums [b, parts, n, k], or None.
    """

    def spec(array):
        if array is None:
            return None
        shape = array.shape
        if len(shape) == 1:
            return pl.BlockSpec(shape, lambda i, j, b: (0,))
        if len(shape) == 3:
            return pl.BlockSpec((None, *shape[1:]), lambda i, j, b: (b, 0, 0))
        return pl.BlockSpec((None, None, *shape[2:]), lambda i, j, b: (b, j, 0, 0))

    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=tuple(map(spec, ins)),
        out_specs=tuple(map(spec, outs)),
        out_shape=outs,
        compiler_params=pt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        **keywords,
    )(*ins)


def _matrices(array: jax.Array | None) -> jax.Array | None:
    """array [*, n, k] as [b, n, k]."""
    return None if array is None else array.reshape(-1, *array.shape[-2:])


def _most(length: int, dtype: Any, rank: int) -> int:
    """Into how many parts sums over `length` numbers split: partial sums have at most half the bytes of the matrix."""
    return length * jnp.dtype(dtype).itemsize // (8 * rank)


def _rows(
    name: str,
    size: tuple[int, ...],
    dtype: Any,
    *,
    active=True,
    x=None,
    m=None,
    p=None,
    w=None,
    q=None,
    keep=False,
    interpret,
):
    """A pass of the row kernel over matrices of `size` [*, n, k] and `dtype`: out and y, or None.

    out takes the place of m, unless `keep`.
    """
    *lead, n, k = size
    batch, thin = math.prod(lead), q if p is None else p
    blocks = _blocks(_ROW_BLOCKS, thin, dtype)
    across, along = pl.cdiv(n, blocks.rows), pl.cdiv(k, blocks.columns)
    # Without sums there are no parts to add up, so more programs cost nothing.
    target, most = (2 * blocks.programs, along) if q is None else (blocks.programs, _most(k, dtype, q.shape[-1]))
    parts, chunk = _split(across * batch, along, target, most)
    flag = None if active is True else jnp.asarray(active, bool).reshape(1)
    out = None if m is None and p is None else jax.ShapeDtypeStruct((batch, n, k), dtype)
    y = None if q is None else jax.ShapeDtypeStruct((batch, parts, n, q.shape[-1]), jnp.float32)
    out, y = _call(
        functools.partial(_row_kernel, size=(n, k), blocks=blocks, chunk=chunk, dtype=dtype, interpret=interpret),
        name,
        blocks,
        (across, parts, batch),
        (flag, *map(_matrices, (x, m, p, w, q))),
        (out, y),
        input_output_aliases={} if m is None or keep else {(flag is not None) + (x is not None): 0},
        interpret=interpret,
    )
    return None if out is None else out.reshape(size), None if y is None else y.sum(1).reshape(*lead, n, -1)


def decode(p: jax.Array, w: jax.Array, dtype: Any, *, interpret: bool = False) -> jax.Array:
    """As kernels.decode."""
    size = (*p.shape[:-1], w.shape[-2])
    return _rows("lowrank_decode", size, dtype, p=p, w=w, interpret=interpret)[0]


def residual(
    m: jax.Array, p: jax.Array, w: jax.Array, active: jax.Array | bool = True, *, interpret: bool = False
) -> jax.Array:
    """As kernels.residual, in place of m."""
    return _rows("lowrank_residual", m.shape, m.dtype, active=active, m=m, p=p, w=w, interpret=interpret)[0]


def project(
    x: jax.Array,
    q: jax.Array,
    m: jax.Array | None = None,
    p: jax.Array | None = None,
    w: jax.Array | None = None,
    active: jax.Array | bool = True,
    *,
    keep: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As kernels.project, in place of m unless `keep`; the error is m - decode(p, w), or m alone, or none."""
    given = {"x": x, "m": m, "p": p, "w": w, "q": q}
    out, y = _rows("lowrank_project", x.shape, x.dtype, active=active, keep=keep, interpret=interpret, **given)
    return x if out is None else out, y


def backproject(m: jax.Array, p: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As kernels.backproject."""
    *lead, n, k = m.shape
    batch, rank, blocks = math.prod(lead), p.shape[-1], _blocks(_COLUMN_BLOCKS, p, m.dtype)
    across = pl.cdiv(k, blocks.columns)
    parts, chunk = _split(across * batch, pl.cdiv(n, blocks.rows), blocks.programs, _most(n, m.dtype, rank))
    s, g = _call(
        functools.partial(_column_kernel, blocks=blocks, chunk=chunk, interpret=interpret),
        "lowrank_backproject",
        blocks,
        (across + 1, parts, batch),
        (_matrices(m), _matrices(p)),
        tuple(jax.ShapeDtypeStruct((batch, parts, width, rank), jnp.float32) for width in (k, rank)),
        interpret=interpret,
    )
    return s.sum(1).reshape(*lead, k, rank), g.sum(1).reshape(*lead, rank, rank)
