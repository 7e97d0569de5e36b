"""A real SLURM on the hosts of a shaped cluster: slurmctld on the first, slurmd on each, munge beside them.

    with Cluster(rates) as cluster, Slurm(cluster, folder) as slurm:
        job = slurm.submit("job.sbatch")
        slurm.wait_for(job, "COMPLETED")

All its files lie in one folder, its processes belong to the cluster and end with it, and another SLURM or munge of this
machine is not touched.
"""

import dataclasses
import functools
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping

from experiments.hosts import hosts
from experiments.hosts.hosts import Cluster
from planner.cluster import hostlist

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Seconds after which a silent node is down (SLURM's own default: 300).
SILENT = 10
# Seconds that a requeued job waits before it may start again: as long as the credentials of its steps live. The default
# is 120, which production keeps unless its administrators change AuthInfo=cred_expire.
HOLD = 8
_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}


class SlurmError(AssertionError):
    """Failure of SLURM to do what it was asked."""


@functools.cache
def why_not() -> str:
    """Return the reason why there can be no SLURM here, or ""."""
    if problem := hosts.why_not():
        return problem
    missing = [package for program, package in _PROGRAMS.items() if not _program(program)]
    return f"it needs {' '.join(missing)}; install these packages" if missing else ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as `scontrol show job` describes it; times are seconds since the epoch, or None."""

    state: str
    restarts: int
    nodes: tuple[str, ...]
    eligible: float | None
    started: float | None
    text: str

    @classmethod
    def parse(cls, text: str) -> "Job":
        values = dict(re.findall(r"(\w+)=(\S*)", text))

        def moment(name: str) -> float | None:
            try:
                return time.mktime(time.strptime(values.get(name, ""), "%Y-%m-%dT%H:%M:%S"))
            except ValueError:  # Unknown, N/A
                return None

        nodes = (
            () if values.get("NodeList", "(null)") in ("(null)", "") else tuple(hostlist.expand([values["NodeList"]]))
        )
        return cls(
            state=values["JobState"],
            restarts=int(values["Restarts"]),
            nodes=nodes,
            eligible=moment("EligibleTime"),
            started=moment("StartTime"),
            text=text,
        )


class Slurm:
    """SLURM's daemons, up inside a `with` block."""

    def __init__(self, cluster: Cluster, folder: pathlib.Path, hold: int = HOLD) -> None:
        """Args:
        folder: takes all state and logs.
        hold: seconds that a requeued job waits.
        """
        self.cluster, self.folder = cluster, folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._hold = hold
        self._sockets = pathlib.Path(tempfile.mkdtemp(prefix="paxmunge"))  # a socket's path must be short

    # --- Up and down --------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Slurm":
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir()
        self._sockets.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(self._configuration())
        files = {
            "key-file": key,
            "socket": self._sockets / "socket",
            "pid-file": self._sockets / "pid",
            "seed-file": self._sockets / "seed",
            "log-file": self.folder / "munged.log",
        }
        munged = [_program("munged"), "--foreground", "--force", *(f"--{name}={file}" for name, file in files.items())]
        self.cluster.start(0, munged, log=self.folder / "munged.said")
        self._until("munge's socket", (self._sockets / "socket").exists)
        self.cluster.start(0, [_program("slurmctld"), "-D"], log=self.folder / "slurmctld.said", env=self.environment)
        for host in range(self.cluster.hosts):
            self.start_node(host)
        self._until("all nodes idle", lambda: set(self.nodes().values()) == {"idle"})
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(self.cluster.hosts):
            self.cluster.kill(host)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _configuration(self) -> str:
        names = dict(zip(self.cluster.names, self.cluster.addresses))
        first = self.cluster.names[0]
        lines = {
            "ClusterName": "pax",
            "SlurmctldHost": f"{first}({names[first]})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={self._sockets}/socket,cred_expire={self._hold}",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool.%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd.%n.pid",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdLogFile": self.folder / "slurmd.%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
            "SlurmdTimeout": SILENT,
            "KillWait": 20,
            "ReturnToService": 2,
            "MpiDefault": "none",
            "SlurmdParameters": "config_overrides",
        }
        text = [f"{name}={value}" for name, value in lines.items()]
        text += [f"NodeName={name} NodeAddr={at} CPUs=2 RealMemory=4000 State=UNKNOWN" for name, at in names.items()]
        text.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(text) + "\n"

    # --- Nodes --------------------------------------------------------------------------------------------------------

    def start_node(self, host: int) -> None:
        """Start the daemon of a host, for the first time or again."""
        log = self.folder / f"slurmd.{host}.said"
        self.cluster.start(host, [_program("slurmd"), "-D"], log=log, env=self.environment)

    def nodes(self) -> dict[str, str]:
        """Return the state of each node, as sinfo prints it."""
        rows = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").split("\n")
        return dict(row.split() for row in rows if row.strip())

    # --- Jobs ---------------------------------------------------------------------------------------------------------

    def ask(self, *command: str, env: Mapping[str, str] | None = None, cwd: pathlib.Path = ROOT) -> str:
        """Return what one of SLURM's commands prints.

        Raises:
            SlurmError: it fails.
        """
        done = subprocess.run(
            self.cluster.networked(0, command),
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env={**os.environ, **self.environment, **(env or {})},
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def submit(self, script: pathlib.Path, env: Mapping[str, str], *options: str) -> int:
        """Submit a batch script and return the number of the job."""
        return int(self.ask("sbatch", "--parsable", *options, str(script), env=env))

    def job(self, number: int) -> Job:
        return Job.parse(self.ask("scontrol", "--oneliner", "show", "job", str(number)))

    def wait_for(self, number: int, what: str, holds: Callable[[Job], bool], limit: float) -> Job:
        """Wait until the condition holds for the job, and return the job.

        Raises:
            SlurmError: it does not within so many seconds.
        """
        until = time.monotonic() + limit
        while not holds(job := self.job(number)):
            if time.monotonic() > until:
                raise SlurmError(f"{what} did not come within {limit:g} s:\n{job.text}\n{self.nodes()}")
            time.sleep(0.2)
        return job

    def _until(self, what: str, holds: Callable[[], bool], limit: float = 30.0) -> None:
        until = time.monotonic() + limit
        while True:
            try:
                if holds():
                    return
            except SlurmError:  # not up yet
                pass
            if time.monotonic() > until:
                said = "\n".join(file.read_text(errors="replace")[-2000:] for file in self.folder.glob("*.said"))
                raise SlurmError(f"{what} did not come within {limit:g} s:\n{said}")
            time.sleep(0.1)
