"""Collectives read from a jaxpr, against programs whose figures one can work out by hand, and against compiled ones."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paxtrain.xla import hlo, traced
from tests.paxtrain.xla import counted

ROWS, COLUMNS = 64, 128
MESSAGE = ROWS * COLUMNS * 4  # bytes of one device's float32 [ROWS, COLUMNS]
CHAIN = [(0, 1), (1, 2), (2, 3)]


def program(function):
    """Return `function` of one [ROWS, COLUMNS] array per device over a (data=2, pipe=4) mesh, traced."""
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "pipe"), axis_types=(AxisType.Auto,) * 2)
    spec = P(("data", "pipe"))
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return mapped.trace(jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, spec)))


def asked(function, platform="cpu"):
    return traced.collectives(program(function).jaxpr, platform)


def test_a_permute_in_nested_scans_counts_once_per_trip_and_pair():
    def inner(x, _):
        return lax.ppermute(jnp.tanh(x), "pipe", CHAIN), None

    def outer(x, _):
        with jax.named_scope("outside"):
            x, _ = lax.scan(inner, x, None, length=5)
        return jnp.sin(x), None

    [found] = asked(lambda x: lax.scan(outer, x, None, length=3)[0])
    pairs = ((0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7))  # both data ranks' chains
    assert (found.kind, found.bytes, found.pairs, found.executions) == ("collective-permute", MESSAGE, pairs, 15)
    assert found.certain and found.op_name.endswith("while/body/outside/while/body")


@pytest.mark.parametrize(
    ("function", "kind", "groups"),
    [
        (lambda x: lax.psum(x, "data"), "all-reduce", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (lambda x: lax.pmax(x, ("data", "pipe")), "all-reduce", (tuple(range(8)),)),
        (lambda x: lax.psum(x, ("pipe", "data")), "all-reduce", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        (lambda x: lax.all_gather(x, "pipe", tiled=True)[:ROWS], "all-gather", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (
            lambda x: lax.all_to_all(x, "pipe", 0, 0, axis_index_groups=[[0, 2], [1, 3]], tiled=True),
            "all-to-all",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
        (
            lambda x: jnp.tile(lax.psum_scatter(x, "data", tiled=True), (2, 1)),
            "reduce-scatter",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
    ],
)
def test_groups_are_positions_in_the_mesh(function, kind, groups):
    [found] = asked(function)
    assert (found.kind, found.bytes, found.groups, found.pairs) == (kind, MESSAGE, groups, ())


def test_bfloat16_stays_what_it_is():
    """XLA for CPUs widens it."""

    def function(x):
        return lax.ppermute(x.astype(jnp.bfloat16), "pipe", CHAIN).astype(x.dtype)

    [found] = asked(function)
    assert found.bytes == MESSAGE // 2
    assert {op.bytes for op in hlo.collectives(program(function).lower().compile().as_text())} == {MESSAGE}


def test_branches_are_the_platforms():
    def function(x):
        return lax.platform_dependent(
            x, cpu=lambda x: lax.psum(x, "data"), default=lambda x: lax.ppermute(x, "pipe", CHAIN)
        )

    assert [op.kind for op in asked(function, "cpu")] == ["all-reduce"]
    assert [op.kind for op in asked(function, "cuda")] == ["collective-permute"]


def test_what_devices_may_skip_is_not_certain():
    def function(x):
        trips = (lax.axis_index("pipe") == 0).astype(jnp.int32)
        x = lax.fori_loop(0, trips, lambda _, x: lax.psum(x, "data"), x)
        return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "data"), lambda x: lax.pmin(x, "data"), lax.pmax(x, "data"))

    found = asked(function)
    assert sorted((op.certain, op.executions) for op in found) == [(False, 1)] * 3 + [(True, 1)]


def test_a_compiled_program_sends_the_same():
    def function(x):
        y = lax.scan(lambda y, _: (lax.ppermute(y * 2, "pipe", CHAIN), None), x, None, length=4)[0]
        y += jax.checkpoint(lambda x: lax.psum(jnp.sin(x), "data"))(x)
        return y + lax.all_gather(x, "data", tiled=True)[ROWS:]

    made, sent = program(function), collections.Counter()
    for op in traced.collectives(made.jaxpr, "cpu"):
        sent[op.kind] += op.bytes * op.executions
    assert dict(sent) == counted.collective_bytes(made.lower().compile().as_text())


def test_an_unknown_collective_is_refused(monkeypatch):
    monkeypatch.delitem(traced.KINDS, "pmax")
    with pytest.raises(NotImplementedError, match="pmax may be a collective"):
        asked(lambda x: lax.pmax(x, "data"))
