"""Faults, one after another, and how training survives them: experiments.lab.faults, recorded for the page."""

import re

from experiments.lab import faults
from experiments.lab.laboratory import Lab

_RUN = re.compile(r"/proc/\d+/root\S*?/run/")  # the run's folder, on its small disk


def run(lab: Lab) -> None:
    """Run all fault experiments once."""
    records = lab.records("faults")
    if "done" in records:
        return

    def keep(figures: faults.Figures) -> None:
        said = {"sentence": _RUN.sub("run/", figures["sentence"])} if "sentence" in figures else {}
        records.add(figures["fault"], **figures | said)

    faults.run(lab.out / "faults", lab.say, keep)
    records.add("done")
