"""The interface of a codec and its measures: made-up codecs against figures worked out by hand."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress.codec import check_codec, codec_name
from compress.codecs.quantised import QuantisedBlocks
from compress.codecs.recorder import Recorder
from compress.codecs.remainder import LowRankRemainder
from compress.codecs.sign import Signs
from tests.compress.topk import TopK

SHAPE = (2, 20, 24)


def test_importing_the_package_imports_no_jax():
    program = "import sys, compress; sys.exit('jax' in sys.modules or not callable(compress.codec_error))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert set(compress.__all__) <= set(dir(compress))
    assert all(getattr(compress, name).__name__ == name for name in compress.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Codex'; it has Codec"):
        _ = compress.Codex


def test_codecs_are_codecs():
    for codec in (compress.Identity(), compress.LowRank(4), Recorder(compress.LowRank(4), 2), TopK(3)):
        assert isinstance(codec, compress.Codec)
        check_codec(codec, SHAPE, "bfloat16")
    assert not isinstance(object(), compress.Codec)


def test_identity_sends_what_it_gets():
    x = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), "bfloat16")
    for codec in (compress.Identity(), Recorder(compress.Identity(), 2)):
        wire, state = codec.encode(codec.init(SHAPE, x.dtype), x)
        assert np.array_equal(codec.decode(wire, x), x)
        assert np.array_equal(wire, x)
        assert not codec.residual(state, x).any()
        assert compress.wire_bytes(codec, SHAPE, x.dtype) == x.nbytes


def test_bytes_on_the_wire():
    assert compress.wire_bytes(TopK(7), SHAPE, "float32") == 7 * (4 + 4)
    assert compress.wire_bytes(TopK(7), SHAPE, "bfloat16") == 7 * (2 + 4)
    assert compress.wire_bytes(compress.LowRank(3, factors="int8"), SHAPE, "float32") == 3 * (40 + 24) + 2 * 3 * 4


def test_error_of_a_codec_on_an_array():
    """Sending only the largest of (4, 3, 2, 1) leaves a norm of sqrt(14); with error feedback the rest comes later."""
    x = jnp.array([4.0, 3.0, 2.0, 1.0])
    missing, state = [], np.zeros(4)
    for _ in range(5):
        state = state + np.asarray(x)
        state[np.argmax(np.abs(state))] = 0
        missing.append(np.linalg.norm(state))
    expected = np.array(missing) / np.arange(1, 6) / np.sqrt(30)
    found = compress.codec_error(TopK(1), x, steps=5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found[0] == pytest.approx(np.sqrt(14 / 30))
    forgetful = compress.codec_error(TopK(1, feedback=False), x, steps=3)
    np.testing.assert_allclose(forgetful, [np.sqrt(14 / 30)] * 3, rtol=1e-6)
    assert not compress.codec_error(compress.Identity(), x, steps=2).any()
    assert compress.codec_error(TopK(1), jnp.zeros(4)).tolist() == [0]


@pytest.mark.parametrize(
    ("codec", "without", "steps"),
    [
        (compress.LowRank(8, factors="float32"), compress.LowRank(8, factors="float32", error="none"), 32),
        (QuantisedBlocks(4), QuantisedBlocks(4, feedback=False), 16),
        (LowRankRemainder(2), LowRankRemainder(2, feedback=False), 32),
        (Signs(64), Signs(64, feedback=False), 256),
    ],
)
def test_feedback_brings_what_a_message_lost(codec, without, steps):
    x = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), "float32")
    kept, forgotten = (compress.codec_error(one, x, steps=steps) for one in (codec, without))
    assert kept[0] == pytest.approx(float(forgotten[0]), rel=1e-6)
    assert kept[-1] < min(0.1 * kept[0], forgotten[-1] / 8)
    assert forgotten[-1] > 0.5 * forgotten[0]


class _Wrong(TopK):
    def decode(self, wire, like):
        return super().decode(wire, like).reshape(-1)


class _Growing(TopK):
    def encode(self, state, x, active=True):
        wire, state = super().encode(state, x, active)
        return wire, jnp.concatenate([state, state])


def test_wrong_shapes_are_found_before_anything_runs():
    check_codec(TopK(3), SHAPE, "float32")
    with pytest.raises(ValueError, match=r"decode returns float32\[960\] for a message of float32\[2,20,24\]"):
        check_codec(_Wrong(3), SHAPE, "float32")
    with pytest.raises(ValueError, match=r"init returns a state of float32\[2,.*one of float32\[4,20,24\]; both must"):
        check_codec(_Growing(3), SHAPE, "float32")


def test_a_name_holds_the_settings_and_no_address():
    class Plain:
        pass

    assert codec_name(TopK(3)) == "TopK(k=3, feedback=True)"
    assert codec_name(compress.Identity()) == "Identity()"
    assert codec_name(Plain()).endswith("Plain")
