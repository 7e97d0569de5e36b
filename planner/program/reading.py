"""Reads the program of a layer: F, B and W are traced inside shard_map over a mesh without devices.

The trace has a prime number of sequences that divides no size of the model. So a size that grows with the micro-batch
is a multiple of it, and one that does not is none.

One trace of a family's layer serves tensor groups of all sizes. It has a prime number of devices, and each of them has
all that the group splits, times another prime. A size is then divided by the group's size as often as by the second
prime, and multiplied with it as often as it can be divided by the first one: a sequence gathered of its parts.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from paxtrain.config import SAVE_MODES, ModelConfig
from paxtrain.config.axes import AXES, TENSOR, UNSPLIT, AxisSizes, in_words, sequence_parts
from paxtrain.errors import UserError
from paxtrain.model import parameters, transformer
from paxtrain.model.context import Dropout
from paxtrain.model.spec import Params
from paxtrain.model.tensor_parallel import Group
from paxtrain.pipeline.residuals import SplitVjp, save_policy
from paxtrain.pipeline.split_backward import SplitBackward, placed
from paxtrain.process.jax_private import without_cudnn
from paxtrain.xla import traced
from planner.program.layer_program import Bytes, LayerCollective, LayerProgram, MatrixProduct, Work
from planner.program.operations import ATTENTION, Names, Operation, Value, attention, operations
from planner.program.traffic import Traffic

_SAVES = tuple(save for save in SAVE_MODES if save != "inputs")  # which keeps nothing of a layer
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093)
_FEW = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)  # a reduce-scatter for CPUs has an operation for each device
_FACTORS = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149)

Counted = TypeVar("Counted", MatrixProduct, LayerCollective)


class _Primes(NamedTuple):
    """The primes of a trace.

    Attributes:
        batch: number of sequences.
        devices: devices of the tensor group, or 1 if the trace serves groups of one size.
        parts: factor of all that a device has of what the group splits, or 1.
    """

    batch: int
    devices: int = 1
    parts: int = 1


class _Trace(NamedTuple):
    """A traced layer in one save mode.

    Attributes:
        forward: operations of F.
        results: what F makes.
        backward: operations of B, if W is apart.
        left: what B leaves for W.
        weights: operations of W.
        joined: operations of B and W, if W is not apart.
        kept: shapes of what F leaves for B.
        split: B and W, with the shapes of what waits for W.
    """

    forward: list[Operation]
    results: list[Value]
    backward: list[Operation]
    left: list[Value]
    weights: list[Operation]
    joined: list[Operation]
    kept: list[jax.ShapeDtypeStruct]
    split: SplitBackward


def read(model: ModelConfig, mesh: AxisSizes, sequence_parallel: bool, kind: str) -> dict[str, LayerProgram]:
    """Return the program of a layer of a kind by save mode, see planner.program.cache.layer_program.

    Raises:
        UserError: the layer of an architecture of one's own cannot be traced, or returns another shape or dtype.
    """
    transformer.check_layer(model, mesh, sequence_parallel)
    primes = _primes(model, mesh, sequence_parallel, kind)
    on = AxisSizes({TENSOR: primes.devices}) if primes.devices > 1 else mesh
    reader = _Reader(primes, mesh.get(TENSOR, 1), bool(model.module))
    return {save: reader.layer(one) for save, one in _traces(model, on, sequence_parallel, kind, primes).items()}


def _primes(model: ModelConfig, mesh: AxisSizes, sequence_parallel: bool, kind: str) -> _Primes:
    """Return the primes of a trace that serves tensor groups of all sizes, or of one that serves a mesh alone.

    Layers of families see the group's size by their arrays alone, with one exception: a window is none if the sequence
    is shorter.
    """
    rows, architecture = parameters.of_kind(model, kind), parameters.architecture(model)
    known = {size for p in rows for size in (*p.shape(model), *p.shape(model, mesh))}
    known |= {model.sequence, model.heads, model.head_dim, *mesh.values()}
    batch, *few = (next(n for n in primes if all(size % n for size in known)) for primes in (_PRIMES, _FEW, _FACTORS))
    windows = any(architecture.option(model, name) for name in architecture.reach)
    if model.module or mesh.keys() != {TENSOR} or (sequence_parallel and windows):
        return _Primes(batch)
    return _Primes(batch, *few) if model.sequence * math.prod(few) < 2**31 else _Primes(batch)


@functools.lru_cache(maxsize=8)
def _traces(
    model: ModelConfig, mesh: AxisSizes, sequence_parallel: bool, kind: str, primes: _Primes
) -> dict[str, _Trace]:
    """Return the traced layer by save mode.

    The layer is traced once for all save modes: its Python takes a third of the time.
    """
    rows, marked = parameters.of_kind(model, kind), primes.devices > 1
    weights = {}
    for p in rows:
        shape = list(p.shape(model, UNSPLIT if marked else mesh))
        if marked and (place := p.split_by(TENSOR)) is not None:
            shape[place] *= primes.parts
        weights[p.names[1:]] = _array(tuple(shape), model.dtype if p.cast else "float32")
    found: dict[str, _Trace] = {}

    def device(weights: Params, x: jax.Array, index: jax.Array, random: Dropout | None, starts: Any) -> jax.Array:
        group = Group.of(mesh, sequence_parallel, mesh.form, mesh.codec)
        arguments = weights, x, index, random, starts

        def layer(weights: Params, x: jax.Array, index: jax.Array, random: Dropout | None, starts: Any) -> Any:
            return transformer.layer(weights, x, model, group, random, index, starts, kind)

        once, made = jax.make_jaxpr(layer, return_shape=True)(*arguments)
        structure = jax.tree.structure(made)

        def traced_layer(*arguments: Any) -> Any:
            return jax.tree.unflatten(structure, core.jaxpr_as_fun(once)(*jax.tree.leaves(arguments)))

        found.update({save: _trace(save_policy(save)(traced_layer), arguments) for save in _SAVES})
        return x

    sizes = tuple(mesh.get(axis, 1) for axis in AXES)
    devices = AbstractMesh(sizes, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))
    # One device's arrays, as if all devices had the same.
    mapped = jax.shard_map(device, mesh=devices, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    whole = model.sequence * (primes.parts * primes.devices if sequence_parallel else 1)
    length = whole // sequence_parts(mesh) // (mesh[TENSOR] if sequence_parallel else 1)
    x = _array((primes.batch, length, model.hidden), model.dtype)
    random = None
    if model.residual_dropout:
        random = Dropout(_array((2,), "uint32"), _array((primes.batch,), "int32"))
    starts = _array((primes.batch, whole), "int32") if model.separator >= 0 else None
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


def _trace(layer: Callable[..., Any], arguments: tuple) -> _Trace:
    """Return what a layer does, from inside of shard_map.

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
    both = {id(one) for one in split.input_equations}
    return _Trace(
        forward=forward,
        results=[made[x] for x in first.outvars if isinstance(x, core.Var) and x in made],
        backward=backward,
        left=[value for one in last for value in one.reads if value not in again],
        weights=last,
        joined=[*backward, *operations([one for one in split.weight_equations if id(one) not in both], known)],
        kept=vjp.kept,
        split=split,
    )


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


class _Reader:
    """Reads traces for a tensor group, and their passes if they count.

    The passes of the families are counted by hand (planner/cost/compute.py), since constants are fitted with them.
    """

    def __init__(self, primes: _Primes, devices: int, passes: bool) -> None:
        self._primes, self._batch, self._devices, self._passes = primes, primes.batch, devices, passes
        self._sizes: dict[int, int] = {}

    def layer(self, one: _Trace) -> LayerProgram:
        """Return the program of a traced layer."""
        kept, left = ([self._array(x) for x in some] for some in (one.kept, one.split.left))
        leaves, _ = placed(kept, one.split.free, left)
        return LayerProgram(
            self._work(one.forward, one.results),
            self._work(one.backward, one.left),
            self._work(one.weights),
            self._bytes(kept),
            self._bytes(leaves[len(kept) :]),
            self._moved(one.joined)[0],
        )

    def _array(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype that an array of the trace has in the group."""
        return jax.ShapeDtypeStruct(self._shape(x), x.dtype)

    def _shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape that an array of the trace has in the group."""
        return tuple(map(self._size, x.shape)) if self._primes.devices > 1 else x.shape

    def _size(self, size: int) -> int:
        """Return what a size of the trace is in the group."""
        if size not in self._sizes:
            found, divisor = size, 1
            while found and found % self._primes.parts == 0:
                found, divisor = found // self._primes.parts, divisor * self._devices
            while found and found % self._primes.devices == 0:
                found = found // self._primes.devices * self._devices
            self._sizes[size], rest = divmod(found, divisor)
            assert not rest, f"{size} of the trace does not divide by {divisor}"
        return self._sizes[size]

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
        sizes = [(math.prod(self._shape(x)), jnp.dtype(x.dtype).itemsize) for x in arrays]
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
            params = equation.params
            if kind := attention(name):
                # A mask that follows the order of tokens leaves half of the scores, which are counted whole.
                whole = 1 + ("CAUSAL" not in str(params["mask_type"]))
                for one, count in zip(self._attention(*self._operands(equation)), ATTENTION[kind]):
                    fused[one] += turns * count * whole
            elif name == "dot_general":
                one = self._dot(*self._operands(equation), params["dimension_numbers"])
                (batched if params["dimension_numbers"][1][0] else products)[one] += turns
            elif name == "conv_general_dilated":
                products[self._convolution(equation)] += turns
            elif name in traced.KINDS:
                size = self._bytes([x.aval for x in equation.invars])
                exchanged[LayerCollective(traced.KINDS[name], _in_order(traced.axes(params)), size)] += turns
        moved, unknown = self._moved(program, results)
        return Work(_counted(products), _counted(batched), _counted(fused), _counted(exchanged), moved, unknown)

    def _operands(self, equation: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of an equation's first two operands."""
        first, second, *_ = equation.invars
        return self._shape(first.aval), self._shape(second.aval)

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
        kernel, made = self._shape(equation.invars[1].aval), self._shape(equation.outvars[0].aval)
        features = kernel[numbers.rhs_spec[0]]
        return self._product(math.prod(made) // features, features // groups, math.prod(kernel) // features, groups)


def _in_order(axes: Sequence[str]) -> tuple[str, ...]:
    """Return mesh axes in the order of the mesh."""
    return tuple(axis for axis in AXES if axis in axes)


def _counted(found: collections.Counter[Counted]) -> tuple[Counted, ...]:
    return tuple(one._replace(times=count) for one, count in found.items())
