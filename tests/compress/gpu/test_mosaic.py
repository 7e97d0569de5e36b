"""The Mosaic GPU kernels against numpy in float64 in Pallas's interpreter, and compiled for GPUs that are not there."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as mg

from compress import kernels
from compress.gpu import mosaic
from compress.kernels import Explicit, Lazy
from tests.compress.gpu.compiled import compiled, gpu
from tests.compress.test_kernels import EPS, assert_close, assert_product, bits, exact, operands, passes

pytestmark = pytest.mark.skipif(not mosaic.AVAILABLE, reason="the kernels need jax 0.12")

# Leading dims, n, k, rank.
CASES = {
    "one tile": ((), 64, 64, 16),
    "parts of sums of several tiles": ((), 320, 1088, 32),
    "batch": ((2,), 128, 192, 64),
    "large rank": ((), 64, 320, 128),
}


@contextlib.contextmanager
def interpreter():
    with mg.force_gpu_interpret_mode(mg.InterpretGPUParams()):
        yield


@pytest.mark.parametrize("case", CASES)
def test_against_float64(case):
    lead, n, k, rank = CASES[case]
    arrays = operands(lead, n, k, rank, "bfloat16", "bfloat16")
    x, m, *_ = arrays
    ex, em, ep, ew, eq = map(exact, arrays)
    with interpreter():
        got = passes("mosaic", *arrays)
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


def test_inactive_passes_leave_the_state():
    x, m, p, w, q = operands((), 64, 192, 16, "bfloat16", "bfloat16")
    x, m = jnp.full_like(x, jnp.nan), m.at[3, 5].set(-0.0).at[7, 11].set(jnp.inf)
    for active in (False, True):
        with interpreter():
            got = passes("mosaic", x, m, p, w, q, jnp.bool_(active))
        for after in (got["explicit"][0], got["lazy"][0], got["residual"]):
            assert (bits(after) == bits(m)).all() != active


def test_kernels_under_vmap_each_with_its_own_flag():
    arrays = [*operands((2,), 64, 128, 16, "bfloat16", "bfloat16"), jnp.array([True, False])]
    with interpreter():
        many = jax.vmap(lambda *args: passes("mosaic", *args))(*arrays)
        for i in range(2):
            alone = passes("mosaic", *(array[i] for array in arrays))
            for name, outputs in alone.items():
                for a, b in zip(jax.tree.leaves(many[name]), jax.tree.leaves(outputs)):
                    np.testing.assert_allclose(exact(a[i]), exact(b), rtol=1e-6, atol=1e-6, err_msg=name)


def test_other_matrices_go_to_the_triton_kernels():
    assert mosaic.fits(64, 128, 16, jnp.bfloat16, jnp.dtype("bfloat16"))
    for n, k, rank, dtype in ((65, 128, 16, "bfloat16"), (64, 96, 16, "bfloat16"), (64, 128, 8, "bfloat16"),
                              (64, 128, 48, "bfloat16"), (64, 128, 16, "float32")):  # fmt: skip
        assert not mosaic.fits(n, k, rank, jnp.bfloat16, jnp.dtype(dtype))


def each_pass(x, m, p, w, q, active):
    """Return the results of every form of every pass; those that replace the donated states m come first, in order."""
    chosen = {"implementation": "mosaic"}
    return (
        kernels.project(x, q, Explicit(m[0]), active, **chosen),
        kernels.project(x, q, Lazy(m[1], p, w), active, **chosen),
        kernels.residual(m[2], p, w, active, **chosen),
        kernels.project(x, q, **chosen)[1],
        kernels.backproject(x, p, **chosen),
        kernels.decode(p, w, x.dtype, **chosen),
    )


@pytest.mark.parametrize("rank", [16, 128])
@pytest.mark.parametrize("kind", ["h100", "h200"])
def test_all_passes_compile_with_wgmma_and_tma_and_spill_nothing(monkeypatch, tmp_path, kind, rank):
    mesh = gpu(kind)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    # A kernel that this process has compiled before is not compiled again, so nobody else has these sizes.
    n, k = 4096, {"h100": 3136, "h200": 3200}[kind]
    x, p, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((n, k), (n, rank), (k, rank)))
    program = compiled(mesh, each_pass, x, (x, x, x), p, w, w, jax.ShapeDtypeStruct((), bool), donate=(1,))
    assert program.memory_analysis().alias_size_in_bytes >= 3 * x.size * 2
    said = {path.stem: path.read_text(errors="replace") for path in tmp_path.glob("*.ptxas")}
    assert len(said) == 6
    for name, text in said.items():
        assert "sm_90a" in text and re.search(r"\b0 bytes spill stores, 0 bytes spill loads", text), (name, text)
        ptx = (tmp_path / f"{name}.ptx").read_text()
        assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
        assert not re.search(r"\b(atom|red)\.", ptx)
