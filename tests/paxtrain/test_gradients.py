"""Loss and every gradient of the parallel step against jax.grad of the plain model on one device, in float32."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain import hlo, model
from paxtrain import tensor_parallel as tp
from paxtrain.config import CompressConfig, PipelineConfig, from_dict
from paxtrain.links import Link
from paxtrain.mesh import make_mesh
from paxtrain.pipeline import Links
from paxtrain.step import Trainer

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 4, 32, 8, 16, 61
TOLERANCE = 1e-5
LLAMA = {"family": "llama", "kv_heads": 4, "intermediate": 48}
SHAPES = {
    "gpt2": {},
    "gpt2 untied": {"tied_head": False},
    "llama": LLAMA,
    "llama untied": LLAMA | {"tied_head": False},
}


def config(mesh, global_batch=16, dropout=0.0, layers=LAYERS, zero1=True, shape="gpt2", **pipeline):
    data, pipe, tensor = mesh
    return from_dict({
        "model": {
            "layers": layers, "hidden": HIDDEN, "heads": HEADS, "sequence": SEQUENCE, "vocab_size": VOCABULARY,
            "vocab_multiple": 64, "dtype": "float32", "embedding_dropout": dropout, "residual_dropout": dropout,
            **SHAPES[shape],
        },
        "mesh": {"data": data, "pipe": pipe, "tensor": tensor, "zero1": zero1},
        "pipeline": pipeline,
        "batch": {"global_batch": global_batch, "micro_batch": 2 if data < 8 else 1},
    })  # fmt: skip


class Reference(NamedTuple):
    params: model.Params
    tokens: jax.Array
    key: jax.Array | None
    loss: float
    grads: model.Params


@functools.cache
def reference(global_batch: int, dropout: float, layers: int, shape: str = "gpt2") -> Reference:
    """The plain model's loss and gradients; parameters are large and random so that nothing hides behind zeros."""
    c = config((1, 1, 1), global_batch, dropout, layers, shape=shape).model
    params = model.init(c, jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    tokens = jax.random.randint(jax.random.key(1), (global_batch, SEQUENCE + 1), 0, VOCABULARY)
    key = jax.random.key_data(jax.random.key(7)) if dropout else None
    drop = model.Dropout(key, jnp.arange(global_batch)) if dropout else None
    loss, grads = jax.jit(jax.value_and_grad(lambda p: model.loss(p, tokens, c, drop)))(params)
    return Reference(params, tokens, key, float(loss), jax.device_get(grads))


def trainer(c, **kwargs):
    return Trainer(c, make_mesh(c.mesh, devices=jax.devices()[: c.mesh.devices]), **kwargs)


def errors(trained: Trainer, ref: Reference) -> dict[str, float]:
    """Relative errors: of the loss, the norm of all gradients, and per parameter max |difference| / max |reference|."""
    params = jax.jit(trained.layout.from_canonical)(ref.params)
    params = jax.device_put(params, trained.state_shardings.params)
    tokens = jax.device_put(ref.tokens, trained.batch_sharding)

    @jax.jit
    def run(params: model.Params, tokens: jax.Array, key: jax.Array | None) -> tuple:
        loss, grads, *_ = trained.loss_and_gradients(params, tokens, key)
        return loss, grads, trained.norm(grads)

    loss, grads, norm = run(params, tokens, ref.key)
    whole = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(ref.grads)))
    grads = jax.device_get(jax.jit(trained.layout.to_canonical)(grads))
    error = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), grads, ref.grads)
    flat = {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(error)}
    return {"loss": abs(float(loss) - ref.loss) / ref.loss, "norm": abs(float(norm) - whole) / whole, **flat}


def check(c) -> None:
    model_config = c.model
    ref = reference(c.batch.global_batch, model_config.residual_dropout, model_config.layers, shape(c))
    wrong = {name: e for name, e in errors(trainer(c), ref).items() if not e <= TOLERANCE}
    assert not wrong, wrong


COVERING = [
    config((8, 1, 1)),
    config((1, 1, 8), save="layer_inputs"),
    config((4, 1, 2), zero1=False, save="residuals"),
    config((2, 1, 4), save="inputs", scan_layers="on"),
    config((1, 8, 1), 8, layers=8),
    config((4, 2, 1), schedule="gpipe", save="residuals"),
    config((2, 4, 1), 8, schedule="gpipe", save="inputs", zero1=False),
    config((2, 2, 2), dropout=0.2),
    config((2, 2, 2), pipe_layers="3,1", save="residuals"),
    config((1, 4, 2), 4, save="inputs"),  # fewer micro-batches than stages
    config((1, 2, 4), schedule="1f1b", save="inputs"),
    config((2, 4, 1), 12, layers=5, schedule="1f1b", pipe_layers="1,2,1,1", save="layer_inputs"),
    config((2, 2, 2), schedule="interleaved_1f1b", virtual_stages=2, dropout=0.2),
    config((1, 4, 2), 6, layers=8, schedule="interleaved_1f1b", virtual_stages=2, save="inputs"),  # m=3 of 4
    config((2, 2, 2), scan_layers="on"),
    config((2, 2, 2), schedule="1f1b", scan_layers="on", dropout=0.2),
    config((8, 1, 1), shape="llama untied"),  # one stage holds both tables
    config((2, 2, 2), shape="llama untied", save="residuals", dropout=0.2),
    config((1, 4, 2), shape="llama", schedule="1f1b", scan_layers="on", layers=8),
    config((2, 4, 1), 12, shape="llama untied", schedule="1f1b", layers=5, pipe_layers="1,2,1,1", save="inputs"),
    config((2, 2, 2), shape="llama", schedule="interleaved_1f1b", virtual_stages=2, save="layer_inputs"),
    config((4, 2, 1), shape="gpt2 untied", schedule="gpipe", zero1=False),
]


def shape(c) -> str:
    """Its name among SHAPES."""
    return f"{c.model.family}{'' if c.model.tied_head else ' untied'}"


def name(c) -> str:
    p = c.pipeline
    extra = ["" if shape(c) == "gpt2" else shape(c)]
    extra += [p.pipe_layers.replace(",", "-"), p.scan_layers if p.scan_layers != "auto" else ""]
    extra += ["" if c.mesh.zero1 else "all-reduce", "dropout" if c.model.residual_dropout else ""]
    mesh = f"{c.mesh.data}x{c.mesh.pipe}x{c.mesh.tensor}"
    return " ".join([mesh, p.schedule, p.save, f"m={c.micro_batches}", *filter(None, extra)])


@pytest.mark.parametrize("c", COVERING, ids=name)
def test_gradients_equal_one_device(c):
    check(c)


def everything():
    """Every factorisation of 8, schedule and save mode; with more layers where stages need them."""
    meshes = [m for m in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(m) == 8]
    modes = ("dots", "layer_inputs", "residuals", "inputs")
    schedules = ("eager_1f1b", "gpipe", "1f1b", "interleaved_1f1b")
    for mesh, schedule, save, model_shape in itertools.product(meshes, schedules, modes, ("gpt2", "llama untied")):
        if model_shape != "gpt2" and mesh[2] > LLAMA["kv_heads"]:
            continue
        chunks = 2 if schedule == "interleaved_1f1b" else 1
        if chunks == 1 or mesh[1] > 1:
            layers = 8 * chunks if mesh[1] == 8 else LAYERS * chunks
            yield config(mesh, layers=layers, shape=model_shape, schedule=schedule, save=save, virtual_stages=chunks)


@pytest.mark.slow
@pytest.mark.parametrize("c", list(everything()), ids=name)
def test_gradients_equal_one_device_everywhere(c):
    check(c)


def test_covering_set_has_every_mesh_schedule_and_save_mode():
    meshes = {(c.mesh.data, c.mesh.pipe, c.mesh.tensor) for c in COVERING}
    assert meshes == {m for m in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(m) == 8}
    piped = [c for c in COVERING if c.mesh.pipe > 1]
    assert {c.pipeline.schedule for c in piped} == {"eager_1f1b", "gpipe", "1f1b", "interleaved_1f1b"}
    assert {c.pipeline.save for c in piped} == {"dots", "layer_inputs", "residuals", "inputs"}
    assert PipelineConfig().save == "dots"


# --- Negative controls: the comparison sees what it is there to see ---------------------------------------------------


def test_a_missing_sum_over_tensor_shows(monkeypatch):
    monkeypatch.setattr(tp, "copy", lambda x, axis: x)
    found = errors(trainer(config((2, 1, 2))), reference(16, 0.0, LAYERS))
    assert found["loss"] <= TOLERANCE  # the forward is right
    assert found["['layers']['ln1']['scale']"] > 0.01


class Lossy(NamedTuple):
    """A codec that loses everything: decode gives zeros."""

    def init(self, shape, dtype):
        return ()

    def encode(self, state, x, active=True):
        return x, state

    def decode(self, wire, like):
        return jnp.zeros(like.shape, like.dtype)


class Doubling(NamedTuple):
    """A codec whose wire is a pytree and whose decode undoes its encode exactly."""

    def init(self, shape, dtype):
        return ()

    def encode(self, state, x, active=True):
        return {"half": x / 2, "sign": jnp.ones((1,), x.dtype)}, state

    def decode(self, wire, like):
        return wire["half"] * 2 * wire["sign"]


def with_codec(c, codec) -> Trainer:
    """A trainer whose gradients between stages all pass the codec."""
    trained = trainer(dataclasses.replace(c, compress=CompressConfig(backward="all", min_ratio=0.0)))
    vars(trained.compression)["links"] = Links(backward=Link(codec))
    return trained


@pytest.mark.parametrize("schedule", ["eager_1f1b", "1f1b"])
def test_gradients_between_stages_pass_the_codec_and_nothing_else_does(schedule):
    c, ref = config((1, 2, 1), schedule=schedule), reference(16, 0.0, LAYERS)
    assert max(errors(with_codec(c, Doubling()), ref).values()) <= TOLERANCE

    trained = with_codec(c, Lossy())
    params = jax.device_put(jax.jit(trained.layout.from_canonical)(ref.params), trained.state_shardings.params)
    loss, grads, *_ = jax.jit(trained.loss_and_gradients)(params, jax.device_put(ref.tokens, trained.batch_sharding))
    grads = trained.layout.to_canonical(grads)
    assert abs(float(loss) - ref.loss) / ref.loss <= TOLERANCE
    for mine, right in zip(jax.tree.leaves(grads["layers"]), jax.tree.leaves(ref.grads["layers"]), strict=True):
        assert not np.any(mine[: LAYERS // 2])  # stage 0 has heard nothing
        np.testing.assert_allclose(mine[LAYERS // 2 :], right[LAYERS // 2 :], atol=TOLERANCE * np.abs(right).max())


# --- What crosses the links, and what is kept -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["eager_1f1b", "1f1b"])
def test_bytes_on_the_links_are_the_tables(schedule):
    """In float32, since the CPU backend widens bfloat16 collectives. (m = 6, P = 4, two data ranks.)"""
    trained = trainer(config((2, 4, 1), 24, schedule=schedule))
    text = trained.compile_step().as_text()
    message = 2 * SEQUENCE * HIDDEN * 4
    tied = 2 * trained.config.model.padded_vocab * HIDDEN * 4  # two shards, exchanged both ways
    assert hlo.permute_bytes(text) == trained.schedule.messages() * message * 2 + tied
    assert trained.schedule.messages() == 2 * 6 * 3


def temporary(global_batch: int, schedule: str, save: str = "dots") -> int:
    """Temporary bytes of the train step by XLA's memory analysis, with pipe=2 and global_batch / 2 micro-batches."""
    c = config((1, 2, 1), global_batch, schedule=schedule, save=save)
    return trainer(c).compile_step().memory_analysis().temp_size_in_bytes


def test_memory_of_the_step():
    """Flat in m for 1F1B of both kinds, both below GPipe; recomputing a stage takes less than keeping everything."""
    eager, plain = temporary(64, "eager_1f1b"), temporary(64, "1f1b")
    assert eager <= 1.03 * temporary(16, "eager_1f1b")
    assert plain <= 1.03 * temporary(16, "1f1b")
    assert max(eager, plain) < temporary(64, "gpipe")
    assert temporary(16, "eager_1f1b", "inputs") < temporary(16, "eager_1f1b", "residuals")
