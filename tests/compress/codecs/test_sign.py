"""Signs and means against numpy, their bytes, and error feedback, without which they do not add up."""

import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress.codecs.sign import Signs
from tests.compress.codecs.test_quantised import SHAPE, given, in_blocks, sent


@pytest.mark.parametrize("block", [64, 40])
def test_a_number_arrives_as_the_mean_of_its_block_with_its_sign(block):
    x = given()
    rows = in_blocks(x, block)
    count = np.minimum(block, x.size - block * np.arange(len(rows)))
    scale = np.abs(rows).sum(axis=1) / count
    found = in_blocks(sent(Signs(block), x), block)
    np.testing.assert_array_equal(np.sign(found)[rows != 0], np.sign(rows)[rows != 0])
    np.testing.assert_allclose(np.abs(found)[:, 0], scale, rtol=2**-8)
    assert np.ptp(np.abs(found[:-1]), axis=1).max() == 0


def test_it_is_a_contraction():
    """With the mean as scale |x - C(x)|^2 = |x|^2 - |x|_1^2 / n, which error feedback needs below |x|^2."""
    x = given()
    rows, found = in_blocks(x, 64), in_blocks(sent(Signs(64), x), 64)
    full = rows[:22], found[:22]
    left = np.square(full[0] - full[1]).sum(axis=1)
    expected = np.square(full[0]).sum(axis=1) - np.square(np.abs(full[0]).sum(axis=1)) / 64
    np.testing.assert_allclose(left, expected, rtol=1e-2)
    assert (left < np.square(full[0]).sum(axis=1)).all()


def test_bytes_of_bits_and_scales():
    for block, blocks in ((256, 6), (64, 23)):
        assert compress.wire_bytes(Signs(block), SHAPE, "float32") == blocks * block // 8 + 2 * blocks


def test_a_number_that_is_none_spoils_its_block_alone():
    x = jnp.asarray(np.ones((4, 64)), "float32").at[2, 3].set(jnp.nan)
    found = sent(Signs(64), x)
    assert np.isnan(found[2]).all() and np.isfinite(np.delete(found, 2, axis=0)).all()


def test_a_block_that_does_not_fit():
    with pytest.raises(ValueError, match="block must be a multiple of 8, at least 8 and at most 65536, got 12"):
        Signs(12)
