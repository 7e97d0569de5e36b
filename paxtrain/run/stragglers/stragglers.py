"""A run that says by itself what has become slow: it notices slower steps, looks for the reason, and tells it.

While all is well nothing is done but arithmetic on process 0. When the steps of a run become slower for good
(step_change.py), the processes agree on a step after which all time small pieces of work (probe.py), and process 0
compares these with what they took at the start (judgement.py).
"""

import dataclasses
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paxtrain.config import Config
from paxtrain.config.plan import HOST
from paxtrain.errors import command
from paxtrain.process import distributed
from paxtrain.process.appointment import Appointment
from paxtrain.run.stragglers.judgement import LEAST, Culprit, JobNames, Judge
from paxtrain.run.stragglers.probe import Probe
from paxtrain.run.stragglers.step_change import FIRST, StepChange, StepWatch
from paxtrain.run.stragglers.suspects import INPUT, Suspect, SuspectSeconds, from_texts, numbered, to_text

_USUAL = 5  # probes at the start, whose median is what is usual
_NOW = 3  # probes when steps have become slower
_UNEXPLAINED = 0.2  # share by which steps must be slower to be told without a reason
_SHARE, _SPARE = 0.01, 5.0  # of a run's seconds that probes may take; seconds that they may take besides
_RECENT = 8  # steps whose median is a process's present wait for input


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """Slower steps and what explains them.

    Attributes:
        step: Number of the step after which it was found.
        since: Number of the first slow step.
        change: Seconds of a step, before and now.
        culprits: What explains it, the worst first; empty: nothing that is measured does.
        advice: What to do about it, in words; empty: nothing is known.
    """

    step: int
    since: int
    change: StepChange
    culprits: tuple[Culprit, ...]
    advice: str = ""

    def words(self) -> str:
        """Return what is found, and the advice, as a line of the log."""
        before, now = self.change.before, self.change.now
        why = "; ".join(culprit.words for culprit in self.culprits)
        if not why:
            why = "no device, link, CPU or input explains it, perhaps other load on this machine; "
            why += "--config.profile=10:13 shows which part"
        took = f"{now:.4g} s instead of {before:.4g} s"
        found = f"step {self.step}: slower by {self.change.slower:.0%} since about step {self.since} ({took}): {why}"
        return f"{found}. {self.advice}" if self.advice else found

    def metrics(self) -> dict[str, float]:
        """Return the scalars: the step's, and how many times as long each culprit takes."""
        found = {culprit.name: culprit.times for culprit in self.culprits} or {"term/unknown": 1 + self.change.slower}
        figures = {"step": 1 + self.change.slower, "lost_seconds": self.change.now - self.change.before, **found}
        return {f"slower/{name}": value for name, value in figures.items()}


Advise = Callable[[Slowdown], str]  # returns what to do about it, in words; empty: nothing


def by_hand(config: Config) -> Advise:
    """Return the function that tells the command which plans without a slow host.

    Args:
        config: Configuration of the run.
    """

    def advise(found: Slowdown) -> str:
        hosts = ",".join(dict.fromkeys(culprit.host for culprit in found.culprits if culprit.host))
        model = f"{shlex.quote(config.run.out)}/config.json"
        told = f"{command('planner.plan')} --model={model} --cluster=CLUSTER.json --without={hosts}"
        return f"Predict a step without {hosts}: {told}" if hosts else ""

    return advise


class Stragglers:
    """A context manager, around a run's steps, that finds what makes them slower. All processes call every method."""

    def __init__(self, config: Config, mesh: Mesh, names: Sequence[str] = (), advise: Advise | None = None) -> None:
        """Compile the probe, and measure what is usual.

        Args:
            config: Configuration of the run.
            mesh: Mesh of the run.
            names: Name of the host of each process; empty: what its operating system says.
            advise: Function that returns advice, on process 0; None: the command that plans without a slow host.
        """
        hosts, host_of = numbered(names or distributed.host_names())
        width = config.model.hidden * jnp.dtype(config.model.dtype).itemsize
        message = config.batch.micro_batch * config.model.sequence * width
        kinds = distributed.gather_texts(mesh.local_devices[0].device_kind)
        self._advise = advise or (by_hand(config) if len(hosts) > 1 else lambda _: "")
        # One process on CPUs has cores that all its devices share, and nothing to compare them with.
        alone = jax.process_count() == 1 and mesh.devices.flat[0].platform == "cpu"
        self._probe = None if alone else Probe(mesh, host_of, message)
        usual = [from_texts(self._measured()) for _ in range(0 if alone else _USUAL)]
        self._judge, self._hosts = Judge(JobNames(hosts, host_of, kinds), usual), set(hosts)
        self._watch, self._appointment = StepWatch(), Appointment("probe")
        self._waits: deque[float] = deque(maxlen=_RECENT)
        self._first_waits: list[float] = []
        self._change: StepChange | None = None
        self._since = 0
        self._steps = self._probes = 0.0  # seconds so far
        self._normal: float | None = None  # seconds of a step before the last slowdown that was told

    def behind(self) -> list[str]:
        """Return a line for each host or device that is far slower than others of its kind from the start on."""
        return [f"note: {culprit.words}; all others may wait for it" for culprit in self._judge.behind()]

    def _measured(self, more: SuspectSeconds | None = None) -> list[str]:
        found = self._probe() if self._probe else {}
        return distributed.gather_texts(to_text(found | (more or {})))

    def waited(self, seconds: float) -> None:
        """Record the seconds for which this process waited for a step's batch."""
        self._waits.append(seconds)
        if len(self._first_waits) < FIRST:
            self._first_waits.append(seconds)

    def finished(self, step: int, seconds: float, kind: Hashable = None) -> str:
        """Record a step's seconds, and return what there is to say at once: that steps are as fast as before again.

        Args:
            step: Number of the step.
            seconds: Its seconds.
            kind: What its usual seconds depend on.
        """
        self._steps += seconds
        change = self._watch.add(seconds, kind) if jax.process_index() == 0 else None
        if change is None:
            return ""
        if change.slower > LEAST:
            if self._probes <= _SHARE * self._steps + _SPARE:
                self._change, self._since = change, step + 1 - change.steps
                self._appointment.ask()
        elif self._normal and change.now < (1 + LEAST) * self._normal:
            self._normal = None
            return (
                f"step {step}: as fast as before again since about step {step + 1 - change.steps} ({change.now:.4g} s)"
            )
        return ""

    def due(self, step: int) -> bool:
        """Return whether to call `look` after this step, the same on every process; call it after each step."""
        return self._appointment.now(step)

    def look(self, step: int, writing: bool = False) -> Slowdown | None:
        """Time all parts while no step runs, and return on process 0 what explains the slower steps.

        Args:
            step: Number of the step just done.
            writing: Whether a checkpoint is being written in the background.
        """
        began, waits = time.perf_counter(), {}
        if self._waits:
            longer = statistics.median(self._waits) - statistics.median(self._first_waits)
            waits = {Suspect(INPUT, jax.process_index()): longer}
        measured = [from_texts(self._measured(waits)) for _ in range(_NOW if self._probe else 1)]
        self._probes += time.perf_counter() - began
        if self._change is None:
            return None
        now = {part: statistics.median(one[part] for one in measured) for part in measured[0]}
        culprits = self._judge.culprits(now, self._change)
        if writing and not culprits:
            words = f"a checkpoint is being written beside the steps (the term {HOST})"
            culprits = [Culprit("term/checkpoint", words, 1 + self._change.slower)]
        change, self._change = self._change, None
        if not culprits and change.slower < _UNEXPLAINED:
            return None
        found = Slowdown(step, self._since, change, tuple(culprits))
        self._normal = self._normal or change.before
        all_slow = {culprit.host for culprit in culprits} >= self._hosts  # no host is left to plan for
        return dataclasses.replace(found, advice="" if all_slow else self._advise(found))

    def __enter__(self) -> Self:
        self._appointment.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._appointment.__exit__(*exception)
