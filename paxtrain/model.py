"""GPT-2 as pure functions over a parameter pytree: pre-LN, learned positions, tanh-GELU, biases, tied embedding.

The canonical parameters, L layers stacked (also the layout of checkpoints):

    embedding   token [V, H], position [S, H]
    layers      ln1, ln2: scale, bias [L, H]
                qkv: kernel [L, H, 3, H], bias [L, 3, H]      out: kernel [L, H, H], bias [L, H]
                up: kernel [L, H, F], bias [L, F]             down: kernel [L, F, H], bias [L, H]
    final_norm  scale, bias [H]

Every function takes `axis`, the mesh axis over which heads, ffn and vocabulary are split, or None where they are whole.
`python -m paxtrain.train` never calls `loss` or `logits`: they are the plain model on one device, for sampling, for
comparison, and to read.

References:
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from paxtrain import tensor_parallel as tp
from paxtrain.config import ModelConfig
from paxtrain.errors import UserError

Params = dict[str, Any]

# What save="dots" keeps of a layer besides its input: enough that no matrix product and no collective runs again.
SAVED_NAMES = ("qkv", "context", "middle", "up")


class Dropout(NamedTuple):
    """Randomness of one micro-batch, the same on any mesh.

    Attributes:
        key: uint32 [2], the step's.
        samples: int [B], each sequence's index in the global batch.
    """

    key: jax.Array
    samples: jax.Array


def document_starts(tokens: jax.Array, config: ModelConfig) -> jax.Array | None:
    """Where in its row the document of each token begins, for ids [..., S]: int32 [..., S], or None without separators.

    A document begins with config.separator, or where the row does. Tokens with equal starts see each other, and a
    token's position is its index minus its start.
    """
    if config.separator < 0:
        return None
    index = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    return lax.cummax(jnp.where(tokens == config.separator, index, 0), axis=tokens.ndim - 1)


def positions(starts: jax.Array) -> jax.Array:
    """Of the tokens in their documents, int32 [B, S]."""
    return jnp.arange(starts.shape[-1], dtype=jnp.int32) - starts


def shapes(config: ModelConfig) -> Params:
    """The canonical parameters as float32 jax.ShapeDtypeStruct."""
    layers, h, f = config.layers, config.hidden, config.ffn
    norm = {"scale": (layers, h), "bias": (layers, h)}
    tree = {
        "embedding": {"token": (config.padded_vocab, h), "position": (config.sequence, h)},
        "layers": {
            "ln1": norm,
            "qkv": {"kernel": (layers, h, 3, h), "bias": (layers, 3, h)},
            "out": {"kernel": (layers, h, h), "bias": (layers, h)},
            "ln2": norm,
            "up": {"kernel": (layers, h, f), "bias": (layers, f)},
            "down": {"kernel": (layers, f, h), "bias": (layers, h)},
        },
        "final_norm": {"scale": (h,), "bias": (h,)},
    }
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda s: isinstance(s, tuple))


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Random canonical parameters as GPT-2 draws them: N(0, 0.02), residual projections over sqrt(2L)."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes(config))
    keys = dict(zip([path for path, _ in leaves], jax.random.split(key, len(leaves))))

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [entry.key for entry in path]
        if names[-1] == "scale":
            return jnp.ones(leaf.shape)
        if names[-1] == "bias":
            return jnp.zeros(leaf.shape)
        deviation = 0.02 / (2 * config.layers) ** 0.5 if names[-2] in ("out", "down") else 0.02
        value = deviation * jax.random.normal(keys[path], leaf.shape)
        if names[-1] == "token":
            value = jnp.where(jnp.arange(leaf.shape[0])[:, None] < config.vocab_size, value, 0)
        return value

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


def norm(p: Params, x: jax.Array) -> jax.Array:
    """Layer normalisation over the last dim, computed in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centered).mean(axis=-1, keepdims=True)
    return (centered * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]).astype(x.dtype)


def _dropout(x: jax.Array, rate: float, dropout: Dropout | None, place: jax.Array | int) -> jax.Array:
    """Drops elements of x [B, S, H]; `place` (layer and branch) tells the masks of one sample apart."""
    if not rate or dropout is None:
        return x
    key = jax.random.fold_in(dropout.key, place)
    keep = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 1 - rate, x.shape[1:]))(dropout.samples)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def settle_attention(config: ModelConfig, device: jax.Device) -> ModelConfig:
    """The configuration with attention="auto" settled for a device: "cudnn" where flash attention runs, else "xla".

    Raises:
        UserError: "cudnn" is asked for where it does not run.
    """
    capability = float(getattr(device, "compute_capability", "0")) if device.platform == "gpu" else 0.0
    if config.attention == "auto":
        return dataclasses.replace(config, attention="cudnn" if config.fits_flash and capability >= 8 else "xla")
    if config.attention == "cudnn" and capability < 8:
        raise UserError(
            f"model.attention=cudnn needs NVIDIA GPUs from Ampere on, got {device.device_kind}; auto or xla would work"
        )
    return config


def layer(
    p: Params, x: jax.Array, config: ModelConfig, axis: str | None, dropout: Dropout | None, index: jax.Array | int,
    starts: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """One transformer layer.

    Args:
        p: one layer's parameters, without the leading L.
        x: [B, S, H] in the compute dtype.
        index: the layer's number in the model; it seeds its dropout.
        starts: of the documents, see `document_starts`.
    """
    batch, sequence, _ = x.shape

    h = tp.copy(norm(p["ln1"], x), axis)
    qkv = jnp.einsum("bsh,hcd->bscd", h, p["qkv"]["kernel"]) + p["qkv"]["bias"].astype(x.dtype)
    qkv = checkpoint_name(qkv, "qkv")
    q, k, v = (qkv[:, :, i].reshape(batch, sequence, -1, config.head_dim) for i in range(3))
    # "auto" that nobody has settled (the plain model) is XLA's attention.
    implementation = "cudnn" if config.attention == "cudnn" else "xla"
    mask = None if starts is None else starts[:, None, :, None] == starts[:, None, None, :]
    context = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)
    context = checkpoint_name(context.reshape(batch, sequence, -1), "context")
    y = tp.reduce(context @ p["out"]["kernel"], axis) + p["out"]["bias"].astype(x.dtype)
    x = x + _dropout(y, config.residual_dropout, dropout, 2 * index + 1)
    x = checkpoint_name(x, "middle")

    h = tp.copy(norm(p["ln2"], x), axis)
    h = checkpoint_name(h @ p["up"]["kernel"] + p["up"]["bias"].astype(x.dtype), "up")
    h = jax.nn.gelu(h, approximate=True)
    y = tp.reduce(h @ p["down"]["kernel"], axis) + p["down"]["bias"].astype(x.dtype)
    return x + _dropout(y, config.residual_dropout, dropout, 2 * index + 2)


def embed(
    p: Params, tokens: jax.Array, config: ModelConfig, axis: str | None, dropout: Dropout | None = None,
    starts: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Token plus position embedding of ids [B, S], in the compute dtype; p holds token [V/T, H] and position."""
    position = p["position"][: tokens.shape[1]] if starts is None else p["position"][positions(starts)]
    x = tp.embedding_lookup(p["token"], tokens, axis) + position
    return _dropout(x.astype(config.dtype), config.embedding_dropout, dropout, 0)


def embed_gradient(
    grads: Params, tokens: jax.Array, g: jax.Array, config: ModelConfig, axis: str | None,
    dropout: Dropout | None, active: jax.Array | bool = True, starts: jax.Array | None = None,
) -> Params:  # fmt: skip
    """Adds the embedding's gradient for g [B, S, H], in place where XLA can: no dense [V, H] term is made.

    Args:
        grads: token [V/T, H] and position [S, H], float32.
        active: whether this stage holds the live embedding; where False nothing is added.
    """
    g = _dropout(g, config.embedding_dropout, dropout, 0).astype(jnp.float32)
    local, here = tp.local_ids(tokens, grads["token"].shape[0], axis)
    rows = jnp.where(here & active, local, grads["token"].shape[0])
    position = grads["position"]
    if starts is None:
        position = position.at[: tokens.shape[1]].add(jnp.where(active, g.sum(axis=0), 0))
    else:
        position = position.at[positions(starts)].add(jnp.where(active, g, 0))
    return {"token": grads["token"].at[rows].add(g, mode="drop"), "position": position}


def _head_logits(final_norm: Params, table: jax.Array, y: jax.Array, axis: str | None) -> jax.Array:
    return tp.project(tp.copy(norm(final_norm, y), axis), table)


def head_loss(
    final_norm: Params, table: jax.Array, y: jax.Array, targets: jax.Array, config: ModelConfig, axis: str | None
) -> jax.Array:
    """Mean cross-entropy in nats of the last layer's output y [B, S, H] for targets [B, S]; table is [V/T, H]."""
    losses = tp.cross_entropy(_head_logits(final_norm, table, y, axis), targets, config.vocab_size, axis)
    return losses.mean()


def cast(params: Params, dtype: str) -> Params:
    """Matrices in the compute dtype; norms and biases stay in float32, they are small and are used so."""
    return jax.tree_util.tree_map_with_path(
        lambda path, w: w.astype(dtype) if path[-1].key in ("kernel", "token", "position") else w, params
    )


def _trunk(params: Params, tokens: jax.Array, config: ModelConfig, dropout: Dropout | None) -> jax.Array:
    starts = document_starts(tokens, config)
    x = embed(params["embedding"], tokens, config, None, dropout, starts)
    for i in range(config.layers):
        x = layer(jax.tree.map(lambda w, i=i: w[i], params["layers"]), x, config, None, dropout, i, starts)
    return x


def logits(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Next-token logits [B, S, V] in float32 of ids [B, S], by the plain model on one device."""
    params = cast(params, config.dtype)
    y = _trunk(params, tokens, config, None)
    return _head_logits(params["final_norm"], params["embedding"]["token"], y, None)[..., : config.vocab_size]


@functools.partial(jax.named_call, name="plain_loss")
def loss(params: Params, tokens: jax.Array, config: ModelConfig, dropout: Dropout | None = None) -> jax.Array:
    """Mean next-token cross-entropy in nats of ids [B, S+1], by the plain model on one device."""
    params = cast(params, config.dtype)
    y = _trunk(params, tokens[:, :-1], config, dropout)
    table = params["embedding"]["token"]
    return head_loss(params["final_norm"], table, y, tokens[:, 1:], config, None)
