"""Console scripts run the mains, and say what there is."""

import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
from absl import flags

import paxtrain.cli
import planner.cli
from tests import mains
from tests.sources import ROOT

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
SCRIPTS = {"paxtrain": paxtrain.cli, "paxplan": planner.cli}


@pytest.fixture
def called(monkeypatch):
    """Return the calls that replace mains: each with its module and its command line."""
    calls = []
    monkeypatch.setattr(paxtrain.cli, "run", lambda main, flags, hint, argv: calls.append((main, flags, hint, argv)))
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: vars(mains.load(main_of(name))))
    return calls


def main_of(name):
    return f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name


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
        main, defined, _, argv = called.pop()
        assert {main.__module__, defined.__module__} <= {main_of(module), "paxtrain.flags", "paxtrain.cli"}
        assert argv == [f"{script} {name}", *more, "--flag=1"]
        with open(importlib.util.find_spec(main_of(module)).origin) as file:
            assert '__name__ == "__main__"' in file.read()


def test_a_command_reads_its_flags_and_its_configuration(tmp_path):
    """In a process of its own, whose sys.argv has the command's name, too."""
    code = "import sys; sys.argv[0] = 'paxtrain'; from paxtrain.cli import main; main()"
    given = ["--config=tiny", "--config.compress.backward.codec=int8", "--config.mesh.pipe=1", "--config.mesh.data=4"]
    ended = subprocess.run([sys.executable, "-c", code, "train", *given], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: compress.backward.codec=int8 needs messages between stages")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_commands(monkeypatch, called, capsys, script):
    run(monkeypatch, script, "--help")
    said = capsys.readouterr().out
    assert all(re.search(rf"^  {name}\s+{what}$", said, re.M) for name, (*_, what) in SCRIPTS[script].COMMANDS.items())
    assert not called


def mains_of_the_scripts():
    return sorted({main_of(module) for script in SCRIPTS.values() for module, *_ in script.COMMANDS.values()})


@pytest.mark.parametrize("name", mains_of_the_scripts())
def test_help_lists_a_mains_own_flags(monkeypatch, capsys, name):
    module = mains.load(name)
    before = set(flags.FLAGS)
    defined = getattr(module, "define_flags", lambda: None)
    names = []
    monkeypatch.setattr(module, "define_flags", lambda: (defined(), names.extend(set(flags.FLAGS) - before)), False)
    assert mains.run(monkeypatch, module, "--help") == 0
    said, told = capsys.readouterr()
    assert said.startswith(module.__doc__.strip()) and not told
    listed = re.findall(r"^  --(?:\[no\])?(\w+)", said, re.M)
    assert sorted(listed) == sorted(names)
    assert max(map(len, said.removeprefix(module.__doc__.strip()).splitlines())) <= 100


@pytest.mark.once
def test_groups_have_titles_and_libraries_are_left_to_helpfull(monkeypatch, capsys):
    assert mains.run(monkeypatch, mains.load("planner.run"), "--help") == 0
    first, _, choices = capsys.readouterr().out.partition("What a plan may choose:\n")
    assert "\nFlags:\n  --plan " in first and "Several processes:" in first and "  --coordinator " in first
    assert "  --compress " in choices and "  --[no]uneven " in choices
    short, whole = (
        subprocess.run([sys.executable, "-m", "paxtrain.sample", how], cwd=ROOT, capture_output=True, text=True).stdout
        for how in ("--help", "--helpfull")
    )
    assert "--prompt" in short and "--verbosity" not in short
    assert "--prompt" in whole and "--verbosity" in whole


@pytest.mark.parametrize("arguments", [[], ["trian"]])
def test_another_command_is_one_sentence(monkeypatch, called, capsys, arguments):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "paxtrain", *arguments)
    assert end.value.code == 2
    assert re.fullmatch(r"error: a command is needed, got .*; there are prepare, train, .*\n", capsys.readouterr().err)
    assert not called
