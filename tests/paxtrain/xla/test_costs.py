"""Bytes and FLOPs of kernels, against programs whose figures one can work out by hand."""

import dataclasses

import pytest

from paxtrain.xla import costs

# A GPU program, cut down to the essentials: a loop of three trips that slices, multiplies and updates in place.
TEXT = """HloModule jit_step, is_scheduled=true

%slice_computation (p.1: bf16[3,8,4], i.1: s32[]) -> bf16[8,4] {
  %p.1 = bf16[3,8,4]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = bf16[1,8,4]{2,1,0} dynamic-slice(%p.1, %i.1, %zero, %zero), dynamic_slice_sizes={1,8,4}
  ROOT %flat = bf16[8,4]{1,0} bitcast(%part)
}

%gemm_computation (p.2: bf16[8,4], c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(1)
  %p.2 = bf16[8,4]{1,0} parameter(0)
  %dot = f32[8,8]{1,0} dot(%p.2, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %sum = f32[8,8]{1,0} add(%dot, %c)
}

%update_computation (ring: f32[5,8,8], x: f32[8,8], i.2: s32[]) -> f32[5,8,8] {
  %ring = f32[5,8,8]{2,1,0} parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  %one = f32[1,8,8]{2,1,0} bitcast(%x)
  %i.2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %new = f32[5,8,8]{2,1,0} dynamic-update-slice(%ring, %one, %i.2, %zero.1, %zero.1)
}

%scatter_computation (table: f32[100,4], ids: s32[8,1], rows: f32[8,4]) -> f32[100,4] {
  %table = f32[100,4]{1,0} parameter(0)
  %ids = s32[8,1]{1,0} parameter(1)
  %rows = f32[8,4]{1,0} parameter(2)
  ROOT %added = f32[100,4]{1,0} scatter(%table, %ids, %rows), to_apply=%plus
}

%plus (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_plus_b = f32[] add(%a, %b)
}

%body (carry: CARRY) -> CARRY {
  %carry = CARRY parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %all = bf16[3,8,4]{2,1,0} get-tuple-element(%carry), index=1
  %total = f32[8,8]{1,0} get-tuple-element(%carry), index=2
  %slots = f32[5,8,8]{2,1,0} get-tuple-element(%carry), index=3
  %sliced = bf16[8,4]{1,0} fusion(%all, %i), calls=%slice_computation, metadata={op_name="jit(f)/layer/slice"}
  %product = f32[8,8]{1,0} fusion(%sliced, %total), kind=kCustom, calls=%gemm_computation
  %written = f32[5,8,8]{2,1,0} fusion(%slots, %product, %i), kind=kLoop, calls=%update_computation
  ROOT %next = CARRY tuple(%i, %all, %product, %written)
}

%condition (carry.1: CARRY) -> pred[] {
  %carry.1 = CARRY parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (start: CARRY, q: bf16[2,16,4,8], t: f32[100,4]) -> f32[] {
  %start = CARRY parameter(0)
  %q = HEADS parameter(1)
  %t = f32[100,4]{1,0} parameter(2)
  %where = s32[8,1]{1,0} constant({...})
  %what = f32[8,4]{1,0} constant({...})
  %loop = CARRY while(%start), condition=%condition, body=%body, TRIPS
  %library = (f32[16,4]{1,0}, s8[64]{0}) custom-call(%t, %t), custom_call_target="__cublas$lt$matmul", CONTRACTED
  %attention = (HEADS, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %back = (HEADS, u8[0]{0}) custom-call(%q, %q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %sown = f32[100,4]{1,0} fusion(%t, %where, %what), kind=kInput, calls=%scatter_computation
  ROOT %number = f32[] reduce(%sown, %what), to_apply=%plus
}
"""
TEXT = (
    TEXT.replace("CARRY", "(s32[], bf16[3,8,4]{2,1,0}, f32[8,8]{1,0}, f32[5,8,8]{2,1,0})")
    .replace("HEADS", "bf16[2,16,4,8]{3,2,1,0}")
    .replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')
    .replace("CONTRACTED", 'backend_config={"lhs_contracting_dimensions":["1"],"x":1}')
)


def kernel(name: str) -> costs.Kernel:
    [found] = [k for k in costs.kernels(TEXT) if k.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("sliced", 2 * 8 * 4 * 2 + 4),  # the part, read and written, and the index
        ("product", 8 * 4 * 2 + 2 * 8 * 8 * 4),
        ("written", 2 * 8 * 8 * 4 + 4),
        ("sown", 8 * 4 + 3 * 8 * 4 * 4),  # indices; what is added, read, and the rows it is added to, read and written
    ],
)
def test_bytes_are_those_that_a_kernel_touches(name, size):
    assert kernel(name).bytes == size


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("sliced", 0),
        ("product", 2 * 8 * 8 * 4),
        ("library", 2 * 16 * 4 * 4),
        ("attention", 4 * (2 * 4 * 16 * 16 * 8)),
        ("back", 8 * (2 * 4 * 16 * 16 * 8)),
    ],
)
def test_flops_are_those_of_products(name, flops):
    assert kernel(name).flops == flops
    assert kernel(name).product == (flops > 0)


def test_what_runs_in_a_loop_counts_as_often_and_scalars_not_at_all():
    found = {k.name: k.executions for k in costs.kernels(TEXT)}
    in_loop = dict.fromkeys(("sliced", "product", "written"), 3)
    assert found == in_loop | dict.fromkeys(("library", "attention", "back", "sown"), 1)
    assert kernel("sliced").op_name == "jit(f)/layer/slice"


def test_an_asynchronous_fusion_counts_once_and_as_the_fusion_that_it_is():
    """As XLA writes it from jax 0.11 on: the start's result has the operands, the result and a context."""
    synchronous = "%written = f32[5,8,8]{2,1,0} fusion(%slots, %product, %i), kind=kLoop, calls=%update_computation"
    pair = (
        "%started = ((f32[5,8,8], f32[8,8], s32[]), f32[5,8,8]{2,1,0}, u32[]) fusion-start(%slots, %product, %i), "
        "kind=kLoop, calls=%update_computation\n  %written = f32[5,8,8]{2,1,0} fusion-done(%started)"
    )
    assert TEXT.count(synchronous) == 1
    found = costs.kernels(TEXT.replace(synchronous, pair))
    renamed = [dataclasses.replace(k, name="started") if k.name == "written" else k for k in costs.kernels(TEXT)]
    assert found == renamed
