"""Memory of a train step in closed form, for many candidates at once: numpy over arrays of candidates.

All stages run one program, so XLA allocates the same on every stage: rings as deep as the deepest stage needs, layer
slots for the largest virtual stage, and the tied embedding everywhere (zeros between the ends). `analytic` says what is
allocated; `per_stage` says which part of it a stage has in use, for drawings.

    weights       float32 master shards, and their copy in the compute dtype that a step gathers
    optimizer     Adam's two moments, sharded like the weights; in groups also the shared weights and their momentum
    gradients     float32 accumulators, whole or in shards
    activations   the ring of what F leaves for B, and B for W: depth x what is kept of a virtual stage
    messages      messages between stages and their rings; the fragment whose exchange between groups runs under a step
    workspace     the largest of what the head and a backward take while they run
    compression   states of the codecs
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from paxtrain.config import SAVE_MODES, SHARDS, SPLIT_SAVES, Config, ModelConfig
from paxtrain.config.axes import TENSOR, layer_sizes, more_axes, parts, sequence_parts
from paxtrain.model.fragments import fragment_layers
from paxtrain.model.parameters import by_names, count, stack, table, with_attention
from paxtrain.model.spec import Parameter
from paxtrain.schedule.schedules import code, each
from planner.cost.coded import LOW_RANK, Coded, coded
from planner.cost.outer import part
from planner.program.cache import layer_program
from planner.program.layer_program import Bytes, LayerProgram

# The share of a device's memory that a plan may use. The driver and CUDA take 0.5 to 1 GB before XLA starts. cuBLAS,
# cuDNN and NCCL take workspaces besides what XLA counts, and the pool loses some to fragmentation. XLA's default
# preallocates 75%, which is less: XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 must be set to use this share.
USABLE = 0.92

PerCandidate = float | np.ndarray  # a number, or an array over candidates
_ERRORS = ("none", "explicit", "lazy")
_ACCUMULATOR = 4  # bytes of float32: master weights, moments, gradients


@dataclasses.dataclass(frozen=True)
class Shape:
    """Candidates as integer columns that broadcast against each other; one model for all.

    Attributes:
        model: model whose attention is settled, see parameters.with_attention.
        data: size of the data axis.
        pipe: size of the pipe axis.
        tensor: size of the tensor axis.
        virtual_stages: chunks of layers per stage.
        slots: layers of the largest virtual stage.
        common: layers of the smallest virtual stage.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches per data rank and step.
        schedule: its number, see `paxtrain.schedule.schedules.code`.
        save: place in paxtrain.config.SAVE_MODES.
        shard: index of MeshConfig.shard in SHARDS.
        copies_of_shards: groups of data ranks that each have all weights and sums in shards.
        scan: layers run in a loop.
        backward_rank: rank of compressed gradients between stages, 0 if they are not compressed.
        forward_rank: rank of compressed activations between stages, or 0.
        data_rank: rank of compressed gradients over data, or 0.
        data_rank_min: lowest rank that a run chooses over data; 0: it keeps to data_rank.
        error: error feedback of messages, as a place in ("none", "explicit", "lazy").
        sequence_parallel: activations between the split matrices are sharded over tensor.
        overlap: transfers run beside compute, as on GPUs.
        coded: codecs other than low rank; with one, the rank of its place only says whether it compresses.
        copies: float32 copies of a device's weights that training in groups keeps: the shared ones, and the momentum.
        groups: number of groups that train apart; data is that of one.
        fragment_layers: layers that a device sends to other groups of each fragment; (): it sends none.
        overlaps: the largest fragment is exchanged under a step; otherwise groups wait.
        min_ratio: factor by which a matrix must shrink to be compressed over data or between groups.
        others: sizes of the axes besides data, pipe and tensor, by name.
    """

    model: ModelConfig
    data: PerCandidate
    pipe: PerCandidate
    tensor: PerCandidate
    virtual_stages: PerCandidate
    slots: PerCandidate
    common: PerCandidate
    micro_batch: PerCandidate
    micro_batches: PerCandidate
    schedule: PerCandidate
    save: PerCandidate
    shard: PerCandidate
    scan: PerCandidate
    backward_rank: PerCandidate = 0
    forward_rank: PerCandidate = 0
    data_rank: PerCandidate = 0
    data_rank_min: PerCandidate = 0
    error: PerCandidate = 2
    sequence_parallel: PerCandidate = 0
    overlap: PerCandidate = 1
    coded: Coded = LOW_RANK
    copies: PerCandidate = 0
    groups: PerCandidate = 1
    fragment_layers: tuple[PerCandidate, ...] = ()
    overlaps: bool = False
    min_ratio: float = 2.0
    others: Mapping[str, PerCandidate] = dataclasses.field(default_factory=dict)
    copies_of_shards: PerCandidate = 1

    @property
    def mesh(self) -> dict[str, np.ndarray]:
        """Sizes of the axes that may split layers, by name."""
        return {name: np.asarray(size) for name, size in {TENSOR: self.tensor, **self.others}.items()}

    @property
    def parts(self) -> PerCandidate:
        """Parts of the sequence in what is sharded over tensor between the split matrices."""
        return np.where(np.asarray(self.sequence_parallel) == 1, self.tensor, 1)

    @property
    def zero1(self) -> PerCandidate:
        """1 if states are sharded over data, else 0."""
        return np.minimum(np.asarray(self.shard), 1)

    @property
    def tokens(self) -> PerCandidate:
        """Tokens of a micro-batch that a device has within layers."""
        return self.micro_batch * self.model.sequence // self.shared

    @property
    def shared(self) -> PerCandidate:
        """Devices that share each sequence through all layers."""
        return sequence_parts(self.mesh)

    @property
    def compute(self) -> int:
        """Bytes of the compute dtype."""
        return 2 if self.model.dtype == "bfloat16" else 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device: each an array over candidates, or over stages if `per_stage` made it."""

    weights: PerCandidate
    optimizer: PerCandidate
    gradients: PerCandidate
    activations: PerCandidate
    messages: PerCandidate
    workspace: PerCandidate
    compression: PerCandidate

    @property
    def total(self) -> PerCandidate:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


def of(config: Config, capability: tuple[int, int] = (9, 0)) -> Shape:
    """Return one configuration as a Shape of scalars, on GPUs of a compute capability; (0, 0) stands for CPUs."""
    groups, outer, config = config.groups, config.outer, config.of_group()
    mesh, pipeline, compress, counts = config.mesh, config.pipeline, config.compress, config.stage_layers
    stage_of = config.stage_map.stage_of
    ranks = compress.backward.link_ranks(config.links) if compress.backward.chosen != "none" else ()
    return Shape(
        model=with_attention(config.model, capability),
        data=mesh.data,
        pipe=mesh.pipe,
        tensor=mesh.tensor,
        virtual_stages=pipeline.virtual_stages,
        slots=max(counts),
        common=min(counts),
        micro_batch=config.batch.micro_batch,
        micro_batches=config.micro_batches,
        schedule=code(pipeline.schedule_key),
        save=SAVE_MODES.index(pipeline.save),
        shard=SHARDS.index(mesh.shard),
        copies_of_shards=mesh.copies,
        scan=int(pipeline.scans(counts)),
        backward_rank=max(ranks, default=0),
        forward_rank=compress.forward.rank if compress.forward.chosen != "none" else 0,
        data_rank=compress.data.rank if compress.data.over(mesh.data) != "none" else 0,
        data_rank_min=compress.data.rank_min if compress.data.adapt_every else 0,
        error=_ERRORS.index(compress.error),
        sequence_parallel=int(mesh.sequence_parallel),
        overlap=int(capability > (0, 0)),
        coded=coded(compress, config.model.tied_head),
        copies=1 + (outer.momentum > 0) if outer.every else 0,
        groups=groups,
        fragment_layers=fragment_layers(config.model, outer.fragments, counts, stage_of) if outer.every else (),
        overlaps=outer.overlap > 0,
        min_ratio=compress.min_ratio,
        others={name: mesh.sizes[name] for name in more_axes()},
    )


def _in_flight(shape: Shape) -> PerCandidate:
    """Return a device's weights of the largest fragment that is exchanged under a step; 0 if groups wait."""
    if not shape.overlaps:
        return 0
    of_layers = [dataclasses.replace(shape, slots=layers, virtual_stages=1) for layers in shape.fragment_layers]
    tables = parameters(dataclasses.replace(shape, slots=0))[1]
    return functools.reduce(
        np.maximum, [parameters(some)[1] - (tables if i else 0) for i, some in enumerate(of_layers)]
    )


def ring_depths(shape: Shape) -> tuple[PerCandidate, PerCandidate, PerCandidate]:
    """Return the depths of the rings of residuals, activations and gradients, without scrap slots.

    They are those of the first stage, the deepest: `buffers.assign` finds the same, except that the message rings of
    interleaved schedules, which are small, are known to within a few slots.
    """
    p, v, m = shape.pipe, shape.virtual_stages, shape.micro_batches
    several = np.asarray(p) > 1
    residual = each(shape.schedule, lambda spec, *sizes: spec.residual_slots(0, *sizes), p, v, m)
    activation = each(shape.schedule, lambda spec: spec.activation_slots)
    gradient = each(shape.schedule, lambda spec, *sizes: spec.gradient_slots(*sizes), p, m)
    return residual * several, activation * several, gradient * several


def _of_layer(shape: Shape, save: str, size: Callable[[LayerProgram], Bytes]) -> PerCandidate:
    """Return what a layer's program says of each candidate."""
    names = tuple(shape.mesh)
    *how, batch = _columns(*shape.mesh.values(), shape.sequence_parallel, shape.micro_batch)
    found = np.zeros(batch.shape)
    for one in set(zip(*(x.ravel().tolist() for x in how))):
        here = size(layer_program(shape.model, layer_sizes(dict(zip(names, one))), one[-1] == 1, save))
        same = functools.reduce(np.logical_and, [x == value for x, value in zip(how, one)])
        found = np.where(same, here.of(batch), found)
    return found


def kept(shape: Shape) -> dict[str, PerCandidate]:
    """Return the bytes that the forward of one layer leaves for its backward, by save mode; "inputs" keeps nothing."""
    return {save: _of_layer(shape, save, lambda one: one.kept) for save in ("dots", "layer_inputs", "residuals")}


def left(shape: Shape) -> dict[str, PerCandidate]:
    """Return the bytes that B of one layer adds to `kept` for W, by save mode, if the backward is split.

    B leaves the gradients of what the layer's matrices make. paxtrain.pipeline.split_backward puts some of them in the
    place of what F keeps and W does not read; the others add to the ring.
    """
    return {save: _of_layer(shape, save, lambda one: one.left) for save in SPLIT_SAVES}


def _scores(program: LayerProgram) -> Bytes:
    """Return the numbers of the largest array that products of attention make in memory, its scores."""
    return Bytes(0, max((m * n * b for one in program.forward.attention for m, n, _, b in [one.sizes(1)]), default=0))


def _masks(program: LayerProgram) -> Bytes:
    """Return 1 for each sequence if fused attention takes a mask, else 0."""
    return Bytes(0, int(bool(program.forward.fused)))


def _meets(shape: Shape) -> PerCandidate:
    """Return whether one stage holds the first and the last virtual stage, and with them all tables."""
    folds = each(shape.schedule, lambda spec, v: spec.folds(v), shape.virtual_stages)
    return (np.asarray(shape.pipe) == 1) | folds


def _matrices(shape: Shape) -> list[tuple[PerCandidate, ...]]:
    """Return the dims of a layer's kernels on a device, without those that only some kinds of layers have."""
    return [p.shape(shape.model, shape.mesh) for p in table(shape.model) if p.role == "kernel" and not p.kinds]


def _count(shape: Shape, p: Parameter) -> PerCandidate:
    """Return the number of arrays of a row of the architecture's table that a device holds, in the mean of stages."""
    if p.lead == "layers":
        return shape.slots * shape.virtual_stages * len(stack(shape.model, p)) / shape.model.layers
    return np.where(_meets(shape), shape.model.tables, 1) if p.own[0] == "vocab" else 1


def parameters(shape: Shape) -> tuple[PerCandidate, PerCandidate, PerCandidate]:
    """Return a device's parameters: whole; what ZeRO-1 leaves of them; those cast to the compute dtype."""
    whole: PerCandidate = 0
    sharded: PerCandidate = 0
    cast: PerCandidate = 0
    for p in table(shape.model):
        dims = p.shape(shape.model, shape.mesh)
        size = _count(shape, p) * functools.reduce(np.multiply, dims)
        ranks = np.asarray(shape.data * shape.shared)
        splits = functools.reduce(np.logical_or, [np.asarray(d) % ranks == 0 for d in dims])
        whole = whole + size
        sharded = sharded + size / np.where(splits & (np.asarray(shape.zero1) == 1), ranks, 1)
        cast = cast + size * p.cast
    return whole, sharded, cast


def _codec_state(shape: Shape) -> PerCandidate:
    """Return the bytes of one device's codec states, see compress.lowrank.LowRankState and powersgd.PowerState."""
    model, c, chunks = shape.model, shape.compute, shape.virtual_stages
    n, k = shape.tokens // shape.parts, model.hidden
    total: PerCandidate = _outer_states(shape) if shape.coded.outer is not None and shape.fragment_layers else 0
    if shape.coded.embedding is not None:
        total = total + _table_states(shape)
    for place in ("backward", "forward"):
        rank = np.asarray(getattr(shape, f"{place}_rank"))
        if getattr(shape.coded, place) is not None:
            total = total + chunks * _link_states(shape, place)
            continue
        held = 2 * k * rank + (shape.error > 0) * n * k + (shape.error == _ERRORS.index("lazy")) * (n + k) * rank
        total = total + np.where(rank > 0, chunks * c * held, 0)
    rank = np.asarray(shape.data_rank)
    if shape.coded.data is not None:
        return total + shape.slots * chunks * _reducer_states(shape)
    for dims in _matrices(shape):
        whole = np.asarray(dims[0]), np.asarray(functools.reduce(np.multiply, dims[1:]))
        rows, columns = shape.coded.part(whole, np.asarray(shape.data), np.asarray(shape.zero1) == 1)
        # As compress.powersgd.largest_rank has it.
        smaller = rows * columns / (rows + columns) / max(shape.min_ratio, 1e-9)
        # A kernel has a state if it shrinks enough at the lowest rank.
        lowest = np.where(np.asarray(shape.data_rank_min) > 0, shape.data_rank_min, rank)
        useful = (rank > 0) & (lowest <= np.minimum(np.minimum(rows, columns), smaller))
        total = total + useful * shape.slots * chunks * _ACCUMULATOR * (rows * columns + columns * rank)
    return total


def _table_states(shape: Shape) -> PerCandidate:
    """Return the bytes of a device's states of the embedding's codec; all stages hold them, as they hold the table."""
    model, coded = shape.model, shape.coded

    def one(rows: int, data: int, meets: bool, zero1: int) -> float:
        swaps = model.tied_head and not meets
        if data == 1 and not swaps:
            return 0.0
        positions = ("embedding", "position") in by_names(model) and data > 1
        found = coded.table_state((int(rows), model.hidden), int(data), bool(zero1), swaps)
        whole = (model.sequence, model.hidden), int(data), bool(zero1)
        takes = positions and coded.table_takes(*whole, shape.min_ratio)
        return found + (coded.table_state(*whole, False) if takes else 0)

    meets = _meets(shape)
    rows = np.where(meets, model.tables, 1) * (model.padded_vocab // parts("vocab", shape.mesh))
    return np.vectorize(one, otypes=[float])(*_columns(rows, shape.data, meets, shape.zero1))


def _outer_states(shape: Shape) -> PerCandidate:
    """Return the bytes of a device's states of the reducer between groups."""

    def one(n: int, k: int, data: int, zero1: int, groups: int) -> float:
        own = part((int(n), int(k)), int(data), bool(zero1))
        taken = shape.coded.outer_takes(own, int(groups), shape.min_ratio)
        return shape.coded.outer_bytes(own, int(groups)) if taken else 0.0

    total: PerCandidate = 0
    for dims in _matrices(shape):
        rows, columns = _columns(dims[0], functools.reduce(np.multiply, dims[1:]))
        sizes = _columns(rows, columns, shape.data, shape.zero1, shape.groups)
        total = total + np.vectorize(one, otypes=[float])(*sizes)
    return total * sum(shape.fragment_layers)


def _columns(*columns: PerCandidate) -> tuple[np.ndarray, ...]:
    """Return columns of whole numbers, broadcast against each other."""
    return np.broadcast_arrays(*(np.asarray(x, int) for x in columns))


def _link_states(shape: Shape, place: str) -> PerCandidate:
    """Return the bytes of the state of a link whose codec is not low rank; 0 if it compresses nothing."""
    sequence, hidden, dtype = shape.model.sequence, shape.model.hidden, shape.model.dtype

    def one(batch: int, parts: int, rank: int) -> float:
        # A codec may refuse the messages of candidates that do not compress them.
        return shape.coded.state_bytes((int(batch), sequence // int(parts), hidden), dtype, place) if rank else 0.0

    columns = _columns(shape.micro_batch, shape.parts * shape.shared, getattr(shape, f"{place}_rank"))
    return np.vectorize(one, otypes=[float])(*columns)


def _reducer_states(shape: Shape) -> PerCandidate:
    """Return the bytes of the states of a layer's matrices, whose reducer is not PowerSGD; 0 without compression."""

    def one(n: int, k: int, data: int, zero1: int, rank: int) -> float:
        matrix = (int(n), int(k)), int(data), bool(zero1)
        takes = rank and shape.coded.takes(*matrix, shape.min_ratio)
        return shape.coded.reducer_bytes(*matrix) if takes else 0.0

    total: PerCandidate = 0
    for dims in _matrices(shape):
        sizes = _columns(dims[0], functools.reduce(np.multiply, dims[1:]), shape.data, shape.zero1, shape.data_rank)
        total = total + np.vectorize(one, otypes=[float])(*sizes)
    return total


def ring_slots(shape: Shape) -> PerCandidate:
    """Return the slots of the ring of residuals, including the scrap slot of masked schedules; 1 with one stage."""
    masked = each(shape.schedule, lambda spec: spec.masks(shape.overlap))
    return np.where(np.asarray(shape.pipe) == 1, 1, ring_depths(shape)[0] + masked)


def _message(shape: Shape) -> PerCandidate:
    return shape.tokens // shape.parts * shape.model.hidden * shape.compute


def _messages(shape: Shape) -> PerCandidate:
    """Return the bytes of messages that wait or travel: the rings, what was made last, what arrives, both ways."""
    _, activation, gradient = ring_depths(shape)
    return (np.asarray(shape.pipe) > 1) * (4 + activation + gradient) * _message(shape)


def _head(shape: Shape) -> PerCandidate:
    """Return the bytes of the loss's workspace: float32 logits, their gradient and the table's in the compute dtype.

    With one stage the table's gradient goes straight into its accumulator.
    """
    rows, several = shape.model.padded_vocab / parts("vocab", shape.mesh), np.asarray(shape.pipe) > 1
    logits, table = shape.tokens * rows, rows * shape.model.hidden
    return (_ACCUMULATOR + shape.compute) * logits + several * shape.compute * table


def _fused(shape: Shape) -> PerCandidate:
    """Return the bytes that XLA keeps of a layer between its F and its B if no ring asks for more.

    XLA sees all unrolled layers at once. It keeps what save="dots" would, the two norms' float32 inputs and, with
    sequence parallelism, what is gathered of them. A loop over layers keeps all it is told to.
    """
    layer, whole = kept(shape), shape.tokens * shape.model.hidden
    gathered = 2 * shape.compute * whole * (np.asarray(shape.sequence_parallel) == 1)
    unrolled = np.minimum(layer["dots"] + 2 * _ACCUMULATOR * whole / shape.parts + gathered, layer["residuals"])
    return np.where(np.asarray(shape.scan) == 1, layer["residuals"], unrolled)


def _backward(shape: Shape) -> PerCandidate:
    """Return the bytes of B's workspace: what it computes anew, and the kernels' gradients before they are added.

    XLA fuses most passes over one layer's activations; about six in float32 and some in the compute dtype remain. These
    figures and those of `_fused` are read off XLA's buffer assignments; all others here are counted from the code.
    """
    model, c, t = shape.model, shape.compute, shape.tokens
    gathered = 4 * c * (np.asarray(shape.sequence_parallel) == 1)
    layer = t * model.hidden * (24 / shape.parts + 5.5 * c + gathered + 7 * c / parts("ffn", shape.mesh))
    layer = layer + _of_layer(shape, "residuals", _scores) * (4 + c)
    if model.separator >= 0:  # the mask; its gradient, which nothing uses, finds room elsewhere
        layer = layer + _of_layer(shape, "residuals", _masks) * c * (model.sequence // shape.shared) ** 2
    again = (shape.save == SAVE_MODES.index("inputs")) * shape.slots * _fused(shape)
    # With one stage the kernels' gradients go straight into their accumulators, if there are any.
    waits = (np.asarray(shape.pipe) > 1) | (np.asarray(shape.micro_batches) == 1)
    return again + layer + waits * c * _kernels(shape) * shape.slots


def _kernels(shape: Shape) -> PerCandidate:
    """Return the numbers in the kernels of a layer on a device, in the mean of the layers."""
    rows = [p for p in table(shape.model) if p.role == "kernel"]
    sizes = (functools.reduce(np.multiply, p.shape(shape.model, shape.mesh)) * len(stack(shape.model, p)) for p in rows)
    return sum(sizes) / shape.model.layers


def analytic(shape: Shape) -> Memory:
    """Return what XLA allocates for the train step, to some percent: arrays over candidates, equal on every stage.

    Its sum is comparable to OracleMemory.total: arguments and temporaries at once.
    """
    whole, sharded, cast = parameters(shape)
    in_group = parameters(dataclasses.replace(shape, data=shape.data // shape.copies_of_shards))[1]
    # Two layers' weights are whole at a time, the next one's beside a layer's own, and one layer's gradients.
    gathers, scatters = (np.asarray(shape.shard) >= SHARDS.index(name) for name in ("weights", "gradients"))
    cast_held = np.where(gathers, cast * in_group / whole + 2 * _kernels(shape), cast)
    sums = np.where(scatters, in_group + _kernels(shape), whole)
    # One micro-batch on one stage is the whole sum: XLA leaves the accumulators out.
    adds = (np.asarray(shape.pipe) > 1) | (np.asarray(shape.micro_batches) > 1)
    layer = kept(shape)
    splits = each(shape.schedule, lambda spec: spec.splits) & (np.asarray(shape.pipe) > 1)
    if np.any(splits):
        layer |= {mode: layer[mode] + splits * more for mode, more in left(shape).items()}
    layer["residuals"] = np.where(np.asarray(shape.pipe) == 1, _fused(shape), layer["residuals"])  # no ring
    modes = [shape.save == SAVE_MODES.index(name) for name in layer]
    of_stage = np.select(modes, [shape.slots * x for x in layer.values()], _message(shape))
    return Memory(
        weights=_ACCUMULATOR * (sharded + whole - cast) + shape.compute * cast_held,
        optimizer=(2 + shape.copies) * _ACCUMULATOR * sharded,
        gradients=_ACCUMULATOR * sums * adds,
        activations=ring_slots(shape) * of_stage,
        messages=_messages(shape) + 2 * _ACCUMULATOR * _in_flight(shape),  # a difference, and the mean of all
        workspace=np.maximum(_head(shape), _backward(shape)),
        compression=_codec_state(shape),
    )


def per_stage(config: Config, capability: tuple[int, int] = (9, 0)) -> Memory:
    """Return the part of one configuration's allocation that each stage uses: arrays [stages], for drawings.

    It is less than `analytic`, which is equal on every stage: a stage also allocates what it does not use.
    """
    shape = of(config, capability)
    stages, v, m = config.mesh.pipe, config.pipeline.virtual_stages, config.micro_batches
    allocated, s = analytic(shape), np.arange(config.mesh.pipe)
    of_layers = np.add.reduce(config.stage_map.by_stage(config.stage_layers)) / (shape.slots * v)
    tables = shape.model.tables if len(config.stage_map.ends) == 1 else 1
    embedding = count(shape.model, "embedding", mesh=config.mesh.layer_sizes, tables=tables)
    held = float(embedding / parameters(shape)[0])  # the embedding's share of the slots' parameters
    used = of_layers * (1 - held) + np.isin(s, config.stage_map.ends) * held
    in_use = config.pipeline.spec.residual_slots(s, stages, v, m) / np.maximum(ring_slots(shape), 1)
    return Memory(
        weights=allocated.weights * used,
        optimizer=allocated.optimizer * used,
        gradients=allocated.gradients * used,
        activations=allocated.activations * in_use * of_layers,
        messages=np.full(stages, allocated.messages, float),
        workspace=np.where(s == config.stage_map.last, allocated.workspace, _backward(shape)),
        compression=np.full(stages, allocated.compression, float),
    )
