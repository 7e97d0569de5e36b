"""GPT-2 and Llama as pure functions over a parameter pytree: pre-norm transformers that differ layer by layer.

The canonical parameters, L layers stacked (also the layout of checkpoints). GPT-2 has learned positions, LayerNorm,
tanh-GELU and biases:

    embedding   token [V, H], position [S, H]
    layers      ln1, ln2: scale, bias [L, H]
                qkv: kernel [L, H, 3, H], bias [L, 3, H]      out: kernel [L, H, H], bias [L, H]
                up: kernel [L, H, F], bias [L, F]             down: kernel [L, F, H], bias [L, H]
    final_norm  scale, bias [H]

Llama has rotary positions, RMSNorm, SwiGLU and K values for the keys of its fewer heads:

    embedding   token [V, H]
    layers      ln1, ln2: scale [L, H]
                q: kernel [L, H, H]    kv: kernel [L, H, 2, K]    out: kernel [L, H, H]
                gate_up: kernel [L, H, 2, F]                      down: kernel [L, F, H]
    final_norm  scale [H]

With an untied head, token is [2, V, H]: the embedding's table, then the head's. A pipeline stage holds one of them.

`group` names the mesh axis that splits heads, ffn and vocabulary, and tells whether the sequence is split as well. If
it is, S is one device's part of the sequence between the split matrices. The train step does not use `loss` and
`logits`: these are the plain model on one device, for sampling, comparing and reading.

References:
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2).
    Touvron et al. 2023, "LLaMA" and "Llama 2"; Su et al. 2021 (rotary positions); Zhang and Sennrich 2019 (RMSNorm);
    Shazeer 2020 (SwiGLU); Ainslie et al. 2023 (grouped-query heads).
"""

import functools
import os
import re
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from paxtrain.config import ModelConfig
from paxtrain.config.model import FLASH_CAPABILITY
from paxtrain.errors import UserError
from paxtrain.model import cross_entropy, pointwise
from paxtrain.model import tensor_parallel as tp

Params = dict[str, Any]

# Values that save="dots" keeps of a layer besides its input. No matrix product runs again, and no collective except
# the all-gathers of sequence parallelism: their results would have the whole sequence.
SAVED_NAMES = ("qkv", "context", "middle", "up")
_DETERMINISTIC = re.compile(r"--(xla_gpu_deterministic_ops|xla_gpu_exclude_nondeterministic_ops)(?:=(\w*))?(?!\S)")


class Dropout(NamedTuple):
    """Randomness of one micro-batch, the same on any mesh.

    Attributes:
        key: key of the step, uint32 [2].
        samples: index of each sequence in the global batch, int [B].
    """

    key: jax.Array
    samples: jax.Array


def document_starts(tokens: jax.Array, config: ModelConfig) -> jax.Array | None:
    """Return the index at which each token's document begins in its row, or None without separators.

    A document begins with config.separator, or at the row's beginning. For ids [..., S] the result is int32 [..., S].
    Tokens with equal starts see each other, and a token's position is its index minus its start.
    """
    if config.separator < 0:
        return None
    index = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    return lax.cummax(jnp.where(tokens == config.separator, index, 0), axis=tokens.ndim - 1)


def positions(starts: jax.Array) -> jax.Array:
    """Return the positions of tokens in their documents, int32 [B, S]."""
    return jnp.arange(starts.shape[-1], dtype=jnp.int32) - starts


def shapes(config: ModelConfig) -> Params:
    """Return the canonical parameters as float32 jax.ShapeDtypeStruct."""
    layers, h, f = config.layers, config.hidden, config.ffn
    table = (config.padded_vocab, h) if config.tied_head else (2, config.padded_vocab, h)
    if config.family == "llama":
        norm = {"scale": (layers, h)}
        tree = {
            "embedding": {"token": table},
            "layers": {
                "ln1": norm,
                "q": {"kernel": (layers, h, h)},
                "kv": {"kernel": (layers, h, 2, config.key_value)},
                "out": {"kernel": (layers, h, h)},
                "ln2": norm,
                "gate_up": {"kernel": (layers, h, 2, f)},
                "down": {"kernel": (layers, f, h)},
            },
            "final_norm": {"scale": (h,)},
        }
    else:
        norm = {"scale": (layers, h), "bias": (layers, h)}
        tree = {
            "embedding": {"token": table, "position": (config.sequence, h)},
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
    """Draw random canonical parameters as GPT-2 does: N(0, 0.02), residual projections over sqrt(2L)."""
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
            value = jnp.where(jnp.arange(leaf.shape[-2])[:, None] < config.vocab_size, value, 0)
        return value

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Apply rotary positions to x [B, S, N, D]: dims i and i + D/2 of position s turn by s / theta^(2i/D).

    Positions count from the row's beginning, even if documents begin within it: attention depends on the difference
    of two positions, which is the same from any beginning (Su et al. 2021).
    """
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _dropout(x: jax.Array, rate: float, dropout: Dropout | None, place: jax.Array | int, group: tp.Group) -> jax.Array:
    """Drop elements of x [B, S, H].

    Args:
        x: [B, S or S/T, H].
        rate: share of the elements to drop.
        dropout: randomness of the micro-batch; None: nothing is dropped.
        place: number of layer and branch, which makes the masks of one sample differ.
        group: the split of the sequence.
    """
    if not rate or dropout is None:
        return x
    key = jax.random.fold_in(dropout.key, place)
    sequence = (group.parts * x.shape[1], x.shape[2])  # the whole sequence, so that masks are the same on any mesh
    keep = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 1 - rate, sequence))(dropout.samples)
    return jnp.where(tp.own(keep, 1, group), x / (1 - rate), 0).astype(x.dtype)


def _deterministic() -> bool:
    """Return whether XLA_FLAGS ask for deterministic ops on GPUs."""
    given = _DETERMINISTIC.findall(os.environ.get("XLA_FLAGS", ""))
    return any(value.lower() in ("", "1", "true") for value in dict(given).values())


def settle_attention(config: ModelConfig, device: jax.Device) -> ModelConfig:
    """Return `config` with attention="auto" replaced: "cudnn" if the device runs flash attention, else "xla".

    With deterministic ops "auto" is "xla": there XLA loses the compiled graphs of cuDNN's attention, and the first step
    fails (seen with jax 0.11.2 on an H200; openxla/xla#46500 says why).

    Raises:
        UserError: "cudnn" is asked for, and the device or XLA_FLAGS do not allow it.
    """
    named = str(getattr(device, "compute_capability", "0.0")) if device.platform == "gpu" else "0.0"
    major, _, minor = named.partition(".")
    capability = int(major), int(minor or 0)
    if config.attention == "cudnn" and capability < FLASH_CAPABILITY:
        raise UserError(
            f"model.attention=cudnn needs NVIDIA GPUs from Ampere on, got {device.device_kind}; auto or xla would work"
        )
    if not _deterministic():
        return config.with_attention(capability)
    if config.attention == "cudnn" and device.platform == "gpu":
        raise UserError(
            "model.attention=cudnn fails with the deterministic ops that XLA_FLAGS ask for; auto or xla would work"
        )
    return config.with_attention((0, 0))


def _queries_keys_values(p: Params, h: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values [B, S, N, D] of a normalized h [B, S, H]; the last two may have fewer heads."""

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, config.head_dim)

    if config.family == "llama":
        q = checkpoint_name(h @ p["q"]["kernel"], "qkv")
        kv = checkpoint_name(jnp.einsum("bsh,hck->bsck", h, p["kv"]["kernel"]), "qkv")
        k, v = heads(kv[:, :, 0]), heads(kv[:, :, 1])
        return rotate(heads(q), config.rope_theta), rotate(k, config.rope_theta), v
    # Saved without the bias: what a product makes is read and written once less.
    qkv = checkpoint_name(jnp.einsum("bsh,hcd->bscd", h, p["qkv"]["kernel"]), "qkv") + p["qkv"]["bias"].astype(h.dtype)
    q, k, v = (heads(qkv[:, :, i]) for i in range(3))
    return q, k, v


def _feed_forward(p: Params, h: jax.Array, config: ModelConfig) -> jax.Array:
    """Return the input of `down`, [B, S, F]."""
    if config.family == "llama":
        gate_up = checkpoint_name(jnp.einsum("bsh,hcf->bscf", h, p["gate_up"]["kernel"]), "up")
        return pointwise.swiglu(gate_up)
    return pointwise.gelu(checkpoint_name(h @ p["up"]["kernel"], "up") + p["up"]["bias"].astype(h.dtype))


def _row_parallel(p: Params, x: jax.Array, group: tp.Group) -> jax.Array:
    """Multiply x [B, S, N/T] by a kernel [N/T, H] that is split by rows, and add the bias if there is one."""
    y = tp.leave(x @ p["kernel"], group)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


@jax.named_scope("layer")
def layer(
    p: Params,
    x: jax.Array,
    config: ModelConfig,
    group: tp.Group,
    dropout: Dropout | None,
    index: jax.Array | int,
    starts: jax.Array | None = None,
) -> jax.Array:
    """Return the output of one transformer layer, [B, S, H] in the compute dtype.

    Args:
        p: one layer's parameters, without the leading L.
        x: [B, S, H] in the compute dtype.
        config: the model's shape.
        group: the split of the layer over devices.
        dropout: randomness of the micro-batch; None: no dropout.
        index: the layer's number in the model; it seeds its dropout.
        starts: beginnings of the documents, see `document_starts`; None: one document per row.
    """
    h = tp.enter(pointwise.norm(p["ln1"], x, config.norm_epsilon), group)
    q, k, v = _queries_keys_values(p, h, config)
    # The plain model leaves "auto" as it is, which means XLA's attention here.
    implementation: Literal["xla", "cudnn"] = "cudnn" if config.attention == "cudnn" else "xla"
    mask = None if starts is None else starts[:, None, :, None] == starts[:, None, None, :]
    context = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)
    context = checkpoint_name(context.reshape(*context.shape[:2], -1), "context")
    y = _row_parallel(p["out"], context, group)
    x = x + _dropout(y, config.residual_dropout, dropout, 2 * index + 1, group)
    x = checkpoint_name(x, "middle")

    h = tp.enter(pointwise.norm(p["ln2"], x, config.norm_epsilon), group)
    y = _row_parallel(p["down"], _feed_forward(p, h, config), group)
    return x + _dropout(y, config.residual_dropout, dropout, 2 * index + 2, group)


@jax.named_scope("embed")
def embed(
    p: Params,
    tokens: jax.Array,
    config: ModelConfig,
    group: tp.Group,
    dropout: Dropout | None = None,
    starts: jax.Array | None = None,
) -> jax.Array:
    """Return the embedding of token ids, with learned positions if the model has them.

    Args:
        p: token [V/T, H], or [1 or 2, V/T, H] if the head is untied, and position [S, H] if any.
        tokens: int [B, S].
        config: the model's shape.
        group: the split of the vocabulary and the sequence.
        dropout: randomness of the micro-batch; None: no dropout.
        starts: beginnings of the documents, see `document_starts`; None: one document per row.

    Returns:
        [B, S, H] in the compute dtype, or this device's part of the sequence.
    """
    table = p["token"] if config.tied_head else p["token"][0]
    x = tp.embedding_lookup(table, tokens, group)
    if "position" in p:
        where = slice(tokens.shape[1]) if starts is None else positions(starts)
        position = p["position"][where]
        x = x + tp.own(position, position.ndim - 2, group)
    return _dropout(x.astype(config.dtype), config.embedding_dropout, dropout, 0, group)


@jax.named_scope("embed")
def embed_gradient(
    grads: Params,
    tokens: jax.Array,
    g: jax.Array,
    config: ModelConfig,
    group: tp.Group,
    dropout: Dropout | None,
    active: jax.Array | bool = True,
    starts: jax.Array | None = None,
) -> Params:
    """Add the embedding's gradient to `grads`, in place if XLA can; no dense [V, H] term is made.

    Args:
        grads: token [V/T, H], or [1 or 2, V/T, H] if the head is untied, and position [S, H] if any; float32.
        tokens: int [B, S].
        g: gradient of the embedding's output, [B, S, H].
        config: the model's shape.
        group: the split of the vocabulary and the sequence.
        dropout: randomness that `embed` got.
        active: whether this stage holds the live embedding; if False, nothing is added.
        starts: beginnings of the documents that `embed` got.
    """
    g = tp.enter(_dropout(g, config.embedding_dropout, dropout, 0, group), group).astype(jnp.float32)
    token = grads["token"]
    local, here = tp.local_ids(tokens, token.shape[-2], group.axis)
    rows = jnp.where(here & active, local, token.shape[-2])
    place = token.at[rows] if config.tied_head else token.at[0, rows]
    added = {"token": place.add(g, mode="drop")}
    if "position" in grads:
        where, total = (slice(tokens.shape[1]), g.sum(axis=0)) if starts is None else (positions(starts), g)
        added["position"] = grads["position"].at[where].add(jnp.where(active, total, 0))
    return added


def head_table(embedding: Params, config: ModelConfig) -> jax.Array:
    """Return the head's table [V/T, H], which projects the last layer's output to logits."""
    return embedding["token"] if config.tied_head else embedding["token"][-1]


def _head_input(final_norm: Params, y: jax.Array, config: ModelConfig, group: tp.Group) -> jax.Array:
    return tp.enter(pointwise.norm(final_norm, y, config.norm_epsilon), group)


@jax.named_scope("head_loss")
def head_loss(
    final_norm: Params, table: jax.Array, y: jax.Array, targets: jax.Array, config: ModelConfig, group: tp.Group
) -> jax.Array:
    """Return the mean cross-entropy of the last layer's output, in nats.

    Args:
        final_norm: parameters of the final norm, [H] each.
        table: the head's table, [V/T, H].
        y: the last layer's output, [B, S, H].
        targets: int [B, S].
        config: the model's shape.
        group: the split of the vocabulary and the sequence.
    """
    x = _head_input(final_norm, y, config, group)
    return cross_entropy.cross_entropy(x, table, targets, config.vocab_size, group.axis)


@jax.named_scope("head_loss")
def head_gradients(
    final_norm: Params,
    table: jax.Array,
    y: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    group: tp.Group,
    divisor: float,
    total: jax.Array,
) -> tuple[jax.Array, Params, jax.Array, jax.Array]:
    """Return the mean cross-entropy over `divisor`, and its gradients.

    Args:
        final_norm: parameters of the final norm, [H] each.
        table: the head's table, [V/T, H].
        y: the last layer's output, [B, S, H].
        targets: int [B, S].
        config: the model's shape.
        group: the split of the vocabulary and the sequence.
        divisor: mean number of micro-batches of the data ranks, by which the mean is divided.
        total: accumulator of the table's gradient, float32 [V/T, H].

    Returns:
        The loss; the gradients of the final norm; the accumulator with the table's gradient added; and the gradient of
        y.
    """
    x, pull = jax.vjp(lambda p, y: _head_input(p, y, config, group), final_norm, y)
    count = targets.size * divisor
    loss, g, total = cross_entropy.losses_and_gradients(
        x, table, targets, config.vocab_size, group.axis, 1 / count, total
    )
    norms, g = pull(g)
    return loss / count, norms, total, g


def cast(params: Params, dtype: str) -> Params:
    """Return the parameters with matrices in the compute dtype; norms and biases are small and stay in float32."""
    return jax.tree_util.tree_map_with_path(
        lambda path, w: w.astype(dtype) if path[-1].key in ("kernel", "token", "position") else w, params
    )


def _trunk(params: Params, tokens: jax.Array, config: ModelConfig, dropout: Dropout | None) -> jax.Array:
    starts = document_starts(tokens, config)
    x = embed(params["embedding"], tokens, config, tp.WHOLE, dropout, starts)
    for i in range(config.layers):
        one = jax.tree.map(lambda w, i=i: w[i], params["layers"])
        x = layer(one, x, config, tp.WHOLE, dropout, i, starts)
    return x


def logits(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Return the next-token logits of the plain model on one device, float32 [B, S, V].

    Args:
        params: canonical parameters.
        tokens: int [B, S].
        config: the model's shape.
    """
    params = cast(params, config.dtype)
    y = _trunk(params, tokens, config, None)
    x, table = _head_input(params["final_norm"], y, config, tp.WHOLE), head_table(params["embedding"], config)
    return cross_entropy.project(x, table)[..., : config.vocab_size]


@functools.partial(jax.named_call, name="plain_loss")
def loss(params: Params, tokens: jax.Array, config: ModelConfig, dropout: Dropout | None = None) -> jax.Array:
    """Return the mean next-token cross-entropy of the plain model on one device, in nats, float32 [].

    Args:
        params: canonical parameters.
        tokens: int [B, S + 1].
        config: the model's shape.
        dropout: randomness of the batch; None: no dropout.
    """
    params = cast(params, config.dtype)
    y = _trunk(params, tokens[:, :-1], config, dropout)
    table = head_table(params["embedding"], config)
    return head_loss(params["final_norm"], table, y, tokens[:, 1:], config, tp.WHOLE)
