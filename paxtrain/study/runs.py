"""The runs of a study: every variant trained with every seed, from the same start on the same data."""

import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from tqdm import tqdm

from paxtrain.config import Config, MeshConfig
from paxtrain.data.datasets import DataSets
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.parallel.compression import checks
from paxtrain.parallel.compression.ranks import Ranks, StageRanks
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.process import compilation_cache
from paxtrain.run import checkpoint
from paxtrain.study import measurements
from paxtrain.study.finished import FinishedRuns, identity
from paxtrain.study.programs import TrainStep, at_ranks, first_codec, on_dense, once
from paxtrain.study.report import VariantResult
from paxtrain.study.variants import Variant

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
        variants: Sequence[Variant],
        real_mesh: bool,
        *,
        examined: bool = True,
        counted: bool = True,
        resume: bool = False,
    ) -> None:
        """Check the input.

        Args:
            config: configuration that `variants.settled` returned.
            out: folder to write to.
            seeds: number of runs of each variant, with the seeds config.run.seed, config.run.seed + 1 and so on.
            variants: variants to run, dense training first if it is among them.
            real_mesh: whether to train on as many devices as the mesh has, not on one that emulates them.
            examined: whether the variants' messages are examined.
            counted: whether the bytes of a step are counted, for which each variant is traced for the real mesh.
            resume: whether runs count that the folder has of an earlier start, with the same configuration and seed.

        Raises:
            UserError: the data, the mesh, the ranks or the folder do not fit.
        """
        if seeds < 1:
            raise UserError(f"--seeds must be at least 1, got {seeds}")
        self.config, self.out = config, pathlib.Path(out)
        self.seeds = range(config.run.seed, config.run.seed + seeds)
        self._examined, self._counted = examined, counted
        self.variants = list(variants)
        self.data = DataSets(config)
        self.virtual = not real_mesh
        self.mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1]) if self.virtual else make_mesh(config.mesh)
        self._compiled, self._asked, self._empty = (
            once(Trainer.compile_step),
            once(measurements.asked),
            once(first_codec),
        )
        self._untrained = once(self._validate_first)
        for variant in self.variants:
            checks.check(self.trainer(variant).compression)
        # Made here, since a trainer on several CPU devices turns off jax's cache of compiled programs.
        real = {variant.name: self.real_trainer(variant) for variant in self.variants} if counted else {}
        self._real = {name: (trainer, measurements.alike(trainer)) for name, trainer in real.items()}
        self._plain, self._resume = self.trainer(self.variants[0]), resume
        checkpoint.ensure_writable(self.out)

    def keep_programs(self) -> None:
        """Keep the compiled programs in the study's folder, from where a second start of this machine loads them."""
        if self.virtual:
            compilation_cache.use(self.out / "programs")

    def trainer(self, variant: Variant) -> Trainer:
        """Return the trainer of a variant; every link records all messages of a step, if they are examined."""
        made = Trainer(variant.config, self.mesh, virtual=self.virtual)
        return dataclasses.replace(made, record=made.schedule.rows) if self._examined else made

    def real_trainer(self, variant: Variant) -> Trainer:
        """Return the trainer of a variant on the real mesh of CPU devices; it is only traced, to count bytes.

        Error feedback changes no message's size, so all variants count with it: those that differ in nothing else share
        a trace.
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
        self._count_of_runs = len(set(map(self._trained_as, self.variants))) * len(self.seeds)
        total = self._count_of_runs * c.run.steps
        with (
            tqdm(total=total, unit="step", dynamic_ncols=True, disable=None) as self._bar,
            concurrent.futures.ThreadPoolExecutor(workers) as pool,
        ):
            self._lock, self._done = threading.Lock(), 0
            self._finished = FinishedRuns(self.out, self._resume)
            if self._finished.aside:
                self._say(f"{self._finished.aside} has the runs of an earlier start; --resume would have taken them")
            self._evaluate = pool.submit(self._compile_evaluation)
            # Those with two programs first, so that no long one is left at the end.
            order = sorted(self.variants, key=lambda variant: variant.config.compress.data.chosen == "none")
            trained = {one: pool.submit(self._train, one) for one in dict.fromkeys(map(self._trained_as, order))}
            counted = {variant.name: pool.submit(self._count, variant) for variant in self.variants if self._counted}
            try:
                outcomes = [
                    dataclasses.replace(outcome, name=variant.name, label=variant.label)
                    for variant in self.variants
                    for outcome in trained[self._trained_as(variant)].result()
                ]
                sent = {name: group.result() for name, group in counted.items()}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # else the rest is run before the error is seen
                raise
        return [dataclasses.replace(outcome, bytes=sent.get(outcome.name, {})) for outcome in outcomes]

    def _trained_as(self, variant: Variant) -> Variant:
        """Return the first variant that computes the same, whose runs are those of this one.

        A fused embedding has the gradients of an unfused one, up to rounding, but sends other bytes.
        """

        def computed(one: Variant) -> Config:
            compress = one.config.compress
            if compress.embedding.sync == "unfused":
                compress = compress.changed(embedding={"sync": "fused"})
            return dataclasses.replace(one.config, compress=compress)

        same = (one for one in self.variants if computed(one) == computed(variant))
        return next(same) if self.virtual else variant

    def _compile_evaluation(self) -> jax.stages.Compiled:
        """Compile the evaluation, which is that of dense training for all variants."""
        dense = self._plain
        return dense.evaluate.lower(dense.abstract_state().params, dense.abstract_batch()).compile()

    def _count(self, variant: Variant) -> dict[str, int]:
        """Return the bytes of a variant on the wire."""
        trainer, alike = self._real[variant.name]
        sent = measurements.wire_bytes(trainer, {rank: self._asked(one) for rank, one in alike.items()})
        self._say(f"{variant.label}: {sum(sent.values()) / 1e3:.0f} kB a step on all links")
        return sent

    def _step(self, trainer: Trainer, ranks: Ranks) -> TrainStep:
        """Return the compiled step of a variant with some ranks over data."""
        step = self._compiled(at_ranks(trainer, ranks))
        return step if any(ranks) else on_dense(step)

    def _first(self, seed: int) -> TrainState:
        """Return the state of dense training before its first step, of which all others have all but the codecs'."""
        return self._plain.from_params(self._start(jax.random.key(seed)))

    def _validate(self, state: TrainState) -> float:
        """Return the mean validation loss."""
        evaluate = self._evaluate.result()
        return sum(float(evaluate(state.params, batch)) for batch in self._validation) / len(self._validation)

    def _validate_first(self, seed: int) -> float:
        """Return the mean validation loss before the first step, which is the same in all runs of a seed."""
        return self._validate(self._first(seed))

    def _train(self, variant: Variant) -> list[VariantResult]:
        """Train a variant with every seed that has not been trained before."""
        known = {seed: identity(variant, seed, (self._examined, self.virtual)) for seed in self.seeds}
        outcomes = {seed: found for seed in known if (found := self._finished.results.get(known[seed]))}
        missing = [seed for seed in self.seeds if seed not in outcomes]
        for seed in outcomes:
            self._end(variant, outcomes[seed], "from an earlier start", self.config.run.steps)
        if missing:
            began = time.perf_counter()
            trainer = self.trainer(variant)
            ranks = StageRanks.of(variant.config, trainer.compression.levels)
            # Another variant may be compiling the dense step, so it comes last.
            steps = {key: self._step(trainer, key) for key in map(ranks.at, (self.config.run.steps, 1))}
            self._say(f"{variant.label}: compiled in {time.perf_counter() - began:.0f} s")
        for seed in missing:
            began = time.perf_counter()
            outcome = outcomes[seed] = self._run(variant, trainer, lambda number: steps[ranks.at(number)], seed)
            self._finished.add(known[seed], outcome)
            self._end(variant, outcome, f"after {time.perf_counter() - began:.0f} s")
        return [outcomes[seed] for seed in self.seeds]

    def _run(self, variant: Variant, trainer: Trainer, step_of: Callable[[int], TrainStep], seed: int) -> VariantResult:
        """Train a variant with a seed."""
        compress = variant.config.compress
        rank = compress.backward.rank if compress.backward.low_rank else 0
        outcome = VariantResult(variant.name, variant.label, seed, rank, {})
        state = dataclasses.replace(self._first(seed), codec=self._empty(trainer)())
        outcome.validation[0] = self._untrained(seed)
        # Dropout takes the configuration's seed in all runs.
        for number, batch in zip(range(1, self.config.run.steps + 1), self.batches("train", seed)):
            state, values = step_of(number)(state, batch)
            outcome.losses.append(float(values["loss"]))
            self._look(trainer, outcome, number, state, batch)
            with self._lock:
                self._bar.update()
        outcome.skipped = int(state.skipped)
        return outcome

    def _end(self, variant: Variant, outcome: VariantResult, when: str, steps: int = 0) -> None:
        """Say that a run has ended."""
        with self._lock:
            self._bar.update(steps)
            self._done += 1
        loss = f"validation loss {outcome.final:.4f}"
        self._say(f"[{self._done}/{self._count_of_runs}] {variant.label}, seed {outcome.seed}: {loss} {when}")

    def _look(self, trainer: Trainer, outcome: VariantResult, number: int, state: TrainState, batch: jax.Array) -> None:
        """Add to the outcome the measurements that are due after a step."""
        run = self.config.run
        if number == run.steps or (run.eval_every and number % run.eval_every == 0):
            outcome.validation[number] = self._validate(state)
        if not self._examined:
            return
        spectra = outcome.name == "dense" and number in (max(1, run.steps // 10), run.steps // 2, run.steps)
        if spectra or number == 1 or number % max(1, run.steps // _PROBES) == 0:
            codec = jax.device_get({direction: state.codec[direction] for direction in ("backward", "forward")})
            outcome.errors += [{"step": number} | row for row in measurements.link_errors(trainer, codec)]
            if spectra:
                kinds = {
                    "activations": measurements.activation_gradient_spectra(trainer, codec),
                    "weights": measurements.weight_gradient_spectra(trainer, state.params, batch),
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
