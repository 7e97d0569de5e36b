"""The fragments in which groups that train apart exchange the layers of a model (outer.fragments)."""

import collections
import functools

from paxtrain.config import ModelConfig
from paxtrain.model import parameters


@functools.lru_cache(maxsize=64)
def layer_fragments(model: ModelConfig, fragments: int) -> tuple[int, ...]:
    """Return the fragment that groups exchange each layer in, in model order.

    The tables and the last norm are in fragment 0. Each layer goes to the fragment that has the fewest weights so
    far, the first of several. The vocabulary's padding counts, since it travels, too.

    Args:
        model: model whose weights are exchanged.
        fragments: number of fragments.
    """
    found = list[int]()
    layers = [parameters.count(model, kind=kind) for kind in parameters.kinds(model)]
    weights = [parameters.whole(model) - sum(layers), *[0] * (fragments - 1)]
    for layer in layers:
        found.append(weights.index(min(weights)))
        weights[found[-1]] += layer
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def fragment_layers(
    model: ModelConfig, fragments: int, counts: tuple[int, ...], stage_of: tuple[int, ...]
) -> tuple[int, ...]:
    """Return how many layers every stage sends of each fragment: as many as the stage that has the most of it.

    A single fragment has all layer slots of a stage, also those without a layer.

    Args:
        model: model whose weights are exchanged.
        fragments: number of fragments.
        counts: layers of each virtual stage.
        stage_of: stage of each virtual stage; all have as many.
    """
    stages = max(stage_of) + 1
    if fragments == 1:
        return (max(counts) * (len(counts) // stages),)
    of_layers = [stage for stage, count in zip(stage_of, counts) for _ in range(count)]
    held = collections.Counter(zip(of_layers, layer_fragments(model, fragments)))
    return tuple(max(held[stage, p] for stage in range(stages)) for p in range(fragments))
