"""PyTorch's pipeline and ours, on the same hosts: the same GPT from the same weights, the same batches, the same mesh.

PyTorch's is torch.distributed.pipelining's 1F1B with DistributedDataParallel (experiments.lab.peer.pytorch). Compute is
real here, and not that of experiments.lab.device: every host has an equal share of a core, which its process of either
system has while the other one's waits. Steps of all kinds are taken in turn.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import jax
import numpy as np

from experiments.environment import Environment
from experiments.hosts import hosts
from experiments.hosts.scenario import Scenario
from experiments.lab.laboratory import Bench, Lab, summary
from experiments.lab.models import Split
from experiments.lab.records import Records
from experiments.lab.session import Session, Workers
from paxtrain.config import Config
from paxtrain.data import token_files
from paxtrain.model import transformer
from paxtrain.parallel.optimizer import learning_rate

RATES = (1000.0, 200.0, 50.0, 20.0)  # Mbit/s
MESHES = ((2, 4, 1), (4, 2, 1))
SHARE = 0.2  # of a core for each host
STEPS, EVALUATED = 100, 25  # of training, for the losses
COMPARED = 5  # first steps whose losses are compared
PORT = 9913
ENVIRONMENT = Environment(pathlib.Path(__file__).parents[1] / "peer" / "pytorch.py", "torch")
PYTORCH, DENSE = "PyTorch 1F1B + DDP", "eager_1f1b"
COMPRESSED = INT8, LOW_RANK = "eager_1f1b, int8", "eager_1f1b, rank 8"
PARTS, PARTS_AT = ("1f1b", DENSE), 200.0  # whose steps are broken down, and at which rate
SAVE = "dots"  # what a forward keeps for its backward, here and by default
RANK = 8  # of all that LOW_RANK compresses
_EVERYTHING = {"backward.messages": "all", "forward.messages": "all", "data.stages": "all", "data.start": 0.0}
_PLACES = ("backward", "forward", "data")


@dataclasses.dataclass(frozen=True)
class Real(Split):
    """A split of the GPT that both train: with a head apart from the embedding, and layers unrolled."""

    layers: int = 8
    hidden: int = 128
    sequence: int = 64
    shard: str = "none"

    @property
    def name(self) -> str:
        """A short name that differs between splits."""
        return f"{super().name} {'replicated' if self.shard == 'none' else self.shard}"

    def values(self, data: str = "runs/data", **run: Any) -> dict[str, Any]:
        """Return the configuration as nested values."""
        values = super().values(data, **run)
        values["model"] |= {"tied_head": False, "vocab_multiple": 1}
        values["pipeline"] |= {"save": SAVE, "scan_layers": "off"}
        return values


def kinds(mesh: tuple[int, int, int], **sizes: int) -> dict[str, Real]:
    """Return what is measured of ours on a mesh."""
    int8 = _EVERYTHING | {f"{place}.codec": "int8" for place in _PLACES}
    low_rank = _EVERYTHING | {f"{place}.rank": RANK for place in _PLACES}
    return {
        "1f1b": Real(mesh, "1f1b", **sizes),
        DENSE: Real(mesh, **sizes),
        "eager_1f1b, ZeRO-1": Real(mesh, shard="optimizer", **sizes),
        INT8: Real(mesh, compress=tuple(int8.items()), **sizes),
        LOW_RANK: Real(mesh, compress=tuple(low_rank.items()), **sizes),
    }


# --- What both start from ---------------------------------------------------------------------------------------------


def weights(config: Config, file: pathlib.Path) -> None:
    """Write the first weights, by their paths in the canonical parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(transformer.init(config.model, jax.random.key(config.run.seed)))
    np.savez(file, **{"/".join(entry.key for entry in path): np.asarray(leaf) for path, leaf in leaves})


def batches(config: Config, file: pathlib.Path, steps: int) -> None:
    """Write the global batches of the first steps, int32 [steps, global_batch, sequence + 1]."""
    tokens = token_files.load(config.data.train, vocab_size=config.model.vocab_size, sequence=config.model.sequence)
    size = config.batch.global_batch
    made = token_files.batches(
        tokens,
        sequence=config.model.sequence,
        global_batch=size,
        rows=range(size),
        seed=config.run.seed,
        start_sample=0,
        shuffle=True,
        prefetch=0,
    )
    np.save(file, np.stack([rows for _, rows in zip(range(steps), made)]))


def task(split: Real, data: str, folder: pathlib.Path, steps: int) -> dict[str, Any]:
    """Return what PyTorch's workers load: the configuration, weights and batches as files, and learning rates."""
    values, config = split.values(data), dataclasses.replace(split, compress=()).config
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=values["data"]["train"]))
    folder.mkdir(parents=True, exist_ok=True)
    weights(config, folder / "weights.npz")
    batches(config, folder / "batches.npy", steps)
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in ("model", "mesh", "batch", "optimizer")}
    return {
        "config": sections,
        "weights": str((folder / "weights.npz").resolve()),
        "batches": str((folder / "batches.npy").resolve()),
        "rates": [float(learning_rate(config.optimizer, config.run.steps)(step)) for step in range(steps)],
    }


# --- Measuring --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Both:
    """Workers of both systems on one cluster, with the same model on the same mesh.

    Attributes:
        theirs: PyTorch's workers; None if there is no PyTorch.
    """

    cluster: hosts.Cluster
    bench: Bench
    theirs: Workers | None
    kinds: dict[str, Real]

    @classmethod
    @contextlib.contextmanager
    def up(cls, lab: Lab, kinds: dict[str, Real], python: pathlib.Path | None, steps: int) -> Iterator["Both"]:
        """Bring a cluster up, with all programs compiled.

        Args:
            python: of an environment with PyTorch; None: without it.
            steps: for which PyTorch gets batches.
        """
        split = kinds[DENSE]
        size = split.config.mesh.devices
        scene = Scenario("peer", "equal links", np.full((size, size), RATES[0]), slowness=0)
        folder = lab.out / "peer" / "x".join(map(str, split.mesh))
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(hosts.Cluster(scene.rates.tolist()))
            cluster.set_rates(None)
            theirs = None
            if python is not None:
                command = [str(python), str(ENVIRONMENT.script)]
                one_thread = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
                theirs = stack.enter_context(Workers(cluster, command, PORT, folder / "logs" / "pytorch", one_thread))
                theirs.ask("load", name=PYTORCH, **task(split, lab.data, folder, steps))
            logs = folder / "logs" / "ours"
            ours = stack.enter_context(Session(cluster, 1, logs, lab.cache, real=True))
            bench = Bench(lab, scene, cluster, ours)
            bench.compile(list(kinds.values()))
            yield cls(cluster, bench, theirs, kinds)

    @property
    def names(self) -> list[str]:
        """Return the names of what is measured."""
        return [*([PYTORCH] if self.theirs else []), *self.kinds]

    def step(self, kind: str) -> dict[str, float]:
        """Return what one step takes: seconds on the slowest host, and of all hosts together compute and bytes."""
        workers, name = (self.theirs, kind) if kind == PYTORCH else (self.bench.session, self.kinds[kind].name)
        before = self.cluster.sent()
        answers = workers.ask("spend", name=name)
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "computed": sum(answer["computed"] for answer in answers),
            "bytes": self.cluster.sent() - before,
        }

    def measure(self, rate: float, repeats: int) -> dict[str, dict[str, list[float]]]:
        """Return seconds, compute and bytes of the steps of each kind, taken in turn, with links of that rate."""
        self.cluster.limit(SHARE)
        self.bench.shape(np.full((self.cluster.hosts,) * 2, rate))
        found: dict[str, dict[str, list[float]]] = {kind: {} for kind in self.names}
        for repeat in range(repeats + 1):  # the first one warms up
            for kind in self.names:
                for what, value in self.step(kind).items():
                    found[kind].setdefault(what, []).extend([value] * (repeat > 0))
        return found

    def parts(self, kind: str) -> dict[str, float]:
        """Return the seconds of a step of ours by part, as means over all hosts, within the limits that there are."""
        answers = self.bench.session.ask("breakdown", name=self.kinds[kind].name)
        return {part: fmean(answer[part] for answer in answers) for part in answers[0]}

    def free(self) -> None:
        """Lift all limits."""
        self.cluster.limit(None)
        self.cluster.set_rates(None)

    def losses(self, kind: str, steps: int) -> list[float]:
        """Return the losses of the first steps."""
        if kind == PYTORCH:
            return self.theirs.ask("train", name=kind, steps=steps)[0]
        return self.bench.session.ask("train", name=self.kinds[kind].name, steps=steps, eval_every=0)[0]["losses"]


def _name(mesh: tuple[int, int, int]) -> str:
    return "x".join(map(str, mesh))


def _done(records: Records, mesh: tuple[int, int, int]) -> bool:
    keys = [f"{_name(mesh)} losses", *(f"{_name(mesh)} {rate:g} Mbit/s" for rate in RATES)]
    return all(key in records for key in keys)


def run(lab: Lab) -> None:
    """Measure both systems on both meshes at all rates, and train them."""
    records = lab.records("peer")
    for mesh in MESHES:
        if _done(records, mesh):
            continue
        place = _name(mesh)
        with Both.up(lab, kinds(mesh), ENVIRONMENT.make(), COMPARED) as both:
            if f"{place} losses" not in records:  # first: PyTorch's workers begin with the first weights
                first = {kind: both.losses(kind, COMPARED) for kind in both.names if kind not in COMPRESSED}
                records.add(f"{place} losses", mesh=mesh, first=first, torch=both.theirs.ask_one(0, "version"))
            for rate in RATES:
                if f"{place} {rate:g} Mbit/s" not in records:
                    found = both.measure(rate, lab.repeats)
                    parts = {kind: both.parts(kind) for kind in PARTS if rate == PARTS_AT}
                    both.free()
                    records.add(f"{place} {rate:g} Mbit/s", mesh=mesh, rate=rate, save=SAVE, kinds=found, parts=parts)
                    said = [f"{kind} {summary(each['seconds'])['median']:.3f} s" for kind, each in found.items()]
                    lab.say(f"peer {place} at {rate:g} Mbit/s: {', '.join(said)}")
    _validate(lab, records)


def _validate(lab: Lab, records: Records) -> None:
    """Train dense and compressed, all devices in one process, which changes no loss; record the validation losses."""
    trained = {f"{_name(mesh)} validation {kind}": (mesh, kind) for mesh in MESHES for kind in (DENSE, *COMPRESSED)}
    if all(key in records for key in trained):
        return
    alone = Scenario("alone", "all devices in one process", np.zeros((1, 1)), devices_per_host=8, slowness=0)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(hosts.Cluster(alone.rates.tolist()))
        logs = lab.out / "peer" / "alone" / "logs"
        session = stack.enter_context(Session(cluster, alone.devices_per_host, logs, lab.cache, real=True))
        bench = Bench(lab, alone, cluster, session)
        for key, (mesh, kind) in trained.items():
            if key not in records:
                [name] = bench.compile([kinds(mesh)[kind]], eval_batches=4)
                [found] = session.ask("train", name=name, steps=STEPS, eval_every=EVALUATED)
                session.ask("forget", names=[name])
                records.add(key, mesh=mesh, kind=kind, **found)
                lab.say(f"{key}: loss {found['validation'][-1][1]:.4f} after {STEPS} steps")
