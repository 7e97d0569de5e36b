"""The time and memory of whole dry runs of the planner."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

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


def speed(largest: int = 8192) -> None:
    """Print seconds and peak memory of dry runs for up to `largest` devices.

    Raises:
        RuntimeError: a run failed.
    """
    print("\na dry run of python -m planner.plan --oracle=no, imports and report included")
    print(f"  {'devices':>8}  {'model':<10}{'seconds':>9}{'peak GB':>9}  search")
    for devices, model, global_batch in RUNS:
        if devices > largest:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cluster = _cluster(devices // 8, pathlib.Path(folder))
            command = [sys.executable, "-m", "planner.plan", f"--model=configs/{model}.py", f"--cluster={cluster}"]
            command += [f"--global_batch={global_batch}", "--oracle=no", f"--out={folder}/plan"]
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            output = process.stdout.read() if process.stdout else ""
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            if status:
                raise RuntimeError(f"the dry run for {devices} devices failed")
        search = next(line for line in output.splitlines() if line.startswith("search")).removeprefix("search").strip()
        print(f"  {devices:>8,}  {model:<10}{seconds:>9.1f}{usage.ru_maxrss / 1e6:>9.2f}  {search}", flush=True)
