"""The carry of a stage from row to row, and the messages that go through a codec: encodes and sends them.

The executor decodes them.

These are all activations, with the codec `Identity` if they are not compressed, and compressed gradients. Gradients
that are not compressed go through no codec: the executor sends them itself (`Rows._gradients_travel`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Codec, State, Tree, Wire
from compress.collectives import joined, parted
from paxtrain.model.spec import Scalars
from paxtrain.pipeline.collectives import MeshAxes, Pairs, permute, stage_pairs
from paxtrain.pipeline.program import Weights

StageRow = dict[str, jax.Array]  # one stage's columns of a row of the table


class Carry(NamedTuple):
    """The carry from row to row; () stands for parts that evaluation lacks. Fields are in the compiled tuple's order.

    Attributes:
        gradient_out: gradient that B made last, [B, S, H].
        gradients: ring of gradients that wait for B, or the one gradient if each is used at once.
        grads: accumulators of the weights' gradients.
        inbox: ring of activations that wait for F, or the one activation.
        links: per direction the states of the codecs, with a leading dim of chunks.
        loss: sum so far, float32 [].
        output: activation that F made last, [B, S, H].
        residuals: ring of what F leaves for B, and B for W.
        reduced: states of the reduction over data, in a last row that reduces; otherwise ().
        scalars: sums of the layers' scalars so far, by name; {} in evaluation.
        scratch: see Stage.scratch.
    """

    gradient_out: jax.Array
    gradients: jax.Array
    grads: Weights
    inbox: jax.Array
    links: dict[str, State]
    loss: jax.Array
    output: jax.Array
    reduced: list[State]
    residuals: Tree
    scalars: Scalars
    scratch: Tree


class Mail(NamedTuple):
    """Gradients that are on their way: as they are, and compressed; None if none of that kind travels."""

    plain: jax.Array | None
    wire: Wire


def among(index: jax.Array, stages: tuple[int, ...]) -> jax.Array:
    """Return whether `index`, a stage or a position, is one of several, bool []."""
    return jnp.isin(index, jnp.array(stages))


def _cross(wire: Any, axis: MeshAxes, pairs: Pairs) -> Any:
    """Permute a wire's arrays in one message, because each message waits for the link's latency.

    XLA for GPUs joins the permutes of several arrays; XLA for CPUs does not, so there the arrays are joined first.
    """
    leaves, structure = jax.tree.flatten(wire)
    if len(leaves) <= 1:
        return permute(wire, axis, pairs)

    def together(leaves: list[jax.Array]) -> list[jax.Array]:
        with jax.named_scope("compression"), jax.named_scope("encode"):
            flat = joined(leaves)
        flat = permute(flat, axis, pairs)
        with jax.named_scope("compression"), jax.named_scope("decode"):
            return parted(flat, leaves)

    def each(leaves: list[jax.Array]) -> list[jax.Array]:
        return permute(leaves, axis, pairs)

    return jax.tree.unflatten(structure, lax.platform_dependent(leaves, cpu=together, default=each))


@dataclasses.dataclass(frozen=True)
class StageCrossing:
    """The links that a stage's messages cross in one row of the schedule; it is a compress.codec.Crossing.

    Attributes:
        axis: axis of the positions.
        index: this device's position on the axis, int [].
        positions: (sender, receiver) positions on the axis.
    """

    axis: MeshAxes
    index: jax.Array
    positions: Pairs

    @property
    def pairs(self) -> Pairs:
        """(Sender, receiver) stages."""
        return stage_pairs(self.axis, self.positions)

    def _of(self, pairs: Pairs) -> Pairs:
        """Return the positions whose stages are among some pairs."""
        return tuple(one for one in self.positions if stage_pairs(self.axis, (one,))[0] in pairs)

    def send(self, wire: Any, pairs: Pairs) -> Any:
        """Return the wire that arrives over some of the pairs; other stages get anything."""
        return _cross(wire, self.axis, self._of(pairs))

    def receives(self, pairs: Pairs) -> jax.Array:
        """Return whether this stage is a receiver of some of the pairs, bool []."""
        return among(self.index, tuple(receiver for _, receiver in self._of(pairs)))


def send(
    codec: Codec,
    state: Any,
    x: jax.Array,
    axis: MeshAxes,
    index: jax.Array,
    pairs: Pairs,
    leaves: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Encode a message and send it over the links of `pairs`.

    Args:
        codec: codec of the direction.
        state: the codec's state of this stage's link.
        x: message of this stage [B, S, H]; anything if the stage sends nothing.
        axis: axis of the pairs.
        index: this device's position on the axis, int [].
        pairs: (sender, receiver) positions.
        leaves: whether this stage sends, bool [], if not all senders of `pairs` do; None: they do.

    Returns:
        The wire that arrives at this stage, still encoded, and the codec's next state, changed at senders only. The
        wire of a stage that receives nothing is meaningless.
    """
    with jax.named_scope("compression"), jax.named_scope("encode"):
        active = among(index, tuple(sender for sender, _ in pairs)) if leaves is None else leaves
        wire, state = codec.encode(state, x, active)
        if leaves is not None:  # what a codec returns for a message that is not sent may be no number
            wire = jax.tree.map(lambda part: jnp.where(leaves, part, jnp.zeros_like(part)), wire)
    return codec.exchange(wire, StageCrossing(axis, index, pairs)), state
