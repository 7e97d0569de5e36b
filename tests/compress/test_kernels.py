"""The passes of every implementation against numpy in float64, their kernels' names, and inactive passes."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from compress import kernels
from compress.gpu import tiles
from compress.kernels import Explicit, Lazy

# Leading dims, n, k, rank, dtype of the matrices, dtype of the thin factors.
CASES = {
    "even": ((), 64, 256, 16, "bfloat16", "bfloat16"),
    "odd edges": ((), 70, 300, 4, "bfloat16", "bfloat16"),
    "parts of sums of 3 and 2 tiles": ((), 320, 320, 40, "bfloat16", "bfloat16"),
    "batch, odd rank": ((2, 2), 33, 65, 20, "bfloat16", "bfloat16"),
    "float32, large rank": ((), 129, 70, 128, "float32", "float32"),
    "float32 matrix, bfloat16 factors": ((), 70, 129, 16, "float32", "bfloat16"),
    "bfloat16 matrix, float32 factors": ((), 70, 129, 16, "bfloat16", "float32"),
}
EPS = {"bfloat16": 2.0**-7, "float32": 2.0**-23}


def operands(lead, n, k, rank, dtype, thin):
    """Return x, m [*, n, k], p [*, n, r] and w, q [*, k, r], of different scales."""
    rng = np.random.default_rng(0)
    shapes = [(n, k, dtype, 1), (n, k, dtype, 3), (n, rank, thin, 1), (k, rank, thin, 0.3), (k, rank, thin, 1)]
    return [jnp.asarray(scale * rng.standard_normal((*lead, a, b)), dtype) for a, b, dtype, scale in shapes]


def passes(implementation, x, m, p, w, q, *active):
    """Return the results of all passes, computed in one program."""
    chosen = {"implementation": implementation}
    return {
        "none": kernels.project(x, q, None, *active, **chosen),
        "explicit": kernels.project(x, q, Explicit(m), *active, **chosen),
        "lazy": kernels.project(x, q, Lazy(m, p, w), *active, **chosen),
        "backproject": kernels.backproject(m, p, **chosen),
        "decode": kernels.decode(p, w, x.dtype, **chosen),
        "residual": kernels.residual(m, p, w, *active, **chosen),
    }


def lowered(implementation, arrays):
    return jax.jit(functools.partial(passes, implementation)).lower(*arrays)


def exact(array):
    return np.asarray(array, np.float64)


def assert_close(array, reference, scale, eps):
    """Assert that |array - reference| <= eps scale elementwise, which no NaN fulfils."""
    error = np.abs(exact(array) - reference) / np.maximum(scale, 1e-30)
    assert error.max() <= eps, error.max()


def assert_product(array, a, b, rounding="float32"):
    """Assert that array is a b up to the errors of float32 sums and of `rounding`, which are relative to |a| |b|."""
    assert_close(array, a @ b, np.abs(a) @ np.abs(b), 16 * EPS["float32"] + EPS[rounding] / 2)


def bits(array):
    return np.asarray(array).view(f"uint{8 * array.dtype.itemsize}")


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("case", CASES)
def test_against_float64(case, implementation):
    lead, n, k, rank, dtype, thin = CASES[case]
    arrays = operands(lead, n, k, rank, dtype, thin)
    x, m, *_ = arrays
    got = lowered(implementation, arrays).compile()(*arrays)
    ex, em, ep, ew, eq = map(exact, arrays)

    assert got["decode"].dtype == got["residual"].dtype == got["lazy"][0].dtype == x.dtype
    assert_product(got["decode"], ep, ew.mT, rounding=dtype)
    # The receiver decodes exactly the bits that the sender subtracts.
    assert (bits(got["residual"]) == bits(kernels._add(m, -got["decode"]))).all()
    assert (bits(got["none"][0]) == bits(x)).all()
    for form, error, magnitude in (
        ("explicit", em, np.abs(em)),
        ("lazy", em - ep @ ew.mT, np.abs(em) + np.abs(ep) @ np.abs(ew.mT)),
    ):
        assert_close(got[form][0], ex + error, np.abs(ex) + magnitude, 4 * EPS["float32"] + 1.5 * EPS[dtype])
    for form in ("none", "explicit", "lazy"):
        formed, product = got[form]
        assert product.dtype == jnp.float32 and product.shape == (*lead, n, rank)
        assert_product(product, exact(formed.astype(thin)), eq)
    s, g = got["backproject"]
    assert s.dtype == g.dtype == jnp.float32 and g.shape == (*lead, rank, rank)
    assert_product(s, exact(m.astype(thin)).mT, ep)
    assert_product(g, ep.mT, ep)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_lazy_error_is_the_explicit_one(implementation):
    x, m, p, w, q = operands((), 70, 300, 4, "bfloat16", "bfloat16")
    e = kernels.residual(m, p, w, implementation=implementation)
    explicit = kernels.project(x, q, Explicit(e), implementation=implementation)
    lazy = kernels.project(x, q, Lazy(m, p, w), implementation=implementation)
    np.testing.assert_array_equal(bits(lazy[0]), bits(explicit[0]))
    np.testing.assert_array_equal(lazy[1], explicit[1])


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_inactive_passes_leave_the_state(dtype, implementation):
    x, m, p, w, q = operands((), 70, 129, 16, dtype, dtype)
    x, m = jnp.full_like(x, jnp.nan), m.at[3, 5].set(-0.0).at[7, 11].set(jnp.inf)
    run = jax.jit(passes, static_argnums=0)
    for active in (False, True):
        got = run(implementation, x, m, p, w, q, jnp.bool_(active))
        for after in (got["explicit"][0], got["lazy"][0], got["residual"]):
            assert (bits(after) == bits(m)).all() != active


def test_kernels_under_vmap_each_with_its_own_flag():
    """On the virtual mesh one device runs the programs of many in this way."""
    arrays = [*operands((2,), 33, 65, 4, "float32", "float32"), jnp.array([True, False])]
    many = jax.jit(jax.vmap(lambda *args: passes("interpret", *args)))(*arrays)
    one = jax.jit(lambda *args: passes("interpret", *args))
    for i in range(2):
        alone = one(*(array[i] for array in arrays))
        for name, outputs in alone.items():
            for a, b in zip(jax.tree.leaves(many[name]), jax.tree.leaves(outputs)):
                np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-6, err_msg=name)


def lowered_for_cuda(function, *arrays):
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_each_pass_is_one_named_kernel_that_updates_its_state_in_place():
    text = lowered_for_cuda(lambda *a: passes("triton", *a), *operands(*CASES["even"]), jnp.bool_(True))
    calls = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    found = sorted((re.search(r'[{ ]name = "(\w+)"', line)[1], "output_operand_alias<" in line) for line in calls)
    assert found == [
        ("lowrank_backproject", False),
        ("lowrank_decode", False),
        ("lowrank_project", False),
        ("lowrank_project", True),
        ("lowrank_project", True),
        ("lowrank_residual", True),
    ]
    assert "triton" not in lowered_for_cuda(lambda *a: passes("xla", *a), *operands(*CASES["even"]))


def gpus(*counts):
    """Return devices of a run as jax lists them, by their multiprocessors."""
    return lambda: [types.SimpleNamespace(platform="gpu", core_count=count) for count in counts]


def test_multiprocessors_are_those_of_the_smallest_gpu(monkeypatch):
    """Processes with different GPUs must trace one program. Without a GPU the number is given."""
    assert tiles.multiprocessors() == 132
    for counts, least in (((108,), 108), ((148, 108, 132), 108), ((None, 108), 108), ((None,), 132)):
        monkeypatch.setattr(jax, "devices", gpus(*counts))
        assert tiles.multiprocessors() == least


@pytest.mark.parametrize(
    "case", ["parts of sums of 3 and 2 tiles", pytest.param("float32, large rank", marks=pytest.mark.slow)]
)
def test_results_are_those_of_any_number_of_multiprocessors(monkeypatch, case):
    """What is decoded and what is left are the same bits; sums may be split elsewhere."""
    arrays, programs = operands(*CASES[case]), []
    for count in (1, 2, 132):
        with monkeypatch.context() as patched:
            patched.setattr(jax, "devices", gpus(count))
            programs.append(lowered("interpret", arrays))
    assert len({program.as_text() for program in programs}) == len(programs)  # no program is compared with itself
    found = [program.compile()(*arrays) for program in programs]
    x, m, p, _, q = map(exact, arrays)
    for got in found:
        for first, other in [(found[0][name], got[name]) for name in ("decode", "residual")] + [
            (found[0][form][0], got[form][0]) for form in ("none", "explicit", "lazy")
        ]:
            np.testing.assert_array_equal(bits(first), bits(other))
        assert_product(got["none"][1], x.astype(arrays[4].dtype).astype(float), q)
        assert_product(got["backproject"][0], m.astype(arrays[2].dtype).astype(float).mT, p)


@pytest.mark.parametrize("rank", [16, 128])
@pytest.mark.parametrize("columns", [3072, 12288])
@pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.slow) for n in (108, 132)), 148])
def test_large_messages_fill_the_multiprocessors(monkeypatch, columns, rank, count):
    """The programs fill three quarters of them, with partial sums that are small beside the matrix."""
    monkeypatch.setattr(jax, "devices", gpus(count))
    shapes = [(4096, columns), (4096, columns), (4096, rank), (columns, rank), (columns, rank)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = lowered_for_cuda(lambda *a: passes("triton", *a), *arrays)
    grids = re.findall(r"grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+)", text)
    assert len(grids) == 6
    assert min(int(x) * int(y) * int(z) for x, y, z in grids) >= 0.75 * count
    partial = re.findall(r"tensor<1x(\d+)x(\d+)x(\d+)xf32>", text)
    assert max(4 * int(a) * int(b) * int(c) for a, b, c in partial) <= 4096 * columns * 2 / 2


def test_refuses_what_it_cannot_do():
    p = jnp.zeros((8, 129), jnp.bfloat16)
    with pytest.raises(ValueError, match="ranks up to 128, got 129; implementation='xla'"):
        kernels.decode(p, p, jnp.bfloat16, implementation="interpret")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'; known are xla, triton, interpret"):
        kernels.decode(p, p, jnp.bfloat16, implementation="cuda")
