"""An architecture that is only named as package.module:Class trains on any mesh: all else reads its table."""

import functools

import jax
import numpy as np
import pytest

from paxtrain.config import from_dict
from paxtrain.errors import UserError
from paxtrain.huggingface import architectures
from paxtrain.model import parameters, transformer
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.optimizer import decay_mask
from paxtrain.parallel.step import Trainer
from paxtrain.run import metrics, sampling
from planner.planning.inputs import sections

BLOCK = "tests.paxtrain.model.parallel_block:"
SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "sequence": 16, "vocab_size": 61}


def config(module="ParallelBlock", mesh=None, **pipeline):
    return from_dict(
        {
            "model": {**SHAPE, "dtype": "float32", "vocab_multiple": 64, "module": BLOCK + module},
            "mesh": mesh or {},
            "batch": {"global_batch": 8, "micro_batch": 1},
            "pipeline": pipeline,
        }
    )


def test_its_parameters_are_those_of_its_table():
    model = config().model
    layer = 32 + 32 * 32 + 32 * 2 * 16 + 32 * 48 + 32 * 32 + 48 * 32
    assert parameters.published(model) == 4 * layer + 61 * 32 + 32
    assert sum(x.size for x in jax.tree.leaves(transformer.shapes(model))) == 4 * layer + 64 * 32 + 32
    assert metrics.flops_per_token(model) == 6 * (4 * layer + 61 * 32 + 32) + 12 * 4 * 32 * 16
    mask = decay_mask(model, transformer.shapes(model))
    assert mask["layers"]["ln"] == {"scale": False} and mask["layers"]["kv"] == {"kernel": True}
    assert sampling.architecture(model)["module"] == BLOCK + "ParallelBlock"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_its_gradients_are_those_of_one_device(schedule):
    mesh = {"data": 2, "pipe": 2, "tensor": 2, "sequence_parallel": schedule != "gpipe"}
    c = config(mesh=mesh, schedule=schedule)
    tokens = np.random.default_rng(0).integers(0, 61, (8, 17), dtype=np.int32)
    trainer = Trainer(c, make_mesh(c.mesh))
    params = transformer.init(c.model, jax.random.key(0))
    right = jax.jit(jax.value_and_grad(functools.partial(transformer.loss, config=c.model)))(params, tokens)
    mine = jax.device_put(jax.jit(trainer.layout.from_canonical)(params), trainer.state_shardings.params)
    loss, grads, *_ = jax.jit(trainer.loss_and_gradients)(mine, jax.device_put(tokens, trainer.batch_sharding))
    found = loss, trainer.layout.to_canonical(grads)
    for one, other in zip(*map(jax.tree.leaves, (right, found)), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("Twice", "has the parameter layers/ln/scale 2 times"),
        ("Strange", "layers/gate/kernel has the dim experts; known are layers, .*and products"),
        ("Unstacked", "layers/gate/kernel has the dims 'embed ffn'; those of layers begin with layers"),
        ("Elsewhere", "has the parameter router/kernel; paths are layers/MODULE/NAME"),
        ("Headless", "lacks final_norm/scale"),
        ("Missing", "cannot be imported .*put its package on PYTHONPATH"),
        ("jax", "is no architecture; derive its class"),
    ],
)
def test_a_table_that_cannot_be_trained_is_refused(module, words):
    with pytest.raises(UserError, match=words):
        parameters.table(config(module).model)


def test_what_only_the_families_have_says_so():
    c = config()
    with pytest.raises(UserError, match="has no model_types"):
        architectures.weights({}, c.model)
    values = {name: {} for name in ("model", "pipeline", "batch", "compress")} | {"model": {"module": c.model.module}}
    with pytest.raises(UserError, match="ParallelBlock is not planned for"):
        sections(values)
