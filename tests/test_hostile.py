"""Absurd, damaged and misleading input to every main: one sentence and exit code 2, or the work begins."""

import json
import os
import subprocess
import sys

import pytest

from tests.hostile.cases import Case, Change
from tests.hostile.commands import Main
from tests.sources import ROOT


@pytest.mark.once
def test_hostile_cases(tmp_path):
    """More of them are another part of .ci/nightly."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.hostile", f"--folder={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, errors="replace")
    assert done.returncode == 0, done.stderr[-10_000:]


# What a main does with a number above a flag's bound, by the name of the fault.
FAULTS = {
    "": "refuse('error: a sentence')",
    "traceback": "1 / 0",
    "hang": "while True: pass",
    "signal 9": "os.kill(os.getpid(), 9)",
    "exit code 5": "sys.exit(5)",
    "no sentence": r"refuse('two\nlines')",
    "control characters": r"refuse('error: a\x1b[31m')",
    "a sentence of a page": "refuse('error: ' + 'x' * 4000)",
    "accepted nonsense": "",
    "memory": "held = b'x' * (1 << 29); refuse('error: a')",
    "touched files": "open('trials.csv', 'w').close(); refuse('error: a')",
    "compiled": "jax.jit(jax.numpy.sin)(1.0); refuse('error: a')",
}
FAULTY = """
import os, sys
import jax
from absl import flags
def refuse(text):
    print(text, file=sys.stderr)
    sys.exit(2)
def define_flags():
    for name in ("workers", "name"):
        flags.DEFINE_string(name, "1", "")
def main(_):
    given = flags.FLAGS.workers
    if given.isascii() and given.isdecimal() and int(given[:99]) > 1 << 31:
        exec(os.environ["FAULT"])
    elif not given.isdecimal() or not given.isascii():
        refuse("error: a sentence")
"""
CONTROL = """
import json, os, pathlib, sys
from tests.hostile import __main__ as hostile
from tests.hostile.cases import Case, Change
from tests.hostile.commands import Main
home = pathlib.Path(sys.argv[1], "home")
home.mkdir()
hostile.BYTES = 1 << 27
faulty = Main("faulty", {"workers": "1"}, integers="workers", texts="name")
found = {}
for name, os.environ["FAULT"] in json.loads(sys.argv[2]).items():
    hostile.SECONDS = 0.5 if name == "hang" else 5
    found[name] = hostile.run(Case(faulty, (Change("workers", str(1 << 40), "workers"),)), home)[0]
os.environ["FAULT"] = "refuse('error: a')"
found["refused as it is"] = hostile.run(Case(Main("faulty", {"workers": str(1 << 40)})), home)[0]
os.environ["FAULT"] = "1 / 0"
try:
    hostile.hunt((faulty,), home, "gate")
except AssertionError as error:
    print(json.dumps([found, type(error).__name__, "\\n".join(error.__notes__)]))
"""


@pytest.mark.slow
def test_faults_are_found(tmp_path):
    """The control: each fault of a main is told, and generated cases find one and reduce it to what shows it."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    command = [sys.executable, "-W", "ignore", "-c", CONTROL, str(tmp_path), json.dumps(FAULTS)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, kind, example = json.loads(done.stdout)
    assert found == {name: name for name in (*FAULTS, "refused as it is")}
    assert kind == "traceback"
    assert "made=faulty with workers='4294967296'," in example


def test_what_stands_in_a_file_that_is_not_read_any_more_may_be_nonsense():
    main = Main("a.main", {"plan": "{home}/plan.json", "runs": "{home}/one,{home}/two", "top": "3"}, texts="plan")
    of_plan, of_run = Change("plan.json", b"", "version=nan"), Change("two/metrics.jsonl", b"", "step=-1")
    assert Case(main, (of_plan,)).nonsense == Case(main, (of_plan, Change("top", "4", ""))).nonsense == "version=nan"
    assert Case(main, (Change("plan", "", ""), of_plan)).nonsense == ""
    assert Case(main, (Change("plan", "", ""), of_run)).nonsense == "step=-1"
    assert Case(main, (of_run, Change("runs", "{home}/one", "runs"))).nonsense == "runs"


@pytest.mark.slow
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
