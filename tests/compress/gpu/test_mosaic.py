"""The Mosaic GPU kernels against numpy in float64 in Pallas's interpreter, and compiled for GPUs that are not there."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as mg

from compress import kernels
from compress.gpu import mosaic
from compress.kernels import Explicit, Lazy
from compress.lowrank import LowRank
from tests.compress.gpu.compiled import alone, compiled, encode, gpu, kernel_calls, launches
from tests.compress.test_kernels import EPS, assert_close, assert_product, bits, exact, operands, passes

pytestmark = pytest.mark.skipif(not mosaic.AVAILABLE, reason="the kernels need jax 0.12")

# Leading dims, n, k in rows of the units' tiles, rank.
CASES = {
    "one tile": ((), 1, 1, 16),
    "parts of sums of several tiles": ((), 5, 7, 32),
    "batch": ((2,), 2, 3, 64),
    "large rank": ((), 1, 5, 128),
}


@contextlib.contextmanager
def interpreter():
    with mg.force_gpu_interpret_mode(mg.InterpretGPUParams()):
        yield


def rows(units):
    return mosaic.UNITS[units].rows


@pytest.mark.parametrize("units", mosaic.UNITS)
@pytest.mark.parametrize("case", CASES)
def test_against_float64(case, units):
    lead, n, k, rank = CASES[case]
    n, k = n * rows(units), k * rows(units)
    arrays = operands(lead, n, k, rank, "bfloat16", "bfloat16")
    x, m, *_ = arrays
    ex, em, ep, ew, eq = map(exact, arrays)
    with interpreter():
        got = passes(units, *arrays)
    assert_product(got["decode"], ep, ew.mT, rounding="bfloat16")
    # The receiver decodes exactly the bits that the sender subtracts.
    assert (bits(got["residual"]) == bits(kernels._add(m, -got["decode"]))).all()
    assert (bits(got["lazy"][0]) == bits(kernels._add(x, got["residual"]))).all()
    for form, error, magnitude in (
        ("explicit", em, np.abs(em)),
        ("lazy", em - ep @ ew.mT, np.abs(em) + np.abs(ep) @ np.abs(ew.mT)),
    ):
        scale = np.abs(ex) + magnitude
        assert_close(got[form][0], ex + error, scale, 4 * EPS["float32"] + 1.5 * EPS["bfloat16"])
    for form in ("none", "explicit", "lazy"):
        formed, product = got[form]
        assert product.dtype == jnp.float32 and product.shape == (*lead, n, rank)
        assert_product(product, exact(formed), eq)
    s, g = got["backproject"]
    assert g.shape == (*lead, rank, rank)
    assert_product(s, em.mT, ep)
    assert_product(g, ep.mT, ep)


@pytest.mark.parametrize("units", ["wgmma", pytest.param("tcgen05", marks=pytest.mark.slow)])
def test_inactive_passes_leave_the_state(units):
    x, m, p, w, q = operands((), rows(units), 3 * rows(units), 16, "bfloat16", "bfloat16")
    x, m = jnp.full_like(x, jnp.nan), m.at[3, 5].set(-0.0).at[7, 11].set(jnp.inf)
    for active in (False, True):
        with interpreter():
            got = passes(units, x, m, p, w, q, jnp.bool_(active))
        for after in (got["explicit"][0], got["lazy"][0], got["residual"]):
            assert (bits(after) == bits(m)).all() != active


@pytest.mark.parametrize("units", ["wgmma", pytest.param("tcgen05", marks=pytest.mark.slow)])
def test_kernels_under_vmap_each_with_its_own_flag(units):
    arrays = [*operands((2,), rows(units), 2 * rows(units), 16, "bfloat16", "bfloat16"), jnp.array([True, False])]
    with interpreter():
        many = jax.vmap(lambda *args: passes(units, *args))(*arrays)
        for i in range(2):
            alone = passes(units, *(array[i] for array in arrays))
            for name, outputs in alone.items():
                for a, b in zip(jax.tree.leaves(many[name]), jax.tree.leaves(outputs)):
                    np.testing.assert_allclose(exact(a[i]), exact(b), rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("units", mosaic.UNITS)
def test_other_matrices_go_to_the_triton_kernels(units):
    def fits(n, k, rank, *dtypes):
        return mosaic.fits(mosaic.UNITS[units], (n, k), rank, *map(jnp.dtype, dtypes))

    r = rows(units)
    assert fits(r, 2 * r, 16, "bfloat16", "bfloat16")
    for n, k, rank, dtype in (
        (r + 1, 2 * r, 16, "bfloat16"),
        (r, r + r // 2, 16, "bfloat16"),
        (r, 2 * r, 8, "bfloat16"),
        (r, 2 * r, 48, "bfloat16"),
        (r, 2 * r, 16, "float32"),
    ):
        assert not fits(n, k, rank, "bfloat16", dtype)


def each_pass(units, x, m, p, w, q, active):
    """Return the results of every form of every pass; those that replace the donated states m come first, in order."""
    chosen = {"implementation": units}
    return (
        kernels.project(x, q, Explicit(m[0]), active, **chosen),
        kernels.project(x, q, Lazy(m[1], p, w), active, **chosen),
        kernels.residual(m[2], p, w, active, **chosen),
        kernels.project(x, q, **chosen)[1],
        kernels.backproject(x, p, **chosen),
        kernels.decode(p, w, x.dtype, **chosen),
    )


# What shows in a kernel's PTX that it uses the matrix units of its GPU.
SIGNS = {"wgmma": ("sm_90a", "wgmma.mma_async"), "tcgen05": ("sm_100a", "tcgen05.mma")}


def compile_passes(kind, units, rank):
    """Return the bytes of a matrix, and those of the program's results that take the memory of arguments."""
    n, k = 4096, 3072
    x, p, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((n, k), (n, rank), (k, rank)))
    run, flag = functools.partial(each_pass, units), jax.ShapeDtypeStruct((), bool)
    program = compiled(gpu(kind), run, x, (x, x, x), p, w, w, flag, donate=(1,))
    return 2 * x.size, program.memory_analysis().alias_size_in_bytes


@pytest.mark.parametrize("rank", [16, 128])
@pytest.mark.parametrize(
    ("kind", "units"), [("h100", "wgmma"), pytest.param("h200", "wgmma", marks=pytest.mark.slow), ("b200", "tcgen05")]
)
def test_all_passes_compile_for_their_units_with_tma_and_spill_nothing(monkeypatch, tmp_path, kind, units, rank):
    gpu(kind)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    size, aliased = alone(compile_passes, kind, units, rank)
    assert aliased >= 3 * size
    said = {path.stem: path.read_text(errors="replace") for path in tmp_path.glob("*.ptxas")}
    assert len(said) == 6
    architecture, product = SIGNS[units]
    for name, text in said.items():
        assert architecture in text and re.search(r"\b0 bytes spill stores, 0 bytes spill loads", text), (name, text)
        ptx = (tmp_path / f"{name}.ptx").read_text()
        assert product in ptx and "cp.async.bulk.tensor" in ptx
        assert not re.search(r"\b(atom|red)\.", ptx)


def counts(kind, rank, error, implementation):
    program = encode(gpu(kind), LowRank(rank, error=error, implementation=implementation))
    return launches(program), kernel_calls(program)


@pytest.mark.parametrize(
    ("kind", "units"), [("h100", "wgmma"), pytest.param("b200", "tcgen05", marks=pytest.mark.slow)]
)
def test_encoding_is_six_launches(kind, units):
    """The passes are theirs, and the thin algebra's four kernels are on the Triton backend."""
    gpu(kind)
    for rank, error in ((4, "lazy"), (16, "lazy"), (128, "none")):
        assert alone(counts, kind, rank, error, units) == (6, 6 if rank == 4 else 4)
