"""A supervised run of a small GPT on the shaped cluster: its start, its restarts, its end, and new plans."""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.hosts.hosts import Cluster
from paxtrain.data.preparation import prepare
from paxtrain.process import job_secret
from paxtrain.run import metrics, sampling
from planner.supervision.peer_connections import PORT
from planner.supervision.supervisor import FAULT, Limits

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS, MBIT = 4, 200.0
BATCH, EVERY = 12, 20  # samples of a step; steps between two checkpoints
LIMITS = Limits(link=6.0, settle=3.0, grace=1.0, start=60.0)
DISK = 24  # MB for checkpoints
PATIENCE = 300.0  # seconds for events without a bound, on a machine that others use as well
_COORDINATOR = 9701
_MODEL = {"vocab_size": 257, "layers": 4, "hidden": 32, "heads": 4, "sequence": 32, "dtype": "float32"}
_SETTINGS = {
    **{f"model.{name}": value for name, value in _MODEL.items()},
    "mesh.data": 2,
    "mesh.pipe": 2,
    "mesh.tensor": 1,
    "batch.global_batch": BATCH,
    "batch.micro_batch": 1,
    "pipeline.scan_layers": "on",  # a smaller program, sooner compiled
    "optimizer.schedule": "constant",  # so that nothing depends on the run's length
    "optimizer.learning_rate": 1e-4,  # at 1e-3 rounding is 2e-7 of the loss after 200 steps, and 4% after 400
    "optimizer.warmup_steps": 10,
    "checkpoint.every": EVERY,
    "run.steps": 100_000,
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.sample_tokens": 0,
}
Figures = dict[str, Any]


class FaultError(AssertionError):
    """A fault did not end as docs/faults.md promises."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise FaultError(what)


@dataclasses.dataclass
class Running:
    """A started supervised run, with a supervisor on each of some hosts."""

    lab: "Lab"
    hosts: tuple[int, ...]
    folder: pathlib.Path
    supervisors: dict[int, subprocess.Popen[bytes]]
    began: float

    def said(self, host: int) -> str:
        return (self.folder / f"host{host}.said").read_text(errors="replace")

    def everything_said(self) -> str:
        return "\n".join(f"{host}: {self.said(host)}" for host in self.hosts)

    def wait_for(self, what: str, holds: Callable[[], bool], limit: float) -> float:
        """Return the seconds since the start when the condition holds; all supervisors must live until then."""
        until = time.monotonic() + limit
        while not holds():
            ended = [host for host, popen in self.supervisors.items() if popen.poll() is not None]
            require(not ended, f"hosts {ended} ended before {what}:\n{self.everything_said()}")
            require(time.monotonic() < until, f"{what} did not come within {limit:g} s:\n{self.everything_said()}")
            time.sleep(0.02)
        return time.monotonic() - self.began

    def wait_for_step(self, step: int, limit: float = PATIENCE) -> float:
        return self.wait_for(f"step {step}", lambda: self.lab.last_step() >= step, limit)

    def wait_for_words(self, host: int, words: str, limit: float = PATIENCE) -> float:
        return self.wait_for(f"{words!r} on host {host}", lambda: words in self.said(host), limit)

    def wait_for_end(self, dead: Sequence[int] = (), limit: float = LIMITS.bound) -> tuple[float, str]:
        """Return when the last survivor ended, and the one sentence that all of them printed."""
        survivors = [host for host in self.hosts if host not in dead]
        until = time.monotonic() + limit
        while any(self.supervisors[host].poll() is None for host in survivors):
            require(time.monotonic() < until, f"still alive after {limit:g} s:\n{self.everything_said()}")
            time.sleep(0.02)
        ended = time.monotonic()
        codes = {host: self.supervisors[host].returncode for host in survivors}
        require(set(codes.values()) == {FAULT}, f"exit codes {codes}:\n{self.everything_said()}")
        errors = [[line for line in self.said(host).splitlines() if line.startswith("error: ")] for host in survivors]
        require(
            all(len(each) == 1 for each in errors) and len({each[0] for each in errors}) == 1,
            f"not one sentence:\n{self.everything_said()}",
        )
        return ended, errors[0][0].removeprefix("error: ")

    def report(self, host: int) -> dict[str, Any]:
        return json.loads((self.folder / f"host{host}.json").read_text())

    def stop(self, limit: float = PATIENCE) -> None:
        """Send SIGTERM, as a scheduler does: the run saves a checkpoint and ends well."""
        for popen in self.supervisors.values():
            popen.send_signal(signal.SIGTERM)
        codes = [popen.wait(limit) for popen in self.supervisors.values()]
        require(set(codes) == {0}, f"exit codes {codes} after SIGTERM:\n{self.everything_said()}")


def checkpoints(out: pathlib.Path) -> list[int]:
    """Return the steps of a run's finished checkpoints, ascending."""
    return sorted(int(path.name) for path in (out / sampling.CHECKPOINTS).iterdir() if path.name.isdecimal())


class Lab:
    """The run that all faults happen to: its hosts, its data, its folder."""

    def __init__(self, cluster: Cluster, home: pathlib.Path, **settings: Any) -> None:
        """Make the run; `settings` by `section.name` come beside or instead of those that all runs share."""
        self.cluster, self.home, self._settings = cluster, home, {**_SETTINGS, **settings}
        self.running: Running | None = None
        self._starts = 0
        self.environment = {
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "PYTHONPATH": str(ROOT),
            job_secret.VARIABLE: job_secret.make(),
        }
        home.mkdir(parents=True, exist_ok=True)
        (home / "corpus.txt").write_text(" ".join(map(str, range(40_000))))
        prepare([str(home / "corpus.txt")], home / "data")
        (home / "run" / sampling.CHECKPOINTS).mkdir(parents=True)
        self.out = home.absolute() / "run"
        self._hold_disk()

    def _hold_disk(self) -> None:
        """Mount a small disk for the checkpoints; it ends with the process that holds it."""
        place = self.out / sampling.CHECKPOINTS
        script = 'mount -t tmpfs -o size="$1"m none "$2" && touch "$2/held" && exec sleep infinity'
        holder = self.cluster.start(0, ["/bin/sh", "-c", script, "sh", str(DISK), str(place)])
        # As its mounts show it, to all hosts and to this process.
        self.out = pathlib.Path(f"/proc/{holder.pid}/root{self.out}")
        held, until = self.out / sampling.CHECKPOINTS / "held", time.monotonic() + 10
        while not held.exists():
            require(time.monotonic() < until and holder.poll() is None, "no disk could be mounted")
            time.sleep(0.02)
        held.unlink()

    def settings(self, **changes: Any) -> list[str]:
        data = {"data.train": self.home / "data/train", "data.validation": self.home / "data/validation"}
        values = {**self._settings, **data, "run.out": self.out, **changes}
        return [f"--config.{name}={value}" for name, value in values.items()]

    def last_step(self) -> int:
        """Return the last step in the metrics."""
        path = self.out / metrics.FILE
        records = metrics.read(path) if path.exists() else []
        return max((record["step"] for record in records if "loss" in record), default=0)

    def _metrics_file(self) -> int:
        """Return the newest file of metrics: each start makes one from the kept part of the one before."""
        path = self.out / metrics.FILE
        return path.stat().st_ino if path.exists() else 0

    def start(self, hosts: Sequence[int] = range(HOSTS), plan: pathlib.Path | None = None) -> Figures:
        """Start the command on some hosts, and return figures of its start."""
        self._starts += 1
        folder = self.home / f"start{self._starts}"
        folder.mkdir()
        before, saved = self.last_step(), max(checkpoints(self.out), default=0)
        limits = [f"--link_timeout={LIMITS.link}", f"--settle={LIMITS.settle}", f"--grace={LIMITS.grace}"]
        limits.append(f"--start_timeout={LIMITS.start}")
        addresses = ",".join(f"{self.cluster.names[host]}:{PORT}" for host in hosts)
        mesh = [f"--plan={plan}"] if plan else []
        began, file, supervisors = time.monotonic(), self._metrics_file(), {}
        for number, host in enumerate(hosts):
            watch = [sys.executable, "-m", "planner.supervise", f"--hosts={addresses}", f"--host={number}", *limits]
            watch += [f"--log={folder}/host{host}.log", f"--report={folder}/host{host}.json", "--"]
            train = [sys.executable, "-m", "paxtrain.train", *self.settings(), *mesh, "--cpu_devices=1"]
            train += [f"--coordinator={self.cluster.addresses[hosts[0]]}:{_COORDINATOR}"]
            train += [f"--num_processes={len(hosts)}", f"--process_id={number}"]
            said = folder / f"host{host}.said"
            supervisors[host] = self.cluster.start(host, [*watch, *train], log=said, env=self.environment)
        self.running = Running(self, tuple(hosts), folder, supervisors, began)
        self.running.wait_for("new metrics", lambda: self._metrics_file() != file, PATIENCE)
        if saved:
            [line] = [line for line in self.running.said(hosts[0]).splitlines() if line.startswith("resumed from ")]
            saved = int(line.split()[3].rstrip(","))
        seconds = self.running.wait_for_step(saved + 1)
        return {"resume_seconds": seconds, "resumed_from": saved, "lost_steps": max(0, before - saved)}


def plan_without(lab: Lab, names: Sequence[str]) -> tuple[pathlib.Path, float]:
    """Return the planner's plan for the remaining hosts, and the seconds it took."""
    began, file = time.monotonic(), lab.home / "cluster.json"
    links = {"alpha": 1e-4, "bandwidth": [[MBIT * 1e6 / 8] * HOSTS] * HOSTS}
    sizes = {"tensor": 1, "micro_batch": 1, "hidden": 32, "heads": 4, "sequence": 32, "vocab": 257}
    seconds = {"forward": 1e-3, "backward": 2e-3, "head": 1e-3, "embedding": 1e-4, "optimizer": 1e-9}
    compute = [{"kind": "cpu", "save": "layer_inputs", "dtype": "float32", **sizes, **seconds}]
    values = {"version": 1, "hosts": list(lab.cluster.names), "devices_per_host": 1, "device": "cpu", "memory": 1e9}
    file.write_text(json.dumps({**values, "links": links, "compute": compute}))
    model = [f"--model.model.{name}={value}" for name, value in _MODEL.items()]
    command = [sys.executable, "-m", "planner.plan", "--model=configs/tiny.py", *model, f"--cluster={file}"]
    command += [
        "--model.pipeline.scan_layers=on",
        f"--without={','.join(names)}",
        f"--global_batch={BATCH}",
        "--compress=none",
        "--nomemory_margin",
    ]
    out = lab.home / "plan"
    done = subprocess.run([*command, f"--out={out}"], cwd=ROOT, capture_output=True, text=True, check=False)
    require(done.returncode == 0, done.stderr)
    return out / "plan.json", time.monotonic() - began
