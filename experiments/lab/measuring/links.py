"""The planner's own profile of eight hosts beside the rates that their links were given, and how long it takes."""

import pathlib
import sys
import time

import numpy as np

from experiments.hosts import hosts
from experiments.lab.laboratory import Lab
from experiments.lab.session import ENVIRONMENT, ROOT
from paxtrain.errors import UserError
from planner.cluster import cluster as clusters
from planner.cluster.cluster import Cluster

HOSTS, PORT = 8, 9912
SIZES = "0.125,0.5"  # MiB


def rates(seed: int) -> np.ndarray:
    """Return [H, H] rates from 20 to 200 Mbit/s, drawn for each direction separately."""
    return np.exp(np.random.default_rng(seed).uniform(np.log(20), np.log(200), (HOSTS, HOSTS)))


def profile(cluster: hosts.Cluster, out: pathlib.Path, logs: pathlib.Path, config: pathlib.Path) -> float:
    """Run `python -m planner.profile` on every host and return the seconds of the whole command."""
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "planner.profile", f"--config={config}", f"--out={out}", f"--sizes={SIZES}"]
    command += ["--repeats=2", "--links_only", "--answer_timeout=120"]
    command += [f"--coordinator={cluster.addresses[0]}:{PORT}", f"--num_processes={cluster.hosts}"]
    began = time.monotonic()
    started = [
        cluster.start(
            host,
            [*command, f"--process_id={host}"],
            log=logs / f"{name}.log",
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        )
        for host, name in enumerate(cluster.names)
    ]
    codes = [popen.wait() for popen in started]
    if any(codes):
        raise UserError(f"planner.profile ended with {codes}; its logs are in {logs}")
    return time.monotonic() - began


def run(lab: Lab) -> None:
    """Profile once, and record the set and the measured rates."""
    records = lab.records("links")
    if "eight hosts" in records:
        return
    out = lab.out / "clusters" / "links.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    given = rates(lab.seed)
    with hosts.Cluster(given.tolist()) as cluster:
        seconds = profile(cluster, out, lab.out / "logs" / "links", ROOT / "experiments/lab/config.py")
    found = Cluster.load(out)
    off = clusters.between(found)
    measured = found.bandwidth * 8e-6
    error = measured[off] / given[off] - 1
    records.add(
        "eight hosts",
        rates=given.tolist(),
        measured=measured.tolist(),
        alpha=found.alpha.tolist(),
        seconds=seconds,
        names=list(found.hosts),
    )
    lab.say(f"planner.profile: links off by {np.abs(error).max():.1%} at most, in {seconds:.0f} s")
