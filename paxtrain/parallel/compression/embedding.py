"""The codec of the embedding's gradients: over data, and between the first and the last stage, which hold a tied table.

They are those of the vocabulary's tables and, of GPT-2, of the positions, which the first stage has.

gradients.py calls it in place of the dense collectives. The functions with collectives run inside `shard_map`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Codec, State, codec_name
from compress.reducer import Scattered, Shard, gather_wires
from paxtrain import tables
from paxtrain.config.axes import PIPE
from paxtrain.parallel.layout import Layout, Params
from paxtrain.parallel.weights import on_edges
from paxtrain.pipeline.messages import StageCrossing, among


class TableState(NamedTuple):
    """State of the codec on one device; () if nothing is sent there.

    Attributes:
        reduced: States of the reducer over data, by array.
        swapped: The codec's state of what goes to the other end of the pipeline.
        gathered: The codec's state of what goes to all data ranks.
    """

    reduced: dict[str, State]
    swapped: State
    gathered: State


@dataclasses.dataclass(frozen=True)
class TableCodec:
    """The exchange of the embedding's gradients as messages of a codec.

    1. Over data each rank gets its part of the mean, by an all-to-all (`compress.Scattered`).
    2. The first and the last stage exchange their parts of a tied table. Both decode both messages and add them up in
       the order of the stages. So they compute the same on equal bits, and the copies of the table stay equal.
    3. If all data ranks need the sum, each encodes its part of it, and all decode what they gather. Both stages encode
       equal bits with equal states, so what they gather is equal, too.

    Each of the three has the codec's error feedback. Tables of an untied head, and positions, have the first only, in
    which the reducer also gathers what all data ranks need.

    Attributes:
        layout: Layout of the parameters.
        codec: Codec of the messages.
    """

    layout: Layout
    codec: Codec

    @property
    def _tied(self) -> bool:
        return self.layout.config.model.tied_head

    @property
    def _swaps(self) -> bool:
        """Return whether the first and the last stage exchange gradients."""
        return self.layout.swaps

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a device's gradient: [V/T, H] of a tied table, otherwise [1 or 2, V/T, H]."""
        several = () if self._tied else (self.layout.tables,)
        return *several, *self.layout.table_shape

    @property
    def shard(self) -> Shard:
        """Part of the mean over data of a table that a rank has after the first step."""
        dim = self.layout.scatter_dim if self._tied else self.layout.data_dims()["embedding"]["token"]
        return Shard(self.layout.replica_axes, self.layout.config.mesh.replicas, dim)

    @functools.cached_property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], Shard]]:
        """Shape and shard of each array that goes through the codec over data: the tables, and positions if they do."""
        c = self.layout.config
        found, reducer = {"token": (self.shape, self.shard)}, Scattered(self.codec)
        dims = self.layout.data_dims()["embedding"]
        if "position" in dims and c.mesh.replicas > 1:
            shape = self.layout.rows["embedding", "position"].shape(c.model)
            shard = self.shard._replace(dim=max(dims["position"] - 1, -1))
            if not reducer.refusal(shape, shard) and reducer.takes(shape, shard, c.compress.min_ratio):
                found["position"] = shape, shard
        return found

    @property
    def part(self) -> jax.ShapeDtypeStruct:
        """Shape of what the stages exchange."""
        shard = self.shard
        shape = tuple(n // (shard.members if d == shard.dim else 1) for d, n in enumerate(self.shape))
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    @property
    def _gathers(self) -> bool:
        """Return whether a tied table's parts are gathered in the end; `Scattered` gathers those of others."""
        return self._tied and self.shard.members > 1 and self.layout.data_dims()["embedding"]["token"] < 0

    def init(self) -> TableState:
        """Return the first state of a device; all have the same."""
        over = self.arrays if self.shard.members > 1 else {}
        reduced = {name: Scattered(self.codec).init(*array) for name, array in over.items()}
        part = self.codec.init(self.part.shape, self.part.dtype)
        return TableState(reduced, part if self._swaps else (), part if self._gathers else ())

    # --- The exchange -------------------------------------------------------------------------------------------------

    def reduce(self, grads: Params, state: TableState, edges: bool) -> tuple[Params, TableState]:
        """Return this rank's part of the mean over data of each of `arrays`, and the next state.

        Args:
            grads: The device's gradients; zeros on stages between the first and the last.
            state: State before.
            edges: Whether only the first and the last stage call.
        """
        names, own = list(self.arrays), {name: grads[name] for name in self.arrays}
        reducer, shards = Scattered(self.codec), [shard for _, shard in self.arrays.values()]
        if self.shard.members == 1:
            return own, state

        def run(part: tuple[Params, TableState]) -> tuple[Params, TableState]:
            own, state = part
            with jax.named_scope("compression"):
                arrays = [own[name] for name in names]
                wire, kept = reducer.encode([state.reduced[name] for name in names], arrays, shards)
            arrived = reducer.exchange(wire, kept, shards)
            with jax.named_scope("compression"):
                states, _ = reducer.update(arrived, kept, shards)
                means = reducer.decode(arrived, kept, shards)
            reduced = dict(zip(names, states, strict=True))
            return dict(zip(names, means, strict=True)), state._replace(reduced=reduced)

        return run((own, state)) if edges else on_edges(self.layout, run, (own, state))

    def add_ends(self, x: jax.Array, state: TableState) -> tuple[jax.Array, TableState]:
        """Return the sum of a tied table's part over the first and the last stage, and the next state.

        Args:
            x: This stage's part.
            state: State before.
        """
        if not self._swaps:
            return x, state
        stage, ends = lax.axis_index(PIPE), (0, self.layout.stage_map.last)
        edge = among(stage, ends)
        with jax.named_scope("compression"):
            own, swapped = self.codec.encode(state.swapped, x, edge)
        arrived = self.codec.exchange(own, StageCrossing(PIPE, stage, (ends, ends[::-1])))
        with jax.named_scope("compression"):
            first = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), own, arrived)
            last = jax.tree.map(lambda a, b: jnp.where(stage == 0, b, a), own, arrived)
            total = self.codec.decode(first, x) + self.codec.decode(last, x)
            if self.layout.stages > 2:  # those between hold zeros, whatever wires decode to there
                total = jnp.where(edge, total, 0)
        return total, state._replace(swapped=swapped)

    def gather(self, x: jax.Array, state: TableState) -> tuple[jax.Array, TableState]:
        """Return a tied table's sum on the data ranks that keep it, whole if all of them do, and the next state.

        Args:
            x: This rank's part of the sum.
            state: State before.
        """
        if not self._gathers:
            return x, state

        def run(part: tuple[jax.Array, TableState]) -> tuple[jax.Array, TableState]:
            x, state = part
            with jax.named_scope("compression"):
                wire, gathered = self.codec.encode(state.gathered, x)
            [whole] = gather_wires(self.codec, [wire], [x], [self.shard])
            return whole, state._replace(gathered=gathered)

        return on_edges(self.layout, run, (x, state))

    # --- What it costs, and whether it fits ---------------------------------------------------------------------------

    def traffic(self) -> tuple[tuple[str, float], ...]:
        """Return the collectives of a device of the first or the last stage, and the bytes that it sends in each."""
        found: list[tuple[str, float]] = []
        if self.shard.members > 1:
            for array in self.arrays.values():
                found += Scattered(self.codec).traffic(*array)
        one = self.codec.wire_bytes(self.part.shape, self.part.dtype)
        found += [("permute", one)] * self._swaps + [("all-gather", (self.shard.members - 1) * one)] * self._gathers
        return tuple(found)

    def problem(self, min_ratio: float) -> str:
        """Return why the table should not go through the codec; "" if it should.

        Args:
            min_ratio: Factor by which the configuration asks arrays to become smaller.
        """
        reducer = Scattered(self.codec)
        if found := reducer.refusal(self.shape, self.shard):
            return found
        if reducer.takes(self.shape, self.shard, min_ratio):
            return ""
        codec = self.layout.config.compress.embedding.codec
        parts = f" in {self.shard.members} equal parts" if self.shard.members > 1 else ""
        return (
            f"compress.embedding.codec={codec} does not make the table of {' x '.join(map(str, self.shape[-2:]))} on a "
            f"device {min_ratio:g} times smaller (compress.min_ratio){parts}; choose other options, or leave it out"
        )

    def describe(self) -> str:
        """Return what the codec does to the gradients, for tables."""
        where = ["over data"] * (self.shard.members > 1) + ["between the first and the last stage"] * self._swaps
        sent = tables.size(sum(size for _, size in self.traffic()), "B")
        left = self.shard.members > 1 and self.layout.shapes["embedding"].keys() - self.arrays.keys()
        dense = "; positions as they are" if left else ""
        return f"{codec_name(self.codec)} {' and '.join(where)}; a device of these stages sends {sent}{dense}"
