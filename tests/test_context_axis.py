"""A sequence that devices share, from the configuration to a plan; its gradients are in test_gradients.py."""

import dataclasses
import itertools

import numpy as np
import pytest

import planner
from paxtrain.config import CONTEXT_FORMS, ModelConfig, from_dict, to_dict
from paxtrain.config.axes import layer_sizes
from paxtrain.errors import UserError
from planner.cluster.device_sheets import SHEETS
from planner.cost import compute
from planner.cost.candidate import Candidate, host_order
from planner.cost.coded import coded
from planner.cost.compute import LAUNCH
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.memory import closed_form
from planner.program.cache import layer_program
from planner.report import text
from planner.search.budget import Budget
from planner.search.enumeration import enumerate_candidates
from planner.search.search import Options, Search
from planner.search.space import Choices
from tests import small
from tests.compress_settings import compression
from tests.planner.examples import cluster

LINK = 1e-5, 1e11  # seconds and bytes/s inside a host
LONG = ModelConfig(
    family="llama",
    vocab_size=4096,
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=2,
    intermediate=4096,
    sequence=65536,
    dtype="bfloat16",
)
SPLIT = {"context": 4}
CHOICES = Choices(
    schedules=("1f1b",), saves=("dots",), shards=("optimizer",), micro_batch=(1,), backward=(), data_ranks=()
)


def sheet(
    model: ModelConfig, mesh: dict[str, int], link: tuple[float, float] = LINK, form="ring"
) -> compute.LayerCosts:
    return compute.sheet(model, SHEETS["h100"], layer_sizes(mesh, form), 1, "residuals", link)


def test_parts_of_sequences_and_heads_must_be_equal():
    with pytest.raises(UserError, match=r"mesh\.context=3 splits model\.sequence=16 into 6 equal parts, .*=12 or 18"):
        small.config(mesh={"context": 3})
    with pytest.raises(UserError, match=r"with mesh\.sequence_parallel .*=16 into 32 equal parts"):
        small.config(mesh={"context": 4, "tensor": 4, "sequence_parallel": True})
    with pytest.raises(UserError, match=r"splits 4 heads of keys over mesh\.tensor=1 x mesh\.context=8"):
        small.config(mesh={"context": 8, "context_form": "heads"})


def test_layers_that_do_not_know_it_are_refused_and_not_planned_on_it():
    module = "tests.paxtrain.model.recurrence:Recurrence"
    c = small.config(mesh={"context": 2}, model={"module": module, "hidden": 32})
    with pytest.raises(UserError, match=r"mesh\.context=2 splits the dim sequence, but the layers of .* tensor alone"):
        small.trainer(c)
    space = enumerate_candidates(cluster(1, 8), dataclasses.replace(LONG, module=module), 8, CHOICES)
    assert set(space.column("context").tolist()) == {1}


def test_products_are_shared_and_transfers_lie_under_attention():
    """Of F and B each device has a fourth, and launches. The ring takes longer than attention only on a slow link."""
    whole, part = sheet(LONG, {}), sheet(LONG, SPLIT)
    for name in ("forward", "backward", "head"):
        assert getattr(whole, name) / 4 <= getattr(part, name) < 1.1 * getattr(whole, name) / 4
    slow = sheet(LONG, SPLIT, (0.0, 1e8))
    # Keys and values in bfloat16, to three devices.
    sent = 3 * 2 * LONG.key_value_heads * LONG.head_dim * LONG.sequence // 4 * 2
    attention = part.forward - sheet(dataclasses.replace(LONG, sequence=1024), {}).forward * 16
    assert slow.forward - part.forward == pytest.approx(sent / 1e8 - attention, rel=0.05)


def test_each_form_sends_what_it_says():
    """Operands of a device of four, in bytes: keys and values go round, are gathered, or become heads as queries do."""
    model = dataclasses.replace(LONG, kv_heads=4)
    queries, keys = (LONG.sequence // 4 * width * 2 for width in (LONG.hidden, 4 * LONG.head_dim))
    sums = 2 * keys  # gradients of keys are added in float32
    expected = {
        "ring": ({"collective-permute": 3 * 2 * keys}, {"collective-permute": 3 * 2 * keys + 4 * 2 * sums}),
        "gather": ({"all-gather": 2 * keys}, {"all-gather": 2 * keys, "reduce-scatter": 4 * 2 * sums}),
        "heads": ({"all-to-all": 2 * queries + 2 * keys}, {"all-to-all": 2 * queries + 2 * keys}),
    }
    for form, parts in expected.items():
        program = layer_program(model, layer_sizes(SPLIT, form), False, "residuals")
        for work, sent in zip((program.forward, program.backward), parts):
            found: dict[str, float] = {}
            for one in work.collectives:
                assert one.axes == ("context",)
                found[one.kind] = found.get(one.kind, 0.0) + one.times * one.bytes.of(1)
            assert found == sent, form


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_codes_and_scales_travel_in_place_of_keys_and_values(name):
    """Keys and values of bfloat16 as bytes, with a scale of two for 64; work is the codec's passes, by hand."""
    codec = coded(compression(context_codec=name)).context
    keys = LONG.sequence // 4 * 2 * LONG.head_dim
    for form, kind, times in (("ring", "collective-permute", 3), ("gather", "all-gather", 1)):
        plain, mine = (layer_program(LONG, layer_sizes(SPLIT, form, one), False, "residuals") for one in (None, codec))
        for work, before in ((mine.forward, plain.forward), (mine.backward, plain.backward)):
            sent, sent_before = (
                sum(one.times * one.bytes.of(1) for one in each.collectives if one.kind == kind)
                for each in (work, before)
            )
            assert sent_before - sent == times * 2 * keys * (2 - (1 + 2 / 64))
            assert work.products == before.products
    encode, decode, launches = codec.passes()
    work = 2 * 2 * keys * (encode + 3 * decode) / (0.8 * SHEETS["h100"].bandwidth) + 2 * 4 * launches * LAUNCH
    plain, mine = (
        compute.sheet(LONG, SHEETS["h100"], layer_sizes(SPLIT, "ring", one), 1, "residuals", (0.0, 1e30))
        for one in (None, codec)
    )
    assert mine.forward - plain.forward == pytest.approx(work, rel=1e-3)
    assert mine.backward - plain.backward == pytest.approx(work, rel=1e-3)
    heads = layer_sizes(SPLIT, "heads", codec)
    assert heads == layer_sizes(SPLIT, "heads") != layer_sizes(SPLIT, "ring", codec) != layer_sizes(SPLIT, "ring")


def test_a_codec_of_keys_makes_a_step_quicker_on_slow_links_alone():
    codecs = coded(compression(context_codec="int8"))
    gains = []
    for links in ({}, {"links": {"alpha": [[1e-5]], "bandwidth": [[3e9]]}}):
        some = cluster(1, 8, **links)
        choices = dataclasses.replace(CHOICES, others=(("context", (8,)),))
        best = [
            Search(some, LONG, 8, each, Budget(margin=False, usable=1e6), Options(uneven=False)).run(top=1, placed=1)
            for each in (choices, dataclasses.replace(choices, coded=codecs))
        ]
        plain, mine = (found.ranked[0] for found in best)
        assert mine.candidate.compresses_keys and not plain.candidate.compresses_keys
        gains.append(plain.seconds / mine.seconds)
        assert text.compression(mine.candidate) == "ctxint8"
    assert gains[0] < 1.0 < 1.05 < gains[1]


def test_a_gather_lies_under_the_attention_to_a_devices_own_tokens():
    """Behind it attention to the others' is left; on a slow link what is left of the gather takes longer."""
    quick, slow = (sheet(LONG, SPLIT, (0.0, rate), "gather") for rate in (1e30, 1e8))
    sent = 3 * 2 * LONG.key_value_heads * LONG.head_dim * LONG.sequence // 4 * 2  # a ring's turns
    attention = quick.forward - sheet(dataclasses.replace(LONG, sequence=1024), {}).forward * 16
    assert slow.forward - quick.forward == pytest.approx(sent / 1e8 - attention / 4, rel=0.05)


def test_the_ring_has_the_scores_that_a_causal_mask_leaves():
    """4 S^2 / (2 n) H operations of F on each of n devices; those of the one device's kernel count as twice as many."""
    model = dataclasses.replace(LONG, attention="cudnn")

    def numbers(mesh: dict[str, int]) -> int:
        work = layer_program(model, layer_sizes(mesh), False, "residuals").forward
        return sum(np.prod(one.sizes(1)).item() * one.times for one in work.fused)

    assert numbers({}) == 2 * LONG.sequence**2 * LONG.hidden
    assert numbers({"context": 8}) == numbers({}) // 8


def test_it_is_tried_unasked_only_where_devices_keep_many_tokens():
    def sizes(sequence: int, **choices) -> set[int]:
        model = dataclasses.replace(LONG, sequence=sequence)
        space = enumerate_candidates(cluster(1, 8), model, 8, dataclasses.replace(CHOICES, **choices))
        return set(space.column("context").tolist())

    assert sizes(4096) == {1}
    assert sizes(16384) == {1, 2, 4}
    assert sizes(65536) == {1, 2, 4, 8}
    assert sizes(4096, others=(("context", (2,)),)) == {2}


def test_states_are_split_over_all_devices_that_share_sequences():
    def memory(**mesh: int) -> closed_form.Memory:
        values = {"mesh": mesh, "batch": {"global_batch": 8, "micro_batch": 1}, "model": dataclasses.asdict(LONG)}
        return closed_form.analytic(closed_form.of(from_dict(values)))

    one, four = memory(), memory(context=4)
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=1e-3)
    # A ring keeps its sums and no second copy of what attention returns.
    assert four.activations == pytest.approx(one.activations / 4, rel=0.1)
    assert memory(context=2, data=2).optimizer == pytest.approx(four.optimizer)


def test_the_search_finds_the_best_of_all_meshes():
    """Each mesh of data, pipe, tensor and context on two hosts of four devices, and each placement, by brute force."""
    some, best = cluster(2, 4), {}
    sizes = itertools.product((1, 2, 4, 8), repeat=4)
    for data, pipe, tensor, shared in sizes:
        if data * pipe * tensor * shared != 8 or tensor > 2 or tensor * shared > 4 or 8 % data:
            continue
        plain = Candidate(data, pipe, tensor, 1, 8 // data, "1f1b", (8 // pipe,) * pipe, others=(shared,))
        slots = 4 // (tensor * shared)
        first = itertools.combinations(range(2 * slots), slots)
        hosts = np.array([[s not in here for s in range(2 * slots)] for here in first], int).reshape(-1, data, pipe)
        for form in CONTEXT_FORMS[: 3 if shared > 1 and LONG.key_value_heads % (shared * tensor) == 0 else 2]:
            c = dataclasses.replace(plain, context_form=form)
            seconds = Problem(some, LONG, c).step(fabric(some), hosts).total.min()
            best[shared] = min(best.get(shared, np.inf), seconds)
    assert set(best) == {1, 2, 4}
    for asked, least in ((), min(best.values())), *(((("context", (n,)),), best[n]) for n in best):
        choices = dataclasses.replace(CHOICES, others=asked)
        search = Search(some, LONG, 8, choices, Budget(margin=False, usable=1e6), Options(uneven=False))
        assert search.run(top=1, placed=1).ranked[0].seconds == pytest.approx(least, rel=1e-9)


def test_what_crosses_hosts_is_shared_by_the_devices_of_a_sequence():
    """Four rings cross the hosts in either case, and of a sequence's two devices each sends a half."""
    some = cluster(2, 4)
    seconds = {}
    for shared in (1, 2):
        c = Candidate(2, 4 // shared, 1, 1, 8, "1f1b", (2 * shared,) * (4 // shared), others=(shared,))
        problem = Problem(some, LONG, c)
        seconds[shared] = problem.links(problem.paths(fabric(some), host_order(c, 4))).ring_per_byte.max()
    assert seconds[2] == pytest.approx(seconds[1] / 2)


def test_a_plan_of_long_sequences_has_it():
    values = {
        "model": dataclasses.asdict(LONG),
        "batch": {"global_batch": 2, "micro_batch": 1},
    }
    options = planner.PlanOptions(
        schedules=("1f1b",), saves=("layer_inputs",), tensor=(1, 2), nearby=False, top=3, placed=1, oracle="no"
    )
    found = planner.plan(from_dict(values), cluster(1, 8), options, explained=True)
    chosen = found.ranked[0].candidate
    assert chosen.shared > 1
    assert f"context={chosen.shared} " in text.text(found.report)
    assert any("context=" in line for line in found.explain())
    c = found.plan.apply(to_dict(from_dict(values)))
    assert c.mesh.context == chosen.shared
    assert sorted(found.plan.device_order) == list(range(8))
