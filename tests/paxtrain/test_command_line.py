"""A full disk is one sentence, and another exception keeps its traceback."""

import errno

import pytest

from tests import mains


def ended(monkeypatch, capsys, error):
    """Return exit code and stderr of a main that raises an exception."""
    module = mains.load("paxtrain.compare")

    def fails(_):
        raise error

    monkeypatch.setattr(module, "main", fails)
    code = mains.run(monkeypatch, module, "--runs=a", "--out=b.png")
    return code, capsys.readouterr().err


def following(error, cause):
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device", "runs/metrics.jsonl")


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        following(RuntimeError("a checkpoint could not be written to runs"), FULL),
        ValueError('RESOURCE_EXHAUSTED: Error writing "x" [OS error 28: ENOSPC No space left on device]'),
    ],
)
def test_a_full_disk_is_one_sentence(monkeypatch, capsys, error):
    """With exit code 1, because a later start may succeed."""
    code, said = ended(monkeypatch, capsys, error)
    assert code == 1 and said.count("\n") == 1
    assert said.startswith("error: the disk is full: ") and said.endswith("start the same command again\n")


@pytest.mark.parametrize("error", [RuntimeError("other"), OSError(errno.EIO, "Input/output error")])
def test_other_exceptions_are_raised(monkeypatch, capsys, error):
    with pytest.raises(type(error)):
        ended(monkeypatch, capsys, error)
