"""The device mesh: always (data, pipe, tensor), row-major over an order of devices that a plan may give."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from paxtrain.config import MeshConfig
from paxtrain.errors import UserError

AXES = ("data", "pipe", "tensor")


def make_mesh(
    config: MeshConfig, order: Sequence[int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh of a run.

    Args:
        order: for each mesh position (row-major) an index into the devices sorted by host and id; default: in order.
        devices: default: all devices of all processes.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    devices = sorted(devices or jax.devices(), key=lambda d: (d.process_index, d.id))
    if config.devices != len(devices):
        raise UserError(
            f"mesh.data={config.data} x mesh.pipe={config.pipe} x mesh.tensor={config.tensor} is {config.devices} "
            f"devices, but there are {len(devices)}; choose sizes whose product is {len(devices)}"
        )
    if order is not None:
        devices = [devices[i] for i in order]
    grid = np.array(devices).reshape(config.data, config.pipe, config.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
