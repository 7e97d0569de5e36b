"""Reads the program of a layer: F, B and W are traced inside shard_map over a mesh without devices.

The trace has a prime number of sequences that divides no size of the model. So a size that grows with the micro-batch
is a multiple of it, and one that does not is none.
"""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from paxtrain.config import SAVE_MODES, ModelConfig
from paxtrain.config.axes import AXES, TENSOR, AxisSizes, in_words, sequence_parts
from paxtrain.errors import UserError
from paxtrain.model import parameters, transformer
from paxtrain.model.context import Dropout
from paxtrain.model.spec import Params
from paxtrain.model.tensor_parallel import Group
from paxtrain.pipeline.residuals import SplitVjp, save_policy
from paxtrain.pipeline.split_backward import SplitBackward
from paxtrain.process.jax_private import without_cudnn
from paxtrain.xla import traced
from planner.program.layer_program import Bytes, LayerCollective, LayerProgram, MatrixProduct, Work
from planner.program.operations import ATTENTION, Names, Operation, Value, attention, operations
from planner.program.traffic import Traffic

_SAVES = tuple(save for save in SAVE_MODES if save != "inputs")  # which keeps nothing of a layer
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093)

Counted = TypeVar("Counted", MatrixProduct, LayerCollective)


def read(model: ModelConfig, mesh: AxisSizes, sequence_parallel: bool, kind: str) -> dict[str, LayerProgram]:
    """Return the program of a layer of a kind by save mode, see planner.program.cache.layer_program.

    The layer is traced once for all save modes: its Python takes a third of the time.

    Raises:
        UserError: the layer of an architecture of one's own cannot be traced, or returns another shape or dtype.
    """
    transformer.check_layer(model, mesh, sequence_parallel)
    rows = parameters.of_kind(model, kind)
    weights = {p.names[1:]: _array(p.shape(model, mesh), model.dtype if p.cast else "float32") for p in rows}
    known = [size for leaf in weights.values() for size in leaf.shape]
    known += [model.sequence, model.heads, model.head_dim, *mesh.values()]
    batch = next(prime for prime in _PRIMES if all(size % prime for size in known))
    found: dict[str, LayerProgram] = {}

    def device(weights: Params, x: jax.Array, index: jax.Array, random: Dropout | None, starts: Any) -> jax.Array:
        group, arguments = Group.of(mesh, sequence_parallel), (weights, x, index, random, starts)

        def layer(weights: Params, x: jax.Array, index: jax.Array, random: Dropout | None, starts: Any) -> Any:
            return transformer.layer(weights, x, model, group, random, index, starts, kind)

        once, made = jax.make_jaxpr(layer, return_shape=True)(*arguments)
        structure = jax.tree.structure(made)

        def traced_layer(*arguments: Any) -> Any:
            return jax.tree.unflatten(structure, core.jaxpr_as_fun(once)(*jax.tree.leaves(arguments)))

        reader = _Reader(batch, bool(model.module))
        found.update({save: reader.layer(save_policy(save)(traced_layer), arguments) for save in _SAVES})
        return x

    sizes = tuple(mesh.get(axis, 1) for axis in AXES)
    devices = AbstractMesh(sizes, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))
    # One device's arrays, as if all devices had the same.
    mapped = jax.shard_map(device, mesh=devices, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    parts = sequence_parts(mesh) * (mesh[TENSOR] if sequence_parallel else 1)
    x = _array((batch, model.sequence // parts, model.hidden), model.dtype)
    random = Dropout(_array((2,), "uint32"), _array((batch,), "int32")) if model.residual_dropout else None
    starts = _array((batch, model.sequence), "int32") if model.separator >= 0 else None
    try:
        with without_cudnn():
            jax.eval_shape(mapped, parameters.tree(weights), x, _array((), "int32"), random, starts)
    except Exception as error:
        if not model.module:
            raise
        raise UserError(
            f"model.module={model.module}: tracing its layer for {in_words({TENSOR: 1} | mesh)} raises "
            f"{type(error).__name__}: {error}"
        ) from error
    return found


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


class _Reader:
    """Reads traces with `batch` sequences, a prime number, and their passes if they count.

    The passes of the families are counted by hand (planner/cost/compute.py), since constants are fitted with them.
    """

    def __init__(self, batch: int, passes: bool) -> None:
        self._batch, self._passes = batch, passes

    def layer(self, layer: Callable[..., Any], arguments: tuple) -> LayerProgram:
        """Return the program of a layer from inside of shard_map.

        Args:
            layer: the layer, which keeps what its save mode keeps.
            arguments: its weights and x, its index, the randomness of dropout, and the documents' beginnings.
        """
        weights = arguments[0]
        vjp = SplitVjp(layer, *arguments)
        split = SplitBackward(vjp, weights)
        made: Names = {}
        first = vjp.traced.jaxpr
        forward = list(operations(first.eqns, made))
        known: Names = {}
        backward, last = (list(operations(some, known)) for some in (split.input_equations, split.weight_equations))
        # W makes some of what B makes once more, if it is apart.
        again = {value for one in last for value in one.makes}
        left = [value for one in last for value in one.reads if value not in again]
        both = {id(one) for one in split.input_equations}
        joined = [*backward, *operations([one for one in split.weight_equations if id(one) not in both], known)]
        return LayerProgram(
            self._work(forward, [made[x] for x in first.outvars if isinstance(x, core.Var) and x in made]),
            self._work(backward, left),
            self._work(last),
            self._bytes(vjp.kept),
            self._bytes(split.leaves[len(vjp.kept) :]),
            self._moved(joined)[0],
        )

    def _moved(self, program: Sequence[Operation], results: Iterable[Value] = ()) -> tuple[Bytes, tuple[str, ...]]:
        """Return the bytes that passes move, and the names of unknown primitives.

        Args:
            program: the operations.
            results: results besides those that no operation reads.
        """
        if not self._passes:
            return Bytes(0, 0), ()
        passes = Traffic(program, self._batch, results)
        found = [(self._bytes([array]), times) for array, times in passes.moved]
        moved = Bytes(sum(size.fixed * times for size, times in found), sum(size.each * times for size, times in found))
        return moved, passes.unknown

    def _bytes(self, arrays: Iterable[Any]) -> Bytes:
        """Return the bytes of arrays."""
        sizes = [(math.prod(x.shape), jnp.dtype(x.dtype).itemsize) for x in arrays]
        fixed = sum(size * item for size, item in sizes if size % self._batch)
        return Bytes(fixed, sum(size // self._batch * item for size, item in sizes if size % self._batch == 0))

    def _product(self, m: int, n: int, k: int, batch: int = 1) -> MatrixProduct:
        one = MatrixProduct(m, n, k, batch)
        grows = [name for name in ("m", "n", "k", "batch") if getattr(one, name) % self._batch == 0]
        if not grows:
            return one
        [name] = grows
        return one._replace(grows=name, **{name: getattr(one, name) // self._batch})

    def _work(self, program: Sequence[Operation], results: Iterable[Value] = ()) -> Work:
        """Return what operations compute, exchange and move.

        Args:
            program: the operations.
            results: results besides those that no operation reads.
        """
        products: collections.Counter[MatrixProduct] = collections.Counter()
        batched: collections.Counter[MatrixProduct] = collections.Counter()
        fused: collections.Counter[MatrixProduct] = collections.Counter()
        exchanged: collections.Counter[LayerCollective] = collections.Counter()
        for name, equation, turns, *_ in program:
            if equation is None:
                continue
            shapes, params = [x.aval.shape for x in equation.invars], equation.params
            if kind := attention(name):
                # A mask that follows the order of tokens leaves half of the scores, which are counted whole.
                whole = 1 + ("CAUSAL" not in str(params["mask_type"]))
                for one, count in zip(self._attention(*shapes[:2]), ATTENTION[kind]):
                    fused[one] += turns * count * whole
            elif name == "dot_general":
                one = self._dot(shapes[0], shapes[1], params["dimension_numbers"])
                (batched if params["dimension_numbers"][1][0] else products)[one] += turns
            elif name == "conv_general_dilated":
                products[self._convolution(equation)] += turns
            elif name in traced.KINDS:
                size = self._bytes([x.aval for x in equation.invars])
                exchanged[LayerCollective(traced.KINDS[name], _in_order(traced.axes(params)), size)] += turns
        moved, unknown = self._moved(program, results)
        return Work(_counted(products), _counted(batched), _counted(fused), _counted(exchanged), moved, unknown)

    def _attention(self, queries: Sequence[int], keys: Sequence[int]) -> tuple[MatrixProduct, MatrixProduct]:
        """Return the products that make scores [S, S] and contexts [S, D], of queries [B, S, N, D]."""
        batch, length, heads, dim = queries
        others = keys[1]
        return self._product(length, others, dim, batch * heads), self._product(length, dim, others, batch * heads)

    def _dot(self, left: Sequence[int], right: Sequence[int], dims: Any) -> MatrixProduct:
        """Return the product of a dot_general."""
        (over, _), (together, _) = dims
        k, batch = (math.prod(left[i] for i in some) for some in (over, together))
        return self._product(math.prod(left) // (k * batch), math.prod(right) // (k * batch), k, batch)

    def _convolution(self, equation: Any) -> MatrixProduct:
        """Return the product that a convolution is, whose rows are windows of its input."""
        groups, numbers = equation.params["feature_group_count"], equation.params["dimension_numbers"]
        kernel, made = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
        features = kernel[numbers.rhs_spec[0]]
        return self._product(math.prod(made) // features, features // groups, math.prod(kernel) // features, groups)


def _in_order(axes: Sequence[str]) -> tuple[str, ...]:
    """Return mesh axes in the order of the mesh."""
    return tuple(axis for axis in AXES if axis in axes)


def _counted(found: collections.Counter[Counted]) -> tuple[Counted, ...]:
    return tuple(one._replace(times=count) for one, count in found.items())
