"""A supervisor's worker, as scripts that end in every way: its report, its output and its log."""

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from paxtrain.errors import UserError
from planner.supervision import worker_process
from planner.supervision.worker_process import WorkerProcess, best_line

ROOT = pathlib.Path(__file__).resolve().parents[3]
TELLING = "import os, sys, time; from paxtrain.process import supervised; p = supervised.Progress(os.environ)\n"


def run(script: str, log: pathlib.Path, during=None, grace: float = 5.0):
    """Return the status of a worker when it has ended, or else the result of `during` while it runs."""

    async def main():
        worker = WorkerProcess(
            [sys.executable, "-u", "-c", TELLING + script], os.environ | {"PYTHONPATH": str(ROOT)}, log
        )
        try:
            await worker.start()
            if during is not None:
                return await during(worker)
            while worker.status().state != "ended":
                await asyncio.wait_for(worker.changed.wait(), 20)
                worker.changed.clear()
            return worker.status()
        finally:
            await worker.end(grace)

    return asyncio.run(main())


async def until(holds, limit: float = 10.0):
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("pass", {"good": True, "code": 0, "signal": "", "error": ""}),
        ("sys.exit(7)", {"good": False, "code": 7}),
        ("print('error: no such key', file=sys.stderr); sys.exit(2)", {"code": 2, "error": "error: no such key"}),
        ("os.kill(os.getpid(), 9)", {"signal": "SIGKILL", "code": None, "asked": False, "failed": False}),
        ("os.abort()", {"signal": "SIGABRT"}),
        ("1 / 0", {"code": 1, "error": "ZeroDivisionError: division by zero", "failed": False}),
        ("\nwith p: 1 / 0", {"code": 1, "error": "ZeroDivisionError: division by zero", "failed": True}),
        ("\nwith p: sys.exit(3)", {"code": 3, "failed": False}),
        ("p.finished(4); p.now('saving')", {"step": 4, "doing": "saving"}),
    ],
)
def test_how_it_ended(tmp_path, script, expected):
    status = run(script, tmp_path / "log")
    assert {name: getattr(status, name) for name in expected} == expected
    assert status.state == "ended" and 0 <= status.ended_age < 5


def test_an_exception_is_told_while_the_process_still_lives(tmp_path):
    """Processes of jax wait for each other at exit in this way."""

    async def during(worker):
        await asyncio.wait_for(worker.changed.wait(), 20)
        return worker.status(), worker.over

    script = "import atexit; atexit.register(time.sleep, 60)\nwith p: raise OSError(28, 'No space left on device')"
    status, over = run(script, tmp_path / "log", during, grace=0.1)
    assert (status.state, status.failed, over) == ("running", True, True)
    assert status.error == "OSError: [Errno 28] No space left on device"


def test_steps_and_what_is_between_them(tmp_path):
    async def during(worker):
        await until(lambda: worker.status().doing == "saving a checkpoint")
        status = worker.status()
        await until(lambda: worker.status().told_age > 0.3)
        return status

    script = "for i in range(1, 9): time.sleep(0.15); p.finished(i)\np.now('saving a checkpoint'); time.sleep(60)"
    status = run(script, tmp_path / "log", during, grace=0.1)
    assert status.step == 8 and status.step_seconds == pytest.approx(0.15, abs=0.1)
    assert status.told_age < 0.3


def test_a_stopped_process_is_no_waiting_one(tmp_path):
    async def during(worker):
        await until(lambda: worker.status().step == 1)
        assert worker.status().frozen == ""
        os.kill(worker._process.pid, signal.SIGSTOP)
        await until(lambda: worker.status().frozen != "")
        return worker.status()

    status = run("p.finished(1); time.sleep(60)", tmp_path / "log", during, grace=0.1)
    assert (status.state, status.frozen) == ("running", "stopped by a signal")


def test_sigterm_first_then_sigkill_to_the_whole_group(tmp_path):
    """The worker may save. If it ignores the signal, it and its children are killed when the grace time is over."""

    async def asked(worker):
        await until(lambda: worker.status().step == 1)
        await worker.end(10)
        return worker.status()

    polite = "import signal; signal.signal(15, lambda *_: (p.finished(2), sys.exit(0)))\np.finished(1); time.sleep(60)"
    began = time.monotonic()
    status = run(polite, tmp_path / "log", asked)
    assert status.good and status.step == 2 and status.asked and time.monotonic() - began < 8

    async def killed(worker):
        await until(lambda: worker.status().step == 1)
        began = time.monotonic()
        await worker.end(0.3)
        return time.monotonic() - began

    child = tmp_path / "child"
    deaf = f"""
import signal, subprocess
signal.signal(15, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(child.pid))
p.finished(1); time.sleep(60)
"""
    assert 0.3 <= run(deaf, tmp_path / "log", killed) < 3
    stat = pathlib.Path(f"/proc/{child.read_text()}/stat")
    deadline = time.monotonic() + 5  # a signal takes its time
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_sigkill_cannot_end_is_not_waited_for(tmp_path, monkeypatch, capfd):
    """The worker is like one in an uninterruptible sleep, which waits for a dead disk or driver."""
    sent = []
    monkeypatch.setattr(worker_process, "KILLED", 0.1)
    monkeypatch.setattr(worker_process.os, "killpg", lambda *group: sent.append(group))

    async def during(worker):
        await until(lambda: worker.status().step == 1)
        number = worker._process.pid
        try:
            await asyncio.wait_for(worker.end(0.1), 20)
            await worker.end(60)  # a second call does nothing
        finally:
            with contextlib.suppress(ProcessLookupError):  # closing it has killed it
                os.kill(number, signal.SIGKILL)
            await until(lambda: worker._process.returncode is not None)
        return number

    deaf = "import signal; signal.signal(15, signal.SIG_IGN); p.finished(1); time.sleep(60)"
    number = run(deaf, tmp_path / "log", during)
    assert sent == [(number, signal.SIGKILL)]
    for said in (capfd.readouterr().err, (tmp_path / "log").read_text()):
        assert f"warning: process {number} still lives 0.1 s after SIGKILL; it may hold its devices" in said


def test_the_worker_does_not_outlive_a_killed_supervisor(tmp_path):
    number = tmp_path / "number"
    script = f"open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"""
import asyncio, os, pathlib, sys
from planner.supervision.worker_process import WorkerProcess
async def main():
    command = [sys.executable, "-c", {"import os, time; " + script!r}]
    worker = WorkerProcess(command, os.environ, pathlib.Path({str(tmp_path / "log")!r}))
    await worker.start()
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT)
    try:
        deadline = time.monotonic() + 20
        while not (number.exists() and number.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        worker = pathlib.Path(f"/proc/{number.read_text()}/stat")
        assert worker.exists()
    finally:
        process.kill()
        process.wait()
    while worker.exists() and worker.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_output_goes_through_and_traces_to_the_log_alone(tmp_path, capfd):
    script = """
print("loss 3.2")
print("step 1/10", file=sys.stderr)
p.finished(1); time.sleep(0.3)
print("F1121 22:19:30.482801    6662 client.h:80] Terminating process", file=sys.stderr)
print("    @     0x7f3d2fc40634  absl::Flush()", file=sys.stderr)
"""
    run(script, tmp_path / "log")
    out, err = capfd.readouterr()
    assert out == "loss 3.2\n" and err == "step 1/10\n"
    log = (tmp_path / "log").read_text()
    assert re.match(r"--- \d{4}-\d\d-\d\d ", log)
    assert all(text in log for text in ("loss 3.2", "step 1/10", "Terminating process", "absl::Flush()"))


def test_a_trace_that_the_worker_survives_hides_nothing_that_follows(tmp_path, capfd):
    script = """
import traceback
try: 1 / 0
except ZeroDivisionError: traceback.print_exc()
time.sleep(0.5); p.finished(1); time.sleep(0.5)
print("step 2/10", file=sys.stderr)
"""
    assert run(script, tmp_path / "log").error == ""
    assert capfd.readouterr().err == "step 2/10\n"


@pytest.mark.parametrize(
    ("lines", "best"),
    [
        ([], ""),
        (["step 1", "what now"], "what now"),
        (["Traceback (most recent call last):", '  File "x"', "ValueError: bad", "later"], "ValueError: bad"),
        (
            ["Traceback (most recent call last):", "jax.errors.JaxRuntimeError: UNKNOWN: Gloo"],
            "jax.errors.JaxRuntimeError: UNKNOWN: Gloo",
        ),
        (["F1121 22:19:30.478666    6661 client.h:80] Terminating", "    @  0x7f  x()"], "Terminating"),
        (["error: no such key", "    @  0x7f  x()"], "error: no such key"),
        (["ValueErrorless text: no", "last"], "last"),
    ],
)
def test_the_line_that_says_why(lines, best):
    assert best_line(lines) == best


def test_what_cannot_be_run_or_written_is_told(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot write to --log="):
        WorkerProcess(["true"], os.environ, tmp_path / "folder")

    async def none():
        worker = WorkerProcess(["no-such-command"], os.environ, tmp_path / "log")
        with pytest.raises(UserError, match="there is no command 'no-such-command'"):
            await worker.start()
        await worker.end(1)

    asyncio.run(none())


def test_the_progress_file_is_in_memory_and_gone_afterwards(tmp_path):
    status = run("print(os.environ['PAXTRAIN_PROGRESS'])", tmp_path / "log")
    assert status.good
    [path] = [line for line in (tmp_path / "log").read_text().splitlines() if line.endswith("/progress")]
    assert not pathlib.Path(path).exists() and not path.startswith(str(tmp_path))


def test_lines_of_gloo_go_to_the_log_alone(tmp_path, capfd):
    """It tells of each connection on stdout, in the middle of what the worker prints."""
    script = """
for text in ("one\\n[Gl", "oo] Rank 0 is connected to 3 peer ranks.\\ntwo\\n", "[Gloomy]\\n", "[Gl", "ass\\n", "y/n? "):
    print(text, end="", flush=True)
    time.sleep(0.05)
print("[Gloo] Rank 1", end="", flush=True)
"""
    assert run(script, tmp_path / "log").good
    assert capfd.readouterr().out == "one\ntwo\n[Gloomy]\n[Glass\ny/n? "
    assert "[Gloo] Rank 0 is connected" in (tmp_path / "log").read_text()
