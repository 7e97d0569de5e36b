"""The cost of authentication for a message between supervisors: an HMAC at each end."""

import secrets
import statistics
import time
from collections.abc import Callable

from paxtrain.process import sealed
from paxtrain.process.sealed import Seal
from paxtrain.tables import table

SIZES = {"a step's report": 200, "a fault's report": 4_000, "the longest": 1_000_000}  # characters
_SAMPLES, _LEAST = 7, 0.05  # seconds of each sample


def _seconds(call: Callable[[], object]) -> float:
    """Return the median processor time of a call, in seconds."""
    count, taken = 1, 0.0
    while taken < _LEAST:
        count *= 2
        began = time.process_time()
        for _ in range(count):
            call()
        taken = time.process_time() - began
    samples = []
    for _ in range(_SAMPLES):
        began = time.process_time()
        for _ in range(count):
            call()
        samples.append((time.process_time() - began) / count)
    return statistics.median(samples)


def _ends() -> tuple[Seal, Seal]:
    """Return both ends of a connection."""
    secret, *numbers = (secrets.token_bytes(32) for _ in range(3))
    dialled, other = (Seal(secret, numbers[0], numbers[1], dialled=dialled) for dialled in (True, False))
    return dialled, other


def messages() -> None:
    """Print the processor time of a message at both ends together, with its seal and without."""
    rows = []
    for name, size in SIZES.items():
        message = {"entry": "x" * size}
        here, there = _ends()
        there.open(*_split(here.seal(b"first")))  # later messages may be longer

        def plain(message: dict[str, str] = message) -> None:
            sealed.decode(sealed.encode(message))

        def whole(message: dict[str, str] = message, here: Seal = here, there: Seal = there) -> None:
            sealed.decode(there.open(*_split(here.seal(sealed.encode(message)))))

        without, with_seal = _seconds(plain), _seconds(whole)
        text = f"{1e6 * with_seal:.1f} us sealed, {1e6 * without:.1f} us as JSON alone"
        rows.append((f"{name}, {len(sealed.encode(message)):,} bytes", text))
    print(table(rows))


def _split(sent: bytes) -> tuple[bytes, bytes]:
    return sent[: sealed.HEAD], sent[sealed.HEAD :]
