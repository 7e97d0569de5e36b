"""A roll call before the processes join: jax.distributed only says that a process is missing, not which one.

Process 0 listens for a moment at the address of jax's coordinator. Every other process calls there, gives its number
and its host, and hears either that all are there or which ones are missing. Only processes with the job's secret are
heard and answered.
"""

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from paxtrain.errors import UserError, whole
from paxtrain.process import distributed, failures, jax_private, job_secret, listening
from paxtrain.process.listening import SealedServer
from paxtrain.process.sealed import SealedStream, printable
from paxtrain.tables import some

_GO = "go"
_NAME = 64  # characters of a host's name at most, as Linux has it: the sentence is a first message, which is short


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
    who = [f"process {i}" + (f" (host {printable(hosts[i], _NAME)})" if hosts else "") for i in missing]
    there = f"those on {some(sorted(set(came.values())))} have" if came else "no other one has"
    return (
        f"{some(who)} did not come within {timeout:g} s, {there}; {failures.CHECK_THAT_HOST} and can reach "
        f"{address}, or give a larger --coordinator_timeout"
    )


async def _listen(where: tuple[str, int], secret: bytes, processes: int, timeout: float, address: str) -> None:
    """Wait for the other processes as process 0, and tell all that came whether others are missing.

    Raises:
        UserError: The port is taken, or processes are missing.
    """
    came: dict[int, str] = {}
    verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(stream: SealedStream, hello: dict[str, Any]) -> None:
        number, host = hello.get("process"), hello.get("host")
        if isinstance(number, int) and 0 < number < processes and isinstance(host, str):
            came[number] = printable(host, _NAME)
            if len(came) == processes - 1 and not verdict.done():
                verdict.set_result(_GO)
            stream.send({"verdict": await asyncio.shield(verdict)})
            with contextlib.suppress(OSError, TimeoutError):  # who called closes first: the port is free at once
                async with asyncio.timeout(1):
                    await stream.receive()

    server = SealedServer(secret, answer, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        await server.start(*where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(listening.taken(address)) from error
        raise UserError(f"cannot listen at {address} ({error.strerror}); choose another port") from error
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.shield(verdict)
        if not verdict.done():
            missing = sorted(set(range(1, processes)) - set(came))
            hosts = hosts_of_launcher(os.environ, processes)
            verdict.set_result(missing_sentence(missing, {0: socket.gethostname()} | came, hosts, address, timeout))
        await server.finish(2.0)
    finally:
        await server.close()
    if verdict.result() != _GO:
        raise UserError(verdict.result())


async def _ask(where: tuple[str, int], secret: bytes, process: int, until: float) -> str:
    """Call process 0 once and return its verdict.

    Raises:
        OSError: It cannot be reached, or has not answered; ForgedError: what answers there is not of this job.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout_at(min(until, loop.time() + 5)):
        reader, writer = await asyncio.open_connection(*where)
    try:
        async with asyncio.timeout_at(until + 5):
            stream = await SealedStream.meet(reader, writer, secret, dialled=True)
            stream.send({"process": process, "host": socket.gethostname()})
            return str((await stream.receive()).get("verdict"))
    finally:
        writer.close()


async def _call(where: tuple[str, int], secret: bytes, process: int, timeout: float) -> None:
    """Call process 0 until it answers.

    Raises:
        UserError: It has not answered in time, or it says which processes are missing.
    """
    until, why = asyncio.get_running_loop().time() + timeout, "timed out"
    while asyncio.get_running_loop().time() < until:
        try:
            verdict = await _ask(where, secret, process, until)
        except OSError as error:
            # asyncio's own text for a refused connection has the address, which the sentence below has, too.
            why = os.strerror(error.errno) if error.errno else str(error) or "timed out"
            await asyncio.sleep(0.2)
            continue
        if verdict != _GO:
            raise UserError(printable(verdict))
        return
    host, port = where
    raise UserError(
        f"process 0 cannot be reached at {host}:{port} within {timeout:g} s ({why}); {failures.CHECK_THAT_HOST}, or "
        "give a larger --coordinator_timeout"
    )


def call(coordinator: str | None, processes: int | None, process: int | None, timeout: float) -> None:
    """Wait until all processes of the launch have come; without a secret of the job only jax waits for them.

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
    secret = job_secret.find(os.environ)
    host, _, port = address.rpartition(":")
    if secret is None or not host or not whole(port, 2**16 - 1):  # distributed.initialize says what is wrong with it
        return
    where = (host.strip("[]"), int(port))
    if number == 0:
        asyncio.run(_listen(where, secret, count, timeout, address))
    else:
        asyncio.run(_call(where, secret, number, timeout))
