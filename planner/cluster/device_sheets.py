"""The facts of a device that the planner needs: its peak rates and its memory, from data sheets or a cluster's file.

The GPUs are those of paxtrain/devices/gpus.py. For most of them plans are made whose memory is not checked by a
compiler. GeForce drivers let GPUs of a host exchange data through its memory only, so a cluster's file says what their
links do.
"""

import dataclasses
from collections.abc import Mapping

from paxtrain.devices.gpus import ALL, GPUS, Gpu

# The share of a device's memory that a plan may use. The driver and CUDA take 0.5 to 1 GB before XLA starts. cuBLAS,
# cuDNN and NCCL take workspaces besides what XLA counts, and the pool loses some to fragmentation. XLA's default
# preallocates 75%, which is less: XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 must be set to use this share.
USABLE = 0.92


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


# Shares of the peak that were measured, by compute capability.
REACH = {gpu.capability: gpu.reach for gpu in GPUS.values() if gpu.reach is not None}


def _of(gpu: Gpu) -> DeviceSheet:
    reach = DeviceSheet.reach if gpu.reach is None else gpu.reach
    return DeviceSheet(gpu.peak_flops, gpu.float32_flops, gpu.bandwidth, gpu.memory, gpu.capability, gpu.sms, reach)


SHEETS: Mapping[str, DeviceSheet] = {kind: _of(gpu) for kind, gpu in ALL.items()}
