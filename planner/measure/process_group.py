"""Processes of a run that exchange small values without a collective, so that a lost process is named.

All values go through the key-value store of jax.distributed's coordinator, which always answers after a timeout. A
collective would wait forever.
"""

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax

from paxtrain.errors import PREFIX, LostError, UserError, is_full, printable, told
from paxtrain.process import distributed, jax_private

_GRACE = 2.0  # seconds for which a failing process 0 keeps the store up, so that the others can read the reason
ADVICE = "see whether its host is up and reachable from the others"

T = TypeVar("T")
R = TypeVar("R")


def _failure(answer: dict[str, Any]) -> Exception:
    """Return the error of another process as this one's, from what `ProcessGroup.gather` got instead of a value."""
    text = printable(str(answer["error"]))
    if answer.get("full"):
        return OSError(errno.ENOSPC, text)
    return LostError(text) if answer.get("lost") else UserError(text)


class ProcessGroup:
    """All processes of a run, or this one alone.

    Attributes:
        process: index of this process.
        count: number of processes.
        names: name of each process in messages.
        timeout: seconds that this process waits for any other.
    """

    def __init__(self, timeout: float) -> None:
        self.process, self.count = jax.process_index(), jax.process_count()
        self.names = [f"process {i}" for i in range(self.count)]
        self.timeout = timeout
        self._client = jax_private.coordination_client()
        self._round = 0

    @property
    def _store(self) -> jax_private.CoordinationClient:
        """The key-value store of a group of several processes."""
        assert self._client is not None, "one process alone has no store"
        return self._client

    def _key(self, process: int, turn: int = 0) -> str:
        return f"paxtrain/group/{self._round + turn}/{process}"

    def _wait(self, process: int, seconds: float) -> Any:
        try:
            answer = json.loads(self._store.blocking_key_value_get(self._key(process), int(1000 * seconds)))
        except RuntimeError as error:
            raise LostError(f"{self.names[process]} has not answered for {seconds:g} s; {ADVICE}") from error
        if isinstance(answer, dict) and "error" in answer:
            raise _failure(answer)
        return answer

    @overload
    def gather(self, value: T) -> list[T]: ...

    @overload
    def gather(self, value: T, verdict: Callable[[list[T]], R]) -> R: ...

    def gather(self, value: T, verdict: Callable[[list[T]], object] = list) -> object:
        """Give process 0 a value of every process, and return its verdict on every process.

        No process returns before all have called. Values and verdicts travel as JSON, which makes lists of tuples.

        Args:
            value: this process's value.
            verdict: function of the values of all processes, called on process 0 only; default: the values themselves.

        Raises:
            UserError, LostError: the verdict raised it, or a process did not call. Every process raises the same.
        """
        self._round += 1
        if self.count == 1:
            return verdict([value])
        if self.process:
            self._store.key_value_set(self._key(self.process), json.dumps(value))
            return self._wait(0, 3 * self.timeout)  # process 0 itself waits for the others, one after another
        try:
            result = verdict([value, *(self._wait(i, self.timeout) for i in range(1, self.count))])
        except Exception as error:
            self._store.key_value_set(self._key(0), json.dumps(self._told(error)))
            raise
        self._store.key_value_set(self._key(0), json.dumps(result))
        if self._round > 1:  # all have called, so all have read the last verdict
            self._store.key_value_delete(f"paxtrain/group/{self._round - 1}/")
        return result

    def _told(self, error: Exception) -> dict[str, object]:
        """Return what the others learn of an error of process 0, so that they do not wait for it."""
        elsewhere = f"{self.names[0]} failed ({type(error).__name__}); its own output says what"
        if isinstance(error, UserError | LostError):
            return {"error": str(error), "lost": isinstance(error, LostError)}
        return {"error": elsewhere, "full": is_full(error)}

    def agree(self, value: float) -> float:
        """Return process 0's value on every process."""
        return self.gather(value, lambda values: values[0])

    def meet(self, what: str) -> None:
        """Return when all processes have called. Compilers may take longer than a process may be silent.

        Args:
            what: name of the meeting ("the link programs are compiled").
        """
        try:
            distributed.wait_for_all(what)
        except RuntimeError as error:
            self.fail(f"{self.names[self.process]} lost another process ({' '.join(str(error).split())}); {ADVICE}")

    def fail(self, message: str, lost: bool = True) -> None:
        """End this process with an error message; the others end with the same message at their next gather.

        Args:
            message: the sentence.
            lost: whether another process is lost; False: bad input, which has another exit code.
        """
        print(f"{PREFIX}{printable(message)}", flush=True, file=sys.stderr)
        if self.count > 1:
            with contextlib.suppress(RuntimeError):
                self._store.key_value_set(self._key(self.process, 1), json.dumps({"error": message, "lost": lost}))
            time.sleep(_GRACE if self.process == 0 else 0)
        os._exit(1 if lost else 2)  # an orderly exit would wait for the processes that are lost

    @contextlib.contextmanager
    def watch(self, me: str, other: str) -> Iterator[None]:
        """End this process with a message if the block, which waits in the runtime, fails or takes too long.

        The limit is shorter than that of processes that wait at the next gather, so that they get the true reason.

        Args:
            me: name of the host that waits.
            other: name of the host or of the work that it waits for.
        """
        limit = 0.8 * self.timeout
        late = f"{me} has waited {limit:g} s for {other}; {ADVICE}"
        timer = threading.Timer(limit, self.fail, (late,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the call decides which of the two it is
            if self.count == 1:
                raise
            self.fail(f"{me} lost {other} ({' '.join(str(error).split())}); {ADVICE}")
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def ends_together(self) -> Iterator[None]:
        """On bad input or a full disk, end this process at once with its message and exit code."""
        try:
            yield
        except Exception as error:
            found = told(error)
            if self.count == 1 or found is None:
                raise
            text, code = found
            print(f"{PREFIX}{printable(text)}", flush=True, file=sys.stderr)
            time.sleep(_GRACE if self.process == 0 else 0)
            os._exit(code)
