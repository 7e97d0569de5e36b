"""The training run, from its first step to its report."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxtrain import files
from paxtrain.config import to_dict
from paxtrain.errors import UserError
from paxtrain.outer.trainer import GroupedTrainer
from paxtrain.parallel.step import TrainState
from paxtrain.profiling import terms
from paxtrain.profiling.profiler import Profiler
from paxtrain.run import checkpoint, metrics, report, sampling
from paxtrain.run.loop import Loop
from paxtrain.run.prepared import PreparedRun
from paxtrain.run.stragglers.stragglers import Advise, Stragglers
from paxtrain.tables import size, table

LOSSES = "loss.png"


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The outcome of a training run.

    Attributes:
        folder: Folder of the checkpoints, the metrics and the loss curve.
        finished: Whether all steps are done; False after SIGTERM.
        step: Number of steps run, those of earlier starts included.
        skipped: Number of steps whose gradients were not finite and that changed nothing.
        steps: Numbers of the logged steps, those of earlier starts included, int [n].
        losses: Training loss of each logged step in nats per token, float [n].
        untrained: Validation loss before the first step, by name.
        validation: Validation loss after the last step, by name; empty if the run has not finished.
        tokens_per_second: Speed of this start, without evaluation and checkpoints; 0 if all steps were done before.
        mfu: Model FLOPs utilisation, 0 to 1; None if the devices' peak is not known.
        comparison: The plan's prediction beside what this start measured; None without a plan that predicts.
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
    comparison: terms.StepComparison | None = None


def _temporary_bytes(memory: Any) -> int:
    return memory.temp_size_in_bytes


class Run(PreparedRun):
    """A training run: preparation, steps, report."""

    def train(
        self,
        predicted: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
        advise: Advise | None = None,
    ) -> TrainingResult:
        """Train, print the report, and write a checkpoint, the metrics and the loss curve.

        Args:
            predicted: The plan's figures, to be compared with what is measured.
            names: Name of the host of each process; empty: what its operating system says.
            advise: Function that returns what to do about slower steps; None: a command to plan anew with.
        """
        home = self.out / sampling.CHECKPOINTS
        # The lock and `stop` are left last, so that SIGTERM is caught until the last checkpoint is on disk. `progress`
        # is left first, so that a process that fails ends before the checkpoints are waited for.
        with (
            self.lock or contextlib.nullcontext(),
            self.stop,
            checkpoint.Checkpoints(home, self.config.checkpoint) as checkpoints,
            self.progress,
        ):
            state = self.start(checkpoints)
            self._keep_tokenizer()
            if self.primary:
                files.write(self.out / report.CONFIG, json.dumps(to_dict(self.config), indent=2))
            first = int(state.step)
            profiler = Profiler(self.config, self.mesh, first)
            self.choose_ranks(state)
            self._check_profile(profiler.steps)
            began = time.perf_counter()
            self.compile_all(first + 1)  # the program with compression over data, too, so that all memory is known
            memory = max((step.memory_analysis() for step in self._steps.values()), key=_temporary_bytes)
            described = report.describe(self.trainer, memory, time.perf_counter() - began, self.ranks.chosen)
            self.say(table(described + self.data.describe()))
            if other := terms.other_trainer(predicted or {}):
                self.say(f"the plan's seconds are those of {other}; planner.plan without --trainer predicts this one's")
            stragglers = self._stragglers(names, advise) if self.config.run.stragglers else None
            anew = not self.config.checkpoint.resume or first == self.config.run.resume_step > 0
            loggers, settled = self.config.run.named_loggers, to_dict(self.config)
            with (
                metrics.Metrics(self.out, self.primary, first or None, anew, loggers, settled) as writer,
                profiler,
            ):
                untrained = self._untrained(state, writer)
                loop = Loop(self, first, checkpoints, writer, profiler, stragglers)
                with stragglers or contextlib.nullcontext():
                    state, speed = loop.run(state)
                self.progress.now("finishing")
                done = int(state.step)
                # The first step of a start waits for its batch, and for processes that were late.
                comparison = terms.compare(predicted or {}, loop.seconds[1:], profiler.parts)
                if comparison:
                    writer.write(done, comparison.figures())
                validation = self.validate(state) if done == self.config.run.steps else None
                if validation is not None:
                    self._record(writer, done, validation)
            self.save(checkpoints, state, done)
            if self.primary:
                from paxtrain.run import plots  # here, since matplotlib takes half a second of every start

                plots.plot_losses(self.out / metrics.FILE, self.out / LOSSES)
        result = dataclasses.replace(self._result(state, untrained, validation, speed), comparison=comparison)
        if result.finished:
            self._summary(result, "" if predicted is None else "the same --plan")
        else:
            if comparison:
                self.say(table(comparison.rows()))
            self.say(f"stopped by SIGTERM after step {done}; the same command continues from its checkpoint")
        return result

    def _stragglers(self, names: Sequence[str], advise: Advise | None) -> Stragglers:
        with self.progress.doing("timing devices and links"):
            found = Stragglers(self.config, self.mesh, names, advise)
        for line in found.behind():
            self.say(line)
        return found

    def _result(
        self, state: TrainState, untrained: dict[str, float], validation: dict[str, float] | None, speed: float
    ) -> TrainingResult:
        path = self.out / metrics.FILE
        records = [record for record in metrics.read(path) if "loss" in record] if path.exists() else []
        mfu = None
        if self.peak and speed:
            mfu = metrics.mfu(speed, self.config.model, self.config.mesh.devices, self.peak)
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
        """Return the validation losses before the first step, evaluated now or read from the metrics after a resume."""
        if int(state.step) > 0:
            return self._recorded(0)
        losses = self.validate(state)
        self._record(writer, 0, losses)
        return losses

    def _recorded(self, step: int) -> dict[str, float]:
        path = self.out / metrics.FILE
        return metrics.validation_losses(metrics.read(path), step) if path.exists() else {}

    def _record(self, writer: metrics.Metrics, step: int, losses: dict[str, float]) -> None:
        """Write the losses that the metrics do not have yet; a run that is started again at its end adds nothing."""
        known = self._recorded(step)
        if new := {name: loss for name, loss in losses.items() if name not in known}:
            writer.write(step, new)

    def _summary(self, result: TrainingResult, also: str) -> None:
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
        if result.comparison:
            rows += result.comparison.rows()
        if isinstance(self.trainer, GroupedTrainer):
            rows += self.trainer.report()
        if result.skipped:
            rows.append(("skipped steps", f"{result.skipped}, their gradients were not finite"))
        self.say(table(rows))
        known = (self.out / sampling.TOKENIZER).exists()
        if self.talks and self.config.run.sample_tokens and known:
            try:
                text = sampling.sample(self.out, "\n", self.config.run.sample_tokens, seed=self.config.run.seed)
            except UserError as error:  # some tokenizers have no token for "\n"; the run is complete without a sample
                text = f"none, {error}"
            self.say(f"a sample:\n{sampling.printable(text)}")
        also = also if self.trainer.codec is None else "the same codec, in Python"
        self.say(table(report.next_steps(self.out, known, self.config, also)))
