"""The training step against plain JAX on one device, also with gradients that are not finite."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxtrain.model import transformer
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.optimizer import make_optimizer
from paxtrain.parallel.step import Trainer
from tests.paxtrain.training import configuration, curve, expected_batches, same_bits, started
from tests.small import corpus


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return the folder of a corpus."""
    return corpus(tmp_path_factory.mktemp("train"))


def trainer_of(home, tmp_path, **changes):
    config = configuration(home, tmp_path, **{"mesh__tensor": 2} | changes)
    return Trainer(config, make_mesh(config.mesh))


def plain_steps(config, params, batches):
    """Return losses and parameters of training on one device, in plain JAX."""
    optimizer = optax.chain(optax.clip_by_global_norm(config.optimizer.clip_norm), make_optimizer(config))
    seed = jax.random.key(config.run.seed)

    @jax.jit
    def step(params, state, tokens, number):
        key = jax.random.key_data(jax.random.fold_in(seed, number))
        dropout = transformer.Dropout(key, jnp.arange(tokens.shape[0]))
        loss, grads = jax.value_and_grad(transformer.loss)(params, tokens, config.model, dropout)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, found = optimizer.init(params), []
    for number, tokens in enumerate(batches):
        params, state, loss = step(params, state, tokens, number)
        found.append(float(loss))
    return found, params


@pytest.mark.parametrize(
    "changes",
    [
        {"model__embedding_dropout": 0.0, "pipeline__scan_layers": "off"},
        pytest.param(
            {"mesh__shard": "none", "mesh__pipe": 4, "mesh__tensor": 1, "model__residual_dropout": 0.1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"optimizer__name": "muon", "model__embedding_dropout": 0.0, "pipeline__schedule": "1f1b"},
            marks=pytest.mark.once,
        ),
        pytest.param(
            {"mesh__shard": "none", "model__residual_dropout": 0.1, "pipeline__scan_layers": "off"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["zero1", "replicated-dropout-four-stages", "muon", "replicated-dropout"],
)
def test_ten_steps_are_those_of_plain_jax(home, tmp_path, changes):
    trainer = trainer_of(home, tmp_path, **changes)
    batches = expected_batches(home, 10)
    initial = transformer.init(trainer.config.model, jax.random.key(3))
    state, found, clipped = trainer.from_params(initial), [], False
    for tokens in batches:
        state, values = trainer.step(state, jax.device_put(tokens, trainer.batch_sharding))
        found.append(float(values["loss"]))
        clipped |= float(values["grad_norm"]) > trainer.config.optimizer.clip_norm
    expected, params = plain_steps(trainer.config, initial, batches)
    assert clipped and found[-1] < found[0] - 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    mine = jax.device_get(trainer.layout.to_canonical(state.params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=0), mine, jax.device_get(params))

    tables = jax.device_get(state.params["embedding"]["token"])
    assert same_bits(tables[0], tables[-1]) and np.abs(tables[0]).max() > 0
    assert not tables[1:-1].any()


def test_a_step_that_is_not_finite_changes_nothing(home, tmp_path):
    trainer = trainer_of(home, tmp_path, model__embedding_dropout=0.0, pipeline__scan_layers="off")
    batches = [jax.device_put(tokens, trainer.batch_sharding) for tokens in expected_batches(home, 3)]
    state, _ = trainer.step(trainer.init(0), batches[0])
    before = jax.device_get(state)
    poisoned = jax.tree.map(np.copy, before.params)
    poisoned["layers"]["up"]["kernel"][1, 3, 5] = np.nan

    def step(state, tokens):
        state, values = trainer.step(jax.device_put(state, trainer.state_shardings), tokens)
        return jax.device_get((state, values))

    after, values = step(before.replace(params=poisoned), batches[1])
    assert not values["finite"]
    assert (after.step, after.skipped) == (2, 1)
    assert same_bits((after.params, after.optimizer), (poisoned, before.optimizer))

    healed, values = step(after.replace(params=before.params), batches[2])
    expected, expected_values = step(before, batches[2])
    assert values["finite"] and same_bits(values, expected_values)
    assert (healed.step, healed.skipped, expected.skipped) == (3, 1, 0)
    assert same_bits((healed.params, healed.optimizer), (expected.params, expected.optimizer))
    assert not same_bits(healed.params, before.params)


@pytest.mark.once
def test_a_run_that_diverges_says_so_and_ends(home, tmp_path, capsys):
    """At this learning rate the loss becomes huge, but finite, and then its gradients overflow."""
    changes = {"optimizer__learning_rate": 1e6, "optimizer__warmup_steps": 0, "run__steps": 6, "model__layers": 2}
    started(configuration(home, tmp_path, run__sample_tokens=0, **changes)).train()
    stdout, stderr = capsys.readouterr()
    records = [record for record in curve(tmp_path) if "loss" in record]
    skipped = [record["step"] for record in records if record["skipped"]]
    assert len(records) == 6 and 1 not in skipped and 6 in skipped
    assert re.findall(r"step (\d): gradients are not finite, nothing was changed", stderr) == [*map(str, skipped)]
    assert re.search(rf"skipped steps +{len(skipped)}, their gradients were not finite", stdout)
    assert re.search(r"validation loss +\d{4,}\.\d{4} nats per token, perplexity inf", stdout)
