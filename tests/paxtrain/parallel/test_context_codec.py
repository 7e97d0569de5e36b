"""Codecs of the keys and values that devices of a context group send each other, in whole steps of training."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from paxtrain.config import Config
from paxtrain.parallel.compression import checks
from paxtrain.xla import hlo
from tests import small
from tests.paxtrain.compressed import compiled, trained_steps
from tests.small import trainer

BLOCK, LAYERS = 32, 2


def config(mesh, codec="int8", form="ring", micro_batches=2, schedule="1f1b", **model) -> Config:
    """Return a configuration whose keys and values go through a codec; "": they travel as they are."""
    options = {"block": BLOCK} if codec in ("int8", "fp8") else {}
    return small.config(
        mesh,
        (2 * micro_batches * mesh[0], 2),
        model={"layers": LAYERS, "vocab_multiple": 64, **model},
        mesh={"context_form": form},
        pipeline={"schedule": schedule, "scan_layers": "off"},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 1},
        run={"steps": 100},
        compress={"context": {"codec": codec, "options": options}},
    )


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ((1, 2, 2, 2), {"form": "gather", "schedule": "zb_h1"}),
        ((2, 1, 1, 4), {"family": "llama", "kv_heads": 2, "separator": 3}),
    ],
    ids=str,
)
def test_a_codec_that_rounds_nothing_gives_the_gradients_of_none(mesh, how):
    coded, plain = (config(mesh, codec, **how) for codec in ("identity", ""))
    params, tokens = small.canonical(plain.model), small.tokens(plain)
    both = [small.gradients(trainer(c), params, tokens)[2] for c in (coded, plain)]
    for mine, right in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(mine, right, atol=2e-6 * np.abs(right).max(), rtol=0)


def test_a_step_sends_the_declared_bytes():
    """Codes and scales travel in place of float32 keys and values; their gradients travel as they are."""
    ranks, m = 4, 3
    keys = 2 * small.SEQUENCE // ranks * small.MODEL["hidden"]  # of a device's tokens of a micro-batch

    def sent(codec: str) -> collections.Counter:
        found = collections.Counter[int]()
        for op in hlo.collectives(compiled(trainer(config((1, 1, 1, ranks), codec, micro_batches=m))).as_text()):
            if op.kind == "collective-permute":
                found[op.bytes] += op.executions
        return found

    plain, coded = sent(""), sent("int8")
    gradients = 2 * ranks * LAYERS * m  # of keys and of values, once round
    scales = 4 * keys // BLOCK  # XLA sends bfloat16 as float32 on CPUs
    assert coded.keys() == {4 * keys, keys, scales} and coded[4 * keys] == gradients
    assert coded[keys] == coded[scales] == plain[4 * keys] - gradients > gradients
    assert plain.keys() == {4 * keys}


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_losses_stay_beside_those_of_plain_keys_and_validation_sees_them_as_they_are(codec):
    coded, plain = (config((1, 1, 1, 2), one) for one in (codec, ""))
    (mine, state), (right, _) = (trained_steps(c, 30) for c in (coded, plain))
    assert right[-1] < right[0] - 1 and max(abs(np.subtract(mine, right))) > 1e-5
    assert mine[-1] == pytest.approx(right[-1], rel=0.02)
    losses = []
    for c in (coded, plain):
        trained = trainer(c)
        params = jax.device_put(state.params, trained.state_shardings.params)
        losses.append(float(trained.evaluate(params, jax.device_put(small.tokens(c), trained.batch_sharding))))
    assert losses[0] == losses[1]


def test_the_table_says_what_the_codec_does():
    trained = trainer(config((1, 1, 1, 2)))
    checks.check(trained.compression)
    keys = 2 * small.SEQUENCE // 2 * small.MODEL["hidden"]
    words = dict(trained.compression.describe())["keys and values"]
    assert f"{keys + 2 * keys // BLOCK} of {4 * keys} bytes" in words
    dense = dataclasses.replace(trained.config, compress=type(trained.config.compress)())
    assert "keys and values" not in dict(trainer(dense).compression.describe())
