"""Functions of one data rank, mapped over several on CPU devices."""

import jax
from jax.sharding import AxisType, PartitionSpec


def mapped(function, ranks):
    """Return `function` mapped over `ranks` data ranks; every array gets a leading dim [ranks]."""
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])

    def local(*args):
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

    spec = PartitionSpec("data")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
