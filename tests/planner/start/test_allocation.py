"""The nodes of a job: the plan for them, the kept profile of their links, and the folder that they share."""

import dataclasses
import os
import types

import jax
import numpy as np
import pytest

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, PipelineConfig
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from planner.cluster import cluster as clusters
from planner.measure.machines import Machines
from planner.measure.process_group import ProcessGroup
from planner.start import allocation
from tests.planner.examples import MODEL, cluster, reordered

NOW = 1_000_000_000.0


def plan(*hosts: str, devices: int = 8, per_host: int = 2) -> Plan:
    mesh = MeshConfig(data=devices)
    return Plan(mesh, PipelineConfig(), BatchConfig(), CompressConfig(), hosts, per_host)


def machines(*hosts: str, per_host: int = 2, kind: str = "a100-80gb") -> Machines:
    many = len(hosts)
    return Machines(hosts, tuple(range(many)), (), per_host, (kind,) * many, (8e10,) * many, ("",) * many)


def named(*hosts: str, per_host: int = 2, **changes) -> clusters.Cluster:
    return dataclasses.replace(cluster(len(hosts), per_host), hosts=hosts, named=True, **changes)


def devices(count: int, kind: str = "NVIDIA H200") -> list:
    platform = "cpu" if kind == "cpu" else "gpu"
    return [types.SimpleNamespace(platform=platform, device_kind=kind) for _ in range(count)]


@pytest.mark.parametrize(
    ("found", "gpus", "words"),
    [
        (devices(8), 8, ""),
        (devices(2, "cpu"), 0, ""),
        (devices(1, "cpu"), 8, "jax finds no GPU on n3, but --gpus=8 asks for 8; install requirements-gpu.txt there"),
        (devices(4), 8, "jax finds 4 x NVIDIA H200 on n3 for one process, but --gpus=8 asks for 8; ask for nodes"),
        (devices(8), 0, "jax finds 8 x NVIDIA H200 on n3, but --gpus=0 asks for CPUs; set JAX_PLATFORMS=cpu"),
    ],
)
def test_devices_are_those_that_were_promised(found, gpus, words):
    said = allocation.wrong_devices(found, gpus, "n3")
    assert said.startswith(words) and bool(said) == bool(words)


def test_the_order_of_nodes_does_not_matter():
    assert allocation.why_not(plan("a", "b", "c", "d"), machines("c", "a", "d", "b")) == ""


@pytest.mark.parametrize(
    ("planned", "here", "words"),
    [
        (plan("a", "b", "c", "d"), machines("a", "b", "c", "x"), "x is not in it, and d of it is not here"),
        (plan("a", "b", "c", "d"), machines("a", "b"), "c, d of it are not here"),
        (plan("a", "b", "c", "d"), machines("a", "b", "c", "d", "x", "y"), "x, y are not in it"),
        (plan("a", "b", per_host=4), machines("a", "b"), "it is for 4 devices on each host, here are 2"),
        (plan(devices=8), machines("a", "b"), "it is for 8 devices, here are 4"),
        (plan(devices=8), machines("a", "b", "c", "d"), ""),
        (plan(devices=8, per_host=0), machines("a", "b", "c", "d"), ""),  # such a plan says nothing of hosts
        (plan(devices=8, per_host=4), machines("a", "b", "c", "d"), "it is for 4 devices on each host, here are 2"),
    ],
)
def test_why_a_plan_is_not_for_these_nodes(planned, here, words):
    assert allocation.why_not(planned, here) == words


def test_many_hosts_are_not_all_listed():
    many = [f"n{i}" for i in range(20)]
    assert allocation.why_not(plan(*many, devices=40), machines("n0")).startswith(
        "n1, n2, n3, n4, n5, n6, n7, n8 and 11 more"
    )


# --- Kept profiles ----------------------------------------------------------------------------------------------------


def keep(folder, kept: clusters.Cluster, name: str, age: float) -> None:
    folder.mkdir(exist_ok=True)
    kept.save(folder / name)
    os.utime(folder / name, (NOW - age, NOW - age))


@pytest.fixture(autouse=True)
def _now(monkeypatch):
    monkeypatch.setattr(allocation.time, "time", lambda: NOW)


def test_a_profile_of_more_nodes_in_another_order_is_taken_of_those_that_are_here(tmp_path):
    kept = named("a", "b", "c", "d")
    keep(tmp_path, kept, "one.json", 3600)
    found = allocation.kept_profile(tmp_path, machines("d", "a"), MODEL, 86_400)
    assert (found.path.name, found.hosts, found.measured) == ("one.json", 4, NOW - 3600)
    expected = reordered(kept, np.array([3, 0]))
    assert found.cluster.hosts == ("d", "a")
    np.testing.assert_array_equal(found.cluster.samples, expected.samples)
    np.testing.assert_array_equal(found.cluster.alpha, expected.alpha)


def test_the_newest_that_fits_is_taken_and_none_that_is_too_old(tmp_path):
    keep(tmp_path, named("a", "b"), "oldest.json", 5000)
    keep(tmp_path, named("a", "b"), "old.json", 4000)
    keep(tmp_path, named("a", "x"), "of_others.json", 3000)
    (tmp_path / "cut_off.json").write_text('{"version": 1, "hos')
    os.utime(tmp_path / "cut_off.json", (NOW, NOW))
    here = machines("a", "b")
    assert allocation.kept_profile(tmp_path, here, MODEL, 86_400).path.name == "old.json"
    assert allocation.kept_profile(tmp_path, here, MODEL, 3999) is None
    assert allocation.kept_profile(tmp_path / "none", here, MODEL, 86_400) is None


@pytest.mark.parametrize(
    "here",
    [machines("a", "x"), machines("a", "b", per_host=4), machines("a", "b", kind="h100"), machines("a", "b", "c")],
    ids=["other host", "more devices", "other devices", "one more host"],
)
def test_what_another_profile_is_needed_for(tmp_path, here):
    keep(tmp_path, named("a", "b"), "one.json", 0)
    assert allocation.kept_profile(tmp_path, machines("b", "a"), MODEL, 10) is not None
    assert allocation.kept_profile(tmp_path, here, MODEL, 10) is None


def test_sites_must_be_those_that_were_measured(tmp_path):
    keep(tmp_path, named("a", "b", "c", sites=(0, 1, 1)), "one.json", 0)

    def found(here, *sites):
        return allocation.kept_profile(tmp_path, dataclasses.replace(here, sites=sites), MODEL, 10)

    three = machines("c", "b", "a")
    assert found(three, "west", "west", "east") is not None
    assert found(three, "west", "east", "east") is found(three) is None
    assert found(machines("c", "b")) is not None  # which are at one site


def test_compute_must_be_of_the_model_where_it_was_measured(tmp_path):
    row = {"kind": "a100-80gb", "tensor": 1, "micro_batch": 1, "save": "dots", "dtype": MODEL.dtype}
    row |= {"hidden": MODEL.hidden, "heads": MODEL.heads, "sequence": MODEL.sequence, "vocab": MODEL.padded_vocab}
    row |= dict.fromkeys(("forward", "backward", "head", "embedding", "optimizer"), 1e-3)
    keep(tmp_path, named("a", "b", compute=(row,)), "one.json", 0)
    assert allocation.kept_profile(tmp_path, machines("a", "b"), MODEL, 10) is not None
    wider = dataclasses.replace(MODEL, hidden=2 * MODEL.hidden)
    assert allocation.kept_profile(tmp_path, machines("a", "b"), wider, 10) is None


def test_a_profile_that_is_kept_is_found_again(tmp_path, monkeypatch):
    path = allocation.keep_profile(named("a", "b"), tmp_path / "profile")
    monkeypatch.undo()
    assert allocation.kept_profile(tmp_path / "profile", machines("a", "b"), MODEL, 60).path == path


# --- The folder -------------------------------------------------------------------------------------------------------


def test_a_folder_is_made_and_nothing_is_left_in_it(tmp_path):
    assert jax.process_count() == 1
    allocation.check_shared(ProcessGroup(5), tmp_path / "some" / "where")
    assert list((tmp_path / "some" / "where").iterdir()) == []


class Two(ProcessGroup):
    """The exchange of this process with another one, which sees another folder."""

    def gather(self, value, verdict=lambda values: values):
        return verdict([value, False])


def test_who_does_not_see_the_folder_is_named(tmp_path):
    group = Two(5)
    group.names = ["a", "b"]
    with pytest.raises(UserError, match=r"is not the same folder on all nodes: what a writes there is not seen on b; "):
        allocation.check_shared(group, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_never_comes_is_not_waited_for_longer(tmp_path):
    assert not allocation._seen(tmp_path / "token", 0.3)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file/run"):
        allocation.check_shared(ProcessGroup(5), tmp_path / "file" / "run")
