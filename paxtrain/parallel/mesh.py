"""The device mesh with the axes of paxtrain/config/axes.py, and the part of it that each process holds."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxtrain.config import MeshConfig
from paxtrain.config.axes import AXES, batch_axes, shown
from paxtrain.errors import UserError

T = TypeVar("T")  # a pytree of arrays
MOST_CPU_DEVICES = 1024  # per process: 2,048 take a third of a second to create, 40,000 take more than minutes


def batch_spec(config: MeshConfig) -> PartitionSpec:
    """Return the PartitionSpec of a batch, whose sequences are split."""
    return PartitionSpec(config.over(*batch_axes()))


def device_spec(config: MeshConfig) -> PartitionSpec:
    """Return the PartitionSpec of arrays with the axes as leading dims, of which each device has a separate part."""
    return PartitionSpec(*map(config.over, AXES))


def local(tree: T) -> T:
    """Return a device's part of arrays of `device_spec`, without these dims. Call it inside `shard_map`."""
    return jax.tree.map(lambda x: x[(0,) * len(AXES)], tree)


def spread(tree: T) -> T:
    """Return a device's arrays as its part of arrays of `device_spec`. Call it inside `shard_map`."""
    return jax.tree.map(lambda x: x[(None,) * len(AXES)], tree)


def settle_context(config: MeshConfig, platform: str) -> MeshConfig:
    """Return `config` with keys and values gathered in place of a ring if stages may skip a ring's messages on CPUs.

    There a permutation waits for all devices of the mesh, and a gather for those of a group.
    """
    skips = platform == "cpu" and config.pipe > 1 and config.context_form == "ring"
    return dataclasses.replace(config, context_form="gather") if skips else config


def cpu_devices(config: MeshConfig, processes: int) -> int:
    """Return the number of virtual CPU devices that each of `processes` processes needs, from 1 to 1,024."""
    return min(max(1, config.devices // processes), MOST_CPU_DEVICES)


def host_major(hosts: Sequence[str], names: Sequence[str]) -> list[jax.Device]:
    """Return all devices, host after host in the order of a plan.

    Args:
        hosts: Host names of the plan, in its order.
        names: Host name of every process.

    Raises:
        UserError: The plan's hosts are not those of the processes.
    """
    if set(hosts) != set(names):
        raise UserError(
            f"the plan is for the hosts {', '.join(hosts)}, but the processes run on {', '.join(sorted(set(names)))}; "
            "start them on the plan's hosts, or make a plan for these"
        )
    return sorted(jax.devices(), key=lambda d: (hosts.index(names[d.process_index]), d.process_index, d.id))


def make_mesh(
    config: MeshConfig, order: Sequence[int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Return the mesh of a run, with the axes of `MeshConfig.device_sizes`.

    Args:
        config: Sizes of the axes.
        order: Index into `devices` for each mesh position in row-major order; None: 0, 1, 2, ...
        devices: Devices of the mesh; None: all devices of all processes, ordered by process and id.

    Raises:
        UserError: The product of the sizes is not the number of devices.
    """
    devices = devices or sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if config.devices != len(devices):
        sizes = " x ".join(f"mesh.{name}={size}" for name, size in shown(config.sizes).items())
        raise UserError(
            f"{sizes} is {config.devices} devices, but there are {len(devices)}; choose sizes whose product is "
            f"{len(devices)}"
        )
    if order is not None:
        devices = [devices[i] for i in order]
    grid = np.array(devices).reshape(*config.device_sizes.values())
    return Mesh(grid, tuple(config.device_sizes), axis_types=(AxisType.Auto,) * grid.ndim)


def process_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> list[int]:
    """Return the rows (dim 0) of a global array that this process's devices hold, ascending and without repeats.

    Args:
        sharding: Sharding of the array.
        shape: Global shape of the array.
    """
    indices = sharding.addressable_devices_indices_map(shape).values()
    slices = {index[0].indices(shape[0]) for index in indices if index is not None}
    return sorted({row for start, stop, _ in slices for row in range(start, stop)})


def from_process_rows(
    sharding: NamedSharding, shape: tuple[int, ...], rows: Sequence[int], local: np.ndarray
) -> jax.Array:
    """Return a global array of which each process gives the rows that its devices hold.

    Args:
        sharding: Sharding of the array.
        shape: Global shape of the array.
        rows: Rows that this process gives, as `process_rows` returns them.
        local: Values of those rows, [len(rows), *shape[1:]].
    """
    where = {row: i for i, row in enumerate(rows)}

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # the callback's type allows None for arrays that are not addressable
        start, stop, _ = index[0].indices(shape[0])
        return local[[where[row] for row in range(start, stop)]]

    return jax.make_array_from_callback(shape, sharding, piece)
