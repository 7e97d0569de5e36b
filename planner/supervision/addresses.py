"""Addresses, names and numbers of a run's supervisors, as the user or the launcher gives them."""

import hashlib
import ipaddress
import pathlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from paxtrain.errors import UserError, whole

# Environment variables in which launchers give a process its number.
NUMBERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
# Environment variables that distinguish SLURM's runs on the same hosts.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def _is_host(text: str) -> bool:
    """Return whether a text may be a host's name or address; the network decides whether there is one.

    An IPv6 address is one in brackets, as in URLs: without, the last of its numbers could also be a port.
    """
    if not text.startswith("["):
        return re.fullmatch(r"[\w.-]{1,253}", text, re.ASCII) is not None
    try:
        return text.endswith("]") and text.isascii() and bool(ipaddress.IPv6Address(text[1:-1]))
    except ValueError:
        return False


def addresses(hosts: str, port: int, per_host: int = 1) -> list[tuple[str, int]]:
    """Return the host and port of every supervisor.

    Args:
        hosts: HOST or HOST:PORT, joined by commas, or @FILE with one a line.
        port: port of hosts that are given without one.
        per_host: number of supervisors of each host, on consecutive ports.

    Raises:
        UserError: if the file cannot be read, or an address is not valid or occurs twice.
    """
    if hosts.startswith("@"):
        try:
            hosts = ",".join(pathlib.Path(hosts[1:]).read_text().split())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read --hosts={hosts} ({error}); name a file with one HOST or HOST:PORT a line"
            ) from error
    found = []
    for item in hosts.split(","):
        bracket = item.endswith("]")  # an IPv6 address without a port
        host, colon, number = (item, "", "") if bracket or ":" not in item else item.rpartition(":")
        if not host or (colon and not whole(number, (1 << 16) - 1)) or not _is_host(host):
            raise UserError(
                "--hosts must be HOST or HOST:PORT joined by commas, IPv6 addresses in brackets as [fe80::1]:17430, or "
                f"@FILE with one a line, got {item!r}"
            )
        first = int(number) if colon else port
        if first + per_host > 1 << 16:
            raise UserError(f"--hosts={item} with --per_host={per_host} needs ports beyond 65535; begin at a lower one")
        found += [(host.strip("[]"), first + i) for i in range(per_host)]
    if len(set(found)) < len(found):
        host, twice = next(each for each in found if found.count(each) > 1)
        raise UserError(f"--hosts has {host}:{twice} twice; give processes of one host different ports")
    return found


def names(found: Sequence[tuple[str, int]]) -> list[str]:
    """Return the names of the supervisors in messages: their hosts, with the port if a host has several."""
    hosts = Counter(host for host, _ in found)
    return [host if hosts[host] == 1 else f"{host}:{port}" for host, port in found]


def number(given: int | None, count: int, variables: Mapping[str, str]) -> int:
    """Return this host's number, as given or from the launcher's environment.

    Args:
        given: number from the flag; None if not given.
        count: number of hosts.
        variables: environment variables.

    Raises:
        UserError: if the number is missing or out of range.
    """
    if given is None:
        told = next((variables[name] for name in NUMBERS if whole(variables.get(name, "")) is not None), None)
        if told is None and count > 1:
            raise UserError("--host is missing; give this host's place in --hosts, from 0 on")
        given = int(told or 0)
    if not 0 <= given < count:
        raise UserError(f"--host must be in [0, {count}), the places in --hosts, got {given}")
    return given


def run_id(found: Sequence[tuple[str, int]], variables: Mapping[str, str]) -> str:
    """Return an identifier that this run's supervisors share and that other runs of the same hosts rarely have.

    Args:
        found: host and port of every supervisor.
        variables: environment variables.
    """
    hosts = ",".join(f"{host}:{port}" for host, port in found)
    job = [variables.get(name, "") for name in _JOB]
    return hashlib.sha256("/".join([hosts, *job]).encode()).hexdigest()[:16]
