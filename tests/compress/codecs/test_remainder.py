"""Low rank with a remainder in few bits: better than either part alone, in the bytes of both."""

import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress.codecs.quantised import QuantisedBlocks
from compress.codecs.remainder import LowRankRemainder

N, K = 96, 64


def message(strength):
    """Return a message of two strong directions and noise."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=(N, 2)) @ rng.normal(size=(2, K))
    return jnp.asarray(strength * low + rng.normal(size=(N, K)), "float32").reshape(4, N // 4, K)


def error(codec, x, times=3):
    """Return the relative error of the last of some equal messages: the factors turn towards the strong directions."""
    state = codec.init(x.shape, x.dtype)
    for _ in range(times):
        wire, state = codec.encode(state, x)
        found = codec.decode(wire, x)
    return float(jnp.linalg.norm(found - x) / jnp.linalg.norm(x))


def test_it_is_better_than_either_part_alone():
    x = message(30.0)
    both = error(LowRankRemainder(2, feedback=False), x)
    # 4 bits leave a tenth of normal numbers: a block's largest is 2.4 of them, a code 2.4/7, and its error that over
    # the root of 12.
    assert both < 0.12 * error(compress.LowRank(2, error="none"), x)
    assert both < 0.12 * error(QuantisedBlocks(4, feedback=False), x)
    # The remainder is what 4 bits leave of the noise.
    noise = message(0.0)
    right = error(QuantisedBlocks(4, feedback=False), noise) * float(jnp.linalg.norm(noise) / jnp.linalg.norm(x))
    assert both == pytest.approx(right, rel=0.2)


def test_its_bytes_are_those_of_both():
    for dtype in ("float32", "bfloat16"):
        low = compress.wire_bytes(compress.LowRank(4, factors="bfloat16"), (4, 24, K), dtype)
        rest = compress.wire_bytes(QuantisedBlocks(8, 32), (4, 24, K), dtype)
        assert compress.wire_bytes(LowRankRemainder(4, 8, 32), (4, 24, K), dtype) == low + rest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"bits": 5}, "bits must be 4 or 8, got 5"),
        ({"factors": "float8"}, "unknown factors 'float8'"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        LowRankRemainder(**options)
