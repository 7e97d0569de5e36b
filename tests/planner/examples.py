"""Small clusters and models for the planner's tests."""

import dataclasses
from typing import Any

import numpy as np

from configs.gpt2_125m import get_config
from paxtrain.config import ModelConfig
from planner.cluster.cluster import Cluster

MODEL = ModelConfig(vocab_size=50257, layers=12, hidden=1024, heads=16, sequence=1024)


def cluster(hosts: int = 4, per_host: int = 4, seed: int | None = 0, **changes: Any) -> Cluster:
    """Return hosts whose links differ by up to a factor of four in each direction; equal links with seed=None."""
    rng = np.random.default_rng(seed)
    spread = np.ones((hosts, hosts)) if seed is None else rng.uniform(0.25, 1, (hosts, hosts))
    bandwidth, alpha = 25e9 * spread, np.full((hosts, hosts), 1e-5)
    np.fill_diagonal(bandwidth, 300e9)
    np.fill_diagonal(alpha, 3e-6)
    links = {"alpha": alpha.tolist(), "bandwidth": bandwidth.tolist()}
    return Cluster.parse(
        {"version": 1, "hosts": hosts, "devices_per_host": per_host, "device": "a100-80gb", "links": links} | changes
    )


def values(**model: Any) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration of MODEL with a global batch of 64; `model` changes the model."""
    found = get_config().to_dict()
    found["model"] |= {**dataclasses.asdict(MODEL), **model}
    found["batch"]["global_batch"] = 64
    return found


def placements(count: int, data: int, pipe: int, slots: int, seed: int = 0) -> np.ndarray:
    """Return random placements int [count, D, P] on hosts with `slots` tensor groups each."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(data * pipe) // slots for _ in range(count)]).reshape(count, data, pipe)


def reordered(cluster: Cluster, order: np.ndarray) -> Cluster:
    """Return the same cluster with its hosts listed in another order: order[i] is the old index of host i."""
    pick = lambda x: x[np.ix_(order, order)]  # noqa: E731
    return dataclasses.replace(
        cluster,
        hosts=tuple(cluster.hosts[i] for i in order),
        kinds=tuple(cluster.kinds[i] for i in order),
        memory=cluster.memory[order],
        alpha=pick(cluster.alpha),
        samples=cluster.samples[:, order][:, :, order],
        measured=None if cluster.measured is None else pick(cluster.measured),
    )
