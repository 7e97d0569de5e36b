"""Programs compiled for GPUs that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from paxtrain.xla import aot
from paxtrain.xla.module import HloModule
from tests import programs


def gpu(kind):
    """Return the mesh of one GPU that is not there."""
    return Mesh(np.array(programs.gpus(kind)), ("data",))


def compiled(mesh, function, *shapes, donate=()):
    place = NamedSharding(mesh, PartitionSpec())
    arrays = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)
    # From jax 0.11 on, the lowering of the kernels asks the mesh in use for the kind of GPU.
    with use_abstract_mesh(mesh.abstract_mesh):
        return aot.compile(jax.jit(function, donate_argnums=donate).lower(*arrays))


def kernel_calls(program) -> int:
    return program.as_text().count('custom_call_target="__gpu$xla.gpu.triton"')


def launches(program) -> int:
    """Return the number of kernels, library calls and copies that one execution launches."""
    module = HloModule(program.as_text(), 1)
    free = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
    return sum(n for name, n, op in module.executed() if name not in module.fused and op.opcode not in free)


def encode(mesh, codec, n=4096, k=3072):
    """Return the compiled program in which a message [n, k] is encoded."""
    state = jax.eval_shape(lambda: codec.init((n, k), jnp.bfloat16))
    message, active = jax.ShapeDtypeStruct((n, k), jnp.bfloat16), jax.ShapeDtypeStruct((), bool)
    # jax gives donated memory to results in their order, and the state's should become the state's.
    return compiled(mesh, lambda *a: codec.encode(*a)[::-1], state, message, active, donate=(0,))
