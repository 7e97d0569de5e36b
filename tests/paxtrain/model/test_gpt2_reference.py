"""The model computes in float32 what transformers' GPT2LMHeadModel computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain.config import ModelConfig
from paxtrain.model import pointwise, transformer
from tests.paxtrain.model import gpt2_reference

CONFIG = ModelConfig(
    vocab_size=101, layers=gpt2_reference.LAYERS, hidden=32, heads=gpt2_reference.HEADS, sequence=24, dtype="float32"
)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference():
    weights, results = gpt2_reference.load()
    params = jax.tree.map(jnp.asarray, gpt2_reference.to_paxtrain(weights, CONFIG.padded_vocab))
    return params, results


def logits_error(params, results):
    return np.abs(transformer.logits(params, results["ids"], CONFIG) - results["logits"]).max()


def test_parameters_have_the_canonical_shapes(reference):
    params, _ = reference
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), transformer.shapes(CONFIG))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == shapes


def test_logits(reference):
    assert logits_error(*reference) < TOLERANCE


def test_loss(reference):
    params, results = reference
    np.testing.assert_allclose(transformer.loss(params, results["ids"], CONFIG), results["loss"], atol=TOLERANCE)


def test_exact_gelu_would_show(reference, monkeypatch):
    monkeypatch.setattr(pointwise, "gelu", functools.partial(jax.nn.gelu, approximate=False))
    assert logits_error(*reference) > 10 * TOLERANCE


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1)])
def test_exchanged_projections_would_show(reference, order):
    params, results = reference
    qkv = {name: value[..., order, :] for name, value in params["layers"]["qkv"].items()}
    assert logits_error({**params, "layers": {**params["layers"], "qkv": qkv}}, results) > 1
