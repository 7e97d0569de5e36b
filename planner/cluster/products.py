"""Seconds of a matrix product on a device, as a function of its shape: a roofline with tiles and waves of tiles.

The result of [M, K] times [K, N] is computed in tiles, one at a time on each multiprocessor. Tiles at its edge cost as
much as whole ones, and the last wave of tiles costs as much as a full one. A wave besides takes the time to fill its
pipeline and to write its tiles, so products with a small K are slower for their operations. A product with fewer tiles
than multiprocessors is split along K. Whatever the tiles, operands and result travel through memory once.

References:
    Tiles and waves: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), chapters 2 and 3. Their
    effect on transformers: Anthony et al. 2024, The Case for Co-Designing Model Architectures with Hardware.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Rows and columns of a tile, and its speed for its operations: a smaller tile reads its operands more often.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 64, 0.75))
_SPLITS = (1, 2, 4, 8)  # parts of K that are computed side by side
WAVE = 3e-6  # seconds of a wave besides its operations
# Operations over time at an unknown number of multiprocessors, as share of what the largest products reach: that of
# the layers of GPT-3 175B on 8 tensor ranks and an A100.
UNKNOWN_SHAPES = 0.88


@dataclasses.dataclass(frozen=True)
class ProductRates:
    """Rates at which a device computes matrix products; FLOP/s and memory may be arrays of many settings.

    Attributes:
        flops: FLOP/s that the largest products reach.
        memory: bytes per second of memory that they reach.
        sms: number of multiprocessors; 0: not known, and products of all shapes are equally quick.
        item: bytes of an element.
    """

    flops: float
    memory: float
    sms: int
    item: int

    @functools.cached_property
    def _different(self) -> tuple[list["ProductRates"], np.ndarray]:
        rates, which = np.unique(np.stack([self.flops, self.memory]), axis=1, return_inverse=True)
        return [dataclasses.replace(self, flops=f, memory=m) for f, m in rates.T.tolist()], which.reshape(-1)

    def each(self, seconds: Callable[["ProductRates"], float]) -> Any:
        """Return what a function of rates says of these; of arrays an array, each different rates being asked once."""
        if not isinstance(self.flops, np.ndarray):
            return seconds(self)
        different, which = self._different
        return np.array([seconds(one) for one in different])[which]

    def seconds(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Return the seconds of `batch` products of [M, K] and [K, N].

        Args:
            m: M.
            n: N.
            k: K.
            batch: number of independent products that one kernel computes.
        """
        traffic = batch * self.item * (m * k + k * n + m * n) / self.memory
        if not self.sms:
            return max(2.0 * batch * m * n * k / self.flops, traffic)
        least = math.inf
        for rows, columns, speed in _TILES:
            tiles = batch * -(-m // rows) * -(-n // columns)
            tile = 2.0 * rows * columns * k * self.sms / (self.flops * speed)
            for split in _SPLITS if tiles < self.sms else _SPLITS[:1]:
                least = min(least, -(-tiles * split // self.sms) * (tile / split + WAVE))
        return max(least, traffic)
