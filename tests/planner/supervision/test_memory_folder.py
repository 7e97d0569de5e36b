"""Folders in memory: a living supervisor keeps its own, and the next one removes those of killed ones."""

import os
import pathlib
import subprocess
import sys

from planner.supervision.memory_folder import MemoryFolder

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOLD = """
import pathlib, sys
from planner.supervision.memory_folder import MemoryFolder
folder = MemoryFolder(pathlib.Path(sys.argv[1]))
(folder.path / "progress").write_text("step 7")
print(folder.path, flush=True)
sys.stdin.read()
"""


def hold(memory):
    command = [sys.executable, "-c", HOLD, str(memory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_what_a_killed_supervisor_leaves_is_removed_and_a_living_ones_is_not(tmp_path):
    with hold(tmp_path) as killed, hold(tmp_path) as living:
        left, kept = (pathlib.Path(each.stdout.readline().strip()) for each in (killed, living))
        killed.kill()
        killed.wait()
        new = tmp_path / "paxtrain-new"  # another supervisor has just made it, and not locked it yet
        new.mkdir()
        old = tmp_path / "paxtrain-old"
        old.mkdir()
        os.utime(old, (0, 0))
        (tmp_path / "other").mkdir()
        folder = MemoryFolder(tmp_path)
        assert not left.exists() and not old.exists()
        assert (kept / "progress").read_text() == "step 7" and new.exists() and (tmp_path / "other").exists()
        folder.remove()
        assert not folder.path.exists()
        living.stdin.close()


def test_supervisors_that_start_at_the_same_time_leave_each_other_alone(tmp_path):
    started = [hold(tmp_path) for _ in range(12)]
    folders = [pathlib.Path(each.stdout.readline().strip()) for each in started]
    assert len(set(folders)) == 12 and all((folder / "progress").read_text() == "step 7" for folder in folders)
    for each in started:
        each.communicate()


def test_without_a_file_system_in_memory_the_folder_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = MemoryFolder(tmp_path / "absent")
    assert folder.path.parent == tmp_path
    folder.remove()
