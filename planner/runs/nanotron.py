"""The split of layers over stages that nanotron makes.

nanotron walks over its blocks: the embedding, the layers, the last norm, the head, the cast of the logits and the loss.
It goes on to the next stage once the products so far are more than the stages' even share, of which it counts those of
layers and of the head. So the stages at the end have fewer layers, or none (nanotron/models/base.py, build_model, and
models/llama.py, get_block_compute_costs).
"""

from typing import NamedTuple


class StageBlocks(NamedTuple):
    """The blocks of each stage.

    Attributes:
        layers: layers of each stage.
        whole: the loss is on the last stage, without which a run fails when its losses are averaged.
    """

    layers: tuple[int, ...]
    whole: bool


def split(layers: int, hidden: int, ffn: int, vocab: int, pp: int) -> StageBlocks:
    """Return the stages of a Llama-shaped model.

    Args:
        layers: layers of the model.
        hidden: hidden size; heads of keys and values count as many as those of queries.
        ffn: size of the feed-forward part.
        vocab: size of the vocabulary.
        pp: number of stages.
    """
    layer, head = 4 * hidden**2 + 3 * hidden * ffn, vocab * hidden
    costs = [0, *[layer] * layers, 0, head, 0, 0]
    stages, done = [0], 0
    for cost in costs:
        done += cost
        stages.append(stages[-1] + (done * pp > sum(costs) * (stages[-1] + 1)))
    of_layers, of_loss, last = stages[1 : 1 + layers], stages[-2], stages[-1]
    return StageBlocks(tuple(of_layers.count(stage) for stage in range(pp)), of_loss == last)
