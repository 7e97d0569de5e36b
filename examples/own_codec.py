# %% [markdown]
# # Your own codec in 30 lines
#
# The codec is blockwise int8 with error feedback: it sends each block of 64 values as int8 with one scale.

# %%
import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp

import compress
import paxtrain

jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax's devices


@dataclasses.dataclass(frozen=True)
class BlockInt8(compress.Codec):
    """Codec that sends blocks as int8 with one scale each, and adds the rounding error to the next message."""

    block: int = 64

    def init(self, shape, dtype):
        return jnp.zeros(shape, dtype)

    def encode(self, state, x, active=True):
        blocks = (x + state).reshape(-1, self.block)
        scale = jnp.abs(blocks).max(axis=1, keepdims=True) / 127
        wire = jnp.round(blocks / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale
        return wire, jnp.where(active, x + state - self.decode(wire, x), state)

    def decode(self, wire, like):
        values, scale = wire
        return (values * scale).astype(like.dtype).reshape(like.shape)

    def residual(self, state, like):
        return state


# %%
message = jax.random.normal(jax.random.key(0), (4, 128, 128))
print("error:", compress.codec_error(BlockInt8(), message, steps=3))
print("bytes:", compress.wire_bytes(BlockInt8(), message.shape, message.dtype), "of", message.nbytes)

# %% [markdown]
# Training with it needs no more code. The data, runs/data, are made of Python's standard library unless they are there.

# %%
if not pathlib.Path("runs/data/train.idx").exists():
    subprocess.run([sys.executable, "-m", "paxtrain.prepare", "--input=stdlib", "--out=runs/data"], check=True)
short = {"run.steps": 6, "optimizer.warmup_steps": 2, "run.eval_batches": 1, "run.sample_tokens": 0}
short["checkpoint.resume"] = False  # run again, it trains again
losses = {}
for name, codec in (("dense", None), ("int8", BlockInt8())):
    config = paxtrain.load_config("tiny", short | {"run.out": f"runs/{name}"})
    losses[name] = paxtrain.train(config, codec=codec, quiet=True).losses
    print(name, losses[name])
assert abs(losses["int8"][-1] / losses["dense"][-1] - 1) < 0.01
