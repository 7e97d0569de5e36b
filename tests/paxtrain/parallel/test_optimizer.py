"""Learning rates at their corners, the decay mask by name, and AdamW against its formula in float64."""

import jax
import numpy as np
import optax
import pytest

from paxtrain.config import Config, ModelConfig, OptimizerConfig, RunConfig
from paxtrain.model import transformer
from paxtrain.parallel.layout import names
from paxtrain.parallel.optimizer import decay_mask, learning_rate, make_optimizer

MODEL = ModelConfig(vocab_size=5, vocab_multiple=8, layers=2, hidden=4, heads=2, sequence=3)


def config_of(steps=100, **optimizer):
    return Config(model=MODEL, optimizer=OptimizerConfig(learning_rate=0.5, **optimizer), run=RunConfig(steps=steps))


@pytest.mark.parametrize(
    ("optimizer", "points"),
    [
        (
            {"schedule": "cosine", "warmup_steps": 20, "final_fraction": 0.1},
            {0: 0.0, 10: 0.25, 20: 0.5, 40: 0.05 + 0.225 * (1 + np.sqrt(0.5)), 60: 0.275, 100: 0.05, 150: 0.05},
        ),
        ({"schedule": "cosine", "warmup_steps": 0, "final_fraction": 0.0}, {0: 0.5, 50: 0.25, 100: 0.0}),
        ({"schedule": "cosine", "warmup_steps": 100}, {0: 0.0, 50: 0.25, 100: 0.5}),
        (
            {"schedule": "wsd", "warmup_steps": 10, "decay_steps": 40, "final_fraction": 0.2},
            {0: 0.0, 5: 0.25, 10: 0.5, 35: 0.5, 60: 0.5, 80: 0.3, 100: 0.1, 200: 0.1},
        ),
        ({"schedule": "wsd", "warmup_steps": 0, "decay_steps": 100}, {0: 0.5, 50: 0.275, 100: 0.05}),
        ({"schedule": "constant", "warmup_steps": 10}, {0: 0.0, 5: 0.25, 10: 0.5, 100: 0.5}),
        ({"schedule": "constant", "warmup_steps": 0}, {0: 0.5, 100: 0.5}),
    ],
)
def test_learning_rates(optimizer, points):
    """Points are given by the number of the update. The first update is 1; 0 only says where the line starts."""
    config = config_of(**optimizer)
    schedule = learning_rate(config.optimizer, config.run.steps)
    assert {step: pytest.approx(float(schedule(step - 1)), abs=1e-7) for step in points} == points


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_rises_and_what_follows_never_does(name):
    config = config_of(schedule=name, warmup_steps=20, decay_steps=30)
    rates = np.array([learning_rate(config.optimizer, config.run.steps)(i) for i in range(101)])
    assert rates[0] > 0
    assert (np.diff(rates[:20]) > 0).all()
    assert (np.diff(rates[19:]) <= 1e-8).all()


def test_decay_is_for_matrices_and_embeddings():
    mask = decay_mask(MODEL, transformer.shapes(MODEL))
    decayed = {names(path) for path, on in jax.tree_util.tree_leaves_with_path(mask) if on}
    assert decayed == {
        ("embedding", "token"),
        ("embedding", "position"),
        *(("layers", name, "kernel") for name in ("qkv", "out", "up", "down")),
    }


def test_the_mask_is_the_same_in_the_other_layout():
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), transformer.shapes(MODEL))
    assert decay_mask(MODEL, stacked) == decay_mask(MODEL, transformer.shapes(MODEL))


def test_adamw_does_what_its_authors_wrote():
    """Loshchilov and Hutter 2019, algorithm 2, in numpy and float64."""
    config = config_of(schedule="cosine", warmup_steps=2, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)
    opt, transformation = config.optimizer, make_optimizer(config)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), transformer.shapes(MODEL))
    theta = jax.tree.map(np.float64, params)
    first = second = jax.tree.map(np.zeros_like, theta)
    state, update = transformation.init(params), jax.jit(transformation.update)
    for step in range(1, 6):
        gradients = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), params)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)

        rate = 0.5 * step / 2
        if step > 2:
            rate = 0.05 + 0.45 * (1 + np.cos(np.pi * (step - 2) / 98)) / 2
        first = jax.tree.map(lambda m, g: opt.beta1 * m + (1 - opt.beta1) * np.float64(g), first, gradients)
        second = jax.tree.map(lambda v, g: opt.beta2 * v + (1 - opt.beta2) * np.float64(g) ** 2, second, gradients)

        def apply(path, t, m, v, rate=rate, step=step):
            adapted = m / (1 - opt.beta1**step) / (np.sqrt(v / (1 - opt.beta2**step)) + opt.epsilon)
            decay = 0 if names(path)[-1] in ("bias", "scale") else opt.weight_decay
            return t - rate * (adapted + decay * t)

        theta = jax.tree_util.tree_map_with_path(apply, theta, first, second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), params, theta)
