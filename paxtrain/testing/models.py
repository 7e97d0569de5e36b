"""A model on meshes and schedules against one device, and its state that is read again."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paxtrain.config import Config, ModelConfig, from_dict
from paxtrain.model import parameters, transformer
from paxtrain.model.spec import Params, Scalars
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.schedule.schedules import SPECS
from paxtrain.testing.layers import ROUNDING, TOLERANCE, difference, layer_properties, random_params

MESHES = ((2, 2, 2),)
SCHEDULES = ("eager_1f1b", "zb_h1")
_SMALL = ModelConfig(
    vocab_size=61, layers=4, hidden=32, heads=4, intermediate=48, sequence=16, vocab_multiple=64, dtype="float32"
)


def check_model(
    model: str | ModelConfig,
    meshes: Sequence[tuple[int, int, int]] = MESHES,
    schedules: Sequence[str] = SCHEDULES,
) -> list[str]:
    """Check the properties that the trainer needs of a model.

    Without as many devices as a mesh has, one device emulates them.

    Args:
        model: architecture as package.module:Class, in a small shape, or the shape to check; it runs in float32.
        meshes: sizes of (data, pipe, tensor).
        schedules: names of schedules.

    Returns:
        The properties that hold.

    Raises:
        UserError: the model cannot be imported, or its table or its layer is refused.
        AssertionError: a property does not hold; the message says which, and what was seen.
    """
    return list(checked(model, meshes, schedules))


def checked(
    model: str | ModelConfig,
    meshes: Sequence[tuple[int, int, int]] = MESHES,
    schedules: Sequence[str] = SCHEDULES,
) -> Iterator[str]:
    """Yield the properties as they are found to hold; arguments and exceptions are those of `check_model`."""
    if isinstance(model, str):
        model = dataclasses.replace(_SMALL, module=model, kv_heads=2)
    model = dataclasses.replace(model, dtype="float32", attention="xla")
    parameters.table(model)
    for name, function in _properties(model, meshes, schedules):
        try:
            function()
        except AssertionError as error:
            raise AssertionError(f"{model.module or model.family}: {name}: {error}") from error
        yield name


def _properties(
    model: ModelConfig, meshes: Sequence[tuple[int, int, int]], schedules: Sequence[str]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield names and checks; the arguments are those of `check_model`."""
    yield from layer_properties(model, max(tensor for _, _, tensor in meshes))
    yield "loss and gradients are finite", functools.partial(_finite, model)
    yield "every parameter has a gradient", functools.partial(_used, model)
    config = None
    for mesh in meshes:
        for number, schedule in enumerate(schedules if mesh[1] > 1 else schedules[:1]):
            config = _config(model, mesh, schedule, sequence=number > 0)
            name = f"gradients on {'x'.join(map(str, mesh))} with {schedule} are those of one device"
            yield name, functools.partial(_gradients, config)
    if config:
        yield "a state that is saved and read again is the same", functools.partial(_restores, config)


def _config(model: ModelConfig, mesh: tuple[int, int, int], schedule: str, sequence: bool) -> Config:
    """Return the configuration of a mesh and a schedule, with layers in a loop."""
    data, pipe, tensor = mesh
    splits = sequence and tensor > 1 and model.sequence % tensor == 0
    chunks, masked = (SPECS[schedule].least_chunks, SPECS[schedule].masked) if schedule in SPECS else (1, False)
    return from_dict(
        {
            "model": dataclasses.asdict(model),
            "mesh": {"data": data, "pipe": pipe, "tensor": tensor, "sequence_parallel": splits},
            "pipeline": {
                "schedule": schedule,
                "virtual_stages": chunks,
                "scan_layers": "on",
                "idle": "compute" if masked else "auto",  # as on GPUs
            },
            "batch": {"global_batch": 2 * data * pipe, "micro_batch": 1},
        }
    )


def _tokens(model: ModelConfig, batch: int, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, model.sequence + 1), 0, model.vocab_size)


@functools.lru_cache(maxsize=4)
def _right(model: ModelConfig, batch: int) -> tuple[np.ndarray, Scalars, Params]:
    """Return loss, layers' scalars and gradients of the plain model on one device, with a sample a micro-batch."""

    def objective(params: Params, tokens: jax.Array) -> tuple[jax.Array, tuple]:
        found = jax.lax.map(lambda one: transformer.loss_and_scalars(params, one[None], model), tokens)
        loss, scalars = jax.tree.map(jnp.mean, found)
        return transformer.objective(loss, scalars, model), (loss, scalars)

    run = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (_, losses), grads = jax.device_get(run(random_params(model), _tokens(model, batch)))
    return *losses, grads


def _finite(model: ModelConfig) -> None:
    loss, _, grads = _right(model, 8)
    wrong = [_name(path) for path, g in jax.tree_util.tree_leaves_with_path(grads) if not np.isfinite(g).all()]
    assert np.isfinite(loss), f"the loss is {loss}"
    assert not wrong, f"gradients are not finite: {', '.join(wrong)}"


def _used(model: ModelConfig) -> None:
    *_, grads = _right(model, 8)
    unused = [_name(path) for path, g in jax.tree_util.tree_leaves_with_path(grads) if not np.any(g)]
    assert not unused, (
        f"that of {' and '.join(unused)} is zero for all tokens; let the model use what its table has, or take it out"
    )


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _trainer(config: Config) -> Trainer:
    devices = jax.devices()
    if len(devices) >= config.mesh.devices:
        return Trainer(config, make_mesh(config.mesh, devices=devices[: config.mesh.devices]))
    one = dataclasses.replace(config.mesh, data=1, pipe=1, tensor=1, sequence_parallel=False)
    return Trainer(config, make_mesh(one, devices=devices[:1]), virtual=True)


def _gradients(config: Config) -> None:
    model, batch, trainer = config.model, config.batch.global_batch, _trainer(config)
    params = jax.jit(trainer.layout.from_canonical, out_shardings=trainer.state_shardings.params)(random_params(model))
    tokens = jax.device_put(_tokens(model, batch), trainer.batch_sharding)

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> tuple[jax.Array, Scalars, Params]:
        loss, grads, *_, scalars = trainer.loss_and_gradients(params, tokens)
        return loss, scalars, trainer.layout.to_canonical(grads)

    loss, scalars, grads = jax.device_get(run(params, tokens))
    right_loss, right_scalars, right = _right(model, batch)
    found, wanted = ({"loss": one, **others} for one, others in ((loss, scalars), (right_loss, right_scalars)))
    for name, one in wanted.items():
        assert difference(one, found[name]) <= TOLERANCE, f"the {name} is {found[name]}, not {one}"
    least = ROUNDING * max(np.abs(g).max() for g in jax.tree.leaves(right))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(right), jax.tree.leaves(grads), strict=True):
        error = difference(one, other, least)
        assert error <= TOLERANCE, f"{_name(path)} differs by {error:.2g} of its largest value"


def _restores(config: Config) -> None:
    """Read a state of numbers that are all different, so that none can be in another's place."""
    trainer = _trainer(config)
    saved = jax.tree.map(lambda x: np.arange(x.size).reshape(x.shape).astype(x.dtype), trainer.abstract_canonical())
    again = jax.device_get(trainer.canonical(trainer.from_canonical(saved)))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(saved), jax.tree.leaves(again), strict=True):
        assert np.array_equal(one, other), f"{_name(path)} differs"
