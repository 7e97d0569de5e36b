"""The training loop: steps, and the work that is due between them."""

import contextlib
import time

import jax

from paxtrain.model import parameters
from paxtrain.outer.trainer import on_host
from paxtrain.parallel.step import TrainState
from paxtrain.profiling.profiler import Profiler
from paxtrain.run import checkpoint, metrics
from paxtrain.run.prepared import PreparedRun
from paxtrain.run.stragglers.stragglers import Stragglers

Figures = dict[str, jax.Array]


class Loop:
    """The steps of a run.

    The metrics of step n - 1 are read while step n runs, so that the devices never wait for the host. A step's seconds
    end when its metrics are there, so an exchange that follows a step counts in the next step's, or before a pause in
    its own.

    Attributes:
        first: Number of steps done before the loop.
        checkpoints: Open checkpoints of the run.
        writer: Open metrics of the run.
        profiler: Profiler of some of the steps.
        progress: Progress line or bar.
        seconds: Seconds of each step that is done.
    """

    def __init__(
        self,
        run: PreparedRun,
        first: int,
        checkpoints: checkpoint.Checkpoints,
        writer: metrics.Metrics,
        profiler: Profiler,
        stragglers: Stragglers | None = None,
    ) -> None:
        """Prepare the loop.

        Args:
            run: Prepared run, whose ranks are chosen.
            first: Number of steps done before the loop.
            checkpoints: Open checkpoints of the run.
            writer: Open metrics of the run.
            profiler: Profiler of some of the steps.
            stragglers: Finder of what makes steps slower; None: nobody looks.
        """
        self._stragglers = stragglers
        self._run, self.first, self.checkpoints, self.writer, self.profiler = run, first, checkpoints, writer, profiler
        self.progress = metrics.ProgressLine(run.config.run.steps, first, run.talks)
        self.seconds: list[float] = []
        self._pending: tuple[int, Figures] | None = None
        self._last = self._started = time.perf_counter()
        self._paused = 0.0  # seconds outside of steps
        self._aux = parameters.aux(run.config.model)

    def run(self, state: TrainState) -> tuple[TrainState, float]:
        """Run the remaining steps, until the last one or SIGTERM.

        Args:
            state: State after step `first`. It is donated.

        Returns:
            The last state, and tokens per second without the time between steps.
        """
        run, profiler = self._run, self.profiler
        self._last = self._started = time.perf_counter()
        number = self.first
        with self.progress, contextlib.closing(run.batches("train", run.samples)) as batches:
            profiler.resume(self.first)
            for number in range(self.first + 1, run.config.run.steps + 1):
                self.checkpoints.check()
                if number == run.ranks.start + 1 and number > 1:
                    self.progress.say(f"step {number}: compression over data starts, {self._levels()}")
                asked = time.perf_counter()
                with profiler.reading():
                    batch = next(batches)
                if self._stragglers:
                    self._stragglers.waited(time.perf_counter() - asked)
                if run.config.run.log_samples:
                    self.progress.say(f"step {number}: samples {run.data.places(run.samples)}")
                with profiler.step(number):
                    state, figures = run.step_of(number)(state, batch)
                run.samples += run.config.batch.global_batch
                # The clock is read before an exchange starts, because its start may wait for the step to end.
                self._report_pending()
                state = run.after(number, state)
                self._pending = (number, figures)
                if self._between(number, state, figures):
                    break
            jax.block_until_ready(state)
            self._report_pending()
        seconds = time.perf_counter() - self._started - self._paused
        return state, (number - self.first) * run.tokens_per_step / seconds

    def _levels(self) -> str:
        return self._run.trainer.compression.levels_text(self._run.ranks.current)

    def _between(self, number: int, state: TrainState, figures: Figures) -> bool:
        """Profile, adapt ranks, evaluate and save, as far as each is due after a step; return whether to stop."""
        run, profiler, c = self._run, self.profiler, self._run.config
        validate = c.run.eval_every and number % c.run.eval_every == 0 and number < c.run.steps
        save = c.checkpoint.every and number % c.checkpoint.every == 0
        stop, adapt = run.stop.now(), run.ranks.due(number)
        look = self._stragglers is not None and self._stragglers.due(number)
        if not (validate or save or stop or adapt or look or profiler.turns(number)):
            return False
        jax.block_until_ready(state)  # an exchange after the step belongs to the step's time, not to the pause
        profiler.pause(figures)
        self._report_pending()
        began = time.perf_counter()
        if number == profiler.last:
            with run.progress.doing("reading the profile"):
                self.writer.write(number, profiler.finish(run.step_of(number), self.progress.say))
        if look:
            self._look(number)
        if adapt and run.ranks.adapt():
            ranks = ", ".join(map(str, run.ranks.current))
            self.progress.say(f"step {number}: ranks of the stages' gradients over data are now {ranks}")
            if number < c.run.steps:
                run.step_of(number + 1)  # compiled here, as no step's time is counted
        if validate:
            self.writer.write(number, run.validate(state))
        if save:
            run.save(self.checkpoints, state, number)
        profiler.resume(number)
        self._last = time.perf_counter()
        self._paused += self._last - began
        return stop

    def _look(self, number: int) -> None:
        """Look for what makes steps slower, and tell it."""
        assert self._stragglers is not None
        with self._run.progress.doing("looking for what is slow"):
            found = self._stragglers.look(number, self.checkpoints.writing)
        if found:
            self.progress.say(found.words())
            self.writer.write(number, found.metrics())

    def _report_pending(self) -> None:
        if self._pending:
            self._report(*self._pending)
        self._pending = None

    def _report(self, number: int, figures: Figures) -> None:
        """Write a finished step's metrics to the files, the watchdog and the progress line."""
        run, c = self._run, self._run.config
        values = on_host(figures)
        run.progress.finished(number)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.seconds.append(seconds)
        counts = number > self.first + 1 and number not in self.profiler.steps  # the first waits for late processes
        if self._stragglers and counts and (said := self._stragglers.finished(number, seconds, run.program(number))):
            self.progress.say(said)
        speed = run.tokens_per_step / seconds
        record = {
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "learning_rate": values["learning_rate"],
            "skipped": not values["finite"],
            "step_seconds": seconds,
            "tokens_per_second": speed,
        }
        if run.peak:
            record["mfu"] = metrics.mfu(speed, c.model, c.mesh.devices, run.peak)
        if "left_out" in values and values["finite"]:
            run.ranks.observe(values["left_out"])
            record |= {f"left_out_stage_{s}": x for s, x in enumerate(values["left_out"])}
        scalars = {one.name: float(values[one.metric]) for one in self._aux}
        record |= {one.metric: scalars[one.name] for one in self._aux}
        if number % c.run.log_every == 0 or not values["finite"]:
            self.writer.write(number, record)
        if not values["finite"]:
            self.progress.say(f"step {number}: gradients are not finite, nothing was changed")
        self.progress.update(number, {"loss": float(values["loss"])} | scalars, speed, seconds)
