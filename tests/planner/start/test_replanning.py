"""The command that a slowdown is answered with, and its prediction, by planner.plan itself."""

import dataclasses
import json
import shlex

import pytest
from absl import flags

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, PipelineConfig
from paxtrain.config import plan as plans
from paxtrain.run.stragglers.judgement import Culprit
from paxtrain.run.stragglers.step_change import StepChange
from paxtrain.run.stragglers.stragglers import Slowdown
from planner.cluster.cluster import Cluster
from planner.start import replanning
from planner.start.replanning import Replanning
from tests.planner.examples import cluster, values

HOST = Culprit("host/b", "host b is slow", 3.0, host="b")
LINK = Culprit("link/a-to-b", "a link is slow", 8.0, link=("a", "b"))
SEARCH = ["--top=2", "--placed=1", "--shard=none", "--schedules=1f1b", "--saves=dots", "--micro_batch=1", "--nouneven"]
SEARCH += ["--tensor=1", "--nomemory_margin", "--sequence_parallel=no"]


def plan(**predicted):
    return plans.Plan(MeshConfig(data=4), PipelineConfig(), BatchConfig(), CompressConfig(), predicted=predicted)


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(replanning, "_LAST", ())
    said = []
    present = plan(step_seconds=1.5)
    here = dataclasses.replace(cluster(4, 1), hosts=("a", "b", "c", "d"), named=True)
    given = values(layers=4, vocab_size=512, hidden=64, heads=2, sequence=64)
    return Replanning(tmp_path, given, present, here, SEARCH, said.append), said, tmp_path


def found(*culprits):
    return Slowdown(57, 50, StepChange(2.0, 3.0, 8), culprits)


def answered(replanning, *culprits):
    told = replanning(found(*culprits))
    replanning._thread.join()
    return told


def test_a_slow_host_is_answered_with_the_step_of_a_plan_without_it(made):
    replan, said, out = made
    told = answered(replan, LINK, HOST)
    words = shlex.split(told.partition(": ")[2])
    assert words[1:3] == ["-m", "planner.plan"] and "--without=b" in words and set(SEARCH) < set(words)
    [line] = said
    other = plans.load(out / "replanned" / "plan.json")
    seconds = other.predicted["step_seconds"]
    assert sorted(other.hosts) == ["a", "c", "d"]
    assert line == (
        f"step 57: without b a step is predicted to take {seconds:.4g} s (now 3 s; this plan was predicted to take "
        f"1.5 s), {1 - seconds / 3:.0%} less than now; {out / 'replanned' / 'plan.json'} is its plan"
    )
    assert Cluster.load(out / "replanned" / "cluster.json").hosts == ("a", "b", "c", "d")


@pytest.mark.slow
def test_a_slow_link_is_answered_with_the_step_on_it_of_this_plan_and_of_another(made):
    replan, said, _ = made
    told = answered(replan, LINK)
    assert "'--what_if=link a>b x 0.1250'" in told
    [line] = said
    assert line.startswith("step 57: with that link another plan is predicted to take ") and "this plan " in line
    assert "start with --profile_age=0" in line


def test_why_there_is_no_other_plan_is_told(made):
    replan, said, _ = made
    answered(replan, *(Culprit(f"host/{host}", "", 3.0, host=host) for host in "abcd"))
    [line] = said
    assert line.startswith("step 57: there is no other plan: ") and "Traceback" not in line


def test_what_no_plan_avoids_is_not_answered(made):
    replan, said, out = made
    assert replan(found()) == replan(found(Culprit("term/input", "", 1.5))) == "" and said == []
    assert not (out / "replanned").exists()


def test_without_a_profile_the_command_has_a_gap(tmp_path):
    replan = Replanning(tmp_path, values(), plan(), None)
    assert "--cluster=cluster.json --without=b" in replan(found(HOST))
    assert replan._thread is None
    assert json.loads((tmp_path / "replanned" / "config.json").read_text())["model"]["layers"] == 12


def test_a_prediction_ends_with_the_run(made):
    replan, said, _ = made
    with replan:
        replan(found(HOST))
        running = replan._running
        assert "To predict" in replan(found(HOST))  # one at a time
    assert running.returncode != 0 and said == []


def test_flags_that_are_given_are_given_on():
    holder = flags.FlagValues()
    flags.DEFINE_list("saves", [], "", flag_values=holder)
    flags.DEFINE_bool("uneven", True, "", flag_values=holder)
    flags.DEFINE_integer("top", 3, "", flag_values=holder)
    flags.DEFINE_multi_string("more", [], "", flag_values=holder)
    holder(["program", "--saves=dots,inputs", "--nouneven", "--more=a b", "--more=c"])
    before, replanning.flags = replanning.flags, type("Flags", (), {"FLAGS": holder})
    try:
        assert replanning.given(["saves", "uneven", "top", "more"]) == [
            "--saves=dots,inputs", "--nouneven", "--more=a b", "--more=c",
        ]  # fmt: skip
    finally:
        replanning.flags = before
