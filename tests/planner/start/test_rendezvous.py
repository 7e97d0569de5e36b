"""The roll call before processes join: all are present, or the missing ones are named."""

import concurrent.futures
import itertools
import os
import socket
import time

import pytest

from paxtrain.errors import UserError
from paxtrain.process import job_secret, sealed
from planner.start import rendezvous


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv(job_secret.VARIABLE, "secret" * 6)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def called(present, processes, timeout):
    """Return the sentence that the roll call gives each process present; empty if all have come."""
    address = f"127.0.0.1:{free_port()}"

    def one(process):
        try:
            rendezvous.call(address, processes, process, timeout)
        except UserError as error:
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(one, present)), address


def test_all_there_and_the_port_is_free_again():
    said, address = called([0, 1, 2, 3], 4, 20)
    assert said == [""] * 4
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        pass


def test_all_who_came_learn_who_did_not():
    said, address = called([0, 2], 4, 1.5)
    for sentence in said:
        assert sentence.startswith("process 1, process 3 did not come within 1.5 s, those on ")
        assert socket.gethostname() in sentence
        assert address in sentence


def test_of_many_hosts_some_are_named_and_all_who_came_learn_it(monkeypatch):
    """The sentence is the first message of a connection, which is short; with more it had been taken for a forgery."""
    hosts = itertools.count()
    monkeypatch.setattr(rendezvous.socket, "gethostname", lambda: f"n{next(hosts):03d}".ljust(64, "x"))
    said, _ = called([i for i in range(82) if i not in (7, 9)], 82, 8)
    assert len(said) == 80
    assert all(sentence.startswith("process 7, process 9 did not come within 8 s, those on n0") for sentence in said)
    assert all(" and 72 more have; see " in sentence for sentence in said)


def test_the_longest_sentence_fits_into_a_first_message():
    names = ["ä" * 64, *(f"{i:05d}".ljust(64, "x") for i in range(5_000))]
    came = dict(enumerate(names, 5_000))
    sentence = rendezvous.missing_sentence(range(4_000), came, names, f"{'n' * 253}:65535", 86_400)
    assert sentence.startswith("process 0 (host ää")
    assert " and 3992 more did not come" in sentence
    assert len(sealed.encode({"verdict": sentence})) < sealed.GREETING


def test_a_missing_process_0_is_told_by_its_address():
    began = time.monotonic()
    [sentence], address = called([1], 2, 1)
    assert sentence.startswith(f"process 0 cannot be reached at {address} within 1 s (Connection refused)")
    assert time.monotonic() - began < 5


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            UserError, match=rf"cannot listen at {address}: port \d+ of this machine is taken.*`ss -ltnp"
        ):
            rendezvous.call(address, 2, 0, 5)


def test_one_process_alone_calls_nobody():
    rendezvous.call("127.0.0.1:1", 1, 0, 1)


def test_the_shell_of_an_allocation_is_told_to_use_srun(monkeypatch):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="start it with srun"):
        rendezvous.call(None, None, None, 1)
    rendezvous.call(None, 1, None, 1)


def test_a_launchers_list_names_the_host(monkeypatch, tmp_path):
    script = tmp_path / "scontrol"
    script.write_text("#!/bin/sh\nprintf 'n7\\nn8\\nn9\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[7-9]")
    assert rendezvous.hosts_of_launcher(os.environ, 6) == ["n7", "n7", "n8", "n8", "n9", "n9"]
    assert rendezvous.hosts_of_launcher(os.environ, 4) is None  # not as many on each
    said, _ = called([0, 1], 3, 1)
    assert all(sentence.startswith("process 2 (host n9) did not come") for sentence in said)


def test_without_a_launcher_there_is_no_list():
    assert rendezvous.hosts_of_launcher({}, 4) is None


def test_strangers_are_neither_counted_nor_answered():
    """Two lines from a stranger had ended process 0 with a sentence about processes that had come."""
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(rendezvous.call, f"127.0.0.1:{port}", 3, 0, 20)
        for line in (b"1 stranger", b"2 stranger", b"x y", bytes(100), b"\xff" * 5000):
            heard = b""
            deadline = time.monotonic() + 10
            while not heard and time.monotonic() < deadline:  # until process 0 listens
                try:
                    with socket.create_connection(("127.0.0.1", port), 3) as s:
                        s.sendall(line)
                        heard = s.recv(100)
                except OSError:
                    time.sleep(0.05)
            assert len(heard) == 32
        assert not first.done()
        others = [pool.submit(rendezvous.call, f"127.0.0.1:{port}", 3, process, 20) for process in (1, 2)]
        assert [each.result() for each in (first, *others)] == [None] * 3


def test_another_secret_does_not_meet(monkeypatch):
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        listening = pool.submit(rendezvous.call, f"127.0.0.1:{port}", 2, 0, 2)
        time.sleep(0.5)
        monkeypatch.setenv(job_secret.VARIABLE, "guess" * 6)
        with pytest.raises(UserError, match="process 0 cannot be reached"):
            rendezvous.call(f"127.0.0.1:{port}", 2, 1, 1)
        with pytest.raises(UserError, match="process 1 did not come"):
            listening.result()


def test_without_a_secret_nobody_listens(monkeypatch):
    monkeypatch.delenv(job_secret.VARIABLE)
    began = time.monotonic()
    rendezvous.call(f"127.0.0.1:{free_port()}", 2, 0, 20)
    assert time.monotonic() - began < 5
