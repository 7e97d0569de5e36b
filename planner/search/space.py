"""The candidates: every way to split a model over a cluster that the trainer accepts, as columns of numbers."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from compress.policy import largest_rank
from paxtrain.config import REDUCE_DTYPES, SAVE_MODES, SPLIT_SAVES, ModelConfig, OuterConfig
from paxtrain.config.axes import (
    AXES,
    DATA,
    PIPE,
    TENSOR,
    AxisSizes,
    batch_axes,
    inside_axes,
    layer_axes,
    layer_sizes,
    more_axes,
    sequence_parts,
)
from paxtrain.config.checks import divisors
from paxtrain.errors import UserError
from paxtrain.model.parameters import not_run
from paxtrain.schedule.schedules import FAMILY, ScheduleSpec, between_ends, code, name_of, names, spec_of
from planner.cluster.cluster import Cluster
from planner.cost import compute, outer
from planner.cost.candidate import NO_GROUPS, Candidate
from planner.cost.coded import LOW_RANK, Coded

Array = np.ndarray
BACKWARD = ("none", "epilogue", "all")
_NO_RANK = 16  # a candidate's rank of messages that it does not compress; the column has 0
_LEAST_TOKENS = 4096  # of a sequence on a device; with fewer its axis is tried only if it is asked for
CODED = 1  # rank of what another codec than low rank compresses
# Schedules that split the backward are left out: real processes took longer with zb_h1 than predicted (docs/cost.md).
TRIED = names(lambda spec: not spec.splits)
# Number of schedules between 1f1b and eager_1f1b that are tried. If there are at most ALL_BETWEEN, all are tried.
BETWEEN, ALL_BETWEEN = 3, 5


class Column(NamedTuple):
    """The meaning of the numbers in a column of a space.

    Attributes:
        value: number -> value of the candidate's field.
        number: value of the candidate's field -> number.
    """

    value: Callable[[int], Any] = int
    number: Callable[[Any], int] = int


def _named(names: tuple[str, ...]) -> Column:
    """Return the column of a field whose values have names."""
    return Column(lambda number: names[number], names.index)


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices of the search. The kinds and ranks of compression are the budget of quality.

    Attributes:
        data: sizes of the data axis to try; empty: all that divide.
        tensor: sizes of the tensor axis to try; empty: all that divide.
        pipe: sizes of the pipe axis to try; empty: all that divide.
        micro_batch: sizes of a micro-batch to try; empty: all that divide.
        schedules: schedules to try.
        in_flight: whether those between 1f1b and eager_1f1b are tried with 1f1b.
        virtual_stages: chunks to try with interleaved schedules.
        saves: save modes to try.
        scan_layers: PipelineConfig.scan_layers of all candidates.
        zero1: values of MeshConfig.zero1 to try.
        sequence_parallel: values to try if tensor has several devices that the sequence can be split over.
        reduce_dtype: MeshConfig.reduce_dtype of all candidates.
        backward: kinds of compressed gradients between stages that are allowed besides none.
        backward_ranks: ranks at which they are allowed.
        data_ranks: ranks allowed for gradients over data; empty: they stay dense.
        min_ratio: factor by which a message must shrink at least to be compressed.
        coded: codecs other than low rank; with one, the ranks of its place are one number above 0.
        uneven_data: whether faster data ranks have more micro-batches; values to try if devices are of several kinds.
        outer: groups of data ranks that train apart, in all candidates.
        others: sizes of other axes to try, by name; all that divide of those without any.
    """

    tensor: tuple[int, ...] = ()
    pipe: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    schedules: tuple[str, ...] = TRIED
    in_flight: bool = True
    virtual_stages: tuple[int, ...] = (2, 4)
    saves: tuple[str, ...] = SAVE_MODES
    scan_layers: str = "auto"
    zero1: tuple[bool, ...] = (True, False)
    sequence_parallel: tuple[bool, ...] = (False,)
    reduce_dtype: str = "float32"
    backward: tuple[str, ...] = ("epilogue",)
    backward_ranks: tuple[int, ...] = (16,)
    data_ranks: tuple[int, ...] = (128,)
    min_ratio: float = 2.0
    data: tuple[int, ...] = ()
    coded: Coded = LOW_RANK
    uneven_data: tuple[bool, ...] = (False,)
    outer: OuterConfig = NO_GROUPS
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of each axis to try; () for all that divide."""
        named = {DATA: self.data, PIPE: self.pipe, TENSOR: self.tensor}
        return dict.fromkeys(AXES, ()) | named | dict(self.others)

    def apart(self, data: int) -> int:
        """Return the number of groups into which data ranks fall; 1 if all train together."""
        return (self.outer.groups or data) if self.outer.every else 1


DEFAULTS = Choices()


@dataclasses.dataclass(frozen=True, eq=False)
class Space:
    """Candidates as columns [N], named like the fields of planner.cost.candidate.Candidate, in the order of `_rows`.

    COLUMNS says what their numbers stand for.

    Attributes:
        slots: layer slots of a virtual stage if layers are spread as evenly as they get.
        together: data ranks that train together, those of a group.
        others: [N, A] sizes of the axes besides data, pipe and tensor, in the order of the mesh.
    """

    data: Array
    pipe: Array
    tensor: Array
    micro_batch: Array
    micro_batches: Array
    schedule: Array
    chunks: Array
    save: Array
    zero1: Array
    sequence_parallel: Array
    reduce_dtype: Array
    backward: Array
    backward_rank: Array
    data_rank: Array
    uneven_data: Array
    slots: Array
    together: Array
    others: Array

    def __len__(self) -> int:
        return len(self.data)

    @property
    def parts(self) -> Array:
        """Parts into which devices split the sequence that they keep and send."""
        return self.shared * np.where(self.sequence_parallel, self.tensor, 1)

    @property
    def shared(self) -> Array:
        """Devices that share each sequence through all layers."""
        return sequence_parts({name: self.column(name) for name in AXES})

    @property
    def seat(self) -> Array:
        """Devices that share a seat, see `Candidate.seat`."""
        return functools.reduce(np.multiply, [self.column(name) for name in inside_axes()])

    @functools.cached_property
    def layer_sizes(self) -> tuple[list[AxisSizes], Array]:
        """The different sizes of the axes that split layers, and which of these each candidate has, [N]."""
        names = layer_axes()
        keys, where = np.unique([self.column(name) for name in names], axis=1, return_inverse=True)
        return [layer_sizes(dict(zip(names, sizes))) for sizes in keys.T.tolist()], where.ravel()

    def column(self, name: str) -> Array:
        """Return the column of a field of candidates, or of the size of an axis."""
        return self.others[:, more_axes().index(name)] if name in more_axes() else getattr(self, name)

    def take(self, where: Array) -> "Space":
        """Return some of the candidates."""
        return Space(**{field.name: getattr(self, field.name)[where] for field in dataclasses.fields(self)})


_MEANINGS = {
    "schedule": Column(name_of, code),
    "save": _named(SAVE_MODES),
    "zero1": Column(bool),
    "sequence_parallel": Column(bool),
    "reduce_dtype": _named(REDUCE_DTYPES),
    "backward": _named(BACKWARD),
    "backward_rank": Column(lambda number: number or _NO_RANK),
    "uneven_data": Column(bool),
}
# All that a candidate chooses, in the order in which it is enumerated.
COLUMNS = {
    field.name: _MEANINGS.get(field.name, Column())
    for field in dataclasses.fields(Space)
    if field.name in Candidate.__dataclass_fields__ and field.name != "others"
}


def candidate_of(space: Space, i: int, counts: tuple[int, ...], choices: Choices = DEFAULTS) -> Candidate:
    """Return a candidate of the space with a split of the layers.

    Args:
        space: candidates.
        i: place of the candidate.
        counts: layers of each virtual stage.
        choices: choices that the space was made of, for what all candidates have in common.
    """
    chosen = {name: column.value(getattr(space, name)[i].item()) for name, column in COLUMNS.items()}
    return Candidate(
        **chosen,
        others=tuple(space.others[i].tolist()),
        scan_layers=choices.scan_layers,
        coded=choices.coded,
        counts=counts,
        outer=choices.outer,
        min_ratio=choices.min_ratio,
    )


def numbers_of(candidate: Candidate) -> dict[str, int]:
    """Return the number that a candidate has in each column, and the size of each axis."""
    numbers = {name: column.number(getattr(candidate, name)) for name, column in COLUMNS.items()} | candidate.sizes
    return numbers if numbers["backward"] else numbers | {"backward_rank": 0}


def _meshes(cluster: Cluster, model: ModelConfig, choices: Choices) -> Iterator[dict[str, int]]:
    """Yield the sizes of all axes, by name, of the meshes that fill the devices and that the records allow."""
    asked, per_host = {name: some for name, some in choices.sizes.items() if some}, cluster.devices_per_host
    sizes = [
        [
            size
            for size in asked.get(name) or divisors(per_host)
            if size <= AXES[name].most
            and not any(whole % size for whole in model.split_by(name).values())
            and (name in asked or size == 1 or not AXES[name].sequence or model.sequence // size >= _LEAST_TOKENS)
        ]
        for name in inside_axes()
    ]
    for inside in itertools.product(*sizes):
        seat, mesh = math.prod(inside), dict(zip(inside_axes(), inside))
        # Of hosts taken together only seats that fill them are known: smaller ones lie on other links.
        if per_host % seat or (cluster.parts and seat != per_host) or model.undivided(mesh) or not_run(model, mesh):
            continue
        for pipe in divisors(cluster.devices // seat):
            data = cluster.devices // seat // pipe
            whole = dict.fromkeys(AXES, 1) | mesh | {DATA: data, PIPE: pipe}
            if pipe <= model.layers and all(whole[name] in some for name, some in asked.items()):
                yield whole


def _ranks(mesh: Mapping[str, int]) -> int:
    """Return the parts into which a mesh splits the batch."""
    return math.prod(mesh[name] for name in batch_axes())


def enumerate_candidates(cluster: Cluster, model: ModelConfig, global_batch: int, choices: Choices) -> Space:
    """Return all candidates.

    Args:
        cluster: devices of the hosts.
        model: model to split.
        global_batch: sequences of an optimizer step.
        choices: values to try.

    Raises:
        UserError: no mesh divides the model and the batch, or no candidate sends what the codecs take.
    """
    meshes = list(_meshes(cluster, model, choices))
    if meshes and choices.outer.every:
        meshes = _in_groups(meshes, choices)
    if not meshes:
        split = ", ".join(f"model.{name}={size}" for name, size in model.split_sizes.items())
        padded = {t: multiple for t in choices.tensor if (multiple := model.vocabulary_for(t))}
        key = "--model.model.vocab_multiple"
        raise UserError(
            f"no mesh fits {cluster.devices} devices, {cluster.devices_per_host} a host: tensor must divide "
            f"{split} and the devices of a host, and pipe must not exceed model.layers={model.layers}; allowed were "
            f"data={listed(choices.data)}, tensor={listed(choices.tensor)} and pipe={listed(choices.pipe)}"
            + "".join(f" and {name}={listed(choices.sizes[name])}" for name in more_axes())
            + "".join(f"; {key}={n} would let tensor={t} divide the vocabulary" for t, n in padded.items())
        )
    refused: dict[str, None] = {}
    rows = list(_rows(cluster, model, global_batch, choices, meshes, refused))
    if not rows and refused:
        raise UserError(
            f"no candidate sends what its codecs take, with data={listed(choices.data)}, pipe={listed(choices.pipe)} "
            f"and micro-batch {listed(choices.micro_batch)}: {next(iter(refused))}"
        )
    ranks = sorted({_ranks(mesh) for mesh in meshes})
    if not rows and any(global_batch % (n * b) == 0 for n in ranks for b in choices.micro_batch or (1,)):
        raise UserError(
            f"none of --schedules={','.join(choices.schedules)} fits these meshes and {model.layers} layers: those "
            "with virtual stages need a pipeline and a layer for each, files their own numbers; eager_1f1b fits all"
        )
    if not rows:
        by = " times ".join(batch_axes())
        raise UserError(
            f"a global batch of {global_batch} cannot be split: it must be divisible by {by} times the micro-batch, "
            f"and meshes of {cluster.devices} devices have {by}={listed(ranks)} with micro-batch "
            f"{listed(choices.micro_batch)}; a multiple of {ranks[0] * min(choices.micro_batch or (1,))} would fit"
        )
    *columns, others = zip(*rows)
    values = {name: np.array(column) for name, column in zip(COLUMNS, columns)}
    return Space(
        **values,
        slots=-(-model.layers // (values[PIPE] * values["chunks"])),
        together=np.array([data // choices.apart(data) for data in values[DATA].tolist()]),
        others=np.array(others, int).reshape(len(rows), len(more_axes())),
    )


def _rows(
    cluster: Cluster,
    model: ModelConfig,
    global_batch: int,
    choices: Choices,
    meshes: list[dict[str, int]],
    refused: dict[str, None],
) -> Iterator[tuple]:
    """Yield the candidates of some meshes, numbers in the order of COLUMNS, and the sizes of other axes.

    Args:
        cluster: devices of the hosts.
        model: model to split.
        global_batch: sequences of an optimizer step.
        choices: values to try.
        meshes: sizes of the axes of each mesh.
        refused: gets the sentences of codecs that do not take what some candidates send.
    """

    def takes(problem: str) -> bool:
        if problem:
            refused[problem] = None
        return not problem

    for mesh in meshes:
        data, pipe, tensor, ranks, split = mesh[DATA], mesh[PIPE], mesh[TENSOR], _ranks(mesh), layer_sizes(mesh)
        others = tuple(mesh[name] for name in more_axes())
        if global_batch % ranks:
            continue
        together = data // choices.apart(data)
        if not takes(_table_problem(choices, model, together, pipe, split)):
            continue
        zero1 = choices.zero1 if together * sequence_parts(mesh) > 1 else choices.zero1[:1]
        zero1 = tuple(z for z in zero1 if takes(sharding_problem(choices, model, data, split, z)))
        sizes = [b for b in divisors(global_batch // ranks) if not choices.micro_batch or b in choices.micro_batch]
        for micro_batch, (name, chunks) in itertools.product(sizes, _schedules(choices, model, pipe)):
            m = global_batch // ranks // micro_batch
            if (spec_of(name).size or (pipe, chunks, m)) != (pipe, chunks, m):
                continue
            schedule, dtype = code(name), REDUCE_DTYPES.index(choices.reduce_dtype)
            saves = [SAVE_MODES.index(s) for s in choices.saves if not spec_of(name).splits or s in SPLIT_SAVES]
            by_speed = _uneven_data(choices, cluster, data, m, spec_of(name)) if ranks == data else (False,)
            for sequence in _sequence_parallel(choices, model, tensor, sequence_parts(mesh)):
                message = message_shape(model, sequence_parts(mesh) * (tensor if sequence else 1), micro_batch)
                if pipe > 1 and not takes(_activations_problem(choices, model, message)):
                    continue
                policies = _compressions(choices, model, together, pipe, split, message)
                if spec_of(name).place(pipe, chunks).folded:  # messages travel as they are
                    policies = [] if choices.coded.compresses_forward else [one for one in policies if not one[0]]
                for save, zero, policy, uneven in itertools.product(saves, zero1, policies, by_speed):
                    how = (schedule, chunks, save, zero, sequence, dtype)
                    yield (data, pipe, tensor, micro_batch, m, *how, *policy, uneven, others)


def _in_groups(meshes: list[dict[str, int]], choices: Choices) -> list[dict[str, int]]:
    """Return the meshes whose data ranks fall into the groups that are asked for, two of them or more.

    Raises:
        UserError: there is none.
    """
    groups = choices.outer.groups
    found = [mesh for mesh in meshes if mesh[DATA] > 1 and mesh[DATA] % choices.apart(mesh[DATA]) == 0]
    if not found:
        sizes = sorted({mesh[DATA] for mesh in meshes})
        divide = sorted({d for data in sizes for d in divisors(data) if d > 1})
        would = f"outer.groups={listed(divide)} would fit" if divide else "another --data, --pipe or --tensor would fit"
        of = f"outer.groups={groups} divides the data axis of no mesh" if groups else "each data rank is a group"
        raise UserError(f"{of}, and the meshes that may be chosen have data={listed(sizes)}; {would}")
    return found


def listed(values: Sequence[int]) -> str:
    """Return sizes or ranks as a flag has them; "any" if there are none."""
    return ",".join(map(str, values)) if len(values) else "any"


def _schedules(choices: Choices, model: ModelConfig, pipe: int) -> Iterator[tuple[str, int]]:
    """Yield (schedule, chunks); with one stage all schedules are the same."""
    if pipe == 1:
        plain = [name for name in choices.schedules if not (spec_of(name).interleaves or spec_of(name).size)]
        plain.sort(key=lambda name: spec_of(name).splits)  # a split backward cannot use all saves
        yield from [(name, 1) for name in plain[:1]]
        return
    for name in choices.schedules:
        chunks = spec_of(name).chunk_counts(choices.virtual_stages)
        yield from ((name, some) for some in chunks if pipe * some <= model.layers)
        if choices.in_flight and between_ends(0).startswith(name + FAMILY[-1]):
            tried = pipe - 2 if pipe - 2 <= ALL_BETWEEN else BETWEEN
            for most in np.linspace(pipe, 2 * pipe - 1, tried + 2)[1:-1].round().astype(int).tolist():
                yield between_ends(most), 1


def _sequence_parallel(choices: Choices, model: ModelConfig, tensor: int, shared: int) -> tuple[bool, ...]:
    return (False,) if tensor == 1 or model.sequence % (tensor * shared) else choices.sequence_parallel


def _uneven_data(choices: Choices, cluster: Cluster, data: int, m: int, spec: ScheduleSpec) -> tuple[bool, ...]:
    differ = not choices.outer.every and data > 1 and m > 1 and len(set(cluster.kinds)) > 1 and not spec.size
    return choices.uneven_data if differ else (False,)


def message_shape(model: ModelConfig, parts: int, micro_batch: int) -> tuple[int, int, int]:
    """Return the shape of a message between stages; `parts` are those of the sequence, of which a device sends one."""
    return micro_batch, model.sequence // parts, model.hidden


def _activations_problem(choices: Choices, model: ModelConfig, message: tuple[int, int, int]) -> str:
    """Return why the trainer would refuse to send activations of a shape through their codec; "" if not."""
    coded = choices.coded
    return coded.message_problem("forward", message, model.dtype, choices.min_ratio) if coded.compresses_forward else ""


def _table_problem(choices: Choices, model: ModelConfig, together: int, pipe: int, mesh: AxisSizes) -> str:
    """Return why the trainer would refuse the codec of the embedding's gradients on a mesh; "" if not.

    Args:
        choices: choices with the codecs.
        model: model to split.
        together: data ranks that train together.
        pipe: size of the pipe axis.
        mesh: sizes of the axes that split layers.
    """
    rows = compute.embedding_parameters(model, mesh, pipe) // model.hidden
    return choices.coded.table_problem((rows, model.hidden), together, pipe, choices.min_ratio)


def sharding_problem(choices: Choices, model: ModelConfig, data: int, mesh: AxisSizes, zero1: bool) -> str:
    """Return why the trainer would refuse the codec of weights, or of what groups exchange, on a mesh; "" if not.

    Args:
        choices: choices with the codecs.
        model: model to split.
        data: size of the data axis.
        mesh: sizes of the axes that split layers.
        zero1: whether the optimizer's state is split over data.
    """
    coded, groups, kernels = choices.coded, choices.apart(data), compute.kernels(model, mesh)
    if zero1 and (problem := coded.weights_problem(kernels, data // groups, model.dtype)):
        return problem
    own = [outer.part(shape, data // groups, zero1) for shape in kernels]
    return coded.outer_problem(own, groups, choices.min_ratio)


def _compressions(
    choices: Choices, model: ModelConfig, together: int, pipe: int, mesh: AxisSizes, message: tuple[int, int, int]
) -> list[tuple[int, int, int]]:
    """Return (backward, its rank, rank over data) of each kind of compression that the trainer would apply.

    Args:
        choices: values to try.
        model: model to split.
        together: data ranks that train together.
        pipe: size of the pipe axis.
        mesh: sizes of the axes that split layers.
        message: shape of a message between stages.
    """
    n, k = math.prod(message[:-1]), message[-1]
    between, coded, ratio = [(0, 0)], choices.coded, choices.min_ratio

    def useful(rows: int, columns: int) -> int:
        return largest_rank(int(rows), int(columns), ratio)

    kinds = [BACKWARD.index(kind) for kind in choices.backward if kind != "none"] if pipe > 1 else []
    if kinds and coded.backward is not None:
        takes = not coded.message_problem("backward", message, model.dtype, ratio)
        between += [(kind, CODED) for kind in kinds if takes]
    elif kinds:
        between += [(kind, r) for kind in kinds for r in choices.backward_ranks if r <= useful(n, k)]
    over, kernels = [0], compute.kernels(model, mesh)
    if together > 1 and coded.data is not None:
        over += [CODED] if choices.data_ranks and not coded.data_problem(kernels, together, ratio) else []
    elif together > 1:
        largest = min((useful(*part) for part in coded.parts(kernels, together)), default=0)
        over += [r for r in choices.data_ranks if r <= largest]
    return [(kind, rank, data_rank) for (kind, rank), data_rank in itertools.product(between, over)]
