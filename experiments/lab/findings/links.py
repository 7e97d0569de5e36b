"""The planner's profile of links beside the rates that they were given."""

import pathlib

import numpy as np

from experiments.lab.page.section import Section, Target, lab, percent, seconds, signed, table
from experiments.lab.records import Records

TITLE, SOURCE = "Profile against set rates", "links.jsonl"
RANGE, HOSTS = (20.0, 200.0), 8  # Mbit/s of the links, and the hosts, for which something is wanted
ERROR = Target.at_most(f"Profiled bandwidth of a link of {RANGE[0]:g} to {RANGE[1]:g} Mbit/s, largest error", 0.10)
COST = Target.at_most(f"Profile of the links of {HOSTS} hosts", 60, seconds)


class Profile:
    """One profile: Mbit/s of all links by themselves [links], set and measured."""

    def __init__(self, line: dict) -> None:
        self.name, self.seconds = line["key"], line["seconds"]
        self.rates, self.measured = np.array(line["rates"]), np.array(line["measured"])
        self.hosts = len(self.rates)
        off = ~np.eye(self.hosts, dtype=bool)
        self.given, self.error = self.rates[off], self.measured[off] / self.rates[off] - 1

    @property
    def wanted(self) -> np.ndarray:
        """Return the errors [links] of the links that have a target."""
        return self.error[(self.given >= RANGE[0]) & (self.given <= RANGE[1])]


def section(folder: pathlib.Path) -> Section:
    """Return the links by profile."""
    profiles = [Profile(line) for line in Records(folder / SOURCE) if "measured" in line]
    error, cost = ERROR, COST
    if wanted := [p.wanted for p in profiles if p.wanted.size]:
        errors = np.abs(np.concatenate(wanted))
        error = ERROR.judged(float(errors.max()), f"median {percent(float(np.median(errors)))}, {errors.size} links")
    if costs := [p.seconds for p in profiles if p.hosts == HOSTS]:
        cost = COST.judged(max(costs))
    blocks: tuple[str, ...] = ()
    if profiles:
        rows = [
            (
                p.name,
                f"{p.error.size}",
                f"{p.given.min():.0f} to {p.given.max():.0f}",
                percent(float(np.median(np.abs(p.error)))),
                percent(float(np.abs(p.error).max())),
                signed(p.error.mean()),
                seconds(p.seconds),
            )
            for p in profiles
        ]
        headings = ("profile", "links", "set, Mbit/s", "median error", "largest error", "mean, signed", "takes")
        words = """Every direction of every link has a different rate, drawn at random. `planner.profile` runs on all
        hosts and does not know the rates. Its time is that of the whole command."""
        blocks = (words, table(headings, rows))
    return Section(TITLE, lab("links"), (SOURCE,), (error, cost), blocks)
