"""The roll call before processes join: all are present, or the missing ones are named."""

import concurrent.futures
import os
import socket
import time

import pytest

from paxtrain.errors import UserError
from planner.start import rendezvous


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

    with concurrent.futures.ThreadPoolExecutor() as pool:
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


def test_a_missing_process_0_is_told_by_its_address():
    began = time.monotonic()
    [sentence], address = called([1], 2, 1)
    assert sentence.startswith(f"process 0 cannot be reached at {address} within 1 s (Connection refused)")
    assert time.monotonic() - began < 5


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
