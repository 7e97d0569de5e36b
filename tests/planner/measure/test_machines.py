"""The hosts of a run, and the cores that they share."""

import dataclasses

from planner.measure import machines


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
