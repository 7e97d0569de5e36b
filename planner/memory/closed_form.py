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
from collections.abc import Callable

import numpy as np

from paxtrain.config import CONTEXT_FORMS, SAVE_MODES, SHARDS, SPLIT_SAVES, Config
from paxtrain.config.axes import layer_sizes, more_axes, parts
from paxtrain.model.fragments import fragment_layers
from paxtrain.model.parameters import count, differ, table, with_attention
from paxtrain.model.spec import Parameter
from paxtrain.schedule.schedules import code, each
from planner.cost.coded import coded
from planner.memory.codec_states import codec_states
from planner.memory.shape import ACCUMULATOR, ERRORS, PerCandidate, Shape, columns, meets
from planner.program.cache import layer_program
from planner.program.kinds import rooms
from planner.program.layer_program import Bytes, LayerProgram


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
        context_form=CONTEXT_FORMS.index(mesh.context_form),
        scan=int(pipeline.scans(counts)),
        backward_rank=max(ranks, default=0),
        forward_rank=compress.forward.rank if compress.forward.chosen != "none" else 0,
        data_rank=compress.data.rank if compress.data.over(mesh.data) != "none" else 0,
        data_rank_min=compress.data.rank_min if compress.data.adapt_every else 0,
        error=ERRORS.index(compress.error),
        sequence_parallel=int(mesh.sequence_parallel),
        overlap=int(capability > (0, 0)),
        coded=coded(compress, config.model.tied_head),
        copies=1 + (outer.momentum > 0) if outer.every else 0,
        groups=groups,
        fragment_layers=fragment_layers(config.model, outer.fragments, counts, stage_of) if outer.every else (),
        overlaps=outer.overlap > 0,
        min_ratio=compress.min_ratio,
        others={name: mesh.sizes[name] for name in more_axes()},
        rooms=rooms(config.model, counts) if differ(config.model) else {},
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


def _of_layer(shape: Shape, save: str, size: Callable[[LayerProgram], Bytes], kind: str | None = None) -> PerCandidate:
    """Return what the program of a layer of a kind says of each candidate; None: all layers are alike."""
    names = tuple(shape.mesh)
    *how, batch = columns(*shape.mesh.values(), shape.context_form, shape.sequence_parallel, shape.micro_batch)
    found = np.zeros(batch.shape)
    for one in set(zip(*(x.ravel().tolist() for x in how))):
        *sizes, form, sequence = one
        mesh = layer_sizes(dict(zip(names, sizes)), CONTEXT_FORMS[form], shape.coded.context)
        here = size(layer_program(shape.model, mesh, sequence == 1, save, kind))
        same = functools.reduce(np.logical_and, [x == value for x, value in zip(how, one)])
        found = np.where(same, here.of(batch), found)
    return found


def kept(shape: Shape, kind: str | None = None) -> dict[str, PerCandidate]:
    """Return the bytes that the forward of one layer leaves for its backward, by save mode; "inputs" keeps nothing.

    Args:
        shape: candidates.
        kind: the layer's kind; None: all layers are alike.
    """
    return {save: _of_layer(shape, save, lambda one: one.kept, kind) for save in ("dots", "layer_inputs", "residuals")}


def left(shape: Shape, kind: str | None = None) -> dict[str, PerCandidate]:
    """Return the bytes that B of one layer adds to `kept` for W, by save mode, if the backward is split.

    B leaves the gradients of what the layer's matrices make. paxtrain.pipeline.split_backward puts some of them in the
    place of what F keeps and W does not read; the others add to the ring.
    """
    return {save: _of_layer(shape, save, lambda one: one.left, kind) for save in SPLIT_SAVES}


def _scores(program: LayerProgram) -> Bytes:
    """Return the numbers of the largest array that products of attention make in memory, its scores."""
    return Bytes(0, max((m * n * b for one in program.forward.attention for m, n, _, b in [one.sizes(1)]), default=0))


def _masks(program: LayerProgram) -> Bytes:
    """Return 1 for each sequence if fused attention takes a mask, else 0."""
    return Bytes(0, int(bool(program.forward.fused)))


def _count(shape: Shape, p: Parameter) -> PerCandidate:
    """Return the number of arrays of a row of the architecture's table that a device holds."""
    if p.lead == "layers":
        return shape.having(p) * shape.virtual_stages
    return np.where(meets(shape), shape.model.tables, 1) if p.own[0] == "vocab" else 1


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
    return (ACCUMULATOR + shape.compute) * logits + several * shape.compute * table


def _fused(shape: Shape, kind: str | None = None) -> PerCandidate:
    """Return the bytes that XLA keeps of a layer between its F and its B if no ring asks for more; see `kept`.

    XLA sees all unrolled layers at once. It keeps what save="dots" would, the two norms' float32 inputs and, with
    sequence parallelism, what is gathered of them. A loop over layers keeps all it is told to.
    """
    layer, whole = kept(shape, kind), shape.tokens * shape.model.hidden
    gathered = 2 * shape.compute * whole * (np.asarray(shape.sequence_parallel) == 1)
    unrolled = np.minimum(layer["dots"] + 2 * ACCUMULATOR * whole / shape.parts + gathered, layer["residuals"])
    return np.where(np.asarray(shape.scan) == 1, layer["residuals"], unrolled)


def _backward(shape: Shape) -> PerCandidate:
    """Return the bytes of B's workspace: what it computes anew, and the kernels' gradients before they are added.

    XLA fuses most passes over one layer's activations; about six in float32 and some in the compute dtype remain. These
    figures and those of `_fused` are read off XLA's buffer assignments; all others here are counted from the code.
    """
    model, c, t = shape.model, shape.compute, shape.tokens
    gathered = 4 * c * (np.asarray(shape.sequence_parallel) == 1)
    layer = t * model.hidden * (24 / shape.parts + 5.5 * c + gathered + 7 * c / parts("ffn", shape.mesh))
    layer = layer + _largest(shape, lambda kind: _of_layer(shape, "residuals", _scores, kind)) * (4 + c)
    if model.separator >= 0:  # the mask; its gradient, which nothing uses, finds room elsewhere
        masks = _largest(shape, lambda kind: _of_layer(shape, "residuals", _masks, kind))
        layer = layer + masks * c * (model.sequence // shape.shared) ** 2
    again = (shape.save == SAVE_MODES.index("inputs")) * _of_slots(shape, lambda kind: _fused(shape, kind))
    # With one stage the kernels' gradients go straight into their accumulators, if there are any.
    waits = (np.asarray(shape.pipe) > 1) | (np.asarray(shape.micro_batches) == 1)
    return again + layer + waits * c * _of_slots(shape, lambda kind: _kernels(shape, kind))


def _of_slots(shape: Shape, of_layer: Callable[[str | None], PerCandidate]) -> PerCandidate:
    """Return the sum over a virtual stage's layer slots of what a layer of a kind has."""
    return sum(n * of_layer(kind) for kind, n in shape.slots_of.items())


def _largest(shape: Shape, of_layer: Callable[[str | None], PerCandidate]) -> PerCandidate:
    """Return the most that a layer of any kind has."""
    return functools.reduce(np.maximum, map(of_layer, shape.slots_of))


def _kernels(shape: Shape, kind: str | None) -> PerCandidate:
    """Return the numbers in the kernels of a layer of a kind on a device."""
    rows = [p for p in table(shape.model) if p.role == "kernel" and (kind is None or p.of(kind))]
    return sum(functools.reduce(np.multiply, p.shape(shape.model, shape.mesh)) for p in rows)


def analytic(shape: Shape) -> Memory:
    """Return what XLA allocates for the train step, to some percent: arrays over candidates, equal on every stage.

    Its sum is comparable to OracleMemory.total: arguments and temporaries at once.
    """
    whole, sharded, cast = parameters(shape)
    in_group = parameters(dataclasses.replace(shape, data=shape.data // shape.copies_of_shards))[1]
    # Two layers' weights are whole at a time, the next one's beside a layer's own, and one layer's gradients.
    gathers, scatters = (np.asarray(shape.shard) >= SHARDS.index(name) for name in ("weights", "gradients"))
    largest = _largest(shape, lambda kind: _kernels(shape, kind))
    cast_held = np.where(gathers, cast * in_group / whole + 2 * largest, cast)
    sums = np.where(scatters, in_group + largest, whole)
    # One micro-batch on one stage is the whole sum: XLA leaves the accumulators out.
    adds = (np.asarray(shape.pipe) > 1) | (np.asarray(shape.micro_batches) > 1)
    inputs = shape.save == SAVE_MODES.index("inputs")
    of_stage = np.where(inputs, _message(shape), _of_slots(shape, lambda kind: _left_by_forward(shape, kind)))
    return Memory(
        weights=ACCUMULATOR * (sharded + whole - cast) + shape.compute * cast_held,
        optimizer=(2 + shape.copies) * ACCUMULATOR * sharded,
        gradients=ACCUMULATOR * sums * adds,
        activations=ring_slots(shape) * of_stage,
        messages=_messages(shape) + 2 * ACCUMULATOR * _in_flight(shape),  # a difference, and the mean of all
        workspace=np.maximum(_head(shape), _backward(shape)),
        compression=codec_states(shape),
    )


def _left_by_forward(shape: Shape, kind: str | None) -> PerCandidate:
    """Return the bytes of a slot of the ring of residuals for a layer of a kind; 0 if nothing is kept of layers."""
    layer, several = kept(shape, kind), np.asarray(shape.pipe) > 1
    splits = each(shape.schedule, lambda spec: spec.splits) & several
    if np.any(splits):
        layer |= {mode: layer[mode] + splits * more for mode, more in left(shape, kind).items()}
    layer["residuals"] = np.where(several, layer["residuals"], _fused(shape, kind))  # no ring
    return np.select([shape.save == SAVE_MODES.index(name) for name in layer], list(layer.values()), 0.0)


def per_stage(config: Config, capability: tuple[int, int] = (9, 0)) -> Memory:
    """Return the part of one configuration's allocation that each stage uses: arrays [stages], for drawings.

    It is less than `analytic`, which is equal on every stage: a stage also allocates what it does not use.
    """
    shape = of(config, capability)
    stages, v, m = config.mesh.pipe, config.pipeline.virtual_stages, config.micro_batches
    allocated, s = analytic(shape), np.arange(config.mesh.pipe)
    of_layers = np.add.reduce(config.stage_map.by_stage(config.stage_layers)) / (sum(shape.slots_of.values()) * v)
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
