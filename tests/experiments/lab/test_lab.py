"""The lab's command: bad input is one sentence, and if time is short, repeats are cut first."""

import pathlib
import subprocess
import sys
import time

import pytest

from experiments.hosts import hosts
from experiments.lab import __main__ as lab
from experiments.lab.laboratory import Lab

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--experiments=placement"], "--experiments=placement is unknown; known are links, growth, schedules"),
        (["--data=nowhere"], "there is no train.idx in --data=nowhere; make it: "),
        (["placements"], "unexpected argument 'placements'"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, words, tmp_path):
    command = [sys.executable, "-m", "experiments.lab", f"--out={tmp_path}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")
def test_records_of_another_seed_are_not_mixed_with_these(tmp_path):
    for name in ("environments.jsonl", "links.jsonl", "train.idx", "validation.idx"):
        (tmp_path / name).write_text('{"key": "links", "seed": 3}\n')
    command = [sys.executable, "-m", "experiments.lab", f"--out={tmp_path}", f"--data={tmp_path}", "--seed=4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path} holds records of --seed=3, got --seed=4; name another --out, or forget all of them with "
        "--fresh\n"
    )


def test_what_runs_by_default_is_an_hour_and_a_half():
    usual, later = lab.estimate(lab.USUAL), lab.estimate(lab.LATER)
    assert 0.9 * 5400 < usual <= 5400
    assert Lab(pathlib.Path(), "").budget == lab.BUDGET == 5400
    [words] = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("lab:")]
    page = " ".join((ROOT / "docs" / "design.md").read_text().split())
    later_ones = f"--experiments={','.join(lab.LATER)}"
    for text in (words, page, " ".join(lab.__doc__.split())):
        assert "an hour and a half" in text and "half an hour more" in text and later_ones in text
    assert 1500 < later < 2100


def test_repeats_are_cut_where_time_is_short(tmp_path, capsys):
    short = Lab(tmp_path, "", repeats=5, budget=1000)
    short.plan_for(900)
    assert short.repeats == 5
    short.began = time.monotonic() - 590
    short.plan_for(500)
    assert short.repeats == 4
    assert "8 minutes are to come, 7 are left: 4 repeats" in capsys.readouterr().out
    short.began = time.monotonic() - 5000
    short.plan_for(500)
    assert short.repeats == 1
