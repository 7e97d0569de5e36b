"""The step of a single stage, which has no rows: F and B of each micro-batch in turn."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import State
from paxtrain.model.spec import Scalars
from paxtrain.pipeline.closing import Reduction, close_layers, close_rest
from paxtrain.pipeline.program import Close, Weights
from paxtrain.pipeline.rings import add
from paxtrain.pipeline.stage import Stage


def one_stage(
    stage: Stage, grads: Weights, reduction: Reduction | None
) -> tuple[jax.Array, Scalars, Weights, list[State]]:
    """Return loss, layers' scalars and gradients of a single stage, and the reduction's states.

    Residuals bypass the ring.

    The last micro-batch is outside the loop if its B reduces the gradients over data.

    Args:
        stage: the stage.
        grads: accumulators, zeros.
        reduction: reduction of the gradients over data; None: none here.
    """
    closes = reduction is not None and reduction.closes((0,))

    def micro_batch(carry: tuple[jax.Array, Scalars, Weights], mb: jax.Array, close: Close | None) -> tuple:
        loss, sums, grads = carry
        with jax.named_scope("forward"):
            y, scalars, residuals = stage.forward_once(0, mb, stage.embed(mb))
        with jax.named_scope("head"):
            loss, g, embedding, final_norm = stage.head(mb, y, loss, grads.embedding, grads.final_norm)
        grads = grads._replace(embedding=embedding, final_norm=final_norm)
        with jax.named_scope("backward"):
            g, grads, _, states = stage.backward(0, mb, residuals, (), stage.cotangents(g), grads, (), close, y)
            grads = stage.embed_gradient(mb, g, grads, jnp.bool_(True))
        return (loss, add(sums, scalars), grads), states

    def body(carry: tuple[jax.Array, Scalars, Weights], mb: jax.Array) -> tuple[tuple, None]:
        return micro_batch(carry, mb, None)[0], None

    in_loop, carry = stage.micro_batches - closes, (jnp.float32(0), stage.no_scalars, grads)
    if stage.share.first is None:
        carry, _ = lax.scan(body, carry, jnp.arange(in_loop))
    else:  # data ranks with fewer micro-batches have the last ones
        carry = lax.fori_loop(stage.share.first, in_loop, lambda mb, carry: body(carry, mb)[0], carry)
    if reduction is None:
        return *carry, []
    if not closes:
        return *carry[:2], *reduction.whole((0,), carry[2], reduction.states())
    close = Close(close_layers, functools.partial(reduction.layer, (0,)), reduction.states())
    (*losses, grads), states = micro_batch(carry, jnp.int32(in_loop), close)
    return *losses, *close_rest(0, grads, close._replace(states=states), reduction.rest((0,), grads, states[-1]))
