"""The gain of another plan when something has become slow: predicted beside the training, which goes on.

The prediction is a command of planner.plan, on process 0's host at the lowest priority. The log has it, and then its
answer. A plan without a slow host has its file. For a link that has become slow, the step of the present plan is
predicted as well as that of the plan which is best with it; measured again at the next start, it is planned for.
"""

import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from absl import flags
from tqdm import tqdm

from paxtrain import files
from paxtrain.config.plan import Plan
from paxtrain.errors import command
from paxtrain.run.stragglers.stragglers import Slowdown
from planner.cluster.cluster import Cluster
from planner.planning.planning import PLAN

FOLDER = "replanned"
_QUICK = ("--oracle=no", "--nonearby")  # nothing is compiled, and no other batches are searched
_LAST = ("nice", "-n", "19")  # after all else that the host does
_MODEL, _CLUSTER = "config.json", "cluster.json"


def given(names: Sequence[str]) -> list[str]:
    """Return those of the flags that the command line has, as words of a command."""
    return [word for name in names if flags.FLAGS[name].present for word in flags.FLAGS[name].serialize().split("\n")]


class Replanning:
    """A context manager that answers slowdowns with a command and then with its prediction, one at a time."""

    def __init__(
        self,
        out: pathlib.Path,
        values: Mapping[str, Any],
        plan: Plan,
        cluster: Cluster | None,
        options: Sequence[str] = (),
        say: Callable[[str], None] = lambda line: tqdm.write(line, file=sys.stderr),
    ) -> None:
        """Prepare; nothing is written before there is a slowdown.

        Args:
            out: Folder of the run.
            values: Sections of the configuration, nested, as the present plan was made from them.
            plan: The present plan.
            cluster: The cluster as it was profiled; None: it was not, so the command has a gap.
            options: Flags of the search.
            say: Function that prints a line.
        """
        self._folder, self._values, self._plan = out / FOLDER, values, plan
        self._cluster, self._options, self._say = cluster, options, say
        self._running: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, found: Slowdown) -> str:
        """Return the command that predicts a step without the slow host, or on the slow link, and start it."""
        change = self._change(found)
        if not change:
            return ""
        model, cluster = self._folder / _MODEL, self._folder / _CLUSTER
        words = [f"--model={model}", f"--cluster={cluster if self._cluster else _CLUSTER}", *change]
        words += [f"--out={self._folder}", *_QUICK, *self._options]
        told = f"{command('planner.plan')} {shlex.join(words)}"
        self._folder.mkdir(exist_ok=True)
        files.write(model, json.dumps(self._values))
        if self._running is not None or self._cluster is None:
            return f"To predict a step with another plan: {told}"
        self._cluster.save(cluster)
        # jax must not take the devices of the training.
        self._running = subprocess.Popen(
            [*_LAST, sys.executable, "-m", "planner.plan", *words, "--json"],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._wait, args=(self._running, found), name="replanning", daemon=True)
        self._thread.start()
        return f"A step with another plan is being predicted: {told}"

    @staticmethod
    def _change(found: Slowdown) -> list[str]:
        """Return the flags that tell planner.plan what has changed: the hosts that are slow, or else the worst link."""
        if slow := dict.fromkeys(culprit.host for culprit in found.culprits if culprit.host):
            return [f"--without={','.join(slow)}"]
        for culprit in found.culprits:
            if culprit.link:
                return [f"--what_if=link {'>'.join(culprit.link)} x {1 / culprit.times:.4f}"]
        return []

    def _wait(self, running: subprocess.Popen[str], found: Slowdown) -> None:
        output, errors = running.communicate()
        self._running = None
        if running.returncode:
            why = (errors.strip().splitlines() or [f"exit code {running.returncode}"])[-1]
            if running.returncode > 0:  # else the run has ended
                self._say(f"step {found.step}: there is no other plan: {why.removeprefix('error: ')}")
            return
        with contextlib.suppress(ValueError, KeyError, IndexError):
            self._say(f"step {found.step}: {self._answer(json.loads(output), found)}")

    def _answer(self, told: Mapping[str, Any], found: Slowdown) -> str:
        """Return what planner.plan has found, beside what the present plan takes."""
        planned = self._plan.predicted.get("step_seconds")
        now = f"now {found.change.now:.4g} s"
        if planned is not None:
            now += f"; this plan was predicted to take {planned:.4g} s"
        if changes := told.get("what_if"):
            other, kept = changes[0]["step_seconds"], changes[0]["kept_seconds"]
            is_kept = f", this plan {kept:.4g} s" if kept is not None else ""
            return (
                f"with that link another plan is predicted to take {other:.4g} s{is_kept} ({now}); to measure the "
                f"links and plan anew, remove {self._folder.parent / PLAN} and start with --profile_age=0"
            )
        other = told["ranked"][told["chosen"]]["step_seconds"]
        slow = ", ".join(dict.fromkeys(culprit.host for culprit in found.culprits if culprit.host))
        gain = other / found.change.now - 1
        return (
            f"without {slow} a step is predicted to take {other:.4g} s ({now}), {abs(gain):.0%} "
            f"{'less' if gain < 0 else 'more'} than now; {self._folder / PLAN} is its plan"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End a prediction that is not done."""
        if self._running is not None:
            self._running.terminate()
        if self._thread is not None:
            self._thread.join()
