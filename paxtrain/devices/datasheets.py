"""Peak rates of devices, old ones included, from their makers' data sheets, by any name in a log or a driver."""

import functools
import re
from typing import NamedTuple

from paxtrain.devices.gpus import GEFORCE, GPUS


class Datasheet(NamedTuple):
    """Peak rates of one device.

    Attributes:
        half: dense 16-bit operations per second, bfloat16 or, on older devices, float16.
        single: dense 32-bit operations per second, TF32 if the device has it.
        memory_bandwidth: bytes per second of the device's memory.
        intra: bytes per second, each way, to another device of the host: over NVLink or a similar link, else over PCIe.
    """

    half: float
    single: float
    memory_bandwidth: float
    intra: float


def _gpu(name: str) -> Datasheet:
    """Return the rates of a GPU in gpus.py."""
    gpu = (GPUS | GEFORCE)[name]
    return Datasheet(gpu.peak_flops, gpu.single_flops, gpu.bandwidth, gpu.link)


# Rates are NVIDIA's and AMD's, without sparsity (GeForce: the white papers); NVIDIA's sheets
# print twice as much "with sparsity" from Ampere on. A key without a form factor, "H100", has the rates of the fastest
# one, so that no utilisation can exceed 1. A key with a form factor, "H100 PCIE", applies if the device's name has all
# its words.
_DATASHEETS = {
    "K80": Datasheet(4.1e12, 4.1e12, 240e9, 12e9),
    "P100": Datasheet(19e12, 9.5e12, 732e9, 80e9),
    "V100": _gpu("v100"),
    "V100 PCIE": Datasheet(112e12, 14e12, 900e9, 12e9),
    "T4": Datasheet(65e12, 8.1e12, 300e9, 12e9),
    "RTX2080TI": Datasheet(54e12, 13.4e12, 616e9, 12e9),
    "RTX3090": _gpu("rtx3090"),
    "RTX4090": _gpu("rtx4090"),
    "RTX5090": _gpu("rtx5090"),
    "A10": Datasheet(125e12, 62e12, 600e9, 24e9),
    "A10G": Datasheet(70e12, 35e12, 600e9, 24e9),
    "A30": Datasheet(165e12, 82e12, 933e9, 100e9),
    "A40": Datasheet(149.7e12, 74.8e12, 696e9, 24e9),
    "A6000": Datasheet(155e12, 77e12, 768e9, 24e9),
    "L4": Datasheet(121e12, 60e12, 300e9, 24e9),
    "L40": Datasheet(181e12, 90e12, 864e9, 24e9),
    "L40S": Datasheet(362e12, 183e12, 864e9, 24e9),
    "A100": _gpu("a100-80gb"),
    "A800": _gpu("a100-80gb")._replace(intra=200e9),
    "H100": _gpu("h100"),
    "H100 PCIE": Datasheet(756e12, 378e12, 2000e9, 300e9),
    "H100 NVL": Datasheet(835.5e12, 417.5e12, 3900e9, 300e9),
    "H800": _gpu("h100")._replace(intra=200e9),
    "H20": Datasheet(148e12, 74e12, 4000e9, 450e9),
    "H200": _gpu("h200"),
    "H200 NVL": Datasheet(835.5e12, 417.5e12, 4800e9, 450e9),
    "GH200": _gpu("h100")._replace(memory_bandwidth=4000e9),
    "B200": _gpu("b200"),
    "GB200": Datasheet(2500e12, 1250e12, 8000e9, 900e9),
    "MI100": Datasheet(185e12, 46e12, 1229e9, 46e9),
    "MI250X": Datasheet(192e12, 48e12, 1638e9, 50e9),
    "MI300X": Datasheet(1307e12, 654e12, 5300e9, 64e9),
}

# Stand-ins for an unknown device kind, and for the unknown network of a host in bytes per second.
UNKNOWN = Datasheet(100e12, 50e12, 1000e9, 25e9)
UNKNOWN_HOST = 100e9 / 8


@functools.cache
def datasheet(kind: str) -> Datasheet | None:
    """Return the data sheet of a device kind by any of its names, such as "NVIDIA A100-SXM4-80GB"; None if unknown."""
    words = re.split(r"[^A-Z0-9]+", kind.upper())
    # "GeForce RTX 3090" is RTX3090.
    names = {"".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)}
    found = [key for key in _DATASHEETS if set(key.split()) <= names]
    # The most specific of several keys wins: "H100 PCIE" says more than "H100".
    return _DATASHEETS[max(found, key=lambda key: (len(key.split()), len(key)))] if found else None


def peak_flops(device_kind: str) -> float | None:
    """Return the peak dense 16-bit FLOP/s of one device, or None for a CPU, an unknown device or a MIG slice.

    Args:
        device_kind: jax.Device.device_kind, such as "NVIDIA H100 80GB HBM3".
    """
    if re.search(r"\bMIG\b", device_kind):
        return None
    sheet = datasheet(device_kind)
    return sheet.half if sheet else None
