"""Topologies of hosts and of SLURM's clusters are read as they were published, and refused if they are damaged."""

import pytest

from paxtrain.errors import UserError
from planner.given import host_topology, nccl_xml, slurm_topology, topo_matrix
from planner.given.host_topology import HostTopology, Nic
from tests.planner.given.logs import DATA


def refusal(read, tmp_path, content, name="file"):
    path = tmp_path / name
    path.write_text(content) if isinstance(content, str) else path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "devices", "nvlinks", "near", "nics", "rails"),
    [
        ("a100_4_gpus.topo", 4, 4, [(0,), (1,), (2,), (3,)], 4, True),
        ("h100_12_nics.topo", 8, 18, [(0,), (1,), (2,), (5,), (6,), (7,), (8,), (11,)], 8, True),
        ("titan_x_4_gpus.topo", 4, 0, [(0,), (0,), (1,), (1,)], 2, True),
        ("l40s_4_gpus.topo", 4, 0, [(), (), (), ()], 0, False),
    ],
)
def test_published_matrices_are_read(name, devices, nvlinks, near, nics, rails):
    """With tabs and with blanks, with the NICs' own names, and without NICs."""
    found = topo_matrix.read(DATA / name)
    assert (found.devices, found.nvlinks, list(found.near)) == (devices, nvlinks, near)
    shared = host_topology.host_nics(found)
    assert (shared.count, shared.rails, shared.ports) == (nics, rails, 1)


def test_the_legend_of_a_matrix_names_the_nics():
    assert topo_matrix.read(DATA / "h100_12_nics.topo").nics[11] == Nic("mlx5_11")
    assert topo_matrix.read(DATA / "titan_x_4_gpus.topo").nics[1] == Nic("mlx4_1")
    assert topo_matrix.read(DATA / "l40s_4_gpus.topo").numa == ("0", "0", "1", "1")


@pytest.mark.parametrize(
    ("name", "nvlinks", "near", "nics", "numa"),
    [
        ("h100_vm_nccl_topo.xml", 18, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)], 8, "00001111"),
        ("dcu_8_devices_nccl_topo.xml", 0, [(0, 1)] * 4 + [(2, 3)] * 4, 4, "33337777"),
    ],
)
def test_published_xml_is_read(name, nvlinks, near, nics, numa):
    """Of 8 switched GPUs with a NIC of 200 Gbit/s each, and of 8 devices at two NICs with two ports each."""
    found = nccl_xml.read(DATA / name)
    assert (found.devices, found.nvlinks, list(found.near), "".join(found.numa)) == (8, nvlinks, near, numa)
    shared = host_topology.host_nics(found)
    assert (shared.count, shared.rails, shared.bandwidth) == (nics, True, 25e9)


def test_nvlinks_between_pairs_are_those_of_the_pair_with_the_fewest():
    text = "".join(
        f'<pci busid="0000:0{i}:00.0"><gpu dev="{i}">'
        + "".join(
            f'<nvlink target="0000:0{j}:00.0" count="{1 + (i + j == 1)}" tclass="0x030200"/>'
            for j in range(3)
            if j != i
        )
        + "</gpu></pci>"
        for i in range(3)
    )
    tree = nccl_xml._tree(f'<?xml version="1.0"?><system><cpu numaid="0">{text}</cpu></system>')
    gpus = [(element, around) for element, around in nccl_xml._walk(tree) if element.tag == "gpu"]
    assert nccl_xml._nvlinks(gpus) == 1  # GPUs 0 and 1 have two


def topology(near, nics=8, bandwidth=50e9):
    return HostTopology("x", len(near), 0, tuple(Nic(f"n{i}", bandwidth) for i in range(nics)), tuple(near))


@pytest.mark.parametrize(
    ("near", "nics", "expected"),
    [
        ([(0, 1)] * 2 + [(2, 3)] * 2, 4, (4, True, 1, 50e9)),  # two devices share two NICs
        ([(0,)] * 4 + [(1,)] * 4, 2, (2, True, 1, 50e9)),
        ([(0, 1), (2, 3)], 4, (2, True, 2, 100e9)),  # a device has two NICs
        ([(0,), (1,), (0,), (1,)], 2, (2, False, 1, 50e9)),  # not in a row: i * 2 // 4 is another device's
        ([(0, 1), (1, 2), (2, 3), (3, 0)], 4, (4, False, 1, 50e9)),  # shared crosswise
        ([(0,), (1,), (), ()], 2, (2, False, 1, 50e9)),
        ([(0, 1)] * 8, 2, (2, False, 1, 50e9)),  # all near all
        ([()] * 4, 2, (2, False, 1, 50e9)),
        ([()] * 4, 9, (4, False, 1, 50e9)),
        ([(0, 1, 2)] * 2 + [(3, 4, 5)] * 2, 6, (4, False, 1, 50e9)),  # three NICs for two devices
    ],
)
def test_devices_share_nics(near, nics, expected):
    found = host_topology.host_nics(topology(near, nics))
    assert (found.count, found.rails, found.ports, found.bandwidth) == expected


def test_a_host_may_have_one_device(tmp_path):
    path = tmp_path / "one"
    path.write_text(
        "        GPU0    NIC0    CPU Affinity    NUMA Affinity\nGPU0     X      PIX     0-7     0\nNIC0    PIX      X\n"
    )
    found = topo_matrix.read(path)
    assert (found.devices, found.nvlinks, found.near) == (1, 0, ((0,),))
    assert host_topology.host_nics(found).count == 1


def test_damaged_matrices_are_refused(tmp_path):
    good = (DATA / "h100_12_nics.topo").read_text()
    lines = good.splitlines()
    for changed, reason in {
        "": "is empty",
        "\n".join(lines[:5]): "the row of GPU3 is missing",
        good[: good.index("GPU7\tNV18") + 30]: "the row of GPU7 has 5 of 20 connections",
        "\n".join(lines[2:]): "no line with the columns",
        good.replace("NV18", "NV", 1): "the row of GPU0 has 'NV'",
        good.replace("NV18", "NV6", 1): "GPU0 reaches GPU1 by NV6 and is reached by NV18",
        good.replace("NV18", "??", 1): "the row of GPU0 has '??'",
        good.replace("\tGPU1\t", "\tGPU2\t", 1): "the columns begin with GPU0 GPU2",
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n": "no line with the columns",
    }.items():
        assert reason in refusal(topo_matrix.read, tmp_path, changed), reason
    assert topo_matrix.read(DATA / "h100_12_nics.topo") == topo_matrix.read(_crlf(tmp_path, good))


def _crlf(tmp_path, text):
    path = DATA / "h100_12_nics.topo"
    other = tmp_path / "crlf"
    other.write_bytes(text.replace("\n", "\r\n").encode())
    found = topo_matrix.read(other)
    assert found.near == topo_matrix.read(path).near
    return path


def test_damaged_xml_is_refused(tmp_path):
    good = (DATA / "h100_vm_nccl_topo.xml").read_text()
    for changed, reason in {
        "": "is empty",
        good[:3000]: "no whole XML",
        good.replace("system", "graphs"): "begins with <graphs>",
        '<!DOCTYPE a [<!ENTITY b "c">]>' + good: "declarations",
        good.replace('speed="200000"', 'speed="200"'): "is it in another unit",
        good.replace('speed="200000"', 'speed="25000000000"'): "which no NIC has",
        good.replace('speed="200000"', 'speed="12500"'): "write 100 if 12.5 is in GB/s",
        good.replace('speed="200000"', 'speed="fast"'): "must be a whole number",
        good.replace('dev="1" sm', 'dev="0" sm'): "two <gpu> have the same dev",
        '<system version="1"><cpu numaid="0"/></system>': "it has 0 <gpu>",
        "<a>" * 200 + "</a>" * 200: "begins with <a>",
        "<system>" + "<a>" * 200 + "</a>" * 200 + "</system>": "more than 64 deep",
        "{}": "no whole XML",
    }.items():
        assert reason in refusal(nccl_xml.read, tmp_path, changed), reason


def test_a_nic_without_a_link_is_left_out(tmp_path):
    path = tmp_path / "down.xml"
    path.write_text(
        (DATA / "h100_vm_nccl_topo.xml").read_text().replace('dev="7" speed="200000"', 'dev="7" speed="-1"')
    )
    found = nccl_xml.read(path)
    assert len(found.nics) == 7 and found.near[0] == ()


@pytest.mark.parametrize(
    ("name", "racks"),
    [
        ("tree_topology.conf", {"s0": 6, "s1": 6, "s2": 6}),
        ("block_topology.conf", {"block1": 32, "block2": 32, "block3": 32, "block4": 32}),
        ("azure_blocks_topology.conf", {"block1": 18}),
    ],
)
def test_published_topologies_of_slurm_are_read(name, racks):
    found = slurm_topology.read(DATA / name)
    assert {rack: list(found.racks.values()).count(rack) for rack in racks} == racks
    assert len(found.racks) == sum(racks.values()) and found.blocks == ("block" in name)


def test_what_scontrol_prints_is_read(tmp_path):
    path = tmp_path / "shown"
    path.write_text(
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=dev[0-2]\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=dev[3-5]\n"
        "SwitchName=s2 Level=1 LinkSpeed=1 Nodes=dev[0-5] Switches=s[0-1]\n"
    )
    found = slurm_topology.read(path)
    assert found.of(("dev0", "dev5")) == ["s0", "s1"] and len(found.racks) == 6
    with pytest.raises(UserError, match="has no host dev9"):
        found.of(("dev9",))


def test_hosts_at_the_same_rails_switches_are_one_rack(tmp_path):
    path = tmp_path / "rails"
    path.write_text(
        "".join(
            f"switchname=l{group}{rail} nodes=n[{4 * group}-{4 * group + 3}]\n" for group in (0, 1) for rail in (0, 1)
        )
    )
    assert set(slurm_topology.read(path).racks.values()) == {"l00+l01", "l10+l11"}


def test_damaged_topologies_of_slurm_are_refused(tmp_path):
    for content, reason in {
        "# nothing\n": "names no switch",
        "SwitchName=s3 Switches=s[0-2]\n": "names no switch",
        "SwitchName=s0 Nodes=\n": "must have a name of its own and Nodes=",
        "SwitchName=s0 Nodes=a\nSwitchName=s0 Nodes=b\n": "must have a name of its own",
        "SwitchName=s0 Nodes=dev[0-\n": "dev[0-",
        "SwitchName=s0 Nodes=dev[0-9999999]\n": "where numbers or ranges should be",
        "SwitchName=s0 Nodes=a\nBlockName=b0 Nodes=a\n": "those of one topology",
        "- topology: t\n  tree:\n": "give topology.conf",
        "NodeName=a CPUs=4\n": "give topology.conf",
        b"\xff\xfe\x00": "give topology.conf",
    }.items():
        assert reason in refusal(slurm_topology.read, tmp_path, content), reason
