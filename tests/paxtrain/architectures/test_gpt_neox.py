"""GPT-NeoX beside what transformers computes: tests/paxtrain/huggingface; here what a trainer and a planner need."""

import dataclasses

import jax
import pytest

from paxtrain.config import ModelConfig
from paxtrain.config.axes import layer_sizes
from paxtrain.errors import UserError
from paxtrain.model import parameters, transformer
from paxtrain.testing import check_model
from planner.program.cache import layer_program

SMALL = ModelConfig(
    family="gpt_neox",
    layers=4,
    hidden=32,
    heads=4,
    sequence=16,
    vocab_size=61,
    vocab_multiple=64,
    tied_head=False,
)


def test_pythia_has_as_many_parameters_as_its_authors_say():
    """Biderman et al. 2023, table 1: 18,915,328 and 85,056,000 besides the tables of 50,304 rows."""
    for layers, hidden, heads, others in ((6, 512, 8, 18_915_328), (12, 768, 12, 85_056_000)):
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab_size": 50_304, "sequence": 2048}
        model = dataclasses.replace(SMALL, **sizes, vocab_multiple=64)
        assert sum(x.size for x in jax.tree.leaves(transformer.shapes(model))) == others + 2 * 50_304 * hidden
        assert parameters.published(model) == others + 2 * 50_304 * hidden


@pytest.mark.once
def test_it_has_what_the_trainer_needs_of_a_model():
    assert len(check_model(SMALL, schedules=("zb_h1",))) > 4


def test_the_planner_knows_all_that_its_layer_does():
    program = layer_program(dataclasses.replace(SMALL, dtype="bfloat16"), layer_sizes({"tensor": 2}), False, "dots")
    assert program.forward.unknown == program.backward.unknown == ()
    heads, dim, hidden, wide = 4, 8, 32, 128
    found = sum(one.m * one.n * one.k * one.times for one in program.forward.products)  # of a sequence, tensor=2
    assert found == SMALL.sequence * (4 * hidden * heads * dim + 2 * hidden * wide) // 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_heads": 2}, "model.kv_heads=0 would fit"),
        ({"heads": 8}, "1 of the 4 of a head turn; model.head_size=8 would"),
    ],
)
def test_what_it_cannot_be_is_a_sentence(change, words):
    with pytest.raises(UserError, match=words):
        parameters.table(dataclasses.replace(SMALL, **change))
