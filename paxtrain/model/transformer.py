"""The model of a configuration as pure functions over a tree of parameters: an embedding, layers, a head.

The canonical parameters have L layers stacked (also the layout of checkpoints). The architecture's table says which
arrays there are (gpt2.py, llama.py). With an untied head, embedding/token is [2, V, H]: the embedding's table, then the
head's. A pipeline stage holds one of them.

`group` names the mesh axis that splits heads, ffn and vocabulary, and tells whether the sequence is split as well. If
it is, S is one device's part of the sequence between the split matrices. The train step does not use `loss` and
`logits`: these are the plain model on one device, for sampling, comparing and reading.
"""

import dataclasses
import functools
import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain.config import ModelConfig
from paxtrain.config.axes import AXES, TENSOR, AxisSizes
from paxtrain.config.model import FLASH
from paxtrain.errors import UserError
from paxtrain.model import cross_entropy, families, parameters
from paxtrain.model import tensor_parallel as tp
from paxtrain.model.context import Dropout, LayerContext, drop
from paxtrain.model.spec import Params, Scalars

# Values that save="dots" keeps of a layer besides its input. No matrix product runs again, and no collective except
# the all-gathers of sequence parallelism: their results would have the whole sequence.
SAVED_NAMES = (*tp.PRODUCTS, "context", "sums", "middle")

_DETERMINISTIC = re.compile(r"--(xla_gpu_deterministic_ops|xla_gpu_exclude_nondeterministic_ops)(?:=(\w*))?(?!\S)")


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
    if config.attention == "cudnn" and capability < config.flash_capability:
        since = "Ampere" if config.flash_capability == FLASH[128] else "Hopper"
        raise UserError(
            f"model.attention=cudnn needs NVIDIA GPUs from {since} on for heads of {config.head_dim}, got "
            f"{device.device_kind}; auto or xla would work"
        )
    if config.attention == "cudnn" and not parameters.architecture(config).flash(config):
        raise UserError(
            f"model.attention=cudnn has no bound of scores, which a {config.family} has; auto or xla would work"
        )
    if not _deterministic():
        return parameters.with_attention(config, capability)
    if config.attention == "cudnn" and device.platform == "gpu":
        raise UserError(
            "model.attention=cudnn fails with the deterministic ops that XLA_FLAGS ask for; auto or xla would work"
        )
    return parameters.with_attention(config, (0, 0))


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

    every = ((names, parameters.stacked(config, p)) for names, p in parameters.by_names(config).items())
    return parameters.tree({names: jax.ShapeDtypeStruct(shape, jnp.float32) for names, shape in every})


def layer_params(layers: Params, config: ModelConfig, number: int) -> Params:
    """Return the parameters of one layer, without the leading dim.

    Args:
        layers: canonical parameters of the layers.
        config: the model's shape.
        number: the layer's number in the model.
    """
    own = parameters.of_kind(config, parameters.kinds(config)[number])
    found = {}
    for p in own:
        _, module, name = p.names
        found[p.names[1:]] = layers[module][name][parameters.stack(config, p).index(number)]
    return parameters.tree(found)


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Draw random canonical parameters as the architecture's table says."""
    known = parameters.by_names(config)
    keys = dict(zip(known, jax.random.split(key, len(known)), strict=True))
    deviations = {"normal": 0.02, "residual": 0.02 / (2 * config.layers) ** 0.5}

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = tuple(entry.key for entry in path)
        p = known[names]
        if p.init not in deviations:
            return jnp.ones(leaf.shape) if p.init == "ones" else jnp.zeros(leaf.shape)
        value = deviations[p.init] * jax.random.normal(keys[names], leaf.shape)
        if p.own[0] == "vocab":
            value = jnp.where(jnp.arange(leaf.shape[-2])[:, None] < config.vocab_size, value, 0)
        return value

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


def cast(params: Params, config: ModelConfig, *group: str) -> Params:
    """Return parameters in the dtypes in which a step uses them, see `Parameter.cast`.

    Args:
        params: canonical parameters, or a tree of some of them.
        config: the model's shape.
        group: keys that lead to the tree in the canonical parameters.
    """
    known = parameters.by_names(config)

    def one(path: tuple, w: jax.Array) -> jax.Array:
        return w.astype(config.dtype) if known[(*group, *(entry.key for entry in path))].cast else w

    return jax.tree_util.tree_map_with_path(one, params)


@jax.named_scope("layer")
def layer(
    p: Params,
    x: jax.Array,
    config: ModelConfig,
    group: tp.Group,
    dropout: Dropout | None,
    index: jax.Array | int,
    starts: jax.Array | None = None,
    kind: str = "",
) -> tuple[jax.Array, Scalars]:
    """Return the output of one layer of the architecture, [B, S, H] in the compute dtype, and its scalars by name.

    Args:
        p: one layer's parameters, without the leading L.
        x: [B, S, H] in the compute dtype.
        config: the model's shape.
        group: the split of the layer over devices.
        dropout: randomness of the micro-batch; None: no dropout.
        index: the layer's number in the model; it seeds its dropout.
        starts: beginnings of the documents, see `document_starts`; None: one document per row.
        kind: the layer's kind.
    """
    found = parameters.architecture(config).layer(p, x, LayerContext(config, group, dropout, index, starts, kind))
    return found if isinstance(found, tuple) else (found, {})


@functools.lru_cache(maxsize=64)
def check_layer(config: ModelConfig, mesh: AxisSizes, sequence_parallel: bool) -> None:
    """Require that layers run on a mesh, and that those of one's own return what they are given. Nothing is computed.

    Args:
        config: the model's shape.
        mesh: sizes of the axes that split layers.
        sequence_parallel: whether tensor splits the sequence.

    Raises:
        UserError: they do not, or return another shape or dtype.
    """
    for axis, dim in parameters.not_run(config, mesh).items():
        known = " and ".join(parameters.architecture(config).axes)
        raise UserError(
            f"mesh.{axis}={mesh[axis]} splits the dim {dim}, but the layers of {config.module or config.family} run "
            f"their collectives over {known} alone; mesh.{axis}=1 would work"
        )
    if not config.module:
        return
    group = tp.Group.of(mesh, sequence_parallel)
    config = dataclasses.replace(config, attention="xla")

    def given(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        """Return what all devices of the mesh are given."""
        return jax.ShapeDtypeStruct((*mesh.values(), *shape), dtype)

    def one(kind: str, weights: Params, x: jax.Array, index: jax.Array) -> tuple[jax.Array, Scalars]:
        starts = document_starts(jnp.zeros((1, config.sequence), jnp.int32), config)
        with families.errors_of(config, "layer()"):
            found = layer(weights, x, config, group, None, index, starts, kind)
        names = sorted(one.name for one in parameters.aux(config))
        scalars = f"{{{', '.join(f'{name}: float32[]' for name in names)}}}"
        before, after = _described(x), _described(found)
        if after != (f"({before}, {scalars})" if names else before):
            raise UserError(
                f"model.module={config.module}: its layer() is given x as {before} and returns {after}; it must return "
                f"the same shape and dtype{f', and beside it {scalars}, as its aux() says' if names else ''}"
            )
        return found

    parts = math.prod(
        size for axis, size in mesh.items() if AXES[axis].sequence or (axis == TENSOR and sequence_parallel)
    )
    x = given((1, config.sequence // parts, config.hidden), config.dtype)
    for kind in dict.fromkeys(parameters.kinds(config)):
        rows = parameters.of_kind(config, kind)
        weights = {p.names[1:]: given(p.shape(config, mesh), config.dtype if p.cast else "float32") for p in rows}
        run = functools.partial(one, kind)
        for axis in reversed(mesh):
            run = jax.vmap(run, axis_name=axis)
        jax.eval_shape(run, parameters.tree(weights), x, given((), "int32"))


def _described(value: Any) -> str:
    """Return shapes and dtypes of what a layer returns."""
    if isinstance(value, tuple):
        parts = [text for text in map(_described, value) if text != "{}"]
        return f"({', '.join(parts)})" if len(parts) > 1 else parts[0]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_described(value[name])}' for name in sorted(value))}}}"
    return str(jax.typeof(value)) if isinstance(value, jax.Array) else type(value).__name__


def _scaled(x: jax.Array, config: ModelConfig) -> jax.Array:
    """Return x times the architecture's factor of the tokens' rows."""
    scale = parameters.architecture(config).embedding_scale(config)
    return x if scale == 1 else x * scale


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
        tokens: int [B, S], of the whole sequence.
        config: the model's shape.
        group: the split of the vocabulary and the sequence.
        dropout: randomness of the micro-batch; None: no dropout.
        starts: beginnings of the documents, see `document_starts`; None: one document per row.

    Returns:
        [B, S, H] in the compute dtype, or this device's part of the sequence.
    """
    table = p["token"] if config.tied_head else p["token"][0]
    x = _scaled(tp.embedding_lookup(table, tp.own_tokens(tokens, 1, group), group), config)
    if "position" in p:
        where = slice(tokens.shape[1]) if starts is None else positions(starts)
        position = p["position"][where]
        x = x + tp.own(position, position.ndim - 2, group)
    return drop(x.astype(config.dtype), config.embedding_dropout, dropout, 0, group)


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
        tokens: int [B, S], of the whole sequence.
        g: gradient of the embedding's output, [B, S, H] or this device's part of it.
        config: the model's shape.
        group: the split of the vocabulary and the sequence.
        dropout: randomness that `embed` got.
        active: whether this stage holds the live embedding; if False, nothing is added.
        starts: beginnings of the documents that `embed` got.
    """
    g = tp.enter(drop(g, config.embedding_dropout, dropout, 0, group), group).astype(jnp.float32)
    token, of_rows = grads["token"], _scaled(g, config)
    local, here = tp.local_ids(tp.own_tokens(tokens, 1, group), token.shape[-2], group.axis)
    rows = jnp.where(here & active, local, token.shape[-2])
    place = token.at[rows] if config.tied_head else token.at[0, rows]
    added = {"token": place.add(of_rows, mode="drop")}
    if "position" in grads:
        total = g.sum(axis=0) if starts is None else g
        where: slice | jax.Array = slice(tokens.shape[1])
        if group.context or starts is not None:
            row = jnp.arange(tokens.shape[1])[None] if starts is None else positions(starts)
            where = tp.own_tokens(row, 1, group)
            where = where[0] if starts is None else where
        added["position"] = grads["position"].at[where].add(jnp.where(active, total, 0))
    return added


def head_table(embedding: Params, config: ModelConfig) -> jax.Array:
    """Return the head's table [V/T, H], which projects the last layer's output to logits."""
    return embedding["token"] if config.tied_head else embedding["token"][-1]


def _head_input(final_norm: Params, y: jax.Array, config: ModelConfig, group: tp.Group) -> jax.Array:
    context = LayerContext(config, group, None, config.layers, None)
    return tp.enter(parameters.architecture(config).head(final_norm, y, context), group)


def _logit_cap(config: ModelConfig) -> float:
    return parameters.architecture(config).logit_cap(config)


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
    return cross_entropy.cross_entropy(x, table, targets, config.vocab_size, group.axis, _logit_cap(config))


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
        x, table, targets, config.vocab_size, group.axis, 1 / count, total, _logit_cap(config)
    )
    norms, g = pull(g)
    return loss / count, norms, total, g


def _trunk(
    params: Params, tokens: jax.Array, config: ModelConfig, dropout: Dropout | None
) -> tuple[jax.Array, Scalars]:
    starts = document_starts(tokens, config)
    x = embed(params["embedding"], tokens, config, tp.WHOLE, dropout, starts)
    sums = {one.name: jnp.float32(0) for one in parameters.aux(config)}
    for i, kind in enumerate(parameters.kinds(config)):
        one = layer_params(params["layers"], config, i)
        x, scalars = layer(one, x, config, tp.WHOLE, dropout, i, starts, kind)
        sums = jax.tree.map(jnp.add, sums, scalars)
    return x, sums


def logits(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Return the next-token logits of the plain model on one device, float32 [B, S, V].

    Args:
        params: canonical parameters.
        tokens: int [B, S].
        config: the model's shape.
    """
    params = cast(params, config)
    y, _ = _trunk(params, tokens, config, None)
    x, table = _head_input(params["final_norm"], y, config, tp.WHOLE), head_table(params["embedding"], config)
    return cross_entropy.project(x, table, _logit_cap(config))[..., : config.vocab_size]


@functools.partial(jax.named_call, name="plain_loss")
def loss(params: Params, tokens: jax.Array, config: ModelConfig, dropout: Dropout | None = None) -> jax.Array:
    """Return the mean next-token cross-entropy of the plain model on one device, in nats, float32 [].

    Args:
        params: canonical parameters.
        tokens: int [B, S + 1].
        config: the model's shape.
        dropout: randomness of the batch; None: no dropout.
    """
    return loss_and_scalars(params, tokens, config, dropout)[0]


def loss_and_scalars(
    params: Params, tokens: jax.Array, config: ModelConfig, dropout: Dropout | None = None
) -> tuple[jax.Array, Scalars]:
    """Return what `loss` does, and the sums over the layers of their scalars.

    Args:
        params: canonical parameters.
        tokens: int [B, S + 1], a micro-batch; the scalars of several ones are not those of all together.
        config: the model's shape.
        dropout: randomness of the batch; None: no dropout.
    """
    params = cast(params, config)
    y, sums = _trunk(params, tokens[:, :-1], config, dropout)
    table = head_table(params["embedding"], config)
    return head_loss(params["final_norm"], table, y, tokens[:, 1:], config, tp.WHOLE), sums


def objective(loss: jax.Array, scalars: Scalars, config: ModelConfig) -> jax.Array:
    """Return the loss whose gradients are trained: the cross-entropy, and the layers' scalars by their weights."""
    return loss + sum(one.weight * scalars[one.name] for one in parameters.aux(config))
