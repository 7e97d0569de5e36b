"""Hostile input to the mains: python -m tests.hostile --folder=/tmp/hostile [--cases=500] [--first=0] [--only=NUMBER].

Each case is a command line that works, with one or two values replaced by absurd, damaged or misleading ones: in flags,
in overrides, or inside a file that the command reads. A case is good if the main ends with exit code 2 and one sentence
on stderr, or gets as far as the work itself (which is left out here) without a traceback; within five seconds of the
processor and one gigabyte, and with all files as they were. Values that can mean nothing ("nonsense") must be refused.

No case that is refused may have compiled anything or changed a file. Before the cases, each command line is tried as
it is, since one that is refused for another reason would hide everything behind it.

Cases are numbered, and a number always makes the same case. The last line of output is JSON: the bad ones, by kind.
"""

import argparse
import collections
import gc
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Collection
from types import ModuleType
from typing import Any

import jax

from paxtrain import command_line
from tests import mains
from tests.hostile.cases import Case, case, unchanged
from tests.hostile.commands import MAINS
from tests.hostile.home import prepare

SECONDS, BYTES = 5.0, 1 << 30
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event
OWN = ("stdout", "stderr", "compiled")
OUTPUTS = ("plan/plan.json", "data/train.idx", "figure.png", "trials.csv", "cluster.json")
ACCEPTED = 77  # exit code of a case whose input was taken


class Accepted(BaseException):
    """The input was taken, and the work would begin."""


def _accept(*_: object, **__: object) -> None:
    raise Accepted


def _skip(places: tuple[str, ...], main: ModuleType) -> None:
    for place in places:
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module) if module else main
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, _accept)


def watch_compiler(mark: pathlib.Path) -> None:
    """Leave a file when this process compiles a program, by jit or ahead of time."""

    def listen(event: str, *_: object, **__: object) -> None:
        if event == COMPILED:
            mark.touch()

    jax.monitoring.register_event_duration_secs_listener(listen)


def _child(made: Case, arguments: list[str], out: pathlib.Path) -> int:
    """Run a case in this process, which is a fork, and return its exit code."""
    os.chdir(out)
    watch_compiler(out / "compiled")
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(out / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", errors="backslashreplace"), os.fdopen(2, "w", errors="backslashreplace")
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (12 << 30),) * 2)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor, since the machine may have other work
    signal.setitimer(signal.ITIMER_REAL, 12 * SECONDS)
    sys.argv = [made.main.module, *arguments]
    try:
        module = mains.load(made.main.module)
        _skip(made.main.skip, module)
        defined = getattr(module, "define_flags", lambda: None)
        command_line.run(module.main, defined, getattr(module, "HINT", None))
        return 0
    except Accepted:
        return ACCEPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _files(*folders: pathlib.Path) -> dict[str, bytes]:
    """Return the hashes of all files in folders, without those in which this program keeps what a case says."""
    paths = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return {str(path): hashlib.sha256(path.read_bytes()).digest() for path in paths if path.name not in OWN}


def problem(made: Case, status: int, taken: int, out: pathlib.Path, touched: Collection[str]) -> str:
    """Return what is wrong with the end of a case, or "".

    Args:
        made: the case.
        status: how its process has ended, as `os.wait` says it.
        taken: bytes of memory that it took.
        out: folder with what it said.
        touched: names of the files that it changed; of an accepted one only those of the home.
    """
    said = (out / "stderr").read_text(errors="replace") if (out / "stderr").exists() else ""
    if os.WIFSIGNALED(status):
        return "hang" if os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF) else f"signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    if "Traceback (most recent call last)" in said or (code == 1 and 1 not in made.main.codes):
        return "traceback"
    if code not in (0, 2, ACCEPTED, *made.main.codes):
        return f"exit code {code}"
    if code == 2:
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if len(errors) != 1 or len(said.strip().splitlines()) > 4:
            return "no sentence"
        if any(not c.isprintable() for c in errors[0]):
            return "control characters"
        if len(errors[0]) > 3000:
            return "a sentence of a page"
        if (out / "compiled").exists() and not made.main.compiles:
            return "compiled"
    elif made.nonsense:
        return "accepted nonsense"
    if taken > BYTES:
        return "memory"
    return "touched files" if touched else ""


def run(made: Case, home: pathlib.Path) -> tuple[str, list[str], str]:
    """Run a case, and return its problem, its command line and the end of what it said."""
    here, out = home, pathlib.Path(f"{home}.case")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if made.files:
        here = out / "home"
        shutil.copytree(home, here)
        for name, content in made.files.items():
            (here / name).write_bytes(content)
    arguments = [a.replace("{home}", str(here)).replace("{out}", str(out)) for a in made.arguments]
    for name in OUTPUTS:  # of an earlier run, which must not be lost
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("of an earlier run")
    before = _files(home, out)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _child(made, arguments, out)
        finally:
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    after = _files(home, out)
    touched = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    if not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2):
        touched = [name for name in touched if name.startswith((f"{home}/", f"{out}/home/"))]
    found = problem(made, status, (used.ru_maxrss << 10) - BASE, out, touched)
    said = (out / "stderr").read_text(errors="replace")[-1500:] if (out / "stderr").exists() else ""
    if not found and not made.files and not made.nonsense and made.arguments == unchanged(made.main).arguments:
        refused = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2
        found = "refused as it is" if refused else ""
    shutil.rmtree(out, ignore_errors=True)
    return found, arguments, "\n".join([said, *touched])


BASE = 0


def main() -> None:
    """Run the cases and print the bad ones."""
    global BASE
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    home = given.folder / f"home{os.getpid()}"
    prepare(home)
    for each in MAINS:  # each fork has all modules at once
        importlib.import_module(each.module)
        for place in each.skip:
            importlib.import_module(place.partition(":")[0] or each.module)
    # A main collects garbage when it begins and ends. In a fork, that would copy all that the modules hold.
    gc.collect()
    gc.freeze()
    BASE = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    numbers = [given.only] if given.only is not None else range(given.first, given.first + given.cases)
    counts: collections.Counter[str] = collections.Counter()
    known = ((main.module, unchanged(main)) for main in MAINS)
    for number, made in itertools.chain(known, ((number, case(number, home)) for number in numbers)):
        found, arguments, said = run(made, home)
        counts[found or "good"] += isinstance(number, int) or bool(found)
        if found:
            print(
                f"--- {number}: {found}{f' ({made.nonsense})' if made.nonsense else ''}: {made.main.module} "
                f"{' '.join(a if len(a) < 200 else a[:80] + '...' for a in arguments)!r} {list(made.files)}\n{said}",
                flush=True,
            )
    shutil.rmtree(home)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
