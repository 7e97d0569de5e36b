"""Layers of two kinds in the parallel step: what is compressed over data, checkpoints, and Muon's matrices.

Gradients with every schedule are in tests/paxtrain/testing/test_check_model.py.
"""

import functools

import jax
import numpy as np
import pytest

from paxtrain.config import from_dict
from paxtrain.errors import UserError
from paxtrain.outer.fragments import Fragments
from paxtrain.parallel.layout import Layout
from tests.compress_settings import nested
from tests.paxtrain.compressed import FAST, assert_close, batch, trainer

MIXED = "tests.paxtrain.model.mixed:Mixed"
FIRST_KERNELS = {("wide", "kernel"), ("narrow", "kernel")}


def config(mesh=(2, 2, 1), optimizer="adamw", outer=None, **compress):
    data, pipe, tensor = mesh
    return from_dict({
        "model": {"layers": 6, "hidden": 32, "heads": 4, "intermediate": 48, "sequence": 16, "vocab_size": 61,
                  "vocab_multiple": 64, "dtype": "float32", "module": MIXED},
        "mesh": {"data": data, "pipe": pipe, "tensor": tensor},
        "batch": {"global_batch": 8, "micro_batch": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1, "name": optimizer},
        "run": {"steps": 100},
        "compress": nested(compress),
        **({"outer": outer} if outer else {}),
    })  # fmt: skip


@functools.cache
def gradients(c):
    """Return canonical gradients of a step, and the state of its compression."""
    one = trainer(c)
    params, tokens = one.init(0).params, batch(one)
    _, grads, codec, *_ = jax.jit(one.loss_and_gradients).lower(params, tokens).compile(FAST)(params, tokens)
    return jax.device_get((jax.jit(one.layout.to_canonical)(grads), codec))


def test_full_rank_over_data_is_no_compression_for_either_kind():
    full = config(data_stages="all", data_rank=32, min_ratio=0.0)
    assert set(trainer(full).compression.data_kernels) > FIRST_KERNELS
    assert_close(gradients(full)[0], gradients(config())[0], 1e-3)


def test_one_kind_may_have_no_kernel_that_is_compressed():
    """At rank 10 the kernels of dense layers shrink less than twice, so they are reduced as they are."""
    some = config(data_stages="all", data_rank=10)
    compression = trainer(some).compression
    assert compression.layout.slot_kinds == ("dense", "experts", "dense", "experts")
    assert compression.slot_kernels == ((), (("up", "kernel"),), (), (("up", "kernel"),))
    (found, codec), (right, _) = gradients(some), gradients(config())
    assert [error.shape[-2:] for error in codec["data"].error] == [(32, 192)] * 2
    for name, _ in FIRST_KERNELS:
        np.testing.assert_array_equal(found["layers"][name]["kernel"], right["layers"][name]["kernel"])
    up, exact = (grads["layers"]["up"]["kernel"] for grads in (found, right))
    assert np.abs(up - exact).max() > 1e-3 * np.abs(exact).max()


def test_fragments_are_of_one_kind():
    c = config(outer={"every": 4, "fragments": 2})
    with pytest.raises(UserError, match=r"outer.fragments=2 .* of the kinds dense, experts; outer.fragments=1"):
        Fragments(Layout(c))


@pytest.mark.slow
def test_a_step_of_muon_on_a_mesh_is_that_of_one_device():
    after = []
    for mesh in ((2, 2, 1), (1, 1, 1)):
        one = trainer(config(mesh, "muon"))
        state, _ = one.step(one.init(0), batch(one))
        after.append(jax.device_get(one.canonical(state)["params"]))
    assert_close(*after, 1e-4)
