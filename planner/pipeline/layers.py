"""Layers per stage: the split whose slowest stage is the quickest, exactly."""

import functools

import numpy as np


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Return stages that are as equal as they get, the last ones shorter, as the trainer splits by itself."""
    return tuple(layers // stages + (i < layers % stages) for i in range(stages))


def split(layers: int, per_layer: np.ndarray, extra: np.ndarray) -> tuple[int, ...]:
    """Return the split into stages of one layer or more that minimizes the slowest stage's seconds, exactly.

    Of equally quick splits it is the one with the fewest layers on the fullest stage, whose memory all stages need, and
    then the most even one. Each virtual stage counts by itself.

    Args:
        layers: layers of the model.
        per_layer: [virtual stages] seconds of one layer on each.
        extra: [virtual stages] seconds of what else a stage runs: embedding, head.
    """
    return _split(layers, tuple(per_layer.tolist()), tuple(extra.tolist()))


@functools.lru_cache(maxsize=65536)
def _split(layers: int, per_layer: tuple[float, ...], extra: tuple[float, ...]) -> tuple[int, ...]:
    stages = len(per_layer)
    if stages == 1:
        return (layers,)
    most = layers - stages + 1
    unit, fixed = np.array(per_layer), np.array(extra)
    seconds = unit[:, None] * np.arange(1, most + 1) + fixed[:, None]  # [stages, layers of a stage]
    # The least maximum is one of these: the first within which all layers fit.
    values = np.unique(seconds[seconds >= seconds[:, 0].max()])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if (seconds <= values[middle]).sum() >= layers:
            high = middle
        else:
            low = middle + 1
    limit = values[low] * (1 + 1e-12)
    # Of the splits within that limit, those whose fullest stage is least full, then the most even one.
    fits = (seconds <= limit).sum(axis=1)
    cap = next(c for c in range(-(-layers // stages), most + 1) if np.minimum(fits, c).sum() >= layers)
    # As in vessels that are filled together: no stage gets a layer more before the others have as many or are full.
    level = next(c for c in range(cap, 0, -1) if np.minimum(fits, c).sum() <= layers)
    result = np.minimum(fits, level)
    result[np.flatnonzero(fits > level)[: layers - result.sum()]] += 1
    return tuple(result.tolist())
