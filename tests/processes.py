"""A program run by several processes of some devices each, joined by jax.distributed."""

import pathlib
import socket
import subprocess
import sys

_JOIN = """
import sys
import jax

coordinator, devices, processes, process = sys.argv[1], *map(int, sys.argv[2:5])
del sys.argv[1:5]
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, processes, process)
"""


def run_processes(
    program: str, *arguments: str | pathlib.Path, processes: int = 2, devices: int = 4, limit: float = 120
) -> list[str]:
    """Return the output of each process; fail if one does not end with exit code 0.

    Args:
        program: Python source; its sys.argv[1:] are the arguments.
        arguments: the program's arguments.
        processes: number of processes.
        devices: CPU devices of each.
        limit: seconds after which all are killed.
    """
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _JOIN + program, address, *map(str, (devices, processes, i)), *arguments],
            cwd=pathlib.Path(__file__).resolve().parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        outputs = [each.communicate(timeout=limit)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * processes, "\n".join(outputs)
    return outputs
