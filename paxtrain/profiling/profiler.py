"""The profile of some steps of a training run: traces for xprof and Perfetto, and a breakdown of the steps' seconds.

The loop runs as it does without a profile: it does not wait for single steps. Its pauses (validation, checkpoints) do
not count as time of a step. docs/profiling.md says how to read the files.
"""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Self

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from paxtrain import files
from paxtrain.config import Config
from paxtrain.errors import UserError
from paxtrain.process import distributed
from paxtrain.profiling import breakdown
from paxtrain.profiling.trace import READ, STEP

FOLDER = "profile"
TIMELINE, PICTURE, TABLE = "timeline.json.gz", "timeline.png", "breakdown.txt"

# Parts of a step (see breakdown.py) by their name in the metrics; hidden seconds of a part do not count.
GROUPS = {
    "compute": ("forward", "backward", "head", "compression", "optimizer", "other"),
    "transfer": ("pipeline",),
    "tensor": breakdown.OVER_TENSOR,
    "data": ("gather", "data", "embedding"),
    "sync": ("sync",),
    "input": ("input",),
    "idle": ("idle",),
}


class Profiler:
    """Tracer of the steps of config.profile; if config.profile names none, every method returns at once.

    It is a context manager, whose exit ends a trace that an error or SIGTERM has cut short.

    Attributes:
        folder: folder of this process's trace.
        steps: numbers of the traced steps.
        last: number of the last traced step, 0 if none is traced.
        parts: seconds [P] of each part of a traced step, by stage; empty before the trace is complete.
    """

    def __init__(self, config: Config, mesh: Mesh, first: int) -> None:
        """Find the steps to trace, and start nothing yet.

        Args:
            config: configuration of the run.
            mesh: mesh of the run.
            first: step after which the run continues.

        Raises:
            UserError: the steps begin before `first`, and the run's folder has no trace of them.
        """
        steps = config.profiled
        folder = pathlib.Path(config.run.out) / FOLDER / f"steps_{steps.start}_to_{steps.stop - 1}"
        self.folder = folder / f"process_{jax.process_index()}" if jax.process_count() > 1 else folder
        if steps and steps.start <= first:
            # A run that was interrupted after its profile continues without one, with any number of processes.
            if not folder.is_dir():
                raise UserError(
                    f"profile={config.profile} begins with step {steps.start}, but the run goes on after step {first}; "
                    "name later steps, or another run.out to start anew"
                )
            if not any(folder.rglob(TABLE)):
                logging.warning("the profile of steps %s was cut short: name later steps to have one", config.profile)
            steps = range(0)
        self.last = steps.stop - 1 if steps else 0
        self._mesh, self.steps = mesh, steps
        self.parts: dict[str, np.ndarray] = {}
        self._traces = False
        self._shared: contextlib.AbstractContextManager | None = None

    def turns(self, number: int) -> bool:
        """Return whether tracing begins or ends after this step."""
        return bool(self.steps) and number in (self.steps.start - 1, self.last)

    def reading(self) -> contextlib.AbstractContextManager:
        """Return a context for the wait for a batch."""
        return jax.profiler.TraceAnnotation(READ) if self._traces else contextlib.nullcontext()

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Return a context for the start of a step; xprof shows the step's number."""
        if not self._traces:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def resume(self, number: int) -> None:
        """Count time again after step `number`, and begin the trace if the next step is the first traced one."""
        if self.steps and number == self.steps.start - 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / TABLE).unlink(missing_ok=True)  # of an earlier run; the file says that a trace is complete
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would cost more than the rest of the host's work
            distributed.wait_for_all(f"step {number + 1} is profiled")
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._traces = True
        if self._traces:
            self._shared = jax.profiler.TraceAnnotation(STEP)
            self._shared.__enter__()

    def pause(self, values: object) -> None:
        """Wait for the last step's results, and count no time until `resume`."""
        if self._shared is not None:
            jax.block_until_ready(values)
            self._shared.__exit__(None, None, None)
            self._shared = None

    def finish(self, compiled: jax.stages.Compiled, say: Callable[[str], None]) -> dict[str, float]:
        """End the trace, and write timeline, picture and table.

        All processes call it together, after `pause`.

        Args:
            compiled: training step that ran.
            say: function that prints a text.

        Returns:
            The metrics: mean seconds of a step over all devices, as a whole and by GROUPS, which add up to the whole.
        """
        self.close()
        text = compiled.as_text()
        assert text is not None
        traced = breakdown.load(self.folder, text, self._mesh)
        from paxtrain.profiling import timeline  # here, since matplotlib takes half a second of every start

        timeline.write(self.folder / TIMELINE, traced, self._mesh)
        timeline.draw(traced, self._mesh).savefig(self.folder / PICTURE)
        seconds, hidden = breakdown.by_stage(breakdown.shares(traced, len(self.steps)), self._mesh)
        table = breakdown.table(seconds, hidden)
        files.write(self.folder / TABLE, table + "\n")
        self.parts = seconds
        say(f"steps {self.steps.start} to {self.last} are profiled in {self.folder}\n{table}")
        mean = {name: float(np.mean(values)) for name, values in seconds.items()}
        groups = {name: sum(mean[part] for part in parts) for name, parts in GROUPS.items()}
        return {"profile_step": sum(mean.values()), **{f"profile_{name}": value for name, value in groups.items()}}

    def close(self) -> None:
        """End the trace if one is running."""
        if self._traces:
            self._traces = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pause(())
        self.close()
