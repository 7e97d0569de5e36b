"""A program run by two processes with four devices each, joined by jax.distributed."""

import pathlib
import socket
import subprocess
import sys

_JOIN = """
import sys
import jax

coordinator, process = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, process)
"""


def run_two_processes(program: str, *arguments: str | pathlib.Path) -> list[str]:
    """Return the output of each process; fail if one does not end with exit code 0.

    Args:
        program: of Python; its sys.argv[1:] are the arguments.
    """
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _JOIN + program, address, str(i), *arguments],
            cwd=pathlib.Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return outputs
