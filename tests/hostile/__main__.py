"""Hostile input to the mains: python -m tests.hostile --folder=/tmp/hostile [--profile=nightly].

Each case is a command line that works, with one or two values replaced by absurd, damaged or misleading ones: in flags,
in overrides, or inside a file that the command reads. A case is good if the main ends with exit code 2 and one sentence
on stderr, or gets as far as the work itself (which is left out here) without a traceback; within five seconds of the
processor and one gigabyte, and with all files as they were. Values that can mean nothing ("nonsense") must be refused.

No case that is refused may have compiled anything or changed a file. Before the cases, each command line is tried as
it is, since one that is refused for another reason would hide everything behind it.

Hypothesis makes the same cases each time, reduces one that fails to as few changes as it can, and prints it. The files
of the last one stay in the folder.
"""

import argparse
import functools
import gc
import hashlib
import importlib
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
from hypothesis import HealthCheck, Phase, given, settings

from paxtrain import command_line
from tests import mains
from tests.hostile.cases import Case, cases
from tests.hostile.commands import MAINS, Main
from tests.hostile.home import prepare

settings.register_profile(
    "gate",
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("nightly", settings.get_profile("gate"), max_examples=5000)

SECONDS, BYTES = 10.0, 1 << 30  # the first plan of a home traces its model, which takes some of them
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


def _memory() -> list[int]:
    """Return this process's bytes of address space and of memory."""
    return [int(pages) * resource.getpagesize() for pages in pathlib.Path("/proc/self/statm").read_text().split()[:2]]


def _child(made: Case, arguments: list[str], out: pathlib.Path) -> int:
    """Run a case in this process, which is a fork, and return its exit code."""
    # A main collects garbage when it begins and ends. In a fork that copies all that is collected, and what Hypothesis
    # keeps of earlier cases made the last of 5,000 five times as dear as the first.
    gc.freeze()
    os.chdir(out)
    watch_compiler(out / "compiled")
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(out / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", errors="backslashreplace"), os.fdopen(2, "w", errors="backslashreplace")
    resource.setrlimit(resource.RLIMIT_AS, (_memory()[0] + (12 << 30),) * 2)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor, since the machine may have other work
    signal.setitimer(signal.ITIMER_REAL, 60 * SECONDS)  # of waiting
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


def run(made: Case, home: pathlib.Path) -> tuple[str, str]:
    """Run a case and return what is wrong with it, or "", and its command line with the end of what it said.

    What it has read and written stays in the folder beside the home until the next case.
    """
    here, out = home, pathlib.Path(f"{home}.case")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if made.files:
        here = out / "home"
        shutil.copytree(home, here)
        for name, content in made.files.items():
            (here / name).write_bytes(content)
    arguments = made.arguments(here, out)
    for name in OUTPUTS:  # of an earlier run, which must not be lost
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("of an earlier run")
    before, own = _files(home, out), _memory()[1]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _child(made, arguments, out)
        finally:
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    after = _files(home, out)
    refused = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2
    touched = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    touched = [name for name in touched if name not in {str(out / left) for left in made.main.leaves}]
    if not refused:
        touched = [name for name in touched if name.startswith((f"{home}/", f"{out}/home/"))]
    found = problem(made, status, (used.ru_maxrss << 10) - own, out, touched)
    if not found and refused and not made.changes:
        found = "refused as it is"
    line = " ".join(a if len(a) < 200 else f"{a[:80]}..." for a in arguments)
    said = (out / "stderr").read_text(errors="replace")[-1500:]
    return found, "\n".join([f"{made.main.module} {line!r}", made.nonsense, said, *touched])


@functools.cache
def kind(found: str) -> type[AssertionError]:
    """Return the type of the exception for a problem; Hypothesis takes those of other types for other faults."""
    return type(found, (AssertionError,), {"__module__": "builtins"})


def hunt(mains: tuple[Main, ...], home: pathlib.Path, profile: str) -> None:
    """Try each command line as it is, then cases of them.

    Raises:
        AssertionError: one of the class that `kind` returns, if a case is bad; a group of them if several are.
    """

    def check(made: Case) -> None:
        found, said = run(made, home)
        if found:
            raise kind(found)(said)

    for main in mains:
        check(Case(main))
    settings(settings.get_profile(profile))(given(cases(mains, home))(check))()


def main() -> None:
    """Prepare the files and the modules, and look for bad cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--profile", choices=("gate", "nightly"), default="gate")
    flags = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    home = flags.folder / f"home{os.getpid()}"
    prepare(home)
    for each in MAINS:  # each fork has all modules at once
        importlib.import_module(each.module)
        for place in each.skip:
            importlib.import_module(place.partition(":")[0] or each.module)
    gc.collect()
    hunt(MAINS, home, flags.profile)
    for folder in (home, pathlib.Path(f"{home}.case")):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
