"""Figures read from HLO, against programs whose figures one can work out by hand."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from paxtrain.xla import hlo
from tests.paxtrain.xla import counted

ROWS, COLUMNS = 64, 128
MESSAGE = ROWS * COLUMNS * 4  # bytes of one device's float32 [ROWS, COLUMNS]
CHAIN = [(0, 1), (1, 2), (2, 3)]


def compiled_text(function, devices=None):
    """Return the HLO of `function`, with one [ROWS, COLUMNS] array per device over a (data=2, pipe=4) mesh."""
    devices = np.reshape(jax.devices() if devices is None else devices, (2, 4))
    mesh = Mesh(devices, ("data", "pipe"), axis_types=(AxisType.Auto,) * 2)
    spec = P(("data", "pipe"))
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    argument = jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, spec))
    return mapped.lower(argument).compile().as_text()


def only(text, kind):
    [found] = [c for c in hlo.collectives(text) if c.kind == kind]
    return found


def test_a_permute_in_nested_scans_counts_once_per_trip_and_pair():
    def inner(x, _):
        return lax.ppermute(jnp.tanh(x), "pipe", CHAIN), None

    def outer(x, _):
        x, _ = lax.scan(inner, x, None, length=5)
        return jnp.sin(x), None

    text = compiled_text(lambda x: lax.scan(outer, x, None, length=3)[0])
    pairs = ((0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7))  # both data ranks' chains, in partition ids
    permute = only(text, "collective-permute")
    assert (permute.bytes, permute.dtype, permute.pairs, permute.executions) == (MESSAGE, "f32", pairs, 15)
    assert counted.permute_bytes(text) == MESSAGE * 6 * 15
    assert counted.permute_bytes_by_pair(text) == dict.fromkeys(pairs, MESSAGE * 15)
    assert counted.collective_bytes(text) == {"collective-permute": MESSAGE * 15}
    assert sorted((loop.trips, loop.executions) for loop in counted.whiles(text)) == [(3, 1), (5, 3)]


def test_pairs_are_positions_in_the_mesh_not_device_ids():
    text = compiled_text(lambda x: lax.ppermute(x, "pipe", [(0, 1)]), devices=jax.devices()[::-1])
    assert counted.permute_bytes_by_pair(text) == {(0, 1): MESSAGE, (4, 5): MESSAGE}


@pytest.mark.parametrize(
    ("kind", "function", "size", "group"),
    [
        ("all-reduce", lambda x: lax.psum(x, "data"), MESSAGE, 2),
        ("all-reduce", lambda x: lax.psum(x, ("data", "pipe")), MESSAGE, 8),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "pipe", tiled=True), MESSAGE, 4),
        ("all-gather", lambda x: lax.all_gather(x, "data", tiled=True), MESSAGE, 2),
        ("all-to-all", lambda x: lax.all_to_all(x, "pipe", 0, 0, tiled=True), MESSAGE, 4),
    ],
)
def test_bytes_are_those_of_one_participants_operands(kind, function, size, group):
    text = compiled_text(function)
    found = only(text, kind)
    assert (found.bytes, len(found.groups[0]), found.executions, found.pairs) == (size, group, 1, ())
    assert counted.collective_bytes(text) == {kind: size}


def test_arrays_reduced_together_are_added_up():
    text = compiled_text(lambda x: lax.psum((jnp.sin(x), x[:4] * 2), "data"))
    assert counted.collective_bytes(text) == {"all-reduce": MESSAGE + 4 * COLUMNS * 4}


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=2,'pipe'=4] {'pipe'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=4,'b'=2,'c'=1] {'a':(1)2,'b'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,2,2]T(1,0,2)) {'a':(2)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("{}, dimensions={0}", ()),
    ],
)
def test_groups_are_read_in_all_their_spellings(written, groups):
    text = GPU.replace("replica_groups=[2,2]<=[4]", f"replica_groups={written}")
    assert hlo.instructions(text)["ag-start"].groups == groups
    assert only(text, "all-gather").groups == groups


def test_instructions_have_their_scopes_and_those_without_a_name_their_loops():
    def body(x, _):
        with jax.named_scope("inner"):
            return jnp.tanh(lax.ppermute(x, "pipe", CHAIN)), None

    def both(x):
        with jax.named_scope("outer"):
            return lax.scan(body, jnp.cos(x), None, length=3)[0]

    text = compiled_text(both)
    found = hlo.instructions(text)
    [loop] = [i for i in found.values() if i.opcode == "while"]
    [permute] = [i for i in found.values() if i.kind]
    assert "/outer/" in loop.op_name and loop.groups == ()
    assert "/outer/" in permute.op_name and permute.op_name.endswith("/inner/ppermute")
    assert permute.groups == ((0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7))
    bare = hlo.instructions(text.replace(f'op_name="{permute.op_name}"', ""))
    assert [i.op_name for i in bare.values() if i.kind] == [loop.op_name]
    wrapped = hlo.instructions(GPU)["wrapped-start"]
    assert (wrapped.opcode, wrapped.kind, wrapped.groups) == ("collective-permute", "collective-permute", ((2, 1),))
    assert not {"dot", "copy.1", "negate"} & set(hlo.instructions(GPU))  # inside of fusions


def test_a_conditional_counts_its_branches_once_and_as_often_as_it_runs():
    def body(x, _):
        last = lax.axis_index("pipe") == 3
        return lax.cond(last, lambda x: jnp.tanh(lax.psum(x, "data")), jnp.cos, x), None

    text = compiled_text(lambda x: lax.scan(body, x, None, length=7)[0])
    assert counted.conditionals(text) == 7
    assert only(text, "all-reduce").executions == 7


def test_a_loop_of_zero_or_one_trips_is_no_conditional_and_counts_as_told():
    def maybe(x):
        last = (lax.axis_index("pipe") == 3).astype(jnp.int32)
        return lax.fori_loop(0, last, lambda _, x: jnp.sin(lax.psum(x, "data")), x)

    text = compiled_text(maybe)
    assert counted.conditionals(text) == 0
    assert [(loop.trips, loop.executions) for loop in counted.whiles(text)] == [(None, 1)]
    assert only(text, "all-reduce").executions == 1
    assert counted.collective_bytes(text, unknown_trip_count=6) == {"all-reduce": 6 * MESSAGE}
    assert hlo.collectives(text, unknown_trip_count=0) == []


def test_the_host_reads_conditions_of_loops_whose_trips_are_not_known():
    def rows(x, _):
        last = (lax.axis_index("pipe") == 3).astype(jnp.int32)
        x = lax.fori_loop(0, last, lambda _, x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x) @ jnp.eye(COLUMNS), x), x)
        return lax.fori_loop(0, last, lambda _, x: jnp.sin(lax.psum(x, "data")), x), None

    text = compiled_text(lambda x: lax.scan(rows, x, None, length=7)[0])
    assert len(counted.whiles(text)) == 4 and {loop.trips for loop in counted.whiles(text)} == {None, 3, 7}
    assert [loop.executions for loop in hlo.host_loops(text)] == [7, 7]
    # With graphs only the one with a collective inside is left.
    reduces = only(text, "all-reduce").computation
    assert [(loop.body, loop.executions) for loop in hlo.host_loops(text, graphs=True)] == [(reduces, 7)]


def test_what_is_not_executed_does_not_count():
    text = compiled_text(lambda x: lax.psum(x, "data"))
    dead = text.replace("ENTRY", "%dead (x: f32[8]) -> f32[8] {\n  ROOT %y = f32[8]{0} all-reduce(%x)\n}\n\nENTRY", 1)
    assert counted.collective_bytes(dead) == counted.collective_bytes(text) == {"all-reduce": MESSAGE}


def test_a_branch_that_returns_a_ring_copies_it_and_the_copies_are_seen():
    def with_ring(skip):
        def body(carry, t):
            def push(carry):
                ring, x = carry
                return ring.at[t % 5].set(x), jnp.sin(x)

            return skip(t % 2, push, carry), None

        return lambda x: lax.scan(body, (jnp.zeros((5, *x.shape)), x), jnp.arange(9))[0][0]

    def branch(run, f, carry):
        return lax.switch(run, [lambda c: (c[0][::-1], c[1]), f], carry)

    def loop(run, f, carry):
        return lax.fori_loop(0, run, lambda _, c: f(c), carry)

    def ring_copies(skip):
        return [c for c in counted.copies(compiled_text(with_ring(skip))) if c.bytes == 5 * MESSAGE]

    copied = ring_copies(branch)
    assert {c.shape for c in copied} == {f"f32[5,{ROWS},{COLUMNS}]"}
    assert sum(c.executions for c in copied) >= 9
    assert ring_copies(loop) == []


def test_a_synchronous_permute_overlaps_nothing():
    text = compiled_text(lambda x: lax.ppermute(x, "pipe", CHAIN) + jnp.tanh(x))
    assert [(o.bytes, o.kernels, o.matmuls) for o in hlo.overlap(text)] == [(MESSAGE, 0, 0)]


# A GPU program, cut down to the essentials: transfers started and waited for by a pair of instructions or by a wrapped
# computation, kernels between them, a fusion that only copies and one that also computes.
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=4

%wrapped_permute (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %collective-permute = bf16[8,4]{1,0} collective-permute(%p), source_target_pairs={{2,1}}
}

%gemm_fusion_computation (p.1: bf16[8,4]) -> f32[8,8] {
  %p.1 = bf16[8,4]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%p.1, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%copy_computation (p.2: bf16[8,4]) -> (bf16[8,4]) {
  %p.2 = bf16[8,4]{1,0} parameter(0)
  %bitcast = bf16[8,4]{1,0} bitcast(%p.2)
  %copy.1 = bf16[8,4]{1,0} copy(%bitcast)
  ROOT %tuple.1 = (bf16[8,4]{1,0}) tuple(%copy.1)
}

%compute_computation (p.3: bf16[8,4]) -> bf16[8,4] {
  %p.3 = bf16[8,4]{1,0} parameter(0)
  %copy.2 = bf16[8,4]{1,0} copy(%p.3)
  ROOT %negate = bf16[8,4]{1,0} negate(%copy.2)
}

%counter_computation (p.4: s32[]) -> s32[] {
  %p.4 = s32[] parameter(0)
  ROOT %add = s32[] add(%p.4, %p.4)
}

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%a, %b)
}

ENTRY %main (x: bf16[8,4], i: s32[]) -> (f32[8,8], bf16[8,4]) {
  %x = bf16[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %cp-start = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,2}}
  %ag-start = ((bf16[8,4]{1,0}), bf16[16,4]{1,0}) all-gather-start(%x), replica_groups=[2,2]<=[4], dimensions={0}
  %counter = s32[] fusion(%i), kind=kLoop, calls=%counter_computation
  %gemm = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%gemm_fusion_computation
  %wrapped-start = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) async-start(%x), calls=%wrapped_permute
  %attention = (bf16[8,4]{1,0}, u8[0]{0}) custom-call(%x, %x), custom_call_target="__cudnn$fmhaSoftmax"
  %cp-done = bf16[8,4]{1,0} collective-permute-done(%cp-start)
  %ag-done = bf16[16,4]{1,0} all-gather-done(%ag-start)
  %copied = (bf16[8,4]{1,0}) fusion(%x), kind=kLoop, calls=%copy_computation
  %computed = bf16[8,4]{1,0} fusion(%x), kind=kLoop, calls=%compute_computation
  %wrapped-done = bf16[8,4]{1,0} async-done(%wrapped-start), calls=%wrapped_permute
  %rs = bf16[4,4]{1,0} reduce-scatter(%x), replica_groups=mesh['data'=2,'pipe'=2] {'pipe'}, to_apply=%sum
  ROOT %out = (f32[8,8]{1,0}, bf16[8,4]{1,0}) tuple(%gemm, %wrapped-done)
}
"""


def test_asynchronous_collectives_count_once_in_both_spellings():
    assert collections.Counter(c.kind for c in hlo.collectives(GPU)) == {
        "collective-permute": 2,
        "all-gather": 1,
        "reduce-scatter": 1,
    }
    assert counted.permute_bytes_by_pair(GPU) == {(0, 1): 64, (1, 2): 64, (2, 1): 64}
    assert [len(only(GPU, kind).groups[0]) for kind in ("all-gather", "reduce-scatter")] == [2, 2]


def test_overlap_counts_kernels_between_start_and_done_but_no_loop_counter():
    plain, wrapped = hlo.overlap(GPU)
    assert (plain.bytes, plain.kernels, plain.matmuls) == (64, 2, 2)
    assert (wrapped.bytes, wrapped.kernels, wrapped.matmuls) == (64, 3, 1)


def test_a_fusion_is_a_copy_only_if_it_does_nothing_else():
    assert [(c.computation, c.shape, c.bytes) for c in counted.copies(GPU)] == [("copy_computation", "bf16[8,4]", 64)]


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.collectives("func.func public @main() {}")
