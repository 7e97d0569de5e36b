"""Absurd, damaged and misleading input to every main: one sentence and exit code 2, or the work begins."""

import json
import subprocess
import sys

import pytest

from tests.sources import ROOT


def bad(tmp_path, first, cases):
    """Return what a range of cases says of the bad ones, and how many were good."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.hostile", f"--folder={tmp_path}"]
    command += [f"--first={first}", f"--cases={cases}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
    *said, counts = done.stdout.splitlines()
    return "\n".join(said), json.loads(counts)


def test_the_first_of_the_hostile_cases(tmp_path):
    said, counts = bad(tmp_path, 0, 100)
    assert counts == {"good": 100}, said


@pytest.mark.slow
def test_all_hostile_cases(tmp_path):
    said, counts = bad(tmp_path, 0, 5000)
    assert counts == {"good": 5000}, said


def test_a_main_that_lets_things_pass_is_found(tmp_path):
    """The control: the case's judge, on ends that must not be."""
    program = """
import json, os, pathlib, sys
from tests.hostile import __main__ as hostile
from tests.hostile.cases import Case
from tests.hostile.commands import MAINS
out = pathlib.Path(sys.argv[1])
made = Case(MAINS[0], [], {}, "")
def judge(status, said, taken=0, touched=(), nonsense="", compiled=False):
    (out / "stderr").write_text(said)
    (out / "compiled").touch() if compiled else (out / "compiled").unlink(missing_ok=True)
    made.nonsense = nonsense
    return hostile.problem(made, status, taken, out, touched)
exited = lambda code: code << 8
print(json.dumps([
    judge(exited(2), "error: a sentence\\n"), judge(exited(hostile.ACCEPTED), ""),
    judge(exited(1), "Traceback (most recent call last)"), judge(14, ""), judge(9, ""), judge(exited(5), ""),
    judge(exited(2), "two\\nlines\\n"), judge(exited(2), "error: a\\x1b[31m\\n"),
    judge(exited(hostile.ACCEPTED), "", nonsense="x=nan"), judge(exited(2), "error: a\\n", taken=2 << 30),
    judge(exited(2), "error: a\\n", touched=["x"]), judge(exited(2), "error: " + "x" * 4000),
    judge(exited(2), "error: a\\n", compiled=True), judge(exited(0), "", compiled=True),
]))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stdout or "[]") == [
        *("", "", "traceback", "hang", "signal 9", "exit code 5", "no sentence", "control characters"),
        *("accepted nonsense", "memory", "touched files", "a sentence of a page", "compiled", ""),
    ], done.stderr


@pytest.mark.parametrize(
    ("call", "compiles"),
    [
        ("jax.jit(jnp.sin)(1.0)", True),
        ("jax.jit(jnp.sin).lower(1.0).compile()", True),
        ("jax.jit(jnp.sin).lower(1.0), jax.eval_shape(jnp.sin, 1.0)", False),
    ],
)
def test_what_compiles_is_seen(tmp_path, call, compiles):
    program = f"""
import pathlib, sys
import jax
import jax.numpy as jnp
from tests.hostile.__main__ import watch_compiler
watch_compiler(pathlib.Path(sys.argv[1]))
{call}
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "mark")], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "mark").exists() == compiles
