"""Joining processes: launchers are recognized, wrong flags refused, and no process waits longer than the limit."""

import errno
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain.errors import UserError, is_full
from paxtrain.process import distributed
from tests.processes import run_processes

ROOT = pathlib.Path(__file__).resolve().parents[3]
WORDS = ("SLURM_", "OMPI_", "PMI_", "MPI_", "JAX_", "COORDINATOR_", "KUBERNETES_", "JOB_", "NUM_", "PROCESS_", "LOCAL_")


@pytest.fixture
def joined(monkeypatch):
    """Remove all launchers' variables, and record the arguments of jax.distributed.initialize."""
    calls = []
    for variable in [*os.environ]:
        if variable.startswith(WORDS) or variable in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(variable)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(distributed.jax_private, "name_missing_processes", lambda seconds: None)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    before = jax.config.jax_cpu_collectives_implementation
    yield calls
    jax.config.update("jax_cpu_collectives_implementation", before)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "of 4 tasks"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "of 2 nodes"),
        # the shell of salloc as a separate step
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": "4294967290"}, "of 4 tasks"),
    ],
)
def test_the_shell_of_an_allocation_is_no_task_of_it(joined, monkeypatch, count, words):
    for name, value in {"SLURM_JOB_ID": "7", **count}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"allocation {words}, but not one of its tasks; start it with srun, or"):
        distributed.initialize(None, None, None, 1)
    distributed.initialize(None, 1, None, 1)  # this process stays alone
    assert joined == []


def test_alone_without_flags_and_launcher(joined):
    distributed.initialize(None, None, None, 1)
    assert joined == []


def test_flags_reach_the_runtime(joined):
    distributed.initialize("localhost:1234", 4, 3, 10)
    [(args, _)] = joined
    assert args == ("localhost:1234", 4, 3)


STEP = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}  # of version 5


@pytest.mark.parametrize(
    ("environment", "coordinator", "arguments"),
    [
        ({**STEP, "SLURM_LOCALID": "0"}, None, ("n1:61447", 2, 1)),
        ({**STEP, "SLURM_LOCALID": "0"}, "n9:1", ("n9:1", 2, 1)),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "28672.0;tcp://10.0.0.1:9", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None,
         ("10.0.0.1:61447", 2, 1)),
        (OPEN_MPI, "n9:1", ("n9:1", 2, 1)),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, "n9:1", ("n9:1", 3, 2)),
        ({"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "n8", "MASTER_PORT": "29500"}, "n9:1", ("n9:1", 3, 2)),
        ({"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "job-0.job:1234"}, None,
         ("job-0.job:1234", 3, 2)),
    ],
)  # fmt: skip
def test_what_a_launcher_says_reaches_the_runtime(joined, monkeypatch, environment, coordinator, arguments):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    distributed.initialize(coordinator, None, None, 10)
    [(args, asked)] = joined
    assert args == arguments and asked["cluster_detection_method"] == "deactivate"


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (OPEN_MPI, "Open MPI"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "MPICH or Intel MPI"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "n8", "MASTER_PORT": "29500"}, "torchrun"),
    ],
)
def test_a_launcher_that_names_no_place_to_meet_is_bad_input(joined, monkeypatch, environment, launcher):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = (
        f"{launcher} started this process as number 1 of 2, but does not say where to meet; add --coordinator=HOST:PORT"
    )
    with pytest.raises(UserError, match=words):
        distributed.initialize(None, None, None, 10)
    distributed.initialize(None, 1, None, 10)  # alone, as asked
    assert joined == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("localhost:1234", None, None), ["--num_processes, --process_id missing", "go together"]),
        ((None, 2, None), ["--coordinator, --process_id missing"]),
        (("localhost:1234", 2, None), ["--process_id missing"]),
        ((None, 2, 1), ["--coordinator missing"]),
        (("localhost:1234", 2, 2), ["--process_id", "[0, 2)", "got 2"]),
    ],
)
def test_flags_that_make_no_sense(joined, flags, words):
    with pytest.raises(UserError) as error:
        distributed.initialize(*flags, 1)
    assert all(word in str(error.value) for word in words), error.value
    assert joined == []


@pytest.mark.parametrize("given", ["", "--xla_cpu_collective_timeout_seconds=7 --xla_dump_to=/x"])
def test_one_limit_for_lost_processes_reaches_collectives_and_the_runtime(joined, monkeypatch, given):
    monkeypatch.setenv("XLA_FLAGS", given)
    distributed.initialize("localhost:1234", 4, 3, 10, lost=29.5)
    [(_, asked)] = joined
    assert asked["heartbeat_timeout_seconds"] == 30
    flags = os.environ["XLA_FLAGS"].split()
    assert sorted(flags) == sorted(
        (given.split() or ["--xla_cpu_collective_timeout_seconds=45"])
        + ["--xla_gpu_nccl_termination_timeout_seconds=45"]
    )


def test_waiting_for_all_is_no_collective(monkeypatch):
    distributed.wait_for_all("alone")  # alone
    waited = []
    client = type("Client", (), {"wait_at_barrier": lambda self, *what: waited.append(what)})()
    monkeypatch.setattr(distributed.jax_private, "coordination_client", lambda: client)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    distributed.wait_for_all("still alone")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    distributed.wait_for_all("step 1 is compiled")
    assert waited == [("paxtrain/step 1 is compiled/1", distributed._BARRIER)]


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("where", ["garbage", ":1234", "localhost:", "localhost:http", "localhost:0", "host:65536", ""])
def test_what_is_no_address(joined, where, process):
    with pytest.raises(UserError) as error:
        distributed.initialize(where, 2, process, 1)
    assert "--coordinator must be HOST:PORT" in str(error.value)
    assert repr(where) in str(error.value)
    assert joined == []


@pytest.mark.parametrize("where", ["node-1.cluster:1", "10.0.0.1:65535", "[::1]:8080"])
def test_addresses(joined, where):
    distributed.initialize(where, 2, 0, 1)
    assert len(joined) == 1


def test_what_the_runtime_says_becomes_one_sentence(joined, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("UNKNOWN: Failed to start RPC server\n  on [::]:22")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(UserError, match=r"^cannot join the other processes: UNKNOWN: Failed .* on \[::\]:22$"):
        distributed.initialize("localhost:22", 2, 0, 1)


def test_the_limit_ends_with_the_meeting(joined, monkeypatch):
    """The limit does not end processes that have joined."""
    monkeypatch.setattr(distributed, "_LATER", 0.1)
    distributed.initialize("localhost:1234", 2, 1, 0.1)
    time.sleep(0.4)


def test_nobody_waits_longer_than_the_limit_and_the_missing_one_is_named():
    """The coordinator of the first two never answers. Of three others one does not come; all run at once."""
    code = (
        "import sys; from paxtrain.process import distributed; distributed._LATER = 30 if sys.argv[2] == '3' else 0; "
        "distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 2)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"127.0.0.1:{server.getsockname()[1]}"
    cases = [("192.0.2.1:9", "2", "1"), ("localhost:1", "2", "1"), (free, "3", "0"), (free, "3", "1")]
    processes = [
        subprocess.Popen([sys.executable, "-c", code, *case], stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for case in cases
    ]
    for process, (coordinator, count, number) in zip(processes, cases):
        _, said = process.communicate(timeout=300)
        if count == "3":
            assert process.returncode == -signal.SIGABRT and "timed out task names:\n2\n" in said, said
            continue
        assert process.returncode == 1, said
        assert said.startswith(
            f"error: the processes did not find each other within 2 s (process {number} of 2, coordinator "
            f"{coordinator}); see whether process 0 is up and can be reached"
        )


def test_bad_input_of_one_process_ends_them_all(monkeypatch):
    mine = UserError("mine")
    with pytest.raises(UserError, match="mine"):
        distributed.agree(mine)
    distributed.agree(None)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    told = []

    def others(kind):
        told.append(kind.tolist())
        return np.array([[0], told[0], told[0]])

    monkeypatch.setattr(distributed, "allgather", others)
    with pytest.raises(UserError, match="mine"):
        distributed.agree(mine)
    with pytest.raises(UserError, match="process 1 found bad input"):
        distributed.agree(None)
    told.clear()
    with pytest.raises(OSError, match="No space left"):
        distributed.agree(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(OSError, match="process 1 failed") as full:  # which is no bad input for the others either
        distributed.agree(None)
    assert is_full(full.value)


GATHERED = """
import numpy as np
from paxtrain.process import distributed

for turn in range(3):
    assert distributed.gather_texts(f"{turn} of {process}") == [f"{turn} of {i}" for i in range(3)]
both = distributed.allgather({"a": np.float64(process) + 1e-12, "b": np.arange(process, process + 2)})
assert both["a"].dtype == np.float64 and (both["a"] == np.arange(3) + 1e-12).all(), both
assert both["b"].tolist() == [[0, 1], [1, 2], [2, 3]], both
assert distributed.allgather(np.full((process, 2), process), tiled=True).tolist() == [[1, 1], [2, 2], [2, 2]]
assert len(distributed.host_names()) == 3
"""


def test_small_values_are_gathered_without_a_collective():
    run_processes(GATHERED, processes=3, devices=1)
    alone = distributed.allgather((np.arange(2), np.array(True)))
    assert [value.tolist() for value in alone] == [[[0, 1]], [True]]


def test_a_program_runs_only_when_all_have_compiled_it(monkeypatch):
    happened = []
    monkeypatch.setattr(distributed, "wait_for_all", happened.append)
    monkeypatch.setattr(distributed, "_is_shared", lambda program: True)
    compiled = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: (happened.append("compile"), compiled(self))[1])
    double = distributed.compiled_together(jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree)), "doubling")
    some = {"a": jnp.arange(3), "b": jnp.ones((2, 2))}
    for _ in range(2):
        np.testing.assert_array_equal(double(some)["a"], [0, 2, 4])
    assert happened == ["compile", "doubling is compiled"]
    double({"a": jnp.arange(4), "b": jnp.ones((2, 2))})  # other shapes are another program
    assert happened == ["compile", "doubling is compiled"] * 2
    monkeypatch.undo()
    monkeypatch.setattr(distributed, "wait_for_all", lambda what: pytest.fail("a program of this process alone"))
    distributed.compiled_together(jax.jit(lambda x: x + 1), "mine")(jnp.ones(2))


def test_a_port_that_is_taken_is_named():
    """jax alone says only that it could not start its server, or ends with SIGSEGV."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = f"'127.0.0.1:{port}', 2, 0, 20"
        script = f"""
from paxtrain.errors import UserError
from paxtrain.process import distributed
try:
    distributed.initialize({flags})
except UserError as error:
    print(error)
"""
        said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout.startswith(f"cannot listen at 127.0.0.1:{port}: port {port} of this machine is taken"), said
    assert f"`ss -ltnp 'sport = :{port}'` shows by which process" in said.stdout


@pytest.mark.parametrize("bound", [True, False])
def test_the_coordinator_listens_at_its_address_alone(bound):
    """The control is jax's own choice: all addresses of the machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = f"""
import os, socket
from paxtrain.process import distributed
if not {bound}:
    distributed._bind_address = lambda *_: None
distributed.initialize("127.0.0.1:{port}", 1, 0, 20)
for address in ("127.0.0.1", "127.0.0.2"):
    with socket.socket() as s:
        print(s.connect_ex((address, {port})) == 0, flush=True)
os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == ["True", str(not bound)], said
