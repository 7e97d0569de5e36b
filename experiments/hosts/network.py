"""Hosts as network namespaces; a separate link joins each pair, with a rate per direction.

Rates are token buckets (tc tbf). A bucket holds what its link carries in 1.28 ms, 32 kB at 200 Mbit/s: a larger one
lets whole messages pass above the rate after a pause. Rates are of what TCP carries, headers come on top.

With uplinks each rack has a router too, a namespace that carries all between its hosts and the others to a core and
back, at one rate in each direction. Which rack a host is in is a matter of routes.
"""

import dataclasses
import json
import subprocess

import numpy as np

from paxtrain.errors import UserError

_BUCKET_SECONDS, _LEAST_BUCKET = 1.28e-3, 1_600  # of the rate; bytes, a packet
_HEADERS = 1514 / 1448  # bytes on the wire per byte of TCP's payload
_QUEUE = "400ms"
UNLIMITED = 20_000.0  # Mbit/s, more than the machine copies


class NetworkError(UserError):
    """A command of iproute2 failed."""


@dataclasses.dataclass(frozen=True)
class Uplinks:
    """Uplinks that the hosts of a rack share.

    Attributes:
        rack: rack of each host, numbered from 0.
        mbit: Mbit/s of each, in either direction.
    """

    rack: tuple[int, ...]
    mbit: float

    def moved(self, hosts: np.ndarray) -> "Uplinks":
        """Return the uplinks among running processes that put process i onto host hosts[i]."""
        return dataclasses.replace(self, rack=tuple(self.rack[host] for host in hosts))


def _run(command: list[str], lines: list[str] | None = None) -> str:
    text = None if lines is None else "\n".join(lines) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def address(host: int) -> str:
    return f"10.77.{host // 250}.{host % 250 + 1}"


def _device(peer: int) -> str:
    return f"to{peer}"


def _shape(device: str, mbit: float, verb: str) -> str:
    bucket = max(_LEAST_BUCKET, round(mbit * 1e6 / 8 * _BUCKET_SECONDS))
    rate = round(mbit * 1e6 * _HEADERS)
    return f"qdisc {verb} dev {device} root tbf rate {rate}bit burst {bucket}b latency {_QUEUE}"


# A router answers for the hosts behind it, at once, and takes packets from wherever they come.
_ROUTES = (
    "cd /proc/sys/net/ipv4; for i in all default; do echo 0 > conf/$i/rp_filter; echo 1 > conf/$i/proxy_arp; done; "
    "echo 0 > neigh/default/proxy_delay; echo 1 > ip_forward"
)
_CORE, _UP = "core", "up"


class Network:
    """The namespaces `{token}-{host}` and their links; the janitor removes them."""

    def __init__(self, token: str, hosts: int, uplinks: Uplinks | None = None) -> None:
        self.token, self.hosts, self._uplinks = token, hosts, uplinks
        self._routers = max(uplinks.rack) + 1 if uplinks else 0

    def namespace(self, host: int) -> str:
        return f"{self.token}-{host}"

    def up(self, rates: list[list[float]]) -> None:
        """Create namespaces and links, with rates in Mbit/s from row to column."""
        everyone = range(self.hosts)
        _run(["ip", "-batch", "-"], [f"netns add {self.namespace(a)}" for a in everyone])
        pairs = [(a, b) for a in everyone for b in everyone if a < b]
        links = [
            f"link add {_device(b)} netns {self.namespace(a)} type veth "
            f"peer name {_device(a)} netns {self.namespace(b)}"
            for a, b in pairs
        ]
        if links:
            _run(["ip", "-batch", "-"], links)
        for a in everyone:
            others = [b for b in everyone if b != a]
            own = ["link set lo up", f"addr add {address(a)}/32 dev lo"]
            own += [f"link set {_device(b)} up" for b in others] + [self._route(a, b) for b in others]
            _run(["ip", "-n", self.namespace(a), "-batch", "-"], own)
            if others:
                self._tc(a, [_shape(_device(b), rates[a][b], "add") for b in others])
        if self._uplinks:
            self._up_routers()
            self.join(self._uplinks, "add")

    def _router(self, rack: int) -> str:
        return f"{self.token}-router{rack}"

    def _up_routers(self) -> None:
        """Create the routers and the core, each host's link to each router, and each router's to the core."""
        core, racks, everyone = f"{self.token}-{_CORE}", range(self._routers), range(self.hosts)
        routers = [core, *map(self._router, racks)]
        _run(["ip", "-batch", "-"], [f"netns add {name}" for name in routers])
        for name in routers:
            _run(["ip", "netns", "exec", name, "/bin/sh", "-c", _ROUTES])
        ends = [((core, f"rack{k}"), (self._router(k), _CORE)) for k in racks]
        ends += [((self.namespace(a), f"{_UP}{k}"), (self._router(k), f"host{a}")) for a in everyone for k in racks]
        links = [f"link add {a} netns {there} type veth peer name {b} netns {here}" for (there, a), (here, b) in ends]
        _run(["ip", "-batch", "-"], links)
        for number, name in enumerate(routers):
            own = [device for end in ends for there, device in end if there == name]
            lines = [f"addr add 10.78.0.{number + 1}/32 dev lo", *(f"link set {device} up" for device in ["lo", *own])]
            _run(["ip", "-n", name, "-batch", "-"], lines)
        for a in everyone:
            _run(["ip", "-n", self.namespace(a), "-batch", "-"], [f"link set {_UP}{k} up" for k in racks])

    def join(self, uplinks: Uplinks, verb: str = "change") -> None:
        """Put hosts into racks, and give the uplinks their rate."""
        for a, rack in enumerate(uplinks.rack):
            ways = [
                (b, _device(b) if other == rack else f"{_UP}{rack}") for b, other in enumerate(uplinks.rack) if b != a
            ]
            lines = [f"route replace {address(b)}/32 dev {device} src {address(a)}" for b, device in ways]
            _run(["ip", "-n", self.namespace(a), "-batch", "-"], lines)
        for k in range(self._routers):
            own = [(b, f"host{b}" if rack == k else _CORE) for b, rack in enumerate(uplinks.rack)]
            lines = [f"route replace {address(b)}/32 dev {device}" for b, device in own]
            _run(["ip", "-n", self._router(k), "-batch", "-"], lines)
            _run(["tc", "-n", self._router(k), "-batch", "-"], [_shape(_CORE, uplinks.mbit, verb)])
        core = f"{self.token}-{_CORE}"
        lines = [f"route replace {address(b)}/32 dev rack{rack}" for b, rack in enumerate(uplinks.rack)]
        _run(["ip", "-n", core, "-batch", "-"], lines)
        _run(["tc", "-n", core, "-batch", "-"], [_shape(f"rack{k}", uplinks.mbit, verb) for k in range(self._routers)])

    def _route(self, a: int, b: int) -> str:
        return f"route replace {address(b)}/32 dev {_device(b)} src {address(a)}"

    def _tc(self, host: int, lines: list[str]) -> None:
        _run(["tc", "-n", self.namespace(host), "-batch", "-"], lines)

    def rate(self, a: int, b: int, mbit: float) -> None:
        """Set the rate of one direction, also while it carries something.

        What waits there is lost: a packet larger than the bucket of a slower link would block it for good.
        """
        self._tc(a, [f"qdisc del dev {_device(b)} root", _shape(_device(b), mbit, "add")])

    def rates(self, rates: list[list[float]]) -> None:
        """Set all rates, Mbit/s."""
        for a in range(self.hosts):
            lines = [_shape(_device(b), rates[a][b], "change") for b in range(self.hosts) if b != a]
            if lines:
                self._tc(a, lines)

    def sent(self) -> int:
        """Return the bytes that all hosts have put on their links so far, with the headers of their packets."""
        links = [json.loads(_run(["ip", "-n", self.namespace(a), "-s", "-j", "link"])) for a in range(self.hosts)]
        return sum(link["stats64"]["tx"]["bytes"] for host in links for link in host if link["ifname"] != "lo")

    def cut(self, a: int, b: int) -> None:
        """Take the link between two hosts down, in both directions."""
        _run(["ip", "-n", self.namespace(a), "link", "set", _device(b), "down"])

    def hang(self, a: int, b: int) -> None:
        """Drop everything between two hosts silently, by sending it to another address."""
        for here, there in ((a, b), (b, a)):
            nobody = ["neigh", "replace", address(there), "lladdr", "02:00:00:00:00:01", "dev", _device(there)]
            _run(["ip", "-n", self.namespace(here), *nobody])

    def restore(self, a: int, b: int) -> None:
        """Bring the link up again, with its route, which the kernel has dropped."""
        _run(["ip", "-n", self.namespace(a), "-batch", "-"], [f"link set {_device(b)} up", self._route(a, b)])
