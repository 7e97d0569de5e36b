"""Messages between stages arrive with the bits that the sender encoded, in one permute, for all dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from compress import Codec, LowRank
from paxtrain.pipeline.messages import send
from paxtrain.xla import hlo
from tests.compress.topk import TopK

STAGES, SHAPE = 4, (2, 4, 8)
PAIRS = ((1, 0), (2, 1), (3, 2))


class Signs(Codec):
    """A codec whose wire has a bool, an int8, a bfloat16 and a float32 array; the last has no dims."""

    def init(self, shape, dtype):
        return jnp.int32(0)

    def encode(self, state, x, active=True):
        scale = jnp.max(jnp.abs(x))
        wire = {"up": x > 0, "codes": (127 * x / scale).astype(jnp.int8), "x": x.astype(jnp.bfloat16), "scale": scale}
        return wire, state + active

    def decode(self, wire, like):
        return jnp.where(wire["up"], wire["x"], wire["codes"]).astype(like.dtype) * wire["scale"]


class Nothing(Signs):
    """A codec that sends nothing at all."""

    def encode(self, state, x, active=True):
        return (), state + active

    def decode(self, wire, like):
        return jnp.zeros(like.shape, like.dtype)


@pytest.mark.parametrize("codec", [TopK(5), Signs(), LowRank(3, factors="int8"), Nothing()])
def test_sender_and_receiver_have_the_same_bits(codec):
    mesh = Mesh(np.array(jax.devices()[:STAGES]), ("pipe",))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(STAGES, *SHAPE)), "float32")

    def step(x):
        state = codec.init(SHAPE, "float32")
        wire, after = send(codec, state, x[0], "pipe", jax.lax.axis_index("pipe"), PAIRS)
        moved = [jnp.any(new != old) for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state))]
        return codec.decode(wire, x[0])[None], jnp.any(jnp.array(moved))[None]

    specs = PartitionSpec("pipe")
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(specs, specs), check_vma=False))
    compiled = run.lower(x).compile()
    arrived, moved = compiled(x)
    encode = jax.jit(lambda x: codec.decode(codec.encode(codec.init(SHAPE, "float32"), x)[0], x))
    for sender, receiver in PAIRS:
        assert np.asarray(arrived[receiver]).tobytes() == np.asarray(encode(x[sender])).tobytes()
    assert moved.tolist() == [False, True, True, True]
    permutes = [op for op in hlo.collectives(compiled.as_text()) if op.pairs]
    assert len(permutes) == (0 if isinstance(codec, Nothing) else 1)
