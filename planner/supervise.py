"""Run one host's command of a run under supervision: python -m planner.supervise --host=I --hosts=a,b,c -- COMMAND.

Start it once per host, or once per process if a host has several. When a command fails or a host or link is lost, all
commands end within a bounded time, and one sentence names the first cause; see docs/faults.md.
"""

import os
import sys
from collections.abc import Sequence

from paxtrain.command_line import group, run
from paxtrain.errors import UserError
from paxtrain.knobs import define, given
from planner.supervision.supervising import LIMIT_FLAGS, SuperviseOptions, supervise
from planner.supervision.supervisor import Limits


def main(argv: Sequence[str]) -> None:
    """Run the command under a supervisor and exit with its code."""
    command = list(argv[1:])
    if not command:
        raise UserError("there is no command; write it after --, as in -- python -m paxtrain.train --config=...")
    if command[0].startswith("-"):
        raise UserError(f"the command begins with {command[0]!r}; write it after --")
    options = given(SuperviseOptions, limits=given(Limits, named=LIMIT_FLAGS))
    sys.exit(supervise(command, options, os.environ))


def define_flags() -> None:
    """Define this main's flags."""
    define(SuperviseOptions, "hosts", "host", "name", "port", "per_host")
    with group("Limits of time"):
        define(Limits, named=LIMIT_FLAGS)
    with group("Files"):
        define(SuperviseOptions, "log", "logs", "finished", "report")


if __name__ == "__main__":
    run(main, define_flags)
