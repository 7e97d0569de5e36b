"""The largest numbers of a message, against numpy's order."""

import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress.codecs.topk import TopK

SHAPE = (4, 10, 12)


@pytest.mark.parametrize("feedback", [True, False])
def test_the_largest_numbers_arrive_and_the_others_wait(feedback):
    codec, state = TopK(0.1, feedback), TopK(0.1, feedback).init(SHAPE, "float32")
    left = np.zeros(SHAPE)
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
        whole = x + left * feedback
        order = np.argsort(-np.abs(whole.reshape(-1)))
        expected = whole.reshape(-1).copy()
        expected[order[48:]] = 0
        wire, state = codec.encode(state, jnp.asarray(x))
        found = codec.decode(wire, jnp.asarray(x))
        np.testing.assert_allclose(found, expected.reshape(SHAPE), rtol=1e-6)
        left = whole - expected.reshape(SHAPE)
        np.testing.assert_allclose(codec.residual(state, found), left * feedback, atol=1e-6)
    assert compress.wire_bytes(codec, SHAPE, "bfloat16") == 48 * (2 + 4)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_above_zero_and_at_most_one(share):
    with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
        TopK(share)
