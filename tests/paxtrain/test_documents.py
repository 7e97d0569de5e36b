"""Attention and positions within documents: a row of several documents counts as each of them alone.

On meshes and schedules: test_gradients.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain import model
from paxtrain.config import ModelConfig
from paxtrain.errors import UserError

SEPARATOR, SEQUENCE = 9, 16
CONFIG = ModelConfig(
    vocab_size=61, vocab_multiple=64, layers=2, hidden=32, heads=4, sequence=SEQUENCE, dtype="float32",
    separator=SEPARATOR,
)  # fmt: skip
PLAIN = ModelConfig(**{**vars(CONFIG), "separator": -1})
# Where separators are: in the middle; first, last and twice in a row; only where nothing is predicted from them.
PLACES = ([4, 11], [0, 6, 7, 15], [16])


@pytest.fixture(scope="module")
def params():
    drawn = model.init(CONFIG, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), drawn)


@pytest.fixture(scope="module")
def tokens():
    rows = np.random.default_rng(0).integers(10, 61, (len(PLACES), SEQUENCE + 1), dtype=np.int32)
    for row, places in zip(rows, PLACES, strict=True):
        row[places] = SEPARATOR
    return rows


def documents(row):
    """The documents of a row with the tokens that they predict: each ends with the one that begins the next."""
    cuts = [0, *(i for i in range(1, SEQUENCE) if row[i] == SEPARATOR), SEQUENCE]
    return [row[a : b + 1] for a, b in zip(cuts, cuts[1:])]


def one_by_one(params, tokens):
    """Mean loss over all tokens, each document alone through the model that knows nothing of documents."""
    parts = [part for row in tokens for part in documents(row)]
    total = sum(model.loss(params, jnp.asarray(part)[None], PLAIN) * (len(part) - 1) for part in parts)
    return total / (len(tokens) * SEQUENCE)


def packed(params, tokens, config=CONFIG):
    return model.loss(params, tokens, config)


def test_starts_and_positions_by_hand():
    starts = model.document_starts(jnp.array([[5, 9, 7, 9, 9, 3], [9, 1, 2, 3, 4, 5]]), CONFIG)
    assert starts.tolist() == [[0, 1, 1, 3, 4, 4], [0] * 6]
    assert model.positions(starts).tolist() == [[0, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert model.document_starts(jnp.array([[5, 9, 7]]), PLAIN) is None


def test_loss_and_gradients_are_those_of_the_documents_alone(params, tokens):
    assert [len(documents(row)) for row in tokens] == [3, 4, 1]
    expected, expected_grads = jax.jit(jax.value_and_grad(functools.partial(one_by_one, tokens=tokens)))(params)
    loss, grads = jax.jit(jax.value_and_grad(packed))(params, tokens)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for mine, right in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5 * np.abs(right).max())

    without = jax.jit(functools.partial(packed, config=PLAIN))(params, tokens)
    assert abs(without - expected) > 1e-3 * expected


@pytest.mark.parametrize("what", ["positions", "mask"])
def test_either_half_alone_would_show(params, tokens, monkeypatch, what):
    if what == "positions":
        monkeypatch.setattr(model, "positions", lambda starts: jnp.broadcast_to(jnp.arange(SEQUENCE), starts.shape))
    else:
        layer = model.layer
        monkeypatch.setattr(model, "layer", lambda *arguments: layer(*arguments[:-1], None))
    expected = one_by_one_value(params, tokens)
    assert abs(jax.jit(lambda p: packed(p, tokens))(params) - expected) > 1e-4 * expected


def one_by_one_value(params, tokens):
    return float(jax.jit(functools.partial(one_by_one, tokens=tokens))(params))


def test_other_documents_of_a_row_change_nothing(params, tokens):
    row, changed = tokens[:1, :-1], tokens[:1, :-1].copy()
    changed[0, :4] = 59
    logits = jax.jit(lambda ids: model.logits(params, ids, CONFIG))
    before, after = logits(row)[0], logits(changed)[0]
    np.testing.assert_array_equal(before[4:], after[4:])
    assert np.abs(before[:4] - after[:4]).max() > 0.01


def test_flash_attention_wants_an_even_sequence():
    fits = {"dtype": "bfloat16", "hidden": 64, "separator": 9, "vocab_size": 61}
    assert ModelConfig(**fits, sequence=16, attention="cudnn").fits_flash
    assert not ModelConfig(**fits, sequence=15).fits_flash
    with pytest.raises(UserError, match=r"attention=cudnn needs .* an even model.sequence, got bfloat16, 16 and 15"):
        ModelConfig(**fits, sequence=15, attention="cudnn")
