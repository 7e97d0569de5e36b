"""Codecs of gradients whose sums are in shards: by hand in numpy, what is left out, bytes, losses and refusals."""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from paxtrain.config import Config
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.parallel.compression import checks
from paxtrain.parallel.reduction import DataShards
from paxtrain.xla import hlo
from tests import small
from tests.paxtrain.compressed import compiled, trained_steps
from tests.small import trainer

pytestmark = pytest.mark.once
BLOCK = 32
KERNELS = ("down", "out", "qkv", "up")


def config(
    mesh, micro_batches=2, shard="weights", group=0, layers=2, schedule="1f1b", chunks=1, scan="on", **compress
) -> Config:
    """Return a configuration with int8 in blocks of 32 over data, from the first step on."""
    coded = {"data_codec": "int8", "data_options": {"block": BLOCK}, "data_start": 0.0} if mesh[0] > 1 else {}
    return small.config(
        mesh,
        (2 * micro_batches * mesh[0], 2),
        model={"layers": layers, "vocab_multiple": 64},
        mesh={"shard": shard, "shard_group": group},
        pipeline={"schedule": schedule, "virtual_stages": chunks, "scan_layers": scan},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 1},
        run={"steps": 100},
        compress=coded | compress,
    )


class Found(NamedTuple):
    grads: dict  # canonical gradients of a step
    errors: dict[str, list[np.ndarray]]  # of each layer's kernel what each data rank has left out, [D, ...]


def step(c: Config) -> Found:
    """Return the gradients of a step, and what its codec has left out, of one device in each data rank."""
    trained = trainer(c)
    params = jax.device_put(
        jax.jit(trained.layout.from_canonical)(small.canonical(c.model)), trained.state_shardings.params
    )
    tokens = jax.device_put(small.tokens(c), trained.batch_sharding)
    _, grads, codec, *_ = jax.jit(trained.loss_and_gradients)(params, tokens)
    grads, sent = jax.device_get((jax.jit(trained.layout.to_canonical)(grads), codec["data"].sent))
    kernels = trained.compression.data_kernels
    errors = {name: [] for name, _ in kernels}
    for error, (name, _) in zip(sent, kernels * (len(sent) // len(kernels)), strict=True):
        errors[name] += list(np.moveaxis(error, 1, 0))  # stages first
    return Found(grads, errors)


@functools.cache
def exact(data: int, micro_batches: int, layers: int = 2) -> list[list[dict]]:
    """Return the plain model's gradients of each rank's micro-batches, over their number as a step takes them."""
    c = config((1, 1, 1), data * micro_batches, layers=layers)
    params, tokens = small.canonical(c.model), small.tokens(c).reshape(data, micro_batches, 2, -1)
    gradient = jax.jit(jax.grad(lambda params, tokens: transformer.loss(params, tokens, c.model) / micro_batches))
    return [[jax.device_get(gradient(params, one)) for one in rank] for rank in tokens]


def rounded(x: np.ndarray) -> np.ndarray:
    """Return what int8 in blocks makes of numbers, by its definition."""
    blocks = x.reshape(-1, BLOCK)
    scale = (np.abs(blocks).max(1) / np.float32(127)).astype(jax.dtypes.bfloat16).astype(np.float32)[:, None]
    codes = np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)), -127, 127)
    return (codes * scale).reshape(x.shape)


def sent(grads: list[np.ndarray], members: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the mean over ranks of what their messages add up to, and what each rank has left out.

    Args:
        grads: gradients [messages, rows, ...] of each rank, of which each other rank has an equal number of rows.
        members: number of ranks.
    """
    total, errors = 0, []
    for messages in grads:
        error = np.zeros_like(messages[0])
        for one in messages:
            whole = one + error
            arrived = np.concatenate([rounded(part) for part in np.split(whole, members)])
            error, total = whole - arrived, total + arrived
        errors.append(error)
    return total / members, errors


def assert_rounds_alike(mine: np.ndarray, right: np.ndarray, what: str) -> None:
    """Require equal numbers, except a few that sums in another order have moved to the next code."""
    off, largest = np.abs(mine - right), np.abs(right).max()
    assert (off > 1e-5 * largest).mean() < 2e-3, what
    assert off.max() < largest / 50, what


@pytest.mark.parametrize(
    ("mesh", "shard", "how"),
    [
        ((2, 1, 1), "weights", {}),
        ((2, 1, 1), "weights", {"scan": "off"}),
        ((4, 1, 1), "gradients", {"scan": "off"}),
        ((2, 2, 1), "weights", {}),
        pytest.param((2, 2, 1), "weights", {"schedule": "zb_h1"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), "gradients", {"schedule": "zb_h1", "scan": "off"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), "gradients", {"schedule": "gpipe"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_micro_batch_is_sent_as_codes_with_the_error_of_those_before(mesh, shard, how):
    """By hand: each rank sends each other one its rows of each micro-batch's gradient plus what it has left out."""
    data, m, c = mesh[0], 2, config(mesh, shard=shard, **how)
    found, ranks = step(c), exact(data, m)
    for name in KERNELS:
        for layer in range(2):
            messages = [[micro["layers"][name]["kernel"][layer] for micro in rank] for rank in ranks]
            right, errors = sent(messages, data)
            assert_rounds_alike(found.grads["layers"][name]["kernel"][layer], right, f"{name} {layer}")
            plain = sum(sum(rank) for rank in messages) / data
            assert np.abs(right - plain).max() > 1e-4 * np.abs(plain).max()  # the codec has rounded
            for rank, error in enumerate(errors):
                # Codes differ in few numbers, but errors there by a whole one.
                mine = found.errors[name][layer][rank].reshape(error.shape)
                assert (np.abs(mine - error) > 1e-5 * np.abs(plain).max()).mean() < 2e-3
    for name in ("final_norm", "embedding"):
        for key, x in found.grads[name].items():
            plain = sum(sum(micro[name][key] for micro in rank) for rank in ranks) / data
            np.testing.assert_allclose(x, plain, atol=1e-5 * np.abs(plain).max(), rtol=0)


def test_groups_of_ranks_sum_as_they_are_and_send_each_other_codes():
    """By hand: with compress.data.inside in each micro-batch; with mesh.shard_group once a step."""
    ranks, m = exact(4, 2), 2
    for group in (0, 2):
        found = step(config((4, 1, 1), m, group=group, data_inside=2))
        for name in KERNELS:
            micro = np.array([[one["layers"][name]["kernel"][0] for one in rank] for rank in ranks])
            groups = micro.reshape(2, 2, *micro.shape[1:]).mean(1)  # [groups, m, rows, ...]
            if group:
                groups = groups.sum(1, keepdims=True)
            blocks = groups.reshape(*groups.shape[:2], 4, -1, *groups.shape[3:])  # of each rank
            right = np.zeros_like(blocks[0, 0])
            for k in range(2):
                # A group's shard is one half of the rows; without shard groups rank d has the d-th quarter.
                own = slice(2 * k, 2 * k + 2) if group else slice(k, None, 2)
                parts = blocks[:, :, own]
                right[own] = sent(list(parts.reshape(*parts.shape[:2], -1, *parts.shape[4:])), 2)[0].reshape(
                    right[own].shape
                )
            right = right.reshape(micro.shape[2:])
            assert_rounds_alike(found.grads["layers"][name]["kernel"][0], right, f"{name} {group}")
            plain = micro.sum(1).mean(0)
            assert np.abs(right - plain).max() > 1e-4 * np.abs(plain).max()


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ((4, 1, 2), {"data_inside": 2}),
        ((4, 2, 1), {"group": 2, "data_inside": 2, "schedule": "eager_1f1b"}),
        pytest.param((2, 2, 2), {"shard": "gradients", "schedule": "zb_v", "chunks": 2}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), {"schedule": "interleaved_1f1b", "chunks": 2}, marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 2), {"scan": "off"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_codec_that_rounds_nothing_gives_the_gradients_of_none(mesh, how):
    how = {"layers": 4, **how}
    coded = config(mesh, data_codec="identity", data_options={}, min_ratio=0.0, **how)
    assert trainer(coded).compression.data_kernels
    dense = dataclasses.replace(coded, compress=type(coded.compress)())
    params, tokens = small.canonical(coded.model), small.tokens(coded)
    both = (small.gradients(trainer(c), params, tokens)[2] for c in (coded, dense))
    for mine, right in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(mine, right, atol=2e-6 * np.abs(right).max(), rtol=0)


def test_the_virtual_mesh_sends_the_same():
    c = config((4, 1, 1), data_inside=2)
    params, tokens = small.canonical(c.model), small.tokens(c)
    mine, right = (small.gradients(one, params, tokens)[2] for one in (small.emulated(c), trainer(c)))
    for one, other in zip(*map(jax.tree.leaves, (mine, right)), strict=True):
        assert_rounds_alike(one, other, "")


def test_errors_that_are_dropped_show(monkeypatch):
    """Negative control: each micro-batch begins with no error, as without feedback."""
    reduced = DataShards._reduced

    def forgetful(self, made, errors):
        found, after = reduced(self, made, errors)
        return found, after._replace(kernels=jax.tree.map(lambda x: 0 * x, after.kernels))

    right = step(config((2, 1, 1)))
    monkeypatch.setattr(DataShards, "_reduced", forgetful)
    found = step(config((2, 1, 1)))
    monkeypatch.undo()
    kept = step(config((2, 1, 1), data_options={"block": BLOCK, "feedback": False}))
    assert not any(kept.errors.values())
    for name in KERNELS:
        wrong, mine, other = (one.grads["layers"][name]["kernel"] for one in (found, right, kept))
        assert (np.abs(wrong - mine) > 1e-5 * np.abs(mine).max()).mean() > 0.1
        assert_rounds_alike(wrong, other, name)


def test_before_the_start_gradients_travel_as_they_are_and_errors_stay():
    c = config((2, 1, 1))
    dense = dataclasses.replace(c, compress=type(c.compress)())
    params, tokens = small.canonical(c.model), small.tokens(c)
    mine, right = (small.gradients(one, params, tokens)[2] for one in (trainer(c, stage_ranks=(0,)), trainer(dense)))
    for one, other in zip(*map(jax.tree.leaves, (mine, right)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "how", [{"data_codec": "int4"}, {"data_codec": "int4", "group": 2, "data_inside": 2, "weights_codec": "int8"}]
)
def test_losses_stay_beside_those_of_plain_gradients(how):
    mesh = (4 if "group" in how else 2, 1, 1)
    plain = {"data_codec": "", "data_options": {}, "data_inside": 1, "weights_codec": ""}
    coded, _ = trained_steps(config(mesh, **how), 30)
    dense, _ = trained_steps(config(mesh, **how | plain), 30)
    assert dense[-1] < dense[0] - 1 and max(abs(np.subtract(coded, dense))) > 1e-5
    assert coded[-1] == pytest.approx(dense[-1], rel=0.02)


def test_a_step_sends_the_declared_bytes_with_each_micro_batch():
    """Operands of a device, for float32 gradients before: codes and scales of all kernels, m times; or once between."""
    m, kernels = 3, 2 * 12 * small.MODEL["hidden"] ** 2
    coded = kernels + 2 * kernels // BLOCK

    def sent_by(c: Config) -> collections.Counter:
        found = collections.Counter[object]()
        for op in hlo.collectives(compiled(trainer(c)).as_text()):
            if op.kind == "all-to-all":
                found[op.groups if c.mesh.shard_group else 0] += op.bytes * op.executions
        return found

    plain = {"data_codec": "", "data_options": {}, "data_inside": 1}
    before, after = (sent_by(config((2, 1, 1), m, scan="off", **how)) for how in (plain, {}))
    assert before[0] - after[0] == m * (4 * kernels - coded)
    grouped = {"group": 2, "data_inside": 2, "scan": "off"}
    before, after = (sent_by(config((4, 1, 1), m, **grouped | how)) for how in (plain, {}))
    inside, between = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert before[inside] == after[inside]
    assert before[between] - after[between] == (4 * kernels - coded) // 2


def test_the_table_says_when_and_where_a_codec_encodes():
    for c, words in (
        (config((2, 1, 1)), "of down, out, qkv, up in each micro-batch"),
        (config((4, 1, 1), group=2, data_inside=2), "of down, out, qkv, up between groups of 2"),
    ):
        checks.check(trainer(c).compression)
        assert words in dict(trainer(c).compression.describe())["gradients over data"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"data_codec": "", "data_options": {}, "data_stages": "all"}, "low rank (compress.data) does not take"),
        ({"mesh": (2, 2, 1), "data_stages": "0"}, "on all stages or on none, but compress.data.stages=0"),
        ({"mesh": (4, 1, 1), "group": 2}, "compress.data.inside=1; compress.data.inside=2, or mesh"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(how, words):
    with pytest.raises(UserError) as error:
        config(how.pop("mesh", (2, 1, 1)), **how)
    assert words in str(error.value) and "\n" not in str(error.value)
