"""Training over a link that becomes twenty times slower: the note that names it, and no note before."""

import re

import pytest

from experiments.hosts import hosts
from experiments.lab.supervised_run import HOSTS, MBIT, PATIENCE, Lab

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")
SLOWER = 20
# So many gradients that a step takes seconds over the slow link, and tenths of one over the others.
SETTINGS = {"model.hidden": 224, "checkpoint.every": 0}


NAMED = re.compile(
    r"note: step \d+ (?:has taken|took) \S+ s(?: so far)?, \S+ times the median of \S+ s; "
    r"the link pax0 \(stage 0, data 0\) - pax2 \(stage 0, data 1\) carries (\S+) MB/s, (\S+) MB/s when the run "
    r"began(?:; .*)?"
)
TRIES = 5  # for a machine whose other work slows a host's CPU, which then is what a note rightly names


def notes(run) -> list[str]:
    """Return the notes on slow steps; the end of a slow step is another line."""
    found = [line for line in run.said(0).splitlines() if line.startswith("note: step ")]
    return [note for note in found if " times the median " in note]


def shape(cluster, rate) -> None:
    for a, b in ((0, 2), (2, 0)):
        cluster.rate(a, b, rate)


def test_a_link_that_becomes_slow_is_named(tmp_path):
    with hosts.Cluster([[MBIT] * HOSTS for _ in range(HOSTS)]) as cluster:
        lab = Lab(cluster, tmp_path / "lab", **SETTINGS)
        lab.start()
        run = lab.running
        run.wait_for_step(15)
        assert not [note for note in notes(run) if " carries " in note]
        for _ in range(TRIES):
            known = len(notes(run))
            shape(cluster, MBIT / SLOWER)
            run.wait_for("a note of a slow step", lambda known=known: len(notes(run)) > known, PATIENCE)
            shape(cluster, MBIT)
            if any(map(NAMED.fullmatch, notes(run)[known:])):
                break
            run.wait_for_step(lab.last_step() + 5)
        found = [note for note in notes(run) if NAMED.fullmatch(note)]
        assert found, f"none of these names the link:\n{run.said(0)}"
        log = run.folder / "host2.log"
        run.wait_for("the note in the log of pax2", lambda: found[0] in log.read_text(), PATIENCE)
    now, before = NAMED.fullmatch(found[0]).groups()
    # What else the machine does makes links look slower than they are, never faster.
    assert float(now) < 1.5 * MBIT / 8 / SLOWER and 4 * float(now) < float(before) < 1.5 * MBIT / 8
    for host in range(HOSTS):
        assert (found[0] in (run.folder / f"host{host}.log").read_text()) == (host in (0, 2))
