"""Blocks of 4 and 8 bits against rounding in float64, their bytes, and what a rotation is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress.codecs import quantised
from compress.codecs.quantised import QuantisedBlocks

SHAPE = (3, 20, 24)  # 1440 numbers: 22 blocks of 64, and a half


def given(dtype="float32"):
    return jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), dtype)


def sent(codec, x):
    wire, _ = codec.encode(codec.init(x.shape, x.dtype), x)
    return np.asarray(codec.decode(wire, x), np.float64)


def in_blocks(x, block):
    """Return numbers as rows of a block in float64, the last row filled with zeros."""
    flat = np.asarray(x, np.float64).reshape(-1)
    return np.pad(flat, (0, -flat.size % block)).reshape(-1, block)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("bits", "block"), [(8, 64), (8, 24), (4, 32), (4, 64)])
def test_numbers_are_rounded_to_the_nearest_code_of_their_block(bits, block, dtype):
    x, largest = given(dtype), 2 ** (bits - 1) - 1
    scale = np.abs(in_blocks(x, block)).max(axis=1, keepdims=True) / largest
    scale = np.asarray(jnp.asarray(scale, "bfloat16"), np.float64)
    expected = np.clip(np.round(in_blocks(x, block) / scale), -largest, largest) * scale
    found = in_blocks(sent(QuantisedBlocks(bits, block), x), block)
    ulp = 2**-8 if dtype == "bfloat16" else 2**-23
    # A number half-way between two codes may go either way: float32 divides with a rounding error.
    off = np.abs(found - expected) / scale
    assert (off <= 1 + 2 * largest * ulp).all()
    assert (off > largest * ulp).mean() < 0.002
    # bfloat16 rounds a scale by up to 2**-9, and the largest number may be cut by as much.
    bound = 0.5 * scale + largest * scale * (2**-9 + ulp)
    assert (np.abs(found - in_blocks(x, block)) <= bound).all()


def test_bytes_of_codes_and_scales():
    for bits, block, blocks in ((8, 64, 23), (4, 64, 23), (4, 96, 15)):
        expected = blocks * block * bits // 8 + 2 * blocks
        assert compress.wire_bytes(QuantisedBlocks(bits, block), SHAPE, "float32") == expected
        assert compress.wire_bytes(QuantisedBlocks(bits, block), SHAPE, "bfloat16") == expected


def test_every_pair_of_codes_survives_its_byte():
    codes = jnp.asarray([[a, b] for a in range(-8, 8) for b in range(-8, 8)], jnp.int8)
    packed = quantised._packed(codes)
    assert packed.shape == (256, 1)
    assert len(set(packed[:, 0].tolist())) == 256
    np.testing.assert_array_equal(quantised._unpacked(packed), codes)


def test_without_feedback_there_is_no_state():
    assert jax.tree.leaves(QuantisedBlocks(feedback=False).init(SHAPE, "float32")) == []


def test_a_rotation_spares_a_block_with_one_large_number():
    """One of 64 numbers is 50 times larger; without a rotation at 4 bits all others become zero."""
    x = np.random.default_rng(1).normal(size=(8, 64))
    x[:, 5] = 50
    x = jnp.asarray(x, "float32")
    errors = [np.delete(sent(QuantisedBlocks(4, rotate=on), x) - x, 5, axis=1) for on in (False, True)]
    plain, rotated = (np.sqrt(np.mean(np.square(e))) for e in errors)
    assert plain == pytest.approx(np.sqrt(np.mean(np.square(np.delete(x, 5, axis=1)))), rel=1e-6)
    assert rotated < 0.7 * plain


def test_hadamard_matrices_are_orthonormal_and_symmetric():
    for n in (1, 2, 64):
        h = quantised._hadamard(n).astype(np.float64)
        np.testing.assert_allclose(h @ h, np.eye(n), atol=1e-6)
        np.testing.assert_array_equal(h, h.T)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, "bits must be 4 or 8, got 3"),
        ({"block": 7}, "block must be even, at least 2 and at most 65536, got 7"),
        ({"block": 24, "rotate": True}, "power of two to be rotated, got 24"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        QuantisedBlocks(**options)
