"""The kernels of mosaic.py for Hopper's matrix units.

While tiles come and go by TMA, warpgroup matrix instructions (WGMMA) take the tiles before. A tile of x + (m - p w^T)
is formed in registers and leaves through shared memory, where WGMMA multiplies it by q. The sums of the thin products
stay in registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mg

from compress.gpu.tiles import Index, Ref, Result, RowRefs, add
from compress.gpu.tma import TILE, Units, block, order, present, stream

_ROWS = 64  # rows of a WGMMA


def _product(a: Ref, b: Ref) -> jax.Array:
    """Return a b in float32, of tiles in shared memory."""

    def run(total: Ref) -> jax.Array:
        mg.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(run, mg.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _zeros(columns: int) -> jax.Array:
    """Return a sum [64, columns] to add products to, in registers."""
    return mg.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), mg.Layout.WGMMA)


def _row_program(refs: RowRefs, row: Index, first: Index, trips: Index) -> None:
    """Compute 64 rows; the arguments are those of Units.row_program."""
    _, x, m, p, w, q, out, y = refs
    rows = pl.ds(row * _ROWS, _ROWS)
    thin = refs.rank
    wide = block((_ROWS, TILE), lambda t: (row, first + t), like=thin)
    slim = block((TILE, thin), lambda t: (first + t, 0))

    def step(p_tile: Ref | None, formed: Ref | None, t: jax.Array, *tiles: Ref) -> jax.Array | None:
        found = iter(tiles)
        x_tile, m_tile, w_tile, q_tile = (None if ref is None else next(found) for ref in (x, m, w, q))
        value: Result = None if m_tile is None else m_tile[...]
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
            mg.copy_smem_to_gmem(formed_tile, out.at[rows, pl.ds((first + t) * TILE, TILE)])
        return None if q_tile is None else next(found) + _product(formed_tile, q_tile)

    def scoped(p_tile: Ref, barrier: Ref, formed: Ref | None) -> None:
        if p is not None:
            mg.copy_gmem_to_smem(p.at[rows], p_tile, barrier)
            mg.barrier_wait(barrier)
        ins = present([(x, wide), (m, wide), (w, slim), (q, slim)])
        total = stream(functools.partial(step, p_tile, formed), trips, ins, None if q is None else _zeros(thin))
        if y is not None:
            y[rows] = total
        if out is not None:
            mg.wait_smem_to_gmem(0)

    pl.run_scoped(
        scoped,
        None if p is None else mg.SMEM((_ROWS, thin), p.dtype, transforms=order(thin)),
        None if p is None else mg.Barrier(),
        None if out is None else mg.SMEM((2, _ROWS, TILE), out.dtype, transforms=order(min(thin, TILE))),
    )


def _column_program(a: Ref, p: Ref, s: Ref, column: Index, first: Index, trips: Index) -> None:
    """Compute 64 rows of s; the arguments are those of Units.column_program."""
    thin = p.shape[-1]
    wide = block((TILE, _ROWS), lambda t: (first + t, column), like=thin)
    slim = block((TILE, thin), lambda t: (first + t, 0))
    ins = [(a, wide), (p, slim)]
    total = stream(lambda _, a, p, total: total + _product(a.T, p), trips, ins, _zeros(thin))
    s[pl.ds(column * _ROWS, _ROWS)] = total


# Shared memory of a multiprocessor has room for two programs.
UNITS = Units(_ROWS, lambda rank: 2, _row_program, _column_program)
