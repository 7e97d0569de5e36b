"""A process that fails or hangs ends at once, with one sentence about itself; one that is alone is left alone."""

import threading
import time

import pytest

from paxtrain.errors import UserError
from paxtrain.process import progress
from paxtrain.process.progress import FAULT, Progress
from tests.processes import run_processes


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def several(monkeypatch):
    """Let this process be number 1 of 3, and return the codes with which it would end."""
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(progress.jax_private, "joined_processes", lambda: 3)
    monkeypatch.setattr(progress.jax_private, "joined_number", lambda: 1)
    monkeypatch.setattr(progress.os, "_exit", end)
    monkeypatch.setattr(progress.socket, "gethostname", lambda: "pax1")
    return codes


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("no such\nfile"), 2, "error: no such file"),
        (
            OSError(28, "No space left on device"),
            1,
            "error: the disk is full: [Errno 28] No space left on device; make",
        ),
        (ValueError("x\x1b[1m"), FAULT, "error: process 1 on pax1: ValueError: x\\x1b[1m, after step 7"),
        (
            RuntimeError("UNKNOWN: Gloo all-reduce failed: closed"),
            FAULT,
            "error: process 1 on pax1: another process has",
        ),
        (KeyboardInterrupt(), 130, "error: process 1 on pax1: interrupted, after step 7"),
    ],
)
def test_a_failure_is_one_sentence_and_the_end(several, capsys, error, code, sentence):
    with pytest.raises(Ended), Progress(ends=True) as made:
        made.finished(7)
        raise error
    assert several == [code]
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith(sentence), said
    assert any(line.startswith("Traceback") for line in said) == isinstance(error, ValueError)


def test_its_threads_end_with_the_outermost_block():
    def mine():
        return {thread.name for thread in threading.enumerate()} & {"watchdog"}

    before = progress._CHECK
    progress._CHECK = 0.01
    try:
        with Progress(ends=True) as made:
            with made:
                pass
            time.sleep(0.05)
            assert mine() == {"watchdog"}
        time.sleep(0.5)
        assert not mine()
    finally:
        progress._CHECK = before


def test_what_it_was_doing_is_said(several, capsys):
    with pytest.raises(Ended), Progress(ends=True) as made, made.doing("saving a checkpoint"):
        raise ValueError("x")
    assert "ValueError: x, before the first step, while saving a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("ends, processes", [(False, 3), (True, 1)])
def test_who_asks_for_no_end_or_is_alone_gets_the_exception(several, monkeypatch, ends, processes):
    monkeypatch.setattr(progress.jax_private, "joined_processes", lambda: processes)
    with pytest.raises(ValueError, match="mine"), Progress(ends=ends):
        raise ValueError("mine")
    assert several == []


def test_the_limit_follows_the_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    made = Progress(ends=True, lost=10.0)
    limits = []
    for seconds in (0, 1, 1, 2, 1):
        now[0] += seconds
        made.finished(len(limits))
        limits.append(made._limit)
    assert limits == [progress._PHASE] * 2 + [20.0] * 3
    with made.doing("evaluating"):
        assert made._limit == progress._PHASE
        now[0] += 500
    now[0] += 1
    made.finished(5)
    assert made._limit == 20.0  # the evaluation is no step
    assert Progress(hang=5.0)._hang == 5.0


HANG = """
import os, time
from paxtrain.process import progress

progress._CHECK = 0.1
with progress.Progress(ends=True, hang=1.0) as made:
    for step in range(5):
        made.finished(step)
        time.sleep(0.05)
    if process == 1:
        time.sleep(60)  # here
    time.sleep(0.5)
    made.now("waiting")
    time.sleep(8)
os._exit(0)  # an orderly exit would wait for the other one
"""


def test_a_step_that_hangs_ends_its_process_and_says_where():
    began = time.monotonic()
    with pytest.raises(AssertionError) as failed:
        run_processes(HANG, processes=2, devices=1, limit=100)
    said = str(failed.value)
    assert (
        "error: process 1 on " in said and ": nothing has finished for " in said and "s, after step 4; it is in" in said
    )
    assert 'File "<string>", line' in said and time.monotonic() - began < 55
    assert "process 0 on" not in said  # it is not in a step
