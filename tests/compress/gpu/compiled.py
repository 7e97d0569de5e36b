"""Programs compiled for GPUs that are not there."""

import concurrent.futures
import multiprocessing

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from paxtrain.xla import aot


def gpu(kind):
    """Return the mesh of one GPU that is not there."""
    try:
        return Mesh(np.array(aot.devices(kind, hosts=1, per_host=1)), ("data",))
    except aot.Unavailable as reason:
        pytest.skip(str(reason))


def compiled(mesh, function, *shapes, donate=()):
    place = NamedSharding(mesh, PartitionSpec())
    arrays = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)
    # From jax 0.11 on, the lowering of the kernels asks the mesh in use for the kind of GPU.
    with use_abstract_mesh(mesh.abstract_mesh):
        return aot.compile(jax.jit(function, donate_argnums=donate).lower(*arrays))


def alone(function, *args):
    """Return function(*args), called in a process of its own.

    The compiler of Mosaic GPU kernels stays with the architecture for which it has compiled first (jax 0.12.0).
    """
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
