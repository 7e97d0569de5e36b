"""Faults, one after another, and how training survives them: tests.cluster.faults, recorded for the page."""

from tests.cluster import faults
from tests.cluster.laboratory import Lab


def run(lab: Lab) -> None:
    """Run all fault experiments once."""
    records = lab.records("faults")
    if "done" in records:
        return
    faults.run(lab.out / "faults", lab.say, lambda figures: records.add(figures["fault"], **figures))
    records.add("done")
