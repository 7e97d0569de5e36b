"""Uplinks that hosts share, as `planner.profile` finds and measures them where routers really share them out.

Nobody says which hosts share them.
"""

import numpy as np
import pytest

from experiments.hosts.hosts import Cluster
from experiments.hosts.network import Uplinks
from experiments.lab.models import Split
from experiments.lab.session import Session
from planner.cluster.cluster import Cluster as Links

INSIDE, UPLINK = 100.0, 25.0  # Mbit/s
SITES = (0, 1, 1, 0, 1, 0)
SIZES = (32_768, 131_072)  # bytes of messages
REPEATS = 3  # so that one message that the machine delays, in the middle of a link's repeats, is not the link's rate


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the profile of six hosts in two sites."""
    folder, hosts = tmp_path_factory.mktemp("uplinks"), len(SITES)
    path = folder / "cluster.json"
    with (
        Cluster([[INSIDE] * hosts] * hosts, uplinks=Uplinks(SITES, UPLINK)) as cluster,
        Session(cluster, 1, folder, folder / "cache") as session,
    ):
        session.ask(
            "profile",
            config=Split((1, 2, 1), global_batch=8, layers=2).values(""),
            options={"sizes": SIZES, "repeats": REPEATS, "micro_batches": [], "tensor": [1]},
            name="sites",
            path=str(path),
            sites=[""] * hosts,
        )
    return Links.load(path)


@pytest.mark.slow
def test_the_rate_is_what_all_flows_have_together(found):
    """Three pairs of hosts cross. Timed by its quickest messages alone, each seems to have a larger part."""
    site = np.array(SITES)
    assert {tuple(behind) for behind, _ in found.trunks} <= {tuple(site == 0), tuple(site == 1)}
    assert found.trunks.bandwidth * 8e-6 == pytest.approx(UPLINK, rel=0.15)


@pytest.mark.slow
def test_links_have_their_own_rates_one_by_one(found):
    site, rates = np.array(SITES), found.bandwidth * 8e-6
    across = site[:, None] != site
    assert rates[across] == pytest.approx(UPLINK, rel=0.15)
    assert rates[~across & ~np.eye(len(site), dtype=bool)] == pytest.approx(INSIDE, rel=0.35)
