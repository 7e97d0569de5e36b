"""Training on the shaped cluster, broken in the ways of docs/faults.md: seconds until all is gone, and what is said.

    python -m experiments.lab.faults              # under srun --kill-on-bad-exit=1, where SLURM is installed
    python -m experiments.lab.faults plain        # without a scheduler

It needs root, and takes some minutes on two cores.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from experiments.hosts.hosts import Cluster, why_not
from experiments.hosts.slurm_cluster import Slurm
from paxtrain.data.preparation import prepare
from paxtrain.run import metrics, sampling

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS, MBIT = 3, 200.0
LOST = 30.0  # seconds, --lost_timeout
PATIENCE = 400.0  # seconds for events without a bound, on a machine that others use as well
_LAST = HOSTS - 1  # the host that breaks
_COORDINATOR = 9701
_DISK = 24  # MB for checkpoints
_SETTINGS = {
    "model.vocab_size": 257,
    "model.layers": 1,
    "model.hidden": 16,
    "model.heads": 2,
    "model.sequence": 32,
    "model.dtype": "float32",
    "mesh.data": HOSTS,
    "mesh.pipe": 1,
    "mesh.tensor": 1,
    "batch.global_batch": 12,
    "batch.micro_batch": 1,
    "pipeline.scan_layers": "on",  # a smaller program, sooner compiled
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 10,
    "checkpoint.every": 5,
    "run.steps": 100_000,
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.sample_tokens": 0,
}
# The command itself, but that the last process stops between two steps while there is such a file.
_HANGING = """
import os, runpy, time, jax
from paxtrain.run import loop
whole = loop.Loop._report
def report(self, *figures):
    while os.path.exists({file!r}) and jax.process_index() == {last}:
        time.sleep(0.5)
    return whole(self, *figures)
loop.Loop._report = report
runpy.run_module("paxtrain.train", run_name="__main__")
"""
_TOLD = re.compile(r"^.*(?:error|stopped by|signal|heartbeats).*$", re.IGNORECASE | re.MULTILINE)
Figures = dict[str, Any]


class Lab:
    """A run, started by hand on every host or by srun."""

    def __init__(self, cluster: Cluster, home: pathlib.Path, slurm: Slurm | None = None, lost: float = LOST) -> None:
        """Make data and the run's folder in `home`, which must not exist."""
        self.cluster, self.home, self._slurm, self._lost = cluster, home, slurm, lost
        self.environment = {
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "PYTHONPATH": str(ROOT),
        }
        home.mkdir(parents=True)
        (home / "corpus.txt").write_text(" ".join(map(str, range(40_000))))
        prepare([str(home / "corpus.txt")], home / "data")
        self.hang, self._log = home / "hang", home / "said"
        self.started: list[subprocess.Popen[bytes]] = []
        self.out = self._disk()

    def _disk(self) -> pathlib.Path:
        """Mount a small disk for the run, which ends with the process that holds it; return its path for all."""
        place = self.home / "run"
        place.mkdir()
        script = 'mount -t tmpfs -o size="$1"m none "$2" && touch "$2/held" && exec sleep infinity'
        holder = self.cluster.start(0, ["/bin/sh", "-c", script, "sh", str(_DISK), str(place)])
        found = pathlib.Path(f"/proc/{holder.pid}/root{place.absolute()}")
        wait("a disk", (found / "held").exists, 10)
        return found

    def start(self, wrong: bool = False) -> None:
        """Start the command on every host; `wrong`: the last one is told of data that is not there."""
        data = {f"data.{name}": self.home / "data" / name for name in ("train", "validation")}
        program = ["-c", _HANGING.format(file=str(self.hang), last=_LAST)]
        settings = [f"--config.{name}={value}" for name, value in {**_SETTINGS, **data, "run.out": self.out}.items()]
        among = [f"--coordinator={self.cluster.addresses[0]}:{_COORDINATOR}", f"--num_processes={HOSTS}"]
        command = [sys.executable, *program, *settings, *among, f"--lost_timeout={self._lost}", "--cpu_devices=1"]
        bad = "--config.data.train=/nowhere"
        self._log.unlink(missing_ok=True)
        if self._slurm is None:
            for host in range(HOSTS):
                more = [f"--process_id={host}", *([bad] if wrong and host == _LAST else [])]
                self.started.append(self.cluster.start(host, [*command, *more], log=self._log, env=self.environment))
            return
        text = f'{shlex.join(command)} --process_id="$SLURM_PROCID"'
        text = f'bad=; [ "$SLURM_PROCID" = {_LAST} ] && bad={bad}; {text} $bad' if wrong else f"exec {text}"
        srun = ["srun", f"--nodes={HOSTS}", f"--ntasks={HOSTS}", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none"]
        environment = self.environment | self._slurm.environment
        srun += ["--kill-on-bad-exit=1", "bash", "-c", text]
        self.started.append(self.cluster.start(0, srun, log=self._log, env=environment))

    # --- What is seen -------------------------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def last_step(self) -> int:
        path = self.out / metrics.FILE
        records = metrics.read(path) if path.exists() else []
        return max((record["step"] for record in records if "loss" in record), default=0)

    def workers(self, host: int) -> list[int]:
        """Return the processes that train on a host."""
        found = self.cluster.processes(host).items()
        return [number for number, words in found if words[:2] == [sys.executable, "-c"] and words[3:]]

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            assert all(popen.poll() is None for popen in self.started), self.said
            return self.last_step >= step

        wait(f"step {step}", there, PATIENCE)

    def wait_for_end(self, broken: float, limit: float) -> Figures:
        """Return the seconds from `broken` until nothing trains any more, the codes, and the first that is said."""
        known, first = len(self.said), ""
        until, ended = broken + limit, False
        while time.monotonic() < until and not ended:
            ended = not any(map(self.workers, range(HOSTS)))
            first = first or next(iter(_TOLD.findall(self.said[known:])), "")
            time.sleep(0.05)
        seconds = time.monotonic() - broken
        first = first or next(iter(_TOLD.findall(self.said[known:])), "")
        codes = []
        for popen in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes.append(popen.wait(60 if ended else 1))
        self.started.clear()
        return {"end_seconds": seconds if ended else None, "codes": codes, "sentence": first[:300]}

    def term(self) -> None:
        """Send SIGTERM to all processes, as a scheduler does that preempts a job."""
        if self._slurm is None:
            for popen in self.started:
                popen.send_signal(signal.SIGTERM)
        else:
            [job] = self._slurm.ask("squeue", "--noheader", "--format=%i").split()
            self._slurm.ask("scancel", "--signal=TERM", job)

    def fill_disk(self) -> None:
        filler = self.out / sampling.CHECKPOINTS / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def cut_off(self) -> None:
        for other in range(_LAST):
            self.cluster.cut(_LAST, other)


def wait(what: str, holds: Callable[[], bool], limit: float) -> None:
    """Return when something holds, and fail after `limit` seconds."""
    until = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < until, f"{what} did not come within {limit:g} s"
        time.sleep(0.05)


# What breaks, while the run trains.
FAULTS: dict[str, Callable[[Lab], object]] = {
    "a process is killed": lambda lab: os.kill(lab.workers(_LAST)[0], signal.SIGKILL),
    "a host is killed": lambda lab: lab.cluster.kill(_LAST),
    "a host has no network": Lab.cut_off,
    "a process is stopped (SIGSTOP)": lambda lab: os.kill(lab.workers(_LAST)[0], signal.SIGSTOP),
    "a process hangs between two steps": lambda lab: lab.hang.touch(),
    "the disk is full": Lab.fill_disk,
    "SIGTERM": Lab.term,
}
BAD_INPUT = "one process has bad input"


def broken(lab: Lab, fault: str, limit: float = 3 * LOST) -> Figures:
    """Start the run, break it, and return how it ends."""
    lab.start(wrong=fault == BAD_INPUT)
    began = time.monotonic()
    if fault != BAD_INPUT:
        lab.wait_for_step(lab.last_step + 8)
        began = time.monotonic()
        FAULTS[fault](lab)
    else:
        wait("the processes", lambda: any(map(lab.workers, range(HOSTS))), PATIENCE)
    return {"fault": fault, **lab.wait_for_end(began, limit if fault != BAD_INPUT else PATIENCE)}


def run(home: pathlib.Path, scheduler: bool, keep: Callable[[Figures], object]) -> None:
    """Break a run in each way, on a new cluster each time."""
    for number, fault in enumerate((*FAULTS, BAD_INPUT)):
        with Cluster([[MBIT] * HOSTS for _ in range(HOSTS)]) as cluster, contextlib.ExitStack() as stack:
            slurm = stack.enter_context(Slurm(cluster, home / f"slurm{number}")) if scheduler else None
            keep(broken(Lab(cluster, home / f"lab{number}", slurm), fault))


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["plain"]):
        print(f"error: unexpected argument {sys.argv[1]!r}; there is none but plain", file=sys.stderr)
        sys.exit(2)
    if why_not():
        print(f"error: there is no shaped cluster here: {why_not()}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="paxtrain-faults-") as folder:
        run(pathlib.Path(folder), not sys.argv[1:], lambda figures: print(json.dumps(figures), flush=True))
