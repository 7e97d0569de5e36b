"""A run by itself: slower steps are told once, with the term that explains them, and so is their end."""

import json

import jax
import pytest

from paxtrain.config import from_dict
from paxtrain.errors import command
from paxtrain.parallel.mesh import make_mesh
from paxtrain.run.stragglers import stragglers as module
from paxtrain.run.stragglers.judgement import Culprit
from paxtrain.run.stragglers.step_change import StepChange
from paxtrain.run.stragglers.stragglers import Slowdown, Stragglers, by_hand
from tests.processes import run_processes


@pytest.fixture
def stragglers():
    config = from_dict({"optimizer": {"warmup_steps": 1}})
    with Stragglers(config, make_mesh(config.mesh, devices=jax.devices()[:1])) as found:
        yield found


def train(stragglers, seconds, waits=None, first=1, writing=False):
    """Return what is said after each step, by its number."""
    said = {}
    for number, value in enumerate(seconds, first):
        stragglers.waited(waits[number - first] if waits else 0.001)
        if line := stragglers.finished(number - 1, value):
            said[number] = line
        if stragglers.due(number) and (found := stragglers.look(number, writing)):
            said[number] = found.words()
    return said


def test_input_that_has_become_slow_is_named_and_then_that_steps_are_fast_again(stragglers):
    seconds = [0.2] * 50 + [0.3] * 50 + [0.2] * 30
    said = train(stragglers, seconds, [0.001] * 50 + [0.101] * 50 + [0.001] * 30)
    (step, line), (_, again) = said.items()
    assert 50 < step <= 70
    assert line.startswith(f"step {step}: slower by 50% since about step 50 (0.3 s instead of 0.2 s): process 0 on ")
    assert line.endswith("waits 0.1 s longer for input (the term host)")
    assert again.endswith("as fast as before again since about step 100 (0.2 s)")


def test_what_nothing_explains_is_said_too(stragglers):
    [line] = train(stragglers, [0.2] * 50 + [0.3] * 50).values()
    assert "no device, link, CPU or input explains it" in line
    assert train(stragglers, [0.3] * 50 + [0.35] * 50, first=101) == {}  # not worth a line without a reason


def test_a_checkpoint_that_is_being_written_is_the_last_resort(stragglers):
    [line] = train(stragglers, [0.2] * 50 + [0.3] * 50, writing=True).values()
    assert line.endswith("a checkpoint is being written beside the steps (the term host)")


def test_a_change_by_less_than_a_tenth_is_not_worth_a_line(stragglers):
    assert train(stragglers, [0.2] * 50 + [0.215] * 100) == {}
    assert train(stragglers, [0.2] * 50 + [0.1] * 50, first=201) == {}


def test_probes_take_a_hundredth_of_a_run_and_not_much_more(stragglers, monkeypatch):
    clock = iter(range(0, 10_000, 4))  # each look takes 4 seconds
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    seconds = [0.2] * 50
    for level in (0.4, 0.8, 1.6, 3.2):
        seconds += [level] * 40
    assert len(train(stragglers, seconds)) == 2  # 8 seconds, of a run of 260
    assert len(train(stragglers, [3.0] * 300 + [6.0] * 30, first=501)) == 1


def test_metrics_are_numbers_that_the_names_explain():
    culprit = Culprit("link/a-to-b", "the link is slow", 5.0, link=("a", "b"))
    found = Slowdown(57, 50, StepChange(0.2, 0.3, 8), (culprit,))
    expected = {"slower/step": 1.5, "slower/lost_seconds": 0.1, "slower/link/a-to-b": 5.0}
    assert found.metrics() == pytest.approx(expected)


def test_without_a_planner_the_command_that_plans_is_told():
    advise = by_hand(from_dict({"optimizer": {"warmup_steps": 1}, "run": {"out": "runs/my run"}}))
    host, link = Culprit("host/b", "", 2.0, host="b"), Culprit("link/a-to-b", "", 5.0, link=("a", "b"))
    told = advise(Slowdown(57, 50, StepChange(0.2, 0.3, 8), (link, host)))
    words = "--model='runs/my run'/config.json --cluster=CLUSTER.json --without=b"
    assert told == f"Predict a step without b: {command('planner.plan')} {words}"
    assert advise(Slowdown(57, 50, StepChange(0.2, 0.3, 8), (link,))) == ""


@pytest.mark.parametrize(("slow", "advice"), [("a", "Plan without a"), ("a,b", "")])
def test_nobody_is_told_to_plan_without_all_hosts(stragglers, monkeypatch, slow, advice):
    culprits = [Culprit(f"host/{host}", f"host {host} is slow", 2.0, host=host) for host in slow.split(",")]
    monkeypatch.setattr(stragglers, "_hosts", {"a", "b"})
    monkeypatch.setattr(stragglers, "_advise", lambda found: f"Plan without {found.culprits[0].host}")
    monkeypatch.setattr(stragglers._judge, "culprits", lambda now, change: culprits)
    [line] = train(stragglers, [0.2] * 50 + [0.3] * 50).values()
    assert line.partition("is slow. ")[2] == advice


TOGETHER = """
import json, time
from paxtrain.config import from_dict
from paxtrain.errors import command
from paxtrain.parallel.mesh import make_mesh
from paxtrain.run.stragglers import stragglers as module
from paxtrain.run.stragglers.suspects import DEVICE

class Steady(module.Probe):  # times all parts, and says what they would take on a machine that does nothing else
    slow = 1.0  # times as long as at the start

    def __call__(self):
        return {part: self.slow if part.kind == DEVICE else 1.0 for part in super().__call__()}

module.Probe = Steady
config = from_dict({"mesh": {"data": 2}, "batch": {"global_batch": 8}, "optimizer": {"warmup_steps": 1}})
said = []
stragglers = module.Stragglers(config, make_mesh(config.mesh), ["a", "b"])
if jax.process_index() == 1:
    Steady.slow = 9.0
with stragglers:
    for step in range(1, 61):
        time.sleep(0.02)
        stragglers.waited(0.001)
        stragglers.finished(step, 0.2 if step < 30 else 0.4)
        if stragglers.due(step):
            found = stragglers.look(step)
            said.append([step, found.words() if found else ""])
print(json.dumps(said))
"""


def test_processes_look_together_and_the_first_one_names_the_slow_host():
    outputs = run_processes(TOGETHER, devices=1)
    [[step, line]], [[other, nothing]] = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert step == other and 30 < step < 50 and nothing == ""
    assert "slower by 100% since about step 30 (0.4 s instead of 0.2 s): host b takes 9 times as long" in line
    assert line.endswith("--without=b")
