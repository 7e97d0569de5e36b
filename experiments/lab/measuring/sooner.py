"""Time to loss: training on shaped links, dense and with the best codecs, until dense's last loss.

The cluster and the programs are those of the compression experiment, at one share of communication; links are profiled
anew. Unlike there, the clock runs during the training itself. A further seed is trained as long as time is left, and at
the next start.
"""

import time

import numpy as np

from experiments.hosts import scenario as scenarios
from experiments.lab.laboratory import Bench, Lab
from experiments.lab.measuring import compression
from experiments.lab.models import Split
from experiments.lab.records import Records

SHARE = 0.5  # of a dense step that communication takes
SEEDS = (0, 1, 2)
STEPS, EVALUATED = 50, 5
_LONGER = 2  # times the steps of dense that the other may take
_SECONDS = 480.0  # after which no further seed begins
_NEAR = 1.01  # of dense's loss
_CODED = (compression.INT8, compression.MIXED, compression.GRADIENTS, compression.TABLE)


def best(records: Records) -> str:
    """Return the quickest coded kind whose loss is within 1% of dense's, by the records of the compression experiment.

    Without records it is the one with the smallest error.

    Args:
        records: of the compression experiment.
    """
    key, losses = f"share {SHARE}", {}
    for line in records:
        if "validation" in line:
            losses.setdefault(line["kind"], {})[line.get("seed", 0)] = line["validation"][-1][1]
    dense = losses.get("dense", {})

    def cost(kind: str) -> float:
        found = [loss / dense[seed] for seed, loss in losses.get(kind, {}).items() if seed in dense]
        return float(np.mean(found)) if found else np.inf

    near = [kind for kind in _CODED if cost(kind) <= _NEAR]
    if key not in records or not near:
        return compression.INT8
    return min(near, key=lambda kind: float(np.median(records[key]["seconds"][kind])))


def run(lab: Lab) -> None:
    """Train dense and the best coded kind with each seed, as far as time allows."""
    records = lab.records("sooner")
    if all(f"seed {seed}" in records for seed in SEEDS):
        return
    kind = next((line["kind"] for line in records), best(lab.records("compression")))
    splits = {"dense": compression.SPLITS["dense"], kind: compression.SPLITS[kind]}
    scene = scenarios.load("paper_ratio", 8, lab.seed)
    with lab.session(scene, "sooner") as bench:
        rate = _rate(bench, records)
        began = time.monotonic()
        missing = [seed for seed in SEEDS if f"seed {seed}" not in records]
        for n, seed in enumerate(missing, 1):
            _train(lab, bench, records, splits, kind, rate, seed)
            taken = time.monotonic() - began
            if n < len(missing) and taken + taken / n > _SECONDS:
                lab.say(f"time to loss: no time is left for a seed after {seed}; another start trains it")
                return


def _rate(bench: Bench, records: Records) -> float:
    """Return the Mbit/s at which communication takes the share: that of earlier seeds, or from a new profile."""
    if known := [line["rate"] for line in records]:
        return known[0]
    bench.shape(bench.scenario)
    cluster = bench.profile("sooner", compression.SPLITS["dense"])
    return compression.rate_for(cluster, compression.SPLITS["dense"], SHARE)


def _train(
    lab: Lab, bench: Bench, records: Records, splits: dict[str, Split], kind: str, rate: float, seed: int
) -> None:
    bench.free()
    bench.compile(list(splits.values()), eval_batches=4, seed=seed)
    bench.session.ask("speed", slowness=bench.scenario.slowness)
    bench.shape(np.full((bench.cluster.hosts,) * 2, rate))
    found: dict[str, dict] = {}
    goal = None
    for name, split in splits.items():
        steps = STEPS if goal is None else _LONGER * STEPS
        answers = bench.session.ask("train", name=split.name, steps=steps, eval_every=EVALUATED, until=goal)
        slowest = np.max([answer["seconds"] for answer in answers], axis=0).tolist()
        found[name] = {"validation": answers[0]["validation"], "seconds": slowest}
        goal = found["dense"]["validation"][-1][1]
        last = found[name]["validation"][-1]
        lab.say(f"{name}, seed {seed}: loss {last[1]:.4f} after {last[0]} steps and {slowest[-1]:.0f} s")
    records.add(f"seed {seed}", seed=seed, kind=kind, rate=rate, share=SHARE, runs=found)
    bench.session.ask("forget", names=[split.name for split in splits.values()])
