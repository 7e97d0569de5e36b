"""Programs compiled for GPU clusters without having one; skipped if jax's CUDA plugin is not installed."""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paxtrain.errors import UserError
from paxtrain.xla import aot, hlo
from tests.paxtrain.xla import counted
from tests.programs import gpus

SIZE = 4096
MESSAGE = SIZE * SIZE * 2  # bytes of a bfloat16 [SIZE, SIZE]
RING = 5


def cluster(kind="h200", hosts=2, per_host=2):
    return gpus(kind, hosts, per_host)


def lowered(function, devices, *shapes):
    """Return `function` lowered over a pipe axis of all devices, each of which gets bfloat16 arrays of the shapes."""
    mesh = Mesh(np.array(devices), ("pipe",), axis_types=(AxisType.Auto,))
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P("pipe"), check_vma=False))
    return mapped.lower(*(jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, P())) for s in shapes))


def rows(x, w):
    """Run nine rows, each with a transfer that is independent of its matrix product."""

    def row(carry, _):
        x, sent = carry
        received = lax.ppermute(sent, "pipe", [(0, 1), (1, 2), (2, 3)])
        return (jnp.tanh(x @ w), received), None

    (x, received), _ = lax.scan(row, (x, x), None, length=9)
    return x + received


def no_such_platform(**_):
    raise NotImplementedError("cuda")


def test_without_the_plugin_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setattr(topologies, "get_topology_desc", no_such_platform)
    with pytest.raises(aot.Unavailable, match=r"requirements-gpu\.txt"):
        aot.devices("h200", hosts=1, per_host=8)


def test_an_unknown_gpu_is_refused_with_those_known():
    with pytest.raises(UserError, match=r"unknown GPU 'h1000'; known are v100, .*h200"):
        aot.devices("h1000", hosts=1, per_host=8)


def test_devices_come_host_by_host():
    devices = cluster(hosts=3, per_host=2)
    assert [d.process_index for d in devices] == [0, 0, 1, 1, 2, 2]
    assert {d.device_kind for d in devices} == {"NVIDIA H200 141GB HBM3e"}


@pytest.mark.parametrize("kind", aot.GPUS)
def test_every_gpu_compiles_and_counts_what_the_cpu_cannot(kind):
    compiled = aot.compile(lowered(lambda x: lax.psum(jnp.tanh(x @ x), "pipe"), cluster(kind), (SIZE, SIZE)))
    assert compiled.memory_analysis().argument_size_in_bytes == MESSAGE
    assert counted.collective_bytes(compiled.as_text()) == {"all-reduce": MESSAGE}  # bfloat16; on a CPU float32


def test_transfers_run_under_matrix_products_unless_they_are_synchronous():
    program = lowered(rows, cluster(), (SIZE, SIZE), (SIZE, SIZE))
    text = aot.compile(program).as_text()
    assert counted.permute_bytes(text) == MESSAGE * 3 * 9
    assert [(o.executions, o.matmuls) for o in hlo.overlap(text)] == [(9, 1)]
    synchronous = program.compile(compiler_options={"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"})
    assert [(o.executions, o.matmuls) for o in hlo.overlap(synchronous.as_text())] == [(9, 0)]


def test_a_loop_of_zero_or_one_trips_updates_a_ring_in_place():
    def skipping(x, w):
        run = (lax.axis_index("pipe") % 2).astype(jnp.int32)

        def row(carry, t):
            def push(_, carry):
                ring, y = carry
                return ring.at[t % RING].set(y), jnp.tanh(y @ w)

            return lax.fori_loop(0, run, push, carry), None

        ring = jnp.zeros((RING, SIZE, SIZE), jnp.bfloat16)
        (ring, y), _ = lax.scan(row, (ring, x), jnp.arange(9))
        return ring[3] + y

    compiled = aot.compile(lowered(skipping, cluster(), (SIZE, SIZE), (SIZE, SIZE)))
    text = compiled.as_text()
    assert counted.conditionals(text) == 0
    assert max(copy.bytes for copy in counted.copies(text)) <= MESSAGE
    assert compiled.memory_analysis().temp_size_in_bytes < (RING + 3) * MESSAGE


def test_flash_attention_compiles_and_keeps_no_square_of_the_sequence():
    def attention(q):
        return jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")

    batch, sequence, heads, width = 1, 4096, 8, 64
    program = lowered(attention, cluster(), (batch, sequence, heads, width))
    compiled = aot.compile(program)
    assert "__cudnn$fmha" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < heads * sequence * sequence * 2
