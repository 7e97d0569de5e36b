"""The parts' processes: started one after another and ended when their time is up; each outcome is written at once."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from tqdm import tqdm

from experiments.gpu import section as sections
from experiments.gpu.section import (
    DONE,
    FAILED,
    FULL,
    SKIPPED,
    TOY,
    PartOutcome,
    Section,
    SectionPart,
    SectionRecord,
    Setting,
)
from paxtrain.errors import UserError
from paxtrain.process import distributed

# A part that begins just before its section's budget ends may still take this long, in seconds.
_LEAST = 60
ROOT = pathlib.Path(__file__).parents[2]


def commit() -> str:
    """Return the commit of the code, with a fingerprint of the sources if they differ from it or git is not there."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    packages = ("compress", "paxtrain", "planner")
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        if not git("status", "--porcelain", "--", *packages):
            return head
    except (OSError, subprocess.CalledProcessError):
        head = "no commit"
    digest = hashlib.sha256()
    for path in sorted(path for package in packages for path in (ROOT / package).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{head}+{digest.hexdigest()[:8]}"


# --- In a part's process ----------------------------------------------------------------------------------------------


def run_part(
    part: SectionPart, folder: pathlib.Path, result: pathlib.Path, process: int, coordinator: str | None
) -> None:
    """Run a part in this process, and write its outcome.

    Args:
        part: the part.
        folder: folder for files besides the record.
        result: file of the outcome, which process 0 writes.
        process: number of this process among the part's.
        coordinator: HOST:PORT at which the part's processes meet; None: it has one process.
    """
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()  # ends with its parent
    jax.config.update("jax_num_cpu_devices", part.devices // part.processes)
    if coordinator:
        distributed.initialize(coordinator, part.processes, process, 60)
    try:
        outcome = PartOutcome(DONE, result=part.measure(folder, **part.arguments))
    except Exception as error:  # whatever it is, it is recorded, and the next part goes on
        sentence = " ".join(str(error).split())[:400]
        outcome = PartOutcome(FAILED, reason=f"{type(error).__name__}: {sentence}", traceback=traceback.format_exc())
    if process == 0 or outcome.status == FAILED:
        sections.write_json(result, dataclasses.asdict(outcome))
    sys.exit(outcome.status == FAILED)


def describe_devices() -> dict[str, Any]:
    """Return what this process's devices are."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "count": jax.device_count() if device.platform == "gpu" else 1,
        "jax": jax.__version__,
    }


# --- In the process that starts them ----------------------------------------------------------------------------------


def _environment(section: Section, part: SectionPart, process: int, size: str, out: pathlib.Path) -> dict[str, str]:
    """Return the environment of one of a part's processes; `out` is the folder of the records."""
    own = dict(part.environment)
    if "XLA_FLAGS" not in own:
        # XLA keeps there which kernels it has found to be the fastest, so that a model's next step is tuned in less
        # time. Whole programs are not kept: each part compiles its own.
        own["JAX_COMPILATION_CACHE_DIR"] = str(out / "tuned")
        own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"
    # Toy size shows that parts run. Most of its time is compiling, which is quicker without LLVM's optimizations.
    quick = "--xla_backend_optimization_level=0" if size == TOY else ""
    flags = [os.environ.get("XLA_FLAGS", ""), quick, own.pop("XLA_FLAGS", "")]
    found = os.environ | own | {"XLA_FLAGS": " ".join(filter(None, flags)), "TF_CPP_MIN_LOG_LEVEL": "2"}
    found.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")  # the 1.3B model's plain step needs most of a GPU
    if not section.timed:
        found.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the memory is for all that run at once
    if part.processes > 1:
        share, visible = part.devices // part.processes, os.environ.get("CUDA_VISIBLE_DEVICES", "")
        every = visible.split(",") if visible else [str(i) for i in range(part.devices)]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(every[process * share : (process + 1) * share])
    return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def _started(commands: Sequence[tuple[list[str], dict[str, str]]], log: pathlib.Path) -> Iterator[list]:
    """Start processes that write to a log, and end them on the way out."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(log, "w"))
        processes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment, cwd=ROOT)
            )
            for command, environment in commands
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()


def _wait(processes: Sequence[subprocess.Popen], seconds: float) -> str:
    """Wait until all processes have ended well, one has not, or the time is up. Return the reason, empty if well."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if any(codes):
            return f"its process ended with {next(code for code in codes if code)}"
        if None not in codes:
            return ""
        time.sleep(0.05)
    return f"it was not done in {seconds:.0f} s"


def start_part(section: Section, part: SectionPart, size: str, out: pathlib.Path, seconds: float) -> PartOutcome:
    """Run a part in processes of its own, and return its outcome.

    Args:
        section: the section.
        part: the part.
        size: FULL or TOY.
        out: folder of the records.
        seconds: time that it may take.
    """
    began = time.monotonic()
    log = out / section.name / f"{part.name.replace(' ', '_').replace('/', '_')}.log"
    with tempfile.TemporaryDirectory() as scratch:
        result = pathlib.Path(scratch) / "outcome.json"
        command = [
            sys.executable,
            "-m",
            "experiments.gpu",
            f"--sections={section.name}",
            f"--size={size}",
            f"--out={out}",
        ]
        command += [f"--part={part.name}", f"--result={result}"]
        if part.processes > 1:
            command.append(f"--coordinator=127.0.0.1:{_free_port()}")
        commands = [
            ([*command, f"--process={i}"], _environment(section, part, i, size, out)) for i in range(part.processes)
        ]
        with _started(commands, log) as processes:
            reason = _wait(processes, seconds)
        if result.exists():
            outcome = PartOutcome(**json.loads(result.read_text()))
        else:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            said = f"; the last line of {log} is: {last[0][:300]}" if last else ""
            outcome = PartOutcome(FAILED, reason=f"{reason}{said}")
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def look(size: str) -> Setting:
    """Return the setting of this machine.

    Args:
        size: FULL, TOY, or "auto": full on GPUs, toy otherwise.

    Raises:
        UserError: jax finds no device.
    """
    # In a process of its own, since jax keeps a GPU's memory.
    command = [sys.executable, "-m", "experiments.gpu", "--look"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    if found.returncode:
        said = (found.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"jax does not start here ({said}); JAX_PLATFORMS=cpu would use no GPU")
    values = json.loads(found.stdout.splitlines()[-1])
    chosen = (FULL if values["platform"] == "gpu" else TOY) if size == "auto" else size
    return Setting(commit=commit(), size=chosen, **values)


def _budgets(table: Sequence[Section], setting: Setting, minutes: float) -> list[float]:
    """Return the seconds of each section: budgets of one GPU share the minutes, those of several come on top."""
    one = sum(section.seconds for section in table if not section.several)
    scale, several = 60 * minutes / max(one, 1), setting.count > 1 or setting.platform == "cpu"
    return [section.seconds * (several if section.several else scale) for section in table]


def _skip(part: SectionPart, setting: Setting, left: float) -> str:
    """Return why a part is not run, or an empty string."""
    if setting.platform == "gpu" and part.devices > setting.count:
        return f"it needs {part.devices} GPUs, and this host has {setting.count}"
    return "" if left > 0 else "the time was spent"


def _pending(
    section: Section, record: SectionRecord, setting: Setting, until: float
) -> Iterator[tuple[SectionPart, str]]:
    """Yield the parts that are not done, each with the reason to skip it, empty if there is none."""
    for part in section.parts[setting.size]:
        before = record.parts.get(part.name)
        if before is None or before.status != DONE:
            yield part, _skip(part, setting, until - time.monotonic())


def _outcomes(
    section: Section, record: SectionRecord, setting: Setting, out: pathlib.Path, until: float, bar: tqdm
) -> Iterator[tuple[str, PartOutcome]]:
    """Run a section's parts, those that measure no time side by side, and yield each one's outcome when it is known."""

    def start(part: SectionPart) -> tuple[str, PartOutcome]:
        bar.set_description(f"{section.name}: {part.name}")
        seconds = max(until - time.monotonic(), _LEAST)
        return part.name, start_part(section, part, setting.size, out, seconds)

    # Each process compiles on more than one core.
    workers = 1 if section.timed else max((os.cpu_count() or 1) // 2, 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        started = []
        for part, reason in _pending(section, record, setting, until):
            if reason:
                yield part.name, PartOutcome(SKIPPED, reason=reason)
            elif section.timed:
                yield start(part)
            else:
                started.append(pool.submit(start, part))
        for future in concurrent.futures.as_completed(started):
            yield future.result()


def run_all(
    table: Sequence[Section], setting: Setting, out: pathlib.Path, minutes: float, again: bool
) -> Iterator[SectionRecord]:
    """Run the parts that are not yet measured in this setting, and yield each section's record when it is complete.

    Args:
        table: the sections, in order of value.
        setting: where they are measured.
        out: folder of the records, which are written after each part.
        minutes: time of all sections together.
        again: whether parts are measured again that are already.
    """
    began, budget = time.monotonic(), 0.0
    total = sum(len(section.parts[setting.size]) for section in table)
    with tqdm(total=total, unit="part", dynamic_ncols=True) as bar:
        for section, seconds in zip(table, _budgets(table, setting, minutes)):
            budget += seconds
            record = sections.load(out, section.name)
            if record is None or record.setting != setting or again:
                record = SectionRecord(section.name, setting)
            bar.update(len(record.results()))
            for name, outcome in _outcomes(section, record, setting, out, began + budget, bar):
                record.enter(name, outcome)
                sections.save(out, record)
                if outcome.status != DONE:
                    bar.write(f"{section.name}, {name}: {outcome.status}, {outcome.reason}")
                bar.update()
            yield record
