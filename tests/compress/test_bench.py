"""The benchmark but for the GPU: what it times, how it counts, and what it says without one."""

import csv
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress import bench
from compress.bench import Case, Row

MESSAGE, GRADIENTS = Case("message", 1, 24, 16, 4), Case("gradient", 2, 16, 24, 4)


def test_a_table_of_all_operations_and_implementations(tmp_path):
    rows = list(bench.measure([MESSAGE, GRADIENTS], ("gram_schmidt", "xla"), 1e9, repeats=1, iterations=2))
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
        assert len(bench.table_row(row)) == len(bench.table_row())

    bench.write_csv(str(tmp_path / "bench.csv"), rows, 1e9)
    with open(tmp_path / "bench.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["implementation"] for line in read] == [row.implementation for row in rows]
    assert float(read[0]["microseconds"]) == rows[0].microseconds and float(read[0]["copy_bandwidth"]) == 1e9


def test_the_triton_form_is_measurable():
    """Traced only: what would be compiled for a GPU takes the state and the inputs that it is given."""
    for work in (bench.compression, bench.decompression):
        for case in (MESSAGE, GRADIENTS):
            _, step, carry, inputs, _ = work(case, "triton")
            after = jax.eval_shape(partial(bench._loop, step, 3), carry, inputs)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
                lambda x: (x.shape, x.dtype), carry
            )


def test_ratios_compare_triton_with_the_others():
    rows = [
        Row("encode", "8x8", "bfloat16", 4, name, microseconds, 1, 1.0)
        for name, microseconds in (("gram_schmidt", 90.0), ("xla", 45.0), ("triton", 30.0))
    ]
    [line] = bench.ratios([*rows, Row("decode", "8x8", "bfloat16", 4, "xla", 1.0, 1, 1.0)])
    assert line == (
        "encode 8x8 bfloat16 rank 4: triton is 3.00 times as fast as gram_schmidt, 1.50 times as fast as xla"
    )


def test_gram_schmidt_orthonormalises():
    p = np.random.default_rng(0).standard_normal((32, 5)).astype(np.float32)
    q = np.asarray(bench.gram_schmidt(jnp.asarray(p)), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(5), atol=1e-6)
    # The same as QR's, but for its signs.
    reference, triangle = np.linalg.qr(p.astype(np.float64))
    np.testing.assert_allclose(q, reference * np.sign(np.diag(triangle)), atol=1e-5)


def test_the_baseline_compresses():
    """On one matrix sent again and again its error feedback makes the mean of what is decoded approach that matrix."""
    _, step, carry, inputs, _ = bench.compression(Case("gradient", 1, 16, 24, 4), "gram_schmidt")
    norms = []
    for _ in range(20):
        carry = step(carry, inputs)
        norms.append(float(jnp.linalg.norm(carry[0][0]) / jnp.linalg.norm(inputs[0])))
    # What was decoded is what was sent but for the last error; that stays bounded.
    assert norms[-1] < 5 and norms[-1] / 20 < 0.2


@pytest.mark.parametrize(
    ("kind", "sizes", "ranks", "sentence"),
    [
        ("message", ["8x"], ["4"], "sizes are written like 4096x3072 or 8x2048x8192, got '8x'"),
        ("message", ["8x8x8"], ["4"], "a message is one matrix, got '8x8x8'"),
        ("gradient", ["2x8x16"], ["9"], "ranks of 2x8x16 must be between 1 and 8, got '9'"),
        ("gradient", ["400x400"], ["129"], "ranks of 400x400 must be between 1 and 128, got '129'"),
    ],
)
def test_wrong_cases_are_named(kind, sizes, ranks, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        bench.parse_cases(kind, sizes, ranks)


def test_cases_are_all_combinations():
    assert bench.parse_cases("gradient", ["8x16", "3x32x16"], ["4", "8"]) == [
        Case("gradient", 1, 8, 16, 4),
        Case("gradient", 1, 8, 16, 8),
        Case("gradient", 3, 32, 16, 4),
        Case("gradient", 3, 32, 16, 8),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "compress.bench needs an NVIDIA GPU, found cpu; "),
        (["--repeats=0"], "flag --repeats=0"),
        (["--nope"], "Unknown command line flag 'nope'"),
        (["messages"], "unexpected argument 'messages'"),
    ],
)
def test_what_is_wrong_is_one_sentence_at_once(given, words):
    done = subprocess.run(
        [sys.executable, "-m", "compress.bench", *given],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {words}") and done.stderr.count("\n") == 1, done.stderr
