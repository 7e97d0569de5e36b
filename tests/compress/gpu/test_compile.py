"""The kernels compiled for GPUs without having one; skipped if jax's CUDA plugin is not installed."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from compress import kernels
from compress.lowrank import LowRank
from experiments.bench.kernels import kernel_times
from tests.compress.gpu.compiled import compiled, encode, gpu, kernel_calls, launches


@pytest.fixture(scope="module")
def mesh():
    return gpu("h200")


def copies(program) -> list[int]:
    """Return the number of elements of all copied arrays."""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", program.as_text())
    return [int(np.prod([int(n) for n in shape.split(",")])) for shape in found]


def passes(x, m, p, w, q, active):
    """Return the results of every form of every pass; those that replace the donated states m come first, in order."""
    chosen = {"implementation": "triton"}
    return (
        kernels.project(x, q, kernels.Explicit(m[0]), active, **chosen),
        kernels.project(x, q, kernels.Lazy(m[1], p, w), active, **chosen),
        kernels.residual(m[2], p, w, active, **chosen),
        kernels.project(x, q, **chosen)[1],
        kernels.backproject(x, p, **chosen),
        kernels.decode(p, w, x.dtype, **chosen),
    )


@pytest.mark.parametrize(
    ("lead", "n", "k", "rank", "dtype", "thin"),
    [
        ((), 4096, 3072, 16, "bfloat16", "bfloat16"),
        pytest.param((), 4096, 12288, 128, "bfloat16", "bfloat16", marks=pytest.mark.slow),
        ((), 3072, 12288, 128, "float32", "float32"),
        pytest.param((4,), 768, 3072, 64, "float32", "float32", marks=pytest.mark.slow),
        pytest.param((), 1024, 1024, 128, "float32", "bfloat16", marks=pytest.mark.slow),
        ((), 1024, 1024, 128, "bfloat16", "float32"),
        ((3,), 1000, 333, 20, "bfloat16", "bfloat16"),
        pytest.param((), 77, 1001, 4, "float32", "float32", marks=pytest.mark.slow),
    ],
)
def test_all_passes_compile_and_copy_no_matrix(mesh, lead, n, k, rank, dtype, thin):
    x = jax.ShapeDtypeStruct((*lead, n, k), dtype)
    p = jax.ShapeDtypeStruct((*lead, n, rank), thin)
    w = jax.ShapeDtypeStruct((*lead, k, rank), thin)
    program = compiled(mesh, passes, x, (x, x, x), p, w, w, jax.ShapeDtypeStruct((), bool), donate=(1,))
    assert kernel_calls(program) == 6
    assert program.memory_analysis().alias_size_in_bytes >= 3 * x.size * x.dtype.itemsize
    assert all(size < x.size for size in copies(program))


@pytest.mark.parametrize("error", ["lazy", "explicit"])
def test_encoding_takes_no_memory_but_for_thin_factors(mesh, error):
    n, k = 4096, 3072
    program = encode(mesh, LowRank(16, error=error, implementation="triton"), n, k)
    assert kernel_calls(program) == (7 if error == "explicit" else 6)
    assert program.memory_analysis().temp_size_in_bytes < n * k * 2 / 5
    assert all(size < n * k for size in copies(program))


@pytest.mark.parametrize(
    "kind", ["h100", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("a100-80gb", "b200"))]
)
def test_encoding_is_six_launches(kind):
    """They are the two passes and four kernels of thin algebra. XLA makes 20 and more of it, with library calls."""
    mesh = gpu(kind)
    for rank in (16, 64) if kind == "a100-80gb" else (4, 16, 128):
        for error in ("lazy", "none"):
            program = encode(mesh, LowRank(rank, error=error, implementation="triton"))
            assert launches(program) == kernel_calls(program) == 6, (rank, error)
    text = encode(mesh, LowRank(16)).as_text()
    assert launches(encode(mesh, LowRank(16))) > 18
    assert "cusolver" in text and "triangularSolve" in text


@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "triton"])
def test_the_benchmark_times_its_work_in_every_iteration(mesh, implementation):
    """All the work is inside the loop, and no iteration copies a matrix."""
    for case in (
        kernel_times.Matrices("message", 1, 1024, 512, 16),
        kernel_times.Matrices("gradient", 2, 512, 1024, 16),
    ):
        for work in (kernel_times.compression, kernel_times.decompression):
            _, step, carry, inputs, _ = work(case, implementation)
            program = compiled(mesh, partial(kernel_times._loop, step, 5), carry, inputs, donate=(0,))
            loop, outside = program.as_text().split("\nENTRY")
            products = re.compile("dot_general|__gpu.xla.gpu.triton")
            assert products.search(loop) and not products.search(outside)
            assert all(size < case.n * case.k for size in copies(program))
