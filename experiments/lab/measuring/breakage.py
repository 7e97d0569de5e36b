"""Faults, and how training ends: experiments.lab.faults, recorded for the page."""

from experiments.hosts import slurm_cluster
from experiments.lab import faults
from experiments.lab.laboratory import Lab


def run(lab: Lab) -> None:
    """Run all fault experiments once, under SLURM if it is installed."""
    records = lab.records("faults")
    if "done" in records:
        return

    def keep(figures: faults.Figures) -> None:
        lab.say(f"faults: {figures}")
        records.add(figures["fault"], **figures)

    faults.run(lab.out / "faults", not slurm_cluster.why_not(), keep)
    records.add("done")
