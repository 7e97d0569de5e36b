"""Mains run inside this process. If nothing is compiled, a separate process would take most of a test's time."""

import importlib.util
import sys
from types import ModuleType

import pytest
from absl import flags

from paxtrain import command_line


def load(name: str) -> ModuleType:
    """Return a main's module without binding it in its package, where a function may have the same name."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *arguments: object) -> int | str | None:
    """Run a module's main with arguments, and return its exit code.

    Args:
        monkeypatch: the test's fixture, which restores what this changes.
        module: the main, as `load` returns it.
        arguments: arguments of the command line.
    """
    # absl runs a main once per process and keeps its flags; here each run starts with those that were there before.
    monkeypatch.setattr(command_line.app, "run", lambda main, argv, flags_parser: main(flags_parser(argv or sys.argv)))
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    before = set(flags.FLAGS)
    try:
        command_line.run(module.main, getattr(module, "define_flags", lambda: None), getattr(module, "HINT", None))
        return 0
    except SystemExit as end:
        return end.code
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
