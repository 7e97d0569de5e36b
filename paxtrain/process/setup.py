"""Settings of the whole process, which mains make and imports never do."""

import contextlib
import gc
import logging
import os
import sys
import traceback
from collections.abc import Iterator


def use_one_blas_thread() -> None:
    """Make LAPACK compute on one thread, unless the environment says otherwise.

    Virtual CPU devices call LAPACK at the same time. With several threads in each call, a step that compresses over
    data took 3 to 30 times as long on two cores. LAPACK reads the variable when it is loaded, at its first use.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def collect_seldom() -> None:
    """Look for garbage in cycles once in 50,000 new objects, not in 700.

    A search for a plan keeps all that it makes, and makes no cycles: looking took an eighth of its time.
    """
    gc.freeze()
    gc.set_threshold(50_000)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hide the messages of orbax and tensorstore while the block runs; their exceptions stay.

    Orbax narrates every save in some thirty lines, in the logger that this program also uses. When one read of a
    damaged checkpoint fails, it closes its event loop under the reads still in flight. Each of them then complains at a
    place where no caller can catch it, at once or at a later garbage collection.
    """
    say = sys.unraisablehook

    def unraisable(event: "sys.UnraisableHookArgs") -> None:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(event.exc_traceback)]
        if str(event.exc_value) != "Event loop is closed" and not any("/orbax/" in file for file in files):
            say(event)

    def is_ours(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or "/orbax/" not in record.pathname

    def is_not_tensorstore(record: logging.LogRecord) -> bool:
        return "tensorstore" not in record.getMessage()

    filters = {"absl": is_ours, "asyncio": is_not_tensorstore}
    sys.unraisablehook = unraisable
    for name, keep in filters.items():
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = say
        for name, keep in filters.items():
            logging.getLogger(name).removeFilter(keep)
