"""The passes of kernels.py as kernels for Pallas's Mosaic GPU backend: bfloat16 matrices and factors.

The two kernels are those of triton.py, written for the matrix units of Hopper (mosaic_wgmma.py) and of
Blackwell (mosaic_tcgen05.py). Tiles come by TMA, some at a time, and a program goes over them. Long sums are split
among programs as there.

They need jax 0.11.2, and whole tiles, as `fits` tells; kernels.py gives other matrices to triton.py. The caller of a
kernel may run it in Pallas's interpreter, by `mg.force_gpu_interpret_mode`.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mg
from jax.typing import DTypeLike

from compress.gpu import mosaic_tcgen05, mosaic_wgmma
from compress.gpu.tiles import Index, Operands, Ref, Result, RowRefs, matrices, most_parts, split
from compress.gpu.tma import TILE, Units

UNITS = {"wgmma": mosaic_wgmma.UNITS, "tcgen05": mosaic_tcgen05.UNITS}
AVAILABLE = jax.__version_info__ >= (0, 11, 2)  # earlier versions do not let a kernel update its operands


def fits(units: Units, size: tuple[int, int], rank: int, *dtypes: DTypeLike) -> bool:
    """Return whether the kernels take matrices, factors of a rank, and their dtypes.

    Args:
        units: one of UNITS.
        size: rows and columns of the matrices.
        rank: columns of the factors.
        dtypes: dtypes of the matrices and of the factors.
    """
    whole = all(length % max(units.rows, TILE) == 0 for length in size)
    return whole and rank in (16, 32, 64, 128) and all(dtype == jnp.bfloat16 for dtype in dtypes)


def _launch(
    program: Callable[..., None], name: str, grid: tuple[int, int, int], ins: tuple, outs: tuple
) -> list[Result]:
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
    units: Units,
    name: str,
    size: tuple[int, ...],
    operands: Operands,
    active: jax.Array | bool = True,
) -> tuple[Result, Result]:
    """Run a pass of the row kernel over matrices; the further arguments are those of triton.py's.

    Returns:
        x + (m - p w^T) [*, n, k], or None if neither m nor p is given.
        Partial sums of its product with q [*, parts, n, r], float32, or None without q.
    """
    *lead, n, k = size
    x, m, p, w, q = map(matrices, operands)
    batch, across, along = math.prod(lead), n // units.rows, k // TILE
    programs = units.target(next(factor for factor in (p, q) if factor is not None).shape[-1])
    target, most = (2 * programs, along) if q is None else (programs, most_parts(k, jnp.bfloat16, q.shape[-1]))
    parts, chunk = split(across * batch, along, target, most)
    flag = None if active is True else jnp.asarray(active, bool).reshape(1)
    held = None if m is None else jax.new_ref(m)  # the result takes its memory
    out = jax.ShapeDtypeStruct((batch, n, k), jnp.bfloat16) if m is None and p is not None else None
    y = None if q is None else jax.ShapeDtypeStruct((batch, parts, n, q.shape[-1]), jnp.float32)

    def program(b: Index, row: Index, part: Index, flag: Ref | None, *refs: Ref | None) -> None:
        *whole, y = refs
        x, m, p, w, q, out = (ref if ref is None else ref.at[b] for ref in whole)
        first = part * chunk
        trips = chunk if along % chunk == 0 else jnp.minimum(chunk, along - first)
        if flag is not None:
            trips = trips * flag[0].astype(jnp.int32)
        own = RowRefs(flag, x, m, p, w, q, m if out is None else out, None if y is None else y.at[b, part])
        units.row_program(own, row, first, trips)

    found, sums = _launch(program, name, (batch, across, parts), (flag, x, held, p, w, q), (out, y))
    formed = found if held is None else jax.freeze(held)
    return None if formed is None else formed.reshape(size), None if y is None else sums.reshape(*lead, *y.shape[1:])


def decode(units: Units, p: jax.Array, w: jax.Array) -> jax.Array:
    """Return p w^T [*, n, k], as `kernels.decode` does, by one of UNITS."""
    return _rows(units, "lowrank_decode", (*p.shape[:-1], w.shape[-2]), Operands(p=p, w=w))[0]


def residual(units: Units, m: jax.Array, p: jax.Array, w: jax.Array, active: jax.Array | bool = True) -> jax.Array:
    """Return m - p w^T, as `kernels.residual` does, in the memory of m, by one of UNITS."""
    return _rows(units, "lowrank_residual", m.shape, Operands(m=m, p=p, w=w), active)[0]


def project(
    units: Units,
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
        units: one of UNITS.
        x: message [*, n, k].
        q: right factor [*, k, r].
        m: error [*, n, k], or the previous message if p and w are given; None without an error.
        p: left factor [*, n, r] of the previous message; the error is then m - p w^T.
        w: right factor [*, k, r] of the previous message.
        active: if it is False, the result is m, bit for bit, and its product is meaningless.
    """
    out, y = _rows(units, "lowrank_project", x.shape, Operands(x, m, p, w, q), active)
    return x if out is None else out, y


def backproject(units: Units, m: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return partial sums of m^T p [*, parts, k, r] and p^T p [*, parts, r or more, r], see `kernels.backproject`.

    Further programs of the same kernel have p in place of m, whose tiles have zeros beyond p's columns.
    """
    *lead, n, k = m.shape
    batch, rank, across, along = math.prod(lead), p.shape[-1], k // units.rows, n // TILE
    own = pl.cdiv(rank, units.rows)
    parts, chunk = split(across * batch, along, units.target(rank), most_parts(n, m.dtype, rank))

    def program(b: Index, tile: Index, part: Index, m: Ref, p: Ref, s: Ref, g: Ref) -> None:
        first = part * chunk
        trips = chunk if along % chunk == 0 else jnp.minimum(chunk, along - first)
        run = functools.partial(units.column_program, first=first, trips=trips)
        pl.when(tile < across)(lambda: run(m.at[b], p.at[b], s.at[b, part], column=tile))
        pl.when(tile >= across)(lambda: run(p.at[b], p.at[b], g.at[b, part], column=tile - across))

    s, g = (jax.ShapeDtypeStruct((batch, parts, rows, rank), jnp.float32) for rows in (k, own * units.rows))
    s, g = _launch(program, "lowrank_backproject", (batch, across + own, parts), (matrices(m), matrices(p)), (s, g))
    return s.reshape(*lead, *s.shape[1:]), g.reshape(*lead, *g.shape[1:])
