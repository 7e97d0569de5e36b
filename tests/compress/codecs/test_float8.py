"""Blocks of 8-bit floats against the formats' values in float64, and their bytes."""

import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress.codecs.float8 import Float8Blocks
from compress.codecs.quantised import QuantisedBlocks
from tests.compress.codecs.test_quantised import SHAPE, given, in_blocks, sent

KINDS = {"e4m3": (jnp.float8_e4m3fn, 448.0, 3), "e5m2": (jnp.float8_e5m2, 57344.0, 2)}


def values(kind):
    """Return all finite values of a format, ascending."""
    every = np.arange(256, dtype=np.uint8).view(jnp.dtype(kind)).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block", [64, 24])
def test_numbers_are_rounded_to_the_nearest_value_of_the_format(name, block):
    kind, largest, mantissa = KINDS[name]
    x, known = given(), values(kind)
    assert known[-1] == largest
    scale = np.abs(in_blocks(x, block)).max(axis=1, keepdims=True) / largest
    scale = np.asarray(jnp.asarray(scale, "bfloat16"), np.float64)
    ratio = in_blocks(x, block) / scale
    found = in_blocks(sent(Float8Blocks(name, block), x), block) / scale
    nearest = np.abs(ratio[..., None] - known).min(axis=-1)
    # A number half-way between two values may go either way; the scale is rounded by up to 2**-9.
    assert (np.abs(found - ratio) <= nearest + 1e-6 * np.abs(ratio) + largest * 2**-9).all()
    normal = np.abs(ratio) > 1
    assert (np.abs(found - ratio)[normal] <= np.abs(ratio)[normal] * (2.0 ** -(mantissa + 1) + 2**-8)).all()


def test_bytes_of_codes_and_scales():
    for block, blocks in ((64, 23), (96, 15)):
        assert compress.wire_bytes(Float8Blocks(block=block), SHAPE, "bfloat16") == blocks * block + 2 * blocks


def test_small_numbers_beside_a_large_one_keep_their_size():
    """One number is 1000 times larger than the others, which int8 makes zero."""
    x = np.random.default_rng(1).normal(size=(8, 64))
    x[:, 5] = 1000
    x = jnp.asarray(x, "float32")
    others = np.delete(np.asarray(x, np.float64), 5, axis=1)
    for codec, most in ((Float8Blocks(), 0.1), (Float8Blocks("e5m2"), 0.1)):
        left = np.delete(sent(codec, x), 5, axis=1) - others
        assert np.linalg.norm(left) < most * np.linalg.norm(others)
    assert not np.delete(sent(QuantisedBlocks(8), x), 5, axis=1).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"format": "e3m4"}, "format must be e4m3 or e5m2, got 'e3m4'"), ({"block": 0}, "block must be .* got 0")],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        Float8Blocks(**options)
