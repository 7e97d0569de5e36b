"""The kernels of mosaic.py for Blackwell's matrix units, whose sums are in tensor memory (tcgen05).

The units work beside the program's threads. p w^T of a tile comes to registers from tensor memory. The tile of
x + (m - p w^T) takes the place of x's or m's in shared memory, from where TMA stores it and the units multiply it by q,
while the program goes on with the next tile. So tiles in shared memory are held for one more step. The sums of the thin
products stay in tensor memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mg

from compress.gpu.tiles import Index, Ref, Result, RowRefs, add
from compress.gpu.tma import TILE, Units, block, order, present, stream

_ROWS = 128  # rows of tensor memory


def _stages(ins: list, others: int = 0) -> int:
    """Return the tiles of a matrix in shared memory: 3, or 4 if two programs then still fit on a multiprocessor.

    Args:
        ins: pairs (matrix, block) that are loaded.
        others: numbers that shared memory has to hold besides.
    """
    return min(4, max(3, (50 * 1024 - others) // sum(math.prod(block.block_shape) for _, block in ins)))


class _Sum:
    """A sum of products in tensor memory, to which the units add while the program goes on."""

    def __init__(self, total: Ref, barriers: Ref) -> None:
        """Clear the tensor memory [128, columns]; every other product arrives at one of the two barriers."""
        self.total, self.barriers = total, barriers
        mg.async_store_tmem(total, mg.layout_cast(jnp.zeros(total.shape, jnp.float32), mg.Layout.TCGEN05))
        mg.commit_tmem()

    def add(self, t: jax.Array, a: Ref, b: Ref) -> None:
        """Start to add the product a b of step t, and wait for that of the step before."""
        mg.tcgen05_mma(self.total, a, b, self.barriers.at[lax.rem(t, 2)])
        pl.when(t > 0)(lambda: mg.barrier_wait(self.barriers.at[lax.rem(t + 1, 2)]))

    def result(self, trips: Index) -> jax.Array:
        """Return the sum of all steps' products, zeros if there were no steps."""
        trips = jnp.asarray(trips, jnp.int32)
        pl.when(trips > 0)(lambda: mg.barrier_wait(self.barriers.at[lax.rem(trips + 1, 2)]))
        return mg.async_load_tmem(self.total)


def _scratch(columns: int, barriers: int) -> tuple[object, object]:
    """Return tensor memory [128, columns], and barriers at which the matrix units arrive."""
    return mg.TMEM((_ROWS, columns), jnp.float32), mg.Barrier(num_barriers=barriers, orders_tensor_core=True)


def _row_program(refs: RowRefs, row: Index, first: Index, trips: Index) -> None:
    """Compute 128 rows; the arguments are those of Units.row_program."""
    _, x, m, p, w, q, out, y = refs
    rows, thin = pl.ds(row * _ROWS, _ROWS), refs.rank
    wide = block((_ROWS, TILE), lambda t: (row, first + t), held=1)
    slim = block((TILE, thin), lambda t: (first + t, 0), held=1)

    def step(p_tile: Ref, decoded: Ref, done: Ref, total: _Sum | None, own: Ref, t: jax.Array, *tiles: Ref) -> None:
        found = iter(tiles)
        x_tile, m_tile, w_tile, q_tile = (None if ref is None else next(found) for ref in (x, m, w, q))
        value: Result = None if m_tile is None else m_tile[...]
        if w_tile is not None:
            mg.tcgen05_mma(decoded, p_tile, w_tile.T, done, accumulate=False)
            mg.barrier_wait(done)
            product = mg.async_load_tmem(decoded).astype(jnp.bfloat16)
            mg.wait_load_tmem()
            value = product if value is None else add(value, -product)
        loaded: list[Ref] = [some for some in (x_tile, m_tile) if some is not None]
        tile = loaded[0] if loaded else own.at[lax.rem(t, 2)]
        if out is not None:
            tile[...] = value if x_tile is None else add(x_tile[...], value)
            mg.commit_smem()
            mg.copy_smem_to_gmem(tile, out.at[rows, pl.ds((first + t) * TILE, TILE)])
        if total is not None:
            total.add(t, tile, q_tile)
        if out is not None:
            mg.wait_smem_to_gmem(1, wait_read_only=True)  # until the tile before has left

    def scoped(
        p_tile: Ref, arrived: Ref, decoding: tuple[Ref, Ref] | None, summing: tuple[Ref, Ref] | None, own: Ref
    ) -> None:
        if p is not None:
            mg.copy_gmem_to_smem(p.at[rows], p_tile, arrived)
            mg.barrier_wait(arrived)
        total = None if summing is None else _Sum(*summing)
        decoded, done = decoding or (None, None)
        ins = present([(x, wide), (m, wide), (w, slim), (q, slim)])
        stages = _stages(ins, sum(math.prod(ref.shape) for ref in (p_tile, own) if ref is not None))
        stream(functools.partial(step, p_tile, decoded, done, total, own), trips, ins, stages=stages)
        if total is not None and y is not None:
            y[rows] = total.result(trips)
        if out is not None:
            mg.wait_smem_to_gmem(0)

    pl.run_scoped(
        scoped,
        None if p is None else mg.SMEM((_ROWS, thin), p.dtype, transforms=order(thin)),
        None if p is None else mg.Barrier(),
        None if p is None else _scratch(TILE, 1),
        None if q is None else _scratch(thin, 2),
        mg.SMEM((2, _ROWS, TILE), jnp.bfloat16, transforms=order(TILE)) if x is None and m is None else None,
    )


def _column_program(a: Ref, p: Ref, s: Ref, column: Index, first: Index, trips: Index) -> None:
    """Compute 128 rows of s; the arguments are those of Units.column_program."""
    thin = p.shape[-1]
    wide = block((TILE, _ROWS), lambda t: (first + t, column), like=a.shape[-1], held=1)  # a factor may be narrow
    slim = block((TILE, thin), lambda t: (first + t, 0), held=1)

    def scoped(summing: tuple[Ref, Ref]) -> None:
        total, ins = _Sum(*summing), [(a, wide), (p, slim)]
        stream(lambda t, a, p: total.add(t, a.T, p), trips, ins, stages=_stages(ins))
        s[pl.ds(column * _ROWS, _ROWS)] = total.result(trips)

    pl.run_scoped(scoped, _scratch(thin, 2))


# Shared memory of a multiprocessor has room for two programs, or for one with wider factors.
UNITS = Units(_ROWS, lambda rank: 2 if rank <= 16 else 1, _row_program, _column_program)
