"""Layers per stage: the split whose slowest stage is the quickest, by dynamic programming."""

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
    counts = np.arange(1, most + 1)
    # best[n]: the least possible maximum with n layers on the stages so far.
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    for unit, fixed in zip(per_layer, extra):
        after = np.full_like(best, np.inf)
        for n, seconds in enumerate((unit * counts + fixed).tolist(), 1):
            np.minimum(after[n:], np.maximum(best[:-n], seconds), out=after[n:])
        best = after
    limit = best[layers] * (1 + 1e-12)
    # Of the splits within that limit, those whose fullest stage is least full, then the most even one.
    fits = [np.searchsorted(unit * counts + fixed, limit, side="right") for unit, fixed in zip(per_layer, extra)]
    cap = next(c for c in range(-(-layers // stages), most + 1) if sum(min(f, c) for f in fits) >= layers)
    result = [1] * stages
    room = [min(f, cap) for f in fits]
    for _ in range(layers - stages):
        # The next layer goes where there is room and the fewest layers are.
        result[min((s for s in range(stages) if result[s] < room[s]), key=lambda s: (result[s], s))] += 1
    return tuple(result)
