"""The facts of a device that the planner needs: its peak rates and its memory, from data sheets or a cluster's file.

The GPUs of paxtrain/devices/gpus.py are known with all that a compiler needs. The consumer GPUs here are known by their
data sheets only: plans are made for them, and their memory is not checked by a compiler. GeForce drivers let GPUs of a
host exchange data through its memory only, so a cluster's file says what their links do.
"""

import dataclasses
from collections.abc import Mapping

from paxtrain.devices.datasheets import datasheet
from paxtrain.devices.gpus import GPUS, Gpu


@dataclasses.dataclass(frozen=True)
class DeviceSheet:
    """A device, as its data sheet describes it.

    Attributes:
        peak_flops: FLOP/s of dense bfloat16 matrix products that add in float32.
        single_flops: FLOP/s in float32.
        bandwidth: bytes per second of its memory.
        memory: bytes of its memory.
        capability: CUDA compute capability, which decides on flash attention; (8, 0) or more has it.
        sms: number of multiprocessors; 0: not known.
        reach: share of the peak FLOP/s that the largest matrix products reach in training.
    """

    peak_flops: float
    single_flops: float
    bandwidth: float
    memory: float
    capability: tuple[int, int] = (8, 0)
    sms: int = 0
    reach: float = 0.65


# By compute capability. A100 and H100: fitted to half of the published runs of docs/accuracy.md. B200: H100's, scaled
# as both are in benchmarks, 1745 of 2250 TFLOP/s to 794.5 of 989 (Bekman, Machine Learning Engineering Open Book,
# "Maximum Achievable Matmul FLOPS comparison table"). Others: a typical share.
_H100 = 0.61
REACH = {(8, 0): 0.70, (9, 0): _H100, (10, 0): _H100 * (1745 / 2250) / (794.5 / 989)}


def _of(gpu: Gpu) -> DeviceSheet:
    single = gpu.sms * gpu.fpus * 2e9 * gpu.clock
    reach = REACH.get(gpu.capability, DeviceSheet.reach)
    return DeviceSheet(gpu.peak_flops, single, gpu.bandwidth, gpu.memory, gpu.capability, gpu.sms, reach)


def _consumer(name: str, memory: int, capability: tuple[int, int], sms: int) -> DeviceSheet:
    rates = datasheet(name)
    assert rates is not None
    return DeviceSheet(rates.half, rates.single, rates.memory_bandwidth, memory, capability, sms)


# NVIDIA's GA102, AD102 and GB202 white papers. The memory is what drivers report.
_CONSUMER = {
    "rtx3090": _consumer("rtx3090", 25_438_126_080, (8, 6), 82),
    "rtx4090": _consumer("rtx4090", 25_757_220_864, (8, 9), 128),
    "rtx5090": _consumer("rtx5090", 34_190_458_880, (12, 0), 170),
}
SHEETS: Mapping[str, DeviceSheet] = {**{kind: _of(gpu) for kind, gpu in GPUS.items()}, **_CONSUMER}
