"""Files are old or new, whatever happens while they are written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paxtrain import files

ROOT = Path(__file__).resolve().parents[2]
# Dies, as by SIGKILL, at the n-th call that changes the file system.
DIES = """
import os, sys
from paxtrain import files
left = int(sys.argv[2])
def dying(call):
    def counted(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return call(*args, **kwargs)
    return counted
for name in ("chmod", "fsync", "replace", "open"):
    setattr(os, name, dying(getattr(os, name)))
files.write(sys.argv[1], "new" * 1000)
"""


def test_a_kill_at_any_call_leaves_the_old_content_or_the_new(tmp_path):
    path = tmp_path / "tokenizer.json"
    seen = set()
    for at in range(1, 9):
        path.write_text("old")
        code = subprocess.run([sys.executable, "-c", DIES, str(path), str(at)], cwd=ROOT).returncode
        seen.add((code, path.read_text()[:3]))
        assert path.read_text() in ("old", "new" * 1000)
    assert {(9, "old"), (9, "new"), (0, "new")} <= seen


def test_the_content_is_on_disk_before_it_has_the_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    files.write(tmp_path / "a", b"1")
    assert calls == ["fsync", "replace", "fsync"]
    files.write(tmp_path / "a", b"1")  # it has this content already
    assert len(calls) == 3


def test_modes_are_those_of_the_user(tmp_path):
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "new", "1")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    (tmp_path / "kept").write_text("1")
    (tmp_path / "kept").chmod(0o600)
    files.write(tmp_path / "kept", "2")
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600


def test_a_file_that_another_program_writes_gets_its_name_last(tmp_path):
    """Libraries that save by name make files of mode 0600, and none of a failed one may stay."""
    (tmp_path / "model").write_text("old")
    (tmp_path / "model").chmod(0o644)
    with files.replacing(tmp_path / "model") as new:
        new.unlink()
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o600))
        new.write_text("new")
        assert (tmp_path / "model").read_text() == "old"
    assert ((tmp_path / "model").read_text(), (tmp_path / "model").stat().st_mode & 0o777) == ("new", 0o644)
    with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "model") as new:
        new.write_text("half")
        raise ZeroDivisionError
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "a", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_pipe_is_written_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)  # so that nobody waits for the other end
    try:
        files.write(path, "text")
        assert os.read(reader, 10) == b"text" and path.is_fifo()
    finally:
        os.close(reader)


def test_a_tree_is_synced_from_its_leaves_up(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("1")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    files.sync_tree(tmp_path)
    assert synced == [str(tmp_path / "in" / "file"), str(tmp_path / "in"), str(tmp_path)]


def test_a_file_that_another_process_renames_meanwhile_is_left_to_it(tmp_path, monkeypatch):
    for name in ("a", "b.lock", "c"):
        (tmp_path / name).touch()
    synced, sync = [], os.fsync

    def renames(descriptor):
        (tmp_path / "b.lock").unlink(missing_ok=True)
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "walk", lambda *_, **__: [(str(tmp_path), [], ["a", "b.lock", "c"])])
    monkeypatch.setattr(os, "fsync", renames)
    files.sync_tree(tmp_path)
    assert synced == ["a", "c", tmp_path.name]


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert files.read_json(tmp_path / "a.json", "plan", "name another", dict) == {"a": 1}
