"""XLA's options for the training step, each with its reason."""

import os
from typing import Any

import jax

from paxtrain.config import Config

GPU_OPTIONS: dict[str, Any] = {
    # By default XLA keeps one collective in flight, so that the pipeline's transfers would have to fit between two
    # all-reduces of tensor parallelism. With four in flight each transfer overlaps with a whole F or B.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}

if jax.__version_info__ < (0, 11, 1):  # later ones have no such option
    # The pipeline reduces a scanned layer's gradient under the next layer (paxtrain.pipeline.closing). XLA's pass for
    # that would put it off by one more layer, and copy the gradients of two layers in each turn.
    GPU_OPTIONS["xla_gpu_enable_pipelined_reduce_scatter"] = False
else:  # earlier ones have no such option
    # From jax 0.11 on XLA writes reduced gradients to their place by copies that run beside compute. By default it puts
    # a layer's last products over these copies, and so none over the reduction that the copies wait for.
    GPU_OPTIONS["xla_gpu_experimental_enable_selective_memcpy_overlap"] = True

# With weights in shards a layer's kernels, Llama's five, are gathered beside the reduce-scatters of the layer before.
# With four in flight 83% of the gathered bytes have a matrix product between start and done, with eight 96%.
GPU_SHARDS: dict[str, Any] = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}

# XLA's default estimate of a transfer's time comes from the data sheet, and real links are slower. By it gradients
# between stages travel under the last two of F's products only, and compressed ones under none; by this one, under all
# of F. If idle stages skip, F is a loop, under which they travel in any case. There, and if rings keep parts of
# micro-batches, XLA would copy rings with this estimate. From jax 0.11 on XLA ends the process in it, at a fusion with
# several results ("Check failed: buffer != nullptr").
GPU_ESTIMATE: dict[str, Any] = {}
if jax.__version_info__ < (0, 11):
    GPU_ESTIMATE["xla_gpu_enable_analytical_latency_estimator"] = True

# What XLA puts into CUDA graphs by default.
GRAPHED = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION")

# Loops of zero or one trip become parts of CUDA graphs, too. Otherwise the host reads their condition from the GPU, and
# waits until all that it has launched is done. Loops with collectives inside stay as they are, and so do collectives,
# which in graphs were slower (openxla/xla#35360) or hung. The least size lets a loop by itself be a graph.
GPU_LOOPS = {
    "xla_gpu_enable_command_buffer": ",".join((*GRAPHED, "WHILE")),
    "xla_gpu_graph_min_graph_size": 1,
}

# Passes that XLA for CPUs leaves out. The first would move F and B out of the loops of no or one trip by which stages
# skip them, and all stages would run all ops. The second would drop the optimization barriers that order reads and
# writes of the rings: without them each row copies whole rings, and
# with weights in shards B keeps what F has gathered.
CPU_OPTIONS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion,cse_barrier_expander"}

# A step that one CPU emulates for a whole mesh takes as long to compile as dozens of steps take to run. LLVM's first
# level compiles it in 70 to 90% of the time; without optimization the steps would be slower.
CPU_EMULATED = {"xla_backend_optimization_level": 1}

_GRAPHS = "xla_gpu_enable_command_buffer"


def of(config: Config, platform: str, masked: bool, compressed: bool, virtual: bool = False) -> dict[str, Any]:
    """Return the options of a configuration's step.

    Args:
        config: configuration of the step.
        platform: "gpu" or "cpu".
        masked: whether idle stages compute on scrap.
        compressed: whether messages between stages are compressed.
        virtual: whether one device emulates the mesh.
    """
    mesh = config.mesh
    if platform != "gpu":
        return (CPU_OPTIONS if mesh.pipe > 1 or mesh.shards_sums else {}) | (CPU_EMULATED if virtual else {})
    estimate = GPU_ESTIMATE if compressed or (masked and not mesh.sequence_parallel) else {}
    # By this estimate a ring's transfers take no time, and XLA puts them behind attention, which they could lie under.
    estimate = {} if mesh.context > 1 else estimate
    # What the user's XLA_FLAGS say about graphs stands. With tensor parallelism all loops but W's have collectives.
    graphs = mesh.tensor == 1 or config.pipeline.spec.splits
    loops = mesh.pipe > 1 and graphs and _GRAPHS not in os.environ.get("XLA_FLAGS", "")
    shards = GPU_SHARDS if mesh.shards_sums else {}
    return GPU_OPTIONS | shards | estimate | (GPU_LOOPS if loops else {})
