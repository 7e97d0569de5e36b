"""Declarations of a configuration's codecs, for predictions.

Low rank's bytes and passes are closed forms over ranks (compute.py, sizes.py, data_axis.py), since the search tries
many ranks. Of any other codec the configuration names one, with its options, and the planner asks it. What activations
go through is given, low rank too: no search decides it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike

from compress.policy import LOW_RANK_PASSES, POWER_SGD_PASSES, largest_rank, too_large
from paxtrain.config import CompressConfig
from paxtrain.config.axes import DATA
from paxtrain.config.options import NO_OPTIONS, OTHERS, PLACES, REDUCED, OptionValues
from paxtrain.errors import UserError
from paxtrain.schedule.schedules import Numbers

if TYPE_CHECKING:  # they import jax, which takes long
    from compress.codec import Codec
    from compress.reducer import Reducer, Shard

# Of PowerSGD, passes over the gradients, and kernels per matrix.
POWER_PASSES, POWER_LAUNCHES = sum(POWER_SGD_PASSES[:2]), 2 * POWER_SGD_PASSES[2]

P = ParamSpec("P")
R = TypeVar("R")


def _remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that keeps its results; codecs and reducers are hashable, but their types do not say so."""
    return cast(Callable[P, R], functools.lru_cache(maxsize=4096)(function))


class CodecExchange(NamedTuple):
    """Collectives of one kind that a reduction over data runs.

    Attributes:
        kind: "all-reduce", "all-to-all" or "all-gather".
        bytes: bytes that a rank sends in all of them.
        number: their number.
    """

    kind: str
    bytes: float
    number: int


@dataclasses.dataclass(frozen=True)
class Coded:
    """The codecs of a configuration; None stands for low rank.

    Attributes:
        backward: compress.Codec of the gradients between stages.
        forward: compress.Codec of the activations between stages.
        forward_rank: rank of the activations between stages, if they go through low rank; 0: they do not.
        data: compress.Reducer of the gradients over data.
        weights: compress.Codec of the layers' kernels as they are gathered; None: they are gathered as they are.
        outer: compress.Reducer of the differences that groups exchange; None: they travel as they are.
        embedding: compress.Codec of the embedding's gradients; None: they travel as they are.
        context: compress.Codec of the keys and values of devices that share sequences; None: they travel as they are.
        tied: whether the first and the last stage exchange these, because the head uses the embedding's table.
        inside: CompressConfig.data_inside, data ranks of a group inside which gradients are summed as they are.
        error: CompressConfig.error, what low rank does with the errors of messages between stages.
        names: what the configuration calls them, by place, for reports.
        options: their options that are not the default, by place, for reports; those of low rank are `error` alone.
    """

    backward: "Codec | None" = None
    forward: "Codec | None" = None
    forward_rank: int = 0
    data: "Reducer | None" = None
    weights: "Codec | None" = None
    outer: "Reducer | None" = None
    embedding: "Codec | None" = None
    context: "Codec | None" = None
    tied: bool = True
    inside: int = 1
    error: str = "lazy"
    names: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, OptionValues], ...] = ()

    def name(self, place: str) -> str:
        """Return what the configuration calls the codec of a place; "" for low rank."""
        return dict(self.names).get(place, "")

    def options_of(self, place: str) -> OptionValues:
        """Return the options of a place's codec that are not the default."""
        return dict(self.options).get(place, NO_OPTIONS)

    def message_passes(self, place: str) -> tuple[float, float, int]:
        """Return the passes over a message to encode and to decode it, and the kernels of either.

        Args:
            place: "backward" or "forward".
        """
        codec = getattr(self, place)
        if codec is None:
            return LOW_RANK_PASSES[self.error]
        encode, decode, launches = codec.passes()
        return encode, decode, launches

    @overload
    def grouped(self, members: int) -> int: ...

    @overload
    def grouped(self, members: np.ndarray) -> np.ndarray: ...

    def grouped(self, members: int | np.ndarray) -> int | np.ndarray:
        """Return how many data ranks sum gradients as they are: those of a group, or 1 unless there are equal groups.

        Args:
            members: number of data ranks, or an array of such numbers.
        """
        fits = (members % self.inside == 0) & (members > self.inside)
        return np.where(fits, self.inside, 1) if isinstance(members, np.ndarray) else self.inside if fits else 1

    def part(self, shape: tuple[Numbers, Numbers], members: int | np.ndarray, zero1: ArrayLike) -> tuple[Any, Any]:
        """Return the part of a matrix that a rank compresses: all of it, or in groups of data ranks a share.

        It has no rows if the matrix cannot be cut; then it is reduced as it is (`compress.hierarchical`).

        Args:
            shape: rows and columns of the matrix on one device, numbers or arrays.
            members: number of data ranks, likewise.
            zero1: whether a rank keeps a part of the mean only, likewise.
        """
        (n, k), inside = shape, self.grouped(members)
        if self.inside == 1:
            return shape
        sharded = np.asarray(zero1) & ((n % members == 0) | (k % members == 0))
        parts = np.where(sharded, members, inside)  # ZeRO-1 splits the dim that its shards have
        rows, columns = n % parts == 0, k % parts == 0
        return np.where(rows, n // inside, np.where(columns, n, 0)), np.where(~rows & columns, k // inside, k)

    def parts(self, shapes: Iterable[tuple[int, int]], members: int) -> list[tuple[int, int]]:
        """Return the parts, as `part` has them, of those matrices that can be cut."""
        found = (self.part(shape, members, True) for shape in shapes)
        return [(int(n), int(k)) for n, k in found if n]

    def _reducer(self, members: int) -> "Reducer":
        """Return the reducer over data of a number of ranks."""
        assert self.data is not None
        if (inside := self.grouped(members)) == 1:
            return self.data
        from compress.hierarchical import Hierarchical  # here, since it imports jax, which takes long

        return Hierarchical(self.data, inside)

    def reduction_passes(self, members: int) -> tuple[float, int]:
        """Return the passes over the gradients of a reduction over data, and its kernels for each array."""
        return self.passes_of(self._reducer(members))

    def passes_of(self, reducer: "Reducer") -> tuple[float, int]:
        """Return the passes over the gradients of a reducer, and its kernels for each array."""
        encode, decode, launches = reducer.passes()
        return encode + decode, 2 * launches

    @property
    def compresses_forward(self) -> bool:
        """Return whether activations between stages are compressed."""
        return self.forward is not None or self.forward_rank > 0

    def message_bytes(self, shape: tuple[int, ...], dtype: str, place: str = "backward") -> int:
        """Return the bytes of a message between stages on the wire, of a place with another codec than low rank."""
        return _message(getattr(self, place), shape, dtype)[0]

    def state_bytes(self, shape: tuple[int, ...], dtype: str, place: str = "backward") -> int:
        """Return the bytes of a link's state, of a place with another codec than low rank."""
        return _message(getattr(self, place), shape, dtype)[1]

    def message_problem(self, place: str, shape: tuple[int, ...], dtype: str, min_ratio: float) -> str:
        """Return why the trainer would refuse to send messages of a shape through the codec of a place; "" if not.

        Args:
            place: "backward" or "forward"; one that has a codec other than low rank, or activations.
            shape: shape of a message between stages.
            dtype: dtype of a message between stages.
            min_ratio: factor by which a message must become smaller.
        """
        if (codec := getattr(self, place)) is not None:
            return _message_problem(codec, shape, dtype, min_ratio)
        n, k = math.prod(shape[:-1]), shape[-1]
        largest = largest_rank(n, k, min_ratio)
        if self.forward_rank <= largest:
            return ""
        return too_large(f"compress.forward.rank={self.forward_rank}", f"messages are {n} x {k}", largest, min_ratio)

    def weights_problem(self, shapes: Sequence[tuple[int, int]], members: int, dtype: str) -> str:
        """Return why the trainer would refuse to gather weights through their codec; "" if it would not.

        Args:
            shapes: rows and columns of the matrices on one device.
            members: number of data ranks.
            dtype: dtype in which weights are gathered.
        """
        if self.weights is None or members == 1:
            return ""
        parts = [_weights_part(shape, members) for shape in shapes]
        return _first(_message_problem(self.weights, part, dtype, 0.0) for part in parts)

    def keys_problem(self, shape: tuple[int, ...], dtype: str) -> str:
        """Return why the trainer would refuse to send keys and values of a shape through their codec; "" if not."""
        return "" if self.context is None else _message_problem(self.context, shape, dtype, 0.0)

    def outer_problem(self, shapes: Sequence[tuple[int, int]], groups: int, min_ratio: float) -> str:
        """Return why the trainer would refuse to exchange matrices between groups through their codec; "" if not.

        Args:
            shapes: rows and columns of a device's parts.
            groups: number of groups.
            min_ratio: factor by which a part must become smaller.
        """
        if self.outer is None or groups == 1:
            return ""
        found = _first(_refusal(self.outer, shape, groups, False) for shape in shapes)
        if found or any(self.outer_takes(shape, groups, min_ratio) for shape in shapes):
            return found
        return (
            f"compress.outer.codec={self.name('outer')} makes no kernel of a layer {min_ratio:g} times smaller "
            f"(compress.min_ratio) in {groups} equal parts"
        )

    def data_problem(self, shapes: Sequence[tuple[int, int]], members: int, min_ratio: float) -> str:
        """Return why not all of a layer's matrices are compressed over data by a codec; "" if they are.

        Args:
            shapes: rows and columns of the matrices on one device.
            members: number of data ranks.
            min_ratio: factor by which a matrix must become smaller.
        """
        reducer = self._reducer(members)
        for shape in shapes:
            # ZeRO-1 or not, the parts are the same.
            if found := _refusal(reducer, shape, members, True):
                return found
            if not self.takes(shape, members, True, min_ratio):
                return (
                    f"compress.data.codec={self.name('data')} does not make a kernel of {shape[0]} x {shape[1]} "
                    f"{min_ratio:g} times smaller (compress.min_ratio) in {members} equal parts"
                )
        return ""

    def weight_bytes(self, shape: tuple[int, int], members: int, dtype: str) -> int:
        """Return the bytes on the wire of a rank's part of a matrix of weights.

        Args:
            shape: rows and columns of the matrix on one device.
            members: number of data ranks.
            dtype: dtype in which weights are gathered.
        """
        assert self.weights is not None
        return _message(self.weights, _weights_part(shape, members), dtype)[0]

    def takes(self, shape: tuple[int, int], members: int, zero1: bool, min_ratio: float, rank: int = 0) -> bool:
        """Return whether a matrix is compressed over data.

        Args:
            shape: rows and columns of the matrix on one device.
            members: number of data ranks.
            zero1: whether a rank keeps a part of the mean only.
            min_ratio: factor by which the matrix must become smaller.
            rank: rank of the factors, if it is low rank that compresses.
        """
        if self.data is None:
            rows, columns = self.part(shape, members, zero1)
            return rank <= largest_rank(int(rows), int(columns), min_ratio)
        return _takes(self._reducer(members), shape, members, zero1, min_ratio)

    def exchanges(self, shape: tuple[int, int], members: int, zero1: bool) -> tuple[CodecExchange, ...]:
        """Return the collectives that reduce a matrix over data, or between groups; see `takes`.

        Those inside groups are of what is not compressed.
        """
        return _exchanges(self._reducer(members), shape, members, zero1)

    def outer_exchanges(self, shape: tuple[int, int], groups: int) -> tuple[CodecExchange, ...]:
        """Return the collectives that average a device's part of a matrix over groups."""
        assert self.outer is not None
        return _exchanges(self.outer, shape, groups, False)

    def outer_takes(self, shape: tuple[int, int], groups: int, min_ratio: float) -> bool:
        """Return whether a device's part of a matrix is compressed between groups; see `takes`."""
        assert self.outer is not None
        return _takes(self.outer, shape, groups, False, min_ratio)

    def outer_bytes(self, shape: tuple[int, int], groups: int) -> int:
        """Return the bytes of the state of a device's part of a matrix that is compressed between groups."""
        assert self.outer is not None
        return _reducer_state(self.outer, shape, groups, False)

    # --- The embedding's gradients, exchanged as in paxtrain/parallel/compression/embedding.py ------------------------

    def _of_table(self) -> "Reducer":
        """Return the reducer of the embedding's gradients over data."""
        from compress.reducer import Scattered  # here, since it imports jax, which takes long

        assert self.embedding is not None
        return Scattered(self.embedding)

    def _table_part(self, shape: tuple[int, int], members: int) -> tuple[int, ...]:
        """Return the part of a table that the first and the last stage exchange; see `table_bytes`."""
        return _weights_part(shape, members) if members > 1 else shape

    def table_problem(self, shape: tuple[int, int], members: int, pipe: int, min_ratio: float) -> str:
        """Return why the trainer would refuse the codec of the embedding's gradients; "" if it would not.

        Args:
            shape: rows and columns of the tables on one device.
            members: number of data ranks that train together.
            pipe: number of stages.
            min_ratio: factor by which the table must become smaller.
        """
        if self.embedding is None or not (members > 1 or (self.tied and pipe > 1)):
            return ""
        over = shape, members, True
        if (found := _refusal(self._of_table(), *over)) or self.table_takes(*over, min_ratio):
            return found
        return (
            f"compress.embedding.codec={self.name('embedding')} does not make a table of {shape[0]} x {shape[1]} "
            f"{min_ratio:g} times smaller (compress.min_ratio) in {members} equal parts"
        )

    def table_takes(self, shape: tuple[int, int], members: int, zero1: bool, min_ratio: float) -> bool:
        """Return whether the codec takes an array of the embedding over data; the arguments are those of `takes`."""
        of_array = self._of_table(), shape, members, zero1
        return not _refusal(*of_array) and _takes(*of_array, min_ratio)

    def table_exchanges(self, shape: tuple[int, int], members: int, zero1: bool) -> tuple[CodecExchange, ...]:
        """Return the collectives over data of the embedding's gradients.

        Args:
            shape: rows and columns of the tables on one device.
            members: number of data ranks that train together.
            zero1: whether a rank keeps a part of the mean only.
        """
        return _exchanges(self._of_table(), shape, members, zero1)

    def table_bytes(self, shape: tuple[int, int], members: int) -> int:
        """Return the bytes of a message between the first and the last stage; the arguments are those above."""
        assert self.embedding is not None
        return _message(self.embedding, self._table_part(shape, members), "float32")[0]

    def table_passes(self, members: int, zero1: bool, swaps: bool) -> tuple[float, int]:
        """Return the passes over the tables that all exchanges of their gradients take, and the kernels.

        Args:
            members: number of data ranks that train together.
            zero1: whether a rank keeps a part of the mean only.
            swaps: whether the first and the last stage exchange them.
        """
        assert self.embedding is not None
        encode, decode, launches = self.embedding.passes()
        over = encode + decode + 1 if members > 1 else 0.0  # sums take a pass
        between = (encode + 2 * decode + 1) / members if swaps else 0.0
        gathered = encode / members + decode if members > 1 and not zero1 else 0.0
        return over + between + gathered, 2 * launches * sum(map(bool, (over, between, gathered)))

    def table_state(self, shape: tuple[int, int], members: int, zero1: bool, swaps: bool) -> int:
        """Return the bytes of the states of the embedding's codec on a device.

        Args:
            shape: rows and columns of the tables on one device.
            members: number of data ranks that train together.
            zero1: whether a rank keeps a part of the mean only.
            swaps: whether the first and the last stage exchange them.
        """
        assert self.embedding is not None
        over = _reducer_state(self._of_table(), shape, members, zero1) if members > 1 else 0
        return over + swaps * _message(self.embedding, self._table_part(shape, members), "float32")[1]

    def reducer_bytes(self, shape: tuple[int, int], members: int, zero1: bool) -> int:
        """Return the bytes of the reducer's state of a matrix; the arguments are those of `takes`."""
        return _reducer_state(self._reducer(members), shape, members, zero1)


LOW_RANK = Coded()


def coded(compress: CompressConfig, tied: bool = True) -> Coded:
    """Return the codecs of a configuration.

    Args:
        compress: its section.
        tied: whether the model's head uses the embedding's table.

    Raises:
        UserError: there is no such codec, or its options do not fit.
    """
    others = [place for place in PLACES if not compress.at(place).low_rank]
    others += [place for place in OTHERS if compress.at(place).codec]
    rank = compress.forward.rank if compress.forward.low_rank and compress.forward.chosen != "none" else 0
    # "explicit" is another form of the same numbers as "lazy".
    feedback = OptionValues({"error": "none"}) if compress.error == "none" else NO_OPTIONS
    options = {place: feedback for place in ("backward", "forward") if compress.at(place).low_rank}
    if not others:
        return Coded(forward_rank=rank, inside=compress.data.inside, error=compress.error, options=_given(options))
    from compress.codec import Codec  # here, since it imports jax, which takes long
    from compress.codecs import named
    from compress.reducer import Reducer, Scattered

    made: dict[str, Any] = {}  # Codec, or Reducer in places of REDUCED
    for place in others:
        name, given = compress.at(place).codec, compress.at(place).options
        try:
            reduces = place in REDUCED
            found = named.build(name, given, (Codec, Reducer) if reduces else (Codec,))
        except ValueError as error:
            raise UserError(f"compress.{place}.codec={error}") from error
        made[place] = Scattered(found) if reduces and not isinstance(found, Reducer) else found
        usual = {field.name: field.default for field in dataclasses.fields(found)}
        values = {key: getattr(found, key) for key in given}
        options[place] = OptionValues({key: value for key, value in values.items() if value != usual[key]})
    names = tuple((place, compress.at(place).codec) for place in others)
    return Coded(
        **made,
        tied=tied,
        forward_rank=rank,
        inside=compress.data.inside,
        error=compress.error,
        names=names,
        options=_given(options),
    )


def _given(options: Mapping[str, OptionValues]) -> tuple[tuple[str, OptionValues], ...]:
    """Return the options of the places that have some."""
    return tuple((place, values) for place, values in options.items() if values)


@_remembered
def _message(codec: "Codec", shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Return the bytes of a message of a shape and dtype on the wire, and those of its link's state."""
    import jax

    from compress.codec import tree_bytes

    return codec.wire_bytes(shape, dtype), tree_bytes(jax.eval_shape(lambda: codec.init(shape, dtype)))


def _first(problems: Iterable[str]) -> str:
    """Return the first of some sentences that is not empty; "" if all are."""
    return next(filter(None, problems), "")


@_remembered
def _message_problem(codec: "Codec", shape: tuple[int, ...], dtype: str, min_ratio: float) -> str:
    """Return why messages of a shape and dtype should not or cannot go through a codec; "" if they can."""
    from compress.codec import codec_name, refusal

    problem = codec.problem(shape, dtype, min_ratio)
    return f"the codec {codec_name(codec)}: {problem}" if problem else refusal(codec, shape, dtype)


def _weights_part(shape: tuple[int, int], members: int) -> tuple[int, ...]:
    """Return the part of a matrix of weights that a rank sends."""
    dim = _shard(shape, members, zero1=True).dim
    return tuple(n // members if d == dim else n for d, n in enumerate(shape))


@_remembered
def _refusal(reducer: "Reducer", shape: tuple[int, int], members: int, zero1: bool) -> str:
    """Return why a reducer's codec does not take the parts of a matrix; the arguments are those of `Coded.takes`."""
    return reducer.refusal(shape, _shard(shape, members, zero1))


def _shard(shape: tuple[int, int], members: int, zero1: bool) -> "Shard":
    """Return what a rank keeps of a matrix: its rows, if they can be split, or its columns."""
    from compress.reducer import Shard

    dim = next((d for d, n in enumerate(shape) if n % members == 0), -1)
    return Shard(DATA, members, dim if zero1 else -1)


@_remembered
def _takes(reducer: "Reducer", shape: tuple[int, int], members: int, zero1: bool, min_ratio: float) -> bool:
    """Return whether a reducer compresses a matrix; the arguments are those of `Coded.takes`."""
    return bool(reducer.takes(shape, _shard(shape, members, zero1), min_ratio))


@_remembered
def _exchanges(reducer: "Reducer", shape: tuple[int, int], members: int, zero1: bool) -> tuple[CodecExchange, ...]:
    """Return the collectives of a matrix by kind; one that cannot be cut into equal parts is reduced as it is."""
    shard, found = _shard(shape, members, zero1), dict[str, CodecExchange]()
    if not reducer.takes(shape, shard, 0.0):
        return (CodecExchange("all-reduce", 2 * (members - 1) / members * math.prod(shape) * 4, 1),)
    for kind, sent in reducer.traffic(shape, shard):
        before = found.get(kind, CodecExchange(kind, 0.0, 0))
        found[kind] = CodecExchange(kind, before.bytes + sent, before.number + 1)
    return tuple(found.values())


@_remembered
def _reducer_state(reducer: "Reducer", shape: tuple[int, int], members: int, zero1: bool) -> int:
    """Return the bytes of a reducer's state of a matrix; it has none of one that cannot be cut into equal parts."""
    import jax

    from compress.codec import tree_bytes

    shard = _shard(shape, members, zero1)
    return tree_bytes(jax.eval_shape(lambda: reducer.init(shape, shard))) if reducer.takes(shape, shard, 0.0) else 0
