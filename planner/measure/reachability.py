"""Test connections between all processes of a run, which find an unreachable host before a collective hangs on it."""

import concurrent.futures
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import jax

from paxtrain.errors import LostError, UserError
from paxtrain.process import jax_private, listening
from paxtrain.tables import some
from planner.measure.process_group import ADVICE, ProcessGroup

_OWN_NAME = (
    "its own name stands for a loopback address, which no other host can reach; let its /etc/hosts name an address of "
    "its network"
)
_BACKLOG = 1024  # connections that may wait to be accepted
_ANY_PORT = 9  # of a datagram socket that sends nothing


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


def _beyond_loopback(group: ProcessGroup, addresses: list[str]) -> list[str]:
    """Return the address of every process, with addresses that the other hosts can reach.

    A process on the coordinator's host may know the coordinator as 127.0.1.1. It then uses its address on the way to a
    process of another host. If all processes are on one machine, loopback addresses stay. On CPUs they stay too, since
    gloo uses them.
    """
    far = next((each for each in addresses if not _loopback(each)), None)
    if far is None or not any(map(_loopback, addresses)) or jax.default_backend() == "cpu":
        return addresses
    own = addresses[group.process]
    return group.gather(_towards(far, _ANY_PORT) if _loopback(own) else own)


def _hang_up(server: socket.socket, over: threading.Event) -> None:
    """Accept connections and close them at once, until it is over: nobody fills the queue, and nothing is read."""
    while not over.is_set():
        try:
            server.accept()[0].close()
        except OSError:  # a caller who has hung up already, or no file descriptor left for a moment
            over.wait(0.01)


@contextlib.contextmanager
def _reachable(address: str) -> Iterator[int]:
    """Yield a port at which this process accepts connections while the block runs.

    Args:
        address: address to which the other processes send.
    """
    [where, *_] = listening.addresses(address)  # of an address there is one
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    over = threading.Event()
    with socket.create_server((where, 0), family=family, backlog=_BACKLOG) as server:
        answering = threading.Thread(target=_hang_up, args=(server, over), name="reachability", daemon=True)
        answering.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)  # which ends the wait for a connection
            answering.join()


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
        return f"{names[worst]} ({addresses[worst]}) cannot be reached from {some(from_)}: {why[0]}; {advice}"
    to = [names[b] for a, b, _ in failures if a == worst]
    return f"{names[worst]} ({addresses[worst]}) cannot reach {some(to)}: {why[0]}; see whether its network is up"


def check_reachable(group: ProcessGroup) -> None:
    """Connect every process with every other one, before a collective would hang on a pair that cannot connect.

    Raises:
        UserError, LostError: on every process, naming the one that cannot be reached; bad input if its name is wrong.
    """
    if group.count == 1:
        return
    limit = min(5.0, group.timeout / 3)
    addresses = _beyond_loopback(group, group.gather(own_address()))
    with _reachable(addresses[group.process]) as port:
        ports = group.gather(port)
        others = [i for i in range(group.count) if i != group.process]
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            reasons = pool.map(lambda i: _connect(addresses[i], ports[i], limit), others)
            failures = [(group.process, i, why) for i, why in zip(others, reasons) if why]

        def verdict(values: list[list[tuple[int, int, str]]]) -> None:
            failed = [failure for failures in values for failure in failures]
            if failed:
                sentence = unreachable(group.names, addresses, failed)
                raise (UserError if _OWN_NAME in sentence else LostError)(sentence)

        group.gather(failures, verdict)
