"""python -m planner.cluster_of: files become a cluster that planner.plan takes, or one sentence."""

import json

import pytest

from planner.cluster.cluster import Cluster
from tests import mains
from tests.planner.given import logs
from tests.planner.given.logs import DATA

ONE, RING = DATA / "h100_1_host_all_reduce_perf.log", DATA / "h100_2_hosts_all_reduce_perf.log"
TOPO, XML = DATA / "h100_12_nics.topo", DATA / "h100_vm_nccl_topo.xml"
TREE = DATA / "tree_topology.conf"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Return a function that runs the main, and returns what it printed and the values of the file; {}: none."""
    module = mains.load("planner.cluster_of")

    def call(code=0, **flags):
        out = tmp_path / "out" / "cluster.json"
        out.parent.mkdir(exist_ok=True)
        out.unlink(missing_ok=True)
        arguments = [f"--{name}={value}" for name, value in ({"out": out} | flags).items()]
        assert mains.run(monkeypatch, module, *arguments) == code
        printed = capsys.readouterr()
        if code:
            assert not out.exists() and printed.err.startswith("error: ") and len(printed.err.splitlines()) == 1
            return printed.err, {}
        Cluster.load(out)
        return " ".join(printed.out.split()), json.loads(out.read_text())

    return call


@pytest.fixture
def made(tmp_path):
    """Return a function that writes a log of known links, and returns its path."""

    def write(*arguments, **how):
        path = tmp_path / f"made_{len(list(tmp_path.iterdir()))}.log"
        path.write_text(logs.log(*arguments, **how))
        return path

    return write


def test_published_logs_and_a_matrix_make_a_cluster(run):
    said, values = run(nccl_tests=f"{ONE},{RING}", topo=TOPO)
    assert (values["hosts"], values["devices_per_host"], values["device"]) == (["node005", "node007"], 8, "h100")
    assert (values["nics"], values["rails"]) == (8, True)
    assert values["links"]["inside"]["bandwidth"] == pytest.approx(474e9, rel=0.01)
    assert values["links"]["between"]["bandwidth"] == pytest.approx(98.2e9 / 8, rel=0.01)
    assert values["links"]["nominal"] == []
    assert "474 GB/s = 3,795 Gbit/s" in said and "12.3 GB/s = 98.2 Gbit/s" in said
    assert "latency of a hop 4 us (assumed: nothing shows it)" in said


def test_a_topology_alone_makes_a_cluster(run):
    """18 NVLinks of 25 GB/s each way, and NICs of 200 Gbit/s."""
    said, values = run(nccl_xml=XML, hosts="n[01-16]", device="h100")
    assert len(values["hosts"]) == 16 and values["nics"] == 8 and values["rails"]
    assert values["links"] == {
        "inside": {"alpha": 4e-6, "bandwidth": 450e9},
        "between": {"alpha": 1.2e-5, "bandwidth": 25e9},
        "nominal": ["inside", "between"],
    }
    assert "the NICs' rate" in said
    _, values = run(topo=TOPO, hosts=4, device="h100", nic_gbit=400)
    assert values["hosts"] == 4 and values["links"]["between"]["bandwidth"] == 50e9


def test_known_links_come_back(run, made):
    """From logs with 2% noise; a log across racks is another class than one inside a rack."""
    inside = made("all_reduce", ["dev0"] * 8, 28e-6, 400e9, noise=0.02)
    near = made("all_gather", ["dev0"] * 8 + ["dev1"] * 8, 38e-6, 320e9, noise=0.02)
    far = made("sendrecv", ["dev0", "dev17"], 15e-6, 20e9, noise=0.02)
    _, values = run(nccl_tests=f"{inside},{near},{far}", topo=TOPO, slurm_topology=TREE)
    found = values["links"]
    assert len(values["hosts"]) == 18 and found["racks"] == ["s0"] * 6 + ["s1"] * 6 + ["s2"] * 6
    for name, alpha, bandwidth in (("inside", 2e-6, 400e9), ("between", 10e-6, 40e9), ("across", 15e-6, 20e9)):
        assert found[name]["alpha"] == pytest.approx(alpha, rel=0.1), name
        assert found[name]["bandwidth"] == pytest.approx(bandwidth, rel=0.03), name


def test_pairs_become_exceptions(run, made):
    pairs = [made("sendrecv", ["a", b], 9e-6, rate) for b, rate in (("b", 48e9), ("c", 12e9))]
    said, values = run(nccl_tests=",".join(map(str, pairs)), nics=1)
    assert [(e["from"], e["to"], round(e["bandwidth"] / 1e9)) for e in values["links"]["exceptions"]] == [
        ("a", "b", 48), ("b", "a", 48), ("a", "c", 12), ("c", "a", 12),
    ]  # fmt: skip
    assert "2 pairs of hosts have links of their own" in said


def test_trees_do_not_make_a_nic_quicker(run, made):
    """A ring-like 460 GB/s over two hosts with 8 NICs of 400 Gbit/s: 57.5 GB/s each, of which 50 are there."""
    log = made("all_reduce", ["a"] * 8 + ["b"] * 8, 40e-6, 460e9)
    said, values = run(nccl_tests=log, topo=TOPO, nic_gbit=400)
    assert values["links"]["between"]["bandwidth"] == 50e9
    assert "57.5 GB/s = 460 Gbit/s beside a NIC of 50 GB/s = 400 Gbit/s" in said and "warning" in said


def test_bits_taken_for_bytes_are_refused_or_told(run, made):
    flow = made("sendrecv", ["a", "b"], 9e-6, 48e9)
    said, _ = run(2, nccl_tests=flow, nic_gbit=50)
    assert "48 GB/s = 384 Gbit/s beside a NIC of 6.25 GB/s = 50 Gbit/s" in said and "8 times that in Gbit/s" in said
    said, _ = run(2, nccl_xml=XML, hosts=2, device="h100", nic_gbit=25)
    assert "--nic_gbit=25, but NCCL's topology has NICs of 25 GB/s = 200 Gbit/s" in said
    said, _ = run(2, nccl_tests=flow, nic_gbit=12.5)
    assert "write 100 if 12.5 is in GB/s" in said
    slow = made("all_reduce", ["a"] * 8, 9e-6, 6.7e9)
    said, _ = run(nccl_tests=slow)
    assert "warning: 6.7 GB/s = 53.6 Gbit/s inside hosts, 0.015 of the 450 GB/s = 3,600 Gbit/s of h100" in said
    quick = made("all_reduce", ["a"] * 8, 9e-6, 3600e9)
    said, _ = run(2, nccl_tests=quick)
    assert "its data sheet has no such link" in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({}, "no log and no topology of a host was given"),
        ({"slurm_topology": TREE}, "no log and no topology of a host was given"),
        ({"nccl_tests": "gone.log"}, "cannot read the nccl-tests log gone.log"),
        ({"topo": TOPO}, "say how many there are"),
        ({"topo": TOPO, "hosts": 2}, "name it with --device"),
        ({"topo": TOPO, "hosts": 2, "device": "h100"}, "nothing says what the network between the 2 hosts does"),
        ({"topo": TOPO, "hosts": 2, "device": "h101"}, "--device=h101 is not known"),
        ({"topo": TOPO, "hosts": 0, "device": "h100"}, "--hosts=0"),
        ({"topo": DATA / "l40s_4_gpus.topo", "hosts": 1, "device": "h100"}, "no NVLink between all devices"),
        ({"topo": DATA / "a100_4_gpus.topo", "nccl_tests": RING}, "has 4 devices, but the logs 8 a host"),
        ({"topo": TOPO, "nccl_xml": XML, "hosts": 2, "device": "h100", "nic_gbit": 77}, "which no NIC has"),
        ({"nccl_xml": XML, "hosts": 4, "slurm_topology": TREE, "device": "h100"}, "--hosts=4 has no names"),
        ({"nccl_tests": RING, "slurm_topology": TREE}, "has no host node005"),
        ({"nccl_tests": DATA / "a100_1_host_sendrecv_perf.log"}, "'NVIDIA A100-SXM-64GB' is not known"),
        ({"nccl_tests": ONE, "out": "gone/cluster.json"}, "must be a file in a folder that is there"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_one_sentence(run, flags, reason):
    said, _ = run(2, **flags)
    assert reason in said


def test_devices_that_differ_are_refused(run, made):
    logs_ = [
        made("all_reduce", [host] * 8, 9e-6, 4e11, device=device)
        for host, device in (("a", "NVIDIA H100 80GB HBM3"), ("b", "NVIDIA A100-SXM4-80GB"))
    ]
    said, _ = run(2, nccl_tests=",".join(map(str, logs_)))
    assert "the devices differ" in said
