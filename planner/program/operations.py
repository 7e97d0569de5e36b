"""The operations of a traced program, those of its calls and loops as well, and what its primitives are to a GPU."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend import core

from paxtrain.xla import traced


def _named(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _named(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh axis_index broadcast_in_dim cbrt ceil clamp clz
    complex conj convert_element_type copy copy_p cos cosh device_put digamma div empty2 eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt imag integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or platform_index polynomial population_count pow random_bits random_fold_in random_seed real
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub
    tan tanh threefry2x32 xor"""
)
COSTLY = _named("cos div erf exp exp2 expm1 log log1p logistic pow rsqrt sin sqrt tan tanh")  # not computed twice
REDUCTIONS = _named("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
PARTS = _named("concatenate dynamic_slice gather pad rev slice split stack unstack")  # they read no more than they make
VIEWS = _named(
    """bitcast_convert_type expand_dims name optimization_barrier pcast pvary random_unwrap random_wrap reduce_precision
    reshape sharding_constraint squeeze stop_gradient transpose"""
)
PRODUCTS = _named("conv_general_dilated dot_general")
WHOLE = _named("cumlogsumexp cummax cummin cumprod cumsum sort top_k")  # kernels by themselves that read and write all
UPDATES = {"dynamic_update_slice": (1, 2), "scatter": (2, 3), "scatter-add": (2, 3)}  # operand, and times it travels
# Fused attention by the names of its primitives, and the products that it computes for each head.
ATTENTION = {"dot_product_attention_fwd": (1, 1), "dot_product_attention_bwd": (2, 3)}  # that make scores, and others
_CALLS = _named(
    "checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr jit named_call pjit remat2"
)
_LOOP, _END = "the loop", "the end of its turn"
PASSES = ELEMENTWISE | REDUCTIONS | PARTS


def attention(name: str) -> str | None:
    """Return the key of ATTENTION of a primitive, or None."""
    return next((kind for kind in ATTENTION if name.startswith(kind)), None)


def is_known(name: str) -> bool:
    """Return whether it is known what a primitive is to a GPU."""
    known = (PASSES, VIEWS, PRODUCTS, WHOLE, UPDATES, traced.KINDS, (_LOOP, _END))
    return any(name in some for some in known) or attention(name) is not None


class Value:
    """A value of a program, by its identity.

    Attributes:
        aval: its shape and dtype.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval

    @property
    def size(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize if hasattr(self.aval, "dtype") else 0


Names = dict[Any, Value]


class Operation(NamedTuple):
    """An equation that calls no other.

    Attributes:
        name: name of its primitive.
        equation: the equation; None at the end of a loop's turn.
        turns: number of times that it runs.
        reads: what it reads, without literals.
        makes: what it makes.
    """

    name: str
    equation: Any
    turns: int
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]


def operations(equations: Iterable[Any], names: Names, turns: int = 1) -> Iterator[Operation]:
    """Yield the operations that equations run on GPUs, those of calls and loops as well.

    Args:
        equations: equations of a jaxpr.
        names: the values of variables, to which those that they make are added.
        turns: number of times that they run.
    """

    def look(atoms: Iterable[Any], known: Names) -> tuple[Value, ...]:
        named = [atom for atom in atoms if not isinstance(atom, core.Literal)]
        return tuple(known.setdefault(atom, Value(atom.aval)) for atom in named)

    for equation in equations:
        name, params = equation.primitive.name, equation.params
        inner: Any = None
        given = equation.invars
        if name == "cond":
            inner, given = traced.branches(params, "cuda")[-1].jaxpr, given[1:]
        elif name in _CALLS:
            inner = next(iter(core.jaxprs_in_params(params)))
        if inner is not None:
            own = {v: look([a], names)[0] for v, a in zip(inner.invars, given) if not isinstance(a, core.Literal)}
            yield from operations(inner.eqns, own, turns)
            for made, result in zip(equation.outvars, inner.outvars):
                names[made] = own.get(result, Value(made.aval)) if isinstance(result, core.Var) else Value(made.aval)
            continue
        reads, makes = look(equation.invars, names), look(equation.outvars, names)
        if name in ("scan", "while"):
            body = params["jaxpr" if name == "scan" else "body_jaxpr"].jaxpr
            within: Names = {}
            often = turns * params.get("length", 1)
            yield from operations(body.eqns, within, often)
            yield Operation(_END, None, often, look(body.outvars, within), ())
            name = _LOOP
        yield Operation(name, equation, turns, reads, makes)
