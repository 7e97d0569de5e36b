"""The hosts of a run, and the cores that they share."""

import dataclasses
import json
import types

import pytest

from paxtrain.errors import UserError
from planner.cluster.device_sheets import DeviceSheet
from planner.measure import machines
from planner.measure.process_group import ProcessGroup


def entry(computer: str, cores: int) -> machines._Entry:
    return machines._Entry("h", 1, "cpu", 1.0, "", "", "", computer, cores)


def test_processes_are_crowded_by_computer_and_not_by_host():
    crowded = [entry("a", 2)] * 4 + [entry("b", 8)] * 4
    assert machines.crowded_cores(crowded) == ((4, 2),) * 4 + (None,) * 4
    assert machines.crowded_cores([entry("a", 0)] * 4) == (None,) * 4  # on GPUs


def test_a_process_alone_counts_its_own_cores():
    """Four share two cores of one computer; the fifth has another one's 64 to itself."""
    roster = [entry("a", 2)] * 4 + [entry("b", 64), *[entry("c", 2)] * 3]
    found = machines.Machines(("h",), (0,) * 8, (), 1, ("cpu",), (1.0,), ("",), (), machines.crowded_cores(roster))
    assert [found.processes_per_core(i) for i in range(8)] == [2.0] * 4 + [0.0] + [1.5] * 3
    assert found.most_crowded == (4, 2)
    assert dataclasses.replace(found, crowded=()).processes_per_core(0) == 0.0


def gpu(monkeypatch, kind: str, **more) -> None:
    """Let jax find a GPU of that kind, whose memory passes at 400 GB/s."""
    device = types.SimpleNamespace(platform="gpu", device_kind=kind, **more)
    monkeypatch.setattr(machines.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(machines, "_memory_rate", lambda: 400e9)


def test_a_listed_gpu_needs_nothing(monkeypatch):
    gpu(monkeypatch, "NVIDIA L40S")
    assert machines._local_kind(0) == ("l40s", 48e9, None)


def test_a_gpu_that_is_not_listed_is_measured_beside_its_given_peak(monkeypatch):
    more = {"compute_capability": "8.6", "core_count": 48, "memory_stats": lambda: {"bytes_limit": 12e9}}
    gpu(monkeypatch, "NVIDIA RTX A4000", **more)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    with pytest.raises(UserError, match=r"has NVIDIA RTX A4000, which .* does not list; give --peak, its data sheet's"):
        machines._local_kind(0)
    kind, memory, sheet = machines._local_kind(7.67e13)
    assert (kind, memory) == ("NVIDIA RTX A4000", 16e9)  # jax takes three quarters
    assert sheet == DeviceSheet(7.67e13, 7.67e13 / 2, 500e9, 16e9, (8, 6), 48)
    assert machines._sheet(json.loads(json.dumps(dataclasses.asdict(sheet)))) == sheet
    monkeypatch.undo()
    monkeypatch.setattr(machines, "_local_kind", lambda peak: (kind, memory, sheet))
    found = machines.find_machines(ProcessGroup(30), "", peak=7.67e13)
    assert (found.kinds, found.memory, found.sheets) == ((kind,), (memory,), {kind: sheet})


def test_a_pass_over_memory_is_timed():
    assert 1e6 < machines._memory_rate(1 << 12) < 1e13
