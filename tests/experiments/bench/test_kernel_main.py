"""The benchmark's main: the flags that it reads, and its message without a GPU."""

import os
import subprocess
import sys

import pytest

from experiments.bench.kernels import __main__ as bench
from experiments.bench.kernels.kernel_times import Matrices


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
        Matrices("gradient", 1, 8, 16, 4),
        Matrices("gradient", 1, 8, 16, 8),
        Matrices("gradient", 3, 32, 16, 4),
        Matrices("gradient", 3, 32, 16, 8),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "experiments.bench.kernels needs an NVIDIA GPU, found cpu; "),
        (["--repeats=0"], "flag --repeats=0"),
        (["--nope"], "Unknown command line flag 'nope'"),
        (["messages"], "unexpected argument 'messages'"),
    ],
)
def test_what_is_wrong_is_one_sentence_at_once(given, words):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench.kernels", *given],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {words}") and done.stderr.count("\n") == 1, done.stderr
