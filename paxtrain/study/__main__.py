"""What compression does to training: python -m paxtrain.study --out=runs/study [--seeds=3] [--config.x.y=...].

Trains one model again and again, from the same start on the same data, with more and more of what crosses the links
compressed, and writes a page with a table, figures and what they say. All devices of the mesh are emulated on one,
which computes the same values; bytes on the wire are read from the step compiled for the real mesh.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from paxtrain import flags as shared_flags
from paxtrain.config import Config, MeshConfig, from_dict
from paxtrain.data.datasets import DataSets
from paxtrain.errors import OVERRIDES, UserError, run
from paxtrain.model import transformer
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.ranks import Ranks, StageRanks
from paxtrain.parallel.selective import StageTimes
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.run import checkpoint
from paxtrain.study import plots, probe, report
from paxtrain.study.report import Outcome

HINT = OVERRIDES
_PROBES = 20  # times per run that the messages between the stages are looked at


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compress: its name in files, its name in tables, and its configuration."""

    name: str
    label: str
    config: Config


def variants(config: Config, sweep: Sequence[int]) -> list[Variant]:
    """The runs of a study: dense, then with more and more compressed, then one for every further rank of the sweep.

    Args:
        config: its compress section gives ranks, the stages of selective stage compression and when it starts.
        sweep: ranks of compressed backpropagation.
    """
    found: dict[str, Variant] = {}

    def add(name: str, label: str, **changes: Any) -> None:
        off = {"backward": "none", "forward": "none", "data": "none", "embedding": "unfused", "error": "lazy"}
        compress = dataclasses.replace(config.compress, **(off | changes))
        found[name] = Variant(name, label, dataclasses.replace(config, compress=compress))

    add("dense", "dense")
    add("cb_naive", "CB naive", backward="all", error="none")
    add("cb", "CB", backward="all")
    add("cb_epilogue", "CB epilogue", backward="epilogue")
    add("cb_fe", "CB + FE", backward="epilogue", embedding="fused")
    add("cb_fe_sc", "CB + FE + SC", backward="epilogue", embedding="fused", data=config.compress.data)
    add("everything", "everything", backward="all", forward="all", embedding="fused", data="all")
    for rank in sweep:
        if rank != config.compress.backward_rank:
            add(f"cb_rank_{rank}", f"CB rank {rank}", backward="all", backward_rank=rank, backward_ranks="")
    return list(found.values())


def settled(config: Config) -> Config:
    """The configuration with the stages of selective stage compression by number.

    Raises:
        UserError: the study has nothing to compare on this mesh, or would not know what to count.
    """
    c, mesh = config.compress, config.mesh
    if mesh.pipe < 2:
        raise UserError(
            f"mesh.pipe={mesh.pipe} has no messages between stages to compress; choose a mesh.pipe of 2 or more"
        )
    if mesh.tensor > 1 or config.pipeline.virtual_stages > 1:
        raise UserError(
            f"the study takes mesh.tensor=1 and pipeline.virtual_stages=1, got {mesh.tensor} and "
            f"{config.pipeline.virtual_stages}; neither changes what is compressed"
        )
    if config.micro_batches < 2:
        raise UserError(
            "the study compares the errors of neighbouring micro-batches, but there is 1 per step; "
            f"batch.global_batch={2 * config.batch.global_batch} would make 2"
        )
    if len(config.data.validation_sets) > 1:
        raise UserError(
            "the study compares one validation loss, but data.validation names "
            f"{len(config.data.validation_sets)} data sets; name one"
        )
    if c.data_adapt_every:
        raise UserError(f"the study keeps ranks as they are, got compress.data_adapt_every={c.data_adapt_every}; use 0")
    data = c.data
    if data == "selective" and c.seconds[0]:
        data = ",".join(map(str, StageTimes(*c.seconds).chosen())) or "none"
    if data in ("none", "selective"):
        raise UserError(
            f"compress.data={c.data} does not say which stages the run with selective stage compression compresses; "
            "name them, as --config.compress.data=0,1"
        )
    return dataclasses.replace(config, compress=dataclasses.replace(c, data=data))


class Study:
    """The runs of a study, with what they share: data, mesh and the compiled evaluation.

    Everything that can be wrong with the input is found while this is made, before anything is compiled.
    """

    def __init__(self, config: Config, out: str, seeds: int, sweep: Sequence[int], real_mesh: bool) -> None:
        """Checks the input.

        Args:
            config: a `settled` one, see `variants`.
            out: the folder to write to.
            seeds: runs of each kind; they begin with config.run.seed.
            sweep: ranks of compressed backpropagation.
            real_mesh: train on one device for each of the mesh instead of emulating them all on one.

        Raises:
            UserError: of data, mesh, ranks or folder.
        """
        if seeds < 1:
            raise UserError(f"--seeds must be at least 1, got {seeds}")
        if any(rank < 1 for rank in sweep):
            raise UserError(f"--ranks must be positive, got {','.join(map(str, sweep))}")
        self.config, self.out = config, pathlib.Path(out)
        self.seeds = range(config.run.seed, config.run.seed + seeds)
        self.variants = variants(self.config, sweep)
        self.data = DataSets(config)
        self.virtual = not real_mesh
        self.mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1]) if self.virtual else make_mesh(config.mesh)
        for variant in self.variants:
            self.trainer(variant).compression.check()
        checkpoint.ensure_writable(self.out)

    def trainer(self, variant: Variant) -> Trainer:
        """What trains a variant; every link records all messages of a step."""
        return Trainer(variant.config, self.mesh, record=self.config.micro_batches, virtual=self.virtual)

    def real_trainer(self, variant: Variant) -> Trainer:
        """The variant on the real mesh of CPU devices, to be compiled only: it tells the bytes on the wire."""
        c = variant.config
        c = dataclasses.replace(
            c,
            model=dataclasses.replace(c.model, attention="auto"),
            compress=dataclasses.replace(c.compress, implementation="auto"),
        )
        return Trainer(c, make_mesh(c.mesh, devices=jax.devices("cpu")[: c.mesh.devices]))

    def batches(self, name: str, seed: int) -> Iterator[jax.Array]:
        """Global batches of "train" or "validation", as paxtrain.train reads them."""
        sharding, rows = self.trainer(self.variants[0]).batch_sharding, range(self.config.batch.global_batch)
        [validation] = self.data.validation
        local = self.data.training(rows, seed=seed) if name == "train" else self.data.validating(validation, rows)
        return (jax.device_put(batch, sharding) for batch in local)

    def run(self, workers: int) -> list[Outcome]:
        """Trains all variants with all seeds, `workers` at a time, and shows how far it is."""
        c = self.config
        some = itertools.islice(self.batches("validation", c.run.seed), c.run.eval_batches)
        self._validation = list(some)
        dense = self.trainer(self.variants[0])
        self._start = jax.jit(functools.partial(transformer.init, c.model))
        self._evaluate = dense.evaluate.lower(dense.abstract_state().params, dense.abstract_batch()).compile()
        total = len(self.variants) * len(self.seeds) * c.run.steps
        with (
            tqdm(total=total, unit="step", dynamic_ncols=True, disable=None) as self._bar,
            concurrent.futures.ThreadPoolExecutor(workers) as pool,
        ):
            self._lock, self._done = threading.Lock(), []
            return list(itertools.chain.from_iterable(pool.map(self._train, self.variants)))

    def _validate(self, state: TrainState) -> float:
        return sum(float(self._evaluate(state.params, batch)) for batch in self._validation) / len(self._validation)

    def _train(self, variant: Variant) -> list[Outcome]:
        """A variant's run with every seed."""
        began = time.perf_counter()
        trainer = self.trainer(variant)
        ranks = StageRanks.of(variant.config, trainer.compression.stages)
        steps: dict[Ranks, Any] = {}
        for number in (1, self.config.run.steps):
            if ranks.at(number) not in steps:
                steps[ranks.at(number)] = dataclasses.replace(trainer, stage_ranks=ranks.at(number)).compile_step()
        sent = probe.wire_bytes(self.real_trainer(variant))
        self._say(f"{variant.label}: compiled in {time.perf_counter() - began:.0f} s")
        outcomes = []
        for seed in self.seeds:
            began = time.perf_counter()
            outcome = Outcome(variant.name, variant.label, seed, variant.config.compress.backward_rank, sent)
            state = trainer.from_params(self._start(jax.random.key(seed)))
            outcome.validation[0] = self._validate(state)
            # Dropout, if there is any, takes the configuration's seed in all runs.
            for number, batch in zip(range(1, self.config.run.steps + 1), self.batches("train", seed)):
                state, values = steps[ranks.at(number)](state, batch)
                outcome.losses.append(float(values["loss"]))
                self._look(trainer, outcome, number, state, batch)
                with self._lock:
                    self._bar.update()
            outcome.skipped = int(state.skipped)
            outcomes.append(outcome)
            self._done.append(variant)
            self._say(
                f"[{len(self._done)}/{len(self.variants) * len(self.seeds)}] {variant.label}, seed {seed}: validation "
                f"loss {outcome.final:.4f} after {time.perf_counter() - began:.0f} s"
            )
        return outcomes

    def _look(self, trainer: Trainer, outcome: Outcome, number: int, state: TrainState, batch: jax.Array) -> None:
        """Adds to the outcome what is measured after this step."""
        run = self.config.run
        if number == run.steps or (run.eval_every and number % run.eval_every == 0):
            outcome.validation[number] = self._validate(state)
        spectra = outcome.name == "dense" and number in (max(1, run.steps // 10), run.steps // 2, run.steps)
        if spectra or number == 1 or number % max(1, run.steps // _PROBES) == 0:
            codec = jax.device_get({direction: state.codec[direction] for direction in ("backward", "forward")})
            outcome.errors += [{"step": number} | row for row in probe.link_errors(trainer, codec)]
            if spectra:
                kinds = {
                    "activations": probe.activation_gradient_spectra(trainer, codec),
                    "weights": probe.weight_gradient_spectra(trainer, state.params, batch),
                }
                outcome.spectra += [
                    {"step": number, "gradients_of": kind, "matrix": name, "index": i, "singular_value": value}
                    for kind, found in kinds.items()
                    for name, values in found.items()
                    for i, value in enumerate(values)
                ]

    def _say(self, text: str) -> None:
        with self._lock:
            tqdm.write(text)


def define_flags() -> None:
    """Defines this main's flags."""
    flags.DEFINE_string("out", "runs/study", "The folder for the page, the figures and the CSV files.")
    flags.DEFINE_integer("seeds", 1, "Runs of each kind, with the seeds from run.seed on.")
    flags.DEFINE_integer("steps", None, "Optimizer steps of each run; default: the configuration's.")
    flags.DEFINE_list("ranks", ["4", "8", "16"], "Ranks of compressed backpropagation to compare.")
    flags.DEFINE_bool("real_mesh", False, "Train on as many devices as the mesh has, not on one that emulates them.")
    flags.DEFINE_integer("workers", 2, "Runs at a time; one with --real_mesh.", lower_bound=1)
    shared_flags.define_config("config", "study", "The configuration: a file, or the name of one in configs/.")


def main(argv: Sequence[str]) -> None:
    """Reads the configuration, trains all runs, writes the page."""
    f = flags.FLAGS
    if not all(rank.isdecimal() for rank in f.ranks):
        raise UserError(f"--ranks must be numbers joined by commas, got {','.join(f.ranks)}")
    # scipy's OpenBLAS, which factorises the small matrices on CPUs, would spend its time on waking its threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    config = settled(from_dict(f.config))
    if f.steps is not None:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=f.steps))
    jax.config.update("jax_num_cpu_devices", config.mesh.devices)
    began = time.perf_counter()
    study = Study(config, f.out, f.seeds, list(map(int, f.ranks)), f.real_mesh)
    outcomes = study.run(1 if f.real_mesh else f.workers)
    report.write_csv(outcomes, study.out)
    figures = plots.draw(study.config, outcomes, study.out)
    report.write_page(study.config, outcomes, figures, study.out)
    print(report.summary(outcomes))
    print(f"\n{study.out / report.PAGE} after {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
