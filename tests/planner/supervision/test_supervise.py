"""Supervisors as processes, one per host of this machine: however a worker ends, all end with one correct sentence.

The workers are short scripts that behave as training does: they report their steps, and stand still when another one
does not continue (a file that all look at stands for the collective).
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from paxtrain.process import job_secret, supervised
from planner.supervision import addresses
from planner.supervision.peer_connections import PeerConnections
from planner.supervision.supervisor import FAULT, STOPPED, Limits, Supervisor, environment
from planner.supervision.worker_process import WorkerProcess
from tests.planner.ports import free_ports
from tests.planner.supervision.supervisors import HOSTS, ROOT, SECRET, start, wait, wait_for

# Without notes on slow steps, because a shared machine is slow at random.
LIMITS = Limits(link=1.0, hang=60.0, settle=2.0, grace=0.5, start=20.0, slow_step=1e6)
HANG = 2.0
FATAL = "F1121 22:19:30.478666 6661 client.h:80] Terminating process because the JAX distributed service failed"
ABORT = f"print({FATAL!r}, file=sys.stderr, flush=True); os.abort()"
GLOO = "raise RuntimeError('UNKNOWN: Gloo all-reduce failed: Connection closed by peer')"
# What the worker of host 1 does at step 5. The others then lose it and fail, or wait for ever.
WORKER = """
import os, pathlib, signal, sys, time
from paxtrain.process import supervised

host, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
print(f"host {host} begins", flush=True)
with supervised.Progress(os.environ) as p:
    for step in range(1, STEPS + 1):
        time.sleep(0.05)
        p.finished(step)
        if "EVENT" != "pass" and step == 5 and host == 1:
            while not all((folder / f"{other}.5").exists() for other in (0, 2)):
                time.sleep(0.01)
            (folder / "broken").touch()
            time.sleep(0.1)  # the others fail first
            EVENT
        (folder / f"{host}.{step}").touch()
        while not all((folder / f"{other}.{step}").exists() for other in range(3)) or (
            host != 1 and (folder / "broken").exists()
        ):
            if (folder / "broken").exists():
                OTHERS
            time.sleep(0.01)
"""


def supervisors(
    folder: pathlib.Path,
    event: str = "pass",
    others: str = "pass",
    hosts=range(HOSTS),
    steps: int = 40,
    limits: Limits = LIMITS,
    worker: str = WORKER,
):
    """Yield the supervisors, one per host, by its number."""
    script = worker.replace("EVENT", event).replace("OTHERS", others).replace("STEPS", str(steps))
    return start(folder, script, limits, hosts)


def sentence(folder, hosts=range(HOSTS)) -> str:
    """Return the sentence that all of them print. Besides it a host prints only where its log is."""
    said = {host: (folder / f"err{host}").read_text().splitlines() for host in hosts}
    said = {host: [line for line in lines if not line.startswith("note: ")] for host, lines in said.items()}
    for host, lines in said.items():
        assert lines == [lines[0], f"log     {folder}/log{host}"], said
    assert len({lines[0] for lines in said.values()}) == 1, said
    return said[hosts[0]][0]


def test_where_nothing_happens_nothing_is_said(tmp_path):
    with supervisors(tmp_path) as started:
        assert wait(tmp_path, started) == [0] * HOSTS
    for host in range(HOSTS):
        assert (tmp_path / f"out{host}").read_text() == f"host {host} begins\n"
        assert (tmp_path / f"err{host}").read_text() == ""
        assert not (tmp_path / f"report{host}.json").exists()


@pytest.mark.parametrize(
    ("event", "others", "code", "kind", "words"),
    [
        ("os.kill(os.getpid(), 9)", GLOO, FAULT, "killed", "the worker was killed by SIGKILL, after step 5"),
        ("raise OSError(28, 'No space left on device')", GLOO, FAULT, "disk full", "the worker found its disk full"),
        ("raise KeyError('x')", ABORT, FAULT, "exception", "the worker failed, after step 5"),
        ("print('error: no such data', file=sys.stderr); sys.exit(2)", GLOO, 2, "bad input", "(no such data)"),
        ("time.sleep(600)", "time.sleep(600)", FAULT, "stalled", "no worker has finished a step for "),
        (
            "p.now('saving a checkpoint'); time.sleep(600)",
            GLOO.replace("raise", "time.sleep(6); raise"),
            FAULT,
            "busy",
            "the worker has been saving a checkpoint for",
        ),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            GLOO.replace("raise", "time.sleep(6); raise"),
            FAULT,
            "frozen",
            "the worker has been stopped by a signal for",
        ),
    ],
    ids=["killed", "disk", "exception", "bad input", "hang", "busy", "stopped"],
)
def test_all_say_who_was_first(tmp_path, event, others, code, kind, words):
    limits = dataclasses.replace(LIMITS, hang=HANG) if kind == "stalled" else LIMITS
    with supervisors(tmp_path, event, others, limits=limits) as started:
        wait_for(tmp_path, "broken")
        broken = time.monotonic()
        assert wait(tmp_path, started) == [code] * HOSTS
        seconds = time.monotonic() - broken
    assert seconds < (6.2 if kind in ("busy", "frozen") else HANG) + LIMITS.settle + LIMITS.grace + 3
    said = sentence(tmp_path)
    assert words in said and (kind == "stalled" or "127.0.0.1:" in said)
    written = [json.loads((tmp_path / f"report{host}.json").read_text()) for host in range(HOSTS)]
    assert all(each["cause"] == written[0]["cause"] for each in written)
    assert written[0]["cause"]["kind"] == kind and len(written[0]["reports"]) == HOSTS
    assert written[0]["cause"]["step"] == 5
    [cascades] = {(tmp_path / f"log{host}").read_text().count("Gloo") > 0 for host in (0, 2)}
    assert cascades == ("Gloo" in others)  # in the log alone


def test_a_host_of_which_nothing_is_left(tmp_path):
    with supervisors(tmp_path, others=GLOO) as started:
        wait_for(tmp_path, "2.3")
        began = time.monotonic()
        started[1].kill()  # its worker goes with it
        (tmp_path / "broken").touch()
        codes = wait(tmp_path, {host: started[host] for host in (0, 2)})
        assert codes == [FAULT] * 2 and time.monotonic() - began < LIMITS.settle + LIMITS.grace + 3
    said = sentence(tmp_path, (0, 2))
    assert "is gone: its worker and its supervisor have ended without a word" in said
    cause = json.loads((tmp_path / "report2.json").read_text())["cause"]
    assert cause["kind"] == "lost" and cause["leave_out"] == cause["hosts"] and f"--without={cause['hosts'][0]}" in said


def test_a_host_from_which_nothing_comes(tmp_path):
    """The host is like one without power or network: no connection is refused, and none is ended."""
    with supervisors(tmp_path, steps=4000) as started:
        wait_for(tmp_path, "2.3")
        began = time.monotonic()
        started[1].send_signal(signal.SIGSTOP)
        (tmp_path / "broken").touch()
        codes = wait(tmp_path, {host: started[host] for host in (0, 2)})
        assert codes == [FAULT] * 2 and time.monotonic() - began < 3 + LIMITS.settle + LIMITS.grace + 6
        said = sentence(tmp_path, (0, 2))
        assert "has not been heard by any other host for" in said
        started[1].send_signal(signal.SIGCONT)  # it ends, too: the others are gone
        assert wait(tmp_path, {1: started[1]}) == [FAULT]


def test_sigterm_reaches_the_worker_which_may_end_well(tmp_path):
    event = "pass"
    with supervisors(tmp_path, event, steps=4000) as started:
        for host in range(HOSTS):
            wait_for(tmp_path, f"{host}.3")
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        assert wait(tmp_path, started) == [FAULT] * HOSTS
    assert "the worker was told to end and ended by SIGTERM" in sentence(tmp_path)


def test_a_worker_that_saves_when_it_is_told_to_end(tmp_path):
    polite = "signal.signal(15, lambda *_: sys.exit(0))\n    for step in"
    script = WORKER.replace("    for step in", f"    {polite}", 1)
    with supervisors(tmp_path, steps=4000, worker=script) as started:
        for host in range(HOSTS):
            wait_for(tmp_path, f"{host}.3")
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        assert wait(tmp_path, started) == [0] * HOSTS


def test_who_is_stopped_before_the_first_step_has_not_failed(tmp_path):
    """Such a worker is still importing or planning, and has no handler for signals."""
    with supervisors(tmp_path, worker="import pathlib, sys, time; print('up', flush=True); time.sleep(60)") as started:
        for host in range(HOSTS):
            wait_for(tmp_path, f"out{host}", lambda path: path.stat().st_size > 0)
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        assert wait(tmp_path, started) == [STOPPED] * HOSTS
    assert {(tmp_path / f"err{host}").read_text().splitlines()[0] for host in range(HOSTS)} == {
        "note: stopped before the first step"
    }
    assert not list(tmp_path.glob("report*"))


def test_a_signal_that_comes_while_the_worker_is_started_is_passed_on(tmp_path):
    """The signal comes after all have joined, and before there is a process."""
    [port] = free_ports(1)

    async def main():
        worker = WorkerProcess([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "log")
        channel = PeerConnections(0, [("127.0.0.1", port)], "run", b"secret" * 6)
        supervisor = Supervisor(0, ["alone"], channel, worker, LIMITS, None)
        start = worker.start

        async def start_late():
            supervisor.stop()
            await start()

        worker.start = start_late
        return await asyncio.wait_for(supervisor.run(), 20)

    assert asyncio.run(main()) == STOPPED


def test_a_worker_that_leaves_a_child_behind_has_ended(tmp_path):
    """Its end counts although the child holds its pipes for longer than anybody waits."""
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with supervisors(tmp_path, f"import subprocess; {child}; os.kill(os.getpid(), 9)", GLOO) as started:
        wait_for(tmp_path, "broken")
        began = time.monotonic()
        assert wait(tmp_path, started) == [FAULT] * HOSTS
        assert time.monotonic() - began < LIMITS.settle + LIMITS.grace + 4
    assert "the worker was killed by SIGKILL, after step 5" in sentence(tmp_path)


def test_a_host_that_does_not_come_is_named(tmp_path):
    with supervisors(tmp_path, hosts=(0, 2), limits=dataclasses.replace(LIMITS, start=2.0)) as started:
        assert wait(tmp_path, started) == [FAULT] * 2
    assert "has not come: no supervisor there has been heard" in sentence(tmp_path, (0, 2))
    assert not (tmp_path / "0.1").exists()  # nobody has begun


# --- Limits, flags ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [1.0, 6.0, 60.0, 600.0])
def test_collectives_give_up_after_links_and_before_heartbeats(link):
    limits = Limits(link=link)
    variables = environment({"HOME": "/root", "XLA_FLAGS": "--xla_dump_to=x"}, limits)
    flags = dict(flag.removeprefix("--").split("=") for flag in variables["XLA_FLAGS"].split())
    assert flags.pop("xla_dump_to") == "x" and variables["HOME"] == "/root"
    assert set(flags.values()) == {str(limits.collective)}
    # TCP tries again after pauses that double: what is sent at the end of a cut may wait for as long as it lasted.
    assert 2 * link < limits.collective < limits.collective + limits.settle + limits.grace < limits.heartbeat
    assert supervised.heartbeat(variables) == limits.heartbeat
    assert limits.bound < limits.heartbeat


def test_a_host_without_the_folder_of_logs_takes_part(tmp_path):
    """The run can then name it, because it asks who shares its folder, and nobody waits for a supervisor."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    worker = "import sys; print('error: the folder is not shared', file=sys.stderr); sys.exit(2)"
    beginning = [sys.executable, "-m", "planner.supervise", f"--hosts={hosts}", "--start_timeout=60"]
    command = ["--", sys.executable, "-c", worker]
    variables = os.environ | {job_secret.VARIABLE: SECRET}
    pipes = {"cwd": ROOT, "env": variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*beginning, f"--host={host}", f"--name={name}", f"--logs={logs}", *command], **pipes)
        for host, (name, logs) in enumerate([("alpha", tmp_path), ("beta", "/proc/none")])
    ]
    said = [process.communicate(timeout=60)[1].splitlines() for process in started]
    assert [process.returncode for process in started] == [2, 2], said
    assert re.match("error: (alpha|beta): the worker was given bad input", said[0][0])
    assert said[0][1:] == [f"log     {tmp_path}/rank0.log"]
    note, *rest = (line for line in said[1] if not line.startswith("warning: cannot write the report"))
    assert note.startswith("note: beta keeps no log (") and "/proc/none" in note
    assert rest == said[0][:1]  # without a log, none is named


def test_flags_of_the_users_own_stay():
    variables = environment({"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=7"}, Limits())
    assert variables["XLA_FLAGS"].count("xla_cpu_collective_timeout_seconds") == 1
    assert "--xla_cpu_collective_timeout_seconds=7" in variables["XLA_FLAGS"]


def test_jax_takes_the_flags_and_the_supervisor_does_not_need_it():
    """XLA ends a process whose flags it does not know. A supervisor must start at once, and needs no devices."""
    variables = environment({**os.environ, "JAX_PLATFORMS": "cpu"}, Limits())
    code = "import jax; print(len(jax.devices()))"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    code = "import sys, planner.supervise; print(sorted({'jax', 'numpy', 'orbax'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr


def test_several_supervisors_need_a_secret_and_a_short_one_is_refused():
    for secret, words in (("", "the job has no secret, by which its 2 supervisors"), ("short", "at least 16 letters")):
        variables = os.environ | {job_secret.VARIABLE: secret, job_secret.FILE_VARIABLE: ""}
        command = [
            sys.executable,
            "-m",
            "planner.supervise",
            "--hosts=127.0.0.1:1,127.0.0.1:2",
            "--host=0",
            "--",
            "true",
        ]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert "export PAXTRAIN_JOB_SECRET=" in done.stderr


def test_addresses_and_numbers(tmp_path):
    assert addresses.addresses("a,b:9200,[::1]:5,[fe80::1]", 9000) == [
        ("a", 9000),
        ("b", 9200),
        ("::1", 5),
        ("fe80::1", 9000),
    ]
    (tmp_path / "hosts").write_text("a\nb:7\n")
    assert addresses.addresses(f"@{tmp_path}/hosts", 1) == [("a", 1), ("b", 7)]
    assert addresses.addresses("a,b:5", 9000, 2) == [("a", 9000), ("a", 9001), ("b", 5), ("b", 6)]
    assert addresses.names([("a", 1), ("b", 1), ("b", 2)]) == ["a", "b:1", "b:2"]
    assert addresses.number(None, 4, {"SLURM_PROCID": "3"}) == 3
    assert addresses.number(None, 4, {"JOB_COMPLETION_INDEX": "2"}) == 2
    assert addresses.number(1, 4, {"SLURM_PROCID": "3"}) == 1
    assert addresses.number(None, 1, {}) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts=a,b", "--host=0"], "there is no command"),
        (["--hosts=a,b", "--host=0", "--", "--config=x"], "the command begins with '--config=x'"),
        (["--host=0", "--", "true"], "--hosts is missing"),
        (["--hosts=a,b", "--", "true"], "--host is missing"),
        (["--hosts=a,b", "--host=2", "--", "true"], "--host must be in [0, 2), the places in --hosts, got 2"),
        (["--hosts=a,,b", "--host=0", "--", "true"], "--hosts must be HOST or HOST:PORT joined by commas"),
        (["--hosts=a:x,b", "--host=0", "--", "true"], "got 'a:x'"),
        (["--hosts=a:65000", "--per_host=537", "--host=0", "--", "true"], "needs ports beyond 65535"),
        (["--hosts=::1", "--", "true"], "IPv6 addresses in brackets as [fe80::1]:17430"),
        (["--hosts=fe80::1:9000", "--", "true"], "got 'fe80::1:9000'"),
        (["--hosts=[fe80::zz]", "--", "true"], "got '[fe80::zz]'"),
        (["--hosts=a,a", "--host=0", "--", "true"], "--hosts has a:17430 twice"),
        (["--hosts=@none", "--host=0", "--", "true"], "cannot read --hosts=@none"),
        (["--hosts=127.0.0.1", "--link_timeout=0", "--", "true"], "link_timeout"),
        (["--hosts=127.0.0.1", "--link_timeout=inf", "--", "true"], "--link_timeout must be a number, got inf"),
        (["--hosts=127.0.0.1", "--settle=nan", "--", "true"], "--settle must be a number, got nan"),
        (["--hosts=127.0.0.1:PORT", "--", "no-such-command"], "there is no command 'no-such-command'"),
        (["--hosts=127.0.0.1:PORT", "--log=/proc/none", "--", "true"], "cannot write to --log=/proc/none"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(arguments, words, tmp_path):
    [port] = free_ports(1)
    arguments = [argument.replace("PORT", str(port)) for argument in arguments]
    variables = {name: value for name, value in os.environ.items() if name not in addresses.NUMBERS}
    variables[job_secret.VARIABLE] = SECRET
    command = [sys.executable, "-m", "planner.supervise", f"--log={tmp_path}/log", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
