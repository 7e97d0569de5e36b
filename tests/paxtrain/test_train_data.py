"""Training on a mixture of data sets with documents, with several validation sets.

One run, `reference`, is what all others are compared with; they continue a copy of its past.
"""

import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest

from paxtrain.data import token_files
from paxtrain.data.datasets import DataSets
from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.errors import UserError
from paxtrain.run import sampling
from paxtrain.run.checkpoint import Checkpoints
from paxtrain.run.run import Run
from tests import small
from tests.paxtrain.training import curve

STEPS, EVERY, BATCH, SEQUENCE = 12, 6, 8, 32


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Prepare two corpora of many short documents, in which no two samples are equal."""
    path = tmp_path_factory.mktemp("mixing")
    for name, first in (("web", 10_000), ("code", 500_000)):
        texts = [" ".join(map(str, range(first + 40 * i, first + 40 * i + 1 + i % 9))) for i in range(300)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare([str(path / f"{name}.jsonl")], path / name, PrepareOptions(validation_fraction=0.3))
    return path


def sets(home, kind):
    return ",".join(f"{name}={home / name / kind}" for name in ("web", "code"))


def configuration(home, out, **sections):
    base = {
        "model": small.MODEL | {"vocab_size": 257, "layers": 2, "sequence": SEQUENCE, "separator": 256},
        "mesh": {"data": 2, "pipe": 2},
        "batch": {"global_batch": BATCH, "micro_batch": 2},
        "optimizer": {"warmup_steps": 2, "learning_rate": 3e-3},
        "checkpoint": {"every": EVERY, "keep": 2},
        "data": {"train": sets(home, "train"), "weights": "web=0.7,code=0.3", "validation": sets(home, "validation")},
        "run": {"steps": STEPS, "eval_every": EVERY, "eval_batches": 2, "sample_tokens": 0, "out": str(out)},
    }
    return small.merged(base, sections)


class Recorded(Run):
    """A run that records the batches on which it trains, and what it prints."""

    def __init__(self, *arguments):
        self.said = []
        super().__init__(*arguments)

    def say(self, text):
        self.said.append(text)
        super().say(text)

    def batches(self, name, start_sample=0, part=""):
        if name == "train":
            self.consumed = []
        for batch in super().batches(name, start_sample, part):
            if name == "train":
                self.consumed.append(np.asarray(batch))
            yield batch


def started(config):
    return Recorded(config, small.mesh_of(config))


def checkpoints(config):
    return Checkpoints(pathlib.Path(config.run.out) / sampling.CHECKPOINTS, config.checkpoint)


def newest(config):
    """Return the newest checkpoint's arrays."""
    run = started(config)
    found = checkpoints(config).restore(run.trainer.abstract_canonical(), sampling.architecture(config.model))
    return jax.device_get(found[0])


def expected(home, out):
    """Return all rows that the run reads, [steps * batch, sequence + 1]."""
    config = configuration(home, out, batch={"global_batch": STEPS * BATCH, "micro_batch": 2})
    return next(DataSets(config).training(range(STEPS * BATCH)))


@pytest.mark.once
def test_data_of_another_tokenizer_is_not_gone_on_with(home, reference, tmp_path):
    """Another tokenizer is refused: its ids mean other text, and it would replace the run's tokenizer."""
    out, _ = reference
    shutil.copytree(out, tmp_path / "run")
    kept = (tmp_path / "run" / sampling.TOKENIZER).read_text()
    other = tmp_path / "other"
    prepare([str(home / "web.jsonl")], other, PrepareOptions(tokenizer="bpe", vocab_size=257))
    data = {"train": str(other / "train"), "weights": "", "validation": str(other / "validation")}
    config = configuration(home, tmp_path / "run", data=data, model={"separator": 0}, run={"steps": STEPS + 1})
    with pytest.raises(UserError, match=r"are different tokenizers; prepare the data with --tokenizer=.*run/tokenizer"):
        started(config)
    assert (tmp_path / "run" / sampling.TOKENIZER).read_text() == kept
    started(configuration(home, tmp_path / "anew", data=data, model={"separator": 0}))


@pytest.fixture(scope="module")
def reference(home):
    """(out, the run)."""
    run = started(configuration(home, home / "reference"))
    run.train()
    return run.out, run


@pytest.fixture
def past(reference, tmp_path):
    """Copy the reference run's folder as it was half way, except that later metrics are kept."""
    out = shutil.copytree(reference[0], tmp_path / "past")
    shutil.rmtree(out / sampling.CHECKPOINTS / str(STEPS))
    return out


def test_a_run_tells_the_loss_of_every_data_set(home, reference):
    out, run = reference
    records, said = curve(out), "\n".join(run.said)
    for name in ("web", "code"):
        losses = {r["step"]: r[f"validation_loss/{name}"] for r in records if f"validation_loss/{name}" in r}
        assert list(losses) == [0, EVERY, STEPS] and losses[STEPS] < losses[0] - 0.3
        for what, step in (("validation loss", STEPS), ("untrained", 0)):
            [told] = re.findall(rf"{what}, {name} +(\d+\.\d{{4}}) nats per token", said)
            assert abs(float(told) - losses[step]) <= 5e-5
    assert not any("validation_loss" in record for record in records)
    assert re.search(r"train on code +0\.3 of all samples, \d+\.?\d* epochs of \d+\.?\d* ktokens", said)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    np.testing.assert_array_equal(np.concatenate(run.consumed), expected(home, out))


def test_each_loss_is_that_of_the_data_set_alone(home, reference):
    out = reference[0]
    together = {name: value for name, value in curve(out)[-1].items() if name != "step"}
    assert len(together) == 2
    for name in ("web", "code"):
        config = configuration(home, out, data={"validation": str(home / name / "validation")})
        run = started(config)
        alone = run.validate(run.start(checkpoints(config)))
        assert alone == {"validation_loss": together[f"validation_loss/{name}"]}


def test_continuing_is_exact_to_the_bit(home, reference, past):
    config = configuration(home, past)
    run = started(config)
    run.train()
    assert curve(past) == curve(reference[0])
    np.testing.assert_array_equal(np.concatenate(run.consumed), expected(home, past)[EVERY * BATCH :])
    states = newest(config), newest(configuration(home, reference[0]))
    assert jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), *states))


@pytest.mark.slow
def test_continuing_on_another_mesh_reads_the_same_samples(home, reference, past):
    run = started(configuration(home, past, mesh={"data": 1, "pipe": 2, "tensor": 2}))
    run.train()
    assert "data order" not in "".join(run.said)
    np.testing.assert_array_equal(np.concatenate(run.consumed), expected(home, past)[EVERY * BATCH :])
    losses = [{r["step"]: r["loss"] for r in curve(out) if "loss" in r} for out in (past, reference[0])]
    assert losses[0].keys() == losses[1].keys()
    assert max(abs(losses[0][step] - losses[1][step]) for step in losses[0]) < 1e-4


def test_other_weights_go_on_at_the_same_sample_and_say_so(home, past):
    config = configuration(home, past, data={"weights": "web=1,code=1"})
    run = started(config)
    run.start(checkpoints(config))
    assert "the data order has changed" in "".join(run.said)
    assert run.samples == EVERY * BATCH


def test_samples_in_the_order_of_their_files(home, reference, past):
    """Of the set code, whose share is 0.3 of the samples; from a checkpoint that has another order it is told."""
    config = configuration(home, past, data={"shuffle": False})
    mixed = next(DataSets(config).training(range(10)))
    file = token_files.TokenFile(home / "code" / "train")
    in_order = [file.read(i * SEQUENCE, (i + 1) * SEQUENCE + 1) for i in range(3)]
    assert [row.tolist() for row in mixed if any(np.array_equal(row, each) for each in in_order)] == [
        each.tolist() for each in in_order
    ]
    run = started(config)
    run.start(checkpoints(config))
    assert "the data order has changed" in "".join(run.said)
