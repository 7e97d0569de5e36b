"""The addresses at which processes listen."""

import socket

import pytest

from paxtrain.process import listening


@pytest.mark.parametrize(
    ("host", "known", "expected"),
    [
        ("127.0.0.1", [], ("127.0.0.1",)),
        ("192.0.2.1", [], listening.ALL),  # of a documentation network: no machine has it
        ("me", ["127.0.1.1"], listening.ALL),  # as Debian's /etc/hosts has a machine's own name
        ("me", ["192.0.2.1"], listening.ALL),
        ("localhost", ["127.0.0.1"], ("127.0.0.1",)),
        ("me", None, listening.ALL),
    ],
)
def test_a_process_listens_at_the_address_that_others_use(monkeypatch, host, known, expected):
    def look_up(*_, **__):
        if known is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert listening.addresses(host) == expected
