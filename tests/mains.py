"""Mains that run inside this process: where nothing is compiled, a process of its own would be most of the time."""

import sys
from types import ModuleType

import pytest
from absl import flags

from paxtrain import errors


def run(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *arguments: object) -> int | str | None:
    """The exit code of a module's main, given these arguments."""
    # absl runs a main once per process and keeps its flags; here each run starts with those that were there before.
    monkeypatch.setattr(errors.app, "run", lambda main, flags_parser: main(flags_parser(sys.argv)))
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    before = set(flags.FLAGS)
    try:
        errors.run(module.main, module.define_flags)
        return 0
    except SystemExit as end:
        return end.code
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
