"""A folder has one run: the second start is refused by name, and a run that was killed blocks nobody."""

import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from paxtrain.errors import UserError
from paxtrain.run import run_lock
from paxtrain.run.run_lock import RunLock

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOLD = """
import sys, time
from paxtrain.errors import UserError
from paxtrain.run.run_lock import RunLock
try:
    with RunLock(sys.argv[1]):
        print("has it", flush=True)
        time.sleep(float(sys.argv[2]))
except UserError as error:
    print(error, flush=True)
    sys.exit(2)
"""


def hold(folder, seconds=60.0):
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_second_start_is_refused_and_names_the_first(tmp_path):
    with hold(tmp_path) as first:
        assert first.stdout.readline() == "has it\n"
        words = rf"{tmp_path} is in use by process {first.pid} on \S+ since 20\d\d-.*; wait for its end, stop it, or"
        with pytest.raises(UserError, match=words):
            RunLock(tmp_path)
        first.send_signal(signal.SIGSTOP)  # one that stands still lives
        with pytest.raises(UserError, match="is in use by process"):
            RunLock(tmp_path)
        first.kill()
    with RunLock(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / run_lock.FILE).read_text()


def test_of_many_starts_at_once_one_gets_the_folder(tmp_path):
    """Also where a run that was killed has left its lock."""
    with hold(tmp_path) as dead:
        assert dead.stdout.readline() == "has it\n"
        dead.kill()
    started = [hold(tmp_path, 5.0) for _ in range(8)]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert sorted(process.returncode for process in started) == [0] + [2] * 7, said
    [winner] = [process.pid for process in started if process.returncode == 0]
    assert sum(f"in use by process {winner} " in text for text in said) == 7


def test_the_same_process_may_take_it_again(tmp_path):
    with RunLock(tmp_path):
        with RunLock(tmp_path / ".." / tmp_path.name):
            pass
        with hold(tmp_path) as other:  # the inner one has not given it back
            assert "is in use by process" in other.stdout.readline()
    with hold(tmp_path, 0.0) as other:
        assert other.stdout.readline() == "has it\n"


def failing(number):
    """Return a function that fails as the file system does with that number."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_folder_that_cannot_be_written_is_bad_input_and_a_full_disk_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing(errno.EROFS))
    with pytest.raises(UserError, match=rf"^cannot write to {tmp_path} \(Read-only file system\); name a run.out that"):
        RunLock(tmp_path)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        RunLock(tmp_path)
    monkeypatch.undo()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with RunLock(tmp_path):
        pass
    assert f"note: {tmp_path} is not locked, since its file system has no locks" in capsys.readouterr().err
