"""How the processes of a profile run keep together without a collective: a lost one is named and not waited for.

Everything goes through the key-value store of jax.distributed's coordinator, which answers after a while in any case;
a collective would wait for ever.
"""

import concurrent.futures
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

from paxtrain.errors import UserError
from paxtrain.process import jax_private

_GRACE = 2.0  # seconds for which a failing process 0 keeps the store up, so that the others can read why
_OWN_NAME = "its own name stands for an address that only itself reaches; let its /etc/hosts name one of its network"
_ADVICE = "see whether its host is up and reachable from the others"


class Meeting:
    """All processes of a run, or this one alone.

    Attributes:
        process, count: this one's number, and how many there are.
        names: what each process is called in messages.
    """

    def __init__(self, timeout: float) -> None:
        """Waits for any other process take `timeout` seconds at most."""
        self.process, self.count = jax.process_index(), jax.process_count()
        self.names = [f"process {i}" for i in range(self.count)]
        self.timeout = timeout
        self._client, self._round = jax_private.coordination_client(), 0

    def _key(self, process: int, turn: int = 0) -> str:
        return f"paxtrain/meeting/{self._round + turn}/{process}"

    def _wait(self, process: int, seconds: float) -> Any:
        try:
            answer = json.loads(self._client.blocking_key_value_get(self._key(process), int(1000 * seconds)))
        except RuntimeError as error:
            raise UserError(f"{self.names[process]} has not answered for {seconds:g} s; {_ADVICE}") from error
        if isinstance(answer, dict) and "error" in answer:
            raise UserError(answer["error"])
        return answer

    def gather(self, value: Any, verdict: Callable[[list[Any]], Any] = lambda values: values) -> Any:
        """Every process gives a value of JSON; process 0 makes a verdict of them all, and every process returns it.

        No process leaves before all have come.

        Raises:
            UserError: on every process: what the verdict raised, or which process did not come or failed.
        """
        self._round += 1
        if self.count == 1:
            return verdict([value])
        if self.process:
            self._client.key_value_set(self._key(self.process), json.dumps(value))
            return self._wait(0, 3 * self.timeout)  # process 0 itself waits for the others, one after another
        try:
            result = verdict([value, *(self._wait(i, self.timeout) for i in range(1, self.count))])
        except UserError as error:
            self._client.key_value_set(self._key(0), json.dumps({"error": str(error)}))
            raise
        self._client.key_value_set(self._key(0), json.dumps(result))
        if self._round > 1:  # all have come, so all have read the last verdict
            self._client.key_value_delete(f"paxtrain/meeting/{self._round - 1}/")
        return result

    def agree(self, value: float) -> float:
        """Process 0's value, on every process."""
        return self.gather(value, lambda values: values[0])

    def fail(self, message: str) -> None:
        """Ends this process with the sentence; the others end with it at their next gather."""
        print(f"error: {message}", flush=True, file=sys.stderr)
        if self.count > 1:
            with contextlib.suppress(RuntimeError):
                self._client.key_value_set(self._key(self.process, 1), json.dumps({"error": message}))
            time.sleep(_GRACE if self.process == 0 else 0)
        os._exit(2)  # an orderly exit would wait for the processes that are lost

    @contextlib.contextmanager
    def watch(self, me: str, other: str) -> Iterator[None]:
        """Ends this process with a sentence if the block, which sits in the runtime, fails or outlasts the timeout.

        The limit ends before those who wait at the next gather give up, so that they learn the true reason.

        Args:
            me, other: who waits, and for whom.
        """
        limit = 0.8 * self.timeout
        late = f"{me} has waited {limit:g} s for {other}; {_ADVICE}"
        timer = threading.Timer(limit, self.fail, (late,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # which of the two depends on the call
            if self.count == 1:
                raise
            self.fail(f"{me} lost {other} ({' '.join(str(error).split())}); {_ADVICE}")
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def ends_together(self) -> Iterator[None]:
        """Bad input or a lost process ends this process at once, with its sentence and exit code 2."""
        try:
            yield
        except UserError as error:
            if self.count == 1:
                raise
            print(f"error: {error}", flush=True, file=sys.stderr)
            time.sleep(_GRACE if self.process == 0 else 0)
            os._exit(2)


# --- Who can reach whom -----------------------------------------------------------------------------------------------


def _towards(host: str, port: int) -> str:
    """The address of this host on the way to another one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(address)  # of a datagram socket: nothing is sent
        return s.getsockname()[0]


def own_address() -> str:
    """The address at which the other processes send to this one.

    gloo takes the one that the machine's own name stands for; NCCL takes an interface, and the one of the way to the
    coordinator is as good as any.
    """
    coordinator = jax_private.coordinator_address()
    if jax.default_backend() == "cpu" or coordinator is None:
        return socket.gethostbyname(socket.gethostname())
    host, _, port = coordinator.rpartition(":")
    return _towards(host.strip("[]"), int(port))


def _loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _beyond_loopback(meeting: Meeting, where: list[list[Any]]) -> list[list[Any]]:
    """Address and port of every process, where one whose way to the coordinator is loopback takes that to the others.

    Such a one is on the coordinator's host, whose own name may stand for 127.0.1.1 there. On one machine all are. On
    CPUs it stays: gloo takes it, too.
    """
    far = next((each for each in where if not _loopback(each[0])), None)
    if far is None or not any(_loopback(address) for address, _ in where) or jax.default_backend() == "cpu":
        return where
    address, port = where[meeting.process]
    return meeting.gather([_towards(*far) if _loopback(address) else address, port])


def _try(address: str, port: int, timeout: float) -> str:
    """Why nothing listens there for us, or an empty string."""
    try:
        with socket.create_connection((address, port), timeout):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def unreachable(names: list[str], addresses: list[str], failures: list[tuple[int, int, str]]) -> str:
    """The sentence about failed connections, each (from, to, why): it names the process most of them have in common."""
    counts = Counter(end for a, b, _ in failures for end in (a, b))
    # Of equals the one that could not be reached.
    worst = max(counts, key=lambda i: (counts[i], sum(b == i for _, b, _ in failures)))
    from_, why = [names[a] for a, b, _ in failures if b == worst], [w for a, b, w in failures if worst in (a, b)]
    if from_:
        advice = _OWN_NAME if _loopback(addresses[worst]) else _ADVICE
        return f"{names[worst]} ({addresses[worst]}) cannot be reached from {', '.join(from_)}: {why[0]}; {advice}"
    to = [names[b] for a, b, _ in failures if a == worst]
    return f"{names[worst]} ({addresses[worst]}) cannot reach {', '.join(to)}: {why[0]}; see whether its network is up"


def check_reachable(meeting: Meeting) -> None:
    """Connects every process with every other one, before a collective would hang on a pair that cannot.

    Raises:
        UserError: on every process, naming the one that cannot be reached.
    """
    if meeting.count == 1:
        return
    limit = min(5.0, meeting.timeout / 3)
    with socket.create_server(("", 0), backlog=meeting.count) as server:
        where = _beyond_loopback(meeting, meeting.gather([own_address(), server.getsockname()[1]]))
        others = [i for i in range(meeting.count) if i != meeting.process]
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            reasons = pool.map(lambda i: _try(*where[i], limit), others)
            failures = [(meeting.process, i, why) for i, why in zip(others, reasons) if why]

        def verdict(values: list[Any]) -> None:
            failed = [failure for failures in values for failure in failures]
            if failed:
                raise UserError(unreachable(meeting.names, [a for a, _ in where], failed))

        meeting.gather(failures, verdict)
