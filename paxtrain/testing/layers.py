"""Properties of one layer: what it sees, what it keeps finite, what tensor parallelism changes. One device is enough.

The devices of a tensor group are a vmap with the axis's name, which turns collectives into sums over its dim.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paxtrain.config import MeshConfig, ModelConfig
from paxtrain.config.axes import AXES, TENSOR, UNSPLIT, layer_sizes
from paxtrain.model import parameters, tensor_parallel, transformer
from paxtrain.model.spec import Parameter, Params, Scalars

TOLERANCE = 1e-4  # of the largest value; all is computed in float32
ROUNDING = 1e-3  # a gradient below this part of the largest one may be rounding, as that of a bias of keys
_BATCH = 2


class LayerRun(NamedTuple):
    """A layer's forward and backward: output and scalars, and the gradients of its parameters and of its input."""

    output: jax.Array
    scalars: Scalars
    weights: Params
    input: jax.Array


_Pulled: TypeAlias = Callable[..., LayerRun]


class _CheckedLayer(NamedTuple):
    """A layer to check: its number, its weights and input, and the gradient g of its output."""

    config: ModelConfig
    number: int
    tensor: int
    weights: Params
    x: jax.Array
    g: jax.Array

    def run(self, **changes: jax.Array) -> LayerRun:
        """Return the run of the layer on one device, with changed x or g, or with starts of documents."""
        given = {"x": self.x, "g": self.g} | changes
        return _whole(self.config, self.number)(self.weights, **given)


def random_params(config: ModelConfig) -> Params:
    """Return canonical parameters of which none is zero, so that zeros hide no error."""
    params = transformer.init(config, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def difference(right: ArrayLike, found: ArrayLike, least: float = 0.0) -> float:
    """Return the largest difference of two arrays, over the largest value of the first one; inf if one is not finite.

    Args:
        right: the array that is right.
        found: the other one.
        least: smallest divisor; below it there is rounding only.
    """
    right, found = np.asarray(right), np.asarray(found)
    if not np.isfinite(right).all() or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(right - found).max() / max(np.abs(right).max(), least, 1e-30))


def layer_properties(config: ModelConfig, tensor: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield names and checks of a layer's properties.

    Args:
        config: the model's shape, in float32.
        tensor: devices of a tensor group.
    """
    layers, kinds = random_params(config)["layers"], parameters.kinds(config)
    x, g = jax.random.normal(jax.random.key(2), (2, _BATCH, config.sequence, config.hidden))
    properties: dict[str, Callable[..., None]] = {
        "a layer returns what it is given, in shape and dtype": _shapes,
        "its output and its gradients are finite": _finite,
        "an input of zeros has finite gradients": _zeros,
        "a token sees no later one": _causal,
        "documents do not see each other": _documents,
        "a tensor group computes the same": functools.partial(_split, sequence=False),
        "a tensor group that splits the sequence computes the same": functools.partial(_split, sequence=True),
    }
    for kind in dict.fromkeys(kinds):
        number = kinds.index(kind)
        checked = _CheckedLayer(config, number, tensor, transformer.layer_params(layers, config, number), x, g)
        for name, function in properties.items():
            yield f"{name}{f' ({kind})' if kind else ''}", functools.partial(function, checked)


def _pulled(config: ModelConfig, group: tensor_parallel.Group, number: int) -> _Pulled:
    """Return (weights, x, g, starts) -> LayerRun of one device, with g the gradient of the output.

    The scalars have the gradient 1, but 0 if all of g is.
    """

    kind = parameters.kinds(config)[number]

    def run(weights: Params, x: jax.Array, g: jax.Array, starts: jax.Array | None = None) -> LayerRun:
        def one(weights: Params, x: jax.Array) -> tuple[jax.Array, Scalars]:
            return transformer.layer(weights, x, config, group, None, jnp.int32(number), starts, kind)

        (y, scalars), pull = jax.vjp(one, weights, x)
        ones = jax.tree.map(lambda s: jnp.any(g != 0).astype(s.dtype), scalars)
        return LayerRun(y, scalars, *pull((g, ones)))

    return run


@functools.lru_cache(maxsize=8)
def _whole(config: ModelConfig, number: int) -> _Pulled:
    return jax.jit(_pulled(config, tensor_parallel.WHOLE, number))


def _shapes(checked: _CheckedLayer) -> None:
    transformer.check_layer(checked.config, UNSPLIT, False)


def _require_finite(run: LayerRun) -> None:
    """Require that a layer's output and gradients are finite."""
    for path, value in jax.tree_util.tree_leaves_with_path(run):
        assert np.isfinite(value).all(), f"not finite: {jax.tree_util.keystr(path, simple=True, separator='/')}"


def _finite(checked: _CheckedLayer) -> None:
    _require_finite(checked.run())


def _zeros(checked: _CheckedLayer) -> None:
    """Run it as an idle stage does, whose input and whose output's gradient are zeros."""
    found = checked.run(x=jnp.zeros_like(checked.x), g=jnp.zeros_like(checked.g))
    _require_finite(found)
    assert not any(np.any(w) for w in jax.tree.leaves(found.weights)), "without a gradient weights get one"


def _causal(checked: _CheckedLayer) -> None:
    at, x = checked.config.sequence // 2, checked.x
    one, other = (checked.run(x=x).output for x in (x, x.at[:, at:].set(checked.g[:, at:])))
    error = difference(one[:, :at], other[:, :at])
    assert error <= TOLERANCE, f"later tokens change the output of earlier ones by {error:.2g} of its largest value"


def _documents(checked: _CheckedLayer) -> None:
    at, x = checked.config.sequence // 2, checked.x
    starts = jnp.broadcast_to(jnp.where(jnp.arange(checked.config.sequence) < at, 0, at), x.shape[:2])
    one, other = (checked.run(x=x, starts=starts).output for x in (x, x.at[:, :at].set(checked.g[:, :at])))
    error = difference(one[:, at:], other[:, at:])
    assert error <= TOLERANCE, (
        f"a document changes the output of the next one by {error:.2g} of its largest value; LayerContext.starts says "
        "where each token's document begins"
    )


def _split(checked: _CheckedLayer, sequence: bool) -> None:
    config, number, tensor, weights, x, g = checked
    if tensor == 1 or (sequence and config.sequence % tensor):
        return
    transformer.check_layer(config, layer_sizes({TENSOR: tensor}), sequence)
    known = {p.names[1:]: p for p in parameters.table(config) if p.lead == "layers"}

    mesh = MeshConfig(tensor=tensor, sequence_parallel=sequence)

    def row(path: tuple) -> Parameter:
        return known[tuple(entry.key for entry in path)]

    def parts(path: tuple, w: jax.Array) -> jax.Array:
        place = row(path).split_by(TENSOR)
        return jnp.stack([w] * tensor if place is None else jnp.split(w, tensor, axis=place))

    def joined(path: tuple, w: jax.Array) -> jax.Array:
        """Return a weight's gradient, summed over the devices if it is not split and each has another part of it."""
        p = row(path)
        place = p.split_by(TENSOR)
        if place is None:
            return w.sum(axis=0) if AXES[TENSOR].sums(mesh, p.names, p.own) else w
        return jnp.concatenate(list(w), axis=place)

    def tokens(x: jax.Array) -> jax.Array:
        return jnp.stack(jnp.split(x, tensor, axis=1)) if sequence else jnp.stack([x] * tensor)

    run = jax.jit(jax.vmap(_pulled(config, tensor_parallel.Group(TENSOR, sequence), number), axis_name=TENSOR))
    by_path = jax.tree_util.tree_map_with_path
    found, right = run(by_path(parts, weights), tokens(x), tokens(g)), checked.run()
    found = found._replace(weights=by_path(joined, found.weights))
    right = right._replace(output=tokens(right.output), input=tokens(right.input))
    least = ROUNDING * max(np.abs(g).max() for g in jax.tree.leaves(right.weights))
    of = f"with tensor={tensor}{' and sequence parallelism' if sequence else ''}"
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(right), jax.tree.leaves(found), strict=True):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        error = difference(jnp.broadcast_to(one, other.shape), other, least if where.startswith("weights") else 0)
        assert error <= TOLERANCE, (
            f"{of} {_told(where)} differs by {error:.2g} of its "
            "largest value; a layer calls paxtrain.model.enter before kernels split by columns, and leave behind those "
            "split by rows, whose biases are added behind it"
        )


def _told(where: str) -> str:
    """Return what a leaf of a LayerRun is, by its path."""
    kind, _, name = where.partition("/")
    return {"output": "the output", "scalars": f"its scalar {name}"}.get(kind, f"the gradient of {where}")
