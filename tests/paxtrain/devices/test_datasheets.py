"""Peak rates of devices by the names that drivers and logs use."""

import json
import pathlib
import re

import pytest

from paxtrain.devices import datasheets, gpus
from paxtrain.devices.gpus import GPUS


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H200 PCIe", 835.5),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("Tesla K80", 4.1),
        ("Tesla P100-SXM2-16GB", 19),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 2080 Ti", 54),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA A4000", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_device_kind(kind, tera):
    assert datasheets.peak_flops(kind) == (None if tera is None else pytest.approx(tera * 1e12))


def test_device_kinds_by_any_name():
    for name in ("NVIDIA A100-SXM4-80GB", "a100_40gb", "A100 PCIe", "Tesla-A100"):
        assert datasheets.datasheet(name).half == 312e12
    assert datasheets.datasheet("GeForce RTX 3090") == datasheets.datasheet("rtx3090") is not None
    assert datasheets.datasheet("A10") != datasheets.datasheet("A100")
    assert datasheets.datasheet("cpu") is None and datasheets.datasheet("") is None


def test_the_compilers_gpus_have_the_same_peak():
    for name, gpu in GPUS.items():
        assert datasheets.peak_flops(gpu.name) == gpu.peak_flops == datasheets.peak_flops(name)


# Names in NVIDIA's driver: src/nvidia/generated/g_nv_name_released.h of its open kernel modules.
DRIVER = {
    "v100": ["Tesla V100-SXM2-16GB"],
    "v100-32gb": ["Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "Tesla V100-DGXS-32GB"],
    "v100-pcie-16gb": ["Tesla V100-PCIE-16GB"],
    "v100-pcie-32gb": ["Tesla V100-PCIE-32GB"],
    "v100s": ["Tesla V100S-PCIE-32GB"],
    "a100-40gb": ["NVIDIA A100-SXM4-40GB"],
    "a100-80gb": ["NVIDIA A100-SXM4-80GB"],
    "a100-pcie-40gb": ["NVIDIA A100-PCIE-40GB"],
    "a100-pcie-80gb": ["NVIDIA A100 80GB PCIe"],
    "a800": ["NVIDIA A800-SXM4-80GB"],
    "a30": ["NVIDIA A30"],
    "a6000": ["NVIDIA RTX A6000"],
    "a40": ["NVIDIA A40"],
    "a10": ["NVIDIA A10"],
    "a10g": ["NVIDIA A10G"],
    "l4": ["NVIDIA L4"],
    "l40": ["NVIDIA L40"],
    "l40s": ["NVIDIA L40S"],
    "h100": ["NVIDIA H100 80GB HBM3"],
    "h100-pcie": ["NVIDIA H100 PCIe"],
    "h100-nvl": ["NVIDIA H100 NVL"],
    "h800": ["NVIDIA H800"],
    "gh200": ["NVIDIA GH200 120GB", "NVIDIA GH200 480GB"],
    "rtx2080ti": ["NVIDIA GeForce RTX 2080 Ti"],
    "rtx3090": ["NVIDIA GeForce RTX 3090"],
    "rtx3090ti": ["NVIDIA GeForce RTX 3090 Ti"],
    "rtx4090": ["NVIDIA GeForce RTX 4090"],
    None: [
        *("Tesla V100-FHHL-16GB", "Tesla V100-SXM3-32GB-H", "NVIDIA A100-SXM-64GB", "NVIDIA A800 40GB Active"),
        *("NVIDIA A800 80GB PCIe", "NVIDIA H800 PCIe", "NVIDIA H800 NVL", "NVIDIA A10M", "NVIDIA L40S-48Q"),
        *("NVIDIA H100-1-10C", "NVIDIA RTX A5000", "NVIDIA RTX 6000 Ada Generation", "NVIDIA A16", "NVIDIA A2"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 2080"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "", "cpu"),
    ],
}


@pytest.mark.parametrize(("key", "kind"), [(key, kind) for key, kinds in DRIVER.items() for kind in kinds])
def test_gpus_are_found_by_the_drivers_names(key, kind):
    assert gpus.find(kind) == key


def test_every_gpu_is_one_record():
    for key, gpu in gpus.ALL.items():
        assert gpus.find(gpu.name) == gpus.find(key) == key
        names = [gpus.spelled(gpu.name), gpus.spelled(key)]
        assert [other for other, each in gpus.ALL.items() if any(re.fullmatch(each.names, n) for n in names)] == [key]
        # 900 GB of a rack's memory are no GPU's, nor are 1e11 FLOP/s.
        assert 10e9 < gpu.memory < 300e9 and 2e11 < gpu.bandwidth < 1e13 and 5e13 <= gpu.peak_flops < 3e15, key


@pytest.mark.parametrize("cluster", sorted((pathlib.Path(__file__).parents[3] / "configs" / "clusters").glob("*.json")))
def test_the_gpus_of_shipped_clusters_are_found(cluster):
    assert json.loads(cluster.read_text())["device"] in gpus.ALL
