"""The reducer `Hierarchical`: dense inside groups of neighbouring ranks, and another reducer between the groups.

All functions run per device, inside shard_map or under vmap with the same axis names.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Like, Passes, State, codec_name
from compress.collectives import (
    SubAxis,
    all_gather,
    axis_index,
    narrowed,
    packed_gather,
    packed_scatter,
    reduce_scatter,
)
from compress.reducer import Arrived, Context, LeftOut, Reducer, Shard, Shards, mean


class Divided(NamedTuple):
    """Values that a rank keeps during a reduction by `Hierarchical`.

    Attributes:
        states: states of the reducer between groups.
        shapes: shapes of the arrays.
    """

    states: list[State]
    shapes: list[tuple[int, ...]]


class Grouped(NamedTuple):
    """The values that have arrived at a rank after the exchanges inside its group and between groups.

    Attributes:
        kept: what the reducer between groups has kept of the parts.
        arrived: what has arrived for it.
        means: this rank's parts of the means.
    """

    kept: Context
    arrived: Arrived
    means: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Hierarchical(Reducer):
    """Reducer for ranks in groups with fast links inside and slow ones between: dense inside, another reducer between.

    Rank d of D is in group d // K. Each rank of a group gets its part of the group's mean by a reduce-scatter of what
    is not compressed. The ranks with the same place in their groups then reduce this part by `reducer`, as if they were
    all ranks. If all ranks need the whole mean, the ranks of a group gather their parts, uncompressed.

    So links between groups carry a K-th of the compressed bytes, and the error is made on groups' means. What is left
    out of a part stays with its rank.

    Attributes:
        reducer: reducer of the parts between groups.
        inside: ranks K of a group, a divisor of D.
        dtype: dtype in which gradients are summed inside a group.

    References:
        Wang et al. 2023, ZeRO++: hierarchical quantised reduce-scatter; there both levels are quantised. Jia et al.
        2024, SDP4Bit: 8 bits inside a node and 4 between.
    """

    reducer: Reducer
    inside: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.inside < 1:
            raise ValueError(f"inside must be 1 or more, got {self.inside}")

    @property
    def level(self) -> int:
        """The level of the reducer between groups."""
        return self.reducer.level

    def at(self, level: int) -> "Hierarchical":
        """Return the reducer whose level between groups is another one."""
        return dataclasses.replace(self, reducer=self.reducer.at(level))

    # --- Parts --------------------------------------------------------------------------------------------------------

    def _inside(self, shard: Shard) -> SubAxis:
        """Return the ranks of this rank's group."""
        assert isinstance(shard.axis, str), "groups are of the ranks of a mesh axis"
        return SubAxis(shard.axis, shard.members, self.inside, between=False)

    def between(self, shard: Shard) -> Shard:
        """Return what a rank keeps of the mean of its part over groups."""
        groups = shard.members // self.inside
        assert isinstance(shard.axis, str), "groups are of the ranks of a mesh axis"
        axis = SubAxis(shard.axis, shard.members, self.inside, between=True) if groups > 1 else None
        return Shard(axis, groups, shard.dim)

    def _place(self, shape: tuple[int, ...], shard: Shard) -> int:
        """Return the dim along which an array is cut into the parts of a group's ranks; -1 if none can be cut."""
        if shard.members % self.inside:
            return -1
        if shard.dim >= 0:
            return shard.dim
        return next((d for d, n in enumerate(shape) if n and n % self.inside == 0), -1)

    def part(self, shape: tuple[int, ...], shard: Shard) -> tuple[int, ...] | None:
        """Return the shape of an array's parts, which the reducer between groups gets; None if it cannot be cut."""
        place = self._place(shape, shard)
        return tuple(n // self.inside if d == place else n for d, n in enumerate(shape)) if place >= 0 else None

    def _parts(self, x: jax.Array, shard: Shard) -> jax.Array:
        """Return an array as one part for each rank of a group, [K, *part].

        With ZeRO-1 rank d keeps the d-th of D blocks. So the part of the k-th rank of a group has the blocks k, K + k,
        2K + k, and so on, of which its counterpart in group g keeps the g-th.
        """
        place, part = self._place(x.shape, shard), self.part(x.shape, shard)
        assert part is not None
        blocks = shard.members // self.inside if shard.dim >= 0 else 1
        cut = x.reshape(*x.shape[:place], blocks, self.inside, -1, *x.shape[place + 1 :])
        return jnp.moveaxis(cut, place + 1, 0).reshape(self.inside, *part)

    def _whole(self, part: jax.Array, shape: tuple[int, ...], shard: Shard) -> jax.Array:
        """Return an array of a shape that has this rank's part in its place, and zeros elsewhere."""
        place = self._place(shape, shard)
        blocks = shard.members // self.inside if shard.dim >= 0 else 1
        cut = part.reshape(*part.shape[:place], blocks, 1, -1, *part.shape[place + 1 :])
        own = jnp.arange(self.inside).reshape(-1, *[1] * (part.ndim - place)) == axis_index(self._inside(shard))
        return jnp.where(own, cut, 0).reshape(shape)

    # --- The reduction ------------------------------------------------------------------------------------------------

    def init(self, shape: tuple[int, ...], shard: Shard) -> State:
        """Return the state of the reducer between groups for a part; see `Reducer.init`."""
        part = self.part(shape, shard)
        assert part is not None, f"{shape} cannot be cut into {self.inside} parts"
        return self.reducer.init(part, self.between(shard))

    def takes(self, shape: tuple[int, ...], shard: Shard, min_ratio: float) -> bool:
        """Return whether the reducer between groups takes an array's parts; see `Reducer.takes`."""
        part = self.part(shape, shard)
        return part is not None and self.reducer.takes(part, self.between(shard), min_ratio)

    def refusal(self, shape: tuple[int, ...], shard: Shard) -> str:
        """Return why the codec between groups does not take an array's parts; see `Reducer.refusal`."""
        part = self.part(shape, shard)
        return "" if part is None else self.reducer.refusal(part, self.between(shard))

    def encode(self, states: list[State], arrays: list[jax.Array], shards: Shards) -> tuple[list[jax.Array], Divided]:
        """Return each array as parts for the ranks of the group, and the states; see `Reducer.encode`."""
        parts = [self._parts(x, shard) for x, shard in zip(arrays, shards, strict=True)]
        return parts, Divided(states, [x.shape for x in arrays])

    def exchange(self, wire: list[jax.Array], kept: Divided, shards: Shards) -> Grouped:
        """Return what has arrived after the exchanges inside groups and between them; see `Reducer.exchange`."""
        between = [self.between(shard) for shard in shards]
        sent, own = self.reducer.encode(kept.states, self._group_means(wire, shards), between)
        arrived = self.reducer.exchange(sent, own, between)
        means = self.reducer.decode(arrived, own, between)
        return Grouped(own, arrived, self._gathered(means, kept.shapes, shards))

    def _group_means(self, wire: list[jax.Array], shards: Shards) -> list[jax.Array]:
        """Return this rank's part of its group's mean of each array, given the parts [K, *part] for all its ranks."""
        if not wire:
            return []
        axis = self._inside(shards[0])
        narrow = [narrowed(x, self.dtype) for x in wire]

        def each(arrays: list[jax.Array]) -> list[jax.Array]:
            return [reduce_scatter(x, axis, 0) for x in arrays]

        def together(arrays: list[jax.Array]) -> list[jax.Array]:
            return packed_scatter(arrays, [0] * len(arrays), axis)

        # GPUs combine collectives by themselves, and need no copy for it.
        sums = lax.platform_dependent(narrow, cpu=together, default=each)
        return [x[0].astype(jnp.float32) / self.inside for x in sums]

    def _gathered(self, means: list[jax.Array], shapes: list[tuple[int, ...]], shards: Shards) -> list[jax.Array]:
        """Return the means with those whole that all ranks need, in the shapes of their arrays."""
        second = [i for i, shard in enumerate(shards) if shard.dim < 0]
        if not second:
            return means
        axis = self._inside(shards[0])
        dims = [self._place(shapes[i], shards[i]) for i in second]

        def each(arrays: list[jax.Array]) -> list[jax.Array]:
            return [all_gather(x, axis, dim) for x, dim in zip(arrays, dims, strict=True)]

        def together(arrays: list[jax.Array]) -> list[jax.Array]:
            return packed_gather(arrays, dims, axis)

        whole = lax.platform_dependent([means[i] for i in second], cpu=together, default=each)
        found = list(means)
        for i, x in zip(second, whole, strict=True):
            found[i] = x
        return found

    def update(self, arrived: Grouped, kept: Divided, shards: Shards) -> tuple[list[State], LeftOut]:
        """Return the next states, and how much is left out of this rank's parts; see `Reducer.update`."""
        return self.reducer.update(arrived.arrived, arrived.kept, [self.between(shard) for shard in shards])

    def decode(self, arrived: Grouped, kept: Divided, shards: Shards) -> list[jax.Array]:
        """Return this rank's parts of the means; see `Reducer.decode`."""
        return arrived.means

    # --- What is left out ---------------------------------------------------------------------------------------------

    def residual(self, state: State, like: Like, shard: Shard) -> jax.Array:
        """Return what is left out of this rank's part of its group's mean, K times; see `Reducer.residual`."""
        part = self.part(like.shape, shard)
        assert part is not None
        left = self.reducer.residual(state, jax.ShapeDtypeStruct(part, jnp.float32), self.between(shard))
        # One rank of K holds it, and in the mean over ranks it must count as the group's.
        return self._whole(self.inside * left, like.shape, shard)

    def release(self, state: State, x: jax.Array, shard: Shard) -> tuple[jax.Array, State]:
        """Return the array with what was left out of this rank's part; see `Reducer.release`."""
        part = self.part(x.shape, shard)
        assert part is not None
        left, state = self.reducer.release(state, jnp.zeros(part, jnp.float32), self.between(shard))
        return x + self._whole(self.inside * left, x.shape, shard), state

    def problem(self, shape: tuple[int, ...], shard: Shard) -> str:
        """Return why the reducer cannot exchange between groups of ranks, and what would help; "" if it can.

        Args:
            shape: shape of an array that it takes.
            shard: what each rank keeps of its mean.
        """

        other = shard._replace(axis="ranks of groups")  # what names the axis of all ranks itself does not find it

        def reduced(x: jax.Array) -> list[jax.Array]:
            return mean(self, [self.init(shape, other)], [x], [other])[0]

        ranks = jax.ShapeDtypeStruct((shard.members, *shape), jnp.float32)
        try:
            jax.eval_shape(jax.vmap(reduced, axis_name=other.axis), ranks)
        except Exception as error:  # the reducer may be a user's
            reason = " ".join(str(error).split())
            return (
                f"{codec_name(self.reducer)} does not reduce between groups of ranks ({type(error).__name__}: "
                f"{reason}); let it exchange by compress.collectives"
            )
        return ""

    # --- What it costs ------------------------------------------------------------------------------------------------

    def traffic(self, shape: tuple[int, ...], shard: Shard) -> tuple[tuple[str, float], ...]:
        """Return the collectives between groups, those of a part."""
        part = self.part(shape, shard)
        assert part is not None
        return self.reducer.traffic(part, self.between(shard))

    def inside_traffic(self, shape: tuple[int, ...], shard: Shard) -> tuple[tuple[str, float], ...]:
        """Return the reduce-scatter inside a group, and the all-gather if all ranks need the whole mean."""
        others, size = (self.inside - 1) / self.inside, math.prod(shape)
        scatter = ("reduce-scatter", others * size * jnp.dtype(self.dtype).itemsize)
        return (scatter,) if shard.dim >= 0 else (scatter, ("all-gather", others * size * 4))

    def passes(self) -> Passes:
        """Return two passes to cut gradients, one to sum them, and those between groups, of which each is of a part."""
        one = self.reducer.passes()
        return Passes(2 + one.encode / self.inside, 1 + one.decode / self.inside, one.launches + 2)

    def describe(self) -> str:
        """Return what goes between groups, and how many ranks a group has."""
        return f"{self.reducer.describe()} between groups of {self.inside}"
