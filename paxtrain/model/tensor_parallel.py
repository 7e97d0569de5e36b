"""Tensor parallelism by hand: the conjugate operators, products with split kernels, the vocabulary-parallel embedding.

Under shard_map with check_vma=False a psum is its own transpose, which would multiply gradients by the size of the
axis, so each operator carries its own backward. `axis` is the mesh axis, or None where tensors are whole.

Between the split matrices (norms, dropout, residual sums, and what travels to the next stage) every device has all
activations or, with sequence parallelism, those of a part of the sequence: the all-reduce then becomes a reduce-scatter
on the way out of one matrix and an all-gather on the way into the next.

References:
    Shoeybi et al. 2019, Megatron-LM (f and g).
    Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models (sequence parallelism).
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from compress.codec import Codec, Identity
from compress.collectives import reduce_scatter
from paxtrain.attention import split
from paxtrain.config.axes import AXES, TENSOR, layer_sizes
from paxtrain.errors import UserError

PRODUCTS = ("qkv", "up")  # names of products that save=dots keeps


@jax.named_scope("tensor")
def _sum(x: jax.Array, axis: str | None) -> jax.Array:
    return lax.psum(x, axis) if axis else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy(x: jax.Array, axis: str | None) -> jax.Array:
    """Pass a replicated x to column-parallel weights: identity forward, sum over the axis backward."""
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reduce(x: jax.Array, axis: str | None) -> jax.Array:
    """Complete row-parallel partial sums: sum over the axis forward, identity backward."""
    return _sum(x, axis)


copy.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (_sum(g, axis),))
reduce.defvjp(lambda x, axis: (reduce(x, axis), None), lambda axis, _, g: (g,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(x: jax.Array, axis: str) -> jax.Array:
    """Gather every rank's [B, S/T, H] into [B, S, H]: all-gather forward, reduce-scatter backward."""
    with jax.named_scope("tensor"):
        return lax.all_gather(x, axis, axis=1, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scatter(x: jax.Array, axis: str) -> jax.Array:
    """Sum partial sums [B, S, H] into each rank's [B, S/T, H]: reduce-scatter forward, all-gather backward."""
    with jax.named_scope("tensor"):
        return reduce_scatter(x, axis, 1)


gather.defvjp(lambda x, axis: (gather(x, axis), None), lambda axis, _, g: (scatter(g, axis),))
scatter.defvjp(lambda x, axis: (scatter(x, axis), None), lambda axis, _, g: (gather(g, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def total(x: jax.Array, axis: str | None) -> jax.Array:
    """Sum what each rank needs of all: sum over the axis forward, and backward."""
    return _sum(x, axis)


total.defvjp(lambda x, axis: (total(x, axis), None), lambda axis, _, g: (_sum(g, axis),))


class Group(NamedTuple):
    """The split of a layer over devices.

    Attributes:
        axis: mesh axis over which heads, ffn and vocabulary are split; None: they are whole.
        sequence: whether each device has only a part of the sequence between the split matrices.
        others: further axes of several devices that split layers, for layers that ask for them.
        form: how devices of a context group see each other's tokens, see MeshConfig.context_form.
        codec: codec of the keys and values that these devices send each other.
    """

    axis: str | None = None
    sequence: bool = False
    others: tuple[str, ...] = ()
    form: str = "ring"
    codec: Codec = Identity()

    @classmethod
    def of(cls, sizes: Mapping[str, int], sequence: bool, form: str = "ring", codec: Codec | None = None) -> "Group":
        """Return the split of a layer over axes of some sizes.

        Args:
            sizes: sizes of axes by name.
            sequence: whether tensor splits the sequence between the split matrices.
            form: how devices of a context group see each other's tokens.
            codec: codec of the keys and values that these devices send each other; None: these travel as they are.
        """
        several = layer_sizes(sizes)
        others = tuple(axis for axis in several if axis != TENSOR)
        axis, parts = (TENSOR, sequence) if TENSOR in several else (None, False)
        return cls(axis, parts, others, form, Identity() if codec is None else codec)

    def over(self, axis: str) -> "Group":
        """Return the split over another axis by its name, which is none if it has one device."""
        return Group(axis) if axis in self.others else WHOLE

    @property
    def context(self) -> str | None:
        """Mesh axis that splits the sequence through all layers; None: it is whole."""
        return next((axis for axis in self.others if AXES[axis].sequence), None)

    @property
    def parts(self) -> int:
        """Number of devices that share the sequence between the split matrices."""
        axes = [self.context, self.axis if self.sequence else None]
        return math.prod(lax.axis_size(axis) for axis in axes if axis)


WHOLE = Group()


def enter(x: jax.Array, group: Group) -> jax.Array:
    """Return x [B, S/T or S, H] as column-parallel weights need it: [B, S, H] on every device."""
    return gather(x, group.axis) if group.sequence else copy(x, group.axis)


def leave(x: jax.Array, group: Group) -> jax.Array:
    """Return the sum of row-parallel partial sums x [B, S, H] as [B, S/T or S, H]."""
    return scatter(x, group.axis) if group.sequence else reduce(x, group.axis)


def averaged(x: jax.Array, group: Group) -> jax.Array:
    """Return the mean over the parts of the sequence of x, a mean over the device's own part."""
    return reduce(x / lax.axis_size(group.axis), group.axis) if group.sequence else x


def columns(p: dict[str, jax.Array], h: jax.Array, name: str) -> jax.Array:
    """Multiply h [B, S, H] by a kernel [H, F/T] or [H, several, F/T] that is split by columns, and add its bias if any.

    Args:
        p: kernel, and bias if any.
        h: [B, S, H].
        name: one of PRODUCTS, by which the product is saved; without the bias, which is read and written once less so.

    Raises:
        UserError: the name is another one.
    """
    if name not in PRODUCTS:
        raise UserError(f"the name of a product must be one of {', '.join(PRODUCTS)}, got {name!r}")
    k = p["kernel"]
    y = checkpoint_name(h @ k if k.ndim == 2 else jnp.einsum("bsh,hcf->bscf", h, k), name)
    return y + p["bias"].astype(h.dtype) if "bias" in p else y


def rows(p: dict[str, jax.Array], x: jax.Array, group: Group) -> jax.Array:
    """Multiply x [B, S, F/T] by a kernel [F/T, H] that is split by rows, and add its bias if any."""
    y = leave(x @ p["kernel"], group)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def own(x: jax.Array, dim: int, group: Group) -> jax.Array:
    """Return this device's part of an array that has the whole sequence.

    Args:
        x: any array.
        dim: dim of the sequence.
        group: the split of the sequence.
    """
    x = own_tokens(x, dim, group)
    if not group.sequence:
        return x
    size = x.shape[dim] // lax.axis_size(group.axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(group.axis) * size, size, dim)


def own_tokens(x: jax.Array, dim: int, group: Group) -> jax.Array:
    """Return the part of an array, which has the whole sequence, that this device has within layers.

    Args:
        x: any array.
        dim: dim of the sequence.
        group: the split of the sequence.
    """
    if group.context is None:
        return x
    return split.part(x, dim, lax.axis_index(group.context), lax.axis_size(group.context))


def local_ids(ids: jax.Array, rows: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Convert token ids into rows of this rank's vocabulary shard.

    Args:
        ids: int [...].
        rows: rows of the shard.
        axis: mesh axis that splits the vocabulary; None: it is whole.

    Returns:
        ([...] row in the shard, clipped into it; [...] whether the id lives here).
    """
    local = ids - (lax.axis_index(axis) * rows if axis else 0)
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


def embedding_lookup(table: jax.Array, ids: jax.Array, group: Group) -> jax.Array:
    """Return the rows of a vocabulary-parallel table for token ids.

    Args:
        table: [V/T, H], this rank's shard.
        ids: int [B, S].
        group: the split of the vocabulary and the sequence.

    Returns:
        [B, S, H], or this device's part of the sequence.
    """
    if group.axis is None:
        return table[ids]
    local, here = local_ids(ids, table.shape[0], group.axis)
    return leave(jnp.where(here[..., None], table[local], 0), group)
