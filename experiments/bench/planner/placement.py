"""The quality of placements: against exhaustive search, and on measured links against host order and others' rules."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paxtrain.config import ModelConfig
from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate, host_order
from planner.cost.link_seconds import Fabric, fabric
from planner.cost.step_time import Problem
from planner.placement import bounds, exact
from planner.placement.gain import gain
from planner.placement.place import place
from planner.placement.rules import amp_rule, pipette_rule

GPT_8B = ModelConfig(vocab_size=50257, layers=72, hidden=3072, heads=24, sequence=1024)
GPT_175B = ModelConfig(vocab_size=50257, layers=96, hidden=12288, heads=96, sequence=2048)


def random_cluster(hosts: int, seed: int, spread: float = 0.5, nics: int = 1, per_host: int = 8) -> Cluster:
    """Return hosts of A100s with links of 200 Gbit/s between them, each slower by a random share.

    Args:
        hosts: number of hosts.
        seed: seed of the draw.
        spread: largest share by which a link is slower.
        nics: NICs per host.
        per_host: devices per host.
    """
    rng = np.random.default_rng(seed)
    same = np.eye(hosts, dtype=bool)
    return Cluster(
        name="random",
        source="",
        hosts=tuple(f"n{i}" for i in range(hosts)),
        devices_per_host=per_host,
        kinds=("a100-80gb",) * hosts,
        memory=np.full(hosts, 80e9),
        nics=nics,
        alpha=np.where(same, 4e-6, 12e-6),
        samples=np.where(same, 300e9, 25e9 * (1 - spread * rng.random((1, hosts, hosts)))),
    )


def candidate(
    model: ModelConfig, mesh: tuple[int, int, int], micro_batch: int, batch: int, schedule: str, **changes: Any
) -> Candidate:
    """Return a candidate with layers spread evenly, where the first stages may have one more.

    Args:
        model: the model.
        mesh: data, pipe and tensor ranks.
        micro_batch: sequences per micro-batch.
        batch: sequences per step.
        schedule: name of the schedule.
        changes: further fields of the candidate.
    """
    data, pipe, tensor = mesh
    counts = tuple(model.layers // pipe + (s < model.layers % pipe) for s in range(pipe))
    return Candidate(data, pipe, tensor, micro_batch, batch // data // micro_batch, schedule, counts, **changes)


def against_exhaustive(seeds: Sequence[int]) -> list[tuple[str, float]]:
    """Return the gap of annealing to the best step, as a share, on random 8-host clusters for meshes of all shapes.

    On so few hosts `place` would evaluate all placements, so annealing is forced.
    """
    found = []
    for seed in seeds:
        nodes = random_cluster(8, seed)
        links = fabric(nodes)
        for schedule in ("eager_1f1b", "1f1b"):
            for mesh in ((8, 1, 8), (4, 2, 8), (2, 4, 8), (1, 8, 8)):
                problem = Problem(nodes, GPT_8B, candidate(GPT_8B, mesh, 2, 256, schedule))
                every = exact.placements(*mesh[:2], 1, np.full(8, -1), 50_000)
                assert every is not None, "8 hosts have few placements"

                best = problem.step(links, every).total.min()
                annealed = place(problem, links, seed=seed, exactly=False).seconds
                found.append((f"{schedule} {mesh} seed {seed}", annealed / best - 1))
    return found


def exhaustive(seeds: int) -> None:
    """Print how far annealing is from exhaustive search on `seeds` random clusters."""
    began = time.perf_counter()
    found = against_exhaustive(range(seeds))
    left = np.array([share for _, share in found])
    equal, took = (left < 1e-9).mean(), time.perf_counter() - began
    print(
        f"exhaustive: {len(left)} instances of 8 hosts, {equal:.1%} equal, worst {left.max():.3%} above, {took:.0f} s"
    )


def _line(problem: Problem, links: Fabric, noise: bool) -> str:
    c = problem.candidate
    began = time.perf_counter()
    found = place(problem, links)
    took = time.perf_counter() - began
    began = time.perf_counter()
    bounds.lower(problem, links)
    bound_took = time.perf_counter() - began
    text = f"{c.schedule:10} {c.data:4} x {c.pipe:2} x {c.tensor}: {found.seconds:.4f} s, gap {found.gap:.2%}, "
    text += f"{found.source}, {found.evaluations} placements, {took:.2f} s (bound {bound_took:.2f} s)"
    order = host_order(c, problem.cluster.devices_per_host)[0]
    for name, hosts in (("host order", order), ("AMP", amp_rule(problem)), ("Pipette", pipette_rule(problem))):
        if noise:
            g = gain(problem, problem.cluster, found.hosts, hosts)
            seen, held = f"{g.mean:.2%} +- {g.std:.2%}", f"{g.held_out[0]:.2%} +- {g.held_out[1]:.2%}"
            noise_words = ", within the noise" if g.within_noise else ""
            text += f"\n    over {name}: {seen} over {g.samples} samples, held out {held}{noise_words}"
        else:
            text += f"\n    over {name}: {problem.step(links, hosts[None]).total[0] / found.seconds - 1:.2%}"
    return text


def measured(path: str) -> None:
    """Print the gains of placements on a cluster file's measured links."""
    nodes = Cluster.load(path)
    for mesh, micro_batch in (((8, 4, 4), 2), ((4, 4, 8), 2), ((16, 8, 1), 1)):
        for schedule in ("eager_1f1b", "1f1b"):
            made = candidate(GPT_8B, mesh, micro_batch, 512, schedule)
            print(_line(Problem(nodes, GPT_8B, made), fabric(nodes), noise=True), flush=True)


def large() -> None:
    """Print the gains of placements on 128 and 1,024 hosts with random links."""
    for hosts, batch, meshes in ((128, 1536, ((8, 16, 8), (16, 16, 4))), (1024, 4096, ((64, 16, 8), (32, 32, 8)))):
        nodes = random_cluster(hosts, seed=0, spread=0.1, nics=8)
        for mesh in meshes:
            for schedule in ("eager_1f1b", "1f1b"):
                made = candidate(GPT_175B, mesh, 1, batch, schedule, save="layer_inputs")
                print(_line(Problem(nodes, GPT_175B, made), fabric(nodes), noise=False), flush=True)
