"""The policy of compression: what to compress, when to start, and to which rank.

The functions are plain Python on measured or predicted seconds, bytes and residuals, without arrays. The trainer and
the planner both use them.
"""

import dataclasses
import math
from collections.abc import Sequence

# Reads and writes of the whole message or gradient by low rank: to encode, to decode, and kernels of either. They are
# here since the planner takes them for many ranks, without jax. `LowRank` by the treatment of its errors:
#     none      project and back-project read the message
#     lazy      project reads the message and the one before, and writes their sum, which back-project reads
#     explicit  project reads the message and the error, and writes their sum, which back-project reads; the new error
#               reads it again and is written
# PowerSGD adds the error and projects (3) and back-projects (1); then it reads the sum and writes what is left out, and
# decodes.
LOW_RANK_PASSES = {"none": (2, 1, 8), "lazy": (4, 1, 8), "explicit": (6, 1, 8)}
POWER_SGD_PASSES = 4, 3, 6


def compression_ratio(n: int, k: int, rank: int, dense_bytes: float = 4, factor_bytes: float = 4) -> float:
    """Return the bytes of a matrix [n, k] over those of its factors [n, rank] and [k, rank].

    Args:
        n: rows of the matrix.
        k: columns of the matrix.
        rank: columns of the factors.
        dense_bytes: bytes of an element of the matrix on the wire.
        factor_bytes: bytes of an element of the factors on the wire.
    """
    return n * k * dense_bytes / (rank * (n + k) * factor_bytes)


def largest_rank(n: int, k: int, min_ratio: float = 2.0, dense_bytes: float = 4, factor_bytes: float = 4) -> int:
    """Return the largest rank whose factors are `min_ratio` times smaller than the [n, k] matrix; 0 if there is none.

    The result is at most min(n, k), at which the factors can express every matrix.

    Args:
        n: rows of the matrix.
        k: columns of the matrix.
        min_ratio: required ratio of bytes, matrix over factors; 0 asks for no saving at all.
        dense_bytes: bytes of an element of the matrix on the wire.
        factor_bytes: bytes of an element of the factors on the wire.
    """
    return min(n, k, math.floor(compression_ratio(n, k, 1, dense_bytes, factor_bytes) / max(min_ratio, 1e-9)))


def too_large(setting: str, what: str, largest: int, min_ratio: float) -> str:
    """Return a sentence about a rank that saves too little.

    Args:
        setting: name and value of the rank, such as "rank=17".
        what: clause that names the matrix for which the rank is too large.
        largest: largest useful rank; 0 if no rank is useful.
        min_ratio: factor by which compression must make a matrix smaller.
    """
    would = f"the largest useful rank is {largest}" if largest else "no rank would"
    return f"{setting} does not make anything {min_ratio:g} times smaller (compress.min_ratio): {what}; {would}"


def selective(finish: Sequence[float], dense: Sequence[float], compressed: Sequence[float]) -> tuple[int, ...]:
    """Return the fewest stages to compress so that the last data-parallel reduction ends as early as possible.

    Stage s reduces from T_s on for C_s seconds, or for K_s seconds if it is compressed. The step waits for the last
    stage. No choice ends before L = max_s (T_s + min(C_s, K_s)). A stage with T_s + C_s > L must be compressed to end
    by L, and then does. Any other stage ends by L uncompressed. So this choice attains L, and every choice that attains
    L contains it.

    Optimus-CC's rule, T_0 - T_s < C_s - K_0, takes L = T_0 + K_0. The two agree if the compressed first stage ends
    last, as it does with even stages. Otherwise that rule may compress more than necessary (if another stage ends even
    later) or less (if K_0 > C_0).

    The choice is optimal if reductions do not wait for each other. If stages share a link, C and K depend on the
    choice itself. Measure them then with all stages reducing at once.

    Args:
        finish: T, seconds at which each stage's last backward ends.
        dense: C, seconds of each stage's dense reduction.
        compressed: K, seconds of each stage's compressed reduction, with compression and decompression.

    Returns:
        The stages to compress, ascending.

    References:
        Song et al. 2023, Optimus-CC, selective stage compression.
    """
    end = max(t + min(c, k) for t, c, k in zip(finish, dense, compressed, strict=True))
    return tuple(s for s, (t, c) in enumerate(zip(finish, dense)) if t + c > end)


@dataclasses.dataclass(frozen=True)
class AdaptiveRank:
    """Rule that doubles a stage's rank if it leaves too much of the gradients, and halves a rank that is ample.

    Between the two thresholds nothing changes, so if a spectrum falls off evenly, a rank in between stays. That does
    not help if the spectrum breaks off: of 15 equal singular values rank 8 leaves 68%, and rank 16 nothing. A rule that
    knows only the present must oscillate there. This rule also knows the `floors`, the ranks that doubling has led to,
    so it comes to rest on every constant spectrum.

    Attributes:
        minimum: lowest rank.
        maximum: highest rank.
        low: relative residual |M - Mhat| / |M| below which a rank is halved.
        high: relative residual above which a rank is doubled.

    Raises:
        ValueError: bounds or thresholds are not in order.

    References:
        EDGC adapts ranks by stage and over time in this way, from the entropy of the gradients. The residual costs
        nothing, because the compression computes it anyway.
    """

    minimum: int
    maximum: int
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.maximum:
            raise ValueError(f"ranks must satisfy 0 < minimum <= maximum, got {self.minimum} and {self.maximum}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"residuals must satisfy 0 <= low < high, got {self.low} and {self.high}")

    def next(
        self, ranks: Sequence[int], residuals: Sequence[float], floors: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the next rank of each stage.

        Args:
            ranks: present rank of each stage; 0 stands for a stage that is not compressed, and stays 0.
            residuals: relative residual that each rank left; nan (of a gradient of zero) changes nothing.
            floors: highest rank of each stage that doubling has led to in the past, 0 if none; no rank goes below it.
        """
        floors = floors or (0,) * len(ranks)
        return tuple(self._next(*stage) for stage in zip(ranks, residuals, floors, strict=True))

    def _next(self, rank: int, residual: float, floor: int) -> int:
        """Return the next rank of one stage."""
        half = max(rank // 2, self.minimum)
        if rank and residual > self.high:
            return min(2 * rank, self.maximum)
        if rank and residual < self.low and half >= floor:
            return half
        return rank


def start_step(fraction: float, steps: int) -> int:
    """Return the first step that compresses, counted from 0.

    Args:
        fraction: fraction of the steps that stay dense.
        steps: steps of the run.

    Raises:
        ValueError: the fraction is not in [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"the dense fraction of training must be in [0, 1], got {fraction}")
    return round(fraction * steps)


def epilogue_sends(stages: int, stage: int, micro_batches: int) -> int:
    """Return the number of gradients that a stage sends in a pipeline's drain phase, in which nothing hides a transfer.

    They are the stage's last ones: min(P - stage, m) for the stages 1 to P - 1, and none for the first stage.

    Args:
        stages: number of stages P.
        stage: number of the sending stage.
        micro_batches: number of micro-batches m.
    """
    return min(stages - stage, micro_batches) if stage else 0
