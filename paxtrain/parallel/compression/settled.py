"""The compression of one configuration on one mesh: codecs of the links, the reducer and the levels of the stages.

Between the stages it compresses activation gradients and, if the configuration says so, activations, with one codec
state for each directed link and chunk of layers. Over data it compresses the gradients of the layers' kernels on chosen
stages, with one state per stage. The embedding's gradients have a codec of their own; norms and biases always travel as
they are.

Levels over data, PowerSGD's ranks, are static in a compiled step, since they decide the size of what travels: one per
stage, 0 for dense. A run starts dense and changes the levels at logged steps.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from compress.codec import Codec, Identity, Tree, codec_name
from compress.codecs.on_links import OnLinks
from compress.codecs.recorder import Recorder
from compress.hierarchical import Hierarchical
from compress.lowrank import LowRank, RankByLink
from compress.powersgd import PowerSGD
from compress.reducer import Reducer, Shard, stored
from paxtrain import tables
from paxtrain.config import Config
from paxtrain.config.axes import AXES, PIPE
from paxtrain.config.options import LINKED
from paxtrain.errors import UserError
from paxtrain.parallel.compression.embedding import TableCodec
from paxtrain.parallel.compression.named import named_codec, named_reducer
from paxtrain.parallel.layout import Layout
from paxtrain.pipeline.executor import Links
from paxtrain.schedule.table import Schedule

CodecStates = dict[str, Tree]  # of a run: the codecs' states by place
LayerPath = tuple[str, str]


@functools.lru_cache(maxsize=1024)
def _takes(reducer: Reducer, shape: tuple[int, ...], shard: Shard, min_ratio: float) -> bool:
    return reducer.takes(shape, shard, min_ratio)


@dataclasses.dataclass(frozen=True)
class Compression:
    """The settled compression of a run.

    Attributes:
        layout: layout of the model on the mesh.
        implementation: implementation of the kernels, one of compress.kernels.IMPLEMENTATIONS.
        record: number of rows of the schedule whose messages every link keeps for a study; 0 keeps none.
        codec: codec of the gradients between stages, given from Python. compress.backward.messages says which it
            encodes; with a codec from Python, "none" means "all", and the other options of compress.backward do not
            apply. None: the codec that the configuration describes.
    """

    layout: Layout
    implementation: str = "xla"
    record: int = 0
    codec: Codec | None = None

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        return self.layout.config

    # --- Between the stages -------------------------------------------------------------------------------------------

    @property
    def backward(self) -> str:
        """Choice of the compressed gradients between stages: "none", "epilogue" or "all"."""
        asked = self.config.compress.backward.chosen
        return "all" if asked == "none" and self.codec is not None else asked

    @property
    def forward(self) -> str:
        """Choice of the compressed activations between stages: "none" or "all"."""
        return self.config.compress.forward.chosen

    @property
    def between_stages(self) -> bool:
        """True if any message between stages is compressed."""
        return self.backward != "none" or self.forward != "none"

    @property
    def keys(self) -> tuple[int, ...]:
        """Shape of the keys, and of the values, that devices of a context group send each other."""
        c = self.config
        heads = c.model.key_value_heads // c.mesh.tensor
        return c.batch.micro_batch, c.model.sequence // c.mesh.context, heads, c.model.head_dim

    @property
    def message(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what crosses a link between stages, [B, S, H], or a device's part of the sequence."""
        c = self.config
        parts = c.mesh.tensor if c.mesh.sequence_parallel else 1
        return jax.ShapeDtypeStruct((c.batch.micro_batch, c.model.sequence // parts, c.model.hidden), c.model.dtype)

    @property
    def _factors(self) -> str:
        """dtype of the factors on the wire."""
        factors = self.config.compress.factors
        return self.config.model.dtype if factors == "auto" else factors

    def _low_rank(self, rank: int) -> LowRank:
        """Return the codec that the configuration describes, at a rank."""
        c = self.config.compress
        return LowRank(rank, error=c.error, factors=self._factors, implementation=self.implementation)

    @property
    def _backward_ranks(self) -> tuple[int, ...]:
        """Rank of each link's gradients; empty if they are not compressed by the configuration's LowRank."""
        c = self.config.compress
        lowrank = self.codec is None and c.backward.low_rank and self.backward != "none"
        return c.backward.link_ranks(self.config.links) if lowrank else ()

    @functools.cached_property
    def backward_codec(self) -> Codec:
        """Codec of the gradients between stages; Identity if they travel as they are."""
        ranks = self._backward_ranks
        if self.codec is not None or self.backward == "none":
            return Identity() if self.codec is None else self.codec  # a codec may be an empty tuple
        if not ranks:
            return named_codec(self.config.compress, "backward")
        codec = self._low_rank(max(ranks))
        # The rank by sender: stage s sends gradients over link s-1, stage 0 (with virtual stages) over the last one.
        by_sender = ranks[-1:] + ranks[: self.layout.stages - 1]
        return RankByLink(codec, by_sender) if len(set(ranks)) > 1 else codec

    def _links(self, place: str) -> tuple[int, ...]:
        """Return the links between stages whose messages go through the codec of a place, "backward" or "forward"."""
        return self.config.compress.at(place).on(self.config.links)

    def _where(self, place: str) -> str:
        """Return the links on which messages go through the codec of a place, as text; "" if all."""
        some, every = self._links(place), self.config.links
        return "" if len(some) == every else f" on link{'s' * (len(some) > 1)} {', '.join(map(str, some))} of {every}"

    @functools.cached_property
    def forward_codec(self) -> Codec:
        """Codec of the activations between stages; Identity if they travel as they are."""
        c = self.config.compress
        if self.forward == "none":
            return Identity()
        codec: Codec = self._low_rank(c.forward.rank) if c.forward.low_rank else named_codec(c, "forward")
        links = self._links("forward")
        if len(links) == self.config.links:
            return codec
        return OnLinks(codec, tuple(stage in links for stage in range(self.layout.stages)))

    @functools.cached_property
    def weights_codec(self) -> Codec | None:
        """Codec of the layers' kernels as a training step gathers them over data; None: they travel as they are."""
        c = self.config.compress
        return named_codec(c, "weights") if c.weights.codec else None

    @functools.cached_property
    def tables(self) -> TableCodec | None:
        """Exchange of the embedding's gradients through a codec; None: they travel as they are."""
        c = self.config.compress
        return TableCodec(self.layout, named_codec(c, "embedding")) if c.embedding.codec else None

    @functools.cached_property
    def links(self) -> Links:
        """Codecs of the messages between the stages, within a Recorder if the run records messages."""
        codecs, axes = (self.backward_codec, self.forward_codec), self.config.mesh.over(*AXES)
        return Links(*(Recorder(codec, self.record, axes) if self.record else codec for codec in codecs))

    def gradients(self, schedule: Schedule) -> frozenset[tuple[int, int]]:
        """Return the gradients that go through the backward codec, as (sending virtual stage, micro-batch)."""
        if self.backward == "epilogue":
            sent = schedule.epilogue()
        else:
            sent = schedule.gradient_messages() if self.backward == "all" or self.record else frozenset()
        return schedule.gradients_on(sent, self._links("backward"))

    # --- Over data ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def reducer(self) -> Reducer | None:
        """Reducer of the gradients over data, at its highest level; None if they are reduced as they are."""
        c, mesh = self.config.compress, self.config.mesh
        if c.data.chosen == "none":
            return None
        if c.data.low_rank:
            made: Reducer = PowerSGD(c.data.rank, self.implementation)
        else:
            made = named_reducer(c, "data")
        if c.data.over(mesh.replicas) == "none":
            return None  # behind named_reducer, which refuses a codec that does not exist
        # Groups that share sums add theirs up as they are in any case.
        inside = c.data.inside if mesh.copies == 1 else 1
        return Hierarchical(made, inside, mesh.reduce_dtype) if inside > 1 else made

    @property
    def each_micro_batch(self) -> bool:
        """True if the reducer gets the gradients of each micro-batch, since their sums are in shards of all ranks."""
        mesh = self.config.mesh
        return mesh.shards_sums and mesh.copies == 1 < mesh.replicas

    @property
    def level(self) -> int:
        """Level of the reducer, the rank of PowerSGD; 0 without one."""
        return self.reducer.level if self.reducer else 0

    @functools.cached_property
    def kernels(self) -> dict[LayerPath, tuple[int, ...]]:
        """Shapes of the layers' kernels on one device, by path."""
        model, sizes = self.config.model, self.config.mesh.sizes
        rows = [p for p in self.layout.rows.values() if p.role == "kernel"]
        return {(p.names[1], p.names[2]): p.shape(model, sizes) for p in rows}

    @functools.cached_property
    def shards(self) -> dict[LayerPath, Shard]:
        """Parts of the mean that each data rank keeps of the gradients of the layers' kernels, by path."""
        dims, ranks = self.layout.data_dims()["layers"], self.config.mesh.replicas
        axes = self.layout.replica_axes
        return {path: Shard(axes, ranks, max(dims[path[0]][path[1]] - 1, -1)) for path in self.kernels}

    @functools.cached_property
    def over_data(self) -> dict[LayerPath, tuple[tuple[int, ...], Shard]]:
        """Shape of what a device reduces of each kernel's gradient by the reducer, and its shard of the mean.

        Sums in shards of groups of data ranks are reduced between these. Kernels that do not divide stay whole.
        """
        mesh, found = self.config.mesh, dict[LayerPath, tuple[tuple[int, ...], Shard]]()
        for path, shape in self.kernels.items():
            shard = self.shards[path]
            if mesh.shards_sums and mesh.replicas > 1:
                if self.layout.in_shards("layers", *path) is None:
                    continue
                if mesh.copies > 1:
                    shape = tuple(n // mesh.sharing if d == shard.dim else n for d, n in enumerate(shape))
                    shard = Shard(self.layout.copies_axis, mesh.copies, shard.dim)
            found[path] = shape, shard
        return found

    @property
    def reduced(self) -> dict[LayerPath, tuple[tuple[int, ...], Shard]]:
        """Shape and shard of what the configured reducer gets of each kernel: all of it, or in groups a rank's part."""
        found: dict[LayerPath, tuple[tuple[int, ...], Shard]] = {}
        for path, (shape, shard) in self.over_data.items():
            part: tuple[int, ...] | None = shape
            if isinstance(self.reducer, Hierarchical):
                part, shard = self.reducer.part(shape, shard), self.reducer.between(shard)
            if part is not None:
                found[path] = part, shard
        return found

    def compressed_kernels(self, level: int) -> tuple[LayerPath, ...]:
        """Return the kernels that the reducer takes at a level."""
        assert self.reducer
        reducer: Any = self.reducer.at(level)  # a Protocol is not known to be hashable
        ratio = self.config.compress.min_ratio
        return tuple(path for path, (shape, shard) in self.over_data.items() if _takes(reducer, shape, shard, ratio))

    @functools.cached_property
    def data_kernels(self) -> tuple[LayerPath, ...]:
        """Paths of the kernels with a state of the reducer: those that it takes at the lowest level of the run."""
        c = self.config.compress
        if self.reducer is None:
            return ()
        return self.compressed_kernels(c.data.rank_min if c.data.adapt_every else self.level)

    @functools.cached_property
    def slot_kernels(self) -> tuple[tuple[LayerPath, ...], ...]:
        """The same of each layer slot of a stage, by the kind of its layers."""
        rows, kinds = self.layout.rows, self.layout.slot_kinds * self.layout.chunks
        had = [[path for path in self.data_kernels if rows["layers", *path].of(kind)] for kind in kinds]
        return tuple(map(tuple, had))

    @property
    def levels(self) -> tuple[int, ...]:
        """Level of every stage once compression over data has started, as far as the configuration says."""
        chosen = self.config.compress.data.stages_of(self.layout.stages)
        return tuple(self.level if s in chosen else 0 for s in range(self.layout.stages))

    def levels_text(self, levels: Sequence[int]) -> str:
        """Return the levels of the stages, as text for the log: their ranks, or which of them compress."""
        if self.config.compress.data.low_rank:
            return f"ranks by stage {', '.join(map(str, levels))}"
        return f"on stages {', '.join(str(s) for s, level in enumerate(levels) if level)}"

    @functools.cached_property
    def data_structure(self) -> jax.tree_util.PyTreeDef:
        """Structure of the reducer's state of one kernel."""
        assert self.reducer
        path = self.data_kernels[0]
        return jax.tree.structure(jax.eval_shape(lambda: self._init_kernel(path)))

    def _init_kernel(self, path: LayerPath) -> Tree:
        """Return the reducer's first state of a kernel."""
        assert self.reducer
        return self.reducer.init(*self.over_data[path])

    # --- State --------------------------------------------------------------------------------------------------------

    def init(self) -> CodecStates:
        """Return the first state of every codec of the mesh.

        Arrays have the axes of the mesh as leading dims, and then the shape of one device's state. "backward" and
        "forward" hold a codec's state per chunk. "data" holds the reducer's states of all kernels, see
        `compress.reducer.stored`, or () without compression over data. "embedding" is there if that has a codec.
        """
        mesh = self.config.mesh

        def stage(index: jax.Array) -> CodecStates:
            first = {path: self._init_kernel(path) for path in self.data_kernels}
            data = stored([first[path] for paths in self.slot_kernels for path in paths])
            return {
                "backward": self._init_link(self.links.backward, index),
                "forward": self._init_link(self.links.forward, index),
                "data": data,
                **({} if self.tables is None else {"embedding": self.tables.init()}),
            }

        one = jax.vmap(stage)(jnp.arange(mesh.pipe))
        every, stages = tuple(mesh.sizes.values()), [slice(None) if axis == PIPE else None for axis in mesh.sizes]
        return jax.tree.map(lambda x: jnp.broadcast_to(x[tuple(stages)], (*every, *x.shape[1:])), one)

    def _init_link(self, codec: Codec, sender: jax.Array) -> Tree:
        """Return the first state of a link's codec, [chunks, *shape]."""
        state = codec.on_link(codec.init(self.message.shape, self.message.dtype), sender)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.layout.chunks, *jnp.shape(x))), state)

    def identity(self) -> dict[str, object]:
        """Return what a saved state depends on, as JSON values; if it differs, the compression starts afresh."""
        config, mesh = self.config, self.config.mesh
        return {
            "mesh": list(mesh.sizes.values()),
            "stage_layers": list(config.stage_layers),
            "virtual_stages": config.pipeline.virtual_stages,
            **({"folded": True} if config.stage_map.folded else {}),
            "message": list(self.message.shape),
        }

    def link_settings(self) -> dict[str, object]:
        """Return the settings of the links that the shapes of a saved state do not show, as JSON values.

        They are the ranks of the links, the names of codecs other than low rank, and the fragments of groups, each of
        which has states of its layers. The codec of weights is not among them, since it keeps no state.
        """
        c, names = self.config.compress, dict[str, object]()
        if self.codec is not None or not c.backward.low_rank:
            names["codec"] = codec_name(self.backward_codec)
        if not c.forward.low_rank:
            names["forward codec"] = codec_name(self.forward_codec)
        for place in LINKED:
            if self._where(place):
                names[f"{place} links"] = list(self._links(place))
        if self.reducer is not None and not c.data.low_rank:
            names["data codec"] = self.reducer.describe()
        elif isinstance(self.reducer, Hierarchical):
            names["data inside"] = self.reducer.inside
        if self.tables is not None:
            names["embedding codec"] = codec_name(self.tables.codec)
        if c.outer.codec:
            names["outer codec"] = named_reducer(c, "outer").describe()
            if self.config.outer.fragments > 1:
                names["outer.fragments"] = self.config.outer.fragments
        return {"backward_ranks": list(self._backward_ranks), **names}

    def why_reset(self, meta: Mapping[str, Any], saved: dict[str, str], mine: dict[str, str], where: str) -> str:
        """Return why a checkpoint's state of the compression is not continued, as a line for the log; "" if it is.

        Args:
            meta: {"identity", "link_ranks"} of the saved run, from `identity` and `link_settings`; empty if it knew no
                compression.
            saved: kinds of the arrays of the checkpoint's state, by path.
            mine: kinds of the arrays of this run's state, by path.
            where: name of the checkpoint, for messages.

        Raises:
            UserError: on the same mesh, arrays of other shapes, links of other ranks, or another codec.
        """
        if not saved and not mine:
            return ""
        if not saved:
            return f"compression starts afresh: {where} has no state of it"
        if not mine:
            return f"the state of the compression in {where} is left out: this run compresses nothing that has one"
        if meta["identity"] != self.identity():
            return f"compression starts afresh: its state in {where} is of another mesh, micro-batch or split of layers"
        there, here = saved | meta["link_ranks"], mine | self.link_settings()
        if there == here:
            return ""
        if self.config.checkpoint.reset_codec:
            return f"compression starts afresh, as asked for: its state in {where} is of another codec, shape or rank"
        different = sorted(path for path in there.keys() | here.keys() if there.get(path) != here.get(path))
        path = next((path for path in different if path.endswith("codec")), different[0])
        raise UserError(
            f"{where} holds another state of the compression: {path} is {there.get(path, 'absent')} there and "
            f"{here.get(path, 'absent')} here; use the compress settings and the codec that it was saved with, "
            "or start compression afresh with --config.checkpoint.reset_codec=True"
        )

    def changed(self, meta: Mapping[str, Any]) -> str:
        """Return which codecs are not those of the run that a checkpoint continues, as a line; "" if all are.

        There are none unless they keep no state, since `why_reset` has refused others.

        Args:
            meta: what `why_reset` takes.
        """
        there, here = meta.get("link_ranks", {}), self.link_settings()
        different = [
            f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        ]
        if not there or not different:
            return ""
        return f"codecs have changed since the checkpoint, and keep no state: {'; '.join(different)}"

    # --- Report -------------------------------------------------------------------------------------------------------

    @property
    def _sent_in_groups(self) -> str:
        """Bytes that a device of a compressing stage sends of kernels inside its group and between groups, as text."""
        if not isinstance(self.reducer, Hierarchical):
            return ""
        taken = set(self.compressed_kernels(self.level))
        some = [self.over_data[path] for slot in self.slot_kernels for path in slot if path in taken]
        inside = sum(sent for one in some for _, sent in self.reducer.inside_traffic(*one))
        between = sum(self.reducer.wire_bytes(*one) for one in some)
        return f"; a device sends {tables.size(inside, 'B')} inside its group and {tables.size(between, 'B')} between"

    def describe(self, measured: Sequence[int] = ()) -> list[tuple[str, str]]:
        """Return rows (what, how it is compressed) for the run's first table; `measured` stages were `selective`'s."""
        c, rows, message = self.config.compress, [], self.message
        if self.backward != "none":
            text = self.backward_codec.describe(message.shape, message.dtype)
            rows.append(("gradients between stages", f"{self.backward}{self._where('backward')}: {text}"))
        if self.forward != "none":
            text = self.forward_codec.describe(message.shape, message.dtype)
            rows.append(("activations between stages", f"{self.forward}{self._where('forward')}: {text}"))
        if self.reducer is not None:
            chosen = self.compressed_kernels(self.level)
            left = [name for name, _ in self.kernels if (name, "kernel") not in chosen]
            dense = f"; {', '.join(left)} would not shrink enough" if left else ""
            alone = "; one data rank, nothing is saved" if self.config.mesh.replicas == 1 else ""
            names = ", ".join(name for name, _ in chosen)
            names += " in each micro-batch" if self.each_micro_batch else ""
            names += f" between groups of {self.config.mesh.shard_group}" if self.config.mesh.copies > 1 else ""
            where = f", stages {', '.join(map(str, measured))}" if measured else ""
            what = f"{c.data.chosen}{where}: {self.reducer.describe()} of {names}{dense}{alone}{self._sent_in_groups}"
            rows.append(("gradients over data", what))
        elif c.data.chosen != "none":
            rows.append(("gradients over data", f"as they are: all {self.config.mesh.data} data ranks are one group"))
        if self.tables is not None:
            rows.append(("embedding's gradients", self.tables.describe()))
        if self.weights_codec is not None:
            rows.append(("weights over data", f"kernels: {codec_name(self.weights_codec)}"))
        if self.layout.keys_codec is not None:
            text = self.layout.keys_codec.describe(self.keys, self.config.model.dtype)
            rows.append(("keys and values", f"of others' tokens: {text}"))
        return rows
