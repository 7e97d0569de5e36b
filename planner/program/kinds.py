"""The layers of a model whose layers are of several kinds: which are on a virtual stage, and the room for them."""

import collections
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.model import parameters
from paxtrain.schedule.layer_slots import shared_slots


@functools.lru_cache(maxsize=65536)
def rooms(model: ModelConfig, counts: tuple[int, ...]) -> Mapping[str, int]:
    """Return the number of layer slots of a chunk by the kind of their layers, in the same order for all splits.

    Args:
        model: model to train.
        counts: layers of each virtual stage.
    """
    kinds = parameters.kinds(model)
    layers = iter(kinds)
    slots = collections.Counter(shared_slots([tuple(itertools.islice(layers, count)) for count in counts]))
    return {kind: slots[kind] for kind in dict.fromkeys(kinds)}


def on_stages(of_layers: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the sums [virtual stages] of what layers have, [layers].

    Args:
        of_layers: a value of each layer.
        counts: layers of each virtual stage, one or more.
    """
    return np.add.reduceat(of_layers, np.cumsum((0, *counts[:-1])))
