"""Sums of what the programs of an earlier launch have left, each of its own block or part."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pt

from compress.gpu.tiles import Index, Ref, load, mask_of

HELD = 8192  # elements of the blocks' products that a program holds at once


def one_if_zero(largest: jax.Array) -> jax.Array:
    """Return what to divide by. What is kept stays zero, so that zeros do not set a scale for other blocks."""
    return jnp.where(largest == 0, 1, largest)


def sum_parts(parts: Ref, row: Index, column: Index, block: tuple[int, int]) -> jax.Array:
    """Return a block of the sum of partial sums [parts, n, r], with zeros beyond the edges.

    Args:
        parts: partial sums.
        row: first row.
        column: first column; what comes of `zero_index`, which works outside of loops only.
        block: rows and columns of the result.
    """
    first = column * 0
    total = load(parts, (row, column), block, first)
    for part in range(1, parts.shape[0]):
        total += load(parts, (row, column), block, first + part)
    return total


def largest_of_columns(largest: Ref, column: Index, thin: int, held: int) -> jax.Array:
    """Return the largest magnitude of all blocks' columns, [1, thin]; 1 for zero columns.

    Args:
        largest: largest magnitudes [blocks, r] of the blocks' columns.
        column: first column.
        thin: columns of the result.
        held: number of blocks to read at once.
    """

    def step(trip: jax.Array, total: jax.Array) -> jax.Array:
        tile = load(largest, (trip * held, column), (held, thin))
        return jnp.maximum(total, jnp.max(tile, axis=0, keepdims=True))

    trips = pl.cdiv(largest.shape[0], held)
    return one_if_zero(lax.fori_loop(0, trips, step, jnp.zeros((1, thin), jnp.float32)))


def add_blocks(largest: Ref, grams: Ref, row: Index, column: Index, thin: int) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude of each column, [1, thin], and a part of the Gram matrix in units of it.

    Args:
        largest: largest magnitudes [blocks, r] of the blocks' columns.
        grams: Gram matrices [blocks, r, r] of the blocks, in units of the blocks' largest magnitudes.
        row: first row of the part.
        column: first column of the part.
        thin: rows and columns of the part.
    """
    blocks = grams.shape[0]
    held = min(pl.next_power_of_2(blocks), max(1, HELD // thin**2))
    starts = row, column
    common = [largest_of_columns(largest, start, thin, held) for start in starts]

    def step(trip: jax.Array, total: jax.Array) -> jax.Array:
        left, right = (load(largest, (trip * held, start), (held, thin)) / c for start, c in zip(starts, common))
        index = pl.ds(trip * held, held), pl.ds(row, thin), pl.ds(column, thin)
        masks = [mask_of(start, thin, grams.shape[2], dim) for dim, start in enumerate(starts)]
        inside = jnp.expand_dims(trip * held + jnp.arange(held) < blocks, (1, 2))
        for mask in masks:
            inside = inside if mask is None else inside & mask[None]
        tile = pt.load(grams.at[index], mask=jnp.broadcast_to(inside, (held, thin, thin)), other=0)
        return total + jnp.sum(tile * left[:, :, None] * right[:, None, :], axis=0)

    trips = pl.cdiv(blocks, held)
    return common[1], lax.fori_loop(0, trips, step, jnp.zeros((thin, thin), jnp.float32))
