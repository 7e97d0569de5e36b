"""Console scripts run the mains, and say what there is."""

import importlib.util
import re
import runpy
import sys
import tomllib

import pytest

import paxtrain.cli
import planner.cli
from tests.sources import ROOT

SCRIPTS = {"paxtrain": paxtrain.cli, "paxplan": planner.cli}


@pytest.fixture
def called(monkeypatch):
    """Return the calls that replace mains: each with its module and its command line."""
    calls = []
    monkeypatch.setattr(runpy, "run_module", lambda module, run_name: calls.append((module, run_name, *sys.argv)))
    return calls


def run(monkeypatch, script, *arguments):
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    SCRIPTS[script].main()


def test_the_scripts_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {name: f"{module.__name__}:main" for name, module in SCRIPTS.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_command_is_a_main(monkeypatch, called, script):
    for name, (module, more, _) in SCRIPTS[script].COMMANDS.items():
        run(monkeypatch, script, name, "--flag=1")
        assert called.pop() == (module, "__main__", f"{script} {name}", *more, "--flag=1")
        origin = importlib.util.find_spec(module).origin.replace("__init__", "__main__")
        with open(origin) as file:
            assert '__name__ == "__main__"' in file.read()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_commands(monkeypatch, called, capsys, script):
    run(monkeypatch, script, "--help")
    said = capsys.readouterr().out
    assert all(re.search(rf"^  {name}\s+{what}$", said, re.M) for name, (*_, what) in SCRIPTS[script].COMMANDS.items())
    assert not called


@pytest.mark.parametrize("arguments", [[], ["trian"]])
def test_another_command_is_one_sentence(monkeypatch, called, capsys, arguments):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "paxtrain", *arguments)
    assert end.value.code == 2
    assert re.fullmatch(r"error: a command is needed, got .*; there are prepare, train, .*\n", capsys.readouterr().err)
    assert not called
