"""Attention over a split sequence against attention of one device, which has all scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress.codec import Codec, Identity
from compress.codecs.quantised import QuantisedBlocks
from paxtrain.attention import blocks, split
from paxtrain.attention.blocks import Rule

SEQUENCE, HEADS, KEY_HEADS, SIZE, SCALE = 32, 4, 2, 8, 0.4
FORMS, AS_IS = ("ring", "gather"), Identity()


def drawn() -> tuple[jax.Array, ...]:
    """Return queries, keys, values and the gradient of attention, of two sequences."""
    rng = np.random.default_rng(0)
    shapes = [(2, SEQUENCE, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def starts() -> jax.Array:
    """Return documents that begin within parts of the sequence, at their edges, and with a single token."""
    found = np.zeros((2, SEQUENCE), np.int32)
    for row, firsts in enumerate([(0, 5, 8, 21), (0, 1, 16, 31)]):
        for first in firsts:
            found[row, first:] = first
    return jnp.asarray(found)


def plain(q: jax.Array, k: jax.Array, v: jax.Array, hidden: np.ndarray, cap: float) -> jax.Array:
    """Return attention by its definition, head by head; `hidden` are the pairs that do not see each other."""
    heads = []
    for n in range(HEADS):
        keys, values = (x[:, :, n // (HEADS // KEY_HEADS)] for x in (k, v))
        scores = jnp.einsum("btd,bsd->bts", q[:, :, n], keys) * SCALE
        scores = cap * jnp.tanh(scores / cap) if cap else scores
        heads.append(jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores), axis=-1) @ values)
    return jnp.stack(heads, axis=2)


def hidden(documents: bool, window: int) -> np.ndarray:
    """Return which key [B, T, S] a query does not see."""
    apart = np.arange(SEQUENCE)[:, None] - np.arange(SEQUENCE)
    found = np.broadcast_to((apart < 0) | (apart >= (window or SEQUENCE)), (2, SEQUENCE, SEQUENCE))
    begins = np.asarray(starts())
    return found | (begins[:, :, None] != begins[:, None, :]) if documents else found


def devices(x: jax.Array, ranks: int) -> jax.Array:
    """Return what each device has of x [B, S, ...]."""
    return jnp.stack([split.part(x, 1, jnp.int32(rank), ranks) for rank in range(ranks)])


def together(x: jax.Array) -> jax.Array:
    """Return the inverse of `devices`."""
    ranks = x.shape[0]
    order = np.argsort(np.concatenate([np.asarray(row) for row in devices(jnp.arange(SEQUENCE)[None], ranks)[:, 0]]))
    return jnp.concatenate(list(x), axis=1)[:, order]


def all_devices(
    form: str, ranks: int, documents: bool, window: int, cap: float, codec: Codec = AS_IS
) -> list[jax.Array]:
    """Return attention and its gradients, of devices that a mapped axis emulates."""
    q, k, v, g = (devices(x, ranks) for x in drawn())
    rule, exchange = Rule(SCALE, cap), split.KeyExchange("context", form, codec)
    marks, reach = starts() if documents else None, jnp.int32(window) if window else None

    @functools.partial(jax.vmap, axis_name="context")
    def run(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple:
        out, pull = jax.vjp(lambda q, k, v: split.attend(q, k, v, marks, reach, exchange, rule), q, k, v)
        return out, *pull(g)

    return [together(x) for x in jax.jit(run)(q, k, v, g)]


def one_device(documents: bool, window: int, cap: float) -> tuple[jax.Array, ...]:
    q, k, v, g = drawn()
    out, pull = jax.vjp(lambda q, k, v: plain(q, k, v, hidden(documents, window), cap), q, k, v)
    return out, *pull(g)


def rounded(x: jax.Array) -> jax.Array:
    """Return what int8 in blocks of 16 makes of numbers, by its definition; gradients pass through."""
    blocks = x.reshape(-1, 16)
    scale = (jnp.abs(blocks).max(1, keepdims=True) / 127).astype(jnp.bfloat16).astype(jnp.float32)
    return x + jax.lax.stop_gradient((jnp.clip(jnp.round(blocks / scale), -127, 127) * scale).reshape(x.shape) - x)


def of_rounded(ranks: int, documents: bool, window: int, cap: float) -> tuple[jax.Array, ...]:
    """Return attention and its gradients if each device sees keys and values of others' tokens as int8 leaves them."""
    q, k, v, g = drawn()

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        parts = []
        for rank in range(ranks):
            seen = (
                together(jnp.stack([one if other == rank else rounded(one) for other, one in enumerate(each)]))
                for each in (devices(k, ranks), devices(v, ranks))
            )
            parts.append(devices(plain(q, *seen, hidden(documents, window), cap), ranks)[rank])
        return together(jnp.stack(parts))

    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(g)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ranks", "documents", "window", "cap"), [(2, True, 11, 0.9), (4, False, 0, 0.0)])
def test_others_keys_and_values_go_through_a_codec_once_however_far_they_travel(form, ranks, documents, window, cap):
    how = ranks, documents, window, cap
    found, wanted = all_devices(form, *how, QuantisedBlocks(8, 16)), of_rounded(*how)
    as_is = all_devices(form, *how)
    for one, other, before in zip(found, wanted, as_is, strict=True):
        largest = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, atol=2e-5 * largest)
        assert float(jnp.abs(one - before).max()) > 1e-3 * largest  # the control: the codec shows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("ranks", "documents", "window", "cap"),
    [(2, False, 0, 0.0), (4, True, 0, 0.0), (4, False, 7, 0.9), (2, True, 11, 0.0)],
)
def test_attention_and_gradients_are_those_of_one_device(form, ranks, documents, window, cap):
    found, wanted = all_devices(form, ranks, documents, window, cap), one_device(documents, window, cap)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * float(jnp.abs(other).max()))


def test_another_window_document_or_bound_shows():
    found = all_devices("ring", 2, True, 11, 0.0)[0]
    for other in ((True, 12, 0.0), (False, 11, 0.0), (True, 11, 2.0)):
        assert float(jnp.abs(found - one_device(*other)[0]).max()) > 1e-2


def test_scores_are_made_tile_by_tile(monkeypatch):
    """The same with tiles of four queries, in which no array has more scores than a tile."""
    whole = all_devices("ring", 2, True, 0, 0.9)
    monkeypatch.setattr(blocks, "_TILE", 4 * SEQUENCE // 2)
    for one, other in zip(all_devices("ring", 2, True, 0, 0.9), whole, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))
    assert blocks._tiles(16, 16) == 4
    assert blocks._tiles(7, 16) == 7  # of one query each, as seven divides no further


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_in_exchange_for_tokens_come_in_order_and_go_back(ranks):
    x = jnp.arange(2 * SEQUENCE * 4 * 3, dtype=jnp.float32).reshape(2, SEQUENCE, 4, 3)

    @functools.partial(jax.vmap, axis_name="context")
    def there(x: jax.Array) -> jax.Array:
        return split.to_heads(x, "context")

    @functools.partial(jax.vmap, axis_name="context")
    def back(x: jax.Array) -> jax.Array:
        return split.to_tokens(x, "context")

    mine = devices(x, ranks)
    heads = there(mine)
    np.testing.assert_array_equal(jnp.concatenate(list(heads), axis=2), x)
    np.testing.assert_array_equal(back(heads), mine)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_devices_have_equal_work(ranks):
    """Pairs of tokens that see each other: those of each device, by counting, are equal."""
    sees = [int((np.asarray(row)[:, None] >= np.arange(SEQUENCE)).sum()) for row in _tokens(ranks)]
    assert len(set(sees)) == 1
    in_order = np.arange(SEQUENCE).reshape(ranks, -1)  # the control: parts one behind the other
    assert len({int((row[:, None] >= np.arange(SEQUENCE)).sum()) for row in in_order}) == ranks


def _tokens(ranks: int) -> jax.Array:
    return devices(jnp.arange(SEQUENCE)[None], ranks)[:, 0]
