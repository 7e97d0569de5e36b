"""Tiles of matrices that come to shared memory by TMA, which the kernels on the Mosaic GPU backend share."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as mg

from compress.gpu.tiles import Index, Ref, Result, multiprocessors

TILE = 64  # columns of a tile, and rows of a factor's: 128 bytes of a row, which are a swizzle


class Units(NamedTuple):
    """The two kernels, written for the matrix units of a GPU.

    Attributes:
        rows: rows of a tile of the row kernel, and columns of a tile of the column kernel.
        programs: function from the factors' columns to the number of programs that a multiprocessor runs at once.
        row_program: function (refs, row, first, trips) that computes `rows` rows of out = x + (m - p w^T), and this
            program's part of out q. `refs` are RowRefs, `row` is the index of the tile's rows, `first` that of the
            first tile's columns, `trips` the number of tiles.
        column_program: function (a, p, s, column, first, trips) that computes `rows` rows of s = a^T p, for a matrix
            a [n, k] and a factor p [n, r]. `column` is the index of the tile's columns, `first` that of the first
            tile's rows.
    """

    rows: int
    programs: Callable[[int], int]
    row_program: Callable[..., None]
    column_program: Callable[..., None]

    def target(self, rank: int) -> int:
        """Return the number of programs that the GPU runs at once, with factors of a rank."""
        return multiprocessors() * self.programs(rank)


def order(columns: int) -> tuple[mg.TilingTransform, mg.SwizzleTransform]:
    """Return the order of a tile's elements: rows of 8, swizzled by as many bytes as a row has, at most 128.

    Matrix units read it without bank conflicts.
    """
    swizzle = min(128, 2 * columns)
    return mg.TilingTransform((8, swizzle // 2)), mg.SwizzleTransform(swizzle)


def block(shape: tuple[int, int], index: Callable[..., tuple], like: int | None = None, held: int = 0) -> mg.BlockSpec:
    """Return a tile in shared memory, in the order that matrix units read.

    Args:
        shape: rows and columns of the tile.
        index: function from the step to the tile's index.
        like: columns of a narrower matrix whose order the tile must have.
        held: number of steps for which the tile is still needed behind its own.
    """
    return mg.BlockSpec(shape, index, transforms=order(min(shape[1], like or shape[1])), delay_release=held)


def stream(
    step: Callable[..., Result], trips: Index, ins: list, total: jax.Array | None = None, *, stages: int = 3
) -> jax.Array | None:
    """Run a step for each tile, while later tiles are loaded.

    Args:
        step: function of the tile's index, the tiles in shared memory, and the sum if there is one, which it returns.
        trips: number of tiles.
        ins: pairs (matrix, block) to load.
        total: sum before the first step.
        stages: tiles of a matrix in shared memory.
    """
    return mg.emit_pipeline(
        lambda index, *tiles: step(index[0], *tiles),
        grid=(trips,),
        in_specs=[block for _, block in ins],
        max_concurrent_steps=stages,
        init_carry=total,
    )(*(matrix for matrix, _ in ins))


def present(pairs: list[tuple[Ref | None, mg.BlockSpec]]) -> list[tuple[Ref, mg.BlockSpec]]:
    """Return the pairs (matrix, block) without those of matrices that a pass does not have."""
    return [(ref, block) for ref, block in pairs if ref is not None]
