"""Progress of this process, and its end when it fails: nobody waits for a process that hangs or has failed.

The others of its job cannot see more than that it is there. So it says itself why it ends, in one sentence, and ends
at once: an orderly exit would first wait for them, at the barrier of jax's coordination service.
"""

import contextlib
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Self

from paxtrain.errors import PREFIX, printable, told
from paxtrain.process import jax_private

FAULT = 1  # exit code; bad input has 2
STOPPED = 143  # exit code of a process that SIGTERM ends, and of a run that has saved after it
_PHASE = 1800.0  # seconds that anything between steps may take: compiling, saving, restoring, evaluating
_STEPS = 20  # typical steps, of which one that hangs takes longer
_CHECK = 1.0
_GRACE = 2.0  # seconds for which process 0, which has jax's coordination service, lets the others say their own reason


def _is_last_word(error: BaseException) -> bool:
    """Return whether an error is only that another process has ended, as a collective or jax's service says."""
    text = str(error)
    return any(word in text for word in ("Gloo", "NCCL", "oordination", "UNAVAILABLE", "DEADLINE_EXCEEDED"))


class Progress:
    """The last finished step of this process, and what it does between steps.

    As a context manager it ends this process if its block raises, or if `ends` is True and a step hangs. Blocks may be
    nested. A process that has joined no others is left alone.
    """

    def __init__(self, ends: bool = False, lost: float = 60.0, hang: float = 0.0) -> None:
        """Begin.

        Args:
            ends: Whether to end this process when it fails or hangs; mains alone do.
            lost: Seconds after which the others give this process up.
            hang: Seconds without a finished step after which this process hangs; 0: the time of 20 steps, and at
                least nine tenths of `lost`, so that it says where it hangs before the others end.
        """
        self._ends, self._hang, self._least = ends, hang, 0.9 * lost
        self._doing, self._since = "starting", time.monotonic()
        self._step: int | None = None
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._depth = 0  # of nested blocks
        self._over = threading.Event()

    def finished(self, step: int) -> None:
        """Record that this step is done."""
        now = time.monotonic()
        if not self._doing and self._step is not None:
            self._seconds.append(now - self._since)
        self._step, self._doing, self._since = step, "", now

    def now(self, what: str) -> None:
        """Record what the process does outside of steps, which may take longer than a step.

        Args:
            what: Words that continue "the process is", such as "compiling".
        """
        self._doing, self._since = what, time.monotonic()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Record what the process does in a block, and restore the previous words after the block."""
        before = self._doing
        self.now(what)
        yield
        self.now(before)  # not after an exception, so that the sentence says where it was raised

    # --- The end ------------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> float:
        """Seconds that the present step, or what lies between steps, may take."""
        if self._doing or len(self._seconds) < 2:
            return _PHASE
        return self._hang or max(_STEPS * statistics.median(self._seconds), self._least)

    def _when(self) -> str:
        place = "before the first step" if self._step is None else f"after step {self._step}"
        return f"{place}, while {self._doing}" if self._doing else place

    def _end(self, sentence: str, code: int, name: bool = True) -> None:
        who = f"process {jax_private.joined_number()} on {socket.gethostname()}: " if name else ""
        print(f"{PREFIX}{who}{printable(' '.join(sentence.split()))}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(_GRACE if jax_private.joined_number() == 0 else 0)
        os._exit(code)

    def _watch(self, main: int) -> None:
        while not self._over.wait(_CHECK):
            waited = time.monotonic() - self._since
            if waited > self._limit and jax_private.joined_processes() > 1:
                stack = traceback.format_stack(sys._current_frames()[main])
                print("".join(stack), file=sys.stderr, flush=True)
                where = " ".join(stack[-1].split())
                self._end(f"nothing has finished for {waited:.0f} s, {self._when()}; it is in {where}", FAULT)

    def _failed(self, error: BaseException) -> None:
        """Say in one sentence why this process ends, and end it."""
        found = told(error) if isinstance(error, Exception) else None
        if found is not None:
            self._end(*found, name=False)
        if isinstance(error, KeyboardInterrupt):
            self._end(f"interrupted, {self._when()}", 128 + signal.SIGINT)
        if _is_last_word(error):
            self._end(f"another process has ended or hangs, {self._when()}: {str(error)[:300]}", FAULT)
        traceback.print_exception(error)
        self._end(f"{type(error).__name__}: {str(error)[:600]}, {self._when()}", FAULT)

    def __enter__(self) -> Self:
        self._depth += 1
        if self._ends and self._depth == 1:
            self._over.clear()
            threading.Thread(target=self._watch, args=(threading.get_ident(),), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if (
                error is not None
                and not isinstance(error, SystemExit)
                and self._ends
                and jax_private.joined_processes() > 1
            ):
                self._failed(error)
        finally:
            self._depth -= 1
            if not self._depth:
                self._over.set()
