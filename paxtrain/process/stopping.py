"""SIGTERM, as a question that the training loop asks after each step.

With several processes jax.distributed catches it, and its processes agree on a step: the one after the highest number
that any of them has asked about by then. Steps must be asked about in turn, from 1 on: a signal that comes before the
first question, while a resumed run compiles, means step 1, and nobody would ever ask about that again.
"""

import signal
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Stop:
    """Catches SIGTERM from entry to exit; with several processes from when they joined."""

    def __init__(self) -> None:
        self._caught, self._before, self._asked = False, None, 0

    def _catch(self, *_: Any) -> None:
        self._caught = True

    def now(self) -> bool:
        """Whether the step just done is the last one, the same on every process; asked once after each."""
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
