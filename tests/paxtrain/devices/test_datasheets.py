"""Peak rates of devices by the names that drivers and logs use."""

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
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
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


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *[(gpu.name, key) for key, gpu in GPUS.items()],
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", None),
        ("NVIDIA A10", None),
    ],
)
def test_gpus_are_found_by_any_drivers_name(kind, key):
    assert gpus.find(kind) == key
