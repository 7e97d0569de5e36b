"""The seconds that a run logs for its steps, on a clock that only its devices move."""

import contextlib
import types

import jax
import numpy as np
import pytest

from paxtrain.config import OuterConfig, from_dict
from paxtrain.outer.timetable import Timetable
from paxtrain.profiling.profiler import Profiler
from paxtrain.run import loop, metrics
from paxtrain.run.prepared import PreparedRun

STEPS, STEP, EXCHANGE = 12, 1.0, 0.25  # seconds of a step and of what follows every third


class Devices:
    """Devices that run one program after another, and a clock that stands still unless the host waits for them."""

    def __init__(self):
        self.now = self.busy = 0.0

    def start(self, seconds):
        self.busy = max(self.now, self.busy) + seconds
        return Result(self, self.busy)


class Result:
    """An array that is there from some time on."""

    def __init__(self, devices, there):
        self.devices, self.there = devices, there

    def block_until_ready(self):
        self.devices.now = max(self.devices.now, self.there)
        return self


class Exchanging:
    """A run whose exchange after every third step waits for the step before it starts, as XLA for CPUs may do."""

    talks = lock = peak = None
    samples, tokens_per_step = 0, 8

    def __init__(self, devices, config):
        self.devices, self.config = devices, config
        self.ranks = types.SimpleNamespace(start=-1, due=lambda _: False)
        self.stop = types.SimpleNamespace(now=lambda: False)
        self.progress = types.SimpleNamespace(finished=lambda _: None, doing=lambda _: contextlib.nullcontext())

    def batches(self, *_):
        yield from range(STEPS)

    def step_of(self, _):
        return lambda state, batch: (done := self.devices.start(STEP), {"done": done})

    def program(self, number):
        return "odd" if number % 2 else "even"

    def after(self, number, state):
        return self.devices.start(EXCHANGE) if number % 3 == 0 and state.block_until_ready() else state

    def save(self, checkpoints, state, number):
        self.devices.now = self.devices.busy = state.block_until_ready().devices.now + 7.0


@pytest.fixture
def looped(tmp_path, monkeypatch):
    """Return a function that runs a loop, and returns its speed and the records of its metrics."""
    devices = Devices()

    def on_host(figures):
        figures["done"].block_until_ready()
        return {"loss": np.float32(1), "grad_norm": 1, "learning_rate": 1, "finite": True}

    monkeypatch.setattr(loop, "on_host", on_host)
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: devices.now))

    def run(every=0, stragglers=None):
        sections = {
            "run": {"steps": STEPS, "eval_every": 0},
            "optimizer": {"warmup_steps": 1},
            "checkpoint": {"every": every},
        }
        config = from_dict(sections)
        checkpoints = types.SimpleNamespace(check=lambda: None, writing=True)
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        with metrics.Metrics(tmp_path, primary=True) as writer:
            exchanging = Exchanging(devices, config)
            made = loop.Loop(exchanging, 0, checkpoints, writer, Profiler(config, mesh, 0), stragglers)
            _, speed = made.run(Result(devices, 0.0))
        return speed, metrics.read(tmp_path / metrics.FILE)

    return run


@pytest.mark.parametrize("every", [0, 6])
def test_seconds_of_steps_add_up_to_the_time_between_them(looped, every):
    speed, records = looped(every)
    logged = [record["step_seconds"] for record in records]
    busy = STEPS * STEP + STEPS // 3 * EXCHANGE
    assert len(logged) == STEPS and sum(logged) == pytest.approx(busy)
    assert min(logged) == STEP and max(logged) <= STEP + EXCHANGE
    assert speed == pytest.approx(STEPS * 8 / busy)


class Looking:
    """Stragglers that look for what is slow after step 7."""

    def __init__(self):
        self.finished_steps, self.waits, self.writing = [], 0, None

    def waited(self, _):
        self.waits += 1

    def finished(self, step, seconds, kind):
        self.finished_steps.append((step, seconds, kind))
        return ""

    def due(self, step):
        return step == 7

    def look(self, step, writing):
        self.writing = writing
        assert self.finished_steps[-1][0] == step  # no step runs any more
        return types.SimpleNamespace(words=lambda: "a host is slow", metrics=lambda: {"slower/step": 2.0})


def test_what_is_slow_is_looked_for_between_steps_and_told(looped):
    looking = Looking()
    _, records = looped(stragglers=looking)
    [record] = [record for record in records if "slower/step" in record]
    assert record == {"step": 7, "slower/step": 2.0} and looking.writing
    assert [step for step, _, _ in looking.finished_steps] == list(range(2, STEPS + 1))  # the first waits for others
    assert {kind for _, _, kind in looking.finished_steps} == {"even", "odd"} and looking.waits == STEPS


def test_no_step_of_a_run_in_groups_waits_for_a_compilation():
    """The first step has no exchange under it, unlike the first steps of later rounds."""
    outer, compiled = OuterConfig(every=6, fragments=2, overlap=2), []
    config = types.SimpleNamespace(outer=outer, run=types.SimpleNamespace(steps=24))
    PreparedRun.compile_all(types.SimpleNamespace(config=config, step_of=compiled.append), 1)
    under = Timetable(outer, 24).under
    assert {under(number) for number in compiled} == {under(number) for number in range(1, 25)}
