"""SIGTERM, as a question that the training loop asks after each step."""

import signal
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Stop:
    """Catches SIGTERM from entry to exit; with several processes jax.distributed does, and they agree on a step."""

    def __init__(self) -> None:
        self._caught, self._before = False, None

    def _catch(self, *_: Any) -> None:
        self._caught = True

    def after(self, step: int) -> bool:
        """Whether this step is the last one, the same on every process."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._caught

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._catch)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
