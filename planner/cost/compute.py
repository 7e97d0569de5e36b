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
from paxtrain.config.axes import AXES, TENSOR, UNSPLIT, AxisSizes, layer_sizes, parts, sequence_parts, stride
from paxtrain.config.model import FAMILIES
from paxtrain.errors import UserError, command
from paxtrain.model import parameters
from planner.cluster.cluster import ASSUMED, Cluster, HostSpan, Shares, seat_links
from planner.cluster.device_sheets import REACH, SHEETS, DeviceSheet
from planner.cluster.products import UNKNOWN_SHAPES, ProductRates
from planner.cost.closed_forms import EAGER, affine, all_reduce, all_to_all, launched, slowest_hop
from planner.program.cache import layer_program
from planner.program.layer_program import Bytes, LayerProgram, MatrixProduct, Work

LAUNCH = 5e-6  # seconds a kernel takes to start beside its work
# Passes of F over its [B, S, H] activations in memory besides matrix products: norms, residual sums, GELU over 4 H. The
# constants are fitted with these counts for GPT-2 and Llama, in whose compiled steps the passes are within 4% of them.
# Those of other architectures are read from their programs.
_ACTIVATION_PASSES = 22
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


# What other trainers run again: PyTorch's recomputation of whole layers, which leaves out their last collective,
# Megatron-LM's selective recomputation, and torchtitan's of every other layer and of every other product with kernels.
_OTHERS = {
    "layers": _Again(1, 1, 1, 1, 1),
    "scores": _Again(0, 1, 0, 0.5, 0),
    "half_layers": _Again(0.5, 0.5, 0.5, 0.5, 0.5),
    "half_products": _Again(0.5, 0, 1, 0.75, 0),
}
_RELAUNCHED = {"dots": 0.5, "layer_inputs": 1.0}  # share of F's launches that B repeats


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


@functools.lru_cache(maxsize=4096)
def _at_rates(rates: ProductRates, products: tuple[MatrixProduct, ...], micro_batch: int) -> float:
    return sum(one.times * rates.seconds(*one.sizes(micro_batch)) for one in products)


def _seconds(rates: ProductRates, products: tuple[MatrixProduct, ...], micro_batch: int) -> Any:
    """Return the seconds of products, one after another."""
    return rates.each(lambda one: _at_rates(one, products, micro_batch))


@functools.lru_cache(maxsize=4096)
def _settled(model: ModelConfig, capability: tuple[int, int], stored_scores: bool) -> ModelConfig:
    """Return the model with the attention that a device runs; with XLA's all scores go through memory."""
    if stored_scores:
        return dataclasses.replace(model, attention="xla")
    return parameters.with_attention(model, capability)


class _PassSeconds(NamedTuple):
    """Seconds of passes over activations.

    Attributes:
        forward: of F.
        backward: of B with W.
        split: what B without W has more than both together.
        weights: of W by itself.
    """

    forward: float
    backward: float
    split: float
    weights: float


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer on a device, at the data sheet's rates.

    Attributes:
        model: model whose attention is settled.
        mesh: sizes of the axes that split layers.
        sequence_parallel: MeshConfig.sequence_parallel.
        micro_batch: sequences of a micro-batch.
        rates: rates of matrix products.
        shares: shares of the data sheet.
        inside: latency in seconds and bytes/s of a link inside a host.
        kind: the layer's kind; None: the mean of all.
        span: hosts over which the devices that share it lie; None: they are on one.
    """

    model: ModelConfig
    mesh: AxisSizes
    sequence_parallel: bool
    micro_batch: int
    rates: ProductRates
    shares: Shares
    inside: tuple[float, float]
    kind: str | None
    span: HostSpan | None

    def program(self, save: str) -> LayerProgram:
        """Return the layer's program in a save mode, except "inputs"."""
        return layer_program(self.model, self.mesh, self.sequence_parallel, save, self.kind)

    def products(self, work: Work) -> float:
        """Return the seconds of products, without those of attention."""
        return _seconds(self.rates, work.products, self.micro_batch)

    def moves(self, size: Bytes) -> float:
        """Return the seconds of passes that move bytes."""
        return float(size.of(self.micro_batch)) / self.rates.memory

    def passes(self) -> _PassSeconds:
        """Return the seconds of passes over activations.

        Norms and residual sums run whole on each device that shares a layer, or on parts; the wide part is split.
        """
        if self.model.module:
            f, b, w, *_, moved = self.program("residuals")
            backward = self.moves(moved)
            return _PassSeconds(self.moves(f.moved), backward, self.moves(b.moved) - backward, self.moves(w.moved))
        sequence = self.mesh[TENSOR] if self.sequence_parallel else 1
        size = self.micro_batch * self.model.sequence // sequence_parts(self.mesh) * self.model.hidden * self.rates.item
        once = size * (0.4 / sequence + 0.6 / parts("ffn", self.mesh)) / self.rates.memory
        forward = _ACTIVATION_PASSES * once
        return _PassSeconds(forward, 2 * forward, _SPLIT_PASSES["input"] * once, _SPLIT_PASSES["weights"] * once)

    def attention(self, work: Work, passes: float = 0.0, times: float = 1.0) -> float:
        """Return the seconds of attention.

        Args:
            work: part of the layer.
            passes: passes over scores besides those of `passes`, if they are stored.
            times: factor on its products, if scores are stored.
        """
        # Two operations for each product of numbers, and half of the scores.
        numbers = sum(math.prod(one.sizes(self.micro_batch)) * one.times for one in work.fused)
        fused = self.shares.attention * numbers / (_FLASH * self.rates.flops)
        stored = _seconds(self.rates, work.attention, self.micro_batch)
        if self.model.module or not work.attention:
            return fused + stored
        rows = -(-self.micro_batch * self.model.heads // parts("heads", self.mesh)) * self.model.sequence
        scores = rows * self.model.sequence // sequence_parts(self.mesh)
        traffic = self.shares.scores * scores * self.rates.item / self.rates.memory
        return times * stored + passes * traffic

    def exchanged(self, work: Work, under: Any = 0.0) -> Any:
        """Return the seconds of collectives, each on the links of the axes that it runs over.

        An all-reduce over a ring is a reduce-scatter and an all-gather, which take half of it each (Korthikanti et al.
        2022), as an all-to-all does. Messages to a neighbour lie under attention, of `under` seconds, and a gather of
        others' tokens under the attention to a device's own.
        """
        total, hops, gathers = self.coding(work), 0.0, 0.0
        for one in work.collectives:
            members = math.prod(self.mesh.get(axis, 1) for axis in one.axes)
            size = one.bytes.of(self.micro_batch) * (members if one.kind == "all-gather" else 1)
            links = self.inside, self.span, stride(one.axes, self.mesh), members
            latency, rate = slowest_hop(*links)
            whole = all_reduce(members, size, latency, rate)
            if one.kind == "collective-permute":
                hops += one.times * (latency + size / rate)
            elif one.kind == "all-to-all":
                total += one.times * all_to_all(*links, size)
            elif one.kind == "all-gather" and any(AXES[axis].sequence for axis in one.axes):
                gathers += one.times * whole / 2
            else:
                total += one.times * (whole if one.kind == "all-reduce" else whole / 2)
        return total + np.maximum(hops - under, 0.0) + np.maximum(gathers - under / sequence_parts(self.mesh), 0.0)

    def coding(self, work: Work) -> float:
        """Return the seconds in which a codec encodes a device's keys and values once and decodes each other's."""
        codec, devices = self.mesh.codec, sequence_parts(self.mesh)
        travel = any(AXES[axis].sequence for one in work.collectives for axis in one.axes)
        if codec is None or not travel or self.model.module:  # whose passes are read, those of codecs, too
            return 0.0
        encode, decode, launches = codec.passes()
        heads = self.model.key_value_heads // parts("kv_heads", self.mesh)
        pair = 2 * self.micro_batch * self.model.sequence // devices * heads * self.model.head_dim * self.rates.item
        return pair * (encode + (devices - 1) * decode) / self.rates.memory + 2 * devices * launches * LAUNCH

    def launched(self, busy: float, launches: float, exchanged: float) -> float:
        """Return the seconds of kernels and collectives; the latter lie under launches if a host runs ahead of both."""
        if self.shares.eager:
            return launched(busy + exchanged, launches, EAGER)
        return launched(busy, launches) + exchanged

    def again(self, save: str) -> float:
        """Return the seconds of what B runs again.

        Args:
            save: PipelineConfig.save, or one of _OTHERS.
        """
        if save == "residuals":
            return 0.0
        plain, launch, passes = self.program("residuals"), self.shares.layer_launch, self.passes().forward
        first = plain.forward
        if part := _OTHERS.get(save):
            attention = self.attention(first, _SCORE_PASSES[0])
            busy = part.products * self.products(first) + part.attention * attention + part.passes * passes
            reduce = self.exchanged(first) / 2
            gathers = self.sequence_parallel * (save != "scores") * reduce / 2  # those of "scores" lie under products
            return self.launched(busy, part.launches * launch, part.collectives * reduce + gathers)
        more = first
        if save != "inputs":  # which keeps nothing of a layer, so that an F that keeps all comes first
            found = self.program(save)
            more = found.backward.beyond(plain.backward)
            passes = max(self.moves(found.moved) - self.moves(plain.moved), 0.0) if self.model.module else passes
        busy = self.products(more) + self.attention(more, _SCORE_PASSES[0]) + passes
        return self.launched(busy, _RELAUNCHED.get(save, 1.0) * launch, self.exchanged(more, self.attention(more)))


def sheet(
    model: ModelConfig,
    device: DeviceSheet,
    mesh: AxisSizes,
    micro_batch: int,
    save: str,
    inside: tuple[float, float],
    shares: Shares = ASSUMED,
    sequence_parallel: bool = False,
    kind: str | None = None,
    span: HostSpan | None = None,
) -> LayerCosts:
    """Return the data sheet's costs.

    The products and the collectives of F and B are read from the layer's program. Flash attention leaves out what is
    masked. If numbers of `inside` and `shares` are arrays, the costs are.

    Args:
        model: model to train.
        device: data sheet.
        mesh: sizes of the axes that split layers.
        micro_batch: sequences of a micro-batch.
        save: PipelineConfig.save, or what another trainer runs again, one of _OTHERS.
        inside: latency in seconds and bytes/s of a link inside a host.
        shares: shares of the data sheet that the device reaches.
        sequence_parallel: MeshConfig.sequence_parallel.
        kind: the layer's kind; None: the mean of all.
        span: hosts over which the devices that share it lie; None: they are on one.
    """
    if kind is None and parameters.differ(model):
        how = device, mesh, micro_batch, save, inside, shares, sequence_parallel
        found = {one: dataclasses.asdict(sheet(model, *how, one, span)) for one in set(parameters.kinds(model))}
        each = [found[one] for one in parameters.kinds(model)]
        return LayerCosts(**{name: sum(x[name] for x in each) / len(each) for name in each[0]})
    item = ITEM[model.dtype]
    tokens, h = micro_batch * model.sequence // sequence_parts(mesh), model.hidden
    peak = (device.peak_flops if model.dtype == "bfloat16" else device.single_flops) * shares.matmul
    peak *= device.reach * (1.0 if device.sms else UNKNOWN_SHAPES)
    rates = ProductRates(peak, device.bandwidth * shares.memory, device.sms, item)
    ratio, launch = shares.backward / 2, shares.layer_launch  # 1 if B takes twice as long as F

    settled = _settled(model, device.capability, shares.stored_scores)
    one = _Layer(settled, mesh, sequence_parallel, micro_batch, rates, shares, inside, kind, span)
    f, b, w, *_ = one.program("residuals")
    # B's attention counts as two products for each of F's if a family stores scores, as when constants were fitted.
    doubled = f if f.attention and not model.module else b
    attention, attention_backward = one.attention(f, _SCORE_PASSES[0]), one.attention(doubled, _SCORE_PASSES[1], 2)
    passes, of_kernels = one.passes(), ratio * one.products(w)
    forward = one.launched(one.products(f) + attention + passes.forward, launch, one.exchanged(f, attention))
    rest = ratio * (attention_backward + passes.backward + one.products(b))  # of B besides its products for kernels
    backward = one.launched(rest + of_kernels, 2 * launch, one.exchanged(b, attention_backward))
    again = one.again(save)
    weights = one.launched(of_kernels + passes.weights, 0.5 * launch, 0.0)
    rest = one.launched(rest + passes.split, 1.5 * launch, one.exchanged(b, attention_backward)) + again
    over = parts("vocab", mesh)
    reduce = all_reduce(over, tokens * h * item, *slowest_hop(inside, span, 1, over))
    rows = model.padded_vocab // over
    logits = MatrixProduct(tokens, rows, h), MatrixProduct(tokens, h, rows), MatrixProduct(rows, h, tokens)
    traffic = 8 * tokens * model.padded_vocab / over * item / rates.memory
    head = shares.head * (_seconds(rates, logits, 1) + traffic + 2 * reduce + 20 * LAUNCH)
    embedding = 6 * tokens * h * item / rates.memory + reduce + 4 * LAUNCH
    optimizer = shares.optimizer_bytes / rates.memory
    times = (forward, backward + again, rest, weights, head, embedding, optimizer)
    return LayerCosts(*times, byte=optimizer / shares.optimizer_bytes, chunk=shares.chunk_seconds)


# --- With a profile ---------------------------------------------------------------------------------------------------

TIMES = ("forward", "backward", "head", "embedding", "optimizer")
PARTS = ("backward_input", "backward_weights")  # of backward; rows may lack them
OF_LAYERS = ("forward", "backward", *PARTS)
# The facts of a model that a row of a compute profile names; rows that name no family are of GPT-2. The family of an
# architecture of one's own is its model.module.
PROFILED = ("hidden", "heads", "sequence", "vocab", "dtype", "family", "key_value_heads", "ffn")


def profiled(model: ModelConfig) -> tuple:
    """Return a model's values of PROFILED."""
    sizes = (model.hidden, model.heads, model.sequence, model.padded_vocab, model.dtype)
    return (*sizes, model.module or model.family, model.key_value_heads, model.ffn)


def profiled_row(row: Mapping[str, Any]) -> tuple:
    """Return a row's values of PROFILED."""
    defaults = {"family": "gpt2", "key_value_heads": row["heads"], "ffn": 4 * row["hidden"]}
    return tuple({**defaults, **row}[key] for key in PROFILED)


def _family(shape: tuple) -> str:
    return str(shape[PROFILED.index("family")])


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


# CPUs have no data sheet. Only ratios of these figures are used, which have the right proportion. They have no waves.
_CPU = dataclasses.replace(SHEETS["v100"], sms=0)


@functools.lru_cache(maxsize=100_000)
def layer(
    cluster: Cluster,
    kind: str,
    model: ModelConfig,
    mesh: AxisSizes,
    micro_batch: int,
    save: str,
    sequence_parallel: bool = False,
) -> LayerCosts:
    """Return the costs on a device kind of the cluster: measured if there is a profile, else the data sheet's.

    Profiles are measured on tensor alone, without sequence parallelism. The effect of that and of other axes is the
    data sheet's proportion.

    Args:
        cluster: cluster with its profile.
        kind: device kind.
        model: model to train.
        mesh: sizes of the axes that split layers.
        micro_batch: sequences of a micro-batch.
        save: PipelineConfig.save.
        sequence_parallel: MeshConfig.sequence_parallel.

    Raises:
        UserError: a kind without a data sheet has no profile.
    """
    link, over = seat_links(cluster, kind)
    device = cluster.sheet(kind) or _CPU
    if not cluster.execution.rows:
        save = {"layer_inputs": "layers"}.get(save, save)  # others run whole layers again
    shape = (*profiled(model), mesh.get(TENSOR, 1), save)
    # Other architectures of one's own may not be there.
    groups = {row: times for row, times in _groups(cluster, kind).items() if _family(row) in (*FAMILIES, model.module)}
    if not groups:
        if kind == "cpu":
            raise UserError(f"a cluster of device cpu has no data sheet; measure it: {command('planner.profile')}")
        return sheet(model, device, mesh, micro_batch, save, link, cluster.shares, sequence_parallel, span=over)
    nearest = min(groups, key=lambda other: _distance(shape, other))
    rows = groups[nearest]
    times = [name for name in (*TIMES, *PARTS) if name in rows]
    measured = {name: affine(micro_batch, rows["micro_batch"], rows[name]) for name in times}
    here = sheet(model, device, mesh, micro_batch, save, link, sequence_parallel=sequence_parallel, span=over)
    if nearest != shape or sequence_parallel or mesh.keys() - {TENSOR}:
        *sizes, other_tensor, other_save = nearest
        names = ("hidden", "heads", "sequence", "vocab_size", "dtype", "family", "kv_heads", "intermediate")
        attention = "xla" if model.attention == "xla" else "auto"
        values = dict(zip(names, sizes, strict=True))
        if values["family"] == model.module:
            del values["family"]
        else:
            values["module"] = ""
        other = dataclasses.replace(model, **values, attention=attention)
        # A profile is measured on groups inside a host, whatever hosts are taken together here.
        there = sheet(other, device, layer_sizes({TENSOR: other_tensor}), micro_batch, other_save, link)
        measured = {name: value * getattr(here, name) / getattr(there, name) for name, value in measured.items()}
    # If the backward was measured whole, its parts have the data sheet's shares.
    parts = {name: measured["backward"] * getattr(here, name) / here.backward for name in PARTS}
    return LayerCosts(**parts | measured, byte=measured["optimizer"] / cluster.shares.optimizer_bytes)


@functools.lru_cache(maxsize=4096)
def of_layers(
    cluster: Cluster,
    kind: str,
    model: ModelConfig,
    mesh: AxisSizes,
    micro_batch: int,
    save: str,
    sequence_parallel: bool,
) -> dict[str, np.ndarray]:
    """Return each layer's times over the mean layer's as the data sheet has them, [layers] by name; see `layer`."""
    link, over = seat_links(cluster, kind)
    how = cluster.sheet(kind) or _CPU, mesh, micro_batch, save, link, cluster.shares, sequence_parallel
    found = {one: sheet(model, *how, one, over) for one in set(parameters.kinds(model))}
    seconds = {name: np.array([getattr(found[one], name) for one in parameters.kinds(model)]) for name in OF_LAYERS}
    return {name: x / x.mean() for name, x in seconds.items()}


def source(cluster: Cluster) -> str:
    """Return the source of the compute times, in words for reports."""
    profiled = {row["kind"] for row in cluster.compute}
    if profiled >= set(cluster.kinds):
        return "compute profile of the cluster"
    shares, some = cluster.shares, ""
    if profiled & set(cluster.kinds):
        some = f"compute profile of {', '.join(sorted(profiled))}; of the others "
    sheets = [one for kind in set(cluster.kinds) - profiled if (one := cluster.sheet(kind))]
    memory = f"{shares.memory:.0%} of memory bandwidth"
    peak = " or ".join(f"{x:.0%}" for x in sorted({shares.matmul * one.reach for one in sheets}))
    if shares != ASSUMED:
        return f"{some}data sheet at up to {peak} of peak FLOP/s and {memory}, fitted to measured runs"
    assumed = "" if all(one.reach == REACH.get(one.capability) for one in sheets) else " (assumed)"
    return f"{some}data sheet at up to {peak} of peak FLOP/s{assumed} and {memory}, fitted to published runs"


def unread(model: ModelConfig) -> str:
    """Return the primitives of an architecture of one's own that are not known, in words for reports; "" if all are."""
    how = parameters.with_attention(model, model.flash_capability), UNSPLIT, False, "residuals"
    programs = [layer_program(*how, kind) for kind in dict.fromkeys(parameters.kinds(model)) if model.module]
    names = dict.fromkeys(name for program in programs for work in program[:3] for name in work.unknown)
    return f"; not known are {', '.join(names)}, which count as reading and writing their arrays" if names else ""


def kernels(model: ModelConfig, mesh: AxisSizes) -> tuple[tuple[int, int], ...]:
    """Return the shapes [n, k] of a layer's matrices on a device; () if layers differ: plans compress none then."""
    return () if parameters.differ(model) else parameters.kernels(model, mesh)


def embedding_parameters(model: ModelConfig, mesh: AxisSizes, pipe: int) -> int:
    """Return the parameters of the vocabulary's tables on one device of the first or the last stage.

    Args:
        model: model to train.
        mesh: sizes of the axes that split layers.
        pipe: P; a single stage has all tables.
    """
    table = parameters.by_names(model)["embedding", "token"].shape(model, mesh)
    return (model.tables if pipe == 1 else 1) * math.prod(table)
