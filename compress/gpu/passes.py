"""The passes of kernels.py for NVIDIA GPUs, as kernels for Pallas's Triton backend.

Two kernels suffice. The row kernel goes along the rows of a matrix and forms each tile in registers, as the sum of x,
an error and a product p w^T, or of those that the pass has. It writes the tile and multiplies it by q. The column
kernel goes down the columns and accumulates m^T p. Further programs of it do the same with p in place of m, for p^T p.

Long sums are split among programs that write separate partial sums, which the next kernel adds up. Without atomics the
order of summation is fixed, so equal inputs give equal bits. Tiles of 8 to 16 KB in 2 or 3 stages keep 26 KB or more in
flight per multiprocessor.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from compress.gpu.tiles import (
    Index,
    Operands,
    Ref,
    Result,
    RowRefs,
    add,
    call,
    dot,
    load,
    matrices,
    most_parts,
    multiprocessors,
    split,
    store,
    thin_columns,
    zero_index,
)


class Blocks(NamedTuple):
    """Tiles and programs of a kernel.

    Attributes:
        rows: rows of a tile.
        columns: columns of a tile.
        warps: warps of a program.
        stages: tiles in flight, the stages of Triton's software pipeline.
        programs: programs that a multiprocessor runs at once. Rows or columns are split to have as many on each.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


LARGEST_RANK = 128

# Keys are the largest number of columns of a thin factor's tile, and the item size of the wider dtype of factor and
# matrix. These alone decide the blocks of the row kernel, so that all its passes form the same bits of p w^T.
_ROW_BLOCKS = {
    (32, 2): Blocks(64, 64, warps=4, stages=3, programs=4),
    (64, 2): Blocks(128, 64, warps=8, stages=2, programs=2),
    (128, 2): Blocks(128, 64, warps=8, stages=3, programs=1),
    (32, 4): Blocks(64, 64, warps=4, stages=2, programs=3),
    (64, 4): Blocks(128, 32, warps=8, stages=2, programs=1),
    (128, 4): Blocks(128, 32, warps=8, stages=2, programs=1),
}
_COLUMN_BLOCKS = {
    (32, 2): Blocks(128, 64, warps=4, stages=3, programs=3),
    (64, 2): Blocks(64, 128, warps=8, stages=3, programs=2),
    (128, 2): Blocks(64, 128, warps=8, stages=3, programs=2),
    (32, 4): Blocks(64, 64, warps=4, stages=3, programs=3),
    (64, 4): Blocks(32, 128, warps=8, stages=3, programs=3),
    (128, 4): Blocks(32, 128, warps=8, stages=3, programs=3),
}


def _blocks(table: dict[tuple[int, int], Blocks], thin: jax.Array, dtype: DTypeLike) -> Blocks:
    """Return the table's entry for a thin factor [*, n, r] and a matrix of a dtype.

    Raises:
        ValueError: the factor has more than LARGEST_RANK columns.
    """
    if thin.shape[-1] > LARGEST_RANK:
        raise ValueError(
            f"the kernels take ranks up to {LARGEST_RANK}, got {thin.shape[-1]}; implementation='xla' takes any"
        )
    return table[max(32, thin_columns(thin.shape[-1])), 4 if jnp.float32 in (thin.dtype, dtype) else 2]


def _sum_tile(
    refs: RowRefs,
    p_tile: jax.Array | None,
    start: tuple[Index, Index],
    *,
    zero: jax.Array,
    shape: tuple[int, int],
    dtype: DTypeLike,
    interpret: bool,
) -> jax.Array:
    """Return a tile of x + (m - p w^T), without operands that are None.

    Args:
        refs: operands, of which x, m and w are read.
        p_tile: the tile's rows of the left factor.
        start: first row and column of the tile.
        zero: result of `zero_index`, which works outside of loops only.
        shape: rows and columns of the tile.
        dtype: dtype to which p w^T is rounded.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    x, m, w = refs.x, refs.m, refs.w
    value = None if m is None else load(m, start, shape)
    if p_tile is not None:
        w_tile = load(w, (start[1], zero), (shape[1], p_tile.shape[1]))
        product = dot(p_tile, w_tile, interpret, trans_b=True).astype(dtype)
        value = product if value is None else add(value, -product)
    if x is not None:
        x_tile = load(x, start, shape)
        value = x_tile if value is None else add(x_tile, value)
    assert value is not None, "a pass has x, m or p"
    return value


def _row_kernel(
    *refs: Ref | None, size: tuple[int, int], blocks: Blocks, chunk: int, dtype: DTypeLike, interpret: bool
) -> None:
    """Compute the program's rows of the row kernel.

    Args:
        refs: RowRefs.
        size: n and k.
        blocks: tiles of the matrices.
        chunk: number of column tiles of a program.
        dtype: dtype to which p w^T is rounded.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    own = RowRefs(*refs)
    active, p, q, out, y = own.active, own.p, own.q, own.out, own.y
    shape, zero = (blocks.rows, blocks.columns), zero_index()
    row, first = pl.program_id(0) * blocks.rows, pl.program_id(1) * chunk
    trips = jnp.minimum(chunk, pl.cdiv(size[1], blocks.columns) - first)
    if active is not None:
        trips *= active[0].astype(jnp.int32)
    p_tile = None if p is None else load(p, (row, zero), (blocks.rows, thin_columns(p.shape[1])))

    def step(trip: jax.Array, total: Result) -> Result:  # the sum [rows, r] of y, or None without q
        column = (first + trip) * blocks.columns
        value = _sum_tile(own, p_tile, (row, column), zero=zero, shape=shape, dtype=dtype, interpret=interpret)
        if out is not None:
            store(out, (row, column), value)
        if q is not None:
            total += dot(value, load(q, (column, zero), (blocks.columns, total.shape[1])), interpret)
        return total

    if q is None:
        lax.fori_loop(0, trips, step, None)
    else:
        total = lax.fori_loop(0, trips, step, jnp.zeros((blocks.rows, thin_columns(q.shape[1])), jnp.float32))
        store(y, (row, zero), total)


def _column_kernel(m: Ref, p: Ref, s: Ref, g: Ref, *, blocks: Blocks, chunk: int, interpret: bool) -> None:
    """Compute s = m^T p and, in the programs beyond m's last column, g = p^T p.

    Args:
        m: matrix [n, k].
        p: left factor [n, r].
        s: this program's part of the product [k, r], float32.
        g: this program's part of the product [r, r], float32.
        blocks: tiles of the matrix.
        chunk: number of row tiles of a program.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    block, first = pl.program_id(0), pl.program_id(1) * chunk
    trips = jnp.minimum(chunk, pl.cdiv(m.shape[0], blocks.rows) - first)
    zero, thin, last = zero_index(), thin_columns(p.shape[1]), pl.cdiv(m.shape[1], blocks.columns)

    def accumulate(a: Ref, column: Index, width: int, out: Ref) -> None:
        def step(trip: jax.Array, total: jax.Array) -> jax.Array:
            row = (first + trip) * blocks.rows
            a_tile = load(a, (row, column), (blocks.rows, width))
            return total + dot(a_tile, load(p, (row, zero), (blocks.rows, thin)), interpret, trans_a=True)

        store(out, (column, zero), lax.fori_loop(0, trips, step, jnp.zeros((width, thin), jnp.float32)))

    pl.when(block < last)(lambda: accumulate(m, block * blocks.columns, blocks.columns, s))
    pl.when(block == last)(lambda: accumulate(p, zero, thin, g))


def _rows(
    name: str,
    size: tuple[int, ...],
    dtype: DTypeLike,
    operands: Operands,
    *,
    active: jax.Array | bool = True,
    keep: bool = False,
    interpret: bool,
) -> tuple[Result, Result]:
    """Run a pass of the row kernel over matrices.

    Args:
        name: name of the kernel in profiles.
        size: shape [*, n, k] of the matrices.
        dtype: dtype of the matrices.
        operands: operands of the pass.
        active: if it is False, the result is m, bit for bit.
        keep: whether m is needed later; if not, the result takes its memory.
        interpret: whether Pallas's interpreter runs the kernel.

    Returns:
        x + (m - p w^T) [*, n, k], or None if neither m nor p is given.
        Partial sums of its product with q [*, parts, n, r], float32, or None without q.
    """
    *lead, n, k = size
    x, m, p, _, q = operands
    batch, thin = math.prod(lead), q if p is None else p
    assert thin is not None, "a pass has p, q or both"
    blocks = _blocks(_ROW_BLOCKS, thin, dtype)
    across, along = pl.cdiv(n, blocks.rows), pl.cdiv(k, blocks.columns)
    # Without a product there are no partial sums to add up, so more programs cost nothing.
    programs = blocks.programs * multiprocessors()
    target, most = (2 * programs, along) if q is None else (programs, most_parts(k, dtype, q.shape[-1]))
    parts, chunk = split(across * batch, along, target, most)
    flag = None if active is True else jnp.asarray(active, bool).reshape(1)
    out = None if m is None and p is None else jax.ShapeDtypeStruct((batch, n, k), dtype)
    y = None if q is None else jax.ShapeDtypeStruct((batch, parts, n, q.shape[-1]), jnp.float32)
    out, y = call(
        functools.partial(_row_kernel, size=(n, k), blocks=blocks, chunk=chunk, dtype=dtype, interpret=interpret),
        name,
        (blocks.warps, blocks.stages),
        (across, parts, batch),
        (flag, *map(matrices, operands)),
        (out, y),
        input_output_aliases={} if m is None or keep else {(flag is not None) + (x is not None): 0},
        interpret=interpret,
    )
    return None if out is None else out.reshape(size), None if y is None else y.reshape(*lead, *y.shape[1:])


def decode(p: jax.Array, w: jax.Array, dtype: DTypeLike, *, interpret: bool = False) -> jax.Array:
    """Return p w^T [*, n, k], as `kernels.decode` does; `interpret`: by Pallas's interpreter, here and below."""
    size = (*p.shape[:-1], w.shape[-2])
    return _rows("lowrank_decode", size, dtype, Operands(p=p, w=w), interpret=interpret)[0]


def residual(
    m: jax.Array, p: jax.Array, w: jax.Array, active: jax.Array | bool = True, *, interpret: bool = False
) -> jax.Array:
    """Return m - p w^T, as `kernels.residual` does, in the memory of m."""
    return _rows("lowrank_residual", m.shape, m.dtype, Operands(m=m, p=p, w=w), active=active, interpret=interpret)[0]


def project(
    x: jax.Array,
    q: jax.Array,
    m: jax.Array | None = None,
    p: jax.Array | None = None,
    w: jax.Array | None = None,
    *,
    active: jax.Array | bool = True,
    keep: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return x plus an error, in the memory of m unless `keep`, and partial sums of its product with q.

    The sum of the product [*, parts, n, r] over its parts is what kernels.project returns.

    Args:
        x: message [*, n, k].
        q: right factor [*, k, r].
        m: error [*, n, k], or the previous message if p and w are given; None without an error.
        p: left factor [*, n, r] of the previous message; the error is then m - p w^T.
        w: right factor [*, k, r] of the previous message.
        active: if it is False, the result is m, bit for bit, and its product is meaningless.
        keep: whether m is needed later as well.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    out, y = _rows(
        "lowrank_project", x.shape, x.dtype, Operands(x, m, p, w, q), active=active, keep=keep, interpret=interpret
    )
    return x if out is None else out, y


def backproject(m: jax.Array, p: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return partial sums of m^T p [*, parts, k, r] and p^T p [*, parts, r, r] in float32.

    Their sums over the parts are what `kernels.backproject` returns.
    """
    *lead, n, k = m.shape
    batch, rank, blocks = math.prod(lead), p.shape[-1], _blocks(_COLUMN_BLOCKS, p, m.dtype)
    across = pl.cdiv(k, blocks.columns)
    target = blocks.programs * multiprocessors()
    parts, chunk = split(across * batch, pl.cdiv(n, blocks.rows), target, most_parts(n, m.dtype, rank))
    s, g = call(
        functools.partial(_column_kernel, blocks=blocks, chunk=chunk, interpret=interpret),
        "lowrank_backproject",
        (blocks.warps, blocks.stages),
        (across + 1, parts, batch),
        (matrices(m), matrices(p)),
        tuple(jax.ShapeDtypeStruct((batch, parts, width, rank), jnp.float32) for width in (k, rank)),
        interpret=interpret,
    )
    return s.reshape(*lead, *s.shape[1:]), g.reshape(*lead, *g.shape[1:])
