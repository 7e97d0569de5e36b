"""Reads the program of a layer: F, B and W are traced inside shard_map over a mesh without devices.

The trace has a prime number of sequences that divides no size of the model. So a size that grows with the micro-batch
is a multiple of it, and one that does not is none.
"""

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from paxtrain.config import ModelConfig
from paxtrain.model import parameters, transformer
from paxtrain.model.context import Dropout
from paxtrain.model.spec import Params
from paxtrain.model.tensor_parallel import WHOLE, Group
from paxtrain.pipeline.residuals import SplitVjp, save_policy
from paxtrain.pipeline.split_backward import SplitBackward
from paxtrain.process.jax_private import without_cudnn
from paxtrain.xla import traced
from planner.program.layer_program import Bytes, LayerCollective, LayerProgram, MatrixProduct, Work

_AXIS = "tensor"
_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093)
# Fused attention by the names of its primitives, and the products that it computes for each head.
_FUSED = {"dot_product_attention_fwd": (1, 1), "dot_product_attention_bwd": (2, 3)}  # that make scores, and others

Counted = TypeVar("Counted", MatrixProduct, LayerCollective)


def read(model: ModelConfig, tensor: int, sequence_parallel: bool, save: str) -> LayerProgram:
    """Return the program of a layer, see planner.program.cache.layer_program."""
    rows = {p.names[1:]: p for p in parameters.table(model) if p.names[0] == "layers"}
    weights = {n: _array(p.shape(model, tensor), model.dtype if p.cast else "float32") for n, p in rows.items()}
    sizes = [size for leaf in weights.values() for size in leaf.shape]
    sizes += [model.sequence, model.heads, model.head_dim, tensor]
    batch = next(prime for prime in _PRIMES if all(size % prime for size in sizes))
    found: list[LayerProgram] = []

    def device(weights: Params, x: jax.Array, index: jax.Array, random: Dropout | None, starts: Any) -> jax.Array:
        found.append(_Reader(batch).layer(model, tensor, sequence_parallel, save, (weights, x, index, random, starts)))
        return x

    mesh = AbstractMesh((tensor,), (_AXIS,), axis_types=(AxisType.Auto,))
    # One device's arrays, as if all devices had the same.
    mapped = jax.shard_map(device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    x = _array((batch, model.sequence // (tensor if sequence_parallel else 1), model.hidden), model.dtype)
    random = Dropout(_array((2,), "uint32"), _array((batch,), "int32")) if model.residual_dropout else None
    starts = _array((batch, model.sequence), "int32") if model.separator >= 0 else None
    with without_cudnn():
        jax.eval_shape(mapped, parameters.tree(weights), x, _array((), "int32"), random, starts)
    return found[0]


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


class _Reader:
    """Reads traces with `batch` sequences, a prime number."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def layer(
        self, model: ModelConfig, tensor: int, sequence_parallel: bool, save: str, arguments: tuple
    ) -> LayerProgram:
        """Return the program of a layer from inside of shard_map.

        Args:
            model: the model.
            tensor: size of the tensor axis.
            sequence_parallel: whether the sequence is split.
            save: PipelineConfig.save.
            arguments: weights, x, the layer's index, the randomness of dropout, and the documents' beginnings.
        """
        group = Group(_AXIS, sequence_parallel) if tensor > 1 else WHOLE
        weights, x, *rest = arguments

        def layer(weights: Params, x: jax.Array, index: jax.Array, random: Dropout | None, starts: Any) -> jax.Array:
            return transformer.layer(weights, x, model, group, random, index, starts)

        vjp = SplitVjp(save_policy(save)(layer), weights, x, *rest)
        split = SplitBackward(vjp, weights, x)
        forward = jax.make_jaxpr(lambda *of_layer: layer(*of_layer, *rest))(weights, x)
        return LayerProgram(
            self._work(forward.jaxpr.eqns),
            self._work(split.input_equations),
            self._work(split.weight_equations),
            self._bytes(vjp.kept),
            self._bytes(split.leaves[len(vjp.kept) :]),
        )

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

    def _work(self, equations: Iterable[Any]) -> Work:
        """Return what equations compute and exchange."""
        products: collections.Counter[MatrixProduct] = collections.Counter()
        attention: collections.Counter[MatrixProduct] = collections.Counter()
        exchanged: collections.Counter[LayerCollective] = collections.Counter()
        for equation, turns in _within(equations, 1):
            name, shapes = equation.primitive.name, [x.aval.shape for x in equation.invars]
            fused = next((kind for kind in _FUSED if name.startswith(kind)), None)
            if fused:
                for one, count in zip(self._attention(*shapes[:2]), _FUSED[fused]):
                    attention[one] += turns * count
            elif name == "dot_general":
                one = self._dot(shapes[0], shapes[1], equation.params["dimension_numbers"])
                # No kernel of a layer has a batch.
                (attention if equation.params["dimension_numbers"][1][0] else products)[one] += turns
            elif name in traced.KINDS:
                size = self._bytes([x.aval for x in equation.invars])
                exchanged[LayerCollective(traced.KINDS[name], _AXIS, size)] += turns
        return Work(_counted(products), _counted(attention), _counted(exchanged))

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


def _counted(found: collections.Counter[Counted]) -> tuple[Counted, ...]:
    return tuple(one._replace(times=count) for one, count in found.items())


def _within(equations: Iterable[Any], turns: int) -> Iterator[tuple[Any, int]]:
    """Yield the equations that call no others, on GPUs, with the number of times that they run."""
    for equation in equations:
        name, params = equation.primitive.name, equation.params
        if name == "cond":
            inner = [branch.jaxpr for branch in traced.branches(params, "cuda")[-1:]]
        else:
            inner = list(core.jaxprs_in_params(params))
        if not inner:
            yield equation, turns
        for jaxpr in inner:
            yield from _within(jaxpr.eqns, turns * params["length"] if name == "scan" else turns)
