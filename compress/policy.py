"""What to compress, from when on and to which rank: plain Python on measured or predicted seconds, bytes and residuals.

Nothing here touches arrays of the model; a planner and a trainer ask the same questions of it.
"""

import dataclasses
import math
from collections.abc import Sequence


def compression_ratio(n: int, k: int, rank: int, dense_bytes: float = 4, factor_bytes: float = 4) -> float:
    """How many times fewer bytes the factors [n, rank] and [k, rank] are than the dense [n, k] matrix.

    Args:
        dense_bytes, factor_bytes: bytes of one element of the matrix and of its factors on the wire.
    """
    return n * k * dense_bytes / (rank * (n + k) * factor_bytes)


def largest_rank(n: int, k: int, min_ratio: float = 2.0, dense_bytes: float = 4, factor_bytes: float = 4) -> int:
    """The largest rank at which compressing an [n, k] matrix still saves a factor of `min_ratio`; 0 if none does.

    Never above min(n, k), where the factors can express every matrix.
    """
    return min(n, k, math.floor(compression_ratio(n, k, 1, dense_bytes, factor_bytes) / min_ratio))


def selective(finish: Sequence[float], dense: Sequence[float], compressed: Sequence[float]) -> tuple[int, ...]:
    """The fewest stages to compress so that the last data-parallel reduction ends as early as it can.

    Stage s reduces from T_s on for C_s seconds, or K_s if compressed; the step waits for the last one. No choice ends
    before L = max_s (T_s + min(C_s, K_s)). A stage with T_s + C_s > L has to be compressed to end by L, and will; any
    other ends by L as it is. So the choice attains L, and every choice that does contains it.

    Optimus-CC's rule, T_0 - T_s < C_s - K_0, takes L = T_0 + K_0: the same wherever the first stage, compressed, is
    the last to end, as with even stages it is. Elsewhere that rule may compress more than it has to (an even later
    stage hides it) or less (K_0 > C_0).

    Optimal if reductions do not wait for each other. Where stages share a link C and K depend on the choice itself:
    then measure them with all stages reducing at once.

    Args:
        finish: T, seconds at which each stage's last backward ends.
        dense: C, seconds of each stage's reduction as it is.
        compressed: K, seconds of the same compressed, compressing and decompressing included.

    References:
        Optimus-CC (Song et al. 2023), selective stage compression.
    """
    end = max(t + min(c, k) for t, c, k in zip(finish, dense, compressed, strict=True))
    return tuple(s for s, (t, c) in enumerate(zip(finish, dense)) if t + c > end)


@dataclasses.dataclass(frozen=True)
class AdaptiveRank:
    """Follows the spectrum of each stage's gradients: doubles a rank that leaves too much, halves one that is ample.

    Between the two thresholds nothing changes, so where a spectrum falls off evenly a rank in between stays. That does
    not help where it breaks off: of 15 equal singular values rank 8 leaves 68%, and 16 nothing. A rule that knows the
    present alone must oscillate there; one that also knows where doubling has led, the `floors`, comes to rest on every
    constant spectrum.

    Attributes:
        minimum, maximum: bounds of the rank.
        low, high: relative residuals |M - Mhat| / |M| below which a rank is halved and above which it is doubled.

    Raises:
        ValueError: bounds or thresholds are not in order.

    References:
        EDGC adapts rank by stage and over time in this way, from the entropy of the gradients; the residual comes with
        the compression.
    """

    minimum: int
    maximum: int
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.maximum:
            raise ValueError(f"ranks must satisfy 0 < minimum <= maximum, not {self.minimum} and {self.maximum}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"residuals must satisfy 0 <= low < high, not {self.low} and {self.high}")

    def next(
        self, ranks: Sequence[int], residuals: Sequence[float], floors: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """The ranks to go on with.

        Args:
            ranks: of each stage; 0, a stage that is not compressed, stays 0.
            residuals: relative residuals that they left, one per stage; nan (of no gradient at all) changes nothing.
            floors: per stage the highest rank that doubling has led to in the past, 0 if none; it is not gone below.
        """
        floors = floors or (0,) * len(ranks)
        return tuple(self._next(*stage) for stage in zip(ranks, residuals, floors, strict=True))

    def _next(self, rank: int, residual: float, floor: int) -> int:
        half = max(rank // 2, self.minimum)
        if rank and residual > self.high:
            return min(2 * rank, self.maximum)
        if rank and residual < self.low and half >= floor:
            return half
        return rank


def start_step(fraction: float, steps: int) -> int:
    """The first step, counted from 0, that compresses if all before it, a fraction of `steps`, are to stay dense.

    Raises:
        ValueError: the fraction is not in [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"the dense fraction of training must be in [0, 1], not {fraction}")
    return round(fraction * steps)


def epilogue_sends(stages: int, stage: int, micro_batches: int) -> int:
    """How many gradients, its last, a stage sends in the drain phase of a pipeline, where nothing hides their transfer.

    min(P - stage, m) for the senders 1 to P - 1; the first stage sends none.
    """
    return min(stages - stage, micro_batches) if stage else 0
