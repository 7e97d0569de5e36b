"""Unused ports of the loopback."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Return so many different unused ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]
