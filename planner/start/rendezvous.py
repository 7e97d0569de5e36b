"""A roll call before the processes join: jax.distributed only says that a process is missing, not which one.

Process 0 listens for a moment at the address of jax's coordinator. Every other process calls there, gives its number
and its host, and hears either that all are there or which ones are missing.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from paxtrain.errors import UserError
from paxtrain.process import distributed, failures, jax_private

_GO = "go"


def launch(
    coordinator: str | None, processes: int | None, process: int | None, timeout: float
) -> tuple[str, int, int] | None:
    """Return coordinator, number of processes and number of this one; None if this process is alone.

    Args:
        coordinator: address, from a flag; None: from the launcher.
        processes: number of processes, from a flag.
        process: number of this process, from a flag.
        timeout: seconds to wait for the coordinator.
    """
    if coordinator is not None and processes is not None and process is not None:
        return coordinator, processes, process
    if distributed.alone(coordinator, processes, process) or distributed.detect(os.environ) is None:
        return None
    address, count, number = jax_private.detect_launch(coordinator, processes, process, int(timeout))
    assert address is not None and count is not None and number is not None  # a launcher that is detected says all
    return address, count, number


def hosts_of_launcher(environment: Mapping[str, str], processes: int) -> list[str] | None:
    """Return the host of every process by SLURM's list, if it spreads them evenly in blocks; else None."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    if not names or processes % len(names):
        return None
    return [names[i * len(names) // processes] for i in range(processes)]


def missing_sentence(
    missing: Sequence[int], came: Mapping[int, str], hosts: Sequence[str] | None, address: str, timeout: float
) -> str:
    """Return a sentence that names the processes that are missing and those that have come.

    Args:
        missing: numbers of the missing processes.
        came: host by number of the processes that came.
        hosts: host of every process, if the launcher lists them.
        address: address of process 0.
        timeout: seconds that were waited.
    """
    who = [f"process {i}" + (f" (host {hosts[i]})" if hosts else "") for i in missing]
    there = f"those on {', '.join(sorted(set(came.values())))} have" if came else "no other one has"
    return (
        f"{', '.join(who)} did not come within {timeout:g} s, {there}; {failures.CHECK_THAT_HOST} and can reach "
        f"{address}, or give a larger --coordinator_timeout"
    )


def _listen(port: int, processes: int, timeout: float, address: str) -> None:
    came: dict[int, str] = {}
    until = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("", port), backlog=processes))
        except OSError as error:
            raise UserError(f"cannot listen at {address} ({error.strerror}); choose another port") from error
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(server, selectors.EVENT_READ)
        callers: list[socket.socket] = []
        while len(came) < processes - 1 and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is server:
                    caller = stack.enter_context(server.accept()[0])
                    selector.register(caller, selectors.EVENT_READ, caller)
                    continue
                caller = key.data
                selector.unregister(caller)
                with contextlib.suppress(OSError, ValueError):
                    number, host = caller.recv(1024).decode().split()
                    came[int(number)] = host
                    callers.append(caller)
        missing = sorted(set(range(1, processes)) - set(came))
        hosts = hosts_of_launcher(os.environ, processes)
        own = {0: socket.gethostname()}
        verdict = missing_sentence(missing, own | came, hosts, address, timeout) if missing else _GO
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.sendall(verdict.encode())
                caller.shutdown(socket.SHUT_WR)
        for caller in callers:  # they close first: the port is free at once
            with contextlib.suppress(OSError):
                caller.settimeout(1)
                caller.recv(1)
    if missing:
        raise UserError(verdict)


def _call(host: str, port: int, process: int, timeout: float) -> None:
    until = time.monotonic() + timeout
    why = "timed out"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left, 5)) as s:
                s.sendall(f"{process} {socket.gethostname()}".encode())
                s.settimeout(left + 5)
                parts = []
                while part := s.recv(4096):
                    parts.append(part)
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(0.2)
            continue
        verdict = b"".join(parts).decode()
        if verdict == _GO:
            return
        if verdict:
            raise UserError(verdict)
        time.sleep(0.2)
    raise UserError(
        f"process 0 cannot be reached at {host}:{port} within {timeout:g} s ({why}); {failures.CHECK_THAT_HOST}, or "
        "give a larger --coordinator_timeout"
    )


def call(coordinator: str | None, processes: int | None, process: int | None, timeout: float) -> None:
    """Wait until all processes of the launch have come.

    Args:
        coordinator: address of process 0; see paxtrain.process.distributed.initialize.
        processes: number of processes.
        process: number of this process.
        timeout: seconds to wait.

    Raises:
        UserError: on every process that came: the others, by number and, if the launcher lists them, by host.
    """
    found = launch(coordinator, processes, process, timeout)
    if found is None or found[1] == 1:
        return
    address, count, number = found
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():  # distributed.initialize says what is wrong with it
        return
    if number == 0:
        _listen(int(port), count, timeout, address)
    else:
        _call(host.strip("[]"), int(port), number, timeout)
