"""The record of a link's messages against the messages themselves."""

import jax
import jax.numpy as jnp
import numpy as np

from compress.codec import wire_bytes
from compress.codecs.recorder import Recorder
from compress.lowrank import LowRank

SHAPE = (2, 10, 12)


def test_recorder_keeps_the_last_active_messages():
    codec, active = LowRank(4, factors="float32"), np.array([1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0], bool)
    recorder = Recorder(codec, 4)
    given = jnp.asarray(np.random.default_rng(0).normal(size=(12, *SHAPE)), "float32")

    def record(state, x):
        return recorder.encode(state, *x)[1], None

    found = jax.jit(lambda given, active: jax.lax.scan(record, recorder.init(SHAPE, "float32"), (given, active))[0])(
        given, jnp.asarray(active)
    )
    assert found.seen == 6
    state, encode = codec.init(SHAPE, "float32"), jax.jit(codec.encode)
    for i, message in enumerate(np.flatnonzero(active)):
        wire, state = encode(state, given[message])
        if i >= 2:
            np.testing.assert_array_equal(found.given[i % 4], given[message])
            np.testing.assert_allclose(found.decoded[i % 4], codec.decode(wire, given[0]), atol=1e-5)
            np.testing.assert_allclose(found.residual[i % 4], codec.residual(state, given[0]), atol=1e-5)
    np.testing.assert_allclose(recorder.residual(found, given[0]), codec.residual(state, given[0]), atol=1e-5)
    assert wire_bytes(recorder, SHAPE, "float32") == wire_bytes(codec, SHAPE, "float32") == 4 * 4 * (20 + 12)
