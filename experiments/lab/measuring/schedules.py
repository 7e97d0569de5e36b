"""Four hosts in a pipeline: schedules beside each other on links of several rates, and all orders of the hosts.

The orders are few enough to measure every one, so that a planned placement can be held against the best there is.
"""

import itertools

import numpy as np

from experiments.hosts.scenario import Scenario
from experiments.lab.laboratory import Bench, Lab, summary
from experiments.lab.measuring import growth
from experiments.lab.models import Split
from experiments.lab.records import Records
from planner.cluster.cluster import Cluster
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement.place import place

RATES = (200.0, 100.0, 50.0, 25.0)  # Mbit/s
SPLITS = (
    Split((1, 4, 1), global_batch=32),
    Split((1, 4, 1), "1f1b", global_batch=32),
    Split((1, 4, 1), "gpipe", global_batch=32),
    Split((1, 4, 1), "interleaved_1f1b", chunks=2, global_batch=32),
)
ORDERED = SPLITS[0]


def _uneven(seed: int) -> np.ndarray:
    """Return [4, 4] rates between 8 and 80 Mbit/s, drawn for each direction separately."""
    return np.exp(np.random.default_rng(seed).uniform(np.log(8), np.log(80), (4, 4)))


def run(lab: Lab) -> None:
    """Measure schedules at all rates, all orders, and this size's part of growth."""
    records = lab.records("schedules")
    scene = Scenario("four hosts", "four hosts", np.full((4, 4), 100.0))
    if "orders done" in records and growth.done(lab, 4):
        return
    with lab.session(scene, "schedules") as bench:
        bench.compile([*SPLITS, *growth.splits(4)])
        growth.measure(lab, bench, 4)
        for rate in RATES:
            if f"{rate:g} Mbit/s" not in records:
                _schedules(lab, bench, records, rate)
        if "orders done" not in records:
            _orders(lab, bench, records)


def _schedules(lab: Lab, bench: Bench, records: Records, rate: float) -> None:
    bench.shape(np.full((4, 4), rate))
    cluster = bench.profile(f"schedules {rate:g}", ORDERED)
    seconds = bench.time([split.name for split in SPLITS], lab.repeats)
    predicted = {split.schedule: _predicted(cluster, split) for split in SPLITS}
    layer = Problem(cluster, ORDERED.config.model, ORDERED.candidate)
    hop = layer.message / cluster.bandwidth[0, 1] + cluster.alpha[0, 1]
    stage = float(layer.forward[0, 1] + layer.backward[0, 1])
    records.add(
        f"{rate:g} Mbit/s",
        rate=rate,
        seconds={split.schedule: seconds[split.name] for split in SPLITS},
        predicted=predicted,
        predicted_overlapping={split.schedule: _predicted(cluster, split, overlap=True) for split in SPLITS},
        transfer_share=2 * hop / (2 * hop + stage),
    )
    said = ", ".join(f"{split.schedule} {summary(seconds[split.name])['median']:.3f} s" for split in SPLITS)
    lab.say(f"schedules at {rate:g} Mbit/s: {said}")


def _predicted(cluster: Cluster, split: Split, overlap: bool = False, hosts: np.ndarray | None = None) -> float:
    """Return the planner's step seconds; with `overlap` as if transfers ran beside compute, as on GPUs."""
    problem = Problem(cluster, split.config.model, split.candidate)
    problem.overlap = overlap
    hosts = np.arange(4).reshape(1, 4) if hosts is None else hosts
    return float(problem.step(fabric(cluster), hosts[None]).total[0])


def _orders(lab: Lab, bench: Bench, records: Records) -> None:
    rates = _uneven(lab.seed)
    bench.shape(rates)
    cluster = bench.profile("orders", ORDERED)
    orders = [np.array(order) for order in itertools.permutations(range(4))]
    measured: list[list[float]] = [[] for _ in orders]
    for repeat in range(lab.repeats):
        for n, order in enumerate(orders):
            bench.shape(rates[np.ix_(order, order)])
            measured[n] += bench.time([ORDERED.name], 1)[ORDERED.name]
        lab.say(f"orders of four hosts: repeat {repeat + 1} of {lab.repeats}")
    problem = Problem(cluster, ORDERED.config.model, ORDERED.candidate)
    planned = place(problem, fabric(cluster), seed=lab.seed).hosts
    for order, seconds in zip(orders, measured):
        records.add(
            f"order {','.join(map(str, order))}",
            order=order.tolist(),
            planned=bool((order == planned.ravel()).all()),
            seconds=seconds,
            predicted=_predicted(cluster, ORDERED, hosts=order[None]),
        )
    records.add("orders done", rates=rates.tolist())
