"""Enumeration of a space: every way to split a model over a cluster that the trainer accepts."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from compress.policy import largest_rank
from paxtrain.config import CONTEXT_FORMS, REDUCE_DTYPES, SAVE_MODES, SHARDS, SPLIT_SAVES, ModelConfig
from paxtrain.config.axes import (
    AXES,
    DATA,
    PIPE,
    TENSOR,
    AxisSizes,
    batch_axes,
    inside_axes,
    layer_sizes,
    more_axes,
    sequence_parts,
)
from paxtrain.config.checks import divisors
from paxtrain.errors import UserError
from paxtrain.model.parameters import not_run
from paxtrain.schedule.schedules import FAMILY, ScheduleSpec, between_ends, code, spec_of
from planner.cluster.cluster import Cluster
from planner.cost import compute, outer
from planner.search.space import BACKWARD, CODED, COLUMNS, Choices, Space

SUMS = ("gradients", "weights")  # values of mesh.shard that reduce gradients with each micro-batch
_LEAST_TOKENS = 4096  # of a sequence on a device; with fewer its axis is tried only if it is asked for
# Number of schedules between 1f1b and eager_1f1b that are tried. If there are at most ALL_BETWEEN, all are tried.
BETWEEN, ALL_BETWEEN = 3, 5


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
        raise UserError(_no_mesh(cluster, model, choices))
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
        codec=choices.coded.context,
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
        shards = _shards(choices, pipe) if together * sequence_parts(mesh) > 1 else choices.shards[:1]
        shards = tuple(one for one in shards if takes(sharding_problem(choices, model, data, split, one)))
        shared = [(one, group) for one in shards for group in _shard_groups(cluster, mesh, one)]
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
                every = itertools.product(saves, shared, context_forms(model, mesh), policies, by_speed)
                keys = micro_batch, model.sequence // sequence_parts(mesh), model.key_value_heads // tensor
                problem = choices.coded.keys_problem((*keys, model.head_dim), model.dtype)
                for save, (shard, group), form, policy, uneven in every:
                    if sequence_parts(mesh) > 1 and CONTEXT_FORMS[form] != "heads" and not takes(problem):
                        continue
                    if shard in SUMS and (uneven or (policy[-1] and not _codes_sums(choices, group))):
                        continue
                    how = (schedule, chunks, save, SHARDS.index(shard), group, form, sequence, dtype)
                    yield (data, pipe, tensor, micro_batch, m, *how, *policy, uneven, others)


def _shards(choices: Choices, pipe: int) -> tuple[str, ...]:
    """Return what may be split over data; sums of gradients in a pipeline only if nothing less is asked for."""
    coded = choices.coded
    if choices.outer.every or coded.embedding is not None or (pipe > 1 and {*choices.shards} - {*SUMS}):
        return tuple(one for one in choices.shards if one not in SUMS)
    return choices.shards


def _codes_sums(choices: Choices, group: int) -> bool:
    """Return whether gradients whose sums are in shards may go through a codec: in each micro-batch or between groups.

    Args:
        choices: choices with the codecs.
        group: MeshConfig.shard_group.
    """
    return choices.coded.data is not None and group in (0, choices.coded.inside)


def _shard_groups(cluster: Cluster, mesh: Mapping[str, int], shard: str) -> tuple[int, ...]:
    """Return the sizes of groups of data ranks that may share what is in shards: 0 for all, and those of a host."""
    data, host = mesh[DATA], cluster.devices_per_host // math.prod(mesh[name] for name in inside_axes())
    return (0, host) if shard in SUMS and 1 < host < data and data % host == 0 else (0,)


def context_forms(model: ModelConfig, mesh: Mapping[str, int]) -> list[int]:
    """Return the numbers of the ways in which devices that share sequences may see each other's tokens."""
    shared = sequence_parts(mesh)
    heads = model.key_value_heads % (shared * mesh[TENSOR]) == 0
    return [n for n, form in enumerate(CONTEXT_FORMS) if n == 0 or (shared > 1 and (form != "heads" or heads))]


def _no_mesh(cluster: Cluster, model: ModelConfig, choices: Choices) -> str:
    """Return why no mesh has the sizes that are asked for, and which would work."""
    asked = {name: some for name, some in choices.sizes.items() if some}
    flags = " ".join(f"--{name}={listed(some)}" for name, some in asked.items())
    alone = {name: _sizes(cluster, model, choices, name) for name in asked}
    for name, some in asked.items():
        if alone[name] and not set(some) & set(alone[name]):
            padded = {t: multiple for t in some if name == TENSOR and (multiple := model.vocabulary_for(t))}
            key = "--model.model.vocab_multiple"
            return f"{_wrong(cluster, model, name, some)}; {either(alone[name])} would fit" + "".join(
                f"; {key}={n} would let tensor={t} divide the vocabulary" for t, n in padded.items()
            )
    where = f"{cluster.devices} devices, {cluster.devices_per_host} a host"
    if len(asked) > 1 and all(alone.values()):
        return f"{flags} do not fit {where}, together; leave one of them out"
    split = ", ".join(f"model.{name}={size}" for name, size in model.split_sizes.items())
    return f"no mesh fits {where}: tensor must divide {split} and fill hosts; another number of devices would fit"


def _sizes(cluster: Cluster, model: ModelConfig, choices: Choices, name: str) -> list[int]:
    """Return the sizes of an axis with which there are meshes if no other axis is narrowed."""
    every = {DATA: (), PIPE: (), TENSOR: (), "others": ()}
    some = tuple(divisors(cluster.devices))
    one = {name: some} if name in every else {"others": ((name, some),)}
    return sorted({mesh[name] for mesh in _meshes(cluster, model, dataclasses.replace(choices, **(every | one)))})


def _wrong(cluster: Cluster, model: ModelConfig, name: str, some: Sequence[int]) -> str:
    """Return why no mesh has one of the sizes of an axis that are asked for."""
    flag, per_host = f"--{name}={listed(some)}", cluster.devices_per_host

    def divides(what: str) -> str:
        return f"none of {flag} divides {what}" if len(some) > 1 else f"{flag} does not divide {what}"

    if all(cluster.devices % size for size in some):
        return divides(f"{cluster.devices} devices")
    if name == PIPE and min(some) > model.layers:
        return f"{flag} is more than model.layers={model.layers}"
    if name in inside_axes() and all(per_host % size for size in some):
        return divides(f"the {per_host} devices of a host")
    for what, whole in model.split_by(name).items() if name in inside_axes() else ():
        if all(whole % size for size in some):
            return divides(f"model.{what}={whole}")
    return f"{flag} fits none of the meshes of {cluster.devices} devices, {per_host} a host"


def either(values: Sequence[int]) -> str:
    """Return sizes in words, "1, 2 or 4"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


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


def sharding_problem(choices: Choices, model: ModelConfig, data: int, mesh: AxisSizes, shard: str) -> str:
    """Return why the trainer would refuse the codec of weights, or of what groups exchange, on a mesh; "" if not.

    Args:
        choices: choices with the codecs.
        model: model to split.
        data: size of the data axis.
        mesh: sizes of the axes that split layers.
        shard: MeshConfig.shard.
    """
    coded, groups, kernels = choices.coded, choices.apart(data), compute.kernels(model, mesh)
    zero1 = shard != "none"
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
