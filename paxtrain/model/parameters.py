"""The parameters of a configuration's model: its architecture's table, and what is counted by it. No jax."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from paxtrain.config import ModelConfig
from paxtrain.config.axes import AXES, DATA, PIPE, UNSPLIT, AxisSizes
from paxtrain.model.families import check, check_aux, check_kinds, check_options, errors_of, imported, shipped
from paxtrain.model.spec import Architecture, Aux, Parameter, Params


def architecture(config: ModelConfig) -> Architecture:
    """Return the architecture of a model.

    Raises:
        UserError: it is a class of one's own that cannot be imported, or is no architecture.
    """
    return imported(config.module) if config.module else shipped(config.family)


@functools.lru_cache(maxsize=1024)
def table(config: ModelConfig) -> tuple[Parameter, ...]:
    """Return the table of a model's parameters.

    Raises:
        UserError: the architecture is one of one's own, and its table cannot be trained.
    """
    one = architecture(config)
    check_options(one, config)
    with errors_of(config, "parameters()"):
        rows = tuple(one.parameters(config))
    check(rows, config)
    return rows


@functools.lru_cache(maxsize=1024)
def aux(config: ModelConfig) -> tuple[Aux, ...]:
    """Return the scalars that a layer returns beside its output.

    Raises:
        UserError: the architecture is one of one's own, and cannot have such scalars.
    """
    one = architecture(config)
    with errors_of(config, "aux()"):
        found = tuple(one.aux(config))
    check_aux(found, config)
    return found


@functools.lru_cache(maxsize=1024)
def kinds(config: ModelConfig) -> tuple[str, ...]:
    """Return the kind of each layer, in model order.

    Raises:
        UserError: the architecture is one of one's own, and its kinds do not fit its layers.
    """
    one = architecture(config)
    with errors_of(config, "kinds()"):
        found = tuple(one.kinds(config))
    check_kinds(found, table(config), config)
    return found


class Traits(NamedTuple):
    """Facts of an architecture for which plans for other trainers ask.

    Attributes:
        rotary: positions turn pairs of a head's dims; otherwise they are learned, or there are none.
        gated: the feed-forward part has a gate.
        biases: some parameters are biases.
        grouped: keys and values may have fewer heads than queries.
    """

    rotary: bool
    gated: bool
    biases: bool
    grouped: bool


def traits(config: ModelConfig) -> Traits:
    """Return the facts of a model's architecture, as its table has them."""
    rows = table(config)
    return Traits(
        rotary=not any("positions" in p.own for p in rows),
        gated=any(p.own[1:] == ("2", "ffn") for p in rows),
        biases=any(p.role == "bias" for p in rows),
        grouped=any("kv_heads" in p.dims for p in rows),
    )


@functools.lru_cache(maxsize=1024)
def differ(config: ModelConfig) -> bool:
    """Return whether layers are of several kinds."""
    return len(set(kinds(config))) > 1


@functools.lru_cache(maxsize=4096)
def stack(config: ModelConfig, parameter: Parameter) -> tuple[int, ...]:
    """Return the layers, by number, that are stacked in a parameter of layers: those of its kinds."""
    return tuple(i for i, kind in enumerate(kinds(config)) if parameter.of(kind))


def of_kind(config: ModelConfig, kind: str) -> list[Parameter]:
    """Return the parameters of a layer of a kind, in jax's order of nested dictionaries."""
    assert kind in kinds(config), f"the layers are of the kinds {sorted(set(kinds(config)))}, not {kind!r}"
    rows = by_names(config).values()
    return [p for p in rows if p.lead == "layers" and p.of(kind)]


def not_run(config: ModelConfig, mesh: Mapping[str, int]) -> dict[str, str]:
    """Return the axes of several devices that split layers, which run no collectives over them.

    Args:
        config: the model's shape.
        mesh: sizes of axes by name.

    Returns:
        By axis the dim of which it takes a part.
    """
    dims = {dim.partition("*")[0] for p in table(config) if p.lead == "layers" for dim in p.own}
    strange = [axis for axis, size in mesh.items() if size > 1 and axis not in (*architecture(config).axes, DATA, PIPE)]
    split = {axis: dim for axis in strange for dim in AXES[axis].dims if dim in dims}
    return split | {axis: "sequence" for axis in strange if AXES[axis].sequence}


@functools.lru_cache(maxsize=1024)
def by_names(config: ModelConfig) -> dict[tuple[str, ...], Parameter]:
    """Return the same by the keys of each path, in jax's order of nested dictionaries."""
    return {p.names: p for p in sorted(table(config), key=lambda p: p.names)}


def tree(leaves: Mapping[tuple[str, ...], Any]) -> Params:
    """Return values by path as nested dictionaries."""
    found: Params = {}
    for names, leaf in leaves.items():
        inner = found
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = leaf
    return found


@functools.lru_cache(maxsize=4096)
def count(
    config: ModelConfig,
    entry: str = "layers",
    role: str = "",
    mesh: AxisSizes = UNSPLIT,
    tables: int = 1,
    kind: str = "",
) -> int:
    """Return the number of parameters of one layer, or of another entry of the tree, on a device.

    Args:
        config: the model's shape.
        entry: "layers", "embedding" or "final_norm".
        role: role of those that count; "": all.
        mesh: sizes of the axes that split layers.
        tables: tables of the vocabulary that the device holds.
        kind: the layer's kind.
    """
    rows = of_kind(config, kind) if entry == "layers" else [p for p in table(config) if p.names[0] == entry]
    some = (p for p in rows if role in ("", p.role))
    return sum(math.prod(p.shape(config, mesh)) * (tables if p.own[0] == "vocab" else 1) for p in some)


@functools.lru_cache(maxsize=4096)
def kernels(config: ModelConfig, mesh: AxisSizes) -> tuple[tuple[int, int], ...]:
    """Return the shapes [n, k] of a layer's kernels on one device, as gradients over data are compressed."""
    shapes = (p.shape(config, mesh) for p in table(config) if p.role == "kernel")
    return tuple((shape[0], math.prod(shape[1:])) for shape in shapes)


@functools.lru_cache(maxsize=4096)
def of_mean_layer(config: ModelConfig, mesh: AxisSizes) -> int:
    """Return the number of parameters of one layer on a device, in the mean if layers are of several kinds."""
    return sum(count(config, mesh=mesh, kind=kind) for kind in kinds(config)) // config.layers


def with_attention(config: ModelConfig, capability: tuple[int, int]) -> ModelConfig:
    """Return the model with attention="auto" replaced: "cudnn" if GPUs run flash attention for it, else "xla".

    Args:
        config: the model's shape.
        capability: CUDA compute capability of the GPUs; (0, 0) without GPUs.
    """
    if config.attention != "auto":
        return config
    fits = config.fits_flash and architecture(config).flash(config) and capability >= config.flash_capability
    return dataclasses.replace(config, attention="cudnn" if fits else "xla")


def attends(config: ModelConfig) -> bool:
    """Return whether a layer has attention: a dim of its parameters is heads."""
    return any(dim.startswith("heads") for p in table(config) for dim in p.own)


def whole(config: ModelConfig) -> int:
    """Return the number of all parameters, with the padding of the vocabulary."""
    return sum(math.prod(stacked(config, p)) for p in table(config))


def stacked(config: ModelConfig, parameter: Parameter) -> tuple[int, ...]:
    """Return the shape of a canonical parameter, with its layers or tables stacked."""
    own = parameter.shape(config)
    if not parameter.lead:
        return own
    return (len(stack(config, parameter)) if parameter.lead == "layers" else config.tables, *own)


def published(config: ModelConfig) -> int:
    """Return the number of all parameters as published, without the padding of the vocabulary."""
    return whole(dataclasses.replace(config, vocab_multiple=1))


def multiplied(config: ModelConfig) -> int:
    """Return the number of parameters that a token is multiplied with, without the padding of the vocabulary.

    Those are all except what is only looked up: positions, and an untied head's embedding. A tied table is the head's.
    """
    config = dataclasses.replace(config, vocab_multiple=1)
    head = next(p for p in table(config) if p.own[0] == "vocab")
    outside = count(config, "final_norm") + math.prod(head.shape(config))
    return sum(count(config, kind=kind) for kind in kinds(config)) + outside


def flops_per_token(config: ModelConfig) -> float:
    """Return the FLOPs of forward and backward for one token: 6 N + 12 L A S, or 6 N without attention.

    N counts every parameter that a token is multiplied with, see `multiplied`; A is the width of all heads.
    Attention is counted in full, although a causal kernel does half of it. Recomputation is not counted.

    References:
        Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311, appendix B.
    """
    width = config.heads * config.head_dim if attends(config) else 0
    attention = 12.0 * config.layers * width * config.sequence
    return 6.0 * multiplied(config) + attention
