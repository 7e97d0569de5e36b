"""The plan for a job's nodes: made from their links, taken again on the same nodes, made anew when anything changes."""

import dataclasses
import errno
import json
import os
import time

import jax
import pytest

from paxtrain.config import plan as plans
from paxtrain.config import to_dict
from paxtrain.errors import UserError
from paxtrain.process.progress import Progress
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import LossProbe, ProbedCodec
from planner.cluster import cluster as clusters
from planner.cluster.cluster import Cluster
from planner.measure import compute_timing
from planner.measure.machines import Machines, find_machines
from planner.measure.process_group import ProcessGroup
from planner.planning.inputs import sections
from planner.planning.options import PlanOptions
from planner.planning.planning import PLAN, REPORT
from planner.start import allocation, job_plan
from planner.start.job_plan import PROFILES, PlanRequest
from tests.planner.examples import cluster

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000}
HOSTS = ("a", "b", "c", "d")
# A small search; what it finds is not tested here.
SMALL = {"schedules": ("1f1b",), "micro_batch": (1,), "pipe": (2, 4), "top": 2, "placed": 1, "nearby": False}
OPTIONS = PlanOptions(memory_margin=False, compress=(), oracle="no", **SMALL)


def values(**model) -> dict:
    given = to_dict(job_plan.measurable({"model": MODEL | model, "batch": {}}))
    return given | {"batch": {"global_batch": 16, "micro_batch": 1}}


def request(out, age: float = 1e4, options: PlanOptions = OPTIONS, **model) -> PlanRequest:
    return PlanRequest(values(**model), options, out, 20.0, age)


def machines(*hosts: str) -> Machines:
    many = len(hosts)
    return Machines(hosts, (0,) * many, (), 2, ("a100-80gb",) * many, (8e10,) * many, ("",) * many)


def decide(request: PlanRequest, *hosts: str, why: str = ""):
    return job_plan.decide(ProcessGroup(30), machines(*hosts), request, why, Progress())


def profiled(folder):
    """Return a run's folder with a profile of four nodes, made a minute ago."""
    kept = dataclasses.replace(cluster(4, 2), hosts=HOSTS, named=True)
    path = allocation.keep_profile(kept, folder / PROFILES)
    os.utime(path, (time.time() - 60,) * 2)
    return folder


@pytest.fixture
def out(tmp_path):
    return profiled(tmp_path)


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """Return the first decision in such a folder, and the folder."""
    folder = profiled(tmp_path_factory.mktemp("decided"))
    return decide(request(folder), *HOSTS), folder


def test_the_plan_is_made_once_for_the_same_nodes_in_any_order(out):
    first = decide(request(out), *HOSTS)
    assert first.source == "made now, the first one of this run"
    assert (out / REPORT).read_text().startswith("<!DOCTYPE html>")
    assert plans.load(out / PLAN) == first.plan
    assert first.plan.hosts == HOSTS and sorted(first.plan.device_order) == list(range(8))
    written = (out / PLAN).stat().st_mtime_ns
    again = decide(request(out), "d", "b", "a", "c")
    assert again.plan == first.plan
    assert again.source == f"{out / PLAN} again: same nodes, configuration and search flags"
    assert (out / PLAN).stat().st_mtime_ns == written


def test_fewer_nodes_are_planned_for_from_the_profile_of_all(out):
    decide(request(out), *HOSTS)
    fewer = decide(request(out), "d", "b")
    assert fewer.source == "made anew: the former one is for other nodes: a, c of it are not here"
    assert fewer.plan.hosts == ("d", "b") and fewer.plan.mesh.devices == 4
    assert fewer.plan.predicted["links"]["source"].endswith(", which is of 4 hosts")
    [row] = [line for line in job_plan.describe(fewer, machines("d", "b")).splitlines() if "links" in line]
    assert "1 min ago" in row or "just now" in row


def test_what_changed_is_said_and_planned_for(out):
    first = decide(request(out), *HOSTS)
    assert decide(request(out, layers=6), *HOSTS).source.startswith("made anew: configuration or search flags")
    decide(request(out), *HOSTS)
    found = decide(request(out, options=dataclasses.replace(OPTIONS, pipe=(4,))), *HOSTS)
    assert found.source.startswith("made anew: configuration or search flags")
    assert found.plan.mesh.pipe == 4
    assert found.plan.predicted["asked"] != first.plan.predicted["asked"]


def test_gradients_in_another_dtype_are_planned_for_anew(out):
    first = decide(request(out), *HOSTS)
    other = request(out)
    other.values["mesh"] = other.values["mesh"] | {"reduce_dtype": "bfloat16"}
    found = decide(other, *HOSTS)
    assert found.source.startswith("made anew: configuration or search flags")
    assert (first.plan.mesh.reduce_dtype, found.plan.mesh.reduce_dtype) == ("float32", "bfloat16")
    assert " again: " in decide(other, *HOSTS).source


def test_a_probe_that_says_something_else_is_planned_with_anew(out):
    probe = LossProbe({}, (2, 2), 1, 50, 100, (0, 1), (3.0, 3.1), (ProbedCodec("data", "int8", (0.0, 0.001)),))
    loss_probe_file.save(probe, out / "probe.json")
    options = dataclasses.replace(OPTIONS, compress=("auto",), probe=str(out / "probe.json"))
    decide(request(out, options=options), *HOSTS)
    assert " again: " in decide(request(out, options=options), *HOSTS).source
    loss_probe_file.save(dataclasses.replace(probe, codecs=()), out / "probe.json")
    assert decide(request(out, options=options), *HOSTS).source.startswith("made anew: configuration or search flags")


@pytest.mark.parametrize(
    "predicted",
    [
        {"links": "x"},
        {"links": {"source": 3, "measured": "today", "slowest": ["a", "b"], "fastest": "abcd"}},
        {"links": {"slowest": ["a", "b", None, 1.0], "fastest": ["a", "b", 1.0, float("nan")]}},
        {"links": {"source": "x", "measured": 10**400}},
        {"memory_bytes": [], "memory_limit_bytes": 1, "memory_source": "x"},
        {"memory_bytes": 1, "memory_limit_bytes": 1, "memory_source": {}},
        {"step_seconds": 0.0, "host_order_seconds": 1.0},
        {"step_seconds": float("nan"), "host_order_seconds": True},
    ],
)
def test_figures_that_are_none_are_left_out_of_what_is_told(decided, predicted):
    first, _ = decided
    there = job_plan.describe(first, machines(*HOSTS))
    assert all(word in there for word in ("slowest", "fastest", "memory", "in host order"))
    plan = dataclasses.replace(first.plan, predicted=predicted)
    said = job_plan.describe(dataclasses.replace(first, plan=plan), machines(*HOSTS))
    assert not any(word in said for word in ("slowest", "fastest", "memory", "in host order", "links"))
    assert "schedule" in said and "decided in" in said


def test_texts_of_a_plan_are_told_without_what_terminals_obey(decided):
    first, _ = decided
    links = first.plan.predicted["links"] | {"source": "\x1b[31mred", "slowest": ["\x07a", "b", 1e9, 1e-5]}
    plan = dataclasses.replace(first.plan, predicted=first.plan.predicted | {"links": links})
    said = job_plan.describe(dataclasses.replace(first, plan=plan), machines(*HOSTS))
    assert "\\x1b[31mred, " in said and "\\x07a to b" in said and "\x1b" not in said and "\x07" not in said


@pytest.mark.parametrize(("number", "kind"), [(errno.EROFS, UserError), (errno.ENOSPC, OSError)])
def test_a_full_disk_is_no_bad_input(out, monkeypatch, number, kind):
    def fail(*_):
        raise OSError(number, os.strerror(number), "plan.json")

    monkeypatch.setattr(allocation, "keep_profile", fail)
    with pytest.raises(kind, match=os.strerror(number)):
        job_plan._told(fail, out)(None)


def test_what_a_plan_does_not_depend_on_changes_nothing(out):
    decide(request(out), *HOSTS)
    longer = request(out)
    longer.values["run"] = longer.values["run"] | {"steps": 12_345}
    assert " again: " in decide(longer, *HOSTS).source


def test_a_plan_that_cannot_be_read_is_made_anew_and_one_that_was_given_is_said(out):
    (out / PLAN).write_text("{")
    assert decide(request(out), *HOSTS).source.startswith(f"made anew: cannot read the plan {out / PLAN}")
    (out / PLAN).unlink()
    assert decide(request(out), *HOSTS, why="x.json does not fit").source == "made anew (--replan): x.json does not fit"
    again = decide(request(out), *HOSTS, why="x.json does not fit").source
    assert again.startswith(f"{out / PLAN} again: same nodes") and again.endswith(" (--replan: x.json does not fit)")


def test_the_decision_is_told_in_ten_lines(decided):
    made, out = decided
    lines = job_plan.describe(made, machines(*HOSTS)).splitlines()
    heads = [line.split()[0] for line in lines]
    assert heads == ["nodes", "plan", "links", "slowest", "fastest", "mesh", "schedule", "compressed", "memory", "step"]
    assert "4 x 2 a100-80gb: a, b, c, d" in lines[0]
    assert f"{PROFILES}/" in lines[2]
    kept = Cluster.load(next((out / PROFILES).glob("*.json")))
    between = kept.bandwidth[clusters.between(kept)]
    assert f"{between.min() / 1e9:.3g} GB/s" in lines[3] and f"{between.max() / 1e9:.3g} GB/s" in lines[4]
    assert "s predicted" in lines[9] and "in host order" in lines[9]
    assert all(len(line) <= 240 for line in lines)


def test_groups_are_planned_for_and_other_ones_anew(out):
    alone, grouped = request(out), request(out)
    grouped.values["outer"] = {"every": 10, "groups": 2}
    assert decide(alone, *HOSTS).plan.outer is None
    assert "outer" not in alone.asked()
    made = decide(grouped, *HOSTS)
    assert made.source.startswith("made anew: configuration") and made.plan.outer.groups == 2
    assert made.plan.apply(grouped.values).groups == 2
    said = job_plan.describe(made, machines(*HOSTS)).splitlines()
    [line] = [line for line in said if line.split()[0] == "groups"]
    assert f"2 of {made.plan.mesh.data // 2} data ranks, which exchange every 10 steps" in line
    assert " again: " in decide(grouped, *HOSTS).source
    grouped.values["outer"] = {"every": 20, "groups": 2}
    assert decide(grouped, *HOSTS).source.startswith("made anew: configuration")


def test_of_a_plan_without_figures_the_rest_is_told(decided):
    found, _ = decided
    bare = dataclasses.replace(found, plan=dataclasses.replace(found.plan, predicted={"step_seconds": 1.0}))
    heads = [line.split()[0] for line in job_plan.describe(bare, machines(*HOSTS)).splitlines()]
    assert heads == ["nodes", "plan", "mesh", "schedule", "compressed", "step"]


def test_a_folder_in_the_way_is_one_sentence(out):
    (out / REPORT).mkdir()
    with pytest.raises(UserError, match=r"report.html is a folder, which is in the plan's way"):
        decide(request(out), *HOSTS)


def test_nothing_that_fits_is_one_sentence(out):
    with pytest.raises(UserError):
        decide(request(out, options=dataclasses.replace(OPTIONS, pipe=(7,))), *HOSTS)
    assert not (out / PLAN).exists()


def test_bad_flags_and_sections_are_found_before_anything_is_measured():
    sections(values())
    with pytest.raises(UserError, match=r"compress.factors=int8 is not planned for"):
        sections(values() | {"compress": {"factors": "int8", "backward": {"messages": "all"}}})
    with pytest.raises(UserError, match="--schedules must be some of"):
        PlanOptions(schedules=("zigzag",))


@pytest.mark.parametrize("section", [{"mesh": {"context": 2**64}}, {"batch": {"micro_batch": -1}}])
def test_nonsense_that_a_plan_replaces_is_refused(section):
    [(name, values)] = section.items()
    with pytest.raises(UserError, match=rf"^{name}\.{next(iter(values))} m"):
        job_plan.measurable({"model": MODEL} | section)


@pytest.mark.once
def test_nodes_without_a_profile_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(compute_timing, "_LEAST", 0.002)
    group = ProcessGroup(60)
    here = find_machines(group, "")
    here = dataclasses.replace(here, devices=here.devices[:2], per_host=2)
    small = request(tmp_path, layers=2, hidden=16, heads=2, sequence=8, vocab_size=60)
    small = dataclasses.replace(small, seconds=1.0)  # compute is measured once in any case
    found = job_plan.decide(group, here, small, "", Progress())
    assert found.plan.mesh.devices == 2 and jax.process_count() == 1
    [kept] = (tmp_path / PROFILES).glob("*.json")
    row = json.loads(kept.read_text())["compute"][0]
    assert (row["kind"], row["hidden"]) == ("cpu", 16)
    assert found.plan.predicted["links"]["source"].startswith("measured in ")
    again = job_plan.decide(group, here, dataclasses.replace(small, age=1e6), "", Progress())
    assert " again: " in again.source
    assert list((tmp_path / PROFILES).glob("*.json")) == [kept]
