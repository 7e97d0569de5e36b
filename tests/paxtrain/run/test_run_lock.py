"""A folder has one run: the second start is refused by name, and a run that was killed blocks nobody."""

import dataclasses
import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from paxtrain.errors import UserError
from paxtrain.run import run_lock
from paxtrain.run.run_lock import LockOwner, RunLock

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOLD = """
import errno, os, sys, time
if sys.argv[3] == "without":
    def link(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    os.link = link
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

# Raises the count of a lock as its owner does.
BEATS = """
import sys, time
for count in range(8, 100):
    with open(sys.argv[1], "r+") as file:
        content = file.read()
        file.seek(0)
        file.write(content[:-14] + f'{count:012d}"}}')
    time.sleep(0.05)
"""


def hold(folder, seconds=60.0, links="with"):
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds), links]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def elsewhere(folder, **changes):
    """Write the lock of a process of another host, and return its owner."""
    owner = dataclasses.replace(LockOwner.here(), host="n7", process=4711, boot="another", token="there", **changes)
    content = json.dumps(dataclasses.asdict(owner) | {"count": "000000000007"})
    (folder / run_lock.FILE).write_text(content)
    return owner


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
        assert json.loads((tmp_path / run_lock.FILE).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", ["with", "without"])
def test_of_many_starts_at_once_one_gets_the_folder(tmp_path, links):
    """Also where a run that was killed has left its lock, and on a file system without hard links."""
    with hold(tmp_path, links=links) as dead:
        assert dead.stdout.readline() == "has it\n"
        dead.kill()
    started = [hold(tmp_path, 5.0, links) for _ in range(8)]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert sorted(process.returncode for process in started) == [0] + [2] * 7, said
    [winner] = [process.pid for process in started if process.returncode == 0]
    assert sum(f"in use by process {winner} " in text for text in said) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_used_again_is_another_process(tmp_path):
    owner = LockOwner.here()
    assert owner.me and not owner.known_dead
    before = dataclasses.replace(owner, born="1")
    assert not before.me and before.known_dead
    assert not dataclasses.replace(before, boot="another").known_dead


def test_the_same_process_may_take_it_again(tmp_path):
    with RunLock(tmp_path):
        with RunLock(tmp_path) as inner:
            inner.check()
        assert (tmp_path / run_lock.FILE).exists()


def test_another_hosts_lock_counts_as_long_as_its_count_rises(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "_DEAD", 0.6)
    monkeypatch.setattr(run_lock, "_BEAT", 0.1)
    elsewhere(tmp_path)
    with RunLock(tmp_path):  # it stands still
        pass
    assert re.search("waiting 0.6 s to see whether process 4711 on n7 still has", capsys.readouterr().err)
    path = tmp_path / run_lock.FILE
    elsewhere(tmp_path)
    with subprocess.Popen([sys.executable, "-c", BEATS, str(path)]) as beating:
        with pytest.raises(UserError, match="is in use by process 4711 on n7 since"):
            RunLock(tmp_path)
        beating.kill()


def test_a_run_that_was_taken_over_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT", 0.02)
    with RunLock(tmp_path) as lock:
        lock.check()
        elsewhere(tmp_path)
        lock._beating.join(5)
        with pytest.raises(UserError, match="was taken over by process 4711 on n7 while this process stood still"):
            lock.check()
    assert (tmp_path / run_lock.FILE).exists()  # the other's stays


def failing(number):
    """Return a function that fails as the file system does with that number."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_folder_that_cannot_be_locked_is_bad_input_and_a_full_disk_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EROFS))
    with pytest.raises(UserError, match=rf"^cannot write to {tmp_path} \(Read-only file system\); name a run.out that"):
        RunLock(tmp_path)
    monkeypatch.setattr(os, "link", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        RunLock(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_read_for_a_while_is_still_ones_own(tmp_path, monkeypatch):
    """A network folder whose server restarts, or another start that looks at the lock, ends no healthy run."""
    monkeypatch.setattr(run_lock, "_BEAT", 0.01)
    monkeypatch.setattr(run_lock, "_PAUSE", 0.1)
    path, read, failures = tmp_path / run_lock.FILE, pathlib.Path.read_bytes, []

    def stale(self):
        failures.append(self)
        failing(errno.ESTALE)()

    with RunLock(tmp_path) as lock:
        monkeypatch.setattr(pathlib.Path, "read_bytes", stale)
        while len(failures) < 10:
            time.sleep(0.01)
        monkeypatch.setattr(pathlib.Path, "read_bytes", read)
        path.rename(tmp_path / "aside")
        time.sleep(0.15)
        (tmp_path / "aside").rename(path)
        before = json.loads(path.read_bytes())["count"]
        time.sleep(0.3)
        assert json.loads(path.read_bytes())["count"] > before  # it goes on
        lock.check()
        path.unlink()
        lock._beating.join(5)
        with pytest.raises(UserError, match="was taken over or its lock removed while this process stood still"):
            lock.check()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"count": 1}', b"\xff"])
def test_a_lock_that_was_cut_off_blocks_nobody(tmp_path, content):
    (tmp_path / run_lock.FILE).write_bytes(content)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / run_lock.FILE).read_text())["process"] == os.getpid()
