"""A session of two hosts: its workers train what one process trains, at the speed of its devices and links."""

import jax
import numpy as np
import pytest

from experiments.hosts.hosts import Cluster
from experiments.lab import device
from experiments.lab.models import Split
from experiments.lab.session import Session, SessionError
from paxtrain.config import from_dict
from paxtrain.data import token_files
from tests import small

SPLIT = Split((1, 2, 1), global_batch=8, layers=2)
STEPS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(small.corpus(tmp_path_factory.mktemp("text")) / "data")


@pytest.fixture(scope="module")
def cluster():
    with Cluster([[0, 100], [100, 0]]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def session(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("session")
    with Session(cluster, 1, folder, folder / "cache") as session:
        yield session


@pytest.fixture(scope="module")
def loaded(session, text):
    task = {"do": "load", "config": SPLIT.values(text, eval_batches=1), "evaluates": True}
    plain, turned = task | {"name": "plain", "order": []}, task | {"name": "turned", "order": [1, 0]}
    return session.ask_staggered([plain], "keys") + session.ask_staggered([turned], "keys")


def alone(text):
    """Return the losses of the same steps in one process."""
    config = from_dict(SPLIT.values(text))
    trainer = small.trainer(config)
    file = token_files.load(config.data.train, vocab_size=config.model.vocab_size, sequence=config.model.sequence)
    size = config.batch.global_batch
    batches = token_files.batches(
        file,
        sequence=config.model.sequence,
        global_batch=size,
        rows=range(size),
        seed=config.run.seed,
        shuffle=True,
        prefetch=0,
    )
    state, losses = trainer.init(config.run.seed), []
    for _, rows in zip(range(STEPS), batches):
        state, metrics = trainer.step(state, jax.device_put(rows, trainer.batch_sharding))
        losses.append(float(metrics["loss"]))
    return losses


def test_losses_are_those_of_one_process_in_either_order_of_the_devices(session, loaded, text):
    expected = alone(text)
    for name in ("plain", "turned"):
        found = session.ask("train", name=name, steps=STEPS, eval_every=STEPS)
        assert found[0]["losses"] == found[1]["losses"]
        np.testing.assert_allclose(found[0]["losses"], expected, rtol=1e-5)
        assert [step for step, _ in found[0]["validation"]] == [0, STEPS]


def test_training_ends_at_a_loss_and_the_clock_leaves_out_evaluations(session, loaded):
    whole = session.ask("train", name="plain", steps=STEPS, eval_every=1)
    losses = [loss for _, loss in whole[0]["validation"]]
    goal = losses[2]
    assert goal < losses[1], "the loss does not fall"
    found = session.ask("train", name="plain", steps=STEPS, eval_every=1, until=goal)
    for answer in found:  # both hosts stop at the same step
        assert answer["validation"] == whole[0]["validation"][:3] and len(answer["losses"]) == 2
        assert answer["seconds"][0] == 0 < answer["seconds"][1] < answer["seconds"][2]


def test_a_program_compiled_once_is_found_by_the_other_host_and_for_the_other_order(loaded):
    first, *others = loaded[0][0], loaded[0][1], loaded[1][0], loaded[1][1]
    assert not first["found"] and all(answer["found"] for answer in others)


def test_messages_between_stages_are_counted(session, loaded):
    plain, turned = (session.ask_one(host, "wire", name=name) for host, name in enumerate(("plain", "turned")))
    assert plain == turned
    size = SPLIT.config.model.sequence * SPLIT.config.model.hidden * 4
    assert plain["forward"] == plain["backward"] == 8 * size


def test_devices_take_their_time_alone_and_together(session, loaded):
    micro_batches, layers = 2, 1  # of a stage
    slowness = 4  # so that a busy machine's free steps stay far below
    share = SPLIT.micro_batch * SPLIT.sequence / device.TOKENS
    # What the last stage does at least: F and B of every micro-batch, and the loss.
    least = micro_batches * share * (layers * device.LAYER * (1 + device.BACKWARD["layer_inputs"]) + device.HEAD)
    least *= slowness
    session.ask("warm", names=["plain"])
    session.ask("speed", slowness=slowness)
    limited = np.max([answer["plain"] for answer in session.ask("time", names=["plain"], repeats=3, steps=1)], axis=0)
    assert limited.min() >= least
    session.ask("speed", slowness=0)
    free = np.max([answer["plain"] for answer in session.ask("time", names=["plain"], repeats=3, steps=1)], axis=0)
    session.ask("speed", slowness=1)
    assert free.min() < least  # else the limit shows nothing


def test_a_step_is_broken_down_into_parts_that_add_up(session, loaded):
    for parts in session.ask("breakdown", name="plain"):
        assert min(parts.values()) >= 0
        assert parts["data"] == parts["tensor/backward"] == parts["compression"] == 0
        assert parts["forward"] > 0
        assert parts["backward"] > parts["forward"]
        assert parts["pipeline"] > 0


def test_a_task_that_fails_names_the_host_and_its_log(session):
    with pytest.raises(SessionError, match=r"the worker on pax0 failed: KeyError: 'nothing'; its log is .*pax0\.log"):
        session.ask("warm", names=["nothing"])
    assert session.ask("speed", slowness=1) == [None, None]  # and both serve on


def test_who_fails_is_told_though_others_wait_for_him(session, loaded):
    """This test comes last, because it leaves a worker that waits for ever."""
    session._send(0, "warm", names=["plain"])
    session._send(1, "warm", names=["nothing"])
    with pytest.raises(SessionError, match=r"the worker on pax1 failed: KeyError: 'nothing'"):
        session._answers()
