"""Fragments: every weight is in exactly one, and where a layer is does not depend on the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from paxtrain.config.axes import AXES
from paxtrain.outer.fragments import Fragments
from paxtrain.outer.trainer import GROUP, GroupedTrainer
from tests import small


def emulated(fragments, mesh=(2, 1, 1), layers=4, groups=2, **sections) -> GroupedTrainer:
    """Return the trainer of a configuration on one device, on which it compiles nothing."""
    changes = {
        "model": {"layers": layers, "vocab_multiple": 64},
        "outer": {"every": 5 * fragments, "groups": groups, "fragments": fragments},
        "run": {"steps": 50 * fragments},
    }
    c = small.config(mesh, (4 * mesh[0], 1), **(changes | sections))
    one = Mesh(np.array(jax.devices()[:1]).reshape((1,) * (1 + len(AXES))), (GROUP, *AXES))
    return GroupedTrainer(c.of_group(), one, groups=groups, virtual=True)


def covered(made, fragments):
    """Return how many of some fragments each weight is in, in the canonical layout."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), made.layout.shapes)
    total = zeros
    for fragment in fragments:
        ones = jax.tree.map(jnp.ones_like, made._part(zeros, fragment))
        total = jax.tree.map(jnp.add, total, made._replaced(zeros, ones, fragment))
    return jax.tree.leaves(made.layout.to_canonical(total))


INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}}


@pytest.mark.parametrize(
    ("fragments", "mesh", "layers", "sections"),
    [
        pytest.param(1, (2, 1, 1), 4, {}, marks=pytest.mark.slow),
        pytest.param(2, (2, 1, 1), 4, {}, marks=pytest.mark.slow),
        pytest.param(3, (4, 2, 2), 4, {}, marks=pytest.mark.slow),
        (2, (2, 2, 1), 3, {}),  # stages of two layers and of one
        pytest.param(4, (2, 4, 1), 4, {}, marks=pytest.mark.slow),
        pytest.param(3, (2, 2, 1), 4, INTERLEAVED, marks=pytest.mark.once),
        pytest.param(3, (2, 2, 1), 8, INTERLEAVED, marks=pytest.mark.slow),
    ],
)
def test_every_weight_is_in_exactly_one_fragment(fragments, mesh, layers, sections):
    made = emulated(fragments, mesh, layers, **sections)
    assert all((x == 1).all() for x in covered(made, range(fragments)))
    # Controls: a fragment that is left out, and one that is exchanged twice.
    assert any((x == 0).any() for x in covered(made, range(fragments - 1)))
    assert any((x == 2).any() for x in covered(made, [*range(fragments), fragments - 1]))


def test_what_is_put_is_what_was_taken():
    made = emulated(2, (2, 2, 1), 3)
    canonical = jax.tree.map(lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), made.layout.shapes)
    params = made.layout.from_canonical(made.layout.to_canonical(canonical))
    for fragment in (0, 1):
        again = made._replaced(params, made._part(params, fragment), fragment)
        jax.tree.map(np.testing.assert_array_equal, again, params)
    assert set(made._part(params, 0)) == {"layers", "embedding", "final_norm"} and set(made._part(params, 1)) == {
        "layers"
    }


def test_layers_stride_over_fragments_and_the_tables_are_in_the_first():
    assert Fragments(emulated(3, layers=7).layout).of_layer == (1, 2, 0, 1, 2, 0, 1)  # tables of a fifth of a layer
    assert Fragments(emulated(2, layers=2, mesh=(2, 2, 1)).layout).of_layer == (1, 0)
    made = emulated(3, model={"layers": 9, "vocab_size": 3 * 12 * 32})  # tables of three layers
    assert Fragments(made.layout).of_layer == (1, 2, 1, 2, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("sections", [{}, {"pipeline": {"pipe_layers": "3,1"}}])
def test_a_layer_is_in_the_same_fragment_on_every_mesh(sections):
    one, other = emulated(2), emulated(2, (2, 2, 1), **sections)
    assert Fragments(one.layout).of_layer == Fragments(other.layout).of_layer
    part = {}
    for made in (one, other):
        marked = jax.tree.map(lambda x: jnp.zeros(x.shape), made.layout.shapes)
        ones = jax.tree.map(jnp.ones_like, made._part(marked, 1))
        part[made] = made.layout.to_canonical(made._replaced(marked, ones, 1))
    jax.tree.map(np.testing.assert_array_equal, part[one], part[other])


def test_a_stage_sends_no_more_layers_than_the_one_with_the_most():
    made = emulated(2, (2, 2, 1), 3)
    assert [rows.tolist() for rows in Fragments(made.layout).slots] == [[[1], [2]], [[0], [0]]]  # slot 2: there is none
    kernels = [shape for path, shape in made.exchange.part_shapes(0).items() if path[-1] == "kernel"]
    assert kernels and all(shape[0] == 1 for shape in kernels)
    whole = dataclasses.replace(made, config=dataclasses.replace(made.config, outer=emulated(1).config.outer))
    assert sum(made.sent()) == pytest.approx(sum(whole.sent()))
