"""Loss and every gradient of the parallel step against jax.grad of the plain model on one device, in float32."""

import collections
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compress
from paxtrain.config import SPLIT_SAVES, Config, PipelineConfig
from paxtrain.model import tensor_parallel as tp
from paxtrain.model import transformer
from paxtrain.parallel import gradients
from paxtrain.parallel.step import Trainer
from paxtrain.schedule.schedules import SPECS, names
from paxtrain.xla import hlo
from tests import small
from tests.paxtrain.xla import counted
from tests.small import SEQUENCE, VOCABULARY, trainer

LAYERS, HIDDEN, HEADS = 4, 32, 8
TOLERANCE = 1e-5
LLAMA = {"family": "llama", "kv_heads": 4, "intermediate": 48}
SHAPES = {
    "gpt2": {},
    "gpt2 untied": {"tied_head": False},
    "llama": LLAMA,
    "llama untied": LLAMA | {"tied_head": False},
    "qwen3": LLAMA | {"family": "qwen3", "tied_head": True},  # norms inside heads
    "olmo2": LLAMA | {"family": "olmo2", "tied_head": True},  # norms over all heads, which tensor splits
    "gemma2": {"family": "gemma2", "kv_heads": 2, "options": {"sliding_window": 5, "attn_logit_softcapping": 2.0}},
}


def config(
    mesh,
    global_batch=16,
    dropout=0.0,
    layers=LAYERS,
    shard="optimizer",
    shape="gpt2",
    separator=-1,
    sequence=False,
    form="ring",
    group=0,
    **pipeline,
):
    """Return a configuration whose stages do what they do on GPUs while they have no op, if nothing else is said."""
    if SPECS[pipeline.get("schedule", "eager_1f1b")].masked:
        pipeline.setdefault("idle", "compute")
    pipeline.setdefault("scan_layers", "on")  # a smaller program, sooner compiled
    model = {"layers": layers, "heads": HEADS, "vocab_multiple": 64, "separator": separator}
    return small.config(
        mesh,
        (global_batch, 2 if mesh[0] < 8 else 1),
        model={**model, "embedding_dropout": dropout, "residual_dropout": dropout, **SHAPES[shape]},
        mesh={"shard": shard, "shard_group": group, "sequence_parallel": sequence, "context_form": form},
        pipeline=pipeline,
    )


class Reference(NamedTuple):
    params: transformer.Params
    tokens: jax.Array
    key: jax.Array | None
    loss: float
    grads: transformer.Params


@functools.cache
def reference(global_batch: int, dropout: float, layers: int, shape: str = "gpt2", separator: int = -1) -> Reference:
    """Return the plain model's loss and gradients. Parameters are large and random, so that zeros hide no error."""
    c = config((1, 1, 1), global_batch, dropout, layers, shape=shape, separator=separator).model
    params = small.canonical(c)
    tokens = jax.random.randint(jax.random.key(1), (global_batch, SEQUENCE + 1), 0, VOCABULARY)
    if separator >= 0:
        tokens = jnp.where(jax.random.bernoulli(jax.random.key(2), 0.2, tokens.shape), separator, tokens)
    key = jax.random.key_data(jax.random.key(7)) if dropout else None
    drop = transformer.Dropout(key, jnp.arange(global_batch)) if dropout else None
    loss, grads = jax.jit(jax.value_and_grad(lambda p: transformer.loss(p, tokens, c, drop)))(params)
    return Reference(params, tokens, key, float(loss), jax.device_get(grads))


def errors(trained: Trainer, ref: Reference) -> dict[str, float]:
    """Return relative errors: of the loss, of the norm, and of each parameter max |difference| / max |reference|."""
    params = jax.jit(trained.layout.from_canonical)(ref.params)
    params = jax.device_put(params, trained.state_shardings.params)
    tokens = jax.device_put(ref.tokens[trained.config.batch_samples], trained.batch_sharding)

    @jax.jit
    def run(params: transformer.Params, tokens: jax.Array, key: jax.Array | None) -> tuple:
        loss, grads, *_ = trained.loss_and_gradients(params, tokens, key)
        return loss, grads, trained.norm(grads)

    loss, grads, norm = run(params, tokens, ref.key)
    whole = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(ref.grads)))
    grads = jax.device_get(jax.jit(trained.layout.to_canonical)(grads))
    error = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), grads, ref.grads)
    flat = {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(error)}
    return {"loss": abs(float(loss) - ref.loss) / ref.loss, "norm": abs(float(norm) - whole) / whole, **flat}


def check(c, **kwargs) -> None:
    model_config = c.model
    ref = reference(
        c.batch.global_batch, model_config.residual_dropout, model_config.layers, shape(c), model_config.separator
    )
    wrong = {name: e for name, e in errors(trainer(c, **kwargs), ref).items() if not e <= TOLERANCE}
    assert not wrong, wrong


# These run in the gate, with what they have in common: each feature with each that could break it.
COVERING = [
    config((8, 1, 1)),
    config((1, 1, 8), save="layer_inputs"),
    config((4, 1, 2), shard="none", save="residuals"),
    config((2, 1, 4), save="inputs"),
    config((1, 8, 1), 8, layers=8),
    config((4, 2, 1), schedule="gpipe", save="residuals"),
    config((2, 4, 1), 8, schedule="gpipe", save="inputs", shard="none"),
    config((2, 2, 2), dropout=0.2),
    config((2, 2, 2), pipe_layers="3,1", save="residuals", scan_layers="off"),
    config((1, 4, 2), 4, save="inputs"),  # fewer micro-batches than stages
    config((2, 2, 2), 8, idle="skip", save="residuals"),
    config((1, 2, 4), schedule="1f1b", save="inputs"),
    config((1, 4, 2), 6, layers=8, schedule="interleaved_1f1b", virtual_stages=2, save="inputs"),  # m=3 of 4
    config((2, 2, 2), 8, separator=5),
    config((1, 4, 2), 4, separator=5, schedule="1f1b", save="inputs"),
    config((2, 2, 1), 8, separator=5, schedule="interleaved_1f1b", virtual_stages=2, save="residuals"),
    config((2, 2, 2), schedule="zb_h1", dropout=0.2),
    config((2, 4, 1), 12, layers=5, schedule="zb_h1", pipe_layers="1,2,1,1", save="residuals"),  # fewer than stages
    config((2, 2, 2), shape="llama untied", schedule="zb_h1", separator=5, scan_layers="off"),
    config((8, 1, 1), shape="llama untied"),  # one stage holds both tables
    config((2, 4, 1), 12, shape="llama untied", schedule="1f1b", layers=5, pipe_layers="1,2,1,1", save="inputs"),
    config((2, 2, 2), shape="llama", schedule="interleaved_1f1b", virtual_stages=2, save="layer_inputs"),
    config((4, 2, 1), shape="gpt2 untied", schedule="gpipe", shard="none", scan_layers="off"),
    config((2, 2, 2), 8, shape="llama untied", separator=5, schedule="1f1b", scan_layers="off"),
    config((2, 2, 2), 8, sequence=True, dropout=0.2, separator=5),
    config((1, 2, 4), sequence=True, schedule="1f1b", save="inputs", shard="none"),
    config((1, 2, 4), sequence=True, schedule="zb_h1"),
    config((2, 2, 2), 12, schedule="zb_v", virtual_stages=2, dropout=0.2),
    config((1, 4, 2), 14, layers=9, shape="llama untied", schedule="zb_v", virtual_stages=2, save="residuals"),
    config((2, 2, 2), 16, shape="llama untied", schedule="dualpipe_v", virtual_stages=2),
    config((2, 2, 2), sequence=True, schedule="interleaved_1f1b", virtual_stages=2, save="residuals", shape="llama"),
    config((1, 4, 2), sequence=True, schedule="gpipe", layers=8, pipe_layers="2,3,2,1"),
]

# More of them together, and layers that are not in a loop.
TOGETHER = [
    config((2, 2, 2), dropout=0.2, scan_layers="off"),
    config((2, 4, 1), 12, layers=5, schedule="1f1b", pipe_layers="1,2,1,1", save="layer_inputs"),
    config((2, 2, 2), schedule="interleaved_1f1b", virtual_stages=2, dropout=0.2),
    config((2, 2, 2), schedule="1f1b", dropout=0.2),
    config((2, 2, 2), schedule="zb_h1", dropout=0.2, scan_layers="off"),
    config((1, 3, 2), 10, layers=6, schedule="zb_h1"),
    config((2, 2, 2), shape="llama untied", save="residuals", dropout=0.2),
    config((1, 4, 2), shape="llama", schedule="1f1b", layers=8),
    config((2, 1, 4), sequence=True, save="layer_inputs", dropout=0.2, shape="llama untied"),
]


def shape(c) -> str:
    """Return the name of a model among SHAPES."""
    return f"{c.model.family}{'' if c.model.tied_head else ' untied'}"


def name(c) -> str:
    p = c.pipeline
    extra = ["" if shape(c) == "gpt2" else shape(c)]
    extra += [p.pipe_layers.replace(",", "-"), "unrolled" if p.scan_layers == "off" else ""]
    extra += ["skip" if p.idle == "skip" else "", "" if c.mesh.zero1 else "all-reduce"]
    extra += ["dropout" if c.model.residual_dropout else ""]
    extra += ["" if c.model.separator < 0 else "documents", "sequence" if c.mesh.sequence_parallel else ""]
    mesh = f"{c.mesh.data}x{c.mesh.pipe}x{c.mesh.tensor}"
    mesh += f"x{c.mesh.context} {c.mesh.context_form}" if c.mesh.context > 1 else ""
    return " ".join([mesh, p.schedule, p.save, f"m={c.micro_batches}", *filter(None, extra)])


# What the covering set holds, on as few stages as show it: two stages compile in half the time of four.
QUICK = [
    config((4, 1, 2), shard="none", save="residuals", shape="olmo2"),
    config((2, 2, 1), 8, layers=2, schedule="gpipe", dropout=0.2, scan_layers="off", separator=5, idle="skip"),
    config((1, 2, 4), 6, sequence=True, schedule="1f1b", save="inputs", shard="none"),
    config((1, 4, 2), 4, save="inputs"),  # fewer micro-batches than stages
    config(
        (1, 2, 2), 4, shape="qwen3", schedule="interleaved_1f1b", virtual_stages=2, save="layer_inputs", sequence=True
    ),
    config((1, 3, 1), 4, schedule="zb_h1", pipe_layers="1,2,1", save="residuals"),  # fewer than stages
    config((2, 2, 1), 8, shape="llama untied", schedule="zb_h1", separator=5),
]
CASES = [pytest.param(c, marks=() if i in (0, 3) else pytest.mark.once) for i, c in enumerate(QUICK)]
CASES += [pytest.param(c, marks=pytest.mark.slow) for c in [*COVERING, *TOGETHER] if c not in QUICK]


@pytest.mark.parametrize("c", CASES, ids=name)
def test_gradients_equal_one_device(c):
    check(c)


# A sequence that devices share: mesh (data, pipe, tensor, context).
SHARED = [
    config((1, 2, 1, 2), 4, layers=2, sequence=False, dropout=0.2, separator=5, schedule="zb_h1"),
    config((1, 1, 2, 4), 4, layers=2, form="gather", shape="gemma2", separator=5, scan_layers="off", sequence=True),
    config((2, 1, 1, 4), 8, layers=2, form="heads", shape="llama untied", separator=5),
    config((1, 2, 2, 2), 8, sequence=True, dropout=0.2, separator=5),
    config((1, 2, 1, 4), 8, shape="gemma2", schedule="1f1b", save="layer_inputs", separator=5),
    config((2, 1, 2, 2), 8, shape="gemma2", form="gather", save="inputs", shard="none"),
    config((1, 1, 1, 8), 4, save="residuals", separator=5),
    config((1, 2, 1, 4), 8, schedule="gpipe", idle="skip", save="residuals", form="gather"),
    config((1, 2, 2, 2), 8, schedule="interleaved_1f1b", virtual_stages=2, shape="llama", form="heads"),
    config((1, 2, 2, 2), 12, schedule="zb_v", virtual_stages=2, dropout=0.2),
    config((2, 2, 1, 2), 16, schedule="dualpipe_v", virtual_stages=2, shape="llama untied", sequence=False),
    config((1, 2, 2, 2), 8, schedule="zb_h1", save="residuals", shape="llama", sequence=True, scan_layers="off"),
]


@pytest.mark.parametrize(
    "c",
    [pytest.param(c, marks=(pytest.mark.once, (), *[pytest.mark.slow] * 10)[i]) for i, c in enumerate(SHARED)],
    ids=name,
)
def test_gradients_equal_one_device_where_devices_share_sequences(c):
    check(c)


OVERLAPPED = [
    config((1, 3, 1), 6, schedule="1f1b", pipe_layers="1,2,1"),
    config((2, 2, 1), 12, schedule="zb_h1"),
    config((2, 4, 1), 20, layers=5, schedule="1f1b", pipe_layers="1,2,1,1"),  # m=5
    config((1, 4, 2), 10, layers=8, schedule="interleaved_1f1b", virtual_stages=2),  # m=5 of 8
    config((2, 4, 1), 20, layers=4, schedule="zb_h1"),
    config((1, 4, 2), 12, schedule="gpipe", save="residuals"),
    config((2, 2, 1), 16, schedule="1f1b", save="inputs"),
    config((1, 3, 1), 12, layers=6, schedule="zb_v", virtual_stages=2),
    config((1, 3, 1), 12, layers=6, schedule="dualpipe_v", virtual_stages=2),
    config((2, 2, 1), 16, shape="gpt2 untied", schedule="zb_v", virtual_stages=2),
]


@pytest.mark.parametrize(
    "c",
    [pytest.param(c, marks=pytest.mark.once if i < 1 else pytest.mark.slow) for i, c in enumerate(OVERLAPPED)],
    ids=name,
)
def test_gradients_equal_one_device_in_the_rows_of_gpus(c):
    check(c, overlap=True)


def everything() -> list[Config]:
    """Return each factorisation of 8 with each schedule and save mode, with more layers if stages need them."""
    meshes = [m for m in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(m) == 8]
    modes = ("dots", "layer_inputs", "residuals", "inputs")
    shapes, found = ("gpt2", "llama untied"), []
    for mesh, schedule, save, model_shape in itertools.product(meshes, names(), modes, shapes):
        if model_shape != "gpt2" and mesh[2] > LLAMA["kv_heads"]:
            continue
        chunks = 2 if SPECS[schedule].interleaves else 1
        if (chunks == 1 or mesh[1] > 1) and (not SPECS[schedule].splits or save in SPLIT_SAVES):
            layers = 8 * chunks if mesh[1] == 8 else LAYERS * chunks
            how = {"shape": model_shape, "schedule": schedule, "save": save, "virtual_stages": chunks}
            found.append(config(mesh, layers=layers, **how))
    return found


def threes(c: Config) -> set[tuple]:
    """Return every three of a case's settings; the numbers of ranks of data and tensor groups are in COVERING."""
    settings = c.mesh.data > 1, c.mesh.pipe, c.mesh.tensor > 1, c.pipeline.schedule, c.pipeline.save, shape(c)
    return set(itertools.combinations(enumerate(settings), 3))


def missing_threes(cases: list[Config], others: list[Config]) -> list[Config]:
    """Return those cases, chosen greedily, that have with the others every three settings that a case has together."""
    having = [threes(c) for c in cases]
    missing, found = set.union(*having).difference(*map(threes, others)), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(having[i] & missing))
        missing -= having[best]
        found.append(cases[best])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("c", missing_threes(everything(), [*COVERING, *TOGETHER, *QUICK]), ids=name)
def test_gradients_equal_one_device_everywhere(c):
    check(c)


def test_covering_sets_have_every_schedule_save_mode_and_setting():
    meshes = {(c.mesh.data, c.mesh.pipe, c.mesh.tensor) for c in COVERING}
    assert meshes >= {m for m in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(m) == 8}
    for some in (COVERING, QUICK):
        piped = [c for c in some if c.mesh.pipe > 1]
        # Programs of a V take long to compile: quickly only their tables are proved (tests/paxtrain/schedule).
        expected = names() if some is COVERING else names(lambda spec: not spec.folds(2))
        assert {c.pipeline.schedule for c in piped} == set(expected)
        assert {c.pipeline.save for c in piped} == {"dots", "layer_inputs", "residuals", "inputs"}
        assert {c.pipeline.save for c in piped if c.pipeline.spec.splits} == set(SPLIT_SAVES)
        assert {c.model.family for c in some} >= {"gpt2", "llama"}
        assert {c.model.separator >= 0 for c in some} == {c.mesh.sequence_parallel for c in some} == {True, False}
        assert {c.mesh.zero1 for c in some} == {c.model.residual_dropout > 0 for c in some} == {True, False}
        assert {c.pipeline.pipe_layers != "" for c in some} == {c.model.tied_head for c in some} == {True, False}
        for axis in ("data", "pipe", "tensor"):
            assert {getattr(c.mesh, axis) for c in some} >= {1, 2, 4}
    assert PipelineConfig().save == "dots"


# --- Negative controls: the comparison sees wrong gradients -----------------------------------------------------------


@pytest.mark.once
def test_a_missing_sum_over_tensor_shows(monkeypatch):
    monkeypatch.setattr(tp, "copy", lambda x, axis: x)
    found = errors(trainer(config((2, 1, 2))), reference(16, 0.0, LAYERS))
    assert found["loss"] <= TOLERANCE  # the forward is right
    assert found["['layers']['ln1']['scale']"] > 0.01


def test_a_missing_sum_over_the_parts_of_the_sequence_shows(monkeypatch):
    monkeypatch.setattr(gradients, "sum_over_axes", lambda layout, grads: grads)
    found = errors(trainer(config((2, 1, 2), sequence=True)), reference(16, 0.0, LAYERS))
    wrong = {name for name, error in found.items() if not error <= TOLERANCE}
    arrays = {"['layers']['ln1']", "['layers']['ln2']", "['final_norm']"}
    expected = {f"{array}['{leaf}']" for array in arrays for leaf in ("scale", "bias")}
    assert wrong - {"norm"} == expected | {"['layers']['out']['bias']", "['layers']['down']['bias']"}


@pytest.mark.once
def test_dropout_of_another_part_of_the_sequence_shows(monkeypatch):

    def own(x, dim, group):
        return x[(slice(None),) * dim + (slice(x.shape[dim] // group.parts),)]

    monkeypatch.setattr(tp, "own", own)  # the first part's, on all devices
    # Without positions, of which one has a part, too.
    c = config((2, 1, 2), 4, layers=2, sequence=True, dropout=0.2, shape="llama")
    assert errors(trainer(c), reference(4, 0.2, 2, "llama"))["loss"] > 10 * TOLERANCE


@dataclasses.dataclass(frozen=True)
class Lossy(compress.Codec):
    """A codec that loses everything: decode returns zeros."""

    def init(self, shape, dtype):
        return ()

    def encode(self, state, x, active=True):
        return x, state

    def decode(self, wire, like):
        return jnp.zeros(like.shape, like.dtype)


@dataclasses.dataclass(frozen=True)
class Doubling(compress.Codec):
    """A codec whose wire is a pytree and whose decode undoes its encode exactly."""

    def init(self, shape, dtype):
        return ()

    def encode(self, state, x, active=True):
        return {"half": x / 2, "sign": jnp.ones((1,), x.dtype)}, state

    def decode(self, wire, like):
        return wire["half"] * 2 * wire["sign"]


def with_codec(c, codec) -> Trainer:
    """Return a trainer whose gradients between stages all pass the codec."""
    return dataclasses.replace(trainer(c), codec=codec)


@pytest.mark.parametrize(
    "schedule",
    [
        "eager_1f1b",
        pytest.param("1f1b", marks=pytest.mark.slow),
        pytest.param("zb_h1", marks=pytest.mark.slow),
    ],
)
def test_gradients_between_stages_pass_the_codec_and_nothing_else_does(schedule):
    c, ref = config((1, 2, 1), 4, schedule=schedule), reference(4, 0.0, LAYERS)
    assert max(errors(with_codec(c, Doubling()), ref).values()) <= TOLERANCE

    trained = with_codec(c, Lossy())
    params = jax.device_put(jax.jit(trained.layout.from_canonical)(ref.params), trained.state_shardings.params)
    loss, grads, *_ = jax.jit(trained.loss_and_gradients)(params, jax.device_put(ref.tokens, trained.batch_sharding))
    grads = jax.jit(trained.layout.to_canonical)(grads)
    assert abs(float(loss) - ref.loss) / ref.loss <= TOLERANCE
    for mine, right in zip(jax.tree.leaves(grads["layers"]), jax.tree.leaves(ref.grads["layers"]), strict=True):
        assert not np.any(mine[: LAYERS // 2])  # stage 0 has heard nothing
        np.testing.assert_allclose(mine[LAYERS // 2 :], right[LAYERS // 2 :], atol=TOLERANCE * np.abs(right).max())


# --- What crosses the links, and what is kept -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["eager_1f1b", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_bytes_on_the_links_are_the_tables(schedule):
    """The model is float32, since the CPU backend widens bfloat16 collectives; m = 4, P = 3, two data ranks."""
    trained = trainer(config((2, 3, 1), 16, layers=3, schedule=schedule))
    text = trained.compile_step().as_text()
    message = 2 * SEQUENCE * HIDDEN * 4
    tied = 2 * trained.config.model.padded_vocab * HIDDEN * 4  # two shards, exchanged both ways
    assert counted.permute_bytes(text) == trained.schedule.messages() * message * 2 + tied
    assert trained.schedule.messages() == 2 * 4 * 2


def sent_over_tensor(**settings) -> collections.Counter[tuple[str, int]]:
    """Return the bytes of a participant by kind of collective, with tensor=2 alone and four micro-batches."""
    found = collections.Counter()
    for op in hlo.collectives(trainer(config((1, 1, 2), 8, **settings)).compile_step().as_text()):
        found[op.kind, op.bytes] += op.executions
    return found


@pytest.mark.once
def test_sequence_parallelism_reduces_and_gathers_what_was_all_reduced():
    activations, part, m = 2 * SEQUENCE * HIDDEN * 4, SEQUENCE * HIDDEN * 4, 4
    sums = m * (4 * LAYERS + 2)  # two of each layer's F and B, the embedding's, and the head's B
    before = sent_over_tensor()
    assert before["all-reduce", activations] == sums
    after = sent_over_tensor(sequence=True)
    again = m * 2 * LAYERS  # B's copies of what F gathered, which save="dots" does not keep
    assert (after["all-to-all", activations], after["all-gather", part]) == (sums, sums + again)
    vectors = 4 * HIDDEN * (6 * LAYERS + 2)  # norms, biases behind row-parallel matrices
    del before["all-reduce", activations], after["all-to-all", activations], after["all-gather", part]
    assert after == before + collections.Counter({("all-reduce", vectors): 1})


@pytest.mark.slow
def test_with_sequence_parallelism_a_device_sends_its_part():
    message, tied = 2 * SEQUENCE * HIDDEN * 4, 2 * 64 * HIDDEN * 4
    for sequence in (False, True):
        trained = trainer(config((1, 2, 4), 2, sequence=sequence))
        senders = 1 if sequence else 4  # of a whole message
        sent = counted.permute_bytes(trained.compile_step().as_text())
        assert sent == trained.schedule.messages() * message * senders + tied


def temporary(global_batch: int, schedule: str, save: str = "dots", mesh: tuple = (1, 2, 1), **settings) -> int:
    """Return the step's temporary bytes by XLA's memory analysis: a layer a stage, global_batch / 2 micro-batches."""
    c = config(mesh, global_batch, layers=mesh[1], schedule=schedule, save=save, **settings)
    return trainer(c).compile_step().memory_analysis().temp_size_in_bytes


@pytest.mark.once
def test_memory_of_the_step():
    """1F1B needs the same for any m, and less than GPipe."""
    plain = temporary(64, "1f1b")
    assert plain <= 1.03 * temporary(16, "1f1b")
    assert plain < temporary(64, "gpipe")


@pytest.mark.slow
def test_memory_of_the_step_with_other_schedules_and_save_modes():
    eager, plain, split = (temporary(64, name) for name in ("eager_1f1b", "1f1b", "zb_h1"))
    assert eager <= 1.03 * temporary(16, "eager_1f1b")
    assert plain < split <= 1.03 * temporary(16, "zb_h1")
    assert max(eager, plain, split) < temporary(64, "gpipe")
    assert temporary(16, "eager_1f1b", "inputs") < temporary(16, "eager_1f1b", "residuals")


@pytest.mark.slow
def test_sequence_parallelism_keeps_a_part_of_a_micro_batch():
    """For each micro-batch GPipe keeps a gradient that waits for its B, and the layer's input in this save mode."""

    def kept(sequence: bool) -> float:
        # With fewer micro-batches a ring of parts still fits into memory that other arrays leave free.
        few, many = (temporary(b, "gpipe", "layer_inputs", (1, 2, 4), sequence=sequence) for b in (32, 64))
        return (many - few) / 16

    message = 2 * SEQUENCE * HIDDEN * 4
    assert kept(sequence=True) == pytest.approx(message / 4 * 2, rel=0.01)
