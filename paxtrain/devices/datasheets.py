"""Peak rates of devices, old ones included, from their makers' data sheets, by any name in a log or a driver."""

from typing import NamedTuple

from paxtrain.devices import gpus


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


# Devices for which no plans are made. Rates are NVIDIA's and AMD's, without sparsity.
_K80 = Datasheet(4.1e12, 4.1e12, 240e9, 12e9)
_P100 = Datasheet(19e12, 9.5e12, 732e9, 80e9)
_OTHERS = {
    "k80": _K80,
    "p100": _P100,
    "p100sxm216gb": _P100,
    "mi100": Datasheet(185e12, 46e12, 1229e9, 46e9),
    "mi250x": Datasheet(192e12, 48e12, 1638e9, 50e9),
    "mi300x": Datasheet(1307e12, 654e12, 5300e9, 64e9),
}

# Stand-ins for an unknown device kind, and for the unknown network of a host in bytes per second.
UNKNOWN = Datasheet(100e12, 50e12, 1000e9, 25e9)
UNKNOWN_HOST = 100e9 / 8


def datasheet(kind: str) -> Datasheet | None:
    """Return the data sheet of a device kind by any of its names, such as "NVIDIA A100-SXM4-80GB"; None if unknown.

    A name without a form factor, "H100", is that of the fastest one, so that no utilisation can exceed 1.
    """
    key = gpus.find(kind)
    if key is None:
        return _OTHERS.get(gpus.spelled(kind))
    gpu = gpus.ALL[key]
    return Datasheet(gpu.peak_flops, gpu.tf32_flops, gpu.bandwidth, gpu.link)


def peak_flops(device_kind: str) -> float | None:
    """Return the peak dense 16-bit FLOP/s of one device, or None for a CPU, an unknown device or a MIG slice.

    Args:
        device_kind: jax.Device.device_kind, such as "NVIDIA H100 80GB HBM3".
    """
    sheet = datasheet(device_kind)
    return sheet.half if sheet else None
