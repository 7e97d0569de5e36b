"""Commands that messages name can be typed where they are read: the interpreter in use, or the console script."""

import os
import pathlib
import sys

import pytest

from paxtrain import cli, errors
from planner import cli as plan_cli


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return runs(program, argv0): start as a program of a folder below the current one would."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")

    def start(interpreter: str, argv0: str) -> pathlib.Path:
        for name in (interpreter, "paxtrain", "paxplan"):
            (folder / name).touch(0o755)
        monkeypatch.setattr(sys, "executable", str(folder / interpreter))
        monkeypatch.setattr(sys, "argv", [str(folder / argv0), "train", "--config=my file"])
        monkeypatch.setattr(sys, "orig_argv", ["x", "-m", "paxtrain.train", "--config=my file"])
        return folder

    return start


def test_an_interpreter_below_the_folder_is_told_by_its_path_from_there(runs, monkeypatch):
    folder = runs("python3", "train.py")
    assert errors.command("paxtrain.sample") == "env/bin/python3 -m paxtrain.sample"
    assert errors.started() == "env/bin/python3 -m paxtrain.train '--config=my file'"
    (folder / "more").mkdir()
    monkeypatch.chdir(folder / "more")
    assert errors.command("planner.plan") == f"{folder}/python3 -m planner.plan"


def test_one_that_the_shell_finds_is_told_by_its_name(runs, monkeypatch):
    folder = runs("python", "train.py")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/nowhere")
    assert errors.command("paxtrain.sample") == "python -m paxtrain.sample"
    (folder.parent / "python").touch(0o755)
    monkeypatch.setenv("PATH", f"{folder.parent}{os.pathsep}{folder}")  # where another one comes first
    assert errors.command("paxtrain.sample") == "env/bin/python -m paxtrain.sample"


@pytest.mark.parametrize(("script", "other"), [("paxtrain", "paxplan"), ("paxplan", "paxtrain")])
def test_console_scripts_name_console_scripts(runs, monkeypatch, script, other):
    folder = runs("python", script)
    assert errors.command("planner.plan") == "env/bin/paxplan plan"
    monkeypatch.setenv("PATH", str(folder))
    assert errors.command("paxtrain.huggingface export") == "paxtrain export"
    assert errors.command("planner.memory") == "paxplan memory"
    assert errors.started() == f"{script} train '--config=my file'"


def test_every_console_command_is_named_as_the_script_takes_it(runs):
    runs("python", "paxtrain")
    for script, commands in (("paxtrain", cli.COMMANDS), ("paxplan", plan_cli.COMMANDS)):
        for name, (module, more, _) in commands.items():
            assert errors.command(" ".join([module, *more])) == f"env/bin/{script} {name}"
