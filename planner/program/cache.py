"""The programs of layers, kept on disk under a name that stands for everything that they follow from.

Reading one takes a tenth of a second, and jax.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata

from paxtrain import files
from paxtrain.config import ModelConfig
from paxtrain.config.axes import TENSOR, AxisSizes, sequence_parts
from paxtrain.errors import UserError
from paxtrain.model import parameters
from planner.program.layer_program import Bytes, LayerCollective, LayerProgram, MatrixProduct, Work

_OUTSIDE = ("padded_vocab", "vocab")  # sizes of a model that its layers do not have
_SOURCES = ("compress/collectives.py", "paxtrain/attention", "paxtrain/model", "paxtrain/pipeline")


@functools.lru_cache(maxsize=4096)
def layer_program(
    model: ModelConfig, mesh: AxisSizes, sequence_parallel: bool, save: str, kind: str | None = None
) -> LayerProgram:
    """Return the program of a layer of a model.

    Args:
        model: model whose attention is settled, see parameters.with_attention.
        mesh: sizes of the axes that split layers; they divide the model.
        sequence_parallel: MeshConfig.sequence_parallel.
        save: PipelineConfig.save, except "inputs", which keeps nothing of a layer; its F and B are those of
            "residuals", and F runs twice.
        kind: the layer's kind; None: all layers are alike.

    Raises:
        UserError: an axis does not divide the model.
    """
    sequence_parallel = bool(sequence_parallel) and TENSOR in mesh
    for axis, n in mesh.items():
        own = {"sequence": model.sequence // sequence_parts(mesh)} if sequence_parallel and axis == TENSOR else {}
        sizes = model.split_by(axis) | own
        if wrong := [f"model.{name}={size}" for name, size in sizes.items() if size % n and name not in _OUTSIDE]:
            raise UserError(f"a {axis} axis of {n} devices cannot split {' and '.join(wrong)}; a divisor could")
    if not model.module:  # which has as many layers as one likes
        model = dataclasses.replace(model, layers=1)
    if kind is None:
        [kind] = set(parameters.kinds(model))
    return _programs(model, mesh, sequence_parallel, kind)[save]


@functools.lru_cache(maxsize=1024)
def _programs(model: ModelConfig, mesh: AxisSizes, sequence_parallel: bool, kind: str) -> dict[str, LayerProgram]:
    """Return the program of a layer of a kind by save mode."""
    key = [
        dataclasses.asdict(model),
        mesh,
        mesh.form,
        repr(mesh.codec),
        sequence_parallel,
        importlib.metadata.version("jax"),
        _fingerprint(),
    ]
    path = files.kept_file("programs", key)
    with contextlib.suppress(ValueError, TypeError, AttributeError):  # somebody else's value
        if (stored := files.kept(path)) is not None:
            return {save: _parse(values) for save, values in stored.items()}
    from planner.program import reading  # here, since it imports jax, which takes long

    found = reading.read(model, mesh, sequence_parallel, kind)
    if not model.module:  # whose source may change unseen
        files.keep(path, found)
    return found


@functools.cache
def _fingerprint() -> str:
    return files.fingerprint(*_SOURCES, "planner/program")


def _parse(values: list) -> LayerProgram:
    forward, backward, weights, *sizes = values
    kept, left, moved = (Bytes(*size) for size in sizes)
    return LayerProgram(_work(forward), _work(backward), _work(weights), kept, left, moved)


def _work(values: list) -> Work:
    products, attention, fused, collectives, moved, unknown = values
    exchanged = (LayerCollective(kind, tuple(axes), Bytes(*size), count) for kind, axes, size, count in collectives)
    return Work(
        _products(products), _products(attention), _products(fused), tuple(exchanged), Bytes(*moved), tuple(unknown)
    )


def _products(values: list) -> tuple[MatrixProduct, ...]:
    return tuple(MatrixProduct(*one) for one in values)
