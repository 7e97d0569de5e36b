"""The GPUs for which plans are made (ALL), and of them those for which programs are compiled without them (GPUS).

The figures are those of data sheets and drivers. All else that the project knows of a GPU follows from its record here.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU model, as its maker's data sheet and its driver describe it.

    Attributes:
        name: name that the driver reports, which is `jax.Device.device_kind`.
        names: all its names in drivers and logs, as a regular expression for `find`.
        memory: bytes of memory that the driver reports, or the data sheet's; XLA takes part of it for itself.
        bandwidth: bytes per second of the memory.
        peak_flops: FLOP/s of dense bfloat16 matrix products (float16 if the GPU has no bfloat16).
        tf32_flops: FLOP/s of dense 32-bit matrix products, in TF32 if the GPU has it.
        link: bytes per second, each way, to another GPU of the host: over NVLink, else over PCIe.
        capability: CUDA compute capability (major, minor).
        sms: number of streaming multiprocessors.
        reach: share of peak_flops that the largest matrix products reach in training; None: not measured.
    """

    name: str
    names: str
    memory: int
    bandwidth: float
    peak_flops: float
    tf32_flops: float
    link: float
    capability: tuple[int, int]
    sms: int
    reach: float | None = None

    @property
    def float32_flops(self) -> float:
        """FLOP/s in float32, taken as those in TF32."""
        return self.tf32_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetGpu(Gpu):
    """A GPU for which XLA can compile where there is none.

    Attributes:
        fpus: number of float32 units of a multiprocessor.
        clock: boost clock of the multiprocessors, in GHz.
        memory_clock: clock of the memory, in GHz.
        l2: bytes of level-2 cache.
        shared: bytes of shared memory of a multiprocessor.
        shared_block: largest number of bytes of shared memory that one thread block can have.
        pcie: bytes per second to the host, over PCIe.
    """

    fpus: int
    clock: float
    memory_clock: float
    l2: int
    shared: int
    shared_block: int
    pcie: int

    @property
    def float32_flops(self) -> float:
        """FLOP/s of the float32 units."""
        return self.sms * self.fpus * 2e9 * self.clock

    def target_config(self) -> str:
        """Return the description of the GPU for XLA's compiler: a stream_executor.GpuTargetConfigProto as text."""
        major, minor = self.capability
        # From Hopper on, XLA compiles for the features of one architecture ("sm_90a"), as it does on the GPU itself.
        accelerated = major >= 9
        version = f"{major}.{minor}{'a' if accelerated else ''}"
        model = (
            f"sm_{version} with {self.memory}B RAM, {self.sms} cores, {self.clock * 1e6:.0f}KHz clock, "
            f"{self.memory_clock * 1e6:.0f}KHz mem clock, {self.l2}B L2$"
        )
        return f"""
            gpu_device_info {{
              name: "{self.name}"
              model_str: "{model}"
              device_vendor: "NVIDIA Corporation"
              platform_version: "Compute Capability {version}"
              cuda_compute_capability {{
                major: {major}
                minor: {minor}
                feature_extension: {"ACCELERATED_FEATURES" if accelerated else "NONE"}
              }}
              core_count: {self.sms}
              fpus_per_core: {self.fpus}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth:.0f}
              pcie_bandwidth: {self.pcie}
              l2_cache_size: {self.l2}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_block}
              shared_memory_per_core: {self.shared}
              registers_per_block_limit: 65536
              registers_per_core_limit: 65536
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              thread_dim_limit_x: 1024
              thread_dim_limit_y: 1024
              thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              device_address_bits: 64
              ecc_enabled: true
              driver_version: "13.0.0"
              runtime_version: "12.8.0"
              compile_time_toolkit_version: "12.8.0"
              dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}"
        """


# Sources: peak_flops, tf32_flops and link are from NVIDIA's data sheets of the SXM modules, without sparsity; those
# of H100 and H200 print 1979 TFLOP/s "with sparsity", and the H100 architecture white paper has 989.4 without. The
# reach of A100 and H100 was fitted to half of the published runs of docs/accuracy.md. B200's is H100's, scaled as both
# are in benchmarks, 1745 of 2250 TFLOP/s to 794.5 of 989 (Bekman, Machine Learning Engineering Open Book, "Maximum
# Achievable Matmul FLOPS comparison table"). Everything else is from the descriptions that OpenXLA keeps of the same
# modules (xla/backends/gpu/target_config/specs).
_H100_REACH = 0.61
_VOLTA = TargetGpu(
    name="Tesla V100-SXM2-16GB",
    names=r"v100(sxm2)?(16gb)?",
    memory=16_935_682_048,
    bandwidth=898.048e9,
    peak_flops=125e12,
    tf32_flops=15.7e12,
    link=150e9,
    capability=(7, 0),
    sms=80,
    fpus=64,
    clock=1.53,
    memory_clock=0.877,
    l2=6 << 20,
    shared=96 << 10,
    shared_block=96 << 10,
    pcie=16 << 30,
)
_AMPERE = TargetGpu(
    name="NVIDIA A100-SXM4-40GB",
    names=r"a100(sxm4?)?40gb(sxm4?)?",
    memory=42_298_834_944,
    bandwidth=1555.2e9,
    peak_flops=312e12,
    tf32_flops=156e12,
    link=300e9,
    capability=(8, 0),
    sms=108,
    reach=0.70,
    fpus=64,
    clock=1.41,
    memory_clock=1.215,
    l2=40 << 20,
    shared=164 << 10,
    shared_block=163 << 10,
    pcie=32 << 30,
)
_HOPPER = TargetGpu(
    name="NVIDIA H100 80GB HBM3",
    names=r"h100(sxm5?)?(80gb)?(hbm3)?(sxm5?)?",
    memory=84_942_979_072,
    bandwidth=3352.32e9,
    peak_flops=989.4e12,
    tf32_flops=494.7e12,
    link=450e9,
    capability=(9, 0),
    sms=132,
    reach=_H100_REACH,
    fpus=128,
    clock=1.98,
    memory_clock=2.619,
    l2=50 << 20,
    shared=228 << 10,
    shared_block=227 << 10,
    pcie=32 << 30,
)
_BLACKWELL = TargetGpu(
    name="NVIDIA B200",
    names=r"b200(sxm6?)?",
    memory=191_514_411_008,
    bandwidth=7672.32e9,
    peak_flops=2250e12,
    tf32_flops=1100e12,
    link=900e9,
    capability=(10, 0),
    sms=148,
    reach=_H100_REACH * (1745 / 2250) / (794.5 / 989),
    fpus=128,
    clock=1.965,
    memory_clock=3.996,
    l2=132_644_864,
    shared=228 << 10,
    shared_block=227 << 10,
    pcie=64 << 30,
)
GPUS = {
    "v100": _VOLTA,
    "a100-40gb": _AMPERE,
    "a100-80gb": dataclasses.replace(
        _AMPERE,
        name="NVIDIA A100-SXM4-80GB",
        names=r"a100(sxm4?)?(80gb)?(sxm4?)?",
        memory=85_100_068_864,
        bandwidth=2039.04e9,
        memory_clock=1.593,
    ),
    "h100": _HOPPER,
    "h200": dataclasses.replace(
        _HOPPER,
        name="NVIDIA H200 141GB HBM3e",
        names=r"h200(sxm5?)?(141gb)?(hbm3e)?(sxm5?)?",
        memory=151_397_597_184,
        bandwidth=4800e9,
        memory_clock=3.75,
    ),
    "b200": _BLACKWELL,
}


def _card(
    name: str, names: str, memory: float, rates: tuple[float, ...], link: float, capability: tuple[int, int], sms: int
) -> Gpu:
    """Return a GPU for which nothing is compiled where there is none.

    Args:
        name: its name in the driver.
        names: its names in drivers and logs.
        memory: GB.
        rates: TFLOP/s in 16 bits, TFLOP/s in 32 bits, GB/s of the memory.
        link: GB/s to another GPU of the host.
        capability: CUDA compute capability.
        sms: multiprocessors.
    """
    half, single, bandwidth = rates
    return Gpu(
        name=name,
        names=names,
        memory=round(memory * 1e9),
        bandwidth=bandwidth * 1e9,
        peak_flops=half * 1e12,
        tf32_flops=single * 1e12,
        link=link * 1e9,
        capability=capability,
        sms=sms,
    )


# Rates are dense, and 16-bit products add in float32. Sources: NVIDIA's data sheets, which print twice as much "with
# sparsity" from Ampere on; for the GeForce cards its TU102, GA102, AD102 and GB202 white papers. The memory is the data
# sheet's, or what drivers report if that has more digits.
_VOLTA_32 = dataclasses.replace(
    _VOLTA, name="Tesla V100-SXM2-32GB", names=r"v100(sxm[23]|dgxs)?32gb", memory=34_089_730_048
)
_PCIE_3, _PCIE_4, _PCIE_5 = 12, 24, 48  # GB/s that are reached
_OTHERS = {
    "v100-32gb": _VOLTA_32,
    "v100-pcie-16gb": _card("Tesla V100-PCIE-16GB", r"v100pcie(16gb)?", 16, (112, 14, 900), _PCIE_3, (7, 0), 80),
    "v100-pcie-32gb": _card("Tesla V100-PCIE-32GB", r"v100pcie32gb", 32, (112, 14, 900), _PCIE_3, (7, 0), 80),
    "v100s": _card("Tesla V100S-PCIE-32GB", r"v100s(pcie)?(32gb)?", 32, (130, 16.4, 1134), _PCIE_3, (7, 0), 80),
    "t4": _card("Tesla T4", r"t4", 15.8, (65, 8.1, 300), _PCIE_3, (7, 5), 40),
    "a10": _card("NVIDIA A10", r"a10(24gb)?", 24, (125, 62.5, 600), _PCIE_4, (8, 6), 72),
    "a10g": _card("NVIDIA A10G", r"a10g(24gb)?", 24, (70, 35, 600), _PCIE_4, (8, 6), 80),
    "a30": _card("NVIDIA A30", r"a30(24gb)?", 24, (165, 82, 933), 100, (8, 0), 56),
    "a40": _card("NVIDIA A40", r"a40(48gb)?", 47.8, (149.7, 74.8, 696), _PCIE_4, (8, 6), 84),
    "a6000": _card("NVIDIA RTX A6000", r"(rtx)?a6000", 51.041, (154.8, 77.4, 768), _PCIE_4, (8, 6), 84),
    "l4": _card("NVIDIA L4", r"l4(24gb)?", 24, (121, 60, 300), _PCIE_4, (8, 9), 58),
    "l40": _card("NVIDIA L40", r"l40(48gb)?", 48, (181.05, 90.5, 864), _PCIE_4, (8, 9), 142),
    "l40s": _card("NVIDIA L40S", r"l40s(48gb)?", 48, (362.05, 183, 864), _PCIE_4, (8, 9), 142),
    "a100-pcie-40gb": _card(
        "NVIDIA A100-PCIE-40GB", r"a100(pcie40gb|40gbpcie)", 42.298, (312, 156, 1555), 300, (8, 0), 108
    ),
    "a100-pcie-80gb": _card(
        "NVIDIA A100 80GB PCIe", r"a100(80gb)?pcie(80gb)?", 85.1, (312, 156, 1935), 300, (8, 0), 108
    ),
    "a800": _card("NVIDIA A800-SXM4-80GB", r"a800(sxm4?)?(80gb)?", 85.1, (312, 156, 2039), 200, (8, 0), 108),
    "h100-pcie": _card("NVIDIA H100 PCIe", r"h100(80gb)?pcie(80gb)?", 84.94, (756, 378, 2000), 300, (9, 0), 114),
    "h100-nvl": _card("NVIDIA H100 NVL", r"h100nvl(94gb)?", 94, (835.5, 417.5, 3900), 300, (9, 0), 132),
    "h800": _card("NVIDIA H800", r"h800(sxm5?)?(80gb)?(hbm3)?", 84.94, (989.4, 494.7, 3352), 200, (9, 0), 132),
    "h20": _card("NVIDIA H20", r"h20(96gb)?", 96, (148, 74, 4000), 450, (9, 0), 78),
    "h200-nvl": _card("NVIDIA H200 NVL", r"h200(nvl|pcie)(141gb)?", 141, (835.5, 417.5, 4800), 450, (9, 0), 132),
    "gh200": _card("NVIDIA GH200 480GB", r"gh200(480gb|120gb|96gb)?", 96, (989.4, 494.7, 4000), 450, (9, 0), 132),
    "b300": _card("NVIDIA B300 SXM6 AC", r"b300(sxm6?)?(ac)?", 288, (2250, 1125, 8000), 900, (10, 3), 148),
    "gb200": _card("NVIDIA GB200", r"gb200", 186, (2500, 1250, 8000), 900, (10, 0), 152),
    "gb300": _card("NVIDIA GB300", r"gb300", 288, (2500, 1250, 8000), 900, (10, 3), 152),
    "rtx2080ti": _card("NVIDIA GeForce RTX 2080 Ti", r"rtx2080ti", 11, (54, 13.4, 616), _PCIE_3, (7, 5), 68),
    "rtx3090": _card("NVIDIA GeForce RTX 3090", r"rtx3090", 25.43812608, (71, 35.6, 936.2), _PCIE_4, (8, 6), 82),
    "rtx3090ti": _card("NVIDIA GeForce RTX 3090 Ti", r"rtx3090ti", 25.757, (80, 40, 1008), _PCIE_4, (8, 6), 84),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", r"rtx4090", 25.757220864, (165.2, 82.6, 1008), _PCIE_4, (8, 9), 128),
    "rtx5090": _card("NVIDIA GeForce RTX 5090", r"rtx5090", 34.19045888, (209.5, 104.8, 1792), _PCIE_5, (12, 0), 170),
}
ALL: Mapping[str, Gpu] = {**GPUS, **_OTHERS}
_MAKERS = {"nvidia", "tesla", "geforce", "gpu", "amd", "instinct"}


def spelled(name: str) -> str:
    """Return a device's name without its maker's words, in small letters, without blanks and dashes."""
    return "".join(word for word in re.findall("[a-z0-9]+", name.lower()) if word not in _MAKERS)


@functools.cache
def find(device_kind: str) -> str | None:
    """Return the key in ALL of a device by a name in a driver or a log, or by its key; None if it is not there.

    The whole name counts: a card of another form, a laptop's, a MIG slice and another size of memory are other devices.
    """
    name = spelled(device_kind)
    return next((key for key, gpu in ALL.items() if name == spelled(key) or re.fullmatch(gpu.names, name)), None)
