"""A step after which all processes do something together, agreed on while they run.

One process asks. Each then says after which step it is, and takes no further one before all have said so: that step
comes after the last of these. Threads do this, so it costs a step nothing, and processes that do not wait for each
other in every step may take part. It is the rule by which jax agrees on a stop (stopping.py), for which it has no
public name except for signals.
"""

import threading
from collections import Counter
from typing import Self

import jax

from paxtrain.process import jax_private

_PATIENCE = 3_600_000  # milliseconds until a thread asks again
_ALL = 60_000  # milliseconds for which all may be waited for
_ASK, _END = "ask", "end"
_used: Counter[str] = Counter()  # a key can be used once


class Appointment:
    """A context manager, inside of which all processes take the same numbered steps."""

    def __init__(self, what: str) -> None:
        """Prepare.

        Args:
            what: What is done together, as a part of keys.
        """
        _used[what] += 1
        self._keys = f"paxtrain/{what}/{_used[what]}"
        self._lock = threading.Lock()
        self._turn, self._step = 0, 0
        self._agreed: set[int] = set()  # steps to come; a process that lags behind may have several
        self._asked = False  # by this process, for the present turn

    def ask(self) -> None:
        """Ask for an appointment; while one is open nothing happens. One process alone asks."""
        if self._asked or self._step < max(self._agreed, default=-1):
            return
        self._asked = True
        client = jax_private.coordination_client() if jax.process_count() > 1 else None
        if client is None:
            self._asked, self._agreed = False, {self._step + 1}
        else:
            client.key_value_set(f"{self._keys}/{self._turn}", _ASK)

    def now(self, step: int) -> bool:
        """Return whether all processes meet after this step.

        Args:
            step: Number of the step just done. It grows by 1 from call to call.
        """
        with self._lock:
            self._step = step
            met = step in self._agreed
            self._agreed = {one for one in self._agreed if one > step}
            return met

    def _listen(self, client: jax_private.CoordinationClient) -> None:
        while True:
            try:
                word = client.blocking_key_value_get(f"{self._keys}/{self._turn}", _PATIENCE)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                return  # the coordination service has ended, and with it this process will
            if word == _END:
                return
            with self._lock:
                try:
                    self._agree(client)
                except RuntimeError:  # a process is lost, or has left: no one meets any more
                    return

    def _agree(self, client: jax_private.CoordinationClient) -> None:
        here = f"{self._keys}/{self._turn}/step"
        client.key_value_set(f"{here}/{jax.process_index()}", str(self._step))
        client.wait_at_barrier(f"{here}s", _ALL)
        steps = [int(value) for _, value in client.key_value_dir_get(f"{here}/")]
        self._agreed.add(max(steps) + 1)
        self._turn, self._asked = self._turn + 1, False

    def __enter__(self) -> Self:
        client = jax_private.coordination_client() if jax.process_count() > 1 else None
        if client is not None:
            threading.Thread(target=self._listen, args=(client,), name=self._keys, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Let no more be agreed on. The threads of other processes answer until process 0 leaves, too."""
        client = jax_private.coordination_client() if jax.process_count() > 1 else None
        if client is not None and jax.process_index() == 0 and exception[0] is None:
            with self._lock:
                turn = self._turn + self._asked
            client.key_value_set(f"{self._keys}/{turn}", _END)
