"""Seconds of compute: F and B of a layer, the head, the embedding and the optimizer, on a device kind.

If the cluster has a compute profile, times are the measured ones, interpolated and extrapolated linearly in the
micro-batch. A time that was not measured is the data sheet's figure, scaled by the ratio of the nearest measured row
to the data sheet's figure of that row. Without a profile it is the data sheet's figure at named shares of the peak.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError
from planner.cluster.cluster import ASSUMED, Cluster, Shares
from planner.cluster.device_sheets import SHEETS, DeviceSheet

LAUNCH = 5e-6  # seconds a kernel takes to start beside its work
# Passes of F over its [B, S, H] activations in memory besides matrix products: norms, residual sums, GELU over 4 H.
_ACTIVATION_PASSES = 22
# Some of a layer's kernels wait for their launch and others for memory: the p-norm of the two sums says how long.
_SHARPNESS = 4
ITEM = {"bfloat16": 2, "float32": 4}
# Passes over [B, S, H] that splitting the backward adds: W makes norms and GELU again, B writes what W needs.
_SPLIT_PASSES = {"weights": 12, "input": 18}
# Forwards that B runs again, by pipeline.save; with "dots" it runs everything again except matrix products.
_RECOMPUTED = {"inputs": 1.0, "layer_inputs": 1.0, "residuals": 0.0, "dots": 0.0}


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
    """

    forward: float
    backward: float
    backward_input: float
    backward_weights: float
    head: float
    embedding: float
    optimizer: float


def _all_reduce(ranks: int, size: int, alpha: float, bandwidth: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes over a ring."""
    return 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size / bandwidth


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

    F has 2 FLOPs a parameter of the matrices (24 H^2 for GPT-2) and 4 S H a token (attention's scores and values). F
    and B have two all-reduces of [B, S, H] over tensor each (Shoeybi et al. 2019), rings of 2(T-1)/T; or
    reduce-scatters and all-gathers, which are halves of them (Korthikanti et al. 2022).

    Args:
        model: model to train.
        device: data sheet.
        tensor: T.
        micro_batch: sequences of a micro-batch.
        save: PipelineConfig.save.
        inside: latency in seconds and bytes/s of a link inside a host.
        shares: shares of the data sheet that the device reaches.
        sequence_parallel: MeshConfig.sequence_parallel.
    """
    item = ITEM[model.dtype]
    tokens, h = micro_batch * model.sequence, model.hidden
    flops = (device.peak_flops if model.dtype == "bfloat16" else device.single_flops) * shares.matmul
    memory = device.bandwidth * shares.memory
    reduce = _all_reduce(tensor, tokens * h * item, *inside)

    def launched(seconds: float, times: float) -> float:
        return (seconds**_SHARPNESS + (times * shares.layer_launch) ** _SHARPNESS) ** (1 / _SHARPNESS)

    products = tokens * (2 * model.matrices + 4 * model.sequence * h) / tensor
    read = model.matrices / tensor * item / memory
    matmuls = max(products / flops, read)
    # Norms and residual sums run whole on each device of a tensor group, or on parts; the wide part is split.
    once = tokens * h * item * (0.4 / (tensor if sequence_parallel else 1) + 0.6 / tensor) / memory
    passes = _ACTIVATION_PASSES * once
    forward = launched(matmuls + passes, 1) + 2 * reduce
    backward = launched(shares.backward * (matmuls + passes), 2) + 2 * reduce
    # An F that B runs again leaves out its last collective, an all-reduce or a reduce-scatter. What save="dots" keeps
    # has to be gathered again, twice.
    again = launched(passes, 0.5) if save == "dots" else _RECOMPUTED[save] * (forward - reduce)
    if sequence_parallel:
        again += {"dots": 2, "residuals": 0}.get(save, 1) * reduce / 2
    # Half of the backward's products with kernels are W's.
    kernels = shares.backward / 2 * max(2 * tokens * model.matrices / tensor / flops, read)
    weights = launched(kernels + _SPLIT_PASSES["weights"] * once, 0.5)
    rest = shares.backward * (matmuls + passes) - kernels + _SPLIT_PASSES["input"] * once
    rest = launched(rest, 1.5) + 2 * reduce + again
    logits = tokens * model.padded_vocab / tensor
    head = 6 * logits * h / flops + 8 * logits * item / memory + 2 * reduce + 20 * LAUNCH
    embedding = 6 * tokens * h * item / memory + reduce + 4 * LAUNCH
    optimizer = shares.optimizer_bytes / memory
    return LayerCosts(forward, backward + again, rest, weights, head, embedding, optimizer)


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


def _inside(cluster: Cluster, kind: str) -> tuple[float, float]:
    """Return latency and bandwidth inside the slowest host of a kind."""
    hosts = np.array([i for i, k in enumerate(cluster.kinds) if k == kind])
    return float(cluster.alpha[hosts, hosts].max()), float(cluster.bandwidth[hosts, hosts].min())


# CPUs have no data sheet. Only ratios of these figures are used, which have the right proportion.
_CPU = "v100"


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
    inside = _inside(cluster, kind)
    device = cluster.sheet(kind) or SHEETS[_CPU]
    groups = _groups(cluster, kind)
    if not groups:
        if kind == "cpu":
            raise UserError("a cluster of device cpu has no data sheet to go by; measure it: python -m planner.profile")
        return sheet(model, device, tensor, micro_batch, save, inside, cluster.shares, sequence_parallel)
    shape = (*profiled(model), tensor, save)
    nearest = min(groups, key=lambda other: _distance(shape, other))
    rows = groups[nearest]
    times = [name for name in (*TIMES, *PARTS) if name in rows]
    measured = {name: _affine(micro_batch, rows["micro_batch"], rows[name]) for name in times}
    here = sheet(model, device, tensor, micro_batch, save, inside, sequence_parallel=sequence_parallel)
    if nearest != shape or sequence_parallel:
        *sizes, other_tensor, other_save = nearest
        names = ("hidden", "heads", "sequence", "vocab_size", "dtype", "family", "kv_heads", "intermediate")
        other = dataclasses.replace(model, **dict(zip(names, sizes, strict=True)), attention="xla")
        # A profile is measured on groups inside a host, whatever hosts are taken together here.
        measured_inside = _inside(cluster.parts or cluster, kind)
        there = sheet(other, device, other_tensor, micro_batch, other_save, measured_inside)
        measured = {name: value * getattr(here, name) / getattr(there, name) for name, value in measured.items()}
    # If the backward was measured whole, its parts have the data sheet's shares.
    parts = {name: measured["backward"] * getattr(here, name) / here.backward for name in PARTS}
    return LayerCosts(**parts | measured)


def source(cluster: Cluster) -> str:
    """Return the source of the compute times, in words for reports."""
    profiled = {row["kind"] for row in cluster.compute}
    if profiled >= set(cluster.kinds):
        return "compute profile of the cluster"
    fitted = "assumed" if cluster.shares == ASSUMED else "fitted to measured runs"
    matmul, memory = cluster.shares.matmul, cluster.shares.memory
    some = f"compute profile of {', '.join(sorted(profiled))}; of the others " if profiled & set(cluster.kinds) else ""
    return f"{some}data sheet at {matmul:.0%} of peak FLOP/s and {memory:.0%} of memory bandwidth, {fitted}"


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
    split_biases = 0 if model.family == "llama" else 3 * model.hidden + model.ffn
    return (model.matrices + split_biases) // tensor + model.vectors - split_biases


def kernels(model: ModelConfig, tensor: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes [n, k] of a layer's matrices on one device, as gradients over data are compressed."""
    h, part, ffn = model.hidden, model.hidden // tensor, model.ffn // tensor
    if model.family == "llama":
        return ((h, part), (h, 2 * model.key_value // tensor), (part, h), (h, 2 * ffn), (ffn, h))
    return ((h, 3 * part), (part, h), (h, ffn), (ffn, h))


def embedding_parameters(model: ModelConfig, tensor: int, pipe: int) -> int:
    """Return the parameters of the vocabulary's tables on one device of the first or the last stage.

    Args:
        model: model to train.
        tensor: T.
        pipe: P; a single stage has all tables.
    """
    return (model.tables if pipe == 1 else 1) * model.padded_vocab * model.hidden // tensor
