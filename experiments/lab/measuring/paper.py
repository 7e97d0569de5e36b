"""The setting in which the papers' claim lives: CB, FE and SC one after the other, with traffic in their proportions.

Width 512, eight hosts of two devices, tensor groups inside hosts, as many micro-batches as 8.3B parameters have with
tensor 8, pipe 4 and data 4. Of the bytes that a device sends to other hosts in a dense step, gradients between stages,
the embedding and gradients over data have the shares that they have there (`traffic` computes both), and ranks leave of
a message and of the gradients about what they leave there. Links are set so that communication takes the share of a
dense step that the planner predicts for that setting on 200 Gbit/s. The pipeline is 1F1B as the papers have it, and
eager_1f1b.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from compress.policy import compression_ratio
from experiments.hosts import scenario as scenarios
from experiments.lab.laboratory import Bench, Lab, summary
from experiments.lab.measuring import compression
from experiments.lab.models import Split
from experiments.lab.records import Records
from paxtrain.config import ModelConfig
from paxtrain.model.parameters import of_mean_layer
from planner.cluster.cluster import Cluster
from planner.cost import compute as costs
from planner.cost.candidate import Candidate
from planner.cost.sizes import MASTER, message_bytes

SCHEDULES = ("1f1b", "eager_1f1b")
DENSE, SELECTIVE = "dense", "CB+FE+SC"
_RANKS = {"backward.rank": 1, "data.rank": 48, "data.rank_min": 4, "data.start": 0.0}
THERE = {"backward.rank": 16, "data.rank": 128}  # ranks of the paper
_CB = {"backward.messages": "epilogue"}
KINDS = {
    DENSE: {},
    "CB": _CB,
    "CB+FE": _CB | {"embedding.sync": "fused"},
    SELECTIVE: _CB | {"embedding.sync": "fused", "data.stages": "all"},  # or fewer stages: `programs`
}
REPEATS = 3  # at most: a step takes seconds
SLOWNESS = 16.0  # of the devices: matrices of this width keep the cores of all hosts busy


def _split(schedule: str, changes: dict) -> Split:
    return Split(
        (2, 4, 2),
        schedule,
        global_batch=32,
        micro_batch=1,
        layers=4,
        sequence=96,
        hidden=512,
        shard="none",
        vocab_multiple=128,
        compress=tuple(({"embedding.sync": "unfused"} | _RANKS | changes).items()),
    )


def programs(schedule: str, stages: str) -> dict[str, Split]:
    """Return the splits of a schedule by kind.

    Args:
        schedule: one of SCHEDULES.
        stages: stages of selective compression, such as "0,1", or "none".
    """
    kinds = KINDS | {SELECTIVE: KINDS[SELECTIVE] | {"data.stages": stages}}
    return {kind: _split(schedule, changes) for kind, changes in kinds.items()}


class Traffic(NamedTuple):
    """Bytes that a device sends to other hosts in a dense step.

    Attributes:
        backward: gradients between stages.
        embedding: synchronisation of the tied embedding's copies, one after the other.
        data: gradients over data, as a ring sends them.
    """

    backward: float
    embedding: float
    data: float

    @property
    def shares(self) -> "Traffic":
        """Each as a share of the three together."""
        return Traffic(*(one / sum(self) for one in self))


def traffic(model: ModelConfig, candidate: Candidate) -> Traffic:
    """Return the bytes that a device sends to other hosts in a dense step.

    Args:
        model: model to train.
        candidate: mesh and batch, without ZeRO-1.
    """
    c, d = candidate, candidate.data
    message = message_bytes(model, c.micro_batch, c.parts)
    table = costs.embedding_parameters(model, c.layer_sizes, c.pipe) * MASTER
    layers = c.slots * of_mean_layer(model, c.layer_sizes) * MASTER
    # Without fusing: a mean over data of each copy, then their sum (docs/compression.md).
    return Traffic(c.micro_batches * message, table * (3 * d - 2) / d, layers * 2 * (d - 1) / d)


class Left(NamedTuple):
    """Shares that ranks leave of what they compress.

    Attributes:
        message: of a message between stages.
        kernels: of the gradients of a layer's kernels.
    """

    message: float
    kernels: float


def left(model: ModelConfig, candidate: Candidate, ranks: dict[str, int]) -> Left:
    """Return the shares that ranks leave of a message and of a layer's kernels."""
    rows = candidate.micro_batch * model.sequence
    kernels = costs.kernels(model, candidate.layer_sizes)
    factors = sum(ranks["data.rank"] * (n + k) for n, k in kernels)
    message = 1 / compression_ratio(rows, model.hidden, ranks["backward.rank"])
    return Left(message, factors / sum(n * k for n, k in kernels))


def both() -> dict[str, tuple[Traffic, Left]]:
    """Return traffic and what ranks leave, in the papers' setting ("there") and in this one ("here")."""
    _, model, candidate = compression.paper_setting()
    here = programs("1f1b", "all")[DENSE]
    return {
        "there": (traffic(model, candidate), left(model, candidate, THERE)),
        "here": (traffic(here.config.model, here.candidate), left(here.config.model, here.candidate, _RANKS)),
    }


def most(cluster: Cluster, schedule: str) -> dict[str, float]:
    """Return the seconds that each of CB, FE and SC takes off a dense step at most, by the bytes that it removes.

    Of CB these are the messages of the pipeline's drain, one after the other from the last stage to the first; of FE
    and SC the bytes of the slowest stage. Both devices of a host send at once.

    Args:
        cluster: profiled cluster with its rates.
        schedule: one of SCHEDULES.
    """
    split = programs(schedule, "all")[DENSE]
    c, model, d = split.candidate, split.config.model, split.candidate.data
    per_byte = c.tensor / float(cluster.samples[0, 0, 1])
    sent, rest = traffic(model, c), left(model, c, _RANKS)
    message = sent.backward / c.micro_batches
    unfused, fused = (3 * d - 2) / d, (2 * d - 1) / d
    saved = {
        "CB": (c.pipe - 1) * message * (1 - rest.message),
        "FE": sent.embedding * (1 - fused / unfused),
        "SC": sent.data * (1 - rest.kernels),
    }
    return {kind: size * per_byte for kind, size in saved.items()}


def run(lab: Lab) -> None:
    """Measure both schedules, each with all kinds in turn."""
    records = lab.records("paper")
    if all(schedule in records for schedule in SCHEDULES):
        return
    scene = dataclasses.replace(scenarios.load("paper_ratio", 8, lab.seed), slowness=SLOWNESS)
    with lab.session(scene, "paper") as bench:
        _connect(bench)
        bench.shape(scene)
        cluster = bench.profile("paper", programs(SCHEDULES[0], "all")[DENSE])
        for schedule in SCHEDULES:
            if schedule not in records:
                _measure(lab, bench, records, cluster, schedule)


def _connect(bench: Bench) -> None:
    """Connect the processes by steps of a narrow model on the same mesh.

    A group connects in the first step in which it communicates, and gloo gives up if a process comes half a minute
    after the others, as it may in a step of this width on busy cores.
    """
    bench.free()
    kinds = programs(SCHEDULES[0], "all")
    narrow = [dataclasses.replace(kinds[kind], hidden=64, sequence=32) for kind in (DENSE, "CB+FE")]
    bench.session.ask("forget", names=bench.compile(narrow))
    bench.session.ask("speed", slowness=bench.scenario.slowness)


def _measure(lab: Lab, bench: Bench, records: Records, cluster: Cluster, schedule: str) -> None:
    wanted = compression.paper_share()
    # Both schedules run on the same links: those on which the papers' has that share.
    rate = compression.rate_for(cluster, programs(SCHEDULES[0], "all")[DENSE], wanted)
    there = compression.with_rate(cluster, rate)
    stages = compression.selected(there, programs(schedule, "all")[SELECTIVE])
    kinds = programs(schedule, stages)
    bench.free()
    bench.compile(list({split.name: split for split in kinds.values()}.values()))
    bench.session.ask("speed", slowness=bench.scenario.slowness)
    repeats = min(lab.repeats, REPEATS)
    free = bench.time([kinds[DENSE].name], repeats)[kinds[DENSE].name]
    bench.shape(np.full((len(cluster.hosts),) * 2, rate))
    times = bench.time(list(dict.fromkeys(split.name for split in kinds.values())), repeats)
    seconds = {kind: times[split.name] for kind, split in kinds.items()}
    counted = schedule == SCHEDULES[0]  # bytes do not depend on the order of ops
    wires = dict(zip(kinds, bench.wires([split.name for split in kinds.values()]))) if counted else {}
    records.add(
        schedule,
        rate=rate,
        share=wanted,
        selected=stages,
        seconds=seconds,
        unlimited=free,
        predicted={kind: compression.predicted(there, split) for kind, split in kinds.items()},
        most=most(there, schedule),
        **({"wire": wires} if wires else {}),
    )
    bench.session.ask("forget", names=list(dict.fromkeys(split.name for split in kinds.values())))
    said = ", ".join(f"{kind} {summary(found)['median']:.3f} s" for kind, found in seconds.items())
    lab.say(f"{schedule}, links of {rate:.0f} Mbit/s, stages {stages} compress over data: {said}")
