"""Training over a link that becomes twenty times slower: the note that names it, and no note before."""

import re

import pytest

from tests.cluster import hosts
from tests.cluster.supervised_run import HOSTS, MBIT, Lab

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")
SLOWER = 20
# So many gradients that a step takes seconds over the slow link, and tenths of one over the others.
SETTINGS = {"model.hidden": 224, "checkpoint.every": 0}


def notes(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("note: step ")]


def test_a_link_that_becomes_slow_is_named(tmp_path):
    with hosts.Cluster([[MBIT] * HOSTS for _ in range(HOSTS)]) as cluster:
        lab = Lab(cluster, tmp_path / "lab", tmp_path / "cache", **SETTINGS)
        lab.start()
        run = lab.running
        run.wait_for_step(15)
        assert notes(run.said(0)) == []
        for a, b in ((0, 2), (2, 0)):
            cluster.rate(a, b, MBIT / SLOWER)
        run.wait_for_words(0, "note: step ")
    note, *_ = notes(run.said(0))
    now, before = re.fullmatch(
        r"note: step \d+ (?:has taken|took) \S+ s(?: so far)?, \S+ times the median of \S+ s; "
        r"the link pax0 \(stage 0, data 0\) - pax2 \(stage 0, data 1\) carries (\S+) MB/s, (\S+) MB/s when the run "
        r"began(?:; .*)?",
        note,
    ).groups()
    assert float(before) == pytest.approx(MBIT / 8, rel=0.5) and float(now) < 1.5 * MBIT / 8 / SLOWER
    for host in range(HOSTS):
        assert (note in (run.folder / f"host{host}.log").read_text()) == (host in (0, 2))
