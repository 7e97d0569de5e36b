"""The GPUs for which plans are made, and of them those for which programs are compiled on machines without them.

The figures are those of data sheets and drivers. All else that the project knows of a GPU follows from its record here.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU model, as its maker's data sheet and its driver describe it.

    Attributes:
        name: name that the driver reports, which is `jax.Device.device_kind`; drivers differ in its details (`find`).
        memory: bytes of memory that the driver reports; XLA takes part of it for itself.
        bandwidth: bytes per second of the memory.
        peak_flops: FLOP/s of dense bfloat16 matrix products (float16 if the GPU has no bfloat16).
        single_flops: FLOP/s of dense 32-bit matrix products, in TF32 if the GPU has it.
        link: bytes per second, each way, to another GPU of the host: over NVLink, else over PCIe.
        capability: CUDA compute capability (major, minor).
        sms: number of streaming multiprocessors.
        reach: share of peak_flops that the largest matrix products reach in training; None: not measured.
    """

    name: str
    memory: int
    bandwidth: float
    peak_flops: float
    single_flops: float
    link: float
    capability: tuple[int, int]
    sms: int
    reach: float | None = None

    @property
    def float32_flops(self) -> float:
        """FLOP/s in float32, which a GeForce has as many of as in TF32."""
        return self.single_flops


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


# Sources: peak_flops, single_flops and link are from NVIDIA's data sheets of the SXM modules, without sparsity; those
# of H100 and H200 print 1979 TFLOP/s "with sparsity", and the H100 architecture white paper has 989.4 without. The
# reach of A100 and H100 was fitted to half of the published runs of docs/accuracy.md. B200's is H100's, scaled as both
# are in benchmarks, 1745 of 2250 TFLOP/s to 794.5 of 989 (Bekman, Machine Learning Engineering Open Book, "Maximum
# Achievable Matmul FLOPS comparison table"). Everything else is from the descriptions that OpenXLA keeps of the same
# modules (xla/backends/gpu/target_config/specs).
_H100_REACH = 0.61
_VOLTA = TargetGpu(
    name="Tesla V100-SXM2-16GB",
    memory=16_935_682_048,
    bandwidth=898.048e9,
    peak_flops=125e12,
    single_flops=15.7e12,
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
    memory=42_298_834_944,
    bandwidth=1555.2e9,
    peak_flops=312e12,
    single_flops=156e12,
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
    memory=84_942_979_072,
    bandwidth=3352.32e9,
    peak_flops=989.4e12,
    single_flops=494.7e12,
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
    memory=191_514_411_008,
    bandwidth=7672.32e9,
    peak_flops=2250e12,
    single_flops=1100e12,
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
        _AMPERE, name="NVIDIA A100-SXM4-80GB", memory=85_100_068_864, bandwidth=2039.04e9, memory_clock=1.593
    ),
    "h100": _HOPPER,
    "h200": dataclasses.replace(
        _HOPPER, name="NVIDIA H200 141GB HBM3e", memory=151_397_597_184, bandwidth=4800e9, memory_clock=3.75
    ),
    "b200": _BLACKWELL,
}
# From NVIDIA's GA102, AD102 and GB202 white papers; the memory is what drivers report.
GEFORCE = {
    "rtx3090": Gpu(
        name="NVIDIA GeForce RTX 3090",
        memory=25_438_126_080,
        bandwidth=936.2e9,
        peak_flops=71e12,
        single_flops=35.6e12,
        link=24e9,
        capability=(8, 6),
        sms=82,
    ),
    "rtx4090": Gpu(
        name="NVIDIA GeForce RTX 4090",
        memory=25_757_220_864,
        bandwidth=1008e9,
        peak_flops=165.2e12,
        single_flops=82.6e12,
        link=24e9,
        capability=(8, 9),
        sms=128,
    ),
    "rtx5090": Gpu(
        name="NVIDIA GeForce RTX 5090",
        memory=34_190_458_880,
        bandwidth=1792e9,
        peak_flops=209.5e12,
        single_flops=104.8e12,
        link=48e9,
        capability=(12, 0),
        sms=170,
    ),
}


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def find(device_kind: str) -> str | None:
    """Return the key in GPUS of a device by the name that its driver reports; None if it is not there.

    Words count, not the whole name: one driver's "NVIDIA H200" is another's "NVIDIA H200 141GB HBM3e". A card of
    another form (PCIe, NVL), a MIG slice and a module with another size of memory are not the module that is listed.
    """
    words = _words(device_kind)
    if words & {"pcie", "nvl", "mig"}:
        return None
    sizes = {word for word in words if re.fullmatch("[0-9]+gb", word)}
    return next((key for key, gpu in GPUS.items() if _words(key) <= words and sizes <= _words(gpu.name)), None)
