"""Gains and costs of compression: step time on links of several speeds, bytes, the parts of a step, and the loss.

Eight hosts of two devices: tensor groups inside hosts, pipeline and data across, the papers' 1F1B. At the first speed
communication takes the share of a dense step that the planner predicts for the setting of Optimus-CC, 8.3B parameters
on 16 hosts of 8 A100s, tensor 8, pipe 4, data 4; slower links follow. Which stages compress over data follows at each
speed from the planner's rule. Losses do not depend on who sends what how fast: they come from training the same meshes
of devices in a single process, as fast as it goes.
"""

import dataclasses
from typing import Any

import numpy as np

from experiments.hosts import scenario as scenarios
from experiments.hosts.scenario import Scenario
from experiments.lab.laboratory import Bench, Lab, summary
from experiments.lab.models import Split
from experiments.lab.records import Records
from paxtrain.config import ModelConfig
from paxtrain.config.load import load_config
from planner.cluster.cluster import Cluster, between
from planner.cost.candidate import Candidate, host_order
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem

# With rank 16, 37% of so small a message, "everything" would gain little; with rank 4 CB alone costs 3% of the loss.
_OFF = {"embedding.sync": "unfused", "backward.rank": 4, "forward.rank": 4, "data.rank": 8, "data.start": 0.0}
_CB = {"backward.messages": "epilogue", "backward.rank": 16}
_ALL = {"backward.messages": "all", "forward.messages": "all", "embedding.sync": "fused", "data.stages": "all"}
_CODED = _ALL | {"backward.codec": "int8", "forward.codec": "int8"}
SELECTIVE, INT8, MIXED, GRADIENTS = "CB+FE+SC", "int8", "int8, data int4", "int8, gradients int4"
TABLE = "int8, all gradients int4"  # the embedding's, too
KINDS = {
    "dense": {},
    "CB": _CB,
    "CB+FE": _CB | {"embedding.sync": "fused"},
    SELECTIVE: _CB | {"embedding.sync": "fused", "data.stages": "all"},  # or fewer stages: `selected`
    "everything": _ALL,
    INT8: _CODED | {"data.codec": "int8"},
    MIXED: _CODED | {"data.codec": "int4"},
    GRADIENTS: _CODED | {"backward.codec": "int4", "data.codec": "int4"},
    TABLE: _CODED | {"backward.codec": "int4", "data.codec": "int4", "embedding.codec": "int4"},
}
# Trained with several seeds, of weights and of the order of samples; the others with the first one.
SEEDED, SEEDS = ("dense", INT8, MIXED, GRADIENTS, TABLE), (0, 1, 2)
UNLIMITED = ("dense", "everything")  # measured without limits of links as well: what is left for these to take
SHARES = (None, 0.5, 0.7)  # of a dense step that communication takes; None: as in the paper's setting
STEPS, EVALUATED = 100, 25


def _split(changes: dict) -> Split:
    compress = tuple((_OFF | changes).items())
    # Wide and with few tokens: weights are as large beside messages between stages as in that setting.
    return Split(
        (2, 4, 2), "1f1b", global_batch=32, micro_batch=2, layers=4, hidden=128, compress=compress, shard="none"
    )


SPLITS = {kind: _split(changes) for kind, changes in KINDS.items()}


def selected(cluster: Cluster, split: Split | None = None) -> str:
    """Return the stages that selective compression chooses on this cluster, such as "0,1", or "none".

    Args:
        cluster: profiled cluster with its rates.
        split: split that compresses over data; None: this experiment's.
    """
    split = split or SPLITS[SELECTIVE]
    order = host_order(split.candidate, cluster.devices_per_host)
    [chosen] = Problem(cluster, split.config.model, split.candidate).step(fabric(cluster), order).compressed
    return ",".join(map(str, np.flatnonzero(chosen))) or "none"


def splits(stages: str) -> dict[str, Split]:
    """Return the splits by kind, given the stages of selective compression."""
    return SPLITS | {SELECTIVE: _split(KINDS[SELECTIVE] | {"data.stages": stages})}


def _share(cluster: Cluster, model: ModelConfig, candidate: Candidate) -> float:
    """Return the share of a predicted step that links between hosts take: the time saved if they were free."""
    order = host_order(candidate, cluster.devices_per_host)
    inside = ~between(cluster)
    instant = dataclasses.replace(
        cluster, alpha=np.where(inside, cluster.alpha, 0.0), samples=np.where(inside, cluster.samples, 1e18)
    )
    slow, fast = (Problem(c, model, candidate).step(fabric(c), order).total[0] for c in (cluster, instant))
    return float(1 - fast / slow)


def paper_setting() -> tuple[Cluster, ModelConfig, Candidate]:
    """Return the setting of Optimus-CC: 8.3B parameters on 128 A100s."""
    model = load_config("gpt_8b").model
    candidate = Candidate(4, 4, 8, 8, 16, "1f1b", (model.layers // 4,) * 4, save="layer_inputs", shard="none")
    return Cluster.load(scenarios.ROOT / "configs/clusters/a100_16x8_measured.json"), model, candidate


def messages() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return rows and columns of a message between stages, here and in that setting."""
    _, model, candidate = paper_setting()
    here = SPLITS["dense"]
    return (
        (here.micro_batch * here.sequence, here.hidden),
        (candidate.micro_batch * model.sequence, model.hidden),
    )


def paper_share() -> float:
    """Return the share of a step in that setting that communication between hosts takes, by the planner's figures."""
    return _share(*paper_setting())


def paper_speedups() -> dict[str, float]:
    """Return the planner's predictions for that setting; it models neither FE nor compressed activations."""
    cluster, model, dense = paper_setting()
    kinds = {
        "CB": dataclasses.replace(dense, backward="epilogue"),
        "CB+SC": dataclasses.replace(dense, backward="epilogue", data_rank=128),
        "all gradients": dataclasses.replace(dense, backward="all", data_rank=128),
    }
    order = host_order(dense, cluster.devices_per_host)
    seconds = lambda c: Problem(cluster, model, c).step(fabric(cluster), order).total[0]  # noqa: E731
    return {kind: float(seconds(dense) / seconds(c)) for kind, c in kinds.items()}


def with_rate(cluster: Cluster, rate: float) -> Cluster:
    """Return the same cluster with another rate, Mbit/s, of the links between hosts."""
    return dataclasses.replace(cluster, samples=np.where(between(cluster), rate * 1e6 / 8, cluster.samples))


def predicted(cluster: Cluster, split: Split) -> float:
    """Return the planner's seconds of a step with the devices in host order; it knows nothing of FE."""
    order = host_order(split.candidate, cluster.devices_per_host)
    return float(Problem(cluster, split.config.model, split.candidate).step(fabric(cluster), order).total[0])


def rate_for(cluster: Cluster, split: Split, share: float) -> float:
    """Return the Mbit/s at which communication takes that share of a step, by bisection on the profiled cluster."""
    low, high = 1.0, 10_000.0
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        more = _share(with_rate(cluster, middle), split.config.model, split.candidate) > share
        low, high = (middle, high) if more else (low, middle)
    return middle


def run(lab: Lab) -> None:
    """Measure step times, then losses."""
    records = lab.records("compression")
    if not all(f"share {share}" in records for share in SHARES):
        _all_times(lab, records)
    if "losses done" not in records:
        _losses(lab, records)


def _all_times(lab: Lab, records: Records) -> None:
    scene = scenarios.load("paper_ratio", 8, lab.seed)
    with lab.session(scene, "compression") as bench:
        bench.compile([split for kind, split in SPLITS.items() if kind != SELECTIVE])
        bench.shape(scene)
        cluster = bench.profile("paper_ratio", SPLITS["dense"])
        for share in SHARES:
            if f"share {share}" not in records:
                _times(lab, bench, records, cluster, share)


def alone() -> Scenario:
    """Return a single host of all devices, which take no longer than they need."""
    return Scenario("alone", "all devices in one process", np.zeros((1, 1)), devices_per_host=16, slowness=0)


def train(bench: Bench, split: Split, seed: int, steps: int = STEPS, eval_every: int = EVALUATED) -> dict[str, Any]:
    """Train a split from a fresh state, and return the losses as the worker has them.

    Args:
        bench: session on `alone`.
        split: split to train.
        seed: seed of the weights and of the order of samples.
        steps: steps of the training.
        eval_every: steps between two evaluations.
    """
    bench.compile([split], eval_batches=4, seed=seed)
    found = bench.session.ask("train", name=split.name, steps=steps, eval_every=eval_every)[0]
    bench.session.ask("forget", names=[split.name])
    return found


def _losses(lab: Lab, records: Records) -> None:
    chosen = dict.fromkeys(records[f"share {share}"]["selected"] for share in SHARES)
    trained = [(kind, stages, split) for stages in chosen for kind, split in splits(stages).items()]
    with lab.session(alone(), "compression-losses") as bench:
        for kind, stages, split in trained:
            for seed in SEEDS if kind in SEEDED else SEEDS[:1]:
                key = f"loss {split.name}" + f" seed {seed}" * (seed > 0)
                if key not in records:
                    found = train(bench, split, seed)
                    selective = {"selected": stages} if kind == SELECTIVE else {}
                    records.add(key, kind=kind, seed=seed, **selective, **found)
                    lab.say(f"{kind}, seed {seed}: loss {found['validation'][-1][1]:.4f} after {STEPS} steps")
        records.add("losses done", samples=STEPS * SPLITS["dense"].global_batch)


def _times(lab: Lab, bench: Bench, records: Records, cluster: Cluster, share: float | None) -> None:
    wanted = paper_share() if share is None else share
    rate = rate_for(cluster, SPLITS["dense"], wanted)
    stages = selected(with_rate(cluster, rate))
    programs = splits(stages)
    bench.free()
    bench.compile([programs[SELECTIVE]])
    bench.session.ask("speed", slowness=bench.scenario.slowness)
    bench.shape(np.full((len(cluster.hosts),) * 2, rate))
    names = list(dict.fromkeys(split.name for split in programs.values()))
    seconds = bench.time(names, lab.repeats)
    named = {kind: seconds[split.name] for kind, split in programs.items()}
    values = {"share": wanted, "rate": rate, "selected": stages, "seconds": named}
    if share is None:
        values["parts"] = {kind: bench.session.ask("breakdown", name=split.name) for kind, split in programs.items()}
        values["wire"] = dict(zip(programs, bench.wires([split.name for split in programs.values()])))
        bench.cluster.set_rates(None)
        unlimited = bench.time([programs[kind].name for kind in UNLIMITED], lab.repeats)
        values["unlimited"] = {kind: unlimited[programs[kind].name] for kind in UNLIMITED}
        values["predicted"] = paper_speedups()
    records.add(f"share {share}", **values)
    said = ", ".join(f"{kind} {summary(times)['median']:.3f} s" for kind, times in named.items())
    lab.say(f"links of {rate:.0f} Mbit/s, communication {wanted:.0%} of a dense step: {said}")
