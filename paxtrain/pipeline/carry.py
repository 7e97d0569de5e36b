"""The state that a stage carries from row to row, and gradients on their way within a row."""

from typing import NamedTuple

import jax

from compress.codec import State, Tree, Wire
from paxtrain.model.spec import Scalars
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
