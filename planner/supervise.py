"""Run one host's command of a run under supervision: python -m planner.supervise --host=I --hosts=a,b,c -- COMMAND.

Start it once per host, or once per process if a host has several. When a command fails or a host or link is lost, all
commands end within a bounded time, and one sentence names the first cause; see docs/faults.md.
"""

import os
import sys
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import group, run
from paxtrain.errors import UserError
from planner.supervision.peer_connections import PORT
from planner.supervision.supervising import LIMIT_FLAGS, SuperviseOptions, supervise
from planner.supervision.supervisor import Limits


def main(argv: Sequence[str]) -> None:
    """Run the command under a supervisor and exit with its code."""
    f, command = flags.FLAGS, list(argv[1:])
    if not command:
        raise UserError("there is no command; write it after --, as in -- python -m paxtrain.train --config=...")
    if command[0].startswith("-"):
        raise UserError(f"the command begins with {command[0]!r}; write it after --")
    options = SuperviseOptions(
        hosts=f.hosts,
        host=f.host,
        name=f.name,
        port=f.port,
        per_host=f.per_host,
        limits=Limits(**{name: getattr(f, flag) for name, flag in LIMIT_FLAGS.items()}),
        log=f.log,
        logs=f.logs,
        finished=f.finished,
        report=f.report,
    )
    sys.exit(supervise(command, options, os.environ))


def define_flags() -> None:
    """Define this main's flags."""
    limits = Limits()
    flags.DEFINE_string("hosts", None, "All hosts, HOST or HOST:PORT joined by commas, or @FILE with one a line.")
    flags.DEFINE_integer("host", None, "This one's place among them, from 0 on; launchers tell it themselves.")
    flags.DEFINE_string("name", None, "What this host is called in messages, as in the plan; default: as in --hosts.")
    flags.DEFINE_integer("port", PORT, "The port of supervisors where --hosts says none.", 1, (1 << 16) - 1)
    flags.DEFINE_integer("per_host", 1, "Supervisors of each host in --hosts, on consecutive ports.", 1, 1024)
    with group("Limits of time"):
        flags.DEFINE_float("link_timeout", limits.link, "Seconds for which a link or a host may be silent.", 1.0)
        flags.DEFINE_float(
            "hang_timeout", limits.hang, "Seconds without a finished step; 0: 20 steps, at least 2 links + 5.", 0.0
        )
        flags.DEFINE_float("phase_timeout", limits.phase, "Seconds that compiling, saving or evaluating may take.", 1.0)
        flags.DEFINE_float("start_timeout", limits.start, "Seconds to wait for the other hosts.", 1.0)
        flags.DEFINE_float("settle", limits.settle, "Seconds for the hosts' reports on a fault.", 1.0)
        flags.DEFINE_float("grace", limits.grace, "Seconds between SIGTERM and SIGKILL to a worker.", 0.0)
        flags.DEFINE_float(
            "slow_step", limits.slow_step, "Times the median step that a step may take before a note says why.", 1.0
        )
    with group("Files"):
        flags.DEFINE_string("log", None, "File for all of the command's output; runs/supervise/host<I>.log if none.")
        flags.DEFINE_string("logs", None, "Folder for log and report of every host, rank<I>.log and rank<I>.json.")
        flags.DEFINE_string("finished", None, "File that the command leaves when all is done; without it: code 143.")
        flags.DEFINE_string("report", None, "JSON file for the first cause and all reports, if there is a fault.")


if __name__ == "__main__":
    run(main, define_flags)
