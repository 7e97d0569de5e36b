"""The embedding's gradients through a codec: against numpy in float64, on all ranks, and the bytes in the program."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from compress import Identity
from paxtrain.errors import UserError
from paxtrain.parallel import gradients
from paxtrain.parallel.compression import checks
from paxtrain.parallel.compression.embedding import TableCodec
from paxtrain.parallel.mesh import device_spec, spread
from paxtrain.parallel.mesh import local as local_of
from paxtrain.study import measurements
from paxtrain.xla import hlo
from planner.cost.coded import coded
from tests.paxtrain.compressed import FAST, HIDDEN, SEQUENCE, canonical, config, trained_steps, trainer

pytestmark = pytest.mark.once
INT8 = {"embedding_codec": "int8", "embedding_options": {"block": 32}}
INT4 = {"embedding_codec": "int4", "embedding_options": {"block": 32}}
SUMS = [((2, 4, 1), True), ((2, 4, 1), False), ((4, 2, 1), False), ((1, 3, 1), True), ((4, 1, 1), False),
        ((2, 2, 2), True)]  # fmt: skip
STEPS = 4


def made(mesh, zero1, tied=True, **compress):
    c = config(mesh, zero1=zero1, layers=mesh[1], **compress)
    return trainer(dataclasses.replace(c, model=dataclasses.replace(c.model, tied_head=tied)))


def exchange(trained):
    """Return the compiled exchange of the embedding's gradients, of arrays [data, pipe, 1, tensor, ...] by name."""
    c = trained.compression

    def local(grads, state):
        grads, state = local_of((grads, state))
        found, state = gradients.reduce_tables(c, grads, state, edges=False)
        if trained.config.model.tied_head:
            found["token"], state = gradients.exchange_tied(c, found["token"], state)
        return spread((found, state))

    every = device_spec(trained.config.mesh)
    run = jax.jit(trained.shard_map(local, (every, every), (every, every)))
    return run.lower(given(trained, 0), first(trained)).compile(FAST)


def first(trained):
    return jax.device_get(trained.compression.init().get("embedding", ()))


def given(trained, step):
    """Return random gradients, zeros on stages between."""
    mesh, random = trained.config.mesh, np.random.default_rng(step)
    shape = (trained.config.model.padded_vocab // mesh.tensor, HIDDEN)
    if not trained.config.model.tied_head:
        shape = (2 if mesh.pipe == 1 else 1, *shape)
    x = random.standard_normal((mesh.data, mesh.pipe, 1, mesh.tensor, *shape)).astype(np.float32)
    x[:, 1:-1] = 0
    positions = random.standard_normal((*x.shape[:4], SEQUENCE, HIDDEN)).astype(np.float32)
    positions[:, 1:] = 0
    return {"token": x, "position": positions}


def exact(trained, x):
    """Return what each device should get of the table, in float64: [data, pipe, tensor, *device's]."""
    x = x["token"]
    mesh, total = trained.config.mesh, x.astype(np.float64).mean(0, keepdims=True)
    if trained.config.model.tied_head and mesh.pipe > 1:
        total = (
            total.sum(1, keepdims=True) * np.isin(np.arange(mesh.pipe), (0, mesh.pipe - 1))[:, None, None, None, None]
        )
    total = np.broadcast_to(total, x.shape)
    if mesh.zero1 and mesh.data > 1:
        dim = trained.layout.data_dims()["embedding"]["token"] - (1 if trained.config.model.tied_head else 0)
        total = np.stack([np.split(part, mesh.data, axis=3 + dim)[rank] for rank, part in enumerate(total)])
    return total


def steps(trained, count=STEPS):
    """Return the sums over some steps of what devices get and should get, and the state and results of the last."""
    run, state, arrived, right = exchange(trained), first(trained), 0, 0
    for step in range(count):
        x = given(trained, step)
        found, state = jax.device_get(run(x, state))
        got = found["token"]
        arrived, right = arrived + got.astype(np.float64), right + exact(trained, x)
    return arrived, right, state, got


def unequal_copies(got, zero1):
    """Return how many numbers differ between the two copies of a table, and between data ranks if these hold all."""
    found = np.sum(got[:, 0] != got[:, -1])
    return found + (0 if zero1 else np.sum(got != got[:1]))


@pytest.mark.parametrize(
    ("mesh", "zero1", "changes"),
    [
        *((*sums, INT8) for sums in SUMS),
        (*SUMS[1], INT4),
        *(pytest.param(*sums, INT4, marks=pytest.mark.slow) for sums in SUMS if sums != SUMS[1]),
    ],
)
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(mesh, zero1, changes):
    """What has arrived is off by what is left in the states, which does not grow; without feedback errors add up."""
    trained = made(mesh, zero1, **changes)
    arrived, right, state, got = steps(trained)
    assert unequal_copies(got, zero1) == 0
    assert not arrived[:, 1:-1].any()
    left = residual(trained, state)
    np.testing.assert_allclose(arrived + left, right, atol=2e-5)
    off = np.abs(left).max()
    assert 0 < off < (0.1 if changes is INT8 else 2.5)


def residual(trained, state):
    """Return what the states have left out of the sum that each device gets, by the definition of each exchange."""
    c, mesh = trained.compression.tables, trained.config.mesh
    ends = (0, mesh.pipe - 1) if mesh.pipe > 1 else (0,)
    part, shard = c.part, c.shard
    whole = np.zeros((mesh.tensor, *c.shape))
    parts = mesh.data if mesh.data > 1 else 1
    for end in ends:
        for tensor in range(mesh.tensor):
            for rank in range(mesh.data):
                own = jax.tree.map(lambda x, at=(rank, end, 0, tensor): x[at], state)
                if mesh.data > 1:  # messages to each rank
                    sent = np.concatenate(list(np.asarray(own.reduced["token"].sent, np.float64)), axis=shard.dim)
                    whole[tensor] += sent / mesh.data
                place = [slice(None)] * 2
                if parts > 1:
                    size = part.shape[shard.dim]
                    place[shard.dim] = slice(rank * size, (rank + 1) * size)
                for one in (own.swapped, own.gathered if end == 0 else ()):
                    if not isinstance(one, tuple):
                        whole[tensor][tuple(place)] += one
    x = np.zeros((mesh.data, mesh.pipe, 1, mesh.tensor, *c.shape))
    x[:, list(ends)] = whole
    if mesh.zero1 and mesh.data > 1:
        x = np.stack([np.split(one, mesh.data, axis=3 + shard.dim)[rank] for rank, one in enumerate(x)])
    return x


def test_without_feedback_errors_stay():
    lost = INT4 | {"embedding_options": {"block": 32, "feedback": False}}
    trained = made((2, 4, 1), False, **lost)
    arrived, right, state, got = steps(trained, 8)
    assert not jax.tree.leaves(state) and unequal_copies(got, False) == 0
    kept, exactly, *_ = steps(made((2, 4, 1), False, **INT4), 8)
    assert np.sqrt(np.mean((arrived - right) ** 2)) > 1.5 * np.sqrt(np.mean((kept - exactly) ** 2))


def test_copies_would_drift_if_a_stage_added_its_own_part_as_it_is(monkeypatch):
    """Negative control of the comparison of copies."""

    def wrong(self, x, state):
        wire, swapped = self.codec.encode(state.swapped, x)
        last = self.layout.stages - 1
        arrived = gradients.permute(wire, "pipe", ((0, last), (last, 0)))
        return x + self.codec.decode(arrived, x), state._replace(swapped=swapped)

    monkeypatch.setattr(TableCodec, "add_ends", wrong)
    *_, got = steps(made((2, 2, 1), True, **INT8), 1)
    assert unequal_copies(got, True) > 100


@pytest.mark.parametrize(("mesh", "zero1"), [((2, 2, 1), False), ((2, 1, 1), True)])
def test_tables_of_an_untied_head_are_reduced_over_data(mesh, zero1):
    identity, int8 = (
        made(mesh, zero1, tied=False, min_ratio=0.0, embedding_codec=codec) for codec in ("identity", "int8")
    )
    x = given(identity, 0)
    same = exchange(identity)(x, first(identity))[0]["token"]
    plain = made(mesh, zero1, tied=False)
    right = exchange(plain)(x, first(plain))[0]["token"]
    if not zero1:
        np.testing.assert_allclose(same, exact(plain, x), atol=1e-6)
    else:
        np.testing.assert_array_equal(same, right)
    found, state = exchange(int8)(x, first(int8))
    assert 1e-4 < np.abs(found["token"] - right).max() < 0.05
    assert state.swapped == () == state.gathered


@pytest.mark.parametrize("zero1", [True, False])
def test_positions_go_along_with_the_table(zero1):
    """In its messages over data; what has arrived and what is left add up."""
    trained = made((2, 4, 1), zero1, **INT8)
    run, state, arrived, right = exchange(trained), first(trained), 0, 0
    for step in range(STEPS):
        x = given(trained, step)
        found, state = jax.device_get(run(x, state))
        arrived, right = arrived + found["position"][:, 0, 0, 0], right + x["position"][:, 0, 0, 0].mean(0)
    whole = np.concatenate(list(arrived)) if zero1 else arrived[0]
    shape, shard = trained.compression.tables.arrays["position"]
    own = [jax.tree.map(lambda x, rank=rank: x[rank, 0, 0, 0], state.reduced["position"]) for rank in range(2)]
    left = [np.concatenate(list(one.sent)) / 2 for one in own]
    left += [] if zero1 else [np.concatenate([one.owned for one in own])]
    np.testing.assert_allclose(whole + sum(left), right, atol=2e-5)
    assert shape == (SEQUENCE, HIDDEN) and (shard.dim == 0) == zero1
    assert 0 < np.abs(sum(left)).max() < 0.1
    dense, _ = exchange(made((2, 4, 1), zero1))(x, ())
    assert "position" not in dense  # which travels with norms


RING = {
    "all-to-all": lambda op: op.bytes * (len(op.groups[0]) - 1) / len(op.groups[0]),
    "all-gather": lambda op: op.bytes * (len(op.groups[0]) - 1),
    "collective-permute": lambda op: op.bytes,
}


@pytest.mark.parametrize(("mesh", "zero1"), [((4, 2, 1), True), ((4, 2, 1), False), ((1, 2, 1), True)])
def test_the_program_sends_the_declared_bytes_and_so_does_the_planner(mesh, zero1):
    trained = made(mesh, zero1, **INT8)
    table, sent = trained.compression.tables, {}
    for op in hlo.collectives(exchange(trained).as_text()):
        sent[op.kind] = sent.get(op.kind, 0) + RING[op.kind](op)
    declared = {}
    for kind, size in table.traffic():
        kind = {"permute": "collective-permute"}.get(kind, kind)
        declared[kind] = declared.get(kind, 0) + size
    assert sent == declared
    part = 64 * HIDDEN // mesh[0]
    assert declared["collective-permute"] == part + 2 * part // 32
    codecs, shape = coded(trained.config.compress), table.shape
    assert codecs.table_bytes(shape, mesh[0]) == declared["collective-permute"]
    if mesh[0] > 1:
        priced = {}
        for one in (shape, (SEQUENCE, HIDDEN)):
            for kind, size, _ in codecs.table_exchanges(one, mesh[0], zero1):
                priced[kind] = priced.get(kind, 0) + size
        assert priced == {kind: size for kind, size in declared.items() if kind != "collective-permute"}


PLACES = {"backward_codec": "int8", "data_codec": "int4", "data_start": 0.0}


def test_training_keeps_both_copies_equal():
    """With all gradients compressed, and without ZeRO-1, so that all data ranks hold all of the table."""
    losses, state = trained_steps(config((2, 2, 1), micro_batches=2, layers=2, zero1=False, **PLACES, **INT4), 6)
    table = state.params["embedding"]["token"]
    np.testing.assert_array_equal(table[0], table[-1])
    assert np.abs(table[0] - canonical(2)["embedding"]["token"]).max() > 1e-3
    assert losses[-1] < losses[0] - 0.3
    assert all(np.any(x) for x in jax.tree.leaves(state.codec["embedding"]))


def test_the_study_counts_the_bytes():
    """Of the first and the last stage; as they are positions are all-reduced on all stages."""
    dense, coded_bytes = (
        measurements.wire_bytes(trainer(config((2, 4, 1), micro_batches=2, zero1=False, **PLACES, **changes)))
        for changes in ({}, INT4)
    )
    devices, part, positions = 4, 64 * HIDDEN // 2, SEQUENCE * HIDDEN // 2
    sent = {n: n // 2 + 2 * n // 32 for n in (part, positions)}
    assert (dense["embedding"], coded_bytes["embedding"]) == (devices * 4 * part, devices * sent[part])
    more = devices * (sent[part] + sent[positions])
    for kind in ("reduce-scatter", "all-gather"):
        assert coded_bytes[kind] == dense[kind] - devices * 4 * part + more
    assert coded_bytes["all-reduce"] == dense["all-reduce"] - 2 * devices * 4 * SEQUENCE * HIDDEN


@functools.cache
def _text(**changes):
    trained = trainer(config((2, 2, 1), **changes))
    checks.check(trained.compression)
    return dict(trained.compression.describe()), trained.compression.link_settings()


def test_the_table_and_the_identity_name_the_codec():
    rows, settings = _text(**{"embedding_codec": "int8"})
    text = rows["embedding's gradients"]
    assert text.startswith("QuantisedBlocks(bits=8") and "over data and between the first and the last stage" in text
    assert settings["embedding codec"].startswith("QuantisedBlocks(bits=8")
    rows, settings = _text()
    assert "embedding's gradients" not in rows and "embedding codec" not in settings
    assert "embedding" not in trainer(config((2, 2, 1))).compression.init()


@dataclasses.dataclass(frozen=True)
class OfLayers(Identity):
    """A codec for messages of three dims, as those between stages."""

    def encode(self, state, x, active=True):
        batch, sequence, hidden = x.shape
        return x.reshape(batch * sequence, hidden), state


@pytest.mark.parametrize(
    ("mesh", "changes", "words"),
    [
        (
            (2, 2, 1),
            {"embedding_codec": "identity"},
            ["compress.embedding.codec=identity", "64 x 32", "2 times smaller"],
        ),
        ((2, 2, 1), {"embedding_codec": f"{__name__}:OfLayers"}, ["OfLayers()", "does not take messages of [32, 32]"]),
        ((2, 2, 1), {"embedding_codec": "powersgd"}, ["compress.embedding.codec=powersgd"]),
        ((2, 2, 1), {"embedding_codec": "lowrank"}, ["compress.embedding.codec=lowrank is not offered", "=int8"]),
        ((2, 2, 1), {"embedding_options": {"block": 32}}, ["compress.embedding.options.block", "names none"]),
        ((2, 2, 1), INT8 | {"embedding_sync": "unfused"}, ["needs the fused synchronisation", "sync=auto"]),
        ((1, 1, 1), INT8, ["travel over data or between the two copies", "mesh.data=2"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(mesh, changes, words):
    with pytest.raises(UserError) as error:
        checks.check(trainer(config(mesh, **changes)).compression)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)
