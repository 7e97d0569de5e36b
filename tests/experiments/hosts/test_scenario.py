"""Scenarios: the links that they give, and the messages about impossible ones."""

import json

import numpy as np
import pytest

from experiments.hosts import scenario
from paxtrain.errors import UserError

OFF = ~np.eye(8, dtype=bool)


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_loads_for_four_and_eight_hosts(name):
    for hosts in (4, 8):
        found = scenario.load(name, hosts)
        assert found.hosts == hosts
        assert found.what
        assert found.devices_per_host in (1, 2, 4)
        assert (found.rates[~np.eye(hosts, dtype=bool)] > 0).all()


def test_two_racks_are_mixed_and_the_same_for_a_seed():
    one, again, other = (scenario.load("two_racks", 8, seed).rates for seed in (0, 0, 1))
    inside, between = one[OFF].max(), one[OFF].min()
    assert (one == again).all()
    assert (one != other).any()
    assert inside >= 5 * between
    near = (one == inside) & OFF
    assert (near.sum(axis=1) == 3).all()  # three others are in a host's rack
    assert not near[0, 1:4].all()  # and not simply the next ones


def test_sites_share_an_uplink_that_moves_with_their_hosts():
    found = scenario.load("two_sites", 8)
    rack = np.array(found.uplinks.rack)
    assert sorted(rack) == [0] * 4 + [1] * 4 and found.sites == [f"site{i}" for i in rack]
    assert (found.rates[rack[:, None] != rack] == found.uplinks.mbit).all()
    order = np.random.default_rng(0).permutation(8)
    moved = found.moved(order)
    assert (np.array(moved.uplinks.rack) == rack[order]).all()
    assert (moved.rates == found.rates[np.ix_(order, order)]).all()
    assert found.scaled(2).uplinks.mbit == 2 * found.uplinks.mbit
    alone = scenario.load("ten_gbe", 8)
    assert sorted(alone.uplinks.rack) == list(range(8)) and alone.sites == [""] * 8


def test_one_host_is_slow_in_both_directions():
    rates = scenario.load("one_slow_nic", 8).rates
    slow = [h for h in range(8) if (np.delete(rates[h], h) < np.delete(rates, h, 0).max()).all()]
    assert len(slow) == 1
    assert np.ptp(np.delete(rates[:, slow[0]], slow[0])) == 0


def test_noise_is_drawn_from_the_measured_cluster():
    rates = scenario.load("noisy", 8).rates[OFF]
    assert 0.01 < rates.std() / rates.mean() < 0.1
    assert rates.mean() == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "must be a JSON object with links"),
        ({"links": {"all": 5}, "speed": 1}, "must be a JSON object with links"),
        ({"links": {"all": 5}, "slowness": 0}, "slowness must be a number above 0, got 0"),
        ({"links": {"everything": 5}}, "links must have the keys of one of these"),
        ({"links": {"all": 0}}, "all rates must be at least 0.01 Mbit/s"),
        ({"links": {"all": 1e-9}}, "all rates must be at least 0.01 Mbit/s"),
        ({"links": {"all": "fast"}}, "has a value of the wrong kind .*; rates are Mbit/s"),
        ({"links": {"rates": [[1, 2], [3]]}}, "has a value of the wrong kind"),
        ({"links": {"inside": 9, "between": 3, "racks": 0}}, "8 hosts do not divide into 0 racks"),
        ({"links": {"all": 5}, "share": "0.5"}, "has a value of the wrong kind"),
        ({"links": {"all": 5, "spread_of": 3}}, "has a value of the wrong kind"),
        ({"links": {"inside": 9, "between": 3, "racks": 3}}, "8 hosts do not divide into 3 racks"),
        ({"links": {"inside": 9, "uplink": 3, "racks": 5}}, "8 hosts do not divide into 5 racks"),
        ({"links": {"inside": 9, "uplink": 3, "racks": 2.0}}, "8 hosts do not divide into 2.0 racks"),
        ({"links": {"uplink": 0}}, "all rates must be at least 0.01 Mbit/s"),
        ({"links": {"rates": [[1, 2], [3, 4]]}}, r"rates are of shape \(2, 2\), but --hosts=8"),
        ({"links": {"all": 5}, "devices_per_host": 3}, "devices_per_host must be 1, 2 or 4, got 3"),
        ({"links": {"all": 5}, "share": 2}, "share must be above 0 and at most 1 core, got 2"),
    ],
)
def test_what_makes_no_sense_is_said(values, words, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=words):
        scenario.load(str(path), 8)


def test_an_unknown_scenario_names_those_there_are():
    with pytest.raises(UserError, match=r"name one of noisy, .*, two_sites, uniform or a JSON"):
        scenario.load("three_racks", 8)
