"""Ports of a job: the addresses at which a process listens."""

import contextlib
import errno
import ipaddress
import socket

from paxtrain.errors import UserError

ALL: tuple[str, ...] = ("",)  # every address of the machine


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((address, 0))
        return True
    return False


def addresses(host: str) -> tuple[str, ...]:
    """Return the addresses at which to listen so that `host`:PORT reaches this process; `ALL` if they are not known.

    A machine may know its own name as 127.0.1.1, or may be reached through a translated address. There it has to listen
    at all of its addresses.

    Args:
        host: name or address by which others know this machine.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return (host,) if _is_here(host) else ALL
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ALL
    several = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    if host != "localhost" and any(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in several):
        return ALL
    return several if several and all(map(_is_here, several)) else ALL


def taken(address: str) -> str:
    """Return a sentence for a process that cannot listen at an address, HOST:PORT."""
    port = address.rpartition(":")[2]
    return (
        f"cannot listen at {address}: port {port} of this machine is taken, perhaps by an earlier start that still "
        f"ends; `ss -ltnp 'sport = :{port}'` shows by which process; end it, or choose another port"
    )


def require_free(address: str) -> None:
    """Require that the port of an address of this machine, HOST:PORT, is free to listen at.

    Raises:
        UserError: it is taken.
    """
    host, _, port = address.rpartition(":")
    for where in addresses(host.strip("[]")):
        with socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else ends of old connections would count
            try:
                probe.bind((where, int(port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise UserError(taken(address)) from error
