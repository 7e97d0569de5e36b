"""Compression over data inside the training step: the tied embedding's exchange, and the layers' gradients."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from paxtrain.parallel import gradients
from tests.paxtrain.compressed import (
    FAST,
    FULL,
    HIDDEN,
    assert_close,
    batch,
    canonical,
    collectives,
    config,
    differences,
    evaluated,
    exact,
    trained_steps,
    trainer,
)

pytestmark = pytest.mark.once

# --- Tied embedding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "zero1"),
    [
        pytest.param((1, 2, 1), True, marks=pytest.mark.slow),
        pytest.param((1, 3, 2), True, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), True, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), False, marks=pytest.mark.slow),
        ((2, 2, 2), False),
        pytest.param((4, 2, 1), True, marks=pytest.mark.slow),
    ],
)
def test_fused_equals_unfused_embedding(mesh, zero1):
    """Defect "embedding sums across vocabulary shards": with tensor=2 each rank has different rows."""
    for embedding in ("fused", "unfused"):
        c = config(mesh, 2, layers=mesh[1], zero1=zero1, embedding_sync=embedding)
        _, grads, mesh_layout, _ = evaluated(c)
        token = mesh_layout["embedding"]["token"]
        np.testing.assert_array_equal(token[0], token[-1])
        assert_close(grads["embedding"]["token"], exact(c)[1]["embedding"]["token"])


@pytest.mark.parametrize("zero1", [pytest.param(True, marks=pytest.mark.slow), False])
def test_fused_embedding_sends_the_formulas_bytes(zero1):
    """Without ZeRO-1 a ring sends V(2D-1)/D for V bytes of table and D data ranks, and V(3D-2)/D unfused."""
    ranks = 4
    table = 64 * HIDDEN * 4

    def sent(embedding: str) -> list[float]:
        trained = trainer(config((ranks, 2, 1), 1, layers=2, zero1=zero1, embedding_sync=embedding))
        ring = {
            "all-reduce": 2 * (ranks - 1) / ranks,
            "all-to-all": (ranks - 1) / ranks,  # a reduce-scatter on CPUs
            "all-gather": ranks - 1,
        }
        return [
            sum(
                op.executions * op.bytes * (1 if op.pairs else ring.get(op.kind, 0))
                for op in collectives(trained, stage)
            )
            for stage in (0, 1)  # the first one reduces in its last B, the other behind the rows
        ]

    fused = (2 * ranks - 1) / ranks if not zero1 else 1.0
    saved = table * ((3 * ranks - 2) / ranks - fused)
    assert np.subtract(sent("unfused"), sent("fused")) == pytest.approx([saved, saved])


@pytest.mark.slow
def test_tied_copies_stay_identical():
    for embedding in ("fused", "unfused"):
        _, state = trained_steps(
            config(
                (2, 2, 2),
                1,
                embedding_sync=embedding,
                backward_messages="all",
                backward_rank=4,
                data_stages="0",
                data_rank=4,
            ),
            5,
        )
        [adam] = [
            part for part in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
        ]
        for tree in (state.params, adam.mu):
            token = tree["embedding"]["token"]
            np.testing.assert_array_equal(token[0], token[-1])


@pytest.mark.parametrize("zero1", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_everything_together_keeps_the_embedding_gradient(zero1):
    """Defect "SC and FE together drop the input embedding's gradient": here it equals the dense run's."""
    everything = {**FULL, "data_stages": "all", "data_rank": 4, "embedding_sync": "fused"}
    c = config((2, 2, 1), 1, layers=2, zero1=zero1, **everything)
    _, grads, *_ = evaluated(c)
    _, right = exact(c)
    assert_close(grads["embedding"], right["embedding"], 2e-4)
    assert np.abs(grads["embedding"]["token"]).max() > 0.01
    # Gradients compressed over data differ, and no others.
    assert differences(grads["layers"]["up"]["kernel"], right["layers"]["up"]["kernel"])[""] > 0.01
    _, grads, *_ = evaluated(config((2, 2, 1), 1, layers=2, zero1=zero1, data_stages="all", data_rank=4))
    assert_close(grads["embedding"], right["embedding"])


# --- Gradients over data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero1", "codec"),
    [
        (True, {"data_codec": "int8", "data_options": {"block": 32}}),
        pytest.param(True, {"data_rank": 4}, marks=pytest.mark.slow),
        pytest.param(False, {"data_rank": 4}, marks=pytest.mark.slow),
    ],
)
def test_stages_that_are_not_chosen_are_bit_equal_to_dense(zero1, codec):
    _, grads, *_ = evaluated(config((2, 2, 1), 1, zero1=zero1, data_stages="1", **codec))
    _, right, *_ = evaluated(config((2, 2, 1), 1, zero1=zero1))
    for path, mine in jax.tree_util.tree_leaves_with_path(grads):
        dense = functools.reduce(lambda tree, key: tree[key.key], path, right)
        if path[0].key != "layers":
            np.testing.assert_array_equal(mine, dense)
            continue
        np.testing.assert_array_equal(mine[:2], dense[:2])
        if path[-1].key == "kernel":
            assert np.abs(mine[2:] - dense[2:]).max() > 1e-3 * np.abs(dense).max()
        else:  # norms and biases go dense on every stage
            np.testing.assert_array_equal(mine, dense)


def test_none_chosen_is_dense():
    _, grads, *_ = evaluated(config((2, 2, 1), 1, layers=2, data_stages="all", data_rank=4), stage_ranks=(0, 0))
    assert all(e == 0 for e in differences(grads, evaluated(config((2, 2, 1), 1, layers=2))[1]).values())


def test_a_kernel_that_higher_ranks_leave_dense_takes_its_error_along():
    """From rank 4 to 10 the smallest kernel becomes dense: its gradient and its error arrive, and no error stays."""
    two = functools.partial(config, (2, 2, 1), 1, layers=2)
    low = trainer(two(data_stages="all", data_rank=10, data_rank_min=4, data_adapt_every=5), stage_ranks=(4, 4))
    high = dataclasses.replace(low, stage_ranks=(10, 10))
    params = jax.device_put(jax.jit(low.layout.from_canonical)(canonical(2)), low.state_shardings.params)
    tokens, names = batch(low), [name for name, _ in low.compression.data_kernels]
    gradients = {}
    state = jax.jit(low.compression.init, out_shardings=low.state_shardings.codec)()
    for t in (low, high):
        run = jax.jit(lambda p, x, s, t=t: t.loss_and_gradients(p, x, None, s))
        _, grads, state, *_ = run.lower(params, tokens, state).compile(FAST)(params, tokens, state)
        gradients[t.stage_ranks] = jax.device_get(grads)["layers"]["out"]["kernel"]
    where = [i for i, name in enumerate(names) if name == "out"]
    errors = jax.device_get(state["data"].error)
    assert len(errors) == len(names)  # a layer a stage
    for i, error in enumerate(errors):
        assert np.any(error) == (names[i] != "out")
    assert where
    right = evaluated(two())[2]["layers"]["out"]["kernel"]
    # The error of the first step arrives with the second: together they are twice the gradient.
    np.testing.assert_allclose(gradients[4, 4] + gradients[10, 10], 2 * right, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    "mesh",
    [pytest.param((1, 2, 1), marks=pytest.mark.slow), (2, 2, 2), pytest.param((4, 2, 1), marks=pytest.mark.slow)],
)
def test_full_rank_over_data_is_no_compression(mesh):
    """This holds for any number of data ranks. With tensor=2 a kernel whose smaller side is below the rank is dense."""
    c = config(mesh, 1, layers=2, data_stages="all", data_rank=32, min_ratio=0.0)
    assert_close(evaluated(c)[1], exact(c)[1], 1e-3)


def test_the_ratio_gate_leaves_small_kernels_dense():
    """Defect "no minimum-ratio gate": rank 10 halves all kernels but the smallest, which would shrink 1.6 times."""
    c = config((2, 2, 1), 1, layers=2, data_stages="all", data_rank=10)
    assert {name for name, _ in trainer(c).compression.data_kernels} == {"qkv", "up", "down"}
    _, grads, *_ = evaluated(c)
    _, right, *_ = evaluated(config((2, 2, 1), 1, layers=2))
    np.testing.assert_array_equal(grads["layers"]["out"]["kernel"], right["layers"]["out"]["kernel"])
    assert differences(grads["layers"]["up"]["kernel"], right["layers"]["up"]["kernel"])[""] > 1e-3


def test_data_ranks_agree_on_the_factor_and_keep_separate_errors():
    c = config((4, 1, 1), 1, layers=2, data_stages="all", data_rank=4)
    state = trained_steps(c, 3)[1].codec["data"]
    for q in state.q:
        np.testing.assert_array_equal(q, np.broadcast_to(q[:1], q.shape))
    assert all(np.abs(e[0] - e[1]).max() > 0 for e in state.error)


def test_the_sums_see_a_reduction_that_was_left_out(monkeypatch):
    """Negative control of the comparisons over data: without the mean of one array they fail."""
    monkeypatch.setattr(
        gradients,
        "packed_scatter",
        lambda arrays, dims, axis: [
            jax.lax.dynamic_slice_in_dim(x, 0, x.shape[d] // 2, axis=d) for x, d in zip(arrays, dims, strict=True)
        ],
    )
    c = config((2, 2, 1), 1, layers=2, data_stages="all", data_rank=5)
    _, grads, *_ = evaluated(c)
    _, right = exact(c)
    assert differences(grads["layers"]["qkv"]["bias"], right["layers"]["qkv"]["bias"])[""] > 0.01
