"""The parts of a step by the operators of PyTorch's profiler (make_operators.py), with a kernel for each product.

A layer of GPT-2 has four products in F, one of Llama seven; B has two for each, and the head one in F and two in B.
"""

import collections
import gzip
import json
import pathlib
import re

import pytest

from planner.traces import torch_trace
from planner.traces.kernels import NOTHING, WHOLE_LAYERS

DATA = pathlib.Path(__file__).parent / "data"
LAYERS, PASSES = 2, 2
PRODUCT = re.compile(r"aten::(?:addmm|mm)")
OTHERS = re.compile(r"aten::(?:embedding|nll_loss_forward|_foreach_norm|addcdiv_)")


def with_kernels(values):
    """Return a trace with a kernel for each of some operators, and the operators' names by the kernels' start."""
    events, names = [*values["traceEvents"]], {}
    leaves = [e for e in events if PRODUCT.fullmatch(e["name"]) or OTHERS.fullmatch(e["name"])]
    for number, event in enumerate(sorted(leaves, key=lambda event: event["ts"])):
        thread = {"ph": "X", "pid": event["pid"], "tid": event["tid"], "args": {"correlation": number}}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": event["ts"] + event["dur"] / 2, "dur": 0.1}
        start = 1e9 + 10 * number
        kernel = {"cat": "kernel", "name": "k", "ts": start, "dur": 5, "args": {"correlation": number, "device": 0}}
        events += [thread | launch, thread | kernel]
        names[round(start * 1e-6, 6)] = event["name"]
    return {"traceEvents": events}, names


@pytest.mark.parametrize(
    ("name", "products", "tables", "recomputes"),
    [("gpt2", 4, 2, NOTHING), ("llama_recomputed", 7, 1, WHOLE_LAYERS)],
)
def test_every_product_has_its_part(name, products, tables, recomputes):
    values, names = with_kernels(json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes())))
    trace = torch_trace.parse(name, values)
    assert (trace.passes, trace.steps, trace.head, trace.recomputes) == (PASSES, 1, True, recomputes)
    found = collections.Counter()
    for kernel in trace.kernels:
        operator = names[round(kernel.start, 6)]
        kind = "product" if PRODUCT.fullmatch(operator) else operator.removeprefix("aten::")
        found[kernel.phase, kernel.place, kind] += 1
    again = recomputes == WHOLE_LAYERS
    expected = {
        ("forward", "layers", "product"): PASSES * LAYERS * products,
        ("backward", "layers", "product"): PASSES * LAYERS * products * (2 + again),
        ("forward", "head", "product"): PASSES,
        ("backward", "head", "product"): PASSES * 2,
        ("forward", "embedding", "embedding"): PASSES * tables,
        ("forward", "head", "nll_loss_forward"): PASSES,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["other", "layers", "_foreach_norm"] > 0 and found["optimizer", "layers", "addcdiv_"] > 0
    assert set(found) == {*expected, ("other", "layers", "_foreach_norm"), ("optimizer", "layers", "addcdiv_")}
