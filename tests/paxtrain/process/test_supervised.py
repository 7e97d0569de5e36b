"""The progress file always has the newest line, complete, and costs a step almost nothing."""

import json
import os
import time

import pytest

from paxtrain.errors import UserError
from paxtrain.process import supervised
from paxtrain.process.supervised import HEARTBEAT, VARIABLE, Progress, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "progress"


@pytest.fixture
def progress(path):
    return Progress({VARIABLE: str(path)})


def test_steps_phases_and_the_end(path, progress):
    def said():
        values = read(path)
        return values["step"], values["doing"], values["failed"]

    assert said() == (None, "starting", "")
    progress.finished(7)
    assert said() == (7, "", "")
    with progress.doing("saving a checkpoint"):
        assert said() == (7, "saving a checkpoint", "")
        with progress.doing("compiling"):
            assert said() == (7, "compiling", "")
        assert said() == (7, "saving a checkpoint", "")
    assert said() == (7, "", "")
    progress.now("finishing")
    assert said() == (7, "finishing", "")


def test_the_place_in_the_mesh_is_told_once_and_stays(path, progress):
    assert supervised.place(read(path)) is None
    place = supervised.MeshPosition(3, "stage 2, data 0", tuple(range(48)))
    progress.placed(place)
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError("ü\\" * 5000)
    assert supervised.place(read(path)) == place


def test_every_word_counts(path, progress):
    counts = [read(path)["count"]]
    for _ in range(3):
        progress.finished(1)
        counts.append(read(path)["count"])
    assert counts == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (KeyError(), "KeyError"),
        (RuntimeError("two\n  lines"), "RuntimeError: two lines"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RuntimeError("ü\\" * 5000), "RuntimeError: " + ("ü\\" * 5000)[:600]),
    ],
)
def test_the_exception_that_ends_a_process_and_where(path, progress, error, told):
    with pytest.raises(type(error)), progress, progress.doing("saving a checkpoint"):
        raise error
    assert read(path)["failed"] == told and read(path)["doing"] == "saving a checkpoint"


def test_of_several_exceptions_the_first_is_told(path, progress):
    """A later exception in the clean-up, which often has the same cause, does not replace the first one."""
    with pytest.raises(OSError, match="No space"), progress:
        try:
            with progress:
                raise RuntimeError("the reason")
        finally:
            raise OSError(28, "No space left on device")
    assert read(path)["failed"] == "RuntimeError: the reason"


@pytest.mark.parametrize("code", [0, 2, None])
def test_an_exit_is_no_exception(path, progress, code):
    with pytest.raises(SystemExit), progress:
        raise SystemExit(code)
    assert read(path)["failed"] == ""


def test_nobody_is_told_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress = Progress({})
    progress.finished(1)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_space_ends_nothing(monkeypatch, path, progress):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    progress.finished(1)
    assert read(path)["step"] is None


def test_what_is_no_line_is_nothing(path):
    assert read(path) is None
    for text in ("", "{", "[]", "{}", json.dumps({"count": 1, "step": 2})):
        path.write_text(text)
        assert read(path) is None


def test_a_step_pays_microseconds(progress):
    began = time.perf_counter()
    for step in range(1000):
        progress.finished(step)
    assert (time.perf_counter() - began) / 1000 < 1e-3


def test_the_heartbeat_that_the_parent_asks_for():
    assert supervised.heartbeat({}) is None
    assert supervised.heartbeat({HEARTBEAT: "260"}) == 260
    with pytest.raises(UserError, match=f"{HEARTBEAT}='soon', where supervisors put seconds"):
        supervised.heartbeat({HEARTBEAT: "soon"})
