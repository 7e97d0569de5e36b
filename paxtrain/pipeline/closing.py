"""A stage's last op, B or W: each layer's gradient is reduced over data as soon as it is final, under the other layers.

XLA runs a collective beside compute only if both are in one computation. So the op of the last row has the reductions
inside. Stages that are done before skip that op, and so they come to their reductions while the others still compute.

Reduced gradients lie at the front of the accumulators, whose rest is then of no use. So they take no memory while the
pipeline still holds its rings.
"""

from typing import Protocol

import jax
from jax import lax

from compress.codec import State, Tree
from paxtrain.model.transformer import Params
from paxtrain.pipeline.program import Close, LayerPlace, Layers, LayerStep, Weights, layers_of
from paxtrain.pipeline.rings import read, write_front
from paxtrain.pipeline.stage import Stage


class Reduction(Protocol):
    """A reduction over data as the pipeline calls it; `stages` are the stages that may make the call.

    Each call takes float32 accumulators in the stage's layout, and the states that the call before returned.
    """

    def states(self) -> list[State]:
        """Return what the reduction keeps from step to step, before the step: for each layer slot, and for the rest."""

    def closes(self, stages: tuple[int, ...]) -> bool:
        """Return whether these stages can reduce layer by layer, within their last op."""

    def layer(self, stages: tuple[int, ...], total: Params, state: State) -> tuple[Params, State]:
        """Return the reduced gradient of a layer and its new state."""

    def rest(self, stages: tuple[int, ...], grads: Weights, state: State) -> tuple[tuple[Params, Params], State]:
        """Return the reduced gradients of the embedding and of the final norm, and the rest's new state."""

    def whole(self, stages: tuple[int, ...], grads: Weights, states: list[State]) -> tuple[Weights, list[State]]:
        """Return the accumulators with all reduced gradients at their front, and the new states."""


def close_layers(
    stage: Stage, chunk: int, x: Tree, totals: list[Layers], step: LayerStep, close: Close, backward: bool
) -> tuple[Tree, list[Layers], list[State]]:
    """Run a step of each layer of a chunk and reduce each layer's gradient behind it.

    Args:
        stage: the stage.
        chunk: number of the chunk.
        x: value that goes from layer to layer.
        totals: the chunk's gradient accumulators.
        step: step of a layer that makes its gradient final.
        close: the reduction of a layer.
        backward: whether the last layer comes first.

    Returns:
        The value x, the accumulators with the reduced gradients at their front, and the states.
    """
    totals, states, numbers = list(totals), list(close.states), range(len(totals))
    before: Params | tuple[()] = ()  # the gradients reduced last

    def both(place: LayerPlace, weights: Params, carry: tuple, total: Params) -> tuple[tuple, Params]:
        x, before = carry
        x, total = step(place, weights, x, total)
        slot = stage.slot(chunk, place.segment, place.layer)
        # One layer after the other: otherwise XLA combines collectives of several layers, and waits for the last one.
        ready, _ = lax.optimization_barrier((total, before))
        reduced, states[slot] = close.reduce(ready, states[slot])
        return (x, reduced), write_front(total, (), reduced)

    for n in reversed(numbers) if backward else numbers:
        segment = stage.program.segments[n]
        first = stage.slot(chunk, n, 0)
        own = slice(first, first + segment.count)
        if segment.scan and not any(states[own]):
            x, totals[n] = _scanned(stage, chunk, n, x, totals[n], step, close, backward)
        elif segment.scan or segment.optional:
            # Inside the loop that skips an optional segment, nothing would lie over its reduction.
            x, totals[n] = stage.run_segment(chunk, n, x, totals[n], step, backward)
            totals[n], states[own] = reduce_segment(totals[n], states[own], close)
        else:
            (x, before), totals[n] = stage.run_segment(chunk, n, (x, before), totals[n], both, backward)
    return x, totals, states


def _scanned(
    stage: Stage, chunk: int, number: int, x: Tree, total: Tree, step: LayerStep, close: Close, backward: bool
) -> tuple[Tree, Tree]:
    """Run a scanned segment as `close_layers` does: each turn reduces the gradient of the layer before."""
    count = stage.program.segments[number].count

    def layer(turn: int | jax.Array) -> int | jax.Array:
        return count - 1 - turn if backward else turn

    def turn(t: int | jax.Array, carry: tuple) -> tuple:
        x, total = carry
        before = layer(t - 1)
        # The gradient is read before the step writes the next one. Without this order XLA copies all layers'.
        ready, total = lax.optimization_barrier((read(total, (before,)), total))
        reduced, _ = close.reduce(ready, ())
        x, total = step(*stage.at(chunk, number, layer(t)), x, total)
        return x, write_front(total, (before,), reduced)

    x, total = step(*stage.at(chunk, number, layer(0)), x, total)
    x, total = lax.fori_loop(1, count, turn, (x, total))
    last = layer(count - 1)
    return x, write_front(total, (last,), close.reduce(read(total, (last,)), ())[0])


def reduce_segment(total: Layers, states: list[State], close: Close) -> tuple[Layers, list[State]]:
    """Return a segment's accumulators with reduced gradients at their front, and its layers' states.

    Args:
        total: accumulators whose gradients are final.
        states: states of the layers.
        close: the reduction of a layer.
    """
    found = [close.reduce(own, state) for own, state in zip(layers_of(total), states, strict=True)]
    return store(total, [reduced for reduced, _ in found]), [state for _, state in found]


def store(total: Layers, reduced: list[Params]) -> Layers:
    """Return a segment's accumulators with the reduced gradients of its layers at their front."""
    if isinstance(total, list):
        return [write_front(own, (), new) for own, new in zip(total, reduced, strict=True)]
    for i, new in enumerate(reduced):
        total = write_front(total, (i,), new)
    return total


def close_rest(
    chunk: int, grads: Weights, close: Close, rest: tuple[tuple[Params, Params], State]
) -> tuple[Weights, list[State]]:
    """Return accumulators and states behind the last op: with all gradients reduced that were final before.

    Args:
        chunk: chunk of the last op.
        grads: gradient accumulators.
        close: the reduction of a layer, with the states behind the op.
        rest: reduced gradients of the embedding and of the final norm, and the rest's new state.
    """
    reduced, last = rest
    chunks, states, slot = list(grads.chunks), list(close.states), 0
    for c, segments in enumerate(chunks):
        segments = list(segments)
        for n, total in enumerate(segments):
            own = slice(slot, slot + len(layers_of(total)))
            if c != chunk:
                segments[n], states[own] = reduce_segment(total, states[own], close)
            slot = own.stop
        chunks[c] = segments
    embedding, final_norm = (
        write_front(old, (), new) for old, new in zip((grads.embedding, grads.final_norm), reduced)
    )
    return Weights(embedding, chunks, final_norm), [*states[:-1], last]
