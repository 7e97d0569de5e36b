"""Test connections between all processes of a run, which find an unreachable host before a collective hangs on it."""

import concurrent.futures
import socket
from collections import Counter

import jax

from paxtrain.errors import UserError
from paxtrain.process import jax_private
from paxtrain.process.failures import CHECK_ITS_NETWORK
from planner.measure.process_group import ADVICE, ProcessGroup

_OWN_NAME = (
    "its own name stands for a loopback address, which no other host can reach; let its /etc/hosts name an address of "
    "its network"
)


def _towards(host: str, port: int) -> str:
    """Return the address that this host uses on the way to another one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(address)  # of a datagram socket: nothing is sent
        return s.getsockname()[0]


def own_address() -> str:
    """Return the address to which the other processes send.

    On CPUs, gloo uses the address of the machine's own name. NCCL uses an interface, and the one on the way to the
    coordinator is as good as any.
    """
    coordinator = jax_private.coordinator_address()
    if jax.default_backend() == "cpu" or coordinator is None:
        return socket.gethostbyname(socket.gethostname())
    host, _, port = coordinator.rpartition(":")
    return _towards(host.strip("[]"), int(port))


def _loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _beyond_loopback(group: ProcessGroup, addresses: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the address and port of every process, with addresses that the other hosts can reach.

    A process on the coordinator's host may know the coordinator as 127.0.1.1. It then uses its address on the way to a
    process of another host. If all processes are on one machine, loopback addresses stay. On CPUs they stay too, since
    gloo uses them.
    """
    far = next((each for each in addresses if not _loopback(each[0])), None)
    if far is None or not any(_loopback(address) for address, _ in addresses) or jax.default_backend() == "cpu":
        return addresses
    address, port = addresses[group.process]
    found = group.gather((_towards(*far) if _loopback(address) else address, port))
    return [(address, port) for address, port in found]


def _connect(address: str, port: int, timeout: float) -> str:
    """Return the reason why a connection fails, or an empty string."""
    try:
        with socket.create_connection((address, port), timeout):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def unreachable(names: list[str], addresses: list[str], failures: list[tuple[int, int, str]]) -> str:
    """Return a sentence about failed connections that names the process most of them have in common.

    Args:
        names: name of each process.
        addresses: address of each process.
        failures: process that connected, process that did not answer, and reason, for each failed connection.
    """
    counts = Counter(end for a, b, _ in failures for end in (a, b))
    # If two have equally many, the one that could not be reached counts.
    worst = max(counts, key=lambda i: (counts[i], sum(b == i for _, b, _ in failures)))
    from_, why = [names[a] for a, b, _ in failures if b == worst], [w for a, b, w in failures if worst in (a, b)]
    if from_:
        advice = _OWN_NAME if _loopback(addresses[worst]) else ADVICE
        return f"{names[worst]} ({addresses[worst]}) cannot be reached from {', '.join(from_)}: {why[0]}; {advice}"
    to = [names[b] for a, b, _ in failures if a == worst]
    return f"{names[worst]} ({addresses[worst]}) cannot reach {', '.join(to)}: {why[0]}; {CHECK_ITS_NETWORK}"


def check_reachable(group: ProcessGroup) -> None:
    """Connect every process with every other one, before a collective would hang on a pair that cannot connect.

    Raises:
        UserError: on every process, naming the one that cannot be reached.
    """
    if group.count == 1:
        return
    limit = min(5.0, group.timeout / 3)
    with socket.create_server(("", 0), backlog=group.count) as server:
        addresses = _beyond_loopback(group, group.gather((own_address(), server.getsockname()[1])))
        others = [i for i in range(group.count) if i != group.process]
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            reasons = pool.map(lambda i: _connect(addresses[i][0], addresses[i][1], limit), others)
            failures = [(group.process, i, why) for i, why in zip(others, reasons) if why]

        def verdict(values: list[list[tuple[int, int, str]]]) -> None:
            failed = [failure for failures in values for failure in failures]
            if failed:
                raise UserError(unreachable(group.names, [address for address, _ in addresses], failed))

        group.gather(failures, verdict)
