"""One training run from its first step to its last, and what it reports."""

import dataclasses
import pathlib
import time

import numpy as np

from paxtrain.errors import UserError
from paxtrain.parallel.step import TrainState
from paxtrain.profiling.profiler import Profiler
from paxtrain.run import checkpoint, metrics, plots, report, sampling
from paxtrain.run.loop import Loop
from paxtrain.run.prepared import PreparedRun
from paxtrain.tables import size, table

LOSSES = "loss.png"


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Outcome of a training run.

    Attributes:
        folder: folder of the checkpoints, the metrics and the loss curve.
        finished: whether all steps are done; False after SIGTERM.
        step: steps run, those of earlier starts included.
        skipped: steps whose gradients were not finite and that changed nothing.
        steps: int [n], steps whose figures were logged, those of earlier starts included.
        losses: float [n], training loss of each of them, in nats per token.
        untrained: validation loss before the first step, by name.
        validation: validation loss after the last step, by name; empty if the run has not finished.
        tokens_per_second: speed of this start, without evaluation and checkpoints; 0 if all steps were done before.
        mfu: model FLOPs utilisation, 0 to 1; None if the devices' peak is not known.
    """

    folder: pathlib.Path
    finished: bool
    step: int
    skipped: int
    steps: np.ndarray
    losses: np.ndarray
    untrained: dict[str, float]
    validation: dict[str, float]
    tokens_per_second: float
    mfu: float | None


class Run(PreparedRun):
    """One training run: what it prepares, its steps, its report."""

    def train(self) -> TrainingResult:
        """Train, report, and leave a checkpoint, the metrics and a figure."""
        home = self.out / sampling.CHECKPOINTS
        # SIGTERM is caught until the last checkpoint is on disk; what fails is told before that is waited for.
        with (
            self.stop,
            checkpoint.Checkpoints(home, self.config.checkpoint) as checkpoints,
            self.progress,
        ):
            state = self.start(checkpoints)
            self._keep_tokenizer()
            first = int(state.step)
            profiler = Profiler(self.config, self.trainer.mesh, first)
            self.choose_ranks(state)
            self._check_profile(profiler.steps)
            began = time.perf_counter()
            self.step_of(first + 1)
            self.step_of(self.config.run.steps)  # with compression over data started: all that needs memory is known
            memory = max((s.memory_analysis() for s in self._steps.values()), key=lambda m: m.temp_size_in_bytes)
            described = report.describe(self.trainer, memory, time.perf_counter() - began)
            self.say(table(described + self.data.describe()))
            with metrics.Metrics(self.out, self.primary, resumed=first if first else None) as writer, profiler:
                untrained = self._untrained(state, writer)
                state, speed = Loop(self, first, checkpoints, writer, profiler).run(state)
                self.progress.now("finishing")
                done = int(state.step)
                validation = self.validate(state) if done == self.config.run.steps else None
                if validation is not None:
                    self._record(writer, done, validation)
            self.save(checkpoints, state, done)
        if self.primary:
            plots.plot_losses(self.out / metrics.FILE, self.out / LOSSES)
        result = self._result(state, untrained, validation, speed)
        if result.finished:
            self._summary(result)
        else:
            self.say(f"stopped by SIGTERM after step {done}; the same command continues from its checkpoint")
        return result

    def _result(
        self, state: TrainState, untrained: dict[str, float], validation: dict[str, float] | None, speed: float
    ) -> TrainingResult:
        path = self.out / metrics.FILE
        records = [record for record in metrics.read(path) if "loss" in record] if path.exists() else []
        mfu = (
            metrics.mfu(speed, self.config.model, self.config.mesh.devices, self.peak) if self.peak and speed else None
        )
        return TrainingResult(
            folder=self.out,
            finished=validation is not None,
            step=int(state.step),
            skipped=int(state.skipped),
            steps=np.array([record["step"] for record in records], int),
            losses=np.array([record["loss"] for record in records], float),
            untrained=untrained,
            validation=validation or {},
            tokens_per_second=speed,
            mfu=mfu,
        )

    def _untrained(self, state: TrainState, writer: metrics.Metrics) -> dict[str, float]:
        """The validation losses before the first step: measured now, or read back after a resume."""
        if int(state.step) > 0:
            return self._recorded(0)
        losses = self.validate(state)
        self._record(writer, 0, losses)
        return losses

    def _recorded(self, step: int) -> dict[str, float]:
        path = self.out / metrics.FILE
        return metrics.validation_losses(metrics.read(path), step) if path.exists() else {}

    def _record(self, writer: metrics.Metrics, step: int, losses: dict[str, float]) -> None:
        """Writes what the metrics do not have yet: a run that is started again at its end adds nothing."""
        known = self._recorded(step)
        if new := {name: loss for name, loss in losses.items() if name not in known}:
            writer.write(step, new)

    def _summary(self, result: TrainingResult) -> None:
        speed = f"{size(result.tokens_per_second)}tokens/s"
        rows = [
            *report.losses("validation loss", result.validation),
            *report.losses("untrained", result.untrained),
            ("speed", speed) if result.tokens_per_second else ("steps", "all were done before"),
            ("checkpoint", str(self.out / sampling.CHECKPOINTS)),
            ("metrics", str(self.out / metrics.FILE)),
            ("loss curve", str(self.out / LOSSES)),
        ]
        if result.mfu is not None:
            rows.append(("MFU", f"{result.mfu:.1%} of {self.peak:.3g} FLOP/s per device"))
        if result.skipped:
            rows.append(("skipped steps", f"{result.skipped}, their gradients were not finite"))
        self.say(table(rows))
        if self.talks and self.config.run.sample_tokens and (self.out / sampling.TOKENIZER).exists():
            try:
                text = sampling.sample(self.out, "\n", self.config.run.sample_tokens, seed=self.config.run.seed)
            except UserError as error:  # a tokenizer may make no token of "\n"; all is trained and saved
                text = f"none, {error}"
            self.say(f"a sample:\n{text}")
