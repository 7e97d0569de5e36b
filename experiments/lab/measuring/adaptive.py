"""The planner's choice of codecs by a probe of the lab's own model, checked: its predicted step, its loss by training.

A user's way: a short probe of the model on one device that emulates the mesh (`paxtrain.study --probe`), a profile of
the links as they are, and a plan within a budget of loss (`planner.plan --compress=auto --probe --loss_budget`). Mesh,
micro-batch and schedule are those of the compression experiment, and links are set as there, so that communication
takes a given share of a dense step. Dense training and the plan are measured in turn on these links. Both are then
trained with seeds that the probe has not seen.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

import planner
from experiments.hosts import scenario as scenarios
from experiments.lab import models
from experiments.lab.laboratory import Bench, Lab, LabError, summary
from experiments.lab.measuring import compression
from experiments.lab.models import Split
from experiments.lab.records import Records
from experiments.lab.session import ENVIRONMENT, ROOT
from paxtrain.config import CompressConfig
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import ProbedCodec
from planner.cluster.cluster import Cluster, between

SHARES = (0.5,)  # of a dense step that communication takes
BUDGET = 0.01  # of dense training's loss
DENSE, CHOSEN = "dense", "chosen"
# Compression over data from the first step on, as the probe has it.
BASE = dataclasses.replace(compression.SPLITS["dense"], compress=(("data.start", 0.0),))
PROBE, DONE = "probe", "losses done"
_CODECS, _PROBED, _SEEDS = ("int8", "int4"), 40, 3  # codecs, steps and seeds of the probe
_STEPS = 50  # of the training whose loss is held against the budget
_CONFIG = pathlib.Path(models.__file__).with_name("config.py")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan of the planner's.

    Attributes:
        split: the plan as a split of the lab.
        codecs: the probed codecs through which something goes.
        seconds: predicted seconds of a step with the devices in host order, in which the lab runs it.
    """

    split: Split
    codecs: tuple[ProbedCodec, ...]
    seconds: float


def probe_command(data: str, seed: int, out: pathlib.Path) -> list[str]:
    """Return the command that probes the lab's model.

    Args:
        data: folder of token files.
        seed: first of the probe's seeds.
        out: folder to write to.
    """
    ranks, stages, _ = BASE.mesh
    split = dataclasses.replace(BASE, mesh=(ranks, stages, 1), compress=())
    sections = split.values(data, eval_batches=4, seed=seed) | {"compress": dict(BASE.compress)}
    given = [f"--config.{name}.{key}={value}" for name, values in sections.items() for key, value in values.items()]
    of = [f"--config={_CONFIG}", f"--out={out}", f"--codecs={','.join(_CODECS)}"]
    return [sys.executable, "-m", "paxtrain.study", "--probe", *of, f"--steps={_PROBED}", f"--seeds={_SEEDS}", *given]


def choose(cluster: Cluster, probe: pathlib.Path, seed: int) -> Choice:
    """Return the planner's choice of codecs on the lab's mesh.

    Args:
        cluster: profiled cluster, with the rates that its links have.
        probe: file of the probe.
        seed: seed of the planner's annealing.
    """
    data, pipe, tensor = BASE.mesh
    options = planner.PlanOptions(
        compress=("auto",),
        probe=str(probe),
        loss_budget=BUDGET,
        data=(data,),
        pipe=(pipe,),
        tensor=(tensor,),
        micro_batch=(BASE.micro_batch,),
        schedules=(BASE.schedule,),
        saves=(models.SAVE,),
        shard=(BASE.shard,),
        sequence_parallel="no",
        uneven=False,
        uneven_data="no",
        nearby=False,
        top=1,
        placed=1,
        seed=seed,
        oracle="no",
    )
    found = planner.plan(BASE.config, cluster, options)
    compress = found.plan.compress
    used = tuple(one for one in found.report.budgeted.codecs if compress.at(one.place).chosen != "none")
    return Choice(_split(compress), used, found.ranked[0].host_order_seconds)


def _split(compress: CompressConfig) -> Split:
    """Return the split that compresses so."""

    def flat(section: object, before: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in vars(section).items():
            found |= flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {before + name: value}
        return found

    changed = flat(compress).items() - flat(CompressConfig()).items()
    return dataclasses.replace(BASE, compress=tuple(sorted(changed)))


def run(lab: Lab) -> None:
    """Probe, then plan and measure at each share, then train."""
    records = lab.records("adaptive")
    if PROBE not in records:
        _probe(lab, records)
    if not all(f"share {share}" in records for share in SHARES):
        scene = scenarios.load("paper_ratio", 8, lab.seed)
        with lab.session(scene, "adaptive") as bench:
            bench.shape(scene)
            cluster = bench.profile("adaptive", BASE)
            for share in SHARES:
                if f"share {share}" not in records:
                    _measure(lab, bench, records, compression.rate_for(cluster, BASE, share), share)
    if DONE not in records:
        _train(lab, records)


def _folder(lab: Lab) -> pathlib.Path:
    return lab.out / "adaptive"


def _probe(lab: Lab, records: Records) -> None:
    log = lab.out / "logs" / "adaptive-probe.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = probe_command(lab.data, lab.seed, _folder(lab))
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        raise LabError(f"the probe of the lab's model ended with exit code {done.returncode}; its log is {log}")
    probe = loss_probe_file.load(_folder(lab) / loss_probe_file.FILE)
    records.add(PROBE, codecs=[_json(one) for one in probe.codecs], steps=probe.steps, seeds=len(probe.seeds))
    said = ", ".join(f"{one.label} {one.place} {one.mean:+.2%} ± {one.noise:.2%}" for one in probe.codecs)
    lab.say(f"probed: {said}")


def _json(codec: ProbedCodec) -> dict:
    """Return a probed codec as JSON values."""
    return {"place": codec.place, "label": codec.label, "losses": codec.losses}


def _measure(lab: Lab, bench: Bench, records: Records, rate: float, share: float) -> None:
    limits = np.full((bench.cluster.hosts,) * 2, rate)
    bench.session.ask("speed", slowness=bench.scenario.slowness)
    bench.shape(limits)
    cluster = bench.profile(f"adaptive {share:.0%}", BASE)
    chosen = choose(cluster, _folder(lab) / loss_probe_file.FILE, lab.seed)
    splits = {DENSE: BASE, CHOSEN: chosen.split}
    predicted = {DENSE: compression.predicted(cluster, BASE), CHOSEN: chosen.seconds}
    bench.free()
    names = bench.compile(list({split.name: split for split in splits.values()}.values()))
    bench.session.ask("speed", slowness=bench.scenario.slowness)
    unlimited = bench.time([BASE.name], lab.repeats)[BASE.name]
    bench.shape(limits)
    times = bench.time(names, lab.repeats)
    seconds = {kind: times[split.name] for kind, split in splits.items()}
    records.add(
        f"share {share}",
        share=share,
        rate=rate,
        profiled=float(np.median(cluster.bandwidth[between(cluster)])) * 8 / 1e6,
        plan=chosen.split.name,
        compress=dict(chosen.split.compress),
        codecs=[_json(one) for one in chosen.codecs],
        seconds=seconds,
        unlimited=unlimited,
        predicted=predicted,
    )
    said = ", ".join(
        f"{k} {summary(times)['median']:.3f} s, predicted {predicted[k]:.3f} s" for k, times in seconds.items()
    )
    lab.say(f"links of {rate:.0f} Mbit/s: {said} ({chosen.split.name})")


def _train(lab: Lab, records: Records) -> None:
    """Train dense and every chosen plan with seeds that the probe has not seen."""
    chosen = [records[f"share {share}"] for share in SHARES]
    plans = {line["plan"]: dataclasses.replace(BASE, compress=tuple(line["compress"].items())) for line in chosen}
    with lab.session(compression.alone(), "adaptive-losses") as bench:
        for split in ({BASE.name: BASE} | plans).values():
            for seed in range(lab.seed + _SEEDS, lab.seed + _SEEDS + len(compression.SEEDS)):
                if (key := f"loss {split.name} seed {seed}") not in records:
                    found = compression.train(bench, split, seed, _STEPS, _STEPS)
                    records.add(key, plan=split.name, seed=seed, **found)
                    lab.say(f"{split.name}, seed {seed}: loss {found['validation'][-1][1]:.4f}")
    records.add(DONE)
