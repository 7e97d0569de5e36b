"""The device mesh: always (data, pipe, tensor), row-major over an order of devices that a plan may give."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from paxtrain.config import MeshConfig
from paxtrain.errors import UserError
from paxtrain.process.supervised import MeshPosition

AXES = ("data", "pipe", "tensor")
_MOST_CPU_DEVICES = 1024  # of a process: 2,048 take a third of a second to make, 40,000 do not come within minutes


def cpu_devices(config: MeshConfig, processes: int) -> int:
    """Virtual CPU devices that a process should ask for: its share of the mesh, as far as there is one that can run."""
    return min(max(1, config.devices // processes), _MOST_CPU_DEVICES)


def host_major(hosts: Sequence[str], names: Sequence[str]) -> list[jax.Device]:
    """All devices, host after host in the order that a plan gives.

    Args:
        hosts: the plan's host names.
        names: the host name of every process.

    Raises:
        UserError: the plan names other hosts than the processes run on.
    """
    if set(hosts) != set(names):
        raise UserError(
            f"the plan is for the hosts {', '.join(hosts)}, but the processes run on {', '.join(sorted(set(names)))}"
        )
    return sorted(jax.devices(), key=lambda d: (hosts.index(names[d.process_index]), d.process_index, d.id))


def make_mesh(
    config: MeshConfig, order: Sequence[int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh of a run.

    Args:
        order: for each mesh position (row-major) an index into the devices; default: in order.
        devices: default: all devices of all processes by process and id.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    devices = devices or sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if config.devices != len(devices):
        raise UserError(
            f"mesh.data={config.data} x mesh.pipe={config.pipe} x mesh.tensor={config.tensor} is {config.devices} "
            f"devices, but there are {len(devices)}; choose sizes whose product is {len(devices)}"
        )
    if order is not None:
        devices = [devices[i] for i in order]
    grid = np.array(devices).reshape(config.data, config.pipe, config.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def place(mesh: Mesh, process: int | None = None) -> MeshPosition:
    """Where a process is in a mesh; this one if none is given.

    Neighbours are the processes of the devices that come next along any axis, both ways round.
    """
    me = jax.process_index() if process is None else process
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    mine = processes == me
    words = []
    for axis, name in enumerate(("data", "stage", "tensor")):
        held = sorted({int(i) for i in np.nonzero(mine)[axis]})
        if 0 < len(held) < mine.shape[axis]:
            words.append(f"{name}{'s' if len(held) > 1 and name == 'stage' else ''} {', '.join(map(str, held))}")
    shifted = [np.roll(processes, by, axis)[mine] for axis in range(processes.ndim) for by in (1, -1)]
    neighbours = {int(i) for i in np.concatenate(shifted)} - {me}
    # The stage first: it is what a process is known by.
    return MeshPosition(
        me, ", ".join(sorted(words, key=lambda word: not word.startswith("stage"))), tuple(sorted(neighbours))
    )


def process_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> list[int]:
    """The rows (dim 0) of a global array that this process's devices hold, ascending, each once."""
    slices = {index[0].indices(shape[0]) for index in sharding.addressable_devices_indices_map(shape).values()}
    return sorted({row for start, stop, _ in slices for row in range(start, stop)})


def from_process_rows(
    sharding: NamedSharding, shape: tuple[int, ...], rows: Sequence[int], local: np.ndarray
) -> jax.Array:
    """The global array of `shape` of which this process gives the rows `rows`: local [len(rows), ...]."""
    where = {row: i for i, row in enumerate(rows)}

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        return local[[where[row] for row in range(start, stop)]]

    return jax.make_array_from_callback(shape, sharding, piece)
