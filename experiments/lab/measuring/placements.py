"""Predicted beside measured step times of many plans on many placements, and what planned placements gain.

One session on eight hosts. The hosts differ in their links alone, so processes are put onto other hosts by giving
them those hosts' links: every placement of a mesh runs the same compiled program.
"""

import dataclasses

import numpy as np

from experiments.hosts import scenario as scenarios
from experiments.hosts.scenario import Scenario
from experiments.lab.laboratory import Bench, Lab
from experiments.lab.measuring import growth, joint
from experiments.lab.models import Split
from experiments.lab.records import Records
from planner.cluster.cluster import Cluster
from planner.cost import closed_forms
from planner.cost.candidate import host_order
from planner.cost.link_seconds import fabric, paths
from planner.cost.sizes import MASTER
from planner.cost.step_time import Problem
from planner.placement.place import place

SCENARIOS = ("two_racks", "one_slow_nic", "noisy", "two_sites", "ten_gbe")
SPLITS = (
    Split((2, 4, 1)),
    Split((2, 4, 1), "1f1b"),
    Split((2, 4, 1), "gpipe"),
    Split((1, 8, 1)),
    Split((4, 2, 1)),
    Split((8, 1, 1)),
)
RANDOM = {"two_racks": 3, "one_slow_nic": 0, "noisy": 0, "two_sites": 3, "ten_gbe": 0}


def closed(problem: Problem, cluster: Cluster, hosts: np.ndarray) -> dict[str, float]:
    """Return step seconds by Pipette's and AMP's forms from the same measured costs and links, with what they omit.

    Pipette: D of the first stage's ring alone; AMP: of the slowest stage. Neither knows head, embedding or optimizer;
    head and embedding are part of their stages' F and B here, which is to their advantage.
    """
    c, links = problem.candidate, fabric(cluster)
    where = paths(links, hosts[None], c.tensor)
    seconds = problem.seconds(problem.links(where), problem.kind_of_host[hosts[None]])
    forward, backward = seconds.forward[:1].copy(), seconds.backward[:1]
    forward[:, -1] += seconds.head[:1]
    pipelines = seconds.activation.reshape(c.data, c.pipe)[:, :-1] + seconds.gradient.reshape(c.data, c.pipe)[:, 1:]
    hops = pipelines[[int(np.argmax(pipelines.sum(axis=1)))]]
    parameters = problem.layer_parameters * MASTER
    rings = np.array([float(x) for x in where.ring[1][0]])
    reduce = [closed_forms.ring(parameters, c.data, 1 / x) if c.data > 1 else 0.0 for x in rings]
    m = c.micro_batches
    return {
        "pipette": float(closed_forms.pipette(forward, backward, hops, reduce[0], m, c.pipe, as_published=True)[0]),
        "amp": float(closed_forms.amp(forward, backward, hops, max(reduce), m)[0]),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A plan on a placement, int [D, P]; `how` it was chosen."""

    split: Split
    how: str
    hosts: np.ndarray


def pairs(cluster: Cluster, random: int, seed: int) -> list[Pair]:
    """Return the planned placement, host order, the worst of many, and random placements of every plan."""
    draw, found = np.random.default_rng(seed), []
    for split in SPLITS:
        c = split.candidate
        problem = Problem(cluster, split.config.model, c)
        links = fabric(cluster)
        order = host_order(c, cluster.devices_per_host)[0]
        many = np.stack([draw.permutation(c.groups).reshape(order.shape) for _ in range(500)])
        seconds = problem.step(links, many).total
        some = {
            "planned": place(problem, links, seed=seed).hosts,
            "host order": order,
            "worst": many[int(np.argmax(seconds))],
        }
        some |= {f"random {i}": many[i] for i in range(random)}
        found += [Pair(split, how, hosts) for how, hosts in some.items()]
    return found


def run(lab: Lab) -> None:
    """Measure all pairs of all scenarios, and what else needs eight hosts: the joint choice, part of growth."""
    records, chosen_together = lab.records("placements"), lab.records("joint")
    scenes = {name: scenarios.load(name, 8, lab.seed) for name in SCENARIOS}
    if all(f"{name} done" in records for name in SCENARIOS) and "done" in chosen_together:
        return
    missing = {name: scene for name, scene in scenes.items() if f"{name} done" not in records}
    own = {name: scene for name, scene in missing.items() if not scene.uplinks}
    if own or "done" not in chosen_together:
        with lab.session(scenes["two_racks"], "placements") as bench:
            bench.compile([*SPLITS, *growth.splits(8)])
            growth.measure(lab, bench, 8)
            for name, scene in own.items():
                _scenario(lab, bench, records, name, scene)
            bench.shape(scenes["two_racks"])
            cluster = bench.profile("joint", joint.BASE)
            joint.measure(lab, bench, chosen_together, cluster, scenes["two_racks"])
    for name, scene in missing.items():
        if scene.uplinks:  # hosts with routers between them are another network
            with lab.session(scene, name) as bench:
                bench.compile(list(SPLITS))
                _scenario(lab, bench, records, name, scene)


def _scenario(lab: Lab, bench: Bench, records: Records, name: str, scene: Scenario) -> None:
    bench.shape(scene)
    cluster = bench.profile(name, SPLITS[0])
    chosen = pairs(cluster, RANDOM[name], lab.seed)
    measured: dict[int, list[float]] = {i: [] for i in range(len(chosen))}
    for repeat in range(lab.repeats):
        for i, pair in enumerate(chosen):
            bench.shape(scene.moved(pair.hosts.ravel()))
            measured[i] += bench.time([pair.split.name], 1)[pair.split.name]
        lab.say(f"{name}: {len(chosen)} pairs, repeat {repeat + 1} of {lab.repeats}")
    for i, pair in enumerate(chosen):
        problem = Problem(cluster, pair.split.config.model, pair.split.candidate)
        predicted = float(problem.step(fabric(cluster), pair.hosts[None]).total[0])
        records.add(
            f"{name} | {pair.split.name} | {pair.how}",
            scenario=name,
            plan=pair.split.name,
            how=pair.how,
            hosts=pair.hosts.tolist(),
            seconds=measured[i],
            predicted=predicted,
            **closed(problem, cluster, pair.hosts),
        )
    if name == "two_racks":
        _ordered(lab, bench, records, chosen[0], scene)
    records.add(f"{name} done")


def _ordered(lab: Lab, bench: Bench, records: Records, pair: Pair, scene: Scenario) -> None:
    """Measure one placement made by the order of the devices in the mesh and by moving the links, in turn."""
    [name] = bench.compile([pair.split], [pair.hosts.ravel().tolist()])
    seconds: dict[str, list[float]] = {"order": [], "links": []}
    for _ in range(lab.repeats):
        bench.shape(scene)
        seconds["order"] += bench.time([name], 1)[name]
        bench.shape(scene.moved(pair.hosts.ravel()))
        seconds["links"] += bench.time([pair.split.name], 1)[pair.split.name]
    records.add("placed by order", hosts=pair.hosts.tolist(), placed_by=seconds)
    order, moved_links = (float(np.median(seconds[key])) for key in ("order", "links"))
    lab.say(f"placed by the order of devices {order:.3f} s, by moving links {moved_links:.3f} s")
