"""The compression of one configuration on one mesh: codecs of the links, matrices and ranks of the stages.

Two places compress. Between the stages: activation gradients and, if the configuration says so, activations. Each
directed link and chunk of layers has one codec state. Over data: the gradients of the layers' kernels on chosen stages,
with one state per stage; norms, biases and the embedding always travel as they are.

Ranks over data are static in a compiled step, since they decide the size of what travels: one rank per stage, 0 for
dense. A run starts dense and changes the ranks at logged steps.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from compress import policy
from compress.codec import Codec, Identity, check_codec, codec_name, wire_bytes
from compress.kernels import LARGEST_RANK, LARGEST_RANK_A100, MOSAIC, on_gpu
from compress.lowrank import LowRank, restrict
from compress.powersgd import init_power
from compress.recorder import Record, RecordableCodec, Recorder
from paxtrain.config import Config
from paxtrain.errors import UserError
from paxtrain.parallel.layout import Layout, tensor_dim
from paxtrain.pipeline.executor import Links
from paxtrain.pipeline.messages import Link
from paxtrain.schedule.table import Schedule

State = dict[str, Any]
Path = tuple[str, str]


def settle_implementation(config: Config, device: jax.Device, codec: Codec | None = None) -> str:
    """Return the implementation of the compression's kernels, not "auto", for a configuration and a device.

    Args:
        config: the configuration; its compress.implementation may be "auto".
        device: any device of the mesh.
        codec: codec of the gradients between stages, if it is not the configuration's.

    Raises:
        UserError: compress.implementation names kernels, and the device, a rank or jax does not allow them.
    """
    c, asked = config.compress, config.compress.implementation
    ranks = [0]
    ranks += c.link_ranks(config.links) if c.backward != "none" and codec is None else ()
    ranks += [c.forward_rank] if c.forward != "none" else []
    ranks += [c.data_rank] if c.data != "none" else []
    capability = float(getattr(device, "compute_capability", "0")) if device.platform == "gpu" else 0.0
    here, largest = on_gpu(capability), LARGEST_RANK if capability >= 9 else LARGEST_RANK_A100
    if asked == "auto":
        # Other GPUs of the A100's generation have less shared memory than an A100.
        return here[0] if (capability == 8 or capability >= 9) and max(ranks) <= largest else "xla"
    if asked == "xla":
        return asked
    found = next((name for name in here if name == asked or (asked == "mosaic" and name in MOSAIC)), None)
    if found is None:
        needs = {
            "triton": "NVIDIA A100, H100, H200 or B200 GPUs",
            "mosaic": "NVIDIA H100, H200 or B200 GPUs and jax 0.12",
        }[asked]
        version = f" and jax {jax.__version__}" if asked == "mosaic" else ""
        raise UserError(
            f"compress.implementation={asked} needs {needs}, got {device.device_kind}{version}; auto or xla would work"
        )
    if max(ranks) > largest:
        raise UserError(
            f"compress.implementation={asked} takes ranks up to {largest} on {device.device_kind}, got {max(ranks)}; "
            "auto or xla would work"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Compression:
    """The settled compression of a run.

    Attributes:
        layout: layout of the model on the mesh.
        implementation: implementation of the kernels, one of compress.kernels.IMPLEMENTATIONS.
        record: number of messages that every link keeps for a study; 0 keeps none.
        codec: codec of the gradients between stages. compress.backward says which gradients it encodes, and "none"
            stands for "all" then; backward_rank, error, factors and form do not apply to it. None: the LowRank codec
            that the configuration describes.
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
        chosen = self.config.compress.backward
        return "all" if chosen == "none" and self.codec is not None else chosen

    @property
    def between_stages(self) -> bool:
        """True if any message between stages is compressed."""
        return self.backward != "none" or self.config.compress.forward != "none"

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
        return LowRank(rank, error=c.error, factors=self._factors, form=c.form, implementation=self.implementation)

    def _recorded(self, codec: Codec) -> Codec:
        """Return the codec, within a Recorder if the run records messages.

        Raises:
            UserError: the codec has no method `residual`, which returns the error still to be sent.
        """
        if not self.record:
            return codec
        if not isinstance(codec, RecordableCodec):
            raise UserError(
                f"record={self.record} needs a codec with a method residual(state, like), which "
                f"{codec_name(codec)} lacks; use record=0 or add the method"
            )
        return Recorder(codec, self.record)

    @property
    def _backward_ranks(self) -> tuple[int, ...]:
        """Rank of each link's gradients; empty if they are not compressed by the configuration's LowRank."""
        c = self.config.compress
        return c.link_ranks(self.config.links) if self.codec is None and c.backward != "none" else ()

    @functools.cached_property
    def links(self) -> Links:
        """Codecs and ranks of the messages between the stages."""
        c, ranks = self.config.compress, self._backward_ranks
        backward: Codec = Identity() if self.codec is None else self.codec
        if ranks:
            backward = self._low_rank(max(ranks))
        forward: Codec = self._low_rank(c.forward_rank) if c.forward != "none" else Identity()
        # The rank by sender: stage s sends gradients over link s-1, stage 0 (with virtual stages) over the last one.
        by_sender = ranks[-1:] + ranks[: self.layout.stages - 1] if len(set(ranks)) > 1 else ()
        return Links(Link(self._recorded(backward), by_sender), Link(self._recorded(forward)))

    def gradients(self, schedule: Schedule) -> frozenset[tuple[int, int]]:
        """Return the gradients that go through the backward codec, as (sending virtual stage, micro-batch)."""
        if self.backward == "epilogue":
            return schedule.epilogue()
        return schedule.gradient_messages() if self.backward == "all" or self.record else frozenset()

    # --- Over data ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def matrices(self) -> dict[Path, tuple[int, int]]:
        """Shapes (rows, columns) of the layers' kernels on one device as matrices, by path."""
        mesh = self.config.mesh
        found = {}
        for name, entry in self.layout.shapes["layers"].items():
            if "kernel" in entry:
                path = (name, "kernel")
                shape = list(entry["kernel"].shape[1:])
                dim = tensor_dim(path)
                assert dim is not None, f"{name} is a kernel, which is split over tensor"
                shape[dim - 1] //= mesh.tensor
                found[path] = (shape[0], math.prod(shape[1:]))
        return found

    def compressed_kernels(self, rank: int) -> tuple[Path, ...]:
        """Return the kernels that factors of `rank` make at least min_ratio times smaller."""
        return tuple(path for path, (n, k) in self.matrices.items() if rank <= self._largest_rank(n, k))

    def _largest_rank(self, n: int, k: int, dense: str = "float32", factors: str = "float32") -> int:
        """Return the largest rank that makes an [n, k] matrix min_ratio times smaller, 0 if none does.

        Args:
            n: rows of the matrix.
            k: columns of the matrix.
            dense: dtype of the matrix.
            factors: dtype of the factors on the wire.
        """
        least = max(self.config.compress.min_ratio, 1e-9)  # 0 asks for no saving at all
        return policy.largest_rank(n, k, least, jnp.dtype(dense).itemsize, jnp.dtype(factors).itemsize)

    @functools.cached_property
    def power_kernels(self) -> tuple[Path, ...]:
        """Paths of the kernels with a PowerSGD state: those that the lowest rank of the run compresses."""
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
        """Return the first state of every codec of the mesh.

        Arrays have leading dims [data, pipe, tensor], and then the shape of one device's state. "backward" and
        "forward" hold a codec's state per chunk; "data" holds a PowerState, or () without compression over data.
        """
        mesh, chunks = self.config.mesh, self.layout.chunks

        def stage(index: jax.Array) -> State:
            data: Any = ()
            if self.power_kernels:
                shapes = [self.matrices[path] for _ in range(chunks * self.layout.slots) for path in self.power_kernels]
                data = init_power(shapes, self.config.compress.data_rank, seed=0)
            return {
                "backward": self._init_link(self.links.backward, index),
                "forward": self._init_link(self.links.forward, index),
                "data": data,
            }

        one = jax.vmap(stage)(jnp.arange(mesh.pipe))
        every = (mesh.data, mesh.pipe, mesh.tensor)
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None, :, None], (*every, *x.shape[1:])), one)

    def _init_link(self, link: Link, sender: jax.Array) -> Any:
        """Return the first state of a link's codec, [chunks, *shape].

        Args:
            link: codec and ranks of the direction.
            sender: the sending stage, int [].
        """
        state = link.codec.init(self.message.shape, self.message.dtype)
        if link.ranks:
            rank = jnp.asarray(link.ranks)[sender]
            if isinstance(state, Record):
                state = state._replace(inner=restrict(state.inner, rank))
            else:
                state = restrict(state, rank)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.layout.chunks, *jnp.shape(x))), state)

    def identity(self) -> dict[str, Any]:
        """Return what a saved state depends on, as JSON values; if it differs, the compression starts afresh."""
        config, mesh = self.config, self.config.mesh
        return {
            "mesh": [mesh.data, mesh.pipe, mesh.tensor],
            "stage_layers": list(config.stage_layers),
            "virtual_stages": config.pipeline.virtual_stages,
            "message": list(self.message.shape),
        }

    def link_settings(self) -> dict[str, Any]:
        """Return the settings of the links that the shapes of a saved state do not show, as JSON values.

        They are the ranks of the links, and the name of a codec that is not the configuration's.
        """
        given = {} if self.codec is None else {"codec": codec_name(self.codec)}
        return {"backward_ranks": list(self._backward_ranks), **given}

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
        path = "codec" if "codec" in different else different[0]
        raise UserError(
            f"{where} holds another state of the compression: {path} is {there.get(path, 'absent')} there and "
            f"{here.get(path, 'absent')} here; use the compress settings and the codec that it was saved with, "
            "or start compression afresh with --config.checkpoint.reset_codec=True"
        )

    # --- Checks and report --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a codec that does not fit and ranks that compress nothing, before anything is compiled.

        Raises:
            UserError: the codec has nothing to encode or returns wrong shapes, or a rank is above the largest useful
                one.
        """
        if self.codec is not None:
            self._check_codec(self.codec)
        c, message = self.config.compress, self.message
        n, k = math.prod(message.shape[:-1]), message.shape[-1]
        largest = self._largest_rank(n, k, self.config.model.dtype, self._factors)
        directions = []
        if self._backward_ranks:
            name = "backward_ranks" if c.backward_ranks else "backward_rank"
            directions.append((name, max(self._backward_ranks)))
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

    def _check_codec(self, codec: Codec) -> None:
        """Require that a given codec has messages to encode, no ranks by link, and the right shapes.

        Raises:
            UserError: one of these does not hold.
        """
        if self.config.mesh.pipe == 1:
            raise UserError(
                f"the codec {codec_name(codec)} needs messages between stages, but mesh.pipe=1; choose mesh.pipe of 2 "
                "or more, or codec=None"
            )
        ranks = self.config.compress.backward_ranks
        if ranks:
            raise UserError(
                f"compress.backward_ranks={ranks} gives a rank to each link, which the codec {codec_name(codec)} does "
                "not take; leave backward_ranks empty, or codec=None for the low-rank codec"
            )
        try:
            check_codec(codec, self.message.shape, self.message.dtype)
        except ValueError as error:
            raise UserError(str(error)) from error

    def describe(self) -> list[tuple[str, str]]:
        """Return rows (what, how it is compressed) for the run's first table."""
        c, rows = self.config.compress, []
        if self.codec is not None:
            sent = f"{self._message_bytes(self.codec)} of {self._message_bytes(Identity())} bytes"
            text = f"{self.backward}: {codec_name(self.codec)}, {sent}, {self._times_smaller([self.codec])}"
            rows.append(("gradients between stages", text))
        elif self.backward != "none":
            rows.append(("gradients between stages", f"{self.backward}: {self._rank_text(self._backward_ranks)}"))
        if c.forward != "none":
            rows.append(("activations between stages", f"{c.forward}: {self._rank_text([c.forward_rank])}"))
        if c.data != "none":
            chosen = self.compressed_kernels(c.data_rank)
            left = [name for name, _ in self.matrices if (name, "kernel") not in chosen]
            dense = f"; {', '.join(left)} would not shrink enough" if left else ""
            alone = "; one data rank, nothing is saved" if self.config.mesh.data == 1 else ""
            names = ", ".join(name for name, _ in chosen)
            rows.append(("gradients over data", f"{c.data}: rank {c.data_rank} of {names}{dense}{alone}"))
        return rows

    def _message_bytes(self, codec: Codec) -> int:
        """Return the bytes of a message between stages on the wire."""
        return wire_bytes(codec, self.message.shape, self.message.dtype)

    def _times_smaller(self, codecs: Sequence[Codec]) -> str:
        """Return how many times smaller each codec makes a message, as text: "7.9 and 3.9 times smaller"."""
        dense = self._message_bytes(Identity())
        times = (dense / size if size else math.inf for size in map(self._message_bytes, codecs))
        return f"{' and '.join(f'{ratio:.1f}' for ratio in times)} times smaller"

    def _rank_text(self, ranks: Sequence[int]) -> str:
        """Return the ranks of a direction's links and what they save, as text."""
        used, n, k = sorted(set(ranks)), math.prod(self.message.shape[:-1]), self.message.shape[-1]
        smaller = self._times_smaller([self._low_rank(rank) for rank in used])
        return f"rank {' and '.join(map(str, used))} of {n} x {k}, {smaller}"


def _too_large(name: str, rank: int, what: str, largest: int, min_ratio: float) -> str:
    """Return the message of an error about a rank that saves too little.

    Args:
        name: name of the flag.
        rank: its value.
        what: clause that names the matrix for which the rank is too large.
        largest: largest useful rank; 0 if no rank is useful.
        min_ratio: factor by which compression must make a matrix smaller.
    """
    would = f"the largest useful rank is {largest}" if largest else "no rank would"
    return f"{name}={rank} does not make anything {min_ratio:g} times smaller (compress.min_ratio): {what}; {would}"
