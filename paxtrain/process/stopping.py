"""A stop on SIGTERM, for which the training loop asks after each step.

With several processes jax.distributed catches the signal, and each call is a numbered question. The processes agree to
stop after one more than the highest number that any of them has asked. A run numbers its questions from 1, even if it
resumes at a later step: a signal that comes while it compiles selects question 1, which nobody has asked yet.
"""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Stop:
    """A context manager that catches SIGTERM; with several processes jax catches it from the time they joined.

    A process by itself ends at the second one, whether or not there is a step left after which the loop asks.
    """

    def __init__(self) -> None:
        self._caught, self._asked = False, 0
        self._before: Callable[[int, FrameType | None], Any] | int | None = None

    def _catch(self, *_: object) -> None:
        if self._caught:
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)
        self._caught = True

    def now(self) -> bool:
        """Return whether to stop after the step just done, the same on every process.

        Call it exactly once after each step.
        """
        if jax.process_count() > 1:
            self._asked += 1
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._caught

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._catch)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
