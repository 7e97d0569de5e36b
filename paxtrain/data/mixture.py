"""Weighted mixtures: the data set that each sample comes from, and its number within that data set.

Sample n depends on n and the weights alone, so a run needs no state but its count of samples, on any mesh. The rule is
the quota method of apportionment: of the data sets that are below their share of the first n + 1 samples, the one with
the largest weight / (samples so far + 1) gives sample n. After any number n of samples a data set of share w has given
w n, rounded down or up. (Random draws stray from w n by about sqrt(n) and leave a small set out of most batches.
Taking each sample from the set with the largest deficit, as Megatron-LM does, strays by up to 1.6 samples in trials
with ten sets.)

References:
    Balinski and Young 1975, "The quota method of apportionment", American Mathematical Monthly 82.
"""

from collections.abc import Sequence


class Mixture:
    """The samples of a mixture of data sets, numbered from 0 without end."""

    def __init__(self, weights: Sequence[int]) -> None:
        """Compute the pattern of a period.

        Args:
            weights: integer weight of each data set. After as many samples as their sum, shares are exact and the
                pattern repeats.
        """
        self._weights, self._period = tuple(weights), sum(weights)
        self._pattern: list[tuple[int, int]] = []
        given = [0] * len(weights)
        for n in range(1, self._period + 1):
            below = [i for i, weight in enumerate(weights) if given[i] * self._period < weight * n]
            # Quotients of integers this small are equal as floats only if they are equal.
            chosen = max(below, key=lambda i: weights[i] / (given[i] + 1))
            self._pattern.append((chosen, given[chosen]))
            given[chosen] += 1

    def __call__(self, sample: int) -> tuple[int, int]:
        """Return the index of the data set that a sample comes from, and the sample's number within it."""
        periods, place = divmod(sample, self._period)
        chosen, number = self._pattern[place]
        return chosen, periods * self._weights[chosen] + number
