"""Records that the lab might have made, for the tests of what is said of them."""

import pathlib

from experiments.lab.findings import (
    adaptive,
    compression,
    links,
    paper,
    peer,
    schedules,
    sooner,
)
from experiments.lab.findings import pairs as pairs_of
from experiments.lab.measuring import adaptive as adaptive_experiment
from experiments.lab.measuring import compression as compression_experiment
from experiments.lab.measuring import paper as paper_experiment
from experiments.lab.measuring.peer import INT8, LOW_RANK
from experiments.lab.records import Records


def add_links(folder: pathlib.Path, worst: float = 0.05, hosts: int = 3, seconds: float = 40.0) -> None:
    rates = [[100.0] * hosts for _ in range(hosts)]
    measured = [[101.0] * hosts for _ in range(hosts)]
    measured[0][1] = 100 * (1 - worst)
    rates[1][0], measured[1][0] = 10.0, 20.0  # slower than those for which anything is wanted
    measured[2][2] = 1e6  # the diagonal means nothing
    Records(folder / links.SOURCE).add("some hosts", rates=rates, measured=measured, seconds=seconds)


def add_pair(folder: pathlib.Path, scenario: str, plan: str, how: str, hosts: list[int], seconds: list[float], **by):
    by = {"predicted": 1.0, "pipette": 1.0, "amp": 1.0} | by
    values = {"scenario": scenario, "plan": plan, "how": how, "hosts": [hosts], "seconds": seconds}
    Records(folder / pairs_of.SOURCE).add(f"{scenario} | {plan} | {how}", **values, **by)


def add_predictions(folder: pathlib.Path) -> None:
    """Add measured pairs with medians 1, 2, 4 on one scenario and 10, 20 on another."""
    add_pair(folder, "a", "x", "planned", [0, 1], [1.0, 0.9, 5.0], predicted=1.1, pipette=3.0, amp=1.5)
    add_pair(folder, "a", "x", "worst", [1, 0], [2.0, 2.0, 2.0], predicted=1.8, pipette=2.0, amp=2.5)
    add_pair(folder, "a", "y", "planned", [0, 1], [4.0, 3.0, 9.0], predicted=5.0, pipette=1.0, amp=4.5)
    add_pair(folder, "b", "x", "planned", [0, 1], [10.0], predicted=12.0, pipette=9.0, amp=9.0)
    add_pair(folder, "b", "y", "planned", [0, 1], [20.0], predicted=11.0, pipette=18.0, amp=25.0)


def add_placements(folder: pathlib.Path, host_order: float) -> None:
    for plan, predicted, planned in (("1x2 fast", 0.9, 1.0), ("2x1 slow", 1.5, 1.6)):
        add_pair(folder, "two_racks", plan, "planned", [0, 1, 2], [planned], predicted=predicted)
        add_pair(folder, "two_racks", plan, "host order", [1, 0, 2], [host_order], predicted=2.0)
        add_pair(folder, "two_racks", plan, "worst", [2, 1, 0], [3.0], predicted=3.0)
        add_pair(folder, "two_racks", plan, "random 0", [2, 0, 1], [planned / 1.05], predicted=1.0)


def add_compression(folder: pathlib.Path, packed: float = 0.7, loss: float = 2.01) -> None:
    records = Records(folder / compression.SOURCE)
    medians = dict(zip(compression_experiment.KINDS, (1.0, 0.9, 0.8, packed, 0.5, 0.9, 0.9, 0.9, 0.9), strict=True))
    seconds = {kind: [time, 0.9 * time, 1.3 * time] for kind, time in medians.items()}
    seconds["CB"] = [0.9, 0.9, 0.9]
    wire = {kind: {"backward": round(1e6 * time), "embedding": 1000, "all-reduce": 4} for kind, time in medians.items()}
    hosts = [{"forward": 0.2, "pipeline": 0.1}, {"forward": [0.2, 0.4], "data": 0.1}]
    counted = {"wire": wire, "parts": dict.fromkeys(medians, hosts), "predicted": {"CB": 1.01, "CB+SC": 1.12}}
    counted["unlimited"] = {kind: [0.7 * time] for kind, time in medians.items()}
    records.add("share None", share=0.4, rate=50.0, seconds=seconds, selected="0,1", **counted)
    records.add("share 0.7", share=0.7, rate=12.0, seconds=seconds, selected="0,1,2,3")
    for kind in medians:
        if kind == compression.PAPER:
            records.add("all stages", kind=kind, selected="0,1,2,3", losses=[], validation=[[0, 6.0], [100, 2.2]])
        last = {compression.PAPER: loss, compression.ALL: 2.5}.get(kind, 2.0)
        records.add(f"loss {kind}", kind=kind, losses=[], validation=[[0, 6.0], [50, 4.0], [100, last]])


def add_paper(folder: pathlib.Path, fused: float = 0.85) -> None:
    """Add dense steps of 1.0 s, of which links take 0.4, and kinds of 0.9, `fused` and 0.7 s."""
    records = Records(folder / paper.SOURCE)
    medians = dict(zip(paper_experiment.KINDS, (1.0, 0.9, fused, 0.7), strict=True))
    for schedule in paper_experiment.SCHEDULES:
        records.add(
            schedule,
            rate=50.0,
            share=0.3,
            selected="0,1",
            seconds={kind: [time, time + 0.01, time - 0.01] for kind, time in medians.items()},
            unlimited=[0.6],
            predicted=dict.fromkeys(medians, 0.99),
            most={"CB": 0.05, "FE": 0.02, "SC": 0.2},
            wire={kind: {"backward": 10_000_000 * time} for kind, time in medians.items()},
        )


def add_sooner(folder: pathlib.Path, last: float = 2.0, seeds: int = 2) -> None:
    """Add dense runs that end after 100 s at 2.0, and others that are at 2.2 after 20 s and at `last` after 40 s."""
    records = Records(folder / sooner.SOURCE)
    for seed in range(seeds):
        dense = {"validation": [[0, 6.0], [25, 3.0], [50, 2.0]], "seconds": [0.0, 50.0, 100.0]}
        coded = {"validation": [[0, 6.0], [25, 2.2], [50, last]], "seconds": [0.0, 20.0, 40.0 + seed]}
        runs = {"dense": dense, "int8": coded}
        records.add(f"seed {seed}", seed=seed, kind="int8", rate=10.0, share=0.5, runs=runs)


def add_adaptive(folder: pathlib.Path, predicted: float = 2.1, loss: float = 2.01) -> None:
    """Add dense steps of 4.0 s, of which links take 3.0, and a plan of 2.0 s, predicted so, with the last loss."""
    records = Records(folder / adaptive.SOURCE)
    backward = {"place": "backward", "label": "int8", "losses": [0.001, 0.003]}
    data = {"place": "data", "label": "int4", "losses": [-0.002, -0.004]}
    records.add(adaptive_experiment.PROBE, codecs=[backward, data], steps=50, seeds=2)
    records.add(
        "share 0.5",
        share=0.5,
        rate=7.0,
        profiled=7.1,
        plan="plan",
        compress={
            "backward.messages": "epilogue",
            "backward.codec": "int8",
            "data.stages": "0,1",
            "data.codec": "int4",
        },
        codecs=[backward, data],
        seconds={"dense": [4.0, 3.9, 4.2], "chosen": [2.0, 1.9, 2.1]},
        unlimited=[1.0],
        predicted={"dense": 3.8, "chosen": predicted},
    )
    for plan, last in ((adaptive_experiment.BASE.name, 2.0), ("plan", loss)):
        for seed in (3, 4, 5):
            shift = 0.01 * (seed - 4) * (plan == "plan")
            records.add(f"loss {plan} {seed}", plan=plan, seed=seed, validation=[[0, 6.0], [100, last + shift]])


def add_schedules(folder: pathlib.Path, overlapping: float = 0.8, share: float = 0.3) -> None:
    predicted = {"eager_1f1b": 1.1, "1f1b": 0.9}
    seconds = {"eager_1f1b": [1.0, 1.0, 1.2], "1f1b": [1.0, 0.8, 1.0]}
    over = {"eager_1f1b": overlapping, "1f1b": 0.9}
    values = {"rate": 50.0, "seconds": seconds, "predicted": predicted, "predicted_overlapping": over}
    Records(folder / schedules.SOURCE).add("50 Mbit/s", transfer_share=share, **values)


def add_peer(folder: pathlib.Path, dense: float = 0.8, cost: float = 0.005) -> None:
    records = Records(folder / peer.SOURCE)
    records.add("first", mesh=[2, 4, 1], torch="2.0", first={peer.PYTORCH: [4.0, 2.0], "1f1b": [4.0, 2.00001]})
    for kind, loss in ((peer.DENSE, 2.0), (INT8, 2.0 * (1 + cost)), (LOW_RANK, 2.2)):
        records.add(kind, mesh=[2, 4, 1], kind=kind, validation=[[0, 5.0], [100, loss]])
    for rate, slower in ((1000.0, 0.5), (200.0, 0.5), (50.0, 1.0)):
        times = {peer.PYTORCH: 2.0, "1f1b": 1.9, peer.DENSE: 2 * dense, INT8: 0.9, LOW_RANK: 0.5}
        kinds = {
            kind: {"seconds": [slower * time] * 3, "computed": [1.5] * 3, "bytes": [3_000_000] * 3}
            for kind, time in times.items()
        }
        records.add(f"{rate}", mesh=[2, 4, 1], rate=rate, save="dots", kinds=kinds)
