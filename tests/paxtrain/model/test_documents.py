"""Attention and positions within documents: a row of several documents counts as each of them alone.

test_gradients.py tests the same on meshes and schedules.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError
from paxtrain.model import transformer

SEPARATOR, SEQUENCE = 9, 16
GPT2 = ModelConfig(
    vocab_size=61,
    vocab_multiple=64,
    layers=2,
    hidden=32,
    heads=4,
    sequence=SEQUENCE,
    dtype="float32",
    separator=SEPARATOR,
)
LLAMA = dataclasses.replace(GPT2, family="llama", kv_heads=2, intermediate=48, tied_head=False)
# Places of separators: in the middle; first, last and twice in a row; only where nothing is predicted from them.
PLACES = ([4, 11], [0, 6, 7, 15], [16])


@pytest.fixture(scope="module", params=[GPT2, LLAMA], ids=lambda config: config.family)
def config(request):
    return request.param


@pytest.fixture(scope="module")
def params(config):
    drawn = transformer.init(config, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), drawn)


@pytest.fixture(scope="module")
def tokens():
    rows = np.random.default_rng(0).integers(10, 61, (len(PLACES), SEQUENCE + 1), dtype=np.int32)
    for row, places in zip(rows, PLACES, strict=True):
        row[places] = SEPARATOR
    return rows


def plain(config):
    return dataclasses.replace(config, separator=-1)


def alone(params, tokens, config):
    """Return mean loss and logits [B, S, V] of the model without separators, with each document in a separate row.

    Padding follows a document in its row; a causal model does not look at it.
    """
    cuts = [[0, *(i for i in range(1, SEQUENCE) if row[i] == SEPARATOR), SEQUENCE] for row in tokens]
    spans = [(row, a, b) for row, ends in zip(tokens, cuts, strict=True) for a, b in itertools.pairwise(ends)]
    assert [len(ends) - 1 for ends in cuts] == [3, 4, 1]
    rows = np.zeros((len(spans), SEQUENCE), np.int32)
    for own, (row, a, b) in zip(rows, spans, strict=True):
        own[: b - a] = row[a:b]
    found = transformer.logits(params, rows, plain(config))
    logits = jnp.concatenate([x[: b - a] for x, (_, a, b) in zip(found, spans, strict=True)])
    logits = logits.reshape(*tokens[:, :-1].shape, -1)
    likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -likelihoods.mean(), logits


@pytest.fixture(scope="module")
def expected(config, params, tokens):
    """Return ((loss, logits), gradients) of the documents in separate rows."""
    return jax.jit(jax.value_and_grad(functools.partial(alone, tokens=tokens, config=config), has_aux=True))(params)


def test_starts_and_positions_by_hand():
    starts = transformer.document_starts(jnp.array([[5, 9, 7, 9, 9, 3], [9, 1, 2, 3, 4, 5]]), GPT2)
    assert starts.tolist() == [[0, 1, 1, 3, 4, 4], [0] * 6]
    assert transformer.positions(starts).tolist() == [[0, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert transformer.document_starts(jnp.array([[5, 9, 7]]), plain(GPT2)) is None


def test_loss_and_gradients_are_those_of_the_documents_alone(config, params, tokens, expected):
    (right_loss, _), right_grads = expected
    loss, grads = jax.jit(jax.value_and_grad(functools.partial(transformer.loss, tokens=tokens, config=config)))(params)
    np.testing.assert_allclose(loss, right_loss, rtol=1e-6)
    for mine, right in zip(jax.tree.leaves(grads), jax.tree.leaves(right_grads), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5 * np.abs(right).max())

    without = jax.jit(functools.partial(transformer.loss, tokens=tokens, config=plain(config)))(params)
    assert abs(without - right_loss) > 1e-3 * right_loss


def test_logits_are_those_of_the_documents_alone(config, params, tokens, expected):
    """This holds for Llama too: rotary positions count through the row, but attention uses only their differences."""
    (_, right), _ = expected
    logits = jax.jit(lambda ids: transformer.logits(params, ids, config))(tokens[:, :-1])
    np.testing.assert_allclose(logits, right, atol=1e-5 * np.abs(right).max())


def test_either_half_alone_would_show(config, params, tokens, expected, monkeypatch):
    """Negative control: mask and positions each change the result. Rotary positions are not reset."""
    layer = transformer.layer
    halves = {"layer": lambda *arguments: layer(*arguments[:-2], None, arguments[-1])}
    if "position" in params["embedding"]:
        halves["positions"] = lambda starts: jnp.broadcast_to(jnp.arange(SEQUENCE), starts.shape)
    (right, _), _ = expected
    for name, without in halves.items():
        with monkeypatch.context() as patch:
            patch.setattr(transformer, name, without)
            assert abs(jax.jit(lambda p: transformer.loss(p, tokens, config))(params) - right) > 1e-4 * right, name


def test_other_documents_of_a_row_change_nothing(config, params, tokens):
    row, changed = tokens[:1, :-1], tokens[:1, :-1].copy()
    changed[0, :4] = 59
    logits = jax.jit(lambda ids: transformer.logits(params, ids, config))
    before, after = logits(row)[0], logits(changed)[0]
    np.testing.assert_array_equal(before[4:], after[4:])
    assert np.abs(before[:4] - after[:4]).max() > 0.01


def test_flash_attention_wants_an_even_sequence():
    fits = {"dtype": "bfloat16", "hidden": 64, "separator": 9, "vocab_size": 61}
    assert ModelConfig(**fits, sequence=16, attention="cudnn").fits_flash
    assert not ModelConfig(**fits, sequence=15).fits_flash
    with pytest.raises(UserError, match=r"attention=cudnn needs .* an even model.sequence, got bfloat16, 16 and 15"):
        ModelConfig(**fits, sequence=15, attention="cudnn")
