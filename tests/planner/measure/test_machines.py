"""The hosts of a run, and the cores that they share."""

from planner.measure import machines


def entry(computer: str, cores: int) -> machines._Entry:
    return machines._Entry("h", 1, "cpu", 1.0, "", "", "", computer, cores)


def test_processes_are_crowded_by_computer_and_not_by_host():
    crowded = [entry("a", 2)] * 4 + [entry("b", 8)] * 4
    assert machines.crowded_cores(crowded) == (4, 2)
    assert machines.crowded_cores(crowded[4:]) is None
    assert machines.crowded_cores([entry("a", 0)] * 4) is None  # on GPUs
