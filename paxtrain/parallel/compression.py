"""What one configuration compresses on one mesh: codecs and ranks of the links, matrices and ranks of the stages.

Two places compress. Between the stages: activation gradients (and, if asked for, activations), one codec state per
directed link and chunk of layers. Over data: the gradients of the layers' kernels on chosen stages, one state per
stage; norms, biases and the embedding always travel as they are.

Ranks over data are static in a compiled step, since they decide the size of what travels: `stages` of ranks, one per
stage, 0 for dense. A run starts dense and changes them at logged steps.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from compress import policy
from compress.codec import Codec, Identity, LowRank, Recorder
from compress.collectives import init_power
from compress.kernels import LARGEST_RANK
from paxtrain.config import Config
from paxtrain.errors import UserError
from paxtrain.parallel.layout import Layout, tensor_dim
from paxtrain.pipeline.executor import Links
from paxtrain.pipeline.messages import Link
from paxtrain.schedule.table import Schedule

State = dict[str, Any]


def settle_implementation(config: Config, device: jax.Device) -> str:
    """ "xla" or "triton", as the configuration and the device say.

    Raises:
        UserError: "triton" is asked for where there is no NVIDIA GPU from Ampere on.
    """
    c, asked = config.compress, config.compress.implementation
    ranks = [0]
    ranks += c.link_ranks(config.links) if c.backward != "none" else ()
    ranks += [c.forward_rank] if c.forward != "none" else []
    ranks += [c.data_rank] if c.data != "none" else []
    capability = float(getattr(device, "compute_capability", "0")) if device.platform == "gpu" else 0.0
    # The kernels are laid out for data-centre GPUs from Hopper on; an A100 has the shared memory for low ranks only.
    made_for = 9 <= capability < 11
    largest = LARGEST_RANK if made_for else 64
    if asked == "triton" and not (made_for or 8 <= capability < 9):
        raise UserError(
            f"compress.implementation=triton needs NVIDIA A100, H100, H200 or B200 GPUs, got {device.device_kind}; "
            "auto or xla would work"
        )
    if asked == "triton" and max(ranks) > largest:
        raise UserError(
            f"compress.implementation=triton takes ranks up to {largest} on {device.device_kind}, got {max(ranks)}; "
            "auto or xla would work"
        )
    return ("triton" if made_for and max(ranks) <= largest else "xla") if asked == "auto" else asked


@dataclasses.dataclass(frozen=True)
class Compression:
    """The settled compression of a run.

    Attributes:
        layout: of the model on the mesh.
        implementation: "xla" or "triton".
        record: messages that every link keeps for a study; 0: none.
    """

    layout: Layout
    implementation: str = "xla"
    record: int = 0

    @property
    def config(self) -> Config:
        return self.layout.config

    # --- Between the stages -------------------------------------------------------------------------------------------

    @property
    def message(self) -> jax.ShapeDtypeStruct:
        """What crosses a link between stages, [B, S, H], or a device's part of the sequence."""
        c = self.config
        parts = c.mesh.tensor if c.mesh.sequence_parallel else 1
        return jax.ShapeDtypeStruct((c.batch.micro_batch, c.model.sequence // parts, c.model.hidden), c.model.dtype)

    @property
    def _factors(self) -> str:
        factors = self.config.compress.factors
        return self.config.model.dtype if factors == "auto" else factors

    def _codec(self, rank: int) -> LowRank:
        c = self.config.compress
        return LowRank(rank, error=c.error, factors=self._factors, form=c.form, implementation=self.implementation)

    def _link(self, chosen: str, ranks: tuple[int, ...]) -> Link:
        codec: Codec = Identity() if chosen == "none" else self._codec(max(ranks))
        if self.record:
            codec = Recorder(codec, self.record)
        if chosen == "none":
            return Link(codec)
        # The rank by sender: stage s sends gradients over link s-1, stage 0 (with virtual stages) over the last one.
        by_sender = ranks[-1:] + ranks[: self.layout.stages - 1] if len(set(ranks)) > 1 else ()
        return Link(codec, by_sender)

    @functools.cached_property
    def links(self) -> Links:
        """What messages between the stages go through."""
        c = self.config.compress
        ranks = c.link_ranks(self.config.links)
        return Links(self._link(c.backward, ranks), self._link(c.forward, (c.forward_rank,)))

    def gradients(self, schedule: Schedule) -> frozenset[tuple[int, int]]:
        """The gradients that go through the backward link's codec, as (sending virtual stage, micro-batch)."""
        chosen = self.config.compress.backward
        if chosen == "epilogue":
            return schedule.epilogue()
        return schedule.gradient_messages() if chosen == "all" or self.record else frozenset()

    # --- Over data ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def matrices(self) -> dict[tuple[str, str], tuple[int, int]]:
        """The layers' kernels as matrices (rows, columns) of one device, by path."""
        mesh = self.config.mesh
        found = {}
        for name, entry in self.layout.shapes["layers"].items():
            if "kernel" in entry:
                path = (name, "kernel")
                shape = list(entry["kernel"].shape[1:])
                shape[tensor_dim(path) - 1] //= mesh.tensor
                found[path] = (shape[0], math.prod(shape[1:]))
        return found

    def compressed_kernels(self, rank: int) -> tuple[tuple[str, str], ...]:
        """The kernels that factors of `rank` make at least min_ratio times smaller."""
        return tuple(path for path, (n, k) in self.matrices.items() if rank <= self._largest_rank(n, k))

    def _largest_rank(self, n: int, k: int, dense: str = "float32", factors: str = "float32") -> int:
        least = max(self.config.compress.min_ratio, 1e-9)  # 0 asks for no saving at all
        return policy.largest_rank(n, k, least, jnp.dtype(dense).itemsize, jnp.dtype(factors).itemsize)

    @functools.cached_property
    def power_kernels(self) -> tuple[tuple[str, str], ...]:
        """The kernels for which there is a state: those that the lowest rank of the run compresses."""
        c = self.config.compress
        if c.data == "none":
            return ()
        return self.compressed_kernels(c.data_rank_min if c.data_adapt_every else c.data_rank)

    @property
    def stages(self) -> tuple[int, ...]:
        """Rank of every stage once compression over data has started, as far as the configuration says."""
        c, pipe = self.config.compress, self.layout.stages
        chosen = c.data_stages(pipe)
        return tuple(c.data_rank if s in chosen else 0 for s in range(pipe))

    # --- State --------------------------------------------------------------------------------------------------------

    def init(self) -> State:
        """The state of every codec of the mesh: leading dims [data, pipe, tensor], then the device's own shape.

        "backward", "forward": per chunk, a codec's state; "data": a PowerState, or () without compression over data.
        """
        mesh, chunks = self.config.mesh, self.layout.chunks
        message = self.message

        def link(link: Link, sender: jax.Array) -> Any:
            rank = jnp.asarray(link.ranks)[sender] if link.ranks else None
            state = self._init_codec(link.codec, message, rank)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (chunks, *jnp.shape(x))), state)

        def stage(index: jax.Array) -> State:
            data: Any = ()
            if self.power_kernels:
                shapes = [self.matrices[path] for _ in range(chunks * self.layout.slots) for path in self.power_kernels]
                data = init_power(shapes, self.config.compress.data_rank, seed=0)
            return {
                "backward": link(self.links.backward, index),
                "forward": link(self.links.forward, index),
                "data": data,
            }

        one = jax.vmap(stage)(jnp.arange(mesh.pipe))
        every = (mesh.data, mesh.pipe, mesh.tensor)
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None, :, None], (*every, *x.shape[1:])), one)

    @staticmethod
    def _init_codec(codec: Codec, message: jax.ShapeDtypeStruct, rank: jax.Array | None) -> Any:
        if rank is None:
            return codec.init(message.shape, message.dtype)
        return codec.init(message.shape, message.dtype, rank)

    def identity(self) -> dict[str, Any]:
        """What a saved state depends on, as JSON values: a state fits a run of the same identity."""
        config, mesh = self.config, self.config.mesh
        return {
            "mesh": [mesh.data, mesh.pipe, mesh.tensor],
            "stage_layers": list(config.stage_layers),
            "virtual_stages": config.pipeline.virtual_stages,
            "message": list(self.message.shape),
        }

    def link_ranks(self) -> dict[str, list[int]]:
        """Ranks that a saved state has in its values and not in its shapes, as JSON values."""
        c = self.config.compress
        return {"backward_ranks": list(c.link_ranks(self.config.links)) if c.backward != "none" else []}

    def why_reset(self, meta: dict[str, Any], saved: dict[str, str], mine: dict[str, str], where: str) -> str:
        """Why a checkpoint's state of the compression is not continued, as a line for the log; "" where it is.

        Args:
            meta: what the saved run said of itself, {"identity", "link_ranks"}; empty if it knew no compression.
            saved, mine: kinds of the arrays of the checkpoint's state and of this run's.
            where: the checkpoint, for messages.

        Raises:
            UserError: on the same mesh, arrays of other shapes or links of other ranks.
        """
        if not saved and not mine:
            return ""
        if not saved:
            return f"compression starts afresh: {where} has no state of it"
        if not mine:
            return f"the state of the compression in {where} is left out: this run compresses nothing that has one"
        if meta["identity"] != self.identity():
            return f"compression starts afresh: its state in {where} is of another mesh, micro-batch or split of layers"
        there, here = saved | meta["link_ranks"], mine | self.link_ranks()
        if there == here:
            return ""
        if self.config.checkpoint.reset_codec:
            return f"compression starts afresh, as asked for: its state in {where} is of other shapes or ranks"
        path = min(path for path in there.keys() | here.keys() if there.get(path) != here.get(path))
        raise UserError(
            f"{where} holds another state of the compression: {path} is {there.get(path, 'absent')} there and "
            f"{here.get(path, 'absent')} here; use the compress settings that it was saved with, "
            "or start compression afresh with --config.checkpoint.reset_codec=True"
        )

    # --- Checks and report --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Finds ranks that compress nothing, before anything is compiled.

        Raises:
            UserError: a rank above the largest useful one.
        """
        c, message = self.config.compress, self.message
        n, k = math.prod(message.shape[:-1]), message.shape[-1]
        largest = self._largest_rank(n, k, self.config.model.dtype, self._factors)
        directions = []
        if c.backward != "none":
            name = "backward_ranks" if c.backward_ranks else "backward_rank"
            directions.append((name, max(c.link_ranks(self.config.links))))
        if c.forward != "none":
            directions.append(("forward_rank", c.forward_rank))
        for name, rank in directions:
            if rank > largest:
                raise UserError(_too_large(f"compress.{name}", rank, f"messages are {n} x {k}", largest, c.min_ratio))
        if c.data != "none":
            rank = c.data_rank
            useful = {path: self._largest_rank(*shape) for path, shape in self.matrices.items()}
            largest = max(useful.values())
            if rank > largest:
                n, k = self.matrices[max(useful, key=useful.__getitem__)]
                what = f"the largest kernel of a layer on a device is {n} x {k}"
                raise UserError(_too_large("compress.data_rank", rank, what, largest, c.min_ratio))

    def describe(self) -> list[tuple[str, str]]:
        """Rows for the run's first table."""
        c, message = self.config.compress, self.message
        rows = []
        n, k = math.prod(message.shape[:-1]), message.shape[-1]
        ranks = {"backward": c.link_ranks(self.config.links), "forward": (c.forward_rank,)}
        for direction, what in (("backward", "gradients between stages"), ("forward", "activations between stages")):
            if getattr(c, direction) != "none":
                codec, dense = getattr(self.links, direction).codec, Identity().wire_bytes(message.shape, message.dtype)
                used = sorted(set(ranks[direction]))
                ratios = [f"{dense / codec.wire_bytes(message.shape, message.dtype, r):.1f}" for r in used]
                times, rank = " and ".join(ratios), " and ".join(map(str, used))
                rows.append((what, f"{getattr(c, direction)}: rank {rank} of {n} x {k}, {times} times smaller"))
        if c.data != "none":
            chosen = self.compressed_kernels(c.data_rank)
            left = [name for name, _ in self.matrices if (name, "kernel") not in chosen]
            dense = f"; {', '.join(left)} would not shrink enough" if left else ""
            alone = "; one data rank, nothing is saved" if self.config.mesh.data == 1 else ""
            names = ", ".join(name for name, _ in chosen)
            rows.append(("gradients over data", f"{c.data}: rank {c.data_rank} of {names}{dense}{alone}"))
        return rows


def _too_large(name: str, rank: int, what: str, largest: int, min_ratio: float) -> str:
    would = f"the largest useful rank is {largest}" if largest else "no rank would"
    return f"{name}={rank} does not make anything {min_ratio:g} times smaller (compress.min_ratio): {what}; {would}"
