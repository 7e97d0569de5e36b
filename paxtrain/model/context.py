"""The context of a layer, all that it depends on besides parameters and input; dropout, which draws from it."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from paxtrain.config import ModelConfig
from paxtrain.model import tensor_parallel as tp


class Dropout(NamedTuple):
    """Randomness of one micro-batch, the same on any mesh.

    Attributes:
        key: key of the step, uint32 [2].
        samples: index of each sequence in the global batch, int [B].
    """

    key: jax.Array
    samples: jax.Array


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """All that a layer depends on besides its parameters and its input.

    Attributes:
        config: the model's shape.
        group: the split of the layer over devices.
        dropout: randomness of the micro-batch; None: no dropout.
        index: the layer's number in the model; it seeds its dropout.
        starts: beginnings of the documents, see `document_starts`; None: one document per row.
        kind: the layer's kind, see `Architecture.kinds`.
    """

    config: ModelConfig
    group: tp.Group
    dropout: Dropout | None
    index: jax.Array | int
    starts: jax.Array | None
    kind: str = ""


def drop(x: jax.Array, rate: float, dropout: Dropout | None, place: jax.Array | int, group: tp.Group) -> jax.Array:
    """Drop elements of x [B, S, H].

    Args:
        x: [B, S or S/T, H].
        rate: share of the elements to drop.
        dropout: randomness of the micro-batch; None: nothing is dropped.
        place: number of layer and branch, which makes the masks of one sample differ.
        group: the split of the sequence.
    """
    if not rate or dropout is None:
        return x
    key = jax.random.fold_in(dropout.key, place)
    sequence = (group.parts * x.shape[1], x.shape[2])  # the whole sequence, so that masks are the same on any mesh
    keep = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 1 - rate, sequence))(dropout.samples)
    return jnp.where(tp.own(keep, 1, group), x / (1 - rate), 0).astype(x.dtype)


def dropped(x: jax.Array, c: LayerContext, branch: int) -> jax.Array:
    """Return the output x [B, S, H] of a layer's residual branch, the first or the second one, after dropout."""
    return drop(x, c.config.residual_dropout, c.dropout, 2 * c.index + branch, c.group)


middle = functools.partial(checkpoint_name, name="middle")  # marks the value between a layer's two branches
