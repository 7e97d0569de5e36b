"""Two processes of a benchmark, each with one device on a separate core, as two hosts of a cluster."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import jax

from paxtrain.errors import UserError
from paxtrain.process.distributed import initialize

# glibc returns a step's big buffers to the system, and the next step faults them in again page by page. The cost grows
# with the size of the rings. A GPU's allocator keeps its memory; these settings make glibc do the same.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}


def run_two(module: str, repeats: int) -> Any:
    """Run two processes of a module, and return the JSON value that the first prints as its last line.

    The result is None on a machine with one core. Each process must call `enter` with the values of its flags --worker
    and --coordinator.

    Args:
        module: dotted name of a main with the flags --coordinator, --repeats and --worker.
        repeats: value of --repeats.

    Raises:
        UserError: one of the processes failed.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return None
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    command = [sys.executable, "-m", module, f"--coordinator={coordinator}", f"--repeats={repeats}"]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, f"--worker={i}"],
                    stdin=subprocess.PIPE,  # closes when this process ends
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | _KEEP_MEMORY,
                )
            )
            for i in range(2)
        ]
        output = [worker.stdout.read() if worker.stdout else "" for worker in workers]
        codes = [worker.wait() for worker in workers]
    if any(codes):
        raise UserError(f"the two processes of {module} ended with {codes}")
    return json.loads(output[0].splitlines()[-1])


def enter(process: int, coordinator: str) -> None:
    """Make this process one of the two: on a separate core, with one device, and ended when its parent ends.

    Args:
        process: number of this process, 0 or 1.
        coordinator: HOST:PORT at which the processes meet.
    """
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[process]})
    jax.config.update("jax_num_cpu_devices", 1)
    initialize(coordinator, 2, process, 60)
