"""The residuals that a forward keeps for its backward, and the backward that reads them.

A vjp of one layer has residuals that can wait in a ring. Its backward is evaluated equation by equation, so that the
matrix products of the weights' gradients add to their accumulators.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from compress.codec import Like, Tree
from paxtrain.config.checks import require
from paxtrain.model import transformer
from paxtrain.model.transformer import Params

# Equations that only call a jaxpr.
_CALLS = ("jit", "remat2", "closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call")

JaxprEnv = dict[core.Var, jax.Array]
Atom = core.Var | core.Literal


def save_policy(save: str) -> Callable[[Callable], Callable]:
    """Return the wrapper that makes the vjp of one layer keep the values of a save mode (PipelineConfig.save)."""
    if save in ("residuals", "inputs"):
        return lambda layer: layer
    if save == "layer_inputs":
        return functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    names = jax.checkpoint_policies.save_only_these_names(*transformer.SAVED_NAMES)

    def keep(primitive: core.Primitive, *args: object, **params: object) -> bool:
        # With its own outputs (context and softmax sums) kept, flash attention's forward does not run twice.
        return primitive.name.startswith("dot_product_attention_fwd") or names(primitive, *args, **params)

    return functools.partial(jax.checkpoint, policy=keep)


class SplitVjp:
    """The `jax.vjp` of function(weights, x, *rest), with residuals that are weights told apart from all others.

    Weights stay in place. Only the other residuals have to be kept from F to B.

    Attributes:
        traced: the jaxpr of F, over the leaves of its arguments; its results are the output and all residuals.
        output: shapes and dtypes of the function's output, a tree.
        kept: shapes and dtypes of the residuals that are not weights.
        traced: jaxpr of F, whose outputs are the function's and all residuals.

    Raises:
        UserError: a copy of a weight would be kept.
    """

    def __init__(self, function: Callable, weights: Params, x: jax.Array, *rest: Tree):
        self._function = function
        where: list[int] = []

        def probe(weights: Params, x: jax.Array, *rest: Tree) -> Tree:
            y, vjp = jax.vjp(lambda w, x: function(w, x, *rest), weights, x)
            ids = {id(w): i for i, w in enumerate(jax.tree.leaves(weights))}
            where.extend(ids.get(id(residual), -1) for residual in jax.tree.leaves(vjp))
            return y, vjp

        self.traced, (self.output, vjp) = jax.make_jaxpr(probe, return_shape=True)(weights, x, *rest)
        leaves, self._treedef = jax.tree.flatten(vjp)
        self._where = where
        self.kept = [leaf for leaf, w in zip(leaves, where) if w < 0]
        kernels = {w.shape for w in jax.tree.leaves(weights) if w.ndim >= 2}
        copies = [x for x in self.kept if x.shape in kernels and jnp.issubdtype(x.dtype, jnp.floating)]
        shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in copies)
        require(
            not copies,
            f"the layer keeps {shown} for its backward, as large as a kernel and once for each "
            "micro-batch; multiply with kernels as they are, or let pipeline.save=dots compute it again",
        )

    def forward(self, weights: Params, x: jax.Array, *rest: Tree) -> tuple[Tree, list[jax.Array]]:
        """Run F of the function.

        Args:
            weights: the function's first argument, differentiated.
            x: its second argument, differentiated.
            rest: its other arguments.

        Returns:
            The output, and the residuals that are not weights.
        """
        y, vjp = jax.vjp(lambda w, x: self._function(w, x, *rest), weights, x)
        return y, [leaf for leaf, w in zip(jax.tree.leaves(vjp), self._where) if w < 0]

    def backward(self, weights: Params, kept: list[jax.Array], g: Tree) -> tuple[Params, jax.Array]:
        """Return the gradients with respect to the weights and to x.

        Args:
            weights: the weights that F was given.
            kept: the residuals that F returned.
            g: gradient of the output, a tree like it.
        """
        flat, rest = jax.tree.leaves(weights), iter(kept)
        leaves = [flat[w] if w >= 0 else next(rest) for w in self._where]
        return jax.tree.unflatten(self._treedef, leaves)(g)

    def backward_jaxpr(self, weights: Params, barriers: bool = False) -> core.ClosedJaxpr:
        """Return the jaxpr of `backward`, over the leaves of the weights, what is kept, and the output's gradient.

        Args:
            weights: the weights that F is given, or their shapes and dtypes.
            barriers: see `run`.
        """
        leaves, structure = jax.tree.flatten((weights, self.kept, self.output))
        flat = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]

        def backward(*flat: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(self.backward(*jax.tree.unflatten(structure, flat)))

        return inlined(backward, flat, barriers)


def value(values: JaxprEnv, atom: Atom) -> jax.Array:
    """Return the value of an atom."""
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def run(equations: Iterable[core.JaxprEqn], values: JaxprEnv, barriers: bool = False) -> None:
    """Evaluate equations in order, calls equation by equation, and add their results to `values`.

    Args:
        equations: the equations.
        values: values of their inputs.
        barriers: whether what jax.checkpoint computes anew stays apart from the first computation, as jax lowers it.
    """
    for equation in equations:
        inputs = [value(values, atom) for atom in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
            if barriers and equation.primitive.name == "remat2":
                inputs = lax.optimization_barrier(inputs)
            made: Tree = evaluate(inner, *inputs, barriers=barriers)
        else:
            made = equation.primitive.bind(*inputs, **equation.params)
        values.update(zip(equation.outvars, made if equation.primitive.multiple_results else [made], strict=True))


def evaluate(jaxpr: core.Jaxpr | core.ClosedJaxpr, *inputs: jax.Array, barriers: bool = False) -> list[jax.Array]:
    """Return the outputs of a jaxpr, closed or without constants.

    Args:
        jaxpr: the jaxpr.
        inputs: its inputs.
        barriers: see `run`.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*getattr(jaxpr, "consts", ()), *inputs], strict=True))
    run(jaxpr.eqns, values, barriers)
    return [value(values, atom) for atom in jaxpr.outvars]


def inlined(function: Callable, arguments: Sequence[Like], barriers: bool = False) -> core.ClosedJaxpr:
    """Return the jaxpr of a function with all equations of its calls in one list.

    Args:
        function: function of flat arrays.
        arguments: arrays, or their shapes and dtypes.
        barriers: see `run`.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    # A second trace inlines the calls.
    return jax.make_jaxpr(functools.partial(evaluate, traced, barriers=barriers))(*arguments)


class _Product(NamedTuple):
    """A matrix product whose result, transposed or not, is the gradient of a weight and nothing else."""

    equation: core.JaxprEqn
    permutation: tuple[int, ...]


class WeightProducts:
    """The gradients of weights that are matrix products: each is added to its accumulator by the product itself.

    A product in the compute dtype would be rounded, written, read and added. One in the accumulator's dtype, with the
    accumulator as its addend, is a single kernel on GPUs, and rounds nothing.

    Attributes:
        numbers: the weights concerned, by the number of their gradient.
        rest: equations without those of the products.
    """

    def __init__(self, equations: list[core.JaxprEqn], gradients: list[Atom], others: Iterable[Atom]) -> None:
        """Find the products.

        Args:
            equations: equations of a backward.
            gradients: gradients of the weights.
            others: other results of the equations.
        """
        maker = {made: i for i, equation in enumerate(equations) for made in equation.outvars}
        uses = [atom for equation in equations for atom in equation.invars] + [*gradients, *others]
        used = {atom: 0 for atom in uses if not isinstance(atom, core.Literal)}
        for atom in uses:
            if not isinstance(atom, core.Literal):
                used[atom] += 1
        self._products: dict[int, _Product] = {}
        skipped: set[int] = set()
        for number, atom in enumerate(gradients):
            chain: list[int] = []
            permutation: tuple[int, ...] = ()  # how the product's dims lie in the gradient; () as they are
            while not isinstance(atom, core.Literal) and atom in maker and used[atom] == 1:
                equation = equations[maker[atom]]
                chain.append(maker[atom])
                if equation.primitive is core.primitives.dot_general_p:
                    self._products[number] = _Product(equation, permutation)
                    skipped.update(chain)
                    break
                if equation.primitive is core.primitives.transpose_p:
                    made = tuple(equation.params["permutation"])
                    permutation = tuple(made[i] for i in permutation) if permutation else made
                elif equation.primitive is not core.primitives.convert_element_type_p:
                    break
                [atom] = equation.invars
        self.numbers = tuple(self._products)
        self.rest = [equation for i, equation in enumerate(equations) if i not in skipped]

    def add(self, number: int, values: JaxprEnv, total: jax.Array) -> jax.Array:
        """Return an accumulator with a product added.

        Args:
            number: number of the gradient.
            values: values of the products' operands.
            total: the accumulator.
        """
        equation, permutation = self._products[number]
        left, right = (value(values, atom) for atom in equation.invars)
        (over_left, over_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
        first, dims = left.ndim - len(over_left) - len(batch_left), tuple(range(total.ndim))
        params = {**equation.params, "preferred_element_type": jnp.dtype(total.dtype)}
        if not batch_left and permutation == dims[first:] + dims[:first]:
            # The other way round the result needs no transpose.
            left, right, permutation = right, left, ()
            params["dimension_numbers"] = ((over_right, over_left), (batch_right, batch_left))
        made = equation.primitive.bind(left, right, **params)
        return total + (lax.transpose(made, permutation) if permutation else made)


class AddingBackward:
    """The backward of a SplitVjp that adds the gradients of the weights to accumulators."""

    def __init__(self, vjp: SplitVjp, weights: Params):
        closed = vjp.backward_jaxpr(weights, barriers=True)
        self._inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        self._constants = closed.consts
        *self._gradients, self._out = closed.jaxpr.outvars
        self._products = WeightProducts(closed.jaxpr.eqns, self._gradients, [self._out])

    @jax.named_scope("layer")
    def __call__(self, weights: Params, kept: list[jax.Array], g: Tree, totals: Params) -> tuple[Params, jax.Array]:
        """Return the accumulators with the gradients of the weights added, and the gradient of x.

        Args:
            weights: the layer's weights.
            kept: the residuals that F returned.
            g: gradient of the layer's output.
            totals: accumulators of the weights' gradients.
        """
        inputs = [*self._constants, *jax.tree.leaves((weights, kept, g))]
        values: JaxprEnv = dict(zip(self._inputs, inputs, strict=True))
        run(self._products.rest, values)
        leaves, structure = jax.tree.flatten(totals)
        for number, total in enumerate(leaves):
            if number in self._products.numbers:
                leaves[number] = self._products.add(number, values, total)
            else:
                leaves[number] = total + value(values, self._gradients[number]).astype(total.dtype)
        return jax.tree.unflatten(structure, leaves), value(values, self._out)
