"""Parts that kernels share: the row kernel's operands, tiles with masked edges, products of tiles, and launches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pt
from jax.typing import DTypeLike

# A matrix that a kernel reads or writes, [rows, columns], or its barriers; Pallas has no public type for them.
Ref: TypeAlias = Any
Result: TypeAlias = Any  # an array if the pass has the operands that make it, otherwise None
Index = int | jax.Array
ABSENT = 132  # multiprocessors to write programs for where no GPU is; an H100 or H200 has as many


class Operands(NamedTuple):
    """Operands of a pass of the row kernel; None if it has no such operand.

    Attributes:
        x: message [*, n, k].
        m: error or previous message [*, n, k].
        p: left factor [*, n, r].
        w: right factor [*, k, r].
        q: right factor [*, k, r] of the product.
    """

    x: jax.Array | None = None
    m: jax.Array | None = None
    p: jax.Array | None = None
    w: jax.Array | None = None
    q: jax.Array | None = None


class RowRefs(NamedTuple):
    """References of the row kernel, which computes out = x + (m - p w^T) and y = out q; None without an operand.

    Attributes:
        active: flag [1]; an inactive pass leaves out as it is and sets y to zero.
        x: message [n, k].
        m: previous message [n, k].
        p: left factor [n, r].
        w: right factor [k, r].
        q: right factor [k, r] of the product y.
        out: result [n, k].
        y: this program's part of the product [n, r], float32.
    """

    active: Ref | None
    x: Ref | None
    m: Ref | None
    p: Ref | None
    w: Ref | None
    q: Ref | None
    out: Ref | None
    y: Ref | None

    @property
    def rank(self) -> int:
        """Columns of the factors."""
        return next(factor for factor in (self.p, self.q) if factor is not None).shape[-1]


def thin_columns(rank: int) -> int:
    """Return the columns of a thin factor's tile: a power of two, at least the 16 of a tensor core's instruction."""
    return max(16, pl.next_power_of_2(rank))


def zero_index() -> jax.Array:
    """Return a 0 that jax takes for a variable, because it refuses a slice beyond an edge that starts at a constant."""
    return 0 * pl.program_id(0)


def mask_of(start: Index, block: int, size: int, dim: int) -> jax.Array | None:
    """Return the mask of a block's indices that lie within the matrix, bool [block, 1] or [1, block]; None if all do.

    Args:
        start: first index of the block.
        block: number of indices.
        size: size of the matrix along the dim.
        dim: 0 for rows, 1 for columns.
    """
    return None if size % block == 0 else jnp.expand_dims(start + jnp.arange(block) < size, 1 - dim)


def tile_of(ref: Ref, start: tuple[Index, Index], block: tuple[int, ...], *part: Index) -> tuple[Ref, jax.Array | None]:
    """Return a tile of ref [rows, columns], and the mask of its elements that lie within ref, or None if all do.

    Args:
        ref: matrix to slice, or [parts, rows, columns] if a part is given.
        start: first row and column of the tile.
        block: rows and columns of the tile.
        part: index of the matrix, if ref holds several.
    """
    size = ref.shape[len(part) :]
    rows, columns = (mask_of(*bounds, dim) for dim, bounds in enumerate(zip(start, block, size)))
    mask = rows if columns is None else columns if rows is None else rows & columns
    return ref.at[(*part, *(pl.ds(*bounds) for bounds in zip(start, block)))], mask


def load(ref: Ref, start: tuple[Index, Index], block: tuple[int, int], *part: Index) -> jax.Array:
    """Return a tile of ref [rows, columns], with zeros beyond the edges; the arguments are those of `tile_of`."""
    tile, mask = tile_of(ref, start, block, *part)
    return pt.load(tile, mask=mask, other=None if mask is None else 0)


def store(ref: Ref, start: tuple[Index, Index], value: jax.Array) -> None:
    """Write a tile to ref [rows, columns], except its elements beyond the edges."""
    tile, mask = tile_of(ref, start, value.shape)
    pt.store(tile, value.astype(ref.dtype), mask=mask)


def dot(a: jax.Array, b: jax.Array, interpret: bool, **transposed: bool) -> jax.Array:
    """Return a b in float32.

    float32 operands are multiplied as three products of their TF32 halves, which lose less than float32 sums do.

    Args:
        a: left operand, cast to b's dtype.
        b: right operand.
        interpret: whether Pallas's interpreter runs the kernel.
        transposed: trans_a or trans_b of pallas.triton.dot.
    """
    exact = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return pt.dot(a.astype(b.dtype), b, precision=exact if b.dtype == jnp.float32 else None, **transposed)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a + b, added in float32, in a's dtype."""
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def matrices(array: jax.Array | None) -> jax.Array | None:
    """Return an array [*, n, k] reshaped to [b, n, k]."""
    return None if array is None else array.reshape(-1, *array.shape[-2:])


def multiprocessors() -> int:
    """Return the multiprocessors of a GPU of this run, the fewest of any: all processes must trace the same program.

    They decide how long sums are split, so products may differ in their last bits from one kind of GPU to another. What
    `decode` returns does not, nor do errors. ABSENT counts if a program is compiled where no GPU is, or Pallas's
    interpreter runs it.
    """
    counts = [getattr(device, "core_count", None) for device in jax.devices() if device.platform == "gpu"]
    return min((count for count in counts if count), default=ABSENT)


def split(programs: int, tiles: int, target: int, most: int) -> tuple[int, int]:
    """Split the tiles of each program into parts, each of which becomes a program.

    Args:
        programs: number of programs before the split.
        tiles: number of tiles of each program.
        target: number of programs to aim at in all.
        most: largest number of parts.

    Returns:
        The number of parts, and the tiles of a part.
    """
    chunk = pl.cdiv(tiles, max(1, min(target // programs, most)))
    return pl.cdiv(tiles, chunk), chunk


def most_parts(length: int, dtype: DTypeLike, rank: int) -> int:
    """Return the largest number of parts of a sum over `length` numbers.

    The partial sums have at most half the bytes of the matrix.

    Args:
        length: number of elements to sum up.
        dtype: dtype of the matrix.
        rank: number of columns of the product.
    """
    return length * jnp.dtype(dtype).itemsize // (8 * rank)


def call(
    kernel: Callable[..., None],
    name: str,
    launch: tuple[int, int],
    grid: tuple[int, ...],
    ins: tuple,
    outs: tuple,
    **keywords: Any,
) -> Sequence[Result]:
    """Run a kernel over a grid of programs, each of which gets the whole arrays of its batch index.

    Args:
        kernel: function of the references to `ins` and `outs`.
        name: name of the kernel in profiles.
        launch: warps of a program, and tiles in flight.
        grid: numbers of (blocks, parts, batch).
        ins: arrays [b, ...], flags [1], or None.
        outs: shapes [b, n, k], of partial sums [b, parts, n, k], of which a program gets its part, or None.
        keywords: further arguments of pallas_call.
    """

    def spec(array: jax.Array | jax.ShapeDtypeStruct | None, own: bool) -> pl.BlockSpec | None:
        if array is None:
            return None
        shape = array.shape
        if len(shape) == 1:
            return pl.BlockSpec(shape, lambda i, j, b: (0,))
        if own and len(shape) == 4:
            return pl.BlockSpec((None, None, *shape[2:]), lambda i, j, b: (b, j, 0, 0))
        return pl.BlockSpec((None, *shape[1:]), lambda i, j, b: (b, *[0] * (len(shape) - 1)))

    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=tuple(spec(array, own=False) for array in ins),
        out_specs=tuple(spec(array, own=True) for array in outs),
        out_shape=outs,
        compiler_params=pt.CompilerParams(num_warps=launch[0], num_stages=launch[1]),
        **keywords,
    )(*ins)
