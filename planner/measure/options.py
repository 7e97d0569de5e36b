"""The options of a profile."""

import dataclasses

from paxtrain.knobs import knob

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile: the links and the compute to measure, and the time that it may take.

    Attributes:
        sizes: bytes of the large messages; empty: as large as the links can send in the time.
        repeats: samples of every link and of every compute time.
        rounds: largest number of rounds of host pairs per repeat. If there are more, a random sample is measured.
        micro_batches: sequences per micro-batch whose compute is measured; empty: no compute is measured.
        tensor: sizes of the tensor axis whose compute is measured; empty: all that divide host and model.
        time_limit: seconds after which to keep what was measured, and end; default: no limit.
        least: number of compute sizes that are measured even if the time is up.
        compute_hosts: hosts of each device kind on which compute is measured; 0: all.
    """

    sizes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB)
    repeats: int = knob(5, least=1, most=10_000)
    rounds: int = knob(63, least=1, most=1_000_000)
    micro_batches: tuple[int, ...] = (1, 2, 4)
    tensor: tuple[int, ...] = knob(())
    time_limit: float | None = knob(None, least=1)
    least: int = 0
    compute_hosts: int = 0
