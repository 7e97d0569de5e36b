"""The passes of kernels.py as kernels for Pallas's Mosaic GPU backend, for Hopper: bfloat16 matrices and factors.

The two kernels are those of triton.py. Tiles come and go by TMA, three at a time, while warpgroup matrix instructions
(WGMMA) take the tiles before. A tile of x + (m - p w^T) is formed in registers and leaves through shared memory, where
WGMMA multiplies it by q. The sums of the thin products stay in registers.

They need jax 0.12, and whole tiles, as `fits` tells; kernels.py gives other matrices to triton.py. Blackwell has no
WGMMA. The caller of a kernel may run it in Pallas's interpreter, by `mg.force_gpu_interpret_mode`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mg

from compress.gpu.tiles import Ref, add, matrices, most_parts, split

_TILE = 64  # rows and columns of a tile: the rows of a WGMMA, and 128 bytes of a row, which are a swizzle
_STAGES = 3
_PROGRAMS = 2 * 132  # that an H100 or H200 runs at once: shared memory has room for two on a multiprocessor
AVAILABLE = jax.__version_info__ >= (0, 12)  # earlier versions do not let a kernel update its operands


def fits(n: int, k: int, rank: int, *dtypes: Any) -> bool:
    """Return whether the kernels take matrices [n, k], factors of a rank, and their dtypes.

    Args:
        n: rows of the matrices.
        k: columns of the matrices.
        rank: columns of the factors.
        dtypes: dtypes of the matrices and of the factors.
    """
    return n % _TILE == k % _TILE == 0 and rank in (16, 32, 64, 128) and all(d == jnp.bfloat16 for d in dtypes)


def _block(columns: int, place: Callable[..., tuple], like: int | None = None) -> mg.BlockSpec:
    """Return a tile of 64 rows in shared memory, in the order that WGMMA reads without bank conflicts.

    Args:
        columns: columns of the tile.
        place: function from the step to the tile's index.
        like: columns of the tile by which it is multiplied from shared memory, whose order must be the same.
    """
    return mg.BlockSpec((_TILE, columns), place, transforms=_order(min(columns, like or columns)))


def _order(columns: int) -> tuple[mg.TilingTransform, mg.SwizzleTransform]:
    """Return the order of a tile's elements: rows of 8, swizzled by as many bytes as a row has, at most 128."""
    swizzle = min(128, 2 * columns)
    return mg.TilingTransform((8, swizzle // 2)), mg.SwizzleTransform(swizzle)


def _product(a: Any, b: Any) -> jax.Array:
    """Return a b in float32, by WGMMA, of tiles in shared memory."""

    def run(total: Ref) -> jax.Array:
        mg.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(run, mg.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _zeros(columns: int) -> jax.Array:
    """Return a sum [64, columns] to add products to, in registers."""
    return mg.layout_cast(jnp.zeros((_TILE, columns), jnp.float32), mg.Layout.WGMMA)


def _stream(step: Callable[..., Any], trips: Any, ins: list, total: jax.Array | None = None) -> jax.Array | None:
    """Run a step for each tile, while later tiles are loaded.

    Args:
        step: function of the tile's index, the tiles in shared memory, and the sum if there is one, which it returns.
        trips: number of tiles.
        ins: pairs (matrix, block) to load.
        total: sum before the first step.
    """
    return mg.emit_pipeline(
        lambda index, *tiles: step(index[0], *tiles),
        grid=(trips,),
        in_specs=[block for _, block in ins],
        max_concurrent_steps=_STAGES,
        init_carry=total,
    )(*(matrix for matrix, _ in ins))


def _row_program(
    active: Ref | None,
    x: Ref | None,
    m: Ref | None,
    p: Ref | None,
    w: Ref | None,
    q: Ref | None,
    out: Ref | None,
    y: Ref | None,
    *,
    row: Any,
    first: Any,
    trips: Any,
) -> None:
    """Compute 64 rows of out = x + (m - p w^T), without operands that are None, and this part's out q.

    Args:
        active: flag [1]; an inactive pass leaves out as it is and sets y to zero.
        x: message [n, k].
        m: previous message [n, k].
        p: left factor [n, r].
        w: right factor [k, r].
        q: right factor [k, r] of the product y.
        out: result [n, k]; m's memory if there is an m.
        y: this part of the product [n, r], float32.
        row: index of the tile's rows.
        first: index of the first tile's columns.
        trips: number of tiles.
    """
    rows = pl.ds(row * _TILE, _TILE)
    if active is not None:
        trips = trips * active[0].astype(jnp.int32)
    thin = next(f for f in (p, q) if f is not None).shape[-1]
    wide, slim = _block(_TILE, lambda t: (row, first + t), thin), _block(thin, lambda t: (first + t, 0))

    def step(p_tile: Ref | None, formed: Ref | None, t: jax.Array, *tiles: Any) -> jax.Array | None:
        found = iter(tiles)
        x_tile, m_tile, w_tile, q_tile = (None if ref is None else next(found) for ref in (x, m, w, q))
        value: Any = None if m_tile is None else m_tile[...]
        if w_tile is not None:
            product = _product(p_tile, w_tile.T).astype(jnp.bfloat16)
            value = product if value is None else add(value, -product)
        if formed is None or out is None:
            formed_tile = x_tile
        else:
            formed_tile = formed.at[lax.rem(t, 2)]
            mg.wait_smem_to_gmem(1, wait_read_only=True)  # until the tile before last has left
            formed_tile[...] = value if x_tile is None else add(x_tile[...], value)
            mg.commit_smem()
            mg.copy_smem_to_gmem(formed_tile, out.at[rows, pl.ds((first + t) * _TILE, _TILE)])
        return None if q_tile is None else next(found) + _product(formed_tile, q_tile)

    def scoped(p_tile: Any, barrier: Any, formed: Ref | None) -> None:
        if p is not None:
            mg.copy_gmem_to_smem(p.at[rows], p_tile, barrier)
            mg.barrier_wait(barrier)
        ins = [(ref, block) for ref, block in ((x, wide), (m, wide), (w, slim), (q, slim)) if ref is not None]
        total = _stream(functools.partial(step, p_tile, formed), trips, ins, None if q is None else _zeros(thin))
        if y is not None:
            y[rows] = total
        if out is not None:
            mg.wait_smem_to_gmem(0)

    pl.run_scoped(
        scoped,
        None if p is None else mg.SMEM((_TILE, thin), p.dtype, transforms=_order(thin)),
        None if p is None else mg.Barrier(),
        None if out is None else mg.SMEM((2, _TILE, _TILE), out.dtype, transforms=_order(min(thin, _TILE))),
    )


def _column_program(a: Ref, p: Ref, s: Ref, *, column: Any, first: Any, trips: Any) -> None:
    """Compute 64 rows of this part's s = a^T p.

    Args:
        a: matrix [n, k].
        p: left factor [n, r].
        s: this part of the product [k, r], float32.
        column: index of the tile's columns in a.
        first: index of the first tile's rows.
        trips: number of tiles.
    """
    thin = p.shape[-1]
    wide, slim = _block(_TILE, lambda t: (first + t, column), thin), _block(thin, lambda t: (first + t, 0))
    ins = [(a, wide), (p, slim)]
    total = _stream(lambda _, a, p, total: total + _product(a.T, p), trips, ins, _zeros(thin))
    s[pl.ds(column * _TILE, _TILE)] = total


def _launch(program: Callable[..., None], name: str, grid: tuple[int, int, int], ins: tuple, outs: tuple) -> Any:
    """Run a kernel.

    Args:
        program: function of (batch, tile, part) and of the references to the inputs and outputs, None for None.
        name: name of the kernel in profiles.
        grid: numbers of (batch, tiles, parts).
        ins: arrays, references that the kernel updates, or None.
        outs: shapes, or None.
    """
    batch, tiles, parts = grid

    def kernel(*refs: Ref) -> None:
        found = iter(refs)
        index = lax.axis_index("program")
        # An axis of one program is a constant to jax, which its loops cannot carry.
        b = lax.div(index, tiles * parts) if batch > 1 else 0
        place = b, lax.rem(lax.div(index, parts), tiles), lax.rem(index, parts)
        program(*place, *(None if x is None else next(found) for x in (*ins, *outs)))

    found = iter(
        mg.kernel(
            kernel,
            out_type=[x for x in outs if x is not None],
            grid=(math.prod(grid),),
            grid_names=("program",),
            kernel_name=name,
        )(*(x for x in ins if x is not None))
    )
    return [None if x is None else next(found) for x in outs]


def _rows(
    name: str,
    size: tuple[int, ...],
    *,
    active: jax.Array | bool = True,
    x: jax.Array | None = None,
    m: jax.Array | None = None,
    p: jax.Array | None = None,
    w: jax.Array | None = None,
    q: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Run a pass of the row kernel over matrices; the arguments are those of triton.py's.

    Returns:
        x + (m - p w^T) [*, n, k], or None if neither m nor p is given.
        Partial sums of its product with q [*, parts, n, r], float32, or None without q.
    """
    *lead, n, k = size
    batch, across, along = math.prod(lead), n // _TILE, k // _TILE
    target, most = (2 * _PROGRAMS, along) if q is None else (_PROGRAMS, most_parts(k, jnp.bfloat16, q.shape[-1]))
    parts, chunk = split(across * batch, along, target, most)
    x, m, p, w, q = map(matrices, (x, m, p, w, q))
    flag = None if active is True else jnp.asarray(active, bool).reshape(1)
    held = None if m is None else jax.new_ref(m)  # the result takes its memory
    out = jax.ShapeDtypeStruct((batch, n, k), jnp.bfloat16) if m is None and p is not None else None
    y = None if q is None else jax.ShapeDtypeStruct((batch, parts, n, q.shape[-1]), jnp.float32)

    def program(b: Any, row: Any, part: Any, flag: Ref | None, *refs: Ref | None) -> None:
        *whole, y = refs
        x, m, p, w, q, out = (ref if ref is None else ref.at[b] for ref in whole)
        first = part * chunk
        trips = chunk if along % chunk == 0 else jnp.minimum(chunk, along - first)
        _row_program(
            flag, x, m, p, w, q, m if out is None else out, None if y is None else y.at[b, part],
            row=row, first=first, trips=trips,
        )  # fmt: skip

    found, sums = _launch(program, name, (batch, across, parts), (flag, x, held, p, w, q), (out, y))
    formed = found if held is None else jax.freeze(held)
    return None if formed is None else formed.reshape(size), None if y is None else sums.reshape(*lead, *y.shape[1:])


def decode(p: jax.Array, w: jax.Array) -> jax.Array:
    """Return p w^T [*, n, k], as kernels.decode does."""
    return _rows("lowrank_decode", (*p.shape[:-1], w.shape[-2]), p=p, w=w)[0]


def residual(m: jax.Array, p: jax.Array, w: jax.Array, active: jax.Array | bool = True) -> jax.Array:
    """Return m - p w^T, as kernels.residual does, in the memory of m.

    Args:
        m: matrix [*, n, k].
        p: left factor [*, n, r].
        w: right factor [*, k, r].
        active: if it is False, m is returned, bit for bit.
    """
    return _rows("lowrank_residual", m.shape, active=active, m=m, p=p, w=w)[0]


def project(
    x: jax.Array,
    q: jax.Array,
    m: jax.Array | None = None,
    p: jax.Array | None = None,
    w: jax.Array | None = None,
    *,
    active: jax.Array | bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Return x plus an error, in the memory of m, and partial sums of its product with q.

    Args:
        x: message [*, n, k].
        q: right factor [*, k, r].
        m: error [*, n, k], or the previous message if p and w are given; None without an error.
        p: left factor [*, n, r] of the previous message; the error is then m - p w^T.
        w: right factor [*, k, r] of the previous message.
        active: if it is False, the result is m, bit for bit, and its product is meaningless.
    """
    out, y = _rows("lowrank_project", x.shape, active=active, x=x, m=m, p=p, w=w, q=q)
    return x if out is None else out, y


def backproject(m: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return partial sums of m^T p [*, parts, k, r] and p^T p [*, parts, r or more, r] in float32.

    Further programs of the same kernel have p in place of m. A tile has 64 columns, and those beyond p's are zeros.

    Args:
        m: matrix [*, n, k].
        p: left factor [*, n, r].
    """
    *lead, n, k = m.shape
    batch, rank, across, along = math.prod(lead), p.shape[-1], k // _TILE, n // _TILE
    own = pl.cdiv(rank, _TILE)
    parts, chunk = split(across * batch, along, _PROGRAMS, most_parts(n, m.dtype, rank))

    def program(b: Any, tile: Any, part: Any, m: Ref, p: Ref, s: Ref, g: Ref) -> None:
        first = part * chunk
        trips = chunk if along % chunk == 0 else jnp.minimum(chunk, along - first)
        run = functools.partial(_column_program, first=first, trips=trips)
        pl.when(tile < across)(lambda: run(m.at[b], p.at[b], s.at[b, part], column=tile))
        pl.when(tile >= across)(lambda: run(p.at[b], p.at[b], g.at[b, part], column=tile - across))

    s, g = (jax.ShapeDtypeStruct((batch, parts, rows, rank), jnp.float32) for rows in (k, own * _TILE))
    s, g = _launch(program, "lowrank_backproject", (batch, across + own, parts), (matrices(m), matrices(p)), (s, g))
    return s.reshape(*lead, *s.shape[1:]), g.reshape(*lead, *g.shape[1:])
