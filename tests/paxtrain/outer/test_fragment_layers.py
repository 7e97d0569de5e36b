"""What the configuration alone says of fragments, beside the arrays that the trainer exchanges."""

import math

import jax
import pytest

from paxtrain.model import transformer
from paxtrain.model.fragments import fragment_layers, layer_fragments
from tests.paxtrain.outer.test_fragments import INTERLEAVED, emulated


@pytest.mark.parametrize(
    ("fragments", "mesh", "layers", "sections"),
    [
        (1, (2, 2, 1), 3, {}),  # a slot without a layer travels, too
        (1, (2, 2, 1), 8, INTERLEAVED),
        (2, (2, 1, 1), 4, {}),
        (2, (2, 2, 1), 3, {}),
        (2, (2, 2, 1), 4, {"pipeline": {"pipe_layers": "3,1"}}),
        (3, (4, 2, 2), 7, {}),
        (4, (2, 4, 1), 4, {}),
        (3, (2, 2, 1), 8, INTERLEAVED),
    ],
)
def test_stages_send_the_layers_of_the_arrays_that_they_exchange(fragments, mesh, layers, sections):
    made = emulated(fragments, mesh, layers, **sections)
    parts = [made.exchange.part_shapes(fragment) for fragment in range(fragments)]
    sent = [{shape[0] for path, shape in part.items() if path[0] == "layers"} or {0} for part in parts]
    c = made.config
    of_stages = fragment_layers(c.model, c.outer.fragments, c.stage_layers, c.stage_map.stage_of)
    assert [{n} for n in of_stages] == sent


@pytest.mark.parametrize("family", [{}, {"family": "llama", "kv_heads": 2}, {"family": "llama", "tied_head": False}])
@pytest.mark.parametrize("vocabulary", [1, 61, 640, 4096])
def test_no_layer_could_go_to_a_fragment_with_fewer_weights(family, vocabulary):
    """Weights are counted from the arrays, with the rows that pad the vocabulary."""
    config = emulated(3, model={"layers": 11, **family, "vocab_size": vocabulary, "vocab_multiple": 64}).config
    model = config.model
    sizes = {
        name: sum(math.prod(x.shape) for x in jax.tree.leaves(tree)) for name, tree in transformer.shapes(model).items()
    }
    layer = sizes.pop("layers") / model.layers
    weights = [float(sum(sizes.values())), 0.0, 0.0]
    for fragment in layer_fragments(model, 3):
        assert weights[fragment] == min(weights)
        weights[fragment] += layer
