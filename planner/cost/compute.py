"""Seconds of compute: F and B of a layer, the head, the embedding and the optimizer, on a device kind.

If the cluster has a compute profile, times are the measured ones, interpolated and extrapolated linearly in the
micro-batch. A time that was not measured is the data sheet's figure, scaled by the ratio of the nearest measured row
to the data sheet's figure of that row. Without a profile it is the data sheet's figure: matrix products by their shapes
(planner.cluster.products), everything else at named shares of the peak.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError
from paxtrain.model import parameters
from paxtrain.schedule.schedules import Numbers
from planner.cluster.cluster import ASSUMED, Cluster, Shares
from planner.cluster.device_sheets import REACH, SHEETS, DeviceSheet
from planner.cluster.products import UNKNOWN_SHAPES, ProductRates
from planner.cost.closed_forms import ring
from planner.program.cache import layer_program
from planner.program.layer_program import LayerProgram, MatrixProduct

LAUNCH = 5e-6  # seconds a kernel takes to start beside its work
# Passes of F over its [B, S, H] activations in memory besides matrix products: norms, residual sums, GELU over 4 H.
_ACTIVATION_PASSES = 22
_SHARPNESS = 4  # of `launched`
ITEM = {"bfloat16": 2, "float32": 4}
# Passes over [B, S, H] that splitting the backward adds: W makes norms and GELU again, B writes what W needs.
_SPLIT_PASSES = {"weights": 12, "input": 18}
# Attention that keeps no scores in memory: share of the products' FLOP/s that it reaches on the half of the scores that
# a causal mask leaves (Dao 2023, FlashAttention-2).
_FLASH = 0.7
# Other attention passes over all scores besides its products: softmax and dropout read and write them, F and B.
_SCORE_PASSES = 4.5, 5.5


class _Again(NamedTuple):
    """Parts of F that B runs again: shares of products with kernels, attention, passes, launches and collectives."""

    products: float
    attention: float
    passes: float
    launches: float
    collectives: float


# By pipeline.save. An F that B runs again leaves out its last collective.
_WHOLE = _Again(1, 1, 1, 1, 1)
_RECOMPUTED = {
    "inputs": _WHOLE,
    "layer_inputs": _WHOLE,
    "residuals": _Again(0, 0, 0, 0, 0),
    "dots": _Again(0, 0, 1, 0.5, 0),  # everything except matrix products
    # What other trainers run again: Megatron-LM's selective recomputation, and torchtitan's of every other layer and of
    # every other product with kernels.
    "scores": _Again(0, 1, 0, 0.5, 0),
    "half_layers": _Again(0.5, 0.5, 0.5, 0.5, 0.5),
    "half_products": _Again(0.5, 0, 1, 0.75, 0),
}
# All-gathers that sequence parallelism adds to B; those of "scores" lie under the products.
_GATHERS = {"residuals": 0, "scores": 0, "dots": 2}


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """Seconds on one device, of one micro-batch unless a field says otherwise.

    Attributes:
        forward: F of one layer.
        backward: B of one layer, which recomputes what is not saved.
        backward_input: B of one layer if the backward is split.
        backward_weights: W of one layer; with backward_input it takes a little more than the whole B.
        head: loss and its gradient.
        embedding: look-up and its gradient.
        optimizer: update of one float32 parameter held by the device.
        byte: one pass over a byte of memory.
        chunk: constant part of F and of B of a chunk.
    """

    forward: float
    backward: float
    backward_input: float
    backward_weights: float
    head: float
    embedding: float
    optimizer: float
    byte: float
    chunk: float = 0.0


def _all_reduce(members: int, size: int, alpha: float, bandwidth: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes over a ring."""
    return 2 * (members - 1) * alpha + float(ring(size, members, bandwidth))


def launched(seconds: Numbers, launches: Numbers) -> Any:
    """Return the seconds of kernels, some of which wait for their launch and others for memory.

    That is the p-norm of the two sums; the arguments are numbers or arrays.

    Args:
        seconds: seconds of all kernels if their launch takes no time.
        launches: seconds in which the host launches them.
    """
    return (seconds**_SHARPNESS + launches**_SHARPNESS) ** (1 / _SHARPNESS)


@functools.lru_cache(maxsize=4096)
def _seconds(rates: ProductRates, products: tuple[MatrixProduct, ...], micro_batch: int) -> float:
    """Return the seconds of products, one after another."""
    return sum(one.times * rates.seconds(*one.sizes(micro_batch)) for one in products)


@functools.lru_cache(maxsize=4096)
def _settled(model: ModelConfig, capability: tuple[int, int], stored_scores: bool) -> ModelConfig:
    """Return the model with the attention that a device runs; with XLA's all scores go through memory."""
    return dataclasses.replace(model, attention="xla") if stored_scores else model.with_attention(capability)


def _attention(
    model: ModelConfig, program: LayerProgram, rates: ProductRates, tensor: int, micro_batch: int, shares: Shares
) -> tuple[float, float]:
    """Return the seconds of attention in F and in B.

    Args:
        model: model whose attention is settled.
        program: its layer's program.
        rates: rates of its products.
        tensor: T.
        micro_batch: sequences of a micro-batch.
        shares: shares of the data sheet.
    """
    forward, backward = program.forward.attention, program.backward.attention
    if model.attention == "xla":
        batch = -(-micro_batch * model.heads // tensor)
        passes = shares.scores * batch * model.sequence**2 * rates.item / rates.memory
        # B counts as two products for each of F's, with which the constants are fitted. By their own shapes they take
        # up to 3% of a layer's B more or less.
        seconds = _seconds(rates, forward, micro_batch)
        return seconds + _SCORE_PASSES[0] * passes, 2 * seconds + _SCORE_PASSES[1] * passes
    f, b = (sum(math.prod(one.sizes(micro_batch)) * one.times for one in products) for products in (forward, backward))
    # Two operations for each product of numbers, and half of the scores.
    return f / (_FLASH * rates.flops), b / (_FLASH * rates.flops)


def sheet(
    model: ModelConfig,
    device: DeviceSheet,
    tensor: int,
    micro_batch: int,
    save: str,
    inside: tuple[float, float],
    shares: Shares = ASSUMED,
    sequence_parallel: bool = False,
) -> LayerCosts:
    """Return the data sheet's costs.

    The products of F and B are read from the layer's program. Flash attention leaves out what is masked. F and B have
    two all-reduces of [B, S, H] over tensor each (Shoeybi et al. 2019), rings of 2(T-1)/T; or reduce-scatters and
    all-gathers, which are halves of them (Korthikanti et al. 2022).

    Args:
        model: model to train.
        device: data sheet.
        tensor: T.
        micro_batch: sequences of a micro-batch.
        save: PipelineConfig.save, or what another trainer runs again, one of _RECOMPUTED.
        inside: latency in seconds and bytes/s of a link inside a host.
        shares: shares of the data sheet that the device reaches.
        sequence_parallel: MeshConfig.sequence_parallel.
    """
    item = ITEM[model.dtype]
    tokens, h = micro_batch * model.sequence, model.hidden
    peak = (device.peak_flops if model.dtype == "bfloat16" else device.single_flops) * shares.matmul
    peak *= device.reach * (1.0 if device.sms else UNKNOWN_SHAPES)
    rates = ProductRates(peak, device.bandwidth * shares.memory, device.sms, item)
    reduce = _all_reduce(tensor, tokens * h * item, *inside)
    ratio, launch = shares.backward / 2, shares.layer_launch  # 1 if B takes twice as long as F

    settled = _settled(model, device.capability, shares.stored_scores)
    program = layer_program(settled, tensor, sequence_parallel, "residuals")
    parts = program.forward, program.backward, program.weights
    products, of_inputs, of_kernels = (_seconds(rates, part.products, micro_batch) for part in parts)
    attention, attention_backward = _attention(settled, program, rates, tensor, micro_batch, shares)
    # Norms and residual sums run whole on each device of a tensor group, or on parts; the wide part is split.
    once = tokens * h * item * (0.4 / (tensor if sequence_parallel else 1) + 0.6 / tensor) / rates.memory
    passes = _ACTIVATION_PASSES * once
    forward = launched(products + attention + passes, launch) + 2 * reduce
    rest = ratio * (attention_backward + 2 * passes + of_inputs)  # of B besides its products for kernels
    backward = launched(rest + ratio * of_kernels, 2 * launch) + 2 * reduce
    part = _RECOMPUTED[save]
    again = part.products * products + part.attention * attention + part.passes * passes
    again = launched(again, part.launches * launch) + part.collectives * reduce
    if sequence_parallel:
        again += _GATHERS.get(save, 1) * reduce / 2
    weights = launched(ratio * of_kernels + _SPLIT_PASSES["weights"] * once, 0.5 * launch)
    rest = launched(rest + _SPLIT_PASSES["input"] * once, 1.5 * launch) + 2 * reduce + again
    rows = model.padded_vocab // tensor
    logits = MatrixProduct(tokens, rows, h), MatrixProduct(tokens, h, rows), MatrixProduct(rows, h, tokens)
    traffic = 8 * tokens * model.padded_vocab / tensor * item / rates.memory
    head = shares.head * (_seconds(rates, logits, 1) + traffic + 2 * reduce + 20 * LAUNCH)
    embedding = 6 * tokens * h * item / rates.memory + reduce + 4 * LAUNCH
    optimizer = shares.optimizer_bytes / rates.memory
    times = (forward, backward + again, rest, weights, head, embedding, optimizer)
    return LayerCosts(*times, byte=optimizer / shares.optimizer_bytes, chunk=shares.chunk_seconds)


# --- With a profile ---------------------------------------------------------------------------------------------------

TIMES = ("forward", "backward", "head", "embedding", "optimizer")
PARTS = ("backward_input", "backward_weights")  # of backward; rows may lack them
# The facts of a model that a row of a compute profile names; rows that name no family are of GPT-2.
PROFILED = ("hidden", "heads", "sequence", "vocab", "dtype", "family", "key_value_heads", "ffn")


def profiled(model: ModelConfig) -> tuple:
    """Return a model's values of PROFILED."""
    sizes = (model.hidden, model.heads, model.sequence, model.padded_vocab, model.dtype)
    return (*sizes, model.family, model.key_value_heads, model.ffn)


def profiled_row(row: Mapping[str, Any]) -> tuple:
    """Return a row's values of PROFILED."""
    defaults = {"family": "gpt2", "key_value_heads": row["heads"], "ffn": 4 * row["hidden"]}
    return tuple({**defaults, **row}[key] for key in PROFILED)


@functools.lru_cache(maxsize=64)
def _groups(cluster: Cluster, kind: str) -> dict[tuple, dict[str, np.ndarray]]:
    """Return the rows of one kind by shape: micro_batch and each of the times as arrays by rising micro-batch."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for row in cluster.compute:
        if row["kind"] == kind:
            shape = (*profiled_row(row), row["tensor"], row["save"])
            found.setdefault(shape, []).append(row)
    groups = {}
    for shape, rows in found.items():
        rows.sort(key=lambda row: row["micro_batch"])
        keys = ("micro_batch", *TIMES, *(part for part in PARTS if all(part in row for row in rows)))
        groups[shape] = {key: np.array([row[key] for row in rows], float) for key in keys}
    return groups


def _distance(a: tuple, b: tuple) -> float:
    """Return the distance of two shapes: the differences of log2 sizes, plus 4 per differing dtype or save mode."""
    sizes = sum(abs(math.log2(x / y)) for x, y in zip(a, b) if isinstance(x, int))
    return sizes + 4.0 * sum(x != y for x, y in zip(a, b) if isinstance(x, str))


def _affine(micro_batch: int, at: np.ndarray, seconds: np.ndarray) -> float:
    """Return the seconds at a micro-batch: linear between measured sizes, and beyond them through the nearest two."""
    if len(at) == 1:
        return float(seconds[0] * micro_batch / at[0])
    i = int(np.clip(np.searchsorted(at, micro_batch) - 1, 0, len(at) - 2))
    slope = max((seconds[i + 1] - seconds[i]) / (at[i + 1] - at[i]), 0.0)
    return float(max(seconds[i] + slope * (micro_batch - at[i]), 0.5 * seconds[0] * min(1.0, micro_batch / at[0])))


def inside(cluster: Cluster, kind: str) -> tuple[float, float]:
    """Return latency and bandwidth inside the slowest host of a kind."""
    hosts = np.array([i for i, k in enumerate(cluster.kinds) if k == kind])
    return float(cluster.alpha[hosts, hosts].max()), float(cluster.bandwidth[hosts, hosts].min())


# CPUs have no data sheet. Only ratios of these figures are used, which have the right proportion. They have no waves.
_CPU = dataclasses.replace(SHEETS["v100"], sms=0)


@functools.lru_cache(maxsize=100_000)
def layer(
    cluster: Cluster,
    kind: str,
    model: ModelConfig,
    tensor: int,
    micro_batch: int,
    save: str,
    sequence_parallel: bool = False,
) -> LayerCosts:
    """Return the costs on a device kind of the cluster: measured if there is a profile, else the data sheet's.

    Profiles are measured without sequence parallelism. Its effect is the data sheet's proportion.

    Args:
        cluster: cluster with its profile.
        kind: device kind.
        model: model to train.
        tensor: T.
        micro_batch: sequences of a micro-batch.
        save: PipelineConfig.save.
        sequence_parallel: MeshConfig.sequence_parallel.

    Raises:
        UserError: a kind without a data sheet has no profile.
    """
    link = inside(cluster, kind)
    device = cluster.sheet(kind) or _CPU
    groups = _groups(cluster, kind)
    if not groups:
        if kind == "cpu":
            raise UserError("a cluster of device cpu has no data sheet to go by; measure it: python -m planner.profile")
        return sheet(model, device, tensor, micro_batch, save, link, cluster.shares, sequence_parallel)
    shape = (*profiled(model), tensor, save)
    nearest = min(groups, key=lambda other: _distance(shape, other))
    rows = groups[nearest]
    times = [name for name in (*TIMES, *PARTS) if name in rows]
    measured = {name: _affine(micro_batch, rows["micro_batch"], rows[name]) for name in times}
    here = sheet(model, device, tensor, micro_batch, save, link, sequence_parallel=sequence_parallel)
    if nearest != shape or sequence_parallel:
        *sizes, other_tensor, other_save = nearest
        names = ("hidden", "heads", "sequence", "vocab_size", "dtype", "family", "kv_heads", "intermediate")
        attention = "xla" if model.attention == "xla" else "auto"
        other = dataclasses.replace(model, **dict(zip(names, sizes, strict=True)), attention=attention)
        # A profile is measured on groups inside a host, whatever hosts are taken together here.
        measured_inside = inside(cluster.parts or cluster, kind)
        there = sheet(other, device, other_tensor, micro_batch, other_save, measured_inside)
        measured = {name: value * getattr(here, name) / getattr(there, name) for name, value in measured.items()}
    # If the backward was measured whole, its parts have the data sheet's shares.
    parts = {name: measured["backward"] * getattr(here, name) / here.backward for name in PARTS}
    return LayerCosts(**parts | measured, byte=measured["optimizer"] / cluster.shares.optimizer_bytes)


def source(cluster: Cluster) -> str:
    """Return the source of the compute times, in words for reports."""
    profiled = {row["kind"] for row in cluster.compute}
    if profiled >= set(cluster.kinds):
        return "compute profile of the cluster"
    shares = cluster.shares
    some = f"compute profile of {', '.join(sorted(profiled))}; of the others " if profiled & set(cluster.kinds) else ""
    sheets = [one for kind in set(cluster.kinds) - profiled if (one := cluster.sheet(kind))]
    memory = f"{shares.memory:.0%} of memory bandwidth"
    peak = " or ".join(f"{x:.0%}" for x in sorted({shares.matmul * one.reach for one in sheets}))
    if shares != ASSUMED:
        return f"{some}data sheet at up to {peak} of peak FLOP/s and {memory}, fitted to measured runs"
    assumed = "" if all(one.reach == REACH.get(one.capability) for one in sheets) else " (assumed)"
    return f"{some}data sheet at up to {peak} of peak FLOP/s{assumed} and {memory}, fitted to published runs"


# --- Sizes ------------------------------------------------------------------------------------------------------------


def message_bytes(model: ModelConfig, micro_batch: int, parts: int = 1) -> int:
    """Return the bytes of one micro-batch's activations between two stages that a device of a tensor group sends.

    Args:
        model: model to train.
        micro_batch: sequences of a micro-batch.
        parts: parts of the sequence, of which a device sends one.
    """
    return micro_batch * model.sequence // parts * model.hidden * ITEM[model.dtype]


def packed_bytes(model: ModelConfig, micro_batch: int, rank: int, parts: int = 1) -> int:
    """Return the bytes of the same message as low-rank factors in the compute dtype.

    Args:
        model: model to train.
        micro_batch: sequences of a micro-batch.
        rank: rank of the factors.
        parts: parts of the sequence, of which a device sends one.
    """
    return rank * (micro_batch * model.sequence // parts + model.hidden) * ITEM[model.dtype]


def layer_parameters(model: ModelConfig, tensor: int) -> int:
    """Return the parameters of one layer on one device of a tensor group."""
    return parameters.count(model, tensor=tensor)


def kernels(model: ModelConfig, tensor: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes [n, k] of a layer's matrices on one device, as gradients over data are compressed."""
    return parameters.kernels(model, tensor)


def embedding_parameters(model: ModelConfig, tensor: int, pipe: int) -> int:
    """Return the parameters of the vocabulary's tables on one device of the first or the last stage.

    Args:
        model: model to train.
        tensor: T.
        pipe: P; a single stage has all tables.
    """
    table = parameters.by_names(model)["embedding", "token"].shape(model, tensor)
    return (model.tables if pipe == 1 else 1) * math.prod(table)
