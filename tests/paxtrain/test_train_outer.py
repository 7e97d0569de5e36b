"""Runs in groups end to end: they continue bit for bit, between exchanges too, and on another mesh inside a group."""

import json

import numpy as np
import pytest

from paxtrain.data.preparation import prepare
from paxtrain.errors import UserError
from paxtrain.run import metrics, sampling
from tests.paxtrain import training
from tests.paxtrain.training import losses, past

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("quiet_orbax")]
STEPS, EVERY = 12, 4


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("outer")
    (path / "corpus.txt").write_text(" ".join(map(str, range(4_000))))
    prepare([str(path / "corpus.txt")], path / "data")
    return path


def finished(home, out, **changes):
    """Return a finished run and its last state by path."""
    values = {
        "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "dtype": "float32"},
        "mesh": {"data": 4, "pipe": 1, "tensor": 1},
        "batch": {"global_batch": 16, "micro_batch": 2},
        "optimizer": {"warmup_steps": 2, "learning_rate": 3e-3, "schedule": "constant"},
        "outer": {"every": EVERY, "groups": 2},
        "compress": {"outer_codec": "int8", "min_ratio": 0.0},
        "data": {"train": str(home / "data/train"), "validation": str(home / "data/validation")},
        "checkpoint": {"every": 2, "keep": 9},
        "run": {"steps": STEPS, "out": str(out), "eval_every": 6, "eval_batches": 1, "sample_tokens": 4},
    }
    return training.finished(values, changes)


@pytest.fixture(scope="module")
def reference(home):
    return home / "reference", *finished(home, home / "reference")


@pytest.mark.parametrize("step", [4, 6])  # after an exchange, and between two
def test_continuing_is_bit_exact(home, reference, tmp_path, step):
    _, state = finished(home, past(reference[0], tmp_path / "run", step))
    assert losses(tmp_path / "run") == losses(reference[0])
    assert state.keys() == reference[2].keys()
    assert [path for path in state if not np.array_equal(state[path], reference[2][path])] == []
    assert any(".codec['outer']" in path and np.any(x != 0) for path, x in state.items())


def test_the_table_and_the_sample_are_of_the_shared_weights(home, tmp_path, capsys):
    _, state = finished(home, tmp_path / "run")
    said = capsys.readouterr().out
    assert "2 of 2 data ranks each train apart" in said and "every 4 steps" in said and "QuantisedBlocks(bits=8" in said
    params, *_ = sampling.load(tmp_path / "run")
    np.testing.assert_array_equal(params["final_norm"]["scale"], state[".params['final_norm']['scale']"][0])
    assert "a sample:" in said
    recorded = [json.loads(line) for line in (tmp_path / "run" / metrics.FILE).read_text().splitlines()]
    validated = {r["step"]: r["validation_loss"] for r in recorded if "validation_loss" in r}
    assert validated[STEPS] < validated[0]


def test_another_mesh_inside_a_group_continues(home, reference, tmp_path, capsys):
    out = past(reference[0], tmp_path / "run", 8)
    finished(home, out, mesh__data=4, mesh__pipe=2)
    assert "compression starts afresh" in capsys.readouterr().out
    assert losses(out)[8] == losses(reference[0])[8]
    assert losses(out)[9] == pytest.approx(losses(reference[0])[9], rel=1e-4)


def test_groups_and_all_together_do_not_continue_each_other(home, reference, tmp_path):
    out = past(reference[0], tmp_path / "run", 8)
    alone = {"outer__every": 0, "outer__groups": 0, "compress__outer_codec": ""}
    with pytest.raises(UserError, match=r"was trained in groups, and this run has none \(outer.every=0\)"):
        finished(home, out, **alone)
    finished(home, tmp_path / "dense", run__steps=4, **alone)
    with pytest.raises(UserError, match=r"was trained without groups, and this run has groups \(outer.every=4\)"):
        finished(home, tmp_path / "dense")
    with pytest.raises(UserError, match="holds other arrays"):
        finished(home, past(reference[0], tmp_path / "four", 8), outer__groups=4)
