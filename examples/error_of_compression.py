# %% [markdown]
# # The error of compression on a real gradient
#
# We train a small GPT for a few steps and take the gradient of the loss with respect to the activations between two
# layers. This gradient is compressed at several ranks, and sent eight times with error feedback.

# %%
import operator

import jax
import jax.numpy as jnp

import compress
import paxtrain
from paxtrain.model import transformer
from paxtrain.model.tensor_parallel import WHOLE

small = {"model.layers": 4, "mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 1, "batch.global_batch": 8}
config = paxtrain.load_config("tiny", small | {"optimizer.warmup_steps": 2})
trainer = paxtrain.Trainer(config, paxtrain.make_mesh(config.mesh, devices=jax.devices()[:1]))
state = trainer.init(seed=0)
shape = trainer.abstract_batch().shape
# Tokens with something to learn: each one follows from the one before.
tokens = (jax.random.randint(jax.random.key(0), shape[:1] + (1,), 0, 97) + 5 * jnp.arange(shape[1])) % 97
for _ in range(5):
    state, metrics = trainer.step(state, tokens)
print(f"loss after five steps: {float(metrics['loss']):.3f}")

# %%
params = trainer.canonical(state)["params"]
model = config.model


def run_layers(x: jax.Array, numbers: range) -> jax.Array:
    """Return the output of some layers, [B, S, H]."""
    for number in numbers:
        weights = jax.tree.map(operator.itemgetter(number), params["layers"])
        x, _ = transformer.layer(weights, x, model, WHOLE, None, number)
    return x


def loss_of_middle(x: jax.Array) -> jax.Array:
    """Return the loss as a function of the second layer's output [B, S, H]."""
    y = run_layers(x, range(2, 4))
    return transformer.head_loss(params["final_norm"], params["embedding"]["token"], y, tokens[:, 1:], model, WHOLE)


x = run_layers(transformer.embed(params["embedding"], tokens[:, :-1], model, WHOLE), range(2))
gradient = jax.jit(jax.grad(loss_of_middle))(x)

# %%
print("rank   bytes on the link   error of the first message   of eight together")
for rank in (2, 8, 32):
    codec = compress.LowRank(rank)
    error = compress.codec_error(codec, gradient, steps=8)
    share = compress.wire_bytes(codec, gradient.shape, gradient.dtype) / gradient.nbytes
    print(f"{rank:4}   {share:16.1%}   {float(error[0]):26.3f}   {float(error[-1]):17.3f}")
    assert error[-1] < error[0]
