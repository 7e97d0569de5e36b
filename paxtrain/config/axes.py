"""The axes of the mesh: of each, what it splits, what is summed over it, and where its devices lie.

`AXES` has them in the order of the mesh, the major one first. `MeshConfig` has the size of each in a field of the same
name. What is about one axis names it by its constant, and all else loops over the records. The planner tries all sizes
that a record allows, of data, pipe and the axes inside hosts; its flags have the axes' names.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

DATA, PIPE, CONTEXT, TENSOR = "data", "pipe", "context", "tensor"
# With mesh.shard_group the device mesh has data in two parts: the groups, and DATA, the data ranks of a group.
REPLICA = "replica"


@dataclasses.dataclass(frozen=True)
class AxisSpec:
    """The facts of one axis.

    Attributes:
        most: its largest size.
        dims: logical dims of parameters that it splits, see paxtrain/model/spec.py. Layers run their collectives over
            it by `LayerContext.group.over(name)`; those that only know tensor do not.
        batch: whether its positions take different sequences of the batch.
        sequence: number of parts of each sequence that each of its devices takes, whose tokens it has through all
            layers; 0: all tokens.
        sums: (MeshConfig, names and dims of a parameter that the axis does not split) -> whether the parameter's
            gradients are summed over the axis at the end of a step. Those over data, and over axes that split
            sequences, are reduced before, see paxtrain/parallel/reduction.py.
        inside: whether its devices share a host, since every layer waits for their collectives. Placement seats the
            devices of all such axes together, and may separate those of others.
        waits: what waits for its collectives: each layer, or the end of a step. Inside a host the devices of axes for
            which layers wait are side by side.
    """

    most: int = 1024
    dims: tuple[str, ...] = ()
    batch: bool = False
    sequence: int = 0
    sums: Callable[[Any, tuple[str, ...], tuple[str, ...]], bool] = lambda mesh, names, dims: False
    inside: bool = False
    waits: Literal["layer", "step"] = "step"


def _sums_over_tensor(mesh: Any, names: tuple[str, ...], dims: tuple[str, ...]) -> bool:
    """Each device has the gradients of a part of the sequence, except the embedding's, or of a part of the heads."""
    return (mesh.sequence_parallel and names[0] != "embedding") or "head" in dims


AXES = {
    DATA: AxisSpec(most=2**16, batch=True),
    PIPE: AxisSpec(dims=("layers", "tables")),
    CONTEXT: AxisSpec(sequence=2, inside=True, waits="layer"),
    TENSOR: AxisSpec(dims=("heads", "kv_heads", "ffn", "vocab"), sums=_sums_over_tensor, inside=True, waits="layer"),
}


MAIN = (DATA, PIPE, TENSOR)  # those that tables show whatever their sizes


def more_axes() -> tuple[str, ...]:
    """Return the axes besides data, pipe and tensor, in the order of the mesh."""
    return tuple(name for name in AXES if name not in MAIN)


def shown(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes that tables show: those of data, pipe and tensor, and of other axes with several devices."""
    return {name: size for name, size in sizes.items() if name not in more_axes() or size > 1}


def batch_axes() -> tuple[str, ...]:
    """Return the axes over which the batch is split, in the order of the mesh."""
    return tuple(name for name, axis in AXES.items() if axis.batch)


def token_axes() -> tuple[str, ...]:
    """Return the axes whose devices have different tokens of the batch, in the order of the mesh."""
    return tuple(name for name, axis in AXES.items() if axis.batch or axis.sequence)


def replica_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes over which gradients are reduced and states are sharded: data, and those that split sequences."""
    return tuple(name for name in sizes if name == DATA or (AXES[name].sequence and sizes[name] > 1))


def inside_axes() -> tuple[str, ...]:
    """Return the axes whose devices share a host, in the order of the mesh."""
    return tuple(name for name, axis in AXES.items() if axis.inside)


def seat_axes() -> tuple[str, ...]:
    """Return the axes whose devices share a host, the innermost one last: those for which layers wait."""
    return tuple(sorted(inside_axes(), key=lambda name: AXES[name].waits == "layer"))


def stride(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return by how many devices neighbours along some axes are apart where those of a seat are numbered.

    Args:
        axes: names of axes whose devices share a seat.
        sizes: sizes of axes by name.
    """
    nested = seat_axes()
    return math.prod(sizes.get(name, 1) for name in nested[max(map(nested.index, axes)) + 1 :])


class AxisSizes(dict[str, int]):
    """Sizes of axes by name, a key of caches; it is never changed. An axis without a size has one device.

    Attributes:
        form: how devices that share sequences see each other's tokens, see MeshConfig.context_form; "" without them.
        codec: compress.Codec of the keys and values that they send each other; None: these travel as they are.
    """

    def __init__(
        self, sizes: Mapping[str, int] = types.MappingProxyType({}), form: str = "", codec: Any = None
    ) -> None:
        super().__init__(sizes)
        self.form, self.codec = form, codec

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((frozenset(self.items()), self.form, self.codec))

    def __eq__(self, other: object) -> bool:
        same = (self.form, self.codec) == (getattr(other, "form", ""), getattr(other, "codec", None))
        return super().__eq__(other) and same

    def __ne__(self, other: object) -> bool:
        return not self == other


UNSPLIT = AxisSizes()  # one device has all of a layer


def layer_axes() -> tuple[str, ...]:
    """Return the axes that split parameters within layers, or for which layers wait, in the order of the mesh."""
    return tuple(name for name, axis in AXES.items() if axis.waits == "layer" or {*axis.dims} - {*AXES[PIPE].dims})


def layer_sizes(sizes: Mapping[str, int], form: str = "", codec: Any = None) -> AxisSizes:
    """Return the sizes of those of `layer_axes` that have several devices, in the order of the mesh.

    Args:
        sizes: sizes of axes by name.
        form: MeshConfig.context_form, which counts if devices share sequences.
        codec: compress.Codec of their keys and values, which counts if these travel.
    """
    several = {name: sizes[name] for name in layer_axes() if sizes.get(name, 1) > 1}
    if sequence_parts(several) == 1:
        return AxisSizes(several)
    return AxisSizes(several, form, None if form == "heads" else codec)


def parts(dim: str, sizes: Mapping[str, Any]) -> Any:
    """Return the number of parts into which axes split a logical dim: the product of the sizes of those that do.

    Args:
        dim: name of the dim.
        sizes: sizes of axes by name, numbers or arrays of them.
    """
    return math.prod(size for name, size in sizes.items() if dim in AXES[name].dims)


def sequence_parts(sizes: Mapping[str, Any]) -> Any:
    """Return the number of devices that share each sequence through all layers; arguments are those of `parts`."""
    return math.prod(size for name, size in sizes.items() if AXES[name].sequence)


def in_words(sizes: Mapping[str, int]) -> str:
    """Return the sizes of the axes as tables have them: "data=2 pipe=4 tensor=1"."""
    return " ".join(f"{name}={size}" for name, size in shown(sizes).items())
