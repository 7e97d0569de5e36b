"""The profile: a cluster file from one process's devices, its time limit, bad input, and missing processes."""

import dataclasses
import json
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from paxtrain.config import PipelineConfig, from_dict
from paxtrain.config.axes import UNSPLIT, layer_sizes
from paxtrain.errors import UserError
from paxtrain.model.parameters import of_mean_layer
from planner.cluster.cluster import Cluster
from planner.cluster.device_sheets import DeviceSheet
from planner.cost import compute
from planner.measure import compute_timing, link_timing, profile_cluster, profile_compute, profile_links
from planner.measure.machines import Machines, find_machines
from planner.measure.options import MIB, ProfileOptions
from planner.measure.process_group import ProcessGroup
from tests import mains
from tests.planner.examples import cluster
from tests.processes import run_processes

ROOT = Path(__file__).resolve().parents[3]
MODEL = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8, "vocab_size": 60, "dtype": "float32"}


@pytest.fixture(autouse=True, scope="module")
def _short():
    """Shorten the measurements, since their precision is not tested."""
    before, compute_timing._LEAST = compute_timing._LEAST, 0.004
    yield
    compute_timing._LEAST = before


@pytest.fixture(scope="module")
def group():
    return ProcessGroup(30)


@pytest.fixture(scope="module")
def machines(group):
    found = find_machines(group, "rack0")
    return dataclasses.replace(found, devices=found.devices[:2], per_host=2)


@pytest.fixture(scope="module")
def config():
    return from_dict({"model": MODEL, "mesh": {"tensor": 2}, "pipeline": {"save": "layer_inputs"}})


@pytest.fixture(scope="module")
def profiled(group, machines, config):
    options = ProfileOptions(sizes=(MIB, 2 * MIB), repeats=2, micro_batches=(1, 2), tensor=(2,))
    return profile_cluster.profile(group, machines, config, options, "mine")


def test_machines_are_found(machines):
    assert machines.hosts == (socket.gethostname(),)
    assert machines.kinds == ("cpu",)
    assert machines.racks == ("rack0",)
    assert machines.memory[0] * jax.local_device_count() > 1e8


@pytest.mark.once
def test_the_file_can_be_planned_with(profiled, config, tmp_path):
    cluster, _ = profiled
    cluster.save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert loaded.hosts == (socket.gethostname(),)
    assert loaded.devices_per_host == 2
    assert loaded.samples.shape == (2, 1, 1)
    assert loaded.name == "mine"
    assert loaded.source.startswith("python -m planner.profile on 20")
    assert [row["micro_batch"] for row in loaded.compute] == [1, 2]
    row = loaded.compute[1]
    expected = {"kind": "cpu", "tensor": 2, "save": "layer_inputs", "hidden": 16, "heads": 2, "sequence": 8}
    assert {key: row[key] for key in expected} == expected
    assert row["vocab"] == 128
    assert all(row[kind] >= 0 for kind in (*compute_timing.KINDS, "optimizer"))
    found = compute.layer(loaded, "cpu", config.model, layer_sizes({"tensor": 2}), 1, "layer_inputs")
    assert found.backward == pytest.approx(loaded.compute[0]["backward"])
    assert found.backward > 0


def test_when_the_time_is_up_the_rest_is_left_out_and_said(group, machines, config):
    options = ProfileOptions(sizes=(MIB,), repeats=50, micro_batches=(1, 2), tensor=(1,), time_limit=1e-3)
    cluster, said = profile_cluster.profile(group, machines, config, options, "mine")
    assert cluster.compute == ()
    assert np.isfinite(cluster.bandwidth).all()
    left = [text for what, text in said if what == "left out"]
    assert left[0] == "49 of 50 rounds of links: the time limit came"
    assert left[1:] == [f"compute of tensor=1, micro_batch={b}: the time limit came" for b in (1, 2)]


def test_a_single_device_has_no_links_and_a_profile_all_the_same(group, machines, config, tmp_path):
    alone = dataclasses.replace(machines, devices=machines.devices[:1], per_host=1)
    cluster, _ = profile_cluster.profile(group, alone, config, ProfileOptions(micro_batches=()), "one")
    cluster.save(tmp_path / "one.json")
    assert Cluster.load(tmp_path / "one.json").devices == 1


def test_a_gpu_that_is_not_listed_is_described_in_the_file(group, machines, config, tmp_path):
    sheet = DeviceSheet(7.67e13, 3.8e13, 500e9, 16e9, (8, 6), 48)
    mine = {"kinds": ("NVIDIA RTX A4000",), "memory": (16e9,), "sheets": {"NVIDIA RTX A4000": sheet}}
    alone = dataclasses.replace(machines, devices=machines.devices[:1], per_host=1, **mine)
    cluster, said = profile_cluster.profile(group, alone, config, ProfileOptions(micro_batches=()), "one")
    assert ("not listed", "NVIDIA RTX A4000: 76.7 TFLOP/s as --peak says, 500 GB/s of memory, as measured") in said
    cluster.save(tmp_path / "one.json")
    assert Cluster.load(tmp_path / "one.json").sheet("NVIDIA RTX A4000") == sheet


class _Times:
    """Times of the links of 16 hosts: inside two sites a link is six times as quick as between them."""

    def __init__(self, known):
        far = np.add.outer(np.arange(16) // 8, np.arange(16) // 8) == 1
        self.rates = np.where(far, 1e8, 6e8) * np.random.default_rng(0).uniform(0.98, 1.02, (16, 16))
        self.known = known

    def links(self):
        return np.where(self.known, 1e-4, np.nan), np.where(self.known, self.rates, np.nan)[None]

    def nics(self):
        return 1


@pytest.mark.parametrize("racks", [("",) * 16, ("a",) * 4 + ("b",) * 4 + ("a",) * 4 + ("b",) * 4])
def test_links_that_were_not_measured_are_like_others_between_their_sites(group, racks):
    """Racks of the same name at two sites are two racks."""
    known = np.random.default_rng(1).random((16, 16)) < 0.6
    times = _Times(known | np.eye(16, dtype=bool))
    sites = ("west",) * 8 + ("east",) * 8
    machines = Machines(tuple(map(str, range(16))), (0,), (None,) * 16, 1, ("cpu",) * 16, (1.0,) * 16, racks, sites)
    filled, _ = profile_cluster._filled_links(group, machines, times)
    hidden = ~times.known
    assert np.abs(filled.samples[0] / times.rates - 1)[hidden].max() < 0.1
    without, _ = profile_cluster._filled_links(group, dataclasses.replace(machines, sites=()), times)
    assert np.abs(without.samples[0] / times.rates - 1)[hidden].max() > 0.5  # negative control


def test_tensor_sizes_are_those_that_divide_host_and_model(config):
    assert profile_compute.tensor_sizes(config, 8, ()) == (1, 2)
    assert profile_compute.tensor_sizes(config, 3, ()) == (1,)
    with pytest.raises(UserError, match=r"--tensor=4 must divide the 8 devices of a host and .* 1, 2 would$"):
        profile_compute.tensor_sizes(config, 8, (4,))


def test_one_row_per_device_kind_is_the_median_of_its_processes(config):
    machines = Machines(("a", "b"), (0, 1, 0, 0), (), 2, ("cpu", "h100"), (1.0, 1.0), ("", ""))
    values = [{"forward": f} for f in (1.0, 7.0, 2.0, 9.0)]
    rows = profile_compute.compute_rows(machines, config, 1, 4, values)
    assert [(row["kind"], row["forward"]) for row in rows] == [("cpu", 2.0), ("h100", 7.0)]
    rows = profile_compute.compute_rows(machines, config, 1, 4, [*values[:2], None, None])  # two of them measured
    assert [(row["kind"], row["forward"]) for row in rows] == [("cpu", 1.0), ("h100", 7.0)]


@pytest.mark.parametrize(("rate", "size"), [(2.5e6, 64 * 1024), (25e9, 16 * MIB), (1e4, 16 * 1024)])
def test_messages_are_as_large_as_the_links_can_send_in_half_of_the_time(monkeypatch, group, rate, size):
    class Exchange:
        def __init__(self, devices, rounds, sizes):
            [self.size] = sizes

        def __call__(self, number):
            return link_timing.MessageTimes(1e-4, [self.size / rate], [self.size / rate])

    monkeypatch.setattr(link_timing, "Exchange", Exchange)
    hosts = tuple("abcdefgh")
    machines = Machines(hosts, (0,), (), 1, ("cpu",) * 8, (1.0,) * 8, ("",) * 8)
    rounds, repeats, seconds = link_timing.plan_rounds(8, 1, 63), 3, 22.5
    smaller, larger = profile_links.affordable(group, machines, rounds, repeats, time.monotonic() + seconds)
    assert (smaller, larger) == (size // 4, size)
    messages = len(rounds) * repeats * 2 * link_timing.CALLS * link_timing.BACK_TO_BACK

    def takes(largest: float) -> float:
        return messages * 1.25 * largest / rate

    assert takes(size) < seconds / 2 or size == profile_links._PROBE
    assert takes(4 * size) > seconds / 2 or size == profile_links._LARGEST


def test_a_bystander_takes_part_in_the_decisions(config):
    """Both ask each other equally often, however many turns process 0 wants; otherwise they would wait forever."""
    turns = compute_timing.Bystander(config)
    asked = iter(x * compute_timing._LEAST for x in (0.02, 0.4, 1.2, 4, 0.2, 1.1, 6))
    turns.settle(lambda mine: next(asked) + mine)
    assert next(asked, None) is None
    assert turns.counts["forward"] > turns.counts["backward"] == 1
    # Nor is a time 0 where other work hides the turns: a cluster's file would be refused for it.
    assert all(0 < seconds <= 1e-9 for seconds in turns.sample().values())


# --- What is timed ----------------------------------------------------------------------------------------------------


def test_turns_are_timed_apart_from_everything_else(monkeypatch, config):
    turns = compute_timing.LoopTimer(config, 1, 1, jax.devices()[:1])
    seconds = {"forward": 2.0, "head": 0.5}

    def took(kind: str, count: int) -> compute_timing.Took:
        wall = 0.3 + seconds.get(kind, 4) * count
        return compute_timing.Took(wall, 1.5 * wall)

    monkeypatch.setattr(turns, "_time", took)
    turns.settle(lambda x: x)
    turns.counts = dict.fromkeys(compute_timing.KINDS, 5)
    sample = turns.sample()
    assert sample["forward"] == pytest.approx(2.0 / turns.layers)
    assert sample["backward"] == pytest.approx(4.0 / turns.layers)
    assert sample["head"] == pytest.approx(0.5)
    assert sample["embedding"] == pytest.approx(4.0)
    crowded = turns.sample(processes_per_core=2.0)
    assert {kind: crowded[kind] / sample[kind] for kind in sample} == pytest.approx(dict.fromkeys(sample, 3.0))


def test_both_parts_of_the_backward_are_timed_where_a_schedule_can_split_it(monkeypatch, config):
    dots = dataclasses.replace(config, pipeline=PipelineConfig(save="dots"))
    turns = compute_timing.LoopTimer(dots, 1, 1, jax.devices()[:1])
    assert turns.kinds == compute_timing.Bystander(dots).kinds == (*compute_timing.KINDS, *compute.PARTS)
    assert compute_timing.kinds(config) == compute_timing.KINDS
    asked = dict(zip(turns.kinds, (2.0, 6.0, 1.0, 1.0, 5.0, 3.0)))
    monkeypatch.setattr(turns, "_time", lambda kind, count: compute_timing.Took(asked[kind] * count, 0.0))
    turns.counts = dict.fromkeys(turns.kinds, 2)
    sample = turns.sample()
    assert [sample[part] for part in compute.PARTS] == [5.0 / turns.layers, 3.0 / turns.layers]
    machines = Machines(("a",), (0,), (), 1, ("cpu",), (1.0,), ("",))
    [row] = profile_compute.compute_rows(machines, dots, 1, 1, [sample | {"optimizer": 1e-9}])
    some = cluster(1, 1, device="cpu", memory=1e9, compute=[row])
    found = compute.layer(some, "cpu", dots.model, UNSPLIT, 1, "dots")
    assert (found.backward_input, found.backward_weights) == (5.0 / turns.layers, 3.0 / turns.layers)


@pytest.mark.slow
def test_every_kind_takes_longer_with_more_turns():
    """If a loop's work were hoisted out of it, or dropped, more turns would take no longer."""
    config = from_dict({"model": MODEL | {"hidden": 64, "sequence": 64, "vocab_size": 1000}})
    turns = compute_timing.LoopTimer(config, 1, 4, jax.devices()[:1])
    for kind in turns.kinds:
        few, many = (min(turns._time(kind, n).wall for _ in range(5)) for n in (8, 88))
        none = min(turns._time(kind, 0).wall for _ in range(5))
        assert many - none > 3 * (few - none), kind


def test_a_large_enough_number_of_turns_is_agreed_upon(monkeypatch, config):
    turns = compute_timing.LoopTimer(config, 1, 1, jax.devices()[:1])
    monkeypatch.setattr(turns, "_time", lambda kind, count: compute_timing.Took(1e-3 * count, 0.0))
    asked = []
    turns.settle(lambda x: asked.append(x) or x)
    assert all(4 <= count <= 40 for count in turns.counts.values())
    assert len(asked) >= 4


def test_the_optimizers_parameters_are_the_devices(config):
    optimizer = compute_timing.OptimizerTimer(config, 2, jax.devices()[:2])
    h = MODEL["hidden"]
    mesh = layer_sizes({"tensor": 2})
    held = 2 * of_mean_layer(config.model, mesh) + compute.embedding_parameters(config.model, mesh, 2)
    assert optimizer.parameters == held + MODEL["sequence"] * h + 2 * h
    assert optimizer.sample() > 0


OPTIMIZERS = """
import json
from paxtrain.config import from_dict
from planner.measure.compute_timing import OptimizerTimer

made = [OptimizerTimer(from_dict({"model": json.loads(sys.argv[1])}), tensor, jax.devices()) for tensor in (1, 2, 4)]
assert all(optimizer.sample() > 0 for optimizer in made)
print(json.dumps([[device.id for device in optimizer.devices] for optimizer in made]))
"""


@pytest.mark.slow
def test_each_process_times_the_optimizer_on_its_own_devices():
    """A host has two processes, as with one process per device."""
    outputs = run_processes(OPTIMIZERS, json.dumps(MODEL | {"heads": 4, "layers": 1}), devices=2)
    first, second = (json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("[["))
    assert [len(ids) for ids in first] == [1, 2, 4]
    assert not set(first[0]) & set(second[0]) and not set(first[1]) & set(second[1])
    assert first[2] == second[2]


# --- The main ---------------------------------------------------------------------------------------------------------


def run(*arguments):
    command = [sys.executable, "-m", "planner.profile", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes=0"], "--sizes must be MiB from 0.001 to 1024 joined by commas, got '0'"),
        (["--sizes=1,x"], "--sizes must be MiB from 0.001 to 1024 joined by commas, got '1,x'"),
        (["--out=/nowhere/at/all/cluster.json"], "is no folder; create it first"),
    ],
)
def test_bad_input_is_one_sentence(monkeypatch, capfd, arguments, words):
    assert mains.run(monkeypatch, mains.load("planner.profile"), *arguments) == 2
    said = capfd.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


def test_each_process_counts_the_cores_of_its_own_computer(config):
    """Two share a core of one computer, and the third has another computer to itself."""
    hosts, crowded = ("a", "b"), ((2, 1), (2, 1), None)
    machines = Machines(hosts, (0, 0, 1), (), 1, ("cpu",) * 2, (1.0,) * 2, ("",) * 2, crowded=crowded)

    def counted(process: int) -> float:
        alone = types.SimpleNamespace(process=process)
        return profile_compute._ComputeProfile(alone, machines, config, ProfileOptions())._processes_per_core

    assert [counted(process) for process in range(3)] == [2.0, 2.0, 0.0]


def test_work_on_shared_cores_takes_its_share_of_their_time():
    """Alone, two threads need 1 s of wall time. Four processes on two cores need 2 x 1.8 s."""
    took = compute_timing.Took(wall=1.0, processor=1.8)
    assert took.crowded(4 / 2) == pytest.approx(3.6)
    assert took.crowded(0.0) == took.crowded(2 / 4) == 1.0
