"""The runs of a study: every variant trained with every seed, from the same start on the same data."""

import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence

import jax
from tqdm import tqdm

from paxtrain.config import Config, MeshConfig
from paxtrain.data.datasets import DataSets
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.ranks import Ranks, StageRanks
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.run import checkpoint
from paxtrain.study import probe
from paxtrain.study.programs import Step, at_ranks, on_dense, once
from paxtrain.study.report import VariantResult
from paxtrain.study.variants import Variant, variants

# Number of times per run that the messages between the stages are examined.
_PROBES = 20


class Study:
    """The runs of a study, with the data, the mesh and the compiled evaluation that they share.

    The constructor checks all input before anything is compiled.
    """

    def __init__(
        self,
        config: Config,
        out: str,
        seeds: int,
        sweep: Sequence[int],
        real_mesh: bool,
        only: Sequence[str] = (),
        others: Sequence[Variant] = (),
        counted: bool = True,
    ) -> None:
        """Check the input.

        Args:
            config: configuration that `variants.settled` returned.
            out: folder to write to.
            seeds: number of runs of each variant, with the seeds config.run.seed, config.run.seed + 1 and so on.
            sweep: ranks of compressed backpropagation.
            real_mesh: whether to train on as many devices as the mesh has, not on one that emulates them.
            only: names of the variants to run; empty: all.
            others: variants to run instead, dense training first. Their messages are not examined.
            counted: whether the bytes of a step are counted, for which each variant is compiled for the real mesh.

        Raises:
            UserError: the data, the mesh, the ranks or the folder do not fit, or there is no such variant.
        """
        if seeds < 1:
            raise UserError(f"--seeds must be at least 1, got {seeds}")
        if any(rank < 1 for rank in sweep):
            raise UserError(f"--ranks must be positive, got {','.join(map(str, sweep))}")
        self.config, self.out = config, pathlib.Path(out)
        self.seeds = range(config.run.seed, config.run.seed + seeds)
        self._examined, self._counted = not others, counted
        every = {variant.name: variant for variant in others or variants(self.config, sweep)}
        unknown = [name for name in only if name not in every]
        if unknown:
            raise UserError(f"there is no variant {unknown[0]!r} here; there are {', '.join(every)}")
        self.variants = [every[name] for name in only or every]
        self.data = DataSets(config)
        self.virtual = not real_mesh
        self.mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1]) if self.virtual else make_mesh(config.mesh)
        self._compiled, self._text = once(Trainer.compile_step), once(probe.step_text)
        for variant in self.variants:
            self.trainer(variant).compression.check()
        checkpoint.ensure_writable(self.out)

    def trainer(self, variant: Variant) -> Trainer:
        """Return the trainer of a variant; every link records all messages of a step, if they are examined."""
        record = self.config.micro_batches if self._examined else 0
        return Trainer(variant.config, self.mesh, record=record, virtual=self.virtual)

    def real_trainer(self, variant: Variant) -> Trainer:
        """Return the trainer of a variant on the real mesh of CPU devices; it is only compiled, to count bytes.

        Error feedback changes no message's size, so all variants count with it: those that differ in nothing else share
        a program.
        """
        c = variant.config
        c = dataclasses.replace(
            c,
            model=dataclasses.replace(c.model, attention="auto"),
            compress=dataclasses.replace(c.compress, implementation="auto", error="lazy"),
        )
        return Trainer(c, make_mesh(c.mesh, devices=jax.devices("cpu")[: c.mesh.devices]))

    def batches(self, name: str, seed: int) -> Iterator[jax.Array]:
        """Yield global batches as paxtrain.train reads them.

        Args:
            name: "train" or "validation".
            seed: seed of the order of the training data.
        """
        sharding, rows = self.trainer(self.variants[0]).batch_sharding, range(self.config.batch.global_batch)
        [validation] = self.data.validation
        local = self.data.training(rows, seed=seed) if name == "train" else self.data.validating(validation, rows)
        return (jax.device_put(batch, sharding) for batch in local)

    def run(self, workers: int) -> list[VariantResult]:
        """Train all variants with all seeds, `workers` at a time, and show progress."""
        c = self.config
        some = itertools.islice(self.batches("validation", c.run.seed), c.run.eval_batches)
        self._validation = list(some)
        self._start = jax.jit(functools.partial(transformer.init, c.model))
        total = len(self.variants) * len(self.seeds) * c.run.steps
        with (
            tqdm(total=total, unit="step", dynamic_ncols=True, disable=None) as self._bar,
            concurrent.futures.ThreadPoolExecutor(workers) as pool,
        ):
            self._lock = threading.Lock()
            self._done: list[Variant] = []
            self._evaluate = pool.submit(self._compile_evaluation)
            # Bytes last: their short jobs fill what the last runs leave of the workers.
            trained = [pool.submit(self._train, variant) for variant in self.variants]
            counted = {variant.name: pool.submit(self._count, variant) for variant in self.variants if self._counted}
            try:
                outcomes = [outcome for group in trained for outcome in group.result()]
                sent = {name: group.result() for name, group in counted.items()}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # else the rest is run before the error is seen
                raise
        return [dataclasses.replace(outcome, bytes=sent.get(outcome.name, {})) for outcome in outcomes]

    def _compile_evaluation(self) -> jax.stages.Compiled:
        """Compile the evaluation, which is that of dense training for all variants."""
        dense = self.trainer(self.variants[0])
        return dense.evaluate.lower(dense.abstract_state().params, dense.abstract_batch()).compile()

    def _count(self, variant: Variant) -> dict[str, int]:
        """Return the bytes of a variant on the wire."""
        sent = probe.wire_bytes(self.real_trainer(variant), self._text)
        self._say(f"{variant.label}: {sum(sent.values()) / 1e3:.0f} kB a step on all links")
        return sent

    def _step(self, trainer: Trainer, ranks: Ranks) -> Step:
        """Return the compiled step of a variant with some ranks over data."""
        step = self._compiled(at_ranks(trainer, ranks))
        return step if any(ranks) else on_dense(step)

    def _validate(self, state: TrainState) -> float:
        """Return the mean validation loss."""
        evaluate = self._evaluate.result()
        return sum(float(evaluate(state.params, batch)) for batch in self._validation) / len(self._validation)

    def _train(self, variant: Variant) -> list[VariantResult]:
        """Train a variant with every seed."""
        began = time.perf_counter()
        trainer = self.trainer(variant)
        ranks = StageRanks.of(variant.config, trainer.compression.stages)
        # Another variant may be compiling the dense step, so it comes last.
        steps = {key: self._step(trainer, key) for key in map(ranks.at, (self.config.run.steps, 1))}
        self._say(f"{variant.label}: compiled in {time.perf_counter() - began:.0f} s")
        outcomes = []
        for seed in self.seeds:
            began = time.perf_counter()
            compress = variant.config.compress
            rank = compress.backward_rank if compress.low_rank("backward") else 0
            outcome = VariantResult(variant.name, variant.label, seed, rank, {})
            state = trainer.from_params(self._start(jax.random.key(seed)))
            outcome.validation[0] = self._validate(state)
            # Dropout takes the configuration's seed in all runs.
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

    def _look(self, trainer: Trainer, outcome: VariantResult, number: int, state: TrainState, batch: jax.Array) -> None:
        """Add to the outcome the measurements that are due after a step.

        Args:
            trainer: trainer of the variant.
            outcome: result of the run so far.
            number: number of the step, from 1 on.
            state: state after the step.
            batch: global batch of the step.
        """
        run = self.config.run
        if number == run.steps or (run.eval_every and number % run.eval_every == 0):
            outcome.validation[number] = self._validate(state)
        if not self._examined:
            return
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
        """Print a line above the progress bar."""
        with self._lock:
            tqdm.write(text)
