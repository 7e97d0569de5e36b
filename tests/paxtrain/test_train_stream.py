"""Training on text that is tokenized while the run trains: the samples on other meshes and after a resume."""

import json
import re
import threading

import numpy as np
import pytest

from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.run import checkpoint_reading, metrics
from paxtrain.run.run import Run
from tests import small
from tests.paxtrain.training import past, same_bits

STEPS, EVERY = 6, 3


class Recorded(Run):
    """A run that records the batches on which it trains, its last state, and what it prints."""

    def __init__(self, config):
        self.said, self.consumed = [], []
        super().__init__(config, small.mesh_of(config))

    def say(self, text):
        self.said.append(text)

    def batches(self, name, start_sample=0, part=""):
        for batch in super().batches(name, start_sample, part):
            if name == "train":
                self.consumed.append(np.asarray(batch))
            yield batch

    def save(self, checkpoints, state, step):
        self.last = self.trainer.canonical(state)["params"]
        super().save(checkpoints, state, step)


def trained(config):
    run, before = Recorded(config), set(threading.enumerate())
    assert run.train().finished
    # One that waits as the interpreter ends would print an exception.
    assert not [thread.name for thread in set(threading.enumerate()) - before if "prefetch" in thread.name]
    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("streaming")
    for name, first in (("web", 10_000), ("code", 500_000)):
        texts = [" ".join(map(str, range(first + 40 * i, first + 40 * i + 1 + i % 9))) for i in range(300)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(path / "web.jsonl")], path / "data", PrepareOptions(validation_fraction=0.3))
    return path


def configuration(home, out, **sections):
    stream = {"stream": f"web={home}/web.jsonl,code={home}/code.jsonl", "weights": "web=0.7,code=0.3"}
    base = {
        "model": small.MODEL | {"vocab_size": 257, "layers": 2, "sequence": 32, "separator": 256},
        "mesh": {"data": 1},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optimizer": {"warmup_steps": 2, "learning_rate": 3e-3},
        "checkpoint": {"every": EVERY, "keep": 2},
        "data": stream | {"validation": str(home / "data/validation")},
        "run": {"steps": STEPS, "eval_every": 0, "eval_batches": 1, "sample_tokens": 0, "out": str(out)},
    }
    return small.merged(base, sections)


@pytest.fixture(scope="module")
def whole(home):
    return trained(configuration(home, home / "whole"))


def test_a_stream_is_trained_on(whole):
    samples = np.concatenate(whole.consumed)
    assert len(np.unique(samples, axis=0)) == len(samples) == 4 * STEPS
    assert re.search(r"train on web +0\.7 of all samples, read from 1 files of \d", "\n".join(whole.said))
    assert (whole.out / "tokenizer.json").exists()


def test_a_run_goes_on_with_the_samples_that_it_would_have_read(home, whole, tmp_path):
    out = past(whole.out, tmp_path / "past", EVERY)
    rest = trained(configuration(home, out))
    np.testing.assert_array_equal(rest.consumed, whole.consumed[EVERY:])
    assert same_bits(rest.last, whole.last)
    losses = [[r["loss"] for r in metrics.read(run.out / metrics.FILE) if "loss" in r] for run in (rest, whole)]
    assert losses[0] == losses[1]


def test_other_data_ranks_and_batches_go_on_with_the_same_samples(home, whole, tmp_path):
    out = past(whole.out, tmp_path / "past", EVERY)
    changes = {"mesh": {"data": 2}, "batch": {"global_batch": 8, "micro_batch": 2}, "run": {"steps": EVERY + 1}}
    found = trained(configuration(home, out, **changes)).consumed
    np.testing.assert_array_equal(np.concatenate(found)[:8], np.concatenate(whole.consumed[EVERY:])[:8])


def test_two_data_ranks_read_the_samples_of_one(home, whole):
    run = Recorded(configuration(home, home / "two", mesh={"data": 2}))
    for batch, expected in zip(run.batches("train"), whole.consumed):
        np.testing.assert_array_equal(batch, expected)


def test_another_stream_begins_anew(home, whole, tmp_path):
    out = past(whole.out, tmp_path / "past", EVERY)
    run = trained(configuration(home, out, data={"weights": "web=0.5,code=0.5"}))
    assert any("the data order has changed; the stream begins anew; the checkpoint's is {" in t for t in run.said)
    start = Recorded(configuration(home, tmp_path / "new", data={"weights": "web=0.5,code=0.5"}))
    np.testing.assert_array_equal(run.consumed[0], next(start.batches("train")))
    found = checkpoint_reading.read_meta(out / "checkpoints")
    assert found["stream"]["sample"] == 4 * (STEPS - EVERY) and found["samples"] == 4 * STEPS
