"""Attention of a block by cuDNN's kernel, whose backward takes the log-sum-exps of all blocks together.

`jax.nn.dot_product_attention` rounds the log-sum-exps that it returns to the inputs' dtype, and its backward takes
those of its own keys only. Both kernels are in the jaxpr of its vjp. `forward` runs the first one of it, and `backward`
the rest, with the results of all blocks in place of the first one's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

_FORWARD = "dot_product_attention_fwd"  # begins the name of the first kernel's primitive


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, causal: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return attention of a block, [B, T, N, D], and its log-sum-exps, float32 [B, T, N].

    Args:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, D].
        mask: which query sees which key, bool [B, T, S]; None: all, or those before it if `causal`.
        causal: whether each query sees the keys before it and its own.
        scale: factor of the scores.
    """
    arguments = q, k, v, _wide(mask), q
    program, kernel = _program(causal and mask is None, scale, *arguments)
    out, sums = _run(program, arguments, kernel, None)
    return out, jnp.swapaxes(sums, 1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    sums: jax.Array,
    g: jax.Array,
    mask: jax.Array | None,
    causal: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the block's part of the gradients of q, k and v, in their dtype.

    Args:
        q: [B, T, N, D].
        k: [B, S, K, D].
        v: [B, S, K, D].
        out: attention to all blocks together, [B, T, N, D].
        sums: its log-sum-exps, float32 [B, T, N].
        g: its gradient, [B, T, N, D].
        mask: as `forward` has it.
        causal: likewise.
        scale: likewise.
    """
    arguments = q, k, v, _wide(mask), g
    program, kernel = _program(causal and mask is None, scale, *arguments)
    of_q, of_k, of_v = _run(program, arguments, kernel, [out, jnp.swapaxes(sums, 1, 2)])
    return of_q, of_k, of_v


def _wide(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[:, None]


def _program(causal: bool, scale: float, *arguments: Any) -> tuple[ClosedJaxpr, JaxprEqn]:
    """Return the vjp of a block's attention, a program of q, k, v, mask and g, and its equation of the first kernel."""

    def vjp(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, g: jax.Array) -> tuple[jax.Array, ...]:
        run = functools.partial(
            jax.nn.dot_product_attention,
            mask=mask,
            is_causal=causal,
            scale=scale,
            implementation="cudnn",
            return_residual=True,
        )
        (_, sums), pull = jax.vjp(run, q, k, v)
        return pull((g, jnp.zeros_like(sums)))

    program = jax.make_jaxpr(vjp)(*arguments)
    [kernel] = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name.startswith(_FORWARD)]
    return program, kernel


def _run(program: ClosedJaxpr, arguments: Any, kernel: JaxprEqn, given: list[jax.Array] | None) -> list[jax.Array]:
    """Return what a kernel gives in a program; or, given that in its place, what the program does.

    Args:
        program: the program.
        arguments: its arguments, a tree.
        kernel: the kernel's equation.
        given: the kernel's results, in its order; None: it runs.
    """
    jaxpr = program.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, jax.tree.leaves(arguments), strict=True)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        if eqn is kernel and given is not None:
            found = given
        else:
            found = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
            found = list(found) if eqn.primitive.multiple_results else [found]
        if eqn is kernel and given is None:
            return found[:2]
        values |= zip(eqn.outvars, found, strict=True)
    return [read(variable) for variable in jaxpr.outvars]
