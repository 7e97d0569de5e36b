"""A full disk is one sentence, output that nobody reads is the end, and another exception keeps its traceback."""

import errno
import os
import subprocess
import sys

import pytest

from paxtrain.command_line import UNREAD
from tests import mains
from tests.sources import ROOT

PRINTS = "from paxtrain.command_line import run; run(lambda argv: print('a line\\n' * 100000))"
OTHER_PIPE = """
import os, paxtrain.command_line
ends = os.pipe()
os.close(ends[0])
paxtrain.command_line.run(lambda argv: os.write(ends[1], b"."))
"""


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


def test_a_path_that_no_system_takes_is_one_sentence(monkeypatch, capsys):
    code, said = ended(monkeypatch, capsys, OSError(errno.ENAMETOOLONG, "File name too long", "x" * 3000))
    assert code == 2 and said.count("\n") == 1
    assert said.startswith("error: there is no file of a name of 3000 characters, 'xxx")


@pytest.mark.parametrize("error", [RuntimeError("other"), OSError(errno.EIO, "Input/output error")])
def test_other_exceptions_are_raised(monkeypatch, capsys, error):
    with pytest.raises(type(error)):
        ended(monkeypatch, capsys, error)


def unread(*command):
    """Return exit code and stderr of a Python command whose stdout nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "paxtrain.train", "--help"],
        ["-c", "import sys; sys.argv[0] = 'paxtrain'; from paxtrain.cli import main; main()", "--help"],
        ["-c", PRINTS],
    ],
)
def test_a_main_that_nobody_reads_ends_quietly(command):
    assert unread(*command) == (UNREAD, "")


def test_a_main_in_front_of_head_ends_quietly():
    piped = f'{sys.executable} -c "$0" | head -n 1; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(["bash", "-c", piped, PRINTS], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + 13, "a line\n", "")


def test_another_broken_pipe_keeps_its_traceback():
    ended = subprocess.run([sys.executable, "-c", OTHER_PIPE], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("BrokenPipeError: [Errno 32] Broken pipe\n")
