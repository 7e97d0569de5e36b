"""Cluster files: the three ways to give links, smaller and merged clusters, and one sentence for each mistake."""

import dataclasses
import json
import pathlib
import re
import time

import numpy as np
import pytest

from paxtrain.errors import UserError
from planner.cluster import cluster
from planner.cluster.cluster import Cluster
from planner.cluster.rails import Rails

SHIPPED = sorted((pathlib.Path(__file__).resolve().parents[3] / "configs" / "clusters").glob("*.json"))
CLASSES = {"inside": {"alpha": 1e-6, "bandwidth": 3e11}, "between": {"alpha": 1e-5, "bandwidth": 2e10}}


def values(**changes) -> dict:
    """Return the values of a cluster file of three hosts, with some changes."""
    return {"version": 1, "hosts": 3, "devices_per_host": 2, "device": "a100-80gb", "links": CLASSES} | changes


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_clusters_load(path):
    found = Cluster.load(path)
    hosts, per_host = re.search(r"_(\d+)x(\d+)", path.stem).groups() if "sites" not in path.stem else (8, 8)
    assert (len(found.hosts), found.devices_per_host) == (int(hosts), int(per_host))
    assert found.source and all(found.sheet(kind) for kind in found.kinds)
    apart = found.bandwidth[cluster.between(found)]
    assert (np.diagonal(found.bandwidth) > apart.max(initial=0)).all()


def test_the_measured_cluster_has_the_ratios_of_its_source(shared):
    [path] = [path for path in SHIPPED if path.stem == "a100_16x8_measured"]
    found, source = Cluster.load(path), json.loads((shared / "data/trials/bandwidth_16xA100_nodes.json").read_text())
    assert list(found.hosts) == source["time_0"]["1"]["gpus"]
    apart = cluster.between(found)
    for sample, run in zip(found.samples, ("time_0", "time_1")):
        sent, received = (np.array(source[run][key]["bandwidth"]) for key in ("1", "0"))
        ratios = sample / ((sent + received.T) / 2)
        assert np.ptp(ratios[apart]) / ratios[apart].mean() < 1e-3
    assert np.median(found.samples[:, apart]) == pytest.approx(25e9, rel=1e-3)


def test_three_ways_to_give_the_same_links(tmp_path):
    exception = {"from": "host1", "to": "host2", "bandwidth": 5e9}
    classes = Cluster.parse(values(links=CLASSES | {"exceptions": [exception]}))
    assert classes.bandwidth[1, 2] == 5e9 and classes.bandwidth[2, 1] == 2e10 and classes.alpha[1, 2] == 1e-5
    matrices = {"alpha": classes.alpha.tolist(), "bandwidth": classes.samples.tolist()}
    np.savez(tmp_path / "links.npz", alpha=classes.alpha, bandwidth=classes.samples)
    for links in (matrices, {"npz": "links.npz"}):
        other = Cluster.parse(values(links=links), tmp_path)
        np.testing.assert_array_equal(other.alpha, classes.alpha)
        np.testing.assert_array_equal(other.samples, classes.samples)


def test_nominal_rates_are_taken_at_what_links_reach(tmp_path):
    classes = Cluster.parse(values(links=CLASSES))
    assert classes.nominal == ("inside", "between") and classes.reached == ()
    reached, apart = cluster.attained(classes), cluster.between(classes)
    np.testing.assert_allclose(reached.samples / classes.samples, np.where(apart, 0.70, 0.82)[None])
    assert (reached.nominal, reached.reached) == ((), classes.nominal)
    assert cluster.attained(reached) is reached  # once
    measured = Cluster.parse(values(links=CLASSES | {"nominal": []}))
    assert cluster.attained(measured) is measured
    matrices = {"alpha": classes.alpha.tolist(), "bandwidth": classes.samples.tolist()}
    assert Cluster.parse(values(links=matrices)).nominal == ()
    Cluster.parse(values(links=matrices | {"nominal": ["between"]})).save(tmp_path / "c.json")
    again = Cluster.load(tmp_path / "c.json")
    np.testing.assert_allclose(cluster.attained(again).samples / again.samples, np.where(apart, 0.70, 1.0)[None])
    for wrong in ("between", ["across"], [["inside"]]):
        with pytest.raises(UserError, match=r"links\.nominal must be a list of some of inside, between"):
            Cluster.parse(values(links=CLASSES | {"nominal": wrong}))


def test_trunks_are_links_between_hosts():
    some = Cluster.parse(values(links=CLASSES, trunks=[{"hosts": ["host0"], "bandwidth": 1e9}]))
    assert cluster.attained(some).trunks.bandwidth.tolist() == [0.7e9]


def test_racks_and_stars():
    racks = {"racks": [0, 0, 1], "across": {"alpha": 2e-5, "bandwidth": 1e10}}
    star = {"exceptions": [{"from": "host0", "to": "*", "alpha": 5e-5}]}
    found = Cluster.parse(values(links=CLASSES | racks | star))
    assert found.bandwidth[0, 1] == 2e10 and found.bandwidth[0, 2] == found.bandwidth[2, 1] == 1e10
    assert (found.alpha[0] == [1e-6, 5e-5, 5e-5]).all() and found.alpha[1, 0] == 1e-5


def test_hosts_behind_different_trunks_are_not_merged():
    made = Cluster.parse(values(hosts=["a", "b", "c", "d"], trunks=[{"hosts": ["c", "d"], "bandwidth": 1e8}]))
    two = cluster.merged(made, 2)
    assert two.trunks.behind.tolist() == [[False, True]]
    apart = Cluster.parse(values(hosts=["a", "b", "c", "d"], trunks=[{"hosts": ["b", "c"], "bandwidth": 1e8}]))
    with pytest.raises(UserError, match="tensor groups cannot span a, b, which are behind different trunks"):
        cluster.merged(apart, 2)


@pytest.mark.parametrize("hosts", [3, 20])
def test_saved_and_loaded_it_is_the_same(tmp_path, hosts):
    rng = np.random.default_rng(0)
    samples = rng.uniform(1e9, 2e9, (4, hosts, hosts)).tolist()
    measured = (rng.uniform(0, 1, (hosts, hosts)) < 0.8).tolist()
    links = {"alpha": 1e-5, "bandwidth": samples, "measured": measured}
    trunks = [{"hosts": ["host0", "host2"] if hosts == 3 else ["host00", "host07"], "bandwidth": 1e8}]
    made = Cluster.parse(values(hosts=hosts, links=links, nics=2, fan_out=1.5, trunks=trunks, name="lab"))
    made.save(tmp_path / "c.json")
    again = Cluster.load(tmp_path / "c.json")
    np.testing.assert_array_equal(again.samples, made.samples)
    np.testing.assert_array_equal(again.alpha, made.alpha)
    np.testing.assert_array_equal(again.measured, measured)
    assert (again.hosts, again.kinds, again.nics, again.name, again.named) == (made.hosts, made.kinds, 2, "lab", False)
    assert again.fan_out == 1.5
    np.testing.assert_array_equal(again.trunks.behind, made.trunks.behind)
    assert again.trunks.behind.sum() == 2 and again.trunks.bandwidth.tolist() == [1e8]


@pytest.mark.parametrize(
    ("given", "rails"),
    [
        (True, Rails()),
        ({}, Rails()),
        ({"pxn": False}, Rails(pxn=False)),
        ({"pxn": False, "oversubscription": 2}, Rails(pxn=False, oversubscription=2.0)),
        (False, None),
    ],
)
def test_rails_are_read_and_kept(tmp_path, given, rails):
    made = Cluster.parse(values(nics=2, rails=given))
    assert made.rails == rails and Cluster.parse(values()).rails is None
    made.save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json").rails == rails
    assert cluster.without(made, ["host1"]).rails == rails


def test_merged_hosts_are_as_slow_as_their_slowest_pair():
    bandwidth = [[90, 5, 7, 8], [6, 90, 9, 4], [3, 9, 90, 2], [8, 8, 1, 90]]
    made = Cluster.parse(values(hosts=4, links={"alpha": 0, "bandwidth": bandwidth}, nics=2))
    two = cluster.merged(made, 2)
    assert two.bandwidth.tolist() == [[5, 4], [3, 1]]
    assert (two.devices, two.devices_per_host, two.nics) == (made.devices, 4, 4)
    with pytest.raises(UserError, match="4 hosts cannot be taken 3 at a time"):
        cluster.merged(made, 3)
    with pytest.raises(UserError, match="differ in kind"):
        cluster.merged(Cluster.parse(values(hosts=2, device=["h100", "h200"])), 2)


def test_without_some_hosts_nothing_else_changes():
    rng = np.random.default_rng(0)
    links = {
        "alpha": rng.uniform(1e-6, 1e-5, (4, 4)).tolist(),
        "bandwidth": rng.uniform(1e9, 2e9, (3, 4, 4)).tolist(),
        "measured": (rng.uniform(size=(4, 4)) < 0.5).tolist(),
    }
    kinds = ["h100", "a100-80gb", "h100", "a100-80gb"]
    compute = [ROW, ROW | {"kind": "h100"}, ROW | {"save": "layer_inputs"}]
    made = Cluster.parse(
        values(
            hosts=["a", "b", "c", "d"],
            device=kinds,
            memory=[1e9, 2e9, 3e9, 4e9],
            links=links,
            compute=compute,
            nics=3,
            sites=["west", "east", "west", "east"],
            trunks=[{"each": "site", "bandwidth": 1e8}, {"hosts": ["b", "c"], "bandwidth": 2e8}],
            name="lab",
            source="here",
        )
    )
    made = dataclasses.replace(made, host_seconds=0.1)
    left = cluster.without(made, ["c", "a"])
    assert (left.hosts, left.kinds, left.memory.tolist()) == (("b", "d"), ("a100-80gb",) * 2, [2e9, 4e9])
    for one, i in enumerate((1, 3)):
        for other, j in enumerate((1, 3)):
            assert left.alpha[one, other] == made.alpha[i, j]
            assert left.measured[one, other] == made.measured[i, j]
            assert (left.samples[:, one, other] == made.samples[:, i, j]).all()
            assert left.bandwidth[one, other] == made.bandwidth[i, j]
    assert left.compute == (ROW, ROW | {"save": "layer_inputs"})  # the other kind has no device left
    links = ("nics", "rails", "fan_out")
    kept = ("name", "source", "devices_per_host", *links, "named", "shares", "parts", "sheets", "host_seconds")
    kept += ("nominal", "reached", "execution", "deviations", "blocks")
    assert all(getattr(left, name) == getattr(made, name) for name in kept)
    changed = {"hosts", "kinds", "memory", "alpha", "samples", "measured", "compute", "sites", "trunks"}
    assert left.sites == made.sites[1::2] == (1, 1)
    assert left.trunks.behind.tolist() == [[True, False]] and left.trunks.bandwidth.tolist() == [2e8]
    assert {field.name for field in dataclasses.fields(cluster.Cluster)} == changed | set(kept)  # no field is forgotten
    assert cluster.without(made, []).hosts == made.hosts
    assert cluster.without(Cluster.parse(values()), ["host1"]).measured is None


def test_hosts_to_leave_out_must_be_there():
    made = Cluster.parse(values())
    with pytest.raises(UserError, match="there is no host 'pax3' to leave out; the cluster has host0, host1, host2"):
        cluster.without(made, ["host0", "pax3"])
    with pytest.raises(UserError, match="all 3 hosts are left out; leave one at least"):
        cluster.without(made, made.hosts)
    with pytest.raises(ValueError, match="before they are merged"):
        cluster.without(cluster.merged(Cluster.parse(values(hosts=4)), 2), ["host0+host1"])


def test_a_smaller_cluster_can_be_saved(tmp_path):
    left = cluster.without(Cluster.parse(values(hosts=["a", "b", "c"])), ["b"])
    left.save(tmp_path / "c.json")
    again = Cluster.load(tmp_path / "c.json")
    assert again.hosts == ("a", "c") and again.named
    np.testing.assert_array_equal(again.samples, left.samples)


def test_1024_hosts_load_in_under_a_second():
    exceptions = [{"from": f"host{i:04}", "to": f"host{i + 1:04}", "bandwidth": 1e9} for i in range(0, 1000, 10)]
    began = time.perf_counter()
    found = Cluster.parse(values(hosts=1024, links=CLASSES | {"exceptions": exceptions}))
    assert time.perf_counter() - began < 1.0
    assert found.bandwidth[10, 11] == 1e9 and found.devices == 2048


SQUARE = [[3e11, 2e10], [2e10, 3e11]]
ROW = {
    "kind": "a100-80gb",
    "save": "dots",
    "dtype": "bfloat16",
    "tensor": 1,
    "micro_batch": 1,
    "hidden": 64,
    "heads": 1,
    "sequence": 8,
    "vocab": 128,
    "forward": 1.0,
    "backward": 2.0,
    "head": 0.1,
    "embedding": 0.0,
    "optimizer": 1e-9,
}


def two(bandwidth: list) -> dict:
    """Return the changes that make a cluster of two hosts with these bandwidths."""
    return {"hosts": 2, "links": {"alpha": 0, "bandwidth": bandwidth}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"links": {"alpha": 0, "bandwidth": [[1, 1, 1], [1, 1, 1]]}}, "3 x 3 for the 3 hosts, got 2 x 3"),
        ({"links": {"alpha": 0, "bandwidth": [[1, 1, 1], [1, 1], [1, 1, 1]]}}, "rows differ"),
        (two([[1, None], [1, 1]]), "from host0 to host1 must be above 0"),
        (two([[1, 0], [1, 1]]), "from host0 to host1 must be above 0, got 0"),
        (two([[1, 1], [-2, 1]]), "from host1 to host0 must be above 0, got -2"),
        (two([[-1, 1], [2, 1]]), "inside host0 must be above 0, got -1"),
        ({"hosts": 2, "links": {"alpha": -1e-6, "bandwidth": SQUARE}}, "links.alpha must be a number from 0 on"),
        ({"hosts": 2, "links": {"bandwidth": SQUARE}}, "links.alpha is missing"),
        ({"links": {"inside": CLASSES["inside"]}}, "links.between is missing"),
        ({"links": CLASSES | {"exceptions": [{"from": "nobody", "to": "*"}]}}, "got 'nobody'"),
        ({"links": CLASSES | {"racks": [0, 0, 1]}}, "racks and links.across go together"),
        ({"links": {"npz": "none.npz"}}, "cannot read links.npz"),
        ({"hosts": ["a", "b", "a"]}, "a comes twice"),
        ({"hosts": 0}, "from 1 on, got 0"),
        ({"devices_per_host": 2.5}, "devices_per_host must be an integer"),
        ({"device": "a1000"}, "device must be one of v100"),
        ({"device": ["h100", "h100"]}, "each of the 3 hosts, got 2"),
        ({"device": "cpu"}, "memory is missing"),
        ({"fan_out": 0.4}, "fan_out must be a number from 0.5 on, got 0.4"),
        ({"fan_out": "all"}, "fan_out must be a number above 0, got 'all'"),
        ({"device": [["h100"], "h100", "h100"]}, "device must be one of v100"),
        ({"memory": 10**400}, "memory must be a number above 0"),
        ({"hosts": 10**30}, "may have 8,192 hosts"),
        ({"hosts": [f"n{i}" for i in range(8193)]}, "may have 8,192 hosts, got 8,193"),
        ({"name": "\ud800"}, "must be printable"),
        ({"compute": [{"kind": "a100-80gb"}]}, "compute row 0 lacks save, dtype"),
        ({"compute": [ROW | {"forward": -1.0}]}, "compute row 0: forward must be a number above 0, got -1.0"),
        ({"compute": [ROW | {"hidden": 0}]}, "compute row 0: hidden must be an integer from 1 on, got 0"),
        ({"compute": [ROW | {"save": "all"}]}, "compute row 0: save must be one of dots"),
        ({"compute": [ROW, ROW | {"micro_batch": 3}, ROW | {"head": 9.0}]}, "compute rows 0 and 2 measure the same"),
        ({"memory": -1}, "memory must be a number above 0"),
        ({"trunks": 1e8}, "trunks must be a list such as"),
        ({"trunks": [{"bandwidth": 1e8}]}, "must say bandwidth, and either hosts or"),
        ({"trunks": [{"hosts": ["host0"], "each": "site", "bandwidth": 1e8}]}, "must say bandwidth, and either hosts"),
        ({"trunks": [{"hosts": ["host0"], "bandwidth": 0}]}, "trunks.bandwidth must be a number above 0, got 0"),
        ({"trunks": [{"hosts": ["host9"], "bandwidth": 1}]}, "hosts must be a list of hosts of the cluster"),
        ({"trunks": [{"hosts": [], "bandwidth": 1}]}, "some hosts must be behind a trunk and some not, got 0 of 3"),
        ({"trunks": [{"each": "site", "bandwidth": 1}]}, "if sites has two or more"),
        ({"trunks": [{"hosts": ["host0"], "bandwidth": 1, "rate": 1}]}, "unknown key trunks: rate"),
        ({"rails": 2}, 'rails must be true or an object such as {"pxn": false, "oversubscription": 2}, got 2'),
        ({"rails": {"spine": 2}}, "unknown key rails.spine; known are pxn, oversubscription"),
        ({"rails": {"pxn": 1}}, "rails.pxn must be true or false, got 1"),
        ({"rails": {"oversubscription": 2}}, 'which no flow crosses with PXN; say "pxn": false, too'),
        ({"rails": {"pxn": False, "oversubscription": 0.5}}, "oversubscription must be a number from 1 on, got 0.5"),
        ({"rails": True, "nics": 4}, "nics must divide devices_per_host if there are rails, got 4 for 2 devices"),
        ({"rails": True, "device": "cpu", "memory": 1e9}, "rails need GPUs, each of which has its NIC, got device cpu"),
        ({"colour": 1}, "unknown key colour"),
        ({"version": 2}, "version must be 1"),
        ({"version": True}, "version must be 1, got True"),
        ({"links": {"alpha": 0.0, "bandwidth": [["7"] * 3] * 3}}, "links.bandwidth must be a matrix of 3 x 3 numbers"),
        ({"links": {"alpha": 0.0, "bandwidth": [[True, 1.0, 1.0]] * 3}}, "must be a matrix of 3 x 3 numbers"),
    ],
)
def test_what_is_wrong_is_told(changes, sentence):
    with pytest.raises(UserError) as error:
        Cluster.parse(values(**changes))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_cluster_is_told(tmp_path):
    for text in ("", "[1]", "{"):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(UserError, match=r"c\.json"):
            Cluster.load(tmp_path / "c.json")
    with pytest.raises(UserError, match="cannot read"):
        Cluster.load(tmp_path / "none.json")


# --- Units, and lists of hosts ----------------------------------------------------------------------------------------


def load(tmp_path, **changes) -> Cluster:
    (tmp_path / "c.json").write_text(json.dumps(values(**changes)))
    return Cluster.load(tmp_path / "c.json")


def between(**changes) -> dict:
    return {"links": CLASSES | {"between": CLASSES["between"] | changes}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (between(bandwidth=25), "host0 to host1 is 25 bytes/s, .*; 25 GB/s are 2.5e.10 and 25 Gbit/s are 3.125e.09"),
        (between(bandwidth=25_000), "25000 MB/s are 2.5e.10 bytes/s"),
        (between(bandwidth=2e20), "is 2e.20 bytes/s, but 100000 to 1e.13 are plausible$"),
        (between(alpha=10), "latency .* is 10 seconds, .*; 10 us are 1e-05 and 10 ms are 0.01 seconds"),
        ({"links": {"alpha": 0, "bandwidth": [[3e11, 2e10, 2e10], [2e10, 3e11, 2], [2e10, 2e10, 3e11]]}},
         "bandwidth from host1 to host2 is 2 bytes/s"),
        ({"memory": [8e10, 80, 8e10]}, "memory of a device of host1 is 80 bytes, .*; 80 GB are 8e.10 bytes"),
        ({"trunks": [{"hosts": ["host0"], "bandwidth": 10}]}, "trunks.bandwidth is 10 bytes/s"),
        ({"device": "a", "devices": {"a": {"peak_flops": 312, "bandwidth": 2e12, "memory": 8e10}}},
         "devices.a.peak_flops is 312 FLOP/s, .*; 312 TFLOP/s are 3.12e.14 and 312 GFLOP/s are 3.12e.11 FLOP/s"),
        ({"device": "a", "devices": {"a": {"peak_flops": 3e14, "bandwidth": 2039, "memory": 8e10}}},
         "devices.a.bandwidth is 2039 bytes/s, .*; 2039 GB/s are 2.039e.12"),
    ],
)  # fmt: skip
def test_a_figure_in_another_unit_is_one_sentence_with_the_likely_one(tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        load(tmp_path, **changes)


def test_hosts_may_be_hostlists(tmp_path):
    names = ("n01", "n02", "n03")
    far = {"from": "n[01,03]", "to": "n02", "bandwidth": 1e9}
    for hosts in ("n[01-03]", ["n[01-02]", "n03"]):
        found = load(
            tmp_path,
            hosts=hosts,
            links=CLASSES | {"exceptions": [far]},
            trunks=[{"hosts": "n[01-02]", "bandwidth": 1e9}],
        )
        assert found.hosts == names and found.named and found.trunks.behind.tolist() == [[True, True, False]]
        assert found.bandwidth[:, 1].tolist() == [1e9, 3e11, 1e9] and found.bandwidth[0, 2] == 2e10
    assert cluster.without(found, ["n[01", "02]"]).hosts == ("n03",)
    with pytest.raises(UserError, match="n02 comes twice"):
        load(tmp_path, hosts=["n[01-02]", "n02"])


# --- Devices of one's own, and sites ----------------------------------------------------------------------------------

MINE = {"peak_flops": 1.4e14, "bandwidth": 9e11, "memory": 2.4e10}


def test_a_devices_reach_is_a_share():
    one = {"hosts": 2, "device": "mine"}
    assert Cluster.parse(values(**one, devices={"mine": {**MINE, "reach": 0.5}})).sheet("mine").reach == 0.5
    with pytest.raises(UserError, match=r"devices.mine.reach is a share of peak_flops, so 1 is the most, got 1.2"):
        Cluster.parse(values(**one, devices={"mine": {**MINE, "reach": 1.2}}))


def test_a_file_may_describe_its_devices(tmp_path):
    made = Cluster.parse(values(hosts=2, device=["mine", "rtx4090"], devices={"mine": MINE}))
    sheet = made.sheet("mine")
    assert (sheet.peak_flops, sheet.single_flops, sheet.bandwidth) == (1.4e14, 7e13, 9e11)
    assert made.memory.tolist() == [2.4e10, 25_757_220_864] and made.sheet("cpu") is None
    made.save(tmp_path / "mine.json")
    again = Cluster.load(tmp_path / "mine.json")
    assert again.sheets == made.sheets and again.kinds == made.kinds


@pytest.mark.parametrize(
    "devices, sentence",
    [
        ({"h100": MINE}, "must be a name of its own"),
        ({"mine": {"peak_flops": 1e14}}, "lacks bandwidth, memory"),
        ({"mine": MINE | {"speed": 1}}, "unknown key devices.mine.speed"),
        ({"mine": MINE | {"bandwidth": -1}}, "devices.mine.bandwidth must be a number above 0"),
        ({"mine": MINE | {"capability": 8}}, "capability must be two integers"),
        ([MINE], "devices must be an object"),
    ],
)
def test_a_device_that_makes_no_sense_is_one_sentence(devices, sentence):
    with pytest.raises(UserError, match=sentence):
        Cluster.parse(values(device="mine", devices=devices))


def test_links_between_sites_have_their_own_rate(tmp_path):
    links = CLASSES | {"sites": {"alpha": 0.01, "bandwidth": 1.25e8}}
    made = Cluster.parse(values(hosts=4, links=links, sites=["west", "west", "east", "east"]))
    assert made.sites == (0, 0, 1, 1)
    far = np.not_equal.outer(made.sites, made.sites)
    assert (made.bandwidth[far] == 1.25e8).all() and (made.bandwidth[~far] > 1.25e8).all()
    assert (made.alpha[far] == 0.01).all() and (made.alpha[~far] < 0.01).all()
    made.save(tmp_path / "sites.json")
    assert Cluster.load(tmp_path / "sites.json").sites == made.sites
    assert cluster.merged(made, 2).sites == (0, 1)
    for wrong in ({"sites": [0, 0, 1, 1]}, {"links": links}, {"sites": [0, 0, 0, 0], "links": links}):
        with pytest.raises(UserError, match=r"links\.sites needs two sites"):
            Cluster.parse(values(**{"hosts": 4, "links": CLASSES, **wrong}))


def test_arrays_that_are_cut_off_leave_the_old_ones(tmp_path, monkeypatch):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(values(hosts=80)))
    Cluster.load(path).save(path)
    good = (tmp_path / "cluster.npz").read_bytes()

    def cut_off(file, **_):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", cut_off)
    with pytest.raises(KeyboardInterrupt):
        Cluster.load(path).save(path)
    assert (tmp_path / "cluster.npz").read_bytes() == good
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cluster.json", "cluster.npz"]
