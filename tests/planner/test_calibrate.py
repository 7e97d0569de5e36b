"""The main that proposes runs: what it writes and goes on from, and bad input."""

import csv

import pytest

from planner.runs import trials
from tests import mains

calibrate = mains.load("planner.calibrate")
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
SMALL = ("--model=gpt_8b", "--cluster=a100_16x8", "--global_batch=64", "--runs=1")


@pytest.fixture
def run(monkeypatch, capfd):
    """Return run(*flags), which gives exit code, stdout and stderr of planner.calibrate."""
    return lambda *arguments: (mains.run(monkeypatch, calibrate, *arguments), *capfd.readouterr())


def _rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_writes_a_table_and_goes_on_from_it(tmp_path, run):
    code, said, _ = run(*SMALL, f"--out={tmp_path}")
    path = tmp_path / "trials.csv"
    assert (
        code == 0 and "0 measured runs" in said and said.splitlines()[-1].startswith(f"fill in the seconds of {path}")
    )
    [row] = _rows(path)
    assert row["seconds"] == "" and int(row["devices"]) <= 32
    trials.write(path, [row | {"seconds": "2.5"}])
    code, said, _ = run(*SMALL, f"--trials={path}", f"--out={tmp_path}")
    assert code == 0 and "1 measured runs" in said
    assert _rows(path)[0]["seconds"] == "2.5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=gpt_8b"], "--cluster is missing"),
        ([*SMALL, "--trainer=mine"], "trainer"),
        ([*SMALL, "--runs=0"], "runs"),
        ([*SMALL, "--trials=absent.csv"], "cannot read the trials absent.csv"),
        ([*SMALL, "--model.model.module=tests.paxtrain.model.routed:Routed"], "module"),
        ([*SMALL, "--out=/dev/null/out"], "cannot write /dev/null/out/trials.csv"),
        (["--model=gpt_8b", "--cluster=nowhere"], "nowhere"),
    ],
)
def test_bad_input(run, arguments, message):
    code, said, error = run(*arguments)
    assert code == 2 and error.startswith("error: ") and message in error
    assert len(error.strip().splitlines()) == 1 and "wrote" not in said
