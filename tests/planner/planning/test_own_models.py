"""Plans for architectures of one's own, whose costs and bytes are those of their programs and tables."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import from_dict, to_dict
from paxtrain.config import plan as plans
from paxtrain.config.axes import UNSPLIT, layer_sizes
from paxtrain.model import parameters
from paxtrain.model.parameters import of_mean_layer
from planner.cluster.device_sheets import SHEETS
from planner.cost import compute
from planner.cost.candidate import Candidate
from planner.cost.step_time import Problem
from planner.memory import closed_form
from planner.planning.planning import PLAN
from planner.program.cache import layer_program
from planner.search.search import Search
from tests.planner.examples import cluster

BLOCK = "tests.paxtrain.model.parallel_block:ParallelBlock"
RECURRENCE = "tests.paxtrain.model.recurrence:Recurrence"
BAD = "tests.paxtrain.model.bad_models:"
OTHERS = "tests.planner.planning.fourier:"
KINDS = "mixed:Mixed", "bad_models:Plain", "routed:Routed"
SIZES = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "intermediate": 1536, "sequence": 256}
OPTIONS = planner.PlanOptions(memory_margin=True, top=1, placed=1, oracle="no", tensor=(1, 2), micro_batch=(1, 2))
# Sizes [in, out] of the matrices that tensor splits.
MATRICES = {
    BLOCK: [(512, 512), (512, 2 * 128), (512, 1536), (512, 512), (1536, 512)],
    RECURRENCE: [(512, 3 * 1536), (1536, 512)],
}
MODULES = sorted(MATRICES)


def config(module, **model):
    changes = SIZES | {"vocab_size": 1000, "dtype": "bfloat16", "module": module} | model
    return paxtrain.load_config("tiny", {f"model.{name}": value for name, value in changes.items()})


@pytest.mark.parametrize("module", MODULES)
def test_plans_are_made_kept_and_taken(module, tmp_path):
    c = config(module)
    made = planner.plan(c, cluster(2, 4), OPTIONS)
    made.save(tmp_path / "plan")
    kept = plans.load(tmp_path / "plan" / PLAN)
    assert kept == made.plan and kept.module == module
    assert kept.apply(to_dict(c)).model == c.model
    # A configuration takes its architecture from the plan, and no other one.
    values = to_dict(c)
    assert kept.apply(values | {"model": {**values["model"], "module": ""}}).model == c.model
    [other] = set(MODULES) - {module}
    with pytest.raises(paxtrain.UserError, match=f"the plan is for model.module={module}, but .*{other}; train with"):
        kept.apply(to_dict(config(other)))
    assert "module" not in json.loads(json.dumps(plans.to_json(dataclasses.replace(kept, module=""))))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("module", MODULES)
def test_compute_is_that_of_its_products(module, tensor):
    """Rates of memory and of launches that cost nothing leave products: three for each matrix, one of them in F."""
    sheet = dataclasses.replace(SHEETS["h100"], sms=0, bandwidth=1e30)
    model, tokens, peak = config(module).model, 3 * 256, sheet.peak_flops * sheet.reach * 0.88
    shares = dataclasses.replace(compute.ASSUMED, layer_launch=0.0)
    found = compute.sheet(model, sheet, layer_sizes({"tensor": tensor}), 3, "residuals", (0.0, 1e30), shares)
    matrices = 2 * tokens * sum(math.prod(sizes) for sizes in MATRICES[module]) / tensor / peak
    # Flash attention computes half of the scores and of the contexts, at 0.7 of the peak.
    attention = 2 * tokens * 256 * 512 / tensor / (0.7 * peak) if module == BLOCK else 0
    assert found.forward == pytest.approx(matrices + attention, rel=1e-9)
    assert found.backward == pytest.approx(2 * matrices + 2.5 * attention, rel=1e-9)
    assert found.backward_weights == pytest.approx(matrices, rel=1e-9)


def test_passes_are_those_of_its_kernels():
    """Without time for products: passes over [B, S, H], counted by hand for the parallel block."""
    model, size = config(BLOCK).model, 3 * 256 * 512 * 2
    sheet = dataclasses.replace(SHEETS["h100"], sms=0, peak_flops=1e30, bandwidth=1e12)
    shares = dataclasses.replace(compute.ASSUMED, layer_launch=0.0, memory=1.0)
    found = compute.sheet(model, sheet, UNSPLIT, 3, "residuals", (0.0, 1e30), shares)
    # The norm's reduction and the norm, queries, keys and values, GELU of 3 H, and the sum of three arrays. Products go
    # through memory as well, operands and result.
    passes = 1 + 2 + 2 + 4 * 0.25 + 2 * 3 + 4
    products = sum(n * k + 3 * 256 * (n + k) for n, k in MATRICES[BLOCK]) * 2
    assert found.forward * 1e12 == pytest.approx(passes * size + products, rel=0.01)


def test_a_primitive_that_is_not_known_is_named_and_its_bytes_count():
    model = config(OTHERS + "Fourier").model
    assert compute.unread(model) == "; not known are fft, which count as reading and writing their arrays"
    assert not any(compute.unread(config(module).model) for module in MODULES)
    # It reads and writes complex numbers. Other passes: to complex, the real part, the sum; keep, new and the product,
    # of which F keeps all.
    moved = layer_program(parameters.with_attention(model, (9, 0)), UNSPLIT, False, "residuals").forward.moved.each
    transform, rest = 256 * 512 * (8 + 8), 256 * 512 * ((2 + 8) + (8 + 2) + 3 * 2) + 256 * 1536 * 2 * 5
    assert moved == pytest.approx(transform + rest, rel=0.01)


@pytest.mark.parametrize("module", MODULES)
def test_collectives_are_those_of_its_program(module):
    """Both blocks have one `leave` in F and one `enter` in B; GPT-2 has two of each."""
    size, links = 2 * 256 * 512 * 2, (1e-3, 1e6)

    def travels(model):
        how = model, SHEETS["h100"], layer_sizes({"tensor": 2}), 2, "residuals"
        slow, quick = (compute.sheet(*how, link) for link in (links, (0, 1e30)))
        return slow.forward - quick.forward, slow.backward - quick.backward

    one = 2 * 1e-3 + size / 1e6  # 2(T-1)/T of the bytes
    assert travels(config(module).model) == pytest.approx((one, one))
    assert travels(config("", kv_heads=0).model) == pytest.approx((2 * one, 2 * one))


@pytest.mark.parametrize("module", MODULES)
def test_memory_is_that_of_its_program_and_table(module):
    values = to_dict(config(module)) | {"mesh": {"pipe": 2}, "batch": {"global_batch": 8, "micro_batch": 2}}
    shape = closed_form.of(from_dict(values | {"pipeline": {"schedule": "1f1b", "save": "dots"}}))
    found = closed_form.analytic(shape)
    vectors, held = 512 + 3 * 1536 * (module == RECURRENCE), sum(math.prod(sizes) for sizes in MATRICES[module])
    layers, rest = 2 * (held + vectors), 1024 * 512 + 512
    assert found.gradients == 4 * (layers + rest)
    # F leaves the layer's input and, by name, what "dots" saves; flash attention its sums, besides.
    tokens = 2 * 256
    saved = {BLOCK: 512 + 256 + 1536 + 2 * 512, RECURRENCE: 3 * 1536}[module]
    sums = 4 * tokens * 8 * (module == BLOCK)
    assert closed_form.kept(shape)["dots"] == pytest.approx(2 * tokens * (512 + saved) + sums, rel=0.002)


def test_layers_of_several_kinds_are_priced_apart():
    """Of four layers one is dense, as those of Plain are, and three have experts, as those of Routed."""
    mixed, dense, experts = (config(f"tests.paxtrain.model.{one}") for one in KINDS)
    sheet, shares = SHEETS["h100"], dataclasses.replace(compute.ASSUMED, layer_launch=0.0)

    def mean(of):
        return pytest.approx((of(dense.model) + 3 * of(experts.model)) / 4, rel=1e-9)

    def forward(model):
        return compute.sheet(model, sheet, layer_sizes({"tensor": 2}), 3, "residuals", (1e-3, 1e6), shares).forward

    assert forward(dense.model) < 0.9 * forward(experts.model)
    for of in (forward, lambda model: of_mean_layer(model, UNSPLIT)):
        assert of(mixed.model) == mean(of)
    one = to_dict(mixed) | {"mesh": {}, "batch": {"global_batch": 2, "micro_batch": 2}}
    shape = closed_form.of(from_dict(one))
    assert closed_form.parameters(shape)[0] == parameters.whole(mixed.model)

    made = planner.plan(mixed, cluster(2, 4), OPTIONS).plan
    assert made.module.endswith("Mixed") and made.apply(to_dict(mixed)).model == mixed.model


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_stage_takes_what_its_own_layers_take(schedule):
    """Each split's F, B and W are those of its dense layers and of those with experts, on either kind of device."""
    some, counts = cluster(device=["a100-80gb", "h100", "a100-80gb", "h100"]), ((1, 3), (2, 2), (3, 1))
    by_model = {}
    for name in KINDS:
        model = config(f"tests.paxtrain.model.{name}").model
        c = Candidate(
            data=8, pipe=2, tensor=1, micro_batch=2, micro_batches=4, schedule=schedule, counts=(2, 2), save="dots"
        )
        by_model[name] = Problem(some, model, c, counts)
    mixed, dense, experts = by_model.values()
    for part in ("forward", "backward", "weights"):
        both = [getattr(one, part)[:, 1] / np.array(counts)[:, 1].repeat(2) for one in (dense, experts)]  # of a layer
        for row, (first, last) in enumerate(counts):
            for kind in range(2):
                of_dense, of_expert = (x[2 * row + kind] for x in both)
                edge = getattr(dense, part)[2 * row + kind, 0] - first * of_dense  # the embedding
                stages = of_dense + (first - 1) * of_expert + edge, last * of_expert
                assert getattr(mixed, part)[2 * row + kind] == pytest.approx(stages, rel=1e-9, abs=1e-15)


def test_a_heavy_kind_of_layers_has_a_stage_with_fewer():
    """The search splits where the slowest stage is the quickest, of all splits."""
    c = config(OTHERS + "FirstWide", layers=8, hidden=2048, intermediate=8192, sequence=1024)
    options = dataclasses.replace(OPTIONS, pipe=(4,), tensor=(1,), micro_batch=(2,), schedules=("1f1b",), nearby=False)
    chosen = planner.plan(c, cluster(2, 4, seed=None), options).ranked[0].candidate
    splits = [s for s in itertools.product(range(1, 6), repeat=4) if sum(s) == 8]
    problem = Problem(cluster(2, 4, seed=None), c.model, dataclasses.replace(chosen, counts=(2, 2, 2, 2)), splits)
    slowest = (problem.work.max(axis=1)).reshape(len(splits), -1).max(axis=1)
    assert chosen.counts[0] == 1 and slowest[splits.index(chosen.counts)] == pytest.approx(slowest.min())


def test_without_attention_there_are_no_scores_in_the_memory():
    """On GPUs without flash attention GPT-2 has them."""

    def workspace(model):
        values = {"model": to_dict(config(model, kv_heads=0))["model"], "batch": {"global_batch": 2, "micro_batch": 2}}
        c = from_dict(values)
        return [float(closed_form._backward(closed_form.of(c, capability))) for capability in ((7, 0), (9, 0))]

    old, new = workspace(RECURRENCE)
    assert old == new
    old, new = workspace("")
    assert old == new + 2 * 8 * 256 * 256 * (4 + 2)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (OTHERS + "Broken", r"Broken: its layer\(\) raises KeyError in line \d+: 'nowhere'"),
        (OTHERS + "OneWay", r"OneWay: tracing its layer for tensor=. raises ValueError: Reverse-mode differentiation"),
        (BAD + "Shorter", r"Shorter: its layer\(\) is given x as .*\[1,256,512\] and returns .*\[1,255,512\]; it must"),
    ],
)
def test_a_layer_that_cannot_be_trained_is_refused_before_anything_is_searched(module, words, monkeypatch):
    monkeypatch.setattr(Search, "run", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(paxtrain.UserError, match=words):
        planner.plan(config(module), cluster(2, 4), OPTIONS)


def test_a_profile_of_an_architecture_counts_for_no_other():
    sizes = {"sequence": 256, "heads": 8, "key_value_heads": 2, "ffn": 1536, "hidden": 512, "vocab": 1024}
    seconds = {"forward": 1.0, "backward": 2.0, "head": 0.5, "embedding": 0.1, "optimizer": 1e-9}
    row = {"kind": "a100-80gb", "tensor": 1, "micro_batch": 2, "save": "dots", "dtype": "bfloat16"}
    row |= sizes | seconds | {"family": BLOCK}
    some = cluster(2, 4, compute=[row])
    assert compute.layer(some, "a100-80gb", config(BLOCK).model, UNSPLIT, 2, "dots").forward == 1.0
    assert compute.layer(some, "a100-80gb", config(RECURRENCE).model, UNSPLIT, 2, "dots").forward < 0.1
    assert compute.layer(some, "a100-80gb", config("", kv_heads=0).model, UNSPLIT, 2, "dots").forward < 0.1
    # Measured rows of GPT-2 are scaled by the data sheet's proportion of both.
    other = cluster(2, 4, compute=[row | {"family": "gpt2", "key_value_heads": 8, "ffn": 2048}])
    assert 0.2 < compute.layer(other, "a100-80gb", config(BLOCK).model, UNSPLIT, 2, "dots").forward < 1.0
