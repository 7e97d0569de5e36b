"""Layers per stage: the split whose slowest stage is the quickest, exactly."""

import functools

import numpy as np


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Return stages that are as equal as they get, the last ones shorter, as the trainer splits by itself."""
    return tuple(layers // stages + (i < layers % stages) for i in range(stages))


def split(layers: int, per_layer: np.ndarray, extra: np.ndarray, relative: np.ndarray | None = None) -> tuple[int, ...]:
    """Return the split into stages of one layer or more that minimizes the slowest stage's seconds, exactly.

    Of equally quick splits it is the one with the fewest layers on the fullest stage, whose memory all stages need, and
    then the most even one. Each virtual stage counts by itself.

    Args:
        layers: layers of the model.
        per_layer: [virtual stages] seconds of one layer on each.
        extra: [virtual stages] seconds of what else a stage runs: embedding, head.
        relative: [layers] seconds of each layer over those of the mean one; None: all are alike. Of equally quick
            splits it is one near the even one, if they are not.
    """
    if relative is not None:
        return _of_kinds(tuple(per_layer.tolist()), tuple(extra.tolist()), tuple(relative.tolist()))
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


@functools.lru_cache(maxsize=65536)
def _of_kinds(per_layer: tuple[float, ...], extra: tuple[float, ...], relative: tuple[float, ...]) -> tuple[int, ...]:
    layers, sums = len(relative), np.cumsum((0.0, *relative))
    own = np.where(np.tri(layers + 1, k=-1, dtype=bool).T, sums - sums[:, None], np.inf)  # of layers [from, to)
    seconds = [unit * own + fixed for unit, fixed in zip(per_layer, extra)]
    least = np.where(np.arange(layers + 1) == 0, 0.0, np.inf)  # of the slowest stage so far, by where it ends
    for of_stage in seconds:
        least = np.maximum(least[:, None], of_stage).min(axis=0)
    fits = [x <= least[-1] * (1 + 1e-12) for x in seconds]
    ends = [np.arange(layers + 1) == layers]  # where a stage may end so that those behind it fit
    for of_stage in reversed(fits[1:]):
        ends.insert(0, (of_stage & ends[0]).any(axis=1))
    cuts = [0]
    for n, (of_stage, end) in enumerate(zip(fits, ends), 1):
        some = np.flatnonzero(of_stage[cuts[-1]] & end)
        cuts.append(int(some[np.argmin(np.abs(some - n * layers / len(fits)))]))
    return tuple(np.diff(cuts).tolist())
