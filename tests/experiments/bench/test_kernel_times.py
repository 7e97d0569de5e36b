"""The benchmark of the kernels as far as it needs no GPU: its operations, its counts and its messages."""

import csv
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.kernels import kernel_times
from experiments.bench.kernels.kernel_times import Matrices, Timing

MESSAGE, GRADIENTS = Matrices("message", 1, 24, 16, 4), Matrices("gradient", 2, 16, 24, 4)


def test_a_table_of_all_operations_and_implementations(tmp_path):
    rows = list(kernel_times.measure([MESSAGE, GRADIENTS], ("gram_schmidt", "xla"), 1e9, repeats=1, iterations=2))
    assert [row[:5] for row in rows] == [
        ("encode", "24x16", "bfloat16", 4, "gram_schmidt"),
        ("encode", "24x16", "bfloat16", 4, "xla"),
        ("decode", "24x16", "bfloat16", 4, "xla"),
        ("reduce", "2x16x24", "float32", 4, "gram_schmidt"),
        ("reduce", "2x16x24", "float32", 4, "xla"),
        ("decode", "2x16x24", "float32", 4, "xla"),
    ]
    # bfloat16: g, old m, m, m again; float32: g, e, m, m again, m again, e.
    assert [row.bytes for row in rows] == [24 * 16 * n for n in (8, 8, 2, 2 * 24, 2 * 24, 2 * 4)]
    for row in rows:
        assert row.microseconds > 0
        assert row.share == pytest.approx(row.bytes / (row.microseconds * 1e-6) / 1e9)
        assert len(kernel_times.table_row(row)) == len(kernel_times.table_row())

    kernel_times.write_csv(str(tmp_path / "bench.csv"), rows, 1e9)
    with open(tmp_path / "bench.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["implementation"] for line in read] == [row.implementation for row in rows]
    assert float(read[0]["microseconds"]) == rows[0].microseconds and float(read[0]["copy_bandwidth"]) == 1e9


def test_the_triton_form_is_measurable():
    """The step that would be compiled for a GPU can be traced with its state and its inputs."""
    for work in (kernel_times.compression, kernel_times.decompression):
        for case in (MESSAGE, GRADIENTS):
            _, step, carry, inputs, _ = work(case, "triton")
            after = jax.eval_shape(partial(kernel_times._loop, step, 3), carry, inputs)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
                lambda x: (x.shape, x.dtype), carry
            )


def test_ratios_compare_triton_with_the_others():
    rows = [
        Timing("encode", "8x8", "bfloat16", 4, name, microseconds, 1, 1.0)
        for name, microseconds in (("gram_schmidt", 90.0), ("xla", 45.0), ("triton", 30.0))
    ]
    [line] = kernel_times.ratios([*rows, Timing("decode", "8x8", "bfloat16", 4, "xla", 1.0, 1, 1.0)])
    assert line == (
        "encode 8x8 bfloat16 rank 4: triton is 3.00 times as fast as gram_schmidt, 1.50 times as fast as xla"
    )


def test_gram_schmidt_orthonormalises():
    p = np.random.default_rng(0).standard_normal((32, 5)).astype(np.float32)
    q = np.asarray(kernel_times.gram_schmidt(jnp.asarray(p)), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(5), atol=1e-6)
    # The columns are QR's, except for their signs.
    reference, triangle = np.linalg.qr(p.astype(np.float64))
    np.testing.assert_allclose(q, reference * np.sign(np.diag(triangle)), atol=1e-5)


def test_the_baseline_compresses():
    """If one matrix is sent again and again, error feedback makes the mean of the decoded ones approach it."""
    _, step, carry, inputs, _ = kernel_times.compression(Matrices("gradient", 1, 16, 24, 4), "gram_schmidt")
    norms = []
    for _ in range(20):
        carry = step(carry, inputs)
        norms.append(float(jnp.linalg.norm(carry[0][0]) / jnp.linalg.norm(inputs[0])))
    # The sum of the decoded matrices misses only the last error, which stays bounded.
    assert norms[-1] < 5 and norms[-1] / 20 < 0.2
