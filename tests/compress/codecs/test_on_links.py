"""A codec on some links: what crosses each of three links of four emulated stages, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compress.codec import Crossing, array_bytes
from compress.codecs.on_links import OnLinks
from compress.codecs.quantised import QuantisedBlocks
from compress.lowrank import LowRank, RankByLink

SHAPE, STAGES, STEPS = (4, 8, 16), 4, 3
PAIRS = tuple((stage, stage + 1) for stage in range(STAGES - 1))
SENDERS = (True, False, True, False)


class Crossed(Crossing):
    """All links between emulated stages."""

    pairs = PAIRS

    def send(self, wire, pairs):
        senders = np.arange(STAGES)
        for sender, receiver in pairs:
            senders[receiver] = sender
        mine = jnp.array(senders)[lax.axis_index("pipe")]  # vmap permutes among all stages only
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, "pipe")[mine], wire)

    def receives(self, pairs):
        return jnp.isin(lax.axis_index("pipe"), jnp.array([receiver for _, receiver in pairs]))


def messages():
    """Return the message of each step and stage."""
    return np.random.default_rng(0).normal(size=(STEPS, STAGES, *SHAPE)).astype(np.float32)


def crossed(codec):
    """Return what arrives at each stage, and what each sender has left out, [STEPS, STAGES, ...]."""

    def step(state, x, active):
        wire, state = codec.encode(state, x, active)
        arrived = codec.decode(codec.exchange(wire, Crossed()), x)
        return state, arrived, codec.residual(state, x)

    start = jax.vmap(lambda sender: codec.on_link(codec.init(SHAPE, "float32"), sender))
    run = jax.jit(jax.vmap(step, axis_name="pipe"))
    state, found = start(jnp.arange(STAGES)), []
    for x in messages():
        state, *told = run(state, x, np.arange(STAGES) < STAGES - 1)
        found.append(jax.device_get(told))
    return [np.stack(some) for some in zip(*found)]


@pytest.mark.parametrize(
    "codec",
    [QuantisedBlocks(4, block=16), RankByLink(LowRank(4), (4, 4, 2, 4))],
    ids=["int4", "ranks of links"],
)
def test_each_link_carries_the_form_that_is_its_own(codec):
    arrived, left = crossed(OnLinks(codec, SENDERS))
    given, (alone, residual) = messages(), crossed(codec)
    for sender, receiver in PAIRS:
        expected = alone[:, receiver] if SENDERS[sender] else given[:, sender]
        np.testing.assert_array_equal(arrived[:, receiver], expected)
        np.testing.assert_array_equal(left[:, sender], residual[:, sender] if SENDERS[sender] else 0 * given[:, sender])
    assert not np.array_equal(alone[:, 2], given[:, 1])  # on this link the codec alone would have changed something


def test_bytes_are_those_of_the_widest_link():
    codec = QuantisedBlocks(4, block=16)
    coded = codec.wire_bytes(SHAPE, "float32")
    assert OnLinks(codec, SENDERS).wire_bytes(SHAPE, "float32") == array_bytes(SHAPE, "float32") > coded
    assert OnLinks(codec, (True,) * STAGES).wire_bytes(SHAPE, "float32") == coded
