"""The options of a profile."""

import dataclasses

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile: the links and the compute to measure, and the time that it may take.

    Attributes:
        sizes: bytes of the large messages; empty: as large as the links can send in the time.
        repeats: samples of every link and of every compute time.
        rounds: largest number of rounds of host pairs per repeat. If there are more, a random sample is measured.
        micro_batches: sequences per micro-batch whose compute is measured; empty: no compute is measured.
        tensor: tensor-parallel sizes whose compute is measured; empty: all that divide a host's devices and the model.
        time_limit: seconds for the whole profile; None: no limit.
        least: number of compute sizes that are measured even if the time is up.
        compute_hosts: hosts of each device kind on which compute is measured; 0: all.
        all_reduces: whether all-reduces are timed and compared with the times that the links predict.
    """

    sizes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB)
    repeats: int = 5
    rounds: int = 63
    micro_batches: tuple[int, ...] = (1, 2, 4)
    tensor: tuple[int, ...] = ()
    time_limit: float | None = None
    least: int = 0
    compute_hosts: int = 0
    all_reduces: bool = True
