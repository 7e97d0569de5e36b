"""One machine as a cluster: hosts with links of chosen rates, a share of a core each, and processes on them.

    with Cluster(scenario.rates, share=0.2) as cluster:
        worker = cluster.start(0, ["python", "-m", "paxtrain.train", ...], log=pathlib.Path("host0.log"))

What crosses the links is real: real processes, TCP, jax.distributed, gloo. Each host has a network namespace, a name
(`pax0`, as hostname prints it there), an /etc/hosts that knows all of them, and a control group. All of it is gone when
the block ends, and also when this process is interrupted or killed (janitor.py). Clusters may be up side by side. Where
the machine does not allow it (`why_not`), hosts are plain processes of this machine without limits.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from experiments.hosts import janitor, quota
from experiments.hosts.network import UNLIMITED, Network, NetworkError, Uplinks, address

# The control group is joined before the namespace: entering may hide the folder of control groups. Hosts go before all
# else that this machine may be doing.
_ENTER = """
procs=$1 net=$2 core=$3; shift 3
echo $$ > "$procs" && exec nice -n -15 taskset -c "$core" nsenter --net="$net" unshare --uts --mount /bin/sh -c '
mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' sh "$@"
"""


@functools.cache
def why_not() -> str:
    """Return the reason why this machine cannot be a shaped cluster, as one sentence; empty if it can."""
    if os.geteuid():
        return "it needs root, to make network namespaces; run it as root or in a privileged container"
    for command, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(command) is None:
            return f"it needs the command {command}; install the package {package}"
    if quota.root() is None:
        return "it needs control groups with a CPU quota; mount cgroup version 1 or 2 writable"
    try:
        with Cluster([[0.0, 10.0], [10.0, 0.0]], _unchecked=True):
            pass
    except (NetworkError, OSError) as error:
        return f"the kernel does not allow it ({error}); it needs network namespaces, veth and tc's tbf"
    return ""


class Cluster:
    """Hosts that are up inside a `with` block.

    Attributes:
        names: of the hosts. addresses: at which they reach each other.
        shaped: links have their rates; False: plain processes on this machine's loopback.
    """

    def __init__(
        self,
        rates: Sequence[Sequence[float]],
        share: float | None = None,
        *,
        uplinks: Uplinks | None = None,
        _unchecked: bool = False,
    ) -> None:
        """Args:
        rates: Mbit/s [H, H] from row to column.
        share: of one core for each host; None: no limit.
        uplinks: that carry all between racks, instead of links of their own; None: there are none.
        """
        self._rates = [[float(rate) for rate in row] for row in rates]
        hosts = len(self._rates)
        self.shaped = _unchecked or not why_not()
        self.names = tuple(f"pax{i}" for i in range(hosts))
        self.addresses = tuple(address(i) if self.shaped else "127.0.0.1" for i in range(hosts))
        self._share = share
        self._token = f"pax{secrets.token_hex(4)}"
        self._uplinks = uplinks
        self._network = Network(self._token, hosts, uplinks)
        self._folder = pathlib.Path(tempfile.gettempdir()) / self._token
        self._quotas: quota.Quotas | None = None
        self._janitor: subprocess.Popen[str] | None = None
        self._started: list[list[subprocess.Popen[bytes]]] = [[] for _ in range(hosts)]

    @property
    def hosts(self) -> int:
        return len(self.names)

    # --- Up and down --------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Cluster":
        top = quota.root() if self.shaped else None
        groups = [] if top is None else [str(top / self._token)]
        self._janitor = subprocess.Popen(
            [sys.executable, janitor.__file__, self._token, str(self._folder), *groups],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._folder.mkdir()
            if self.shaped:
                self._up()
        except BaseException:
            self.down()
            raise
        return self

    def _up(self) -> None:
        self._quotas = quota.Quotas.make(self._token, self.hosts)
        self.limit(self._share)
        self._network.up(self._rates)
        lines = ["127.0.0.1 localhost", *(f"{a} {name}" for a, name in zip(self.addresses, self.names))]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> None:
        """End all that runs on the hosts, and remove them; a second call does nothing."""
        if self._janitor is None:
            return
        self._janitor.stdin.close()
        self._janitor.wait()
        self._janitor = None
        for popen in (popen for started in self._started for popen in started):
            popen.wait()

    # --- Processes ----------------------------------------------------------------------------------------------------

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        log: pathlib.Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host.

        Args:
            log: takes its output (with `stdout` given, its errors alone).
            env: variables beside this process's own.
        """
        if self.shaped:
            cores = sorted(os.sched_getaffinity(0))
            # One core each: a host that spreads over several loses what its share leaves on each, and with one thread
            # XLA runs the collectives of a program in the same order on all hosts. A host that is alone has them all.
            core = str(cores[host % len(cores)]) if self.hosts > 1 else ",".join(map(str, cores))
            where = (self._quotas.procs(host), janitor.NETNS / self._network.namespace(host), core)
            inside = (self._folder / "hosts", self.names[host])
            command = ["/bin/sh", "-c", _ENTER, "sh", *map(str, where + inside), *command]
        with contextlib.ExitStack() as files:
            errors = files.enter_context(log.open("ab")) if log else None
            popen = subprocess.Popen(
                list(command),
                env={**os.environ, **(env or {})},
                stdin=stdin,
                stdout=errors if stdout is None else stdout,
                stderr=errors,
                start_new_session=True,
            )
        self._started[host].append(popen)
        print(popen.pid, file=self._janitor.stdin, flush=True)
        return popen

    def networked(self, host: int, command: Sequence[str]) -> list[str]:
        """Return a command that sees a host's network, and is otherwise a process of this machine: for queries only."""
        if not self.shaped:
            return list(command)
        return ["nsenter", f"--net={janitor.NETNS / self._network.namespace(host)}", *command]

    def processes(self, host: int) -> dict[int, list[str]]:
        """Return the commands that run on a host, by process number."""
        found = {}
        for line in self._quotas.procs(host).read_text().split() if self.shaped else ():
            with contextlib.suppress(OSError):  # it has ended
                found[int(line)] = pathlib.Path(f"/proc/{line}/cmdline").read_bytes().decode().split("\0")[:-1]
        return found

    def kill(self, host: int) -> None:
        """Send SIGKILL to everything that runs on a host."""
        for popen in self._started[host]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
        if self.shaped:
            janitor.kill([self._quotas.procs(host).parent], f"{self._network.namespace(host)}-none")
        for popen in self._started[host]:
            popen.wait()

    # --- Limits -------------------------------------------------------------------------------------------------------

    def limit(self, share: float | None, host: int | None = None) -> None:
        """Give every host, or one, this share of a core; None: no limit."""
        if self._quotas is not None:
            for i in range(self.hosts) if host is None else (host,):
                self._quotas.limit(i, share)

    def limit_process(self, host: int, process: int, share: float) -> None:
        """Give one process of a host this share of a core."""
        if self._quotas is not None:
            self._quotas.limit_process(host, process, share)

    def rate(self, a: int, b: int, mbit: float) -> None:
        """Set the rate of the link from a to b, Mbit/s."""
        if self.shaped:
            self._network.rate(a, b, mbit)

    def set_rates(self, rates: Sequence[Sequence[float]] | None, uplinks: Uplinks | None = None) -> None:
        """Set all rates.

        Args:
            rates: Mbit/s [H, H]; None: as fast as the machine copies, uplinks too.
            uplinks: racks and rates of the uplinks from now on; None: those that the cluster was made with.
        """
        if self.shaped:
            self._network.rates(rates or [[UNLIMITED] * self.hosts] * self.hosts)
            if self._uplinks:
                same = uplinks or self._uplinks
                self._network.join(same if rates else dataclasses.replace(same, mbit=UNLIMITED))

    def sent(self) -> int:
        """Bytes that all hosts have put on their links so far."""
        return self._network.sent() if self.shaped else 0

    def cut(self, a: int, b: int) -> None:
        """Take the link between two hosts down."""
        self._network.cut(a, b)

    def hang(self, a: int, b: int) -> None:
        """Keep the link between two hosts up, but let it carry nothing."""
        self._network.hang(a, b)

    def restore(self, a: int, b: int) -> None:
        """Bring the link up again."""
        self._network.restore(a, b)
