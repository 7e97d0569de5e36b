"""What correctness accepts, and what it refuses."""

import jax
import pytest

from experiments.gpu import correctness
from paxtrain.errors import UserError
from paxtrain.parallel.step import Trainer

TINY = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "model.sequence": 8,
    "batch.global_batch": 4,
    "batch.micro_batch": 2,
}
CASE = [{"name": "one", "virtual": False}]


def test_gradients_of_the_step_are_those_of_the_plain_model(tmp_path):
    found = correctness.gradients(tmp_path, TINY, CASE, "float32")
    assert found["errors"]["one"]["gradient"] < 1e-5


def test_a_gradient_that_is_wrong_is_named(tmp_path, monkeypatch):
    """Negative control: gradients that are one in a thousand too large."""
    true = Trainer.loss_and_gradients

    def wrong(self, *args):
        loss, grads, *rest = true(self, *args)
        return loss, jax.tree.map(lambda g: 1.001 * g, grads), *rest

    monkeypatch.setattr(Trainer, "loss_and_gradients", wrong)
    with pytest.raises(UserError, match="one differ from the CPU's float32 beyond"):
        correctness.gradients(tmp_path, TINY, CASE, "float32")
