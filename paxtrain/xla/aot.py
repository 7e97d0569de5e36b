"""Compiling for a GPU cluster on a machine that has none.

XLA compiles for a described GPU as well as for one that is there: the executable cannot run, but its memory figures
and its scheduled HLO are those of the cluster's program. It takes jax's CUDA plugin (requirements-gpu.txt); no driver.

    mesh = Mesh(np.reshape(aot.devices("h200", hosts=2, per_host=8), (2, 4, 2)), ("data", "pipe", "tensor"))
    compiled = aot.compile(step.lower(arguments_with_shardings_over(mesh)))
    compiled.memory_analysis(), compiled.as_text()

The CPU stays what jax computes on, and it makes no difference whether jax has used it before. Only a process that has
a CUDA plugin and no GPU must say so before jax first looks for devices, since jax drops a plugin that finds no driver:
with `JAX_PLATFORMS=cpu` in the environment or `jax.config.update("jax_platforms", "cpu")`. `devices` says so itself
where it is the first to look.
"""

import importlib.metadata
import os
from typing import Any

import jax
from jax.experimental import topologies

from paxtrain.devices.gpus import GPUS
from paxtrain.errors import UserError


class Unavailable(Exception):
    """This installation cannot compile for GPUs; the message is one sentence that says why, and what would help."""


def devices(kind: str, hosts: int, per_host: int) -> list[jax.Device]:
    """The GPUs of a cluster, host by host, to compile for: `device.process_index` is the host.

    Args:
        kind: a key of GPUS.
        hosts: number of hosts.
        per_host: GPUs of each.

    Raises:
        UserError: no such kind.
        Unavailable: jax's CUDA plugin is not installed, or jax has dropped it in this process.
    """
    if kind not in GPUS:
        raise UserError(f"unknown GPU {kind!r}; known are {', '.join(GPUS)}")
    # The plugin checks the driver when jax first looks for devices, and registers itself only if it finds one.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        cluster = topologies.get_topology_desc(
            platform="cuda", topology=f"1x{hosts}x{per_host}", target_config=GPUS[kind].target_config()
        )
    except NotImplementedError:
        if any("cuda" in plugin.value for plugin in importlib.metadata.entry_points(group="jax_plugins")):
            raise Unavailable(
                "jax looked for devices before and dropped its CUDA plugin since it found no driver; "
                "set JAX_PLATFORMS=cpu before jax starts"
            ) from None
        raise Unavailable(
            "compiling for GPUs needs jax's CUDA plugin, which is not installed; pip install -r requirements-gpu.txt"
        ) from None
    return cluster.devices


def compile(lowered: jax.stages.Lowered, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles for GPUs that are not there.

    Autotuning is off, since there is nothing to time kernels on: with jax 0.12 that saves a third of the time, and it
    leaves the memory figures as they are. What a GPU adds to them: workspaces of cuBLAS, where autotuning chooses it
    over XLA's own kernels, and of cuDNN's attention.

    Args:
        options: XLA's options besides, such as Trainer.compiler_options.
    """
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0, **(options or {})})
