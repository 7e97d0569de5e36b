"""A layer's backward in two: B, the gradient of its input, and W, the matrix products that only its weights need.

The jaxpr of the backward is cut in two. W has the matrix products that the gradient of the input does not need, and the
equations that use their results. B has all other equations: every collective, and the gradients of norms and biases.

B leaves for W the operands that depend on the incoming gradient. W recomputes its other operands from the residuals of
F. Operands whose recomputation takes a matrix product or a collective are the exception: B leaves these, too. So no
matrix product runs twice, and W waits for no other device. The values that B leaves take the places of residuals that W
does not read, as far as shapes agree.

References:
    Qi et al. 2023, Zero Bubble Pipeline Parallelism.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import core

from compress.codec import Tree
from paxtrain.model.transformer import Params
from paxtrain.pipeline.residuals import AddingBackward, SplitVjp, WeightProducts, run, value


class SplitBackward:
    """The backward of a SplitVjp as B and W.

    Attributes:
        leaves: shapes of the values that wait for W: the residuals of F, then those values of B that find no place
            among them.
        late: numbers of the weights (leaves of their tree) whose gradients W computes. B computes all others.
        free: numbers of the residuals of F that W does not read.
        left: shapes of the values that B leaves for W.
        input_equations: equations of B.
        weight_equations: equations of W; some of B's, which W runs again, are among them.

    Raises:
        AssertionError: W would have a collective.
    """

    def __init__(self, vjp: SplitVjp, weights: Params):
        closed = vjp.backward_jaxpr(weights)
        self._constants = dict(zip(closed.constvars, closed.consts, strict=True))
        flat = iter(closed.invars)
        parts = jax.tree.leaves(weights), vjp.kept, jax.tree.leaves(vjp.output)
        self._weights, self._kept, self._g = (list(itertools.islice(flat, len(part))) for part in parts)
        *self._gradients, self._out = closed.outvars
        self._cut(closed.eqns)
        self._place(vjp.kept)

    def _cut(self, equations: list[core.JaxprEqn]) -> None:
        """Divide the equations into those of B and those of W, and find what B leaves for W."""
        maker = {made: i for i, equation in enumerate(equations) for made in equation.outvars}

        def inputs(i: int) -> list[core.Var]:
            return [atom for atom in equations[i].invars if not isinstance(atom, core.Literal)]

        def needed(atoms: Iterable[core.Var | core.Literal]) -> set[int]:
            found: set[int] = set()
            todo = [maker[a] for a in atoms if not isinstance(a, core.Literal) and a in maker]
            while todo:
                if (i := todo.pop()) not in found:
                    found.add(i)
                    todo += [maker[a] for a in inputs(i) if a in maker]
            return found

        def product(i: int) -> bool:
            return equations[i].primitive is core.primitives.dot_general_p

        alive, chain = needed([*self._gradients, self._out]), needed([self._out])
        late: set[int] = set()
        incoming = set(self._g)  # values that depend on the incoming gradient
        for i in sorted(alive):
            if (product(i) and i not in chain) or any(maker.get(a) in late for a in inputs(i)):
                late.add(i)
            if any(a in incoming for a in inputs(i)):
                incoming.update(equations[i].outvars)
        assert not any(equations[i].effects for i in late), "the weights' gradients have a collective"

        again: set[int] = set()
        left: dict[core.Var, None] = {}
        todo = [a for i in sorted(late, reverse=True) for a in inputs(i) if maker.get(a) not in late]
        while todo:
            a = todo.pop()
            made = maker.get(a)
            if a in incoming or (made is not None and (product(made) or equations[made].effects)):
                left[a] = None
            elif made is not None and made not in again:
                again.add(made)
                todo += inputs(made)
        self._left = list(left)
        self.late = tuple(n for n, a in enumerate(self._gradients) if maker.get(a) in late)
        early = [a for n, a in enumerate(self._gradients) if n not in self.late]
        self.input_equations = [equations[i] for i in sorted(needed([self._out, *early, *self._left]))]
        of_weights = [self._gradients[n] for n in self.late]
        self.weight_equations = [equations[i] for i in sorted(late | again)]
        self._w = WeightProducts(self.weight_equations, of_weights, [])

    def _place(self, kept: list[jax.ShapeDtypeStruct]) -> None:
        """Assign a leaf to each value that B leaves."""
        read = {
            atom for equation in self.weight_equations for atom in equation.invars if not isinstance(atom, core.Literal)
        }
        self.free = [n for n, variable in enumerate(self._kept) if variable not in read]
        avals = [variable.aval for variable in self._left]
        self.left = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals if isinstance(a, jax.core.ShapedArray)]
        self.leaves, self._places = placed(kept, self.free, self.left)

    def input_gradient(
        self, weights: Params, leaves: list[jax.Array], g: Tree
    ) -> tuple[jax.Array, dict[int, jax.Array], dict[int, jax.Array]]:
        """Run B.

        Args:
            weights: the layer's weights.
            leaves: the residuals that F kept; leaves after them are not read.
            g: gradient of the layer's output.

        Returns:
            The gradient of x; the gradients of the weights that are not `late`, by number; and the leaves that change,
            by number.
        """
        values = self._constants | dict(zip(self._weights, jax.tree.leaves(weights), strict=True))
        values |= dict(zip(self._kept, leaves))
        values |= dict(zip(self._g, jax.tree.leaves(g), strict=True))
        run(self.input_equations, values)
        early = {n: value(values, a) for n, a in enumerate(self._gradients) if n not in self.late}
        left = {place: values[variable] for place, variable in zip(self._places, self._left, strict=True)}
        # B reads some of the places that it overwrites. The barrier orders the writes after the reads; without it XLA
        # copies the ring.
        return lax.optimization_barrier((value(values, self._out), early, left))

    def weight_gradients(
        self, weights: Params, leaves: list[jax.Array], totals: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        """Run W. Return the accumulators of the `late` weights with their gradients added, by number.

        Args:
            weights: the layer's weights.
            leaves: the leaves after B has changed them.
            totals: accumulators, by number.
        """
        values = self._constants | dict(zip(self._weights, jax.tree.leaves(weights), strict=True))
        values |= dict(zip(self._kept, leaves))
        values |= {variable: leaves[place] for place, variable in zip(self._places, self._left, strict=True)}
        run(self._w.rest, values)
        added = dict(totals)
        for place, n in enumerate(self.late):
            if place in self._w.numbers:
                added[n] = self._w.add(place, values, totals[n])
            else:
                added[n] = totals[n] + values[self._gradients[n]].astype(totals[n].dtype)
        return added


def placed(
    kept: Sequence[jax.ShapeDtypeStruct], free: Sequence[int], left: Sequence[jax.ShapeDtypeStruct]
) -> tuple[list[jax.ShapeDtypeStruct], list[int]]:
    """Return the values that wait for W, and the place among them of each that B leaves.

    Args:
        kept: shapes of the residuals of F.
        free: numbers of those that W does not read.
        left: shapes of the values that B leaves.
    """
    leaves, free, places = list(kept), list(free), []
    for one in left:
        fits = [n for n in free if (kept[n].shape, kept[n].dtype) == (one.shape, one.dtype)]
        places.append(fits[0] if fits else len(leaves))
        if fits:
            free.remove(fits[0])
        else:
            leaves.append(one)
    return leaves, places


class TracedLayer(NamedTuple):
    """A layer of one kind: F and the backward, whole or in two parts.

    Attributes:
        vjp: F, and what it keeps.
        split: B and W; None if the schedule does not split the backward.
        adding: the whole backward.
        weights: shapes and dtypes of its weights.
    """

    vjp: SplitVjp
    split: SplitBackward | None
    adding: AddingBackward
    weights: Params

    @property
    def leaves(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what waits in a ring."""
        return self.split.leaves if self.split else self.vjp.kept
