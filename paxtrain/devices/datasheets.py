"""What vendors' datasheets say of device kinds, old ones too, by any name that a log may have for them."""

import functools
import re
from typing import NamedTuple

from paxtrain.devices.gpus import GPUS


class Datasheet(NamedTuple):
    """Rates of one device.

    Attributes:
        half, single: dense operations/s on 16 and on 32 bits (TF32 where there is such), without sparsity.
        memory: bytes/s of its own memory.
        intra: bytes/s, each way, to another device of the host: NVLink and its like, else PCIe.
    """

    half: float
    single: float
    memory: float
    intra: float


def _gpu(name: str, single: float, intra: float) -> Datasheet:
    return Datasheet(GPUS[name].peak_flops, single, GPUS[name].bandwidth, intra)


# Where a kind comes in several forms, the fastest: no share of its rates can be above 1.
_DATASHEETS = {
    "K80": Datasheet(4.1e12, 4.1e12, 240e9, 12e9),
    "P100": Datasheet(19e12, 9.5e12, 732e9, 80e9),
    "V100": _gpu("v100", 15.7e12, 150e9),
    "T4": Datasheet(65e12, 8.1e12, 300e9, 12e9),
    "RTX2080TI": Datasheet(54e12, 13.4e12, 616e9, 12e9),
    "RTX3090": Datasheet(71e12, 35.6e12, 936e9, 24e9),
    "RTX4090": Datasheet(165e12, 82e12, 1008e9, 24e9),
    "A10": Datasheet(125e12, 62e12, 600e9, 24e9),
    "A10G": Datasheet(70e12, 35e12, 600e9, 24e9),
    "A30": Datasheet(165e12, 82e12, 933e9, 100e9),
    "A40": Datasheet(150e12, 75e12, 696e9, 24e9),
    "A6000": Datasheet(155e12, 77e12, 768e9, 24e9),
    "L4": Datasheet(121e12, 60e12, 300e9, 24e9),
    "L40": Datasheet(181e12, 90e12, 864e9, 24e9),
    "A100": _gpu("a100-80gb", 156e12, 300e9),
    "A800": _gpu("a100-80gb", 156e12, 200e9),
    "H100": _gpu("h100", 495e12, 450e9),
    "H800": _gpu("h100", 495e12, 200e9),
    "H20": Datasheet(148e12, 74e12, 4000e9, 450e9),
    "H200": _gpu("h200", 495e12, 450e9),
    "GH200": Datasheet(989e12, 495e12, 4000e9, 450e9),
    "B200": _gpu("b200", 1100e12, 900e9),
    "MI100": Datasheet(185e12, 46e12, 1229e9, 46e9),
    "MI250X": Datasheet(192e12, 48e12, 1638e9, 50e9),
    "MI300X": Datasheet(1307e12, 654e12, 5300e9, 64e9),
}

# What stands in for a device kind, and for a host's network, of which nothing is known.
UNKNOWN = Datasheet(100e12, 50e12, 1000e9, 25e9)
UNKNOWN_HOST = 100e9 / 8


@functools.cache
def datasheet(kind: str) -> Datasheet | None:
    """Of a device kind by any of its names, as "NVIDIA A100-SXM4-80GB"; None: not known."""
    words = re.split(r"[^A-Z0-9]+", kind.upper())
    joined = ["".join(words[i : i + n]) for n in (3, 2) for i in range(len(words) - n + 1)]
    return next((_DATASHEETS[name] for name in joined + words if name in _DATASHEETS), None)
