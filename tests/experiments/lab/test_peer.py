"""The experiment beside PyTorch, small: both systems train the same; steps, compute and bytes of both are counted."""

import numpy as np
import pytest

from experiments.hosts import hosts
from experiments.lab.laboratory import Lab
from experiments.lab.measuring import peer
from tests import small

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")
SIZES = {"global_batch": 16, "layers": 2, "hidden": 32, "sequence": 16}
KINDS = {kind: split for kind, split in peer.kinds((2, 2, 1), **SIZES).items() if kind in ("1f1b", peer.DENSE)}
STEPS = 3


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peer")
    small.corpus(folder)
    lab = Lab(folder / "lab", str(folder / "data"))
    with peer.Both.up(lab, KINDS, peer.ENVIRONMENT.python, STEPS) as both:
        yield both


def test_both_systems_train_the_same(both):
    """PyTorch is an independent reference of the model, the gradients, their mean over data, and the optimizer."""
    if both.theirs is None:
        pytest.skip(f"there is no PyTorch in {peer.ENVIRONMENT.folder}; the experiment peer makes it")
    theirs = both.losses(peer.PYTORCH, STEPS)
    for kind in KINDS:
        np.testing.assert_allclose(both.losses(kind, STEPS), theirs, rtol=1e-5)
    others = both.losses(peer.PYTORCH, STEPS)  # the same batches, but from trained weights
    assert np.abs(np.subtract(others, theirs)).min() > 0.01


def test_steps_are_measured_in_turn(both):
    found = both.measure(100.0, 2)
    assert list(found) == both.names and set(KINDS) <= set(found)
    config = KINDS[peer.DENSE].config
    # Two data ranks of each stage exchange at least one layer's gradients, over data.
    layer = 12 * config.model.hidden**2 * 4
    for each in found.values():
        assert all(len(values) == 2 for values in each.values())
        assert min(each["seconds"]) > 0 and min(each["computed"]) > 0
        assert min(each["bytes"]) > 2 * 2 * layer
