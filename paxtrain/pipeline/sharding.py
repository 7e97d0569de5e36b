"""Weights, and sums of their gradients, that a stage has whole or in shards over data.

`Whole` is what a stage does if each data rank has all of them. With `InShards` a layer's weights are gathered when F, B
or W reaches the layer, and its gradients leave by a reduce-scatter, micro-batch by micro-batch. The collectives are
a `DataCollectives`, which the trainer hands in. All data ranks of a stage run the same ops, and thus the same of these.

References:
    Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054, stages 2 and 3.
    Zhao et al. 2023, PyTorch FSDP, https://arxiv.org/abs/2304.11277.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Tree
from paxtrain.model.transformer import Params
from paxtrain.pipeline.program import LayerPlace, LayerStep, Sums, Weights
from paxtrain.pipeline.rings import add, only_if, read, write

Turn = Callable[[int | jax.Array], tuple[LayerPlace, Params]]


class DataCollectives(Protocol):
    """Collectives over data of weights and gradients, some of which are in shards and others whole on each rank."""

    def sums(self, weights: Weights) -> Weights:
        """Return the shapes of the gradients' sums on a device, given its weights."""

    def gather(self, layer: Params) -> Params:
        """Return the weights of a layer, whole."""

    def scatter(self, made: Params, errors: Tree) -> Sums:
        """Return what a device sums of gradients of a layer over one micro-batch, and the errors; arrays may be None.

        Args:
            made: gradients, whole.
            errors: what the codec of gradients has left out of those before; () if they travel as they are.
        """

    def gather_table(self, table: jax.Array) -> jax.Array:
        """Return a table of the vocabulary, whole."""

    def scatter_table(self, made: jax.Array) -> jax.Array:
        """Return what a device sums of the gradient of a table over one micro-batch."""


class Whole:
    """Weights and sums of gradients of which each data rank has all.

    Attributes:
        errors: what a codec of gradients has left out before the step, as `Weights.errors`.
    """

    errors: list[list[Tree]] | tuple[()] = ()

    def sums(self, weights: Weights) -> Weights:
        """Return the gradients' sums on a device, or their shapes, given its weights."""
        return weights

    def shapes(self, layer: Params) -> Params:
        """Return the shapes and dtypes of a layer's weights, given what a device has of them."""
        return jax.eval_shape(lambda: layer)

    def start(self, since: Tree = None) -> None:
        """Begin with a first layer; the functions below know those that run before.

        Args:
            since: what is made before the layer's weights are gathered; None: the layer's input.
        """

    def gathered(self, x: Tree, layer: Params) -> tuple[Tree, Params]:
        """Return a layer's input and its weights, whole, given what a device has of them."""
        return x, layer

    def scan(self, count: int, turn: Turn, step: LayerStep, x: Tree, part: Tree, backward: bool) -> tuple[Tree, Tree]:
        """Run a step of each layer of a scanned segment, and return x and the segment's part after it.

        Args:
            count: number of layers.
            turn: (number of a turn) -> (place of its layer, what a device has of the layer's weights).
            step: function (place, weights, x, part) -> (x, part).
            x: value that goes from layer to layer.
            part: stacked part of the segment.
            backward: whether this is a backward.
        """
        return lax.fori_loop(0, count, lambda n, carry: step(*turn(n), *carry), (x, part))

    def first_sum(self, total: Params, shapes: Params) -> Params:
        """Return the sums to which the backward of a layer adds.

        Args:
            total: the layer's accumulators.
            shapes: shapes of its weights.
        """
        return total

    def summed(self, x: Tree, own: Sums, made: Params) -> tuple[Tree, Sums]:
        """Return what goes to the next layer, x, and a layer's accumulators after a micro-batch.

        Args:
            x: what goes to the next layer.
            own: the accumulators before.
            made: what has become of `first_sum`; some arrays, which are not changed, may be None.
        """
        return x, own._replace(total=made)

    def parts(self, x: Tree, made: Params) -> tuple[Tree, Params]:
        """Return what goes to the next layer, x, and what a device sums of a layer's gradients; some may be None."""
        return x, made

    def table(self, table: jax.Array) -> jax.Array:
        """Return a table of the vocabulary, whole."""
        return table

    def first_table_sum(self, total: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the sums to which the backward of a table of some shape adds, given its accumulator."""
        return total

    def table_summed(self, total: jax.Array, made: jax.Array) -> jax.Array:
        """Return a table's accumulator after a micro-batch, given what has become of `first_table_sum`."""
        return made

    def embedding_summed(
        self, total: Params, added: Callable[[Params], Params], shape: tuple[int, ...], active: jax.Array
    ) -> Params:
        """Return the embedding's accumulators with the gradients of a micro-batch.

        Args:
            total: the accumulators; token is one table, or several stacked ones, of which the first is the embedding's.
            added: adds the gradients to accumulators, if `active`.
            shape: shape of a whole table.
            active: whether this stage has gradients, bool [].
        """
        return added(total)

    def on(self, condition: jax.Array, run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return run(x), which may gather a table, if the condition holds; otherwise x."""
        return jnp.where(condition, run(x), x)


def _with_sums(part: Tree, place: LayerPlace, sums: Sums | tuple[()]) -> Tree:
    """Return a segment's stacked accumulators with what a device sums of a layer's gradients added, if there is any."""
    if not sums:
        return part
    total = write(part.total, place.at, add(read(part.total, place.at), sums.total))
    return Sums(total, write(part.errors, place.at, sums.errors))


class InShards(Whole):
    """Weights, or only sums of gradients, that are in shards over data.

    The collectives of layers that run one after another have an order. Without it XLA would combine those of several
    layers, gather once for F and B, and keep in memory what they make.
    """

    def __init__(self, shards: DataCollectives, errors: list[list[Tree]] | tuple[()] = ()) -> None:
        self._shards, self.errors = shards, errors
        self.start()

    def sums(self, weights: Weights) -> Weights:
        """Return the shapes of the gradients' sums on a device."""
        return self._shards.sums(weights)

    def shapes(self, layer: Params) -> Params:
        """Return the shapes and dtypes of a layer's weights, given a device's shards."""
        return jax.eval_shape(lambda: self._shards.gather(layer))

    def start(self, since: Tree = None) -> None:
        """Begin with a first layer, see `Whole.start`."""
        self._input: Tree = since
        self._weights: Tree = ()
        self._parts: Tree = ()
        self._late: list[Params] | None = None  # whole gradients that the next turn of a loop scatters

    def gathered(self, x: Tree, layer: Params) -> tuple[Tree, Params]:
        """Return a layer's input and its weights, gathered under the layer before."""
        before, self._input = x if self._input is None else self._input, x
        layer, _ = lax.optimization_barrier((layer, (before, self._weights)))
        first, self._weights = not self._weights, self._shards.gather(layer)
        # No compute lies before the first layer, so its weights may arrive one by one.
        return (x, self._weights) if first else lax.optimization_barrier((x, self._weights))

    def scan(self, count: int, turn: Turn, step: LayerStep, x: Tree, part: Tree, backward: bool) -> tuple[Tree, Tree]:
        """Run a step of each layer of a scanned segment; see `Whole.scan`.

        A turn gathers the next turn's weights, and scatters the gradients of the turn before: what is not in the same
        turn as compute would lie under nothing. So the first turn of B and the last turn are outside of the loop.
        """
        if not jax.tree.leaves(x):  # W waits for no other device, and its weights are not used
            return super().scan(count, lambda n: self._whole(*turn(n)), step, x, part, backward)

        def one(n: int | jax.Array, carry: tuple, last: bool = False) -> tuple:
            x, part, weights, made = carry
            coming = weights if last else self._shards.gather(turn(n + 1)[1])
            sums = self._sent(part, turn(n - 1)[0], made)
            self._late = []
            x, part = step(turn(n)[0], weights, x, part)
            late, self._late = self._late, None
            x, coming, sums = lax.optimization_barrier((x, coming, sums))
            return x, _with_sums(part, turn(n - 1)[0], sums), coming, late[0] if late else ()

        own, _ = lax.optimization_barrier((turn(0)[1], x if self._input is None else self._input))
        carry, first = (x, part, self._shards.gather(own), ()), 0
        if backward and count > 1:
            carry, first = one(0, carry), 1
        if first < count - 1:
            carry = lax.fori_loop(first, count - 1, one, carry)
        x, part, _, made = one(count - 1, carry, last=True)
        place = turn(count - 1)[0]
        return x, _with_sums(part, place, self._sent(part, place, made))

    def _sent(self, part: Tree, place: LayerPlace, made: Params | tuple[()]) -> Sums | tuple[()]:
        """Return what a device sums of whole gradients of a layer of a scanned segment, if there are any."""
        return self._shards.scatter(made, read(part.errors, place.at)) if made else ()

    def _whole(self, place: LayerPlace, layer: Params) -> tuple[LayerPlace, Params]:
        """Return a layer's place and its weights, whole."""
        return place, self._shards.gather(layer)

    def first_sum(self, total: Params, shapes: Params) -> Params:
        """Return zeros for whole gradients."""
        return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), shapes)

    def summed(self, x: Tree, own: Sums, made: Params) -> tuple[Tree, Sums]:
        """Return what goes to the next layer, and the accumulators with whole gradients added in shards."""
        if self._late is not None:
            self._late.append(made)
            return x, own
        x, sums = self._leave(x, made, own.errors)
        return x, sums._replace(total=jax.tree.map(lambda part, total: add(total, part), sums.total, own.total))

    def parts(self, x: Tree, made: Params) -> tuple[Tree, Params]:
        """Return what goes to the next layer, and shards of gradients, which leave under the next layer."""
        x, sums = self._leave(x, made, ())
        return x, sums.total

    def _leave(self, x: Tree, made: Params, errors: Tree) -> tuple[Tree, Sums]:
        """Return what goes to the next layer, and what a device sums of gradients, which leave under the next layer."""
        made, _ = lax.optimization_barrier((made, self._parts))
        before, sums = self._parts, self._shards.scatter(made, errors)
        self._parts = sums.total
        return (lax.optimization_barrier((x, before))[0] if before else x), sums

    def table(self, table: jax.Array) -> jax.Array:
        """Return a table of the vocabulary, whole, given a device's shard."""
        return self._shards.gather_table(table)

    def first_table_sum(self, total: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return zeros for the whole gradient of a table."""
        return jnp.zeros(shape, jnp.float32)

    def table_summed(self, total: jax.Array, made: jax.Array) -> jax.Array:
        """Return a table's accumulator with a whole gradient added in shards."""
        return total + self._shards.scatter_table(made)

    def embedding_summed(
        self, total: Params, added: Callable[[Params], Params], shape: tuple[int, ...], active: jax.Array
    ) -> Params:
        """Return the embedding's accumulators with the gradients of a micro-batch; see `Whole.embedding_summed`."""

        def scattered(total: Params) -> Params:
            token, zeros = total["token"], self.first_table_sum(total["token"], shape)
            stacked = token.ndim > zeros.ndim
            made = added({**total, "token": zeros[None] if stacked else zeros})
            if not stacked:
                return {**made, "token": self.table_summed(token, made["token"])}
            return {**made, "token": token.at[0].set(self.table_summed(token[0], made["token"][0]))}

        return only_if(active, scattered, total)

    def on(self, condition: jax.Array, run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return run(x) if the condition holds; stages on which it does not gather no table."""
        return only_if(condition, run, x)
