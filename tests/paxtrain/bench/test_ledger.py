"""The ledger of the 1.3B model's step stays within bounds; programs are compiled for GPUs that are not there."""

import dataclasses

import jax
import pytest

from paxtrain.bench import ledger
from paxtrain.config.load import load_config
from paxtrain.devices.gpus import GPUS
from paxtrain.xla import aot

H100 = GPUS["h100"]


@pytest.fixture(scope="module", autouse=True)
def plugin():
    jax.devices()  # as in a process that already computes on the CPU
    try:
        aot.devices("h100", hosts=1, per_host=1)
    except aot.Unavailable as reason:
        pytest.skip(str(reason))


def of(save: str) -> ledger.Ledger:
    c = ledger.one_device(load_config("gpt_1_3b", {"pipeline.save": save}))
    return ledger.read(ledger.ours(c, "h100"), c, H100)


@pytest.fixture(scope="module")
def residuals() -> ledger.Ledger:
    return of("residuals")


def test_the_step_runs_the_models_products_and_moves_little_else(residuals):
    """The bound of the bytes is what the plain step moved when the ledger was first kept."""
    assert 0.99 < residuals.executed < 1.001
    assert residuals.total < 35.2e9
    assert residuals.moved["head"] < 4.9e9
    assert residuals.moved["layers"] < 13.5e9
    assert residuals.temporary < 5.3e9
    assert residuals.mfu > 0.545


def test_saving_products_only_runs_none_of_them_twice_and_moves_little_more(residuals):
    dots = of("dots")
    assert dots.executed < 1.001
    assert dots.total < 1.15 * residuals.total
    assert dots.temporary < 4.1e9


def test_the_plain_step_runs_the_same_products():
    c = ledger.one_device(load_config("gpt_1_3b"), layers=1)
    plain = ledger.read(ledger.plain(c, "h100"), c, H100)
    assert 0.99 < plain.executed < 1.001


def test_reductions_and_transfers_of_a_mesh_lie_under_products():
    sent = ledger.collectives(ledger.ours(ledger.on_mesh(load_config("gpt_1_3b"), layers=4), "h100"))
    # The rest: the table's gradient, which its exchange between the stages waits for, and one layer of each stage.
    assert sent["reduce-scatter"].hidden > 0.25
    assert sent["collective-permute"].hidden > 0.7


def test_a_product_that_runs_twice_would_be_seen():
    """Negative control: with layer inputs saved, B runs the layers' forward again."""
    c = ledger.one_device(load_config("gpt_1_3b", {"pipeline.save": "layer_inputs"}), layers=2)
    c = dataclasses.replace(c, model=dataclasses.replace(c.model, hidden=512, heads=4, vocab_size=1024))
    assert ledger.read(ledger.ours(c, "h100"), c, H100).executed > 1.1
