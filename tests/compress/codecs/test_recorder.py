"""The record of a link's messages against the messages themselves."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np

from compress.codec import Identity, wire_bytes
from compress.codecs.recorder import Recorder
from compress.lowrank import LowRank

SHAPE = (2, 10, 12)


def test_recorder_keeps_the_last_active_messages():
    codec, active = LowRank(4, factors="float32"), np.array([1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0], bool)
    recorder = Recorder(codec, 9)
    given = jnp.asarray(np.random.default_rng(0).normal(size=(12, *SHAPE)), "float32")

    def record(state, x):
        return recorder.encode(state, *x)[1], None

    found = jax.jit(lambda given, active: jax.lax.scan(record, recorder.init(SHAPE, "float32"), (given, active))[0])(
        given, jnp.asarray(active)
    )
    assert found.calls == 12
    kept = [call for call in np.flatnonzero(active) if call >= 12 - 9]
    assert list(found.slots) == [call % 9 for call in kept] and len(kept) == 4
    state, encode = codec.init(SHAPE, "float32"), jax.jit(codec.encode)
    for call in np.flatnonzero(active):
        wire, state = encode(state, given[call])
        if call in kept:
            np.testing.assert_array_equal(found.given[call % 9], given[call])
            np.testing.assert_allclose(found.decoded[call % 9], codec.decode(wire, given[0]), atol=1e-5)
            np.testing.assert_allclose(found.residual[call % 9], codec.residual(state, given[0]), atol=1e-5)
    np.testing.assert_allclose(recorder.residual(found, given[0]), codec.residual(state, given[0]), atol=1e-5)
    assert wire_bytes(recorder, SHAPE, "float32") == wire_bytes(codec, SHAPE, "float32") == 4 * 4 * (20 + 12)


def test_devices_that_vmap_emulates_record_their_own_messages_at_one_place():
    recorder = Recorder(Identity(), 3, ("data", "pipe"))
    active = jnp.array([[True, False], [True, True]])
    given = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 2, *SHAPE)), "float32")

    def device(given, active):
        state = recorder.init(SHAPE, "float32")
        for x in given:
            _, state = recorder.encode(state, x, active)
        return state

    run = jax.vmap(jax.vmap(device, in_axes=(1, 0), axis_name="pipe"), in_axes=(1, 0), axis_name="data")
    compiled = jax.jit(run).lower(given, active).compile()
    assert not re.search(r" (scatter|while)\(", compiled.as_text())  # each record is updated in place
    found = compiled(given, active)
    for data, pipe in np.ndindex(2, 2):
        own = jax.tree.map(operator.itemgetter((data, pipe)), found)
        assert list(own.slots) == ([1, 2, 0] if active[data, pipe] else [])
        for call in own.slots:
            np.testing.assert_array_equal(own.given[call], given[3 if call == 0 else call, data, pipe])
