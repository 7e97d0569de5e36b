"""The time and memory of whole dry runs of the planner."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

from planner.planning.kept import FOLDER

# Devices, configuration and global batch of dry runs, with 8 H100s per host.
RUNS = ((128, "gpt_8b", 512), (1024, "gpt_175b", 1536), (8192, "gpt_175b", 8192))


def _cluster(hosts: int, folder: pathlib.Path) -> pathlib.Path:
    """Write a cluster file with 3 samples, whose links differ as much as the measured ones in configs/clusters."""
    rng = np.random.default_rng(0)
    bandwidth = 50e9 * np.clip(rng.normal(1, 0.035, (3, hosts, hosts)), 0.85, 1.1)
    bandwidth[:, np.eye(hosts, dtype=bool)] = 450e9
    np.savez(folder / "links.npz", alpha=np.where(np.eye(hosts), 4e-6, 12e-6), bandwidth=bandwidth)
    values = {
        "version": 1,
        "name": f"{hosts} hosts of 8 x H100, made up",
        "hosts": hosts,
        "devices_per_host": 8,
        "device": "h100",
        "nics": 8,
        "links": {"npz": "links.npz"},
    }
    path = folder / "cluster.json"
    path.write_text(json.dumps(values))
    return path


def _run(command: list[str], cache: pathlib.Path) -> tuple[float, float, str]:
    """Return the seconds and the peak memory in GB of a dry run, and what it says of its search.

    Args:
        command: the command.
        cache: folder of the user's caches.

    Raises:
        RuntimeError: it failed.
    """
    began = time.perf_counter()
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    search = next(line for line in output.splitlines() if line.startswith("search")).removeprefix("search").strip()
    return seconds, usage.ru_maxrss / 1e6, search


def speed(largest: int = 8192) -> None:
    """Print seconds and peak memory of dry runs for up to `largest` devices.

    Raises:
        RuntimeError: a run failed.
    """
    print("\na dry run of python -m planner.plan --oracle=no, imports and report included, in seconds:")
    print("with no layer's program read yet, with all of them kept, and planned again")
    print(f"  {'devices':>8}  {'model':<10}{'nothing':>9}{'programs':>9}{'again':>9}{'peak GB':>9}  search")
    for devices, model, global_batch in RUNS:
        if devices > largest:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            cluster, cache = _cluster(devices // 8, folder), folder / "cache"
            command = [sys.executable, "-m", "planner.plan", f"--model=configs/{model}.py", f"--cluster={cluster}"]
            command += [f"--global_batch={global_batch}", "--oracle=no", f"--out={folder}/plan"]
            first, *_ = _run(command, cache)
            shutil.rmtree(cache / "paxtrain" / FOLDER)
            programs, memory, search = _run(command, cache)
            again, *_ = _run(command, cache)
        row = f"  {devices:>8,}  {model:<10}{first:>9.1f}{programs:>9.1f}{again:>9.1f}{memory:>9.2f}  {search}"
        print(row, flush=True)
