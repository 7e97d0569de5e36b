"""A space: candidates as columns of numbers, and the choices from which enumeration.py makes them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from paxtrain.config import CONTEXT_FORMS, REDUCE_DTYPES, SAVE_MODES, SHARDS, OuterConfig
from paxtrain.config.axes import (
    AXES,
    DATA,
    PIPE,
    TENSOR,
    AxisSizes,
    inside_axes,
    layer_axes,
    layer_sizes,
    more_axes,
    sequence_parts,
)
from paxtrain.schedule.schedules import code, name_of, names
from planner.cost.candidate import NO_GROUPS, Candidate
from planner.cost.coded import LOW_RANK, Coded

Array = np.ndarray
BACKWARD = ("none", "epilogue", "all")
_NO_RANK = 16  # a candidate's rank of messages that it does not compress; the column has 0
CODED = 1  # rank of what another codec than low rank compresses
# Schedules that split the backward are left out: real processes took longer with zb_h1 than predicted (docs/cost.md).
TRIED = names(lambda spec: not spec.splits)


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
        shards: values of MeshConfig.shard to try.
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
    shards: tuple[str, ...] = ("optimizer", "none", "gradients", "weights")
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
        codec: compress.Codec of keys and values, see `Coded.context`; all candidates have the same.
    """

    data: Array
    pipe: Array
    tensor: Array
    micro_batch: Array
    micro_batches: Array
    schedule: Array
    chunks: Array
    save: Array
    shard: Array
    shard_group: Array
    context_form: Array
    sequence_parallel: Array
    reduce_dtype: Array
    backward: Array
    backward_rank: Array
    data_rank: Array
    uneven_data: Array
    slots: Array
    together: Array
    others: Array
    codec: Any = None

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
    def zero1(self) -> Array:
        """True if each data rank keeps a part of the states only."""
        return self.shard > 0

    @property
    def sharing(self) -> Array:
        """Data ranks that share weights and sums in shards."""
        return np.where(self.shard_group > 0, self.shard_group, self.together)

    @property
    def seat(self) -> Array:
        """Devices that share a seat, see `Candidate.seat`."""
        return functools.reduce(np.multiply, [self.column(name) for name in inside_axes()])

    @functools.cached_property
    def layer_sizes(self) -> tuple[list[AxisSizes], Array]:
        """The different sizes of the axes that split layers, and which of these each candidate has, [N]."""
        names = layer_axes()
        columns = [*map(self.column, names), self.context_form]
        keys, where = np.unique(columns, axis=1, return_inverse=True)
        found = [
            layer_sizes(dict(zip(names, sizes)), CONTEXT_FORMS[form], self.codec) for *sizes, form in keys.T.tolist()
        ]
        return found, where.ravel()

    def column(self, name: str) -> Array:
        """Return the column of a field of candidates, or of the size of an axis."""
        return self.others[:, more_axes().index(name)] if name in more_axes() else getattr(self, name)

    def take(self, where: Array) -> "Space":
        """Return some of the candidates."""
        columns = {name: column[where] for name, column in vars(self).items() if isinstance(column, np.ndarray)}
        return dataclasses.replace(self, **columns)


_MEANINGS = {
    "schedule": Column(name_of, code),
    "save": _named(SAVE_MODES),
    "shard": _named(SHARDS),
    "context_form": _named(CONTEXT_FORMS),
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
