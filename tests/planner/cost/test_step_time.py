"""Step times added up by hand, and their invariants on any cluster."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxtrain.config.axes import UNSPLIT, layer_sizes
from paxtrain.model import parameters, transformer
from paxtrain.model.parameters import of_mean_layer
from planner.cluster.cluster import Cluster, Shares
from planner.cluster.device_sheets import SHEETS
from planner.cost import compute as costs
from planner.cost import link_seconds, step_time
from planner.cost.candidate import Candidate, host_order
from planner.cost.coded import coded
from planner.cost.step_time import Problem
from tests.compress_settings import compression
from tests.planner.examples import MODEL, cluster, placements, reordered

CANDIDATES = [
    Candidate(2, 4, 2, 2, 6, "eager_1f1b", (3, 3, 3, 3)),
    Candidate(2, 4, 2, 2, 6, "1f1b", (3, 3, 4, 2), backward="epilogue", data_rank=32),
    Candidate(4, 2, 2, 1, 4, "interleaved_1f1b", (3, 3, 3, 3), chunks=2, shard="none"),
    Candidate(16, 1, 1, 1, 2, "eager_1f1b", (12,), save="residuals"),
    Candidate(1, 4, 4, 4, 3, "gpipe", (3, 3, 3, 3), backward="all", save="inputs"),
    Candidate(2, 4, 2, 2, 6, "1f1b", (3, 3, 3, 3), backward="epilogue", sequence_parallel=True),
]


# Devices at half of their data sheets' rates for products of any shape, and for memory.
HALF = Shares(matmul=0.5, memory=0.5, layer_launch=0.0)
RATES = {"a100-80gb": (312e12 / 2, 2.03904e12 / 2), "h100": (989.4e12 / 2, 3.35232e12 / 2)}  # FLOP/s, bytes/s
# Parameters of MODEL: of a layer four H x H matrices of attention, eight of the rest, and 13 H of biases and norms; of
# a table 50,257 rows, padded to a multiple of 128.
LAYER, TABLE = 12 * 1024**2 + 13 * 1024, 50304 * 1024


def halved(some: Cluster) -> Cluster:
    """Return a cluster with its devices at half of their data sheets' rates."""
    # Without a number of multiprocessors products of all shapes are as quick, at 0.88 of the reach.
    sheets = {kind: dataclasses.replace(SHEETS[kind], sms=0, reach=1 / 0.88) for kind in some.kinds}
    return dataclasses.replace(some, shares=HALF, sheets=sheets)


def at_half(hosts: int, *kinds: str) -> Cluster:
    """Return hosts with one device each, at half of their data sheets' rates."""
    return halved(cluster(hosts, 1, seed=None, device=list(kinds)))


def by_hand(kind: str, tokens: int) -> dict[str, float]:
    """Return the seconds of a layer of MODEL at half rates with save=dots: FLOPs and bytes over these rates."""
    peak, memory = RATES[kind]
    products, attention = 2 * tokens * 12 * 1024**2 / peak, 2 * tokens * 1024 * 1024 / (0.7 * peak)
    one_pass = tokens * 1024 * 2 / memory
    return {
        "forward": products + attention + 22 * one_pass,
        "backward": 2 * products + 2.5 * attention + (44 + 22) * one_pass,  # the passes of F run again
        "head": 6 * tokens * TABLE / peak + 8 * tokens * 50304 * 2 / memory + 20 * 5e-6,
        "embedding": 6 * one_pass + 4 * 5e-6,
        "optimizer": 40 / memory,
    }


@pytest.mark.parametrize("kind", RATES)
def test_one_stage_without_data_is_compute_and_optimizer(kind):
    one, c = at_half(1, kind), Candidate(1, 1, 1, 2, 5, "eager_1f1b", (12,))
    step = Problem(one, MODEL, c).step(link_seconds.fabric(one), np.zeros((1, 1, 1), int))
    seconds = by_hand(kind, tokens=2 * 1024)
    compute = 5 * (12 * (seconds["forward"] + seconds["backward"]) + seconds["embedding"] + seconds["head"])
    np.testing.assert_allclose(step.total, compute + (12 * LAYER + TABLE) * seconds["optimizer"], rtol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": False}, {"family": "llama", "kv_heads": 4, "intermediate": 2304, "tied_head": False}],
    ids=["gpt2", "untied", "llama"],
)
def test_parameters_are_the_models(changes):
    """The count has all layers and tables of the model, except positions and the last norm."""
    chosen = dataclasses.replace(MODEL, **changes)
    every = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(transformer.shapes(chosen)))
    norm = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(transformer.shapes(chosen)["final_norm"]))
    positions = 0 if changes.get("family") == "llama" else chosen.sequence
    modules = transformer.shapes(chosen)["layers"].values()
    kernels = sum(math.prod(module["kernel"].shape[1:]) for module in modules if "kernel" in module)
    ours = chosen.layers * of_mean_layer(chosen, UNSPLIT) + costs.embedding_parameters(chosen, UNSPLIT, 1)
    assert ours == every - norm - positions * chosen.hidden
    padding = (chosen.padded_vocab - chosen.vocab_size) * chosen.hidden * chosen.tables
    assert parameters.published(chosen) == every - padding
    assert sum(n * k for n, k in costs.kernels(chosen, UNSPLIT)) == kernels
    # With two stages or more, the first and the last hold one table each.
    assert costs.embedding_parameters(chosen, layer_sizes({"tensor": 2}), 4) == chosen.padded_vocab * chosen.hidden / 2


def test_sequence_parallelism_sends_parts_and_gathers_them_again():
    some = cluster(2, 4, seed=None)
    whole = Candidate(1, 2, 4, 2, 6, "1f1b", (6, 6), backward="epilogue")
    parts = dataclasses.replace(whole, sequence_parallel=True)
    before, after = Problem(some, MODEL, whole), Problem(some, MODEL, parts)
    assert after.message == before.message / 4 == 2 * 256 * 1024 * 2
    assert (before.packed, after.packed) == (16 * (2 * 1024 + 1024) * 2, 16 * (2 * 256 + 1024) * 2)
    # Between slow hosts the messages decide.
    hosts = np.arange(2).reshape(1, 1, 2)
    assert after.step(link_seconds.fabric(some), hosts).total < before.step(link_seconds.fabric(some), hosts).total


@pytest.mark.parametrize(
    ("save", "reduced", "gathers"), [("residuals", 2, 0), ("dots", 2, 2), ("layer_inputs", 3, 1), ("inputs", 4, 0)]
)
def test_the_backward_reduces_again_and_gathers_with_sequence_parallelism(save, reduced, gathers):
    """Differences from links without latency and bytes leave the collectives, which the test counts.

    If an F runs again, its last all-reduce is needed only if nothing of the next layer was kept.
    """

    def backward(bandwidth: float, sequence: bool) -> float:
        inside, mesh = (0.0, bandwidth), layer_sizes({"tensor": 4})
        return costs.sheet(MODEL, SHEETS["h100"], mesh, 2, save, inside, sequence_parallel=sequence).backward

    slow, none = 1e9, 1e30
    travels = [backward(slow, sequence) - backward(none, sequence) for sequence in (False, True)]
    gather = 3 / 4 * 2 * 1024 * 1024 * 2 / slow
    assert travels[0] == pytest.approx(reduced * 2 * gather, rel=1e-6)
    assert travels[1] - travels[0] == pytest.approx(gathers * gather, rel=1e-6, abs=1e-9)
    assert backward(none, True) < backward(none, False)  # norms and dropout run on a part


@pytest.mark.parametrize(
    ("save", "attention", "matrices", "scores"),
    [
        ("residuals", "auto", 0, 0),
        ("dots", "auto", 0, 0),
        ("dots", "xla", 0, 1),  # to make the probabilities anew
        ("layer_inputs", "auto", 8, 2),  # queries, keys, values, out and up, but not down, whose result B does not read
        ("layer_inputs", "xla", 8, 2),
        ("inputs", "auto", 12, 2),
        ("layers", "auto", 12, 2),  # PyTorch's
    ],
)
def test_the_backward_runs_the_products_again_that_it_needs(save, attention, matrices, scores):
    """Memory that takes no time leaves products: of H x H matrices, and of scores with D numbers each."""
    sheet = dataclasses.replace(SHEETS["h100"], sms=0, bandwidth=1e30)
    model, peak = dataclasses.replace(MODEL, attention=attention), sheet.peak_flops * sheet.reach * 0.88
    times = [
        costs.sheet(model, sheet, UNSPLIT, 2, how, (0.0, 1e30), Shares(layer_launch=0.0)).backward
        for how in (save, "residuals")
    ]
    share = 1 if attention == "xla" else 0.5 / 0.7  # flash attention leaves out half of the scores
    again = matrices * 2 * 2048 * 1024**2 + share * scores * 2 * 2048 * 1024 * 1024
    assert times[0] - times[1] == pytest.approx(again / peak, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("data", "pipe", "gather"), [(2, 2, 1.5), (4, 1, 1.0)])
def test_two_ranks_on_cpus_exchange_one_after_the_other(data, pipe, gather):
    """gloo sends the later rank's message before the other one's; in a ring of more ranks nobody waits."""
    some, c = cluster(data * pipe, 1, seed=3), Candidate(data, pipe, 1, 1, 4, "eager_1f1b", (12 // pipe,) * pipe)
    hosts = np.arange(data * pipe).reshape(1, data, pipe)
    gpu, cpu = Problem(some, MODEL, c), Problem(some, MODEL, c)
    cpu.overlap = False
    fabric = link_seconds.fabric(some)
    found, expected = (problem.links(link_seconds.paths(fabric, hosts, 1)) for problem in (cpu, gpu))
    rings = [list(zip(ring, np.roll(ring, -1))) for ring in hosts[0].T]
    slowest = np.array([max(fabric.per_byte[a, b] for a, b in ring) for ring in rings])
    turn = (data - 1) * 1e-5 + (data - 1) / data * (12 / pipe * LAYER + TABLE) * 2 * slowest
    np.testing.assert_allclose(gpu.step(fabric, hosts).gather, [turn])
    np.testing.assert_allclose(cpu.step(fabric, hosts).gather, [gather * turn])
    ends = [(int(row[0]), int(row[-1])) for row in hosts[0]] if pipe > 1 else []
    size = TABLE * 4 / data
    there, back = (
        [fabric.alpha[a, b] + size * fabric.per_byte[a, b] for a, b in x] for x in (ends, [e[::-1] for e in ends])
    )
    np.testing.assert_allclose(found.swap, max(map(sum, zip(there, back)), default=0.0))
    np.testing.assert_allclose(expected.swap, max([*there, *back], default=0.0))


@pytest.mark.parametrize(("overlap", "middle"), [(True, 0), (False, 1)])
def test_over_gloo_stages_between_take_part_in_the_embeddings_collectives(overlap, middle):
    """The trainer runs these collectives there on zeros."""
    some, c = cluster(8, 1, seed=None), Candidate(2, 4, 1, 1, 4, "eager_1f1b", (3,) * 4)
    problem = Problem(some, MODEL, c)
    problem.overlap = overlap
    step = problem.step(link_seconds.fabric(some), np.arange(8).reshape(1, 2, 4))
    turn = lambda parameters, item: 1e-5 + parameters / 2 * item / 25e9  # noqa: E731
    np.testing.assert_allclose(step.reduce[0, 1:3], turn(3 * LAYER, 4) + middle * turn(TABLE, 4), rtol=1e-9)
    # Over gloo the second half of an all-gather's message waits behind the other rank's first.
    gather = turn(3 * LAYER + middle * TABLE, 2) * (1 if overlap else 1.5)
    np.testing.assert_allclose(step.gather[0, 1:3], gather, rtol=1e-9)


@pytest.mark.parametrize("shard", ["optimizer", "none"])
def test_the_embeddings_codec_sends_its_bytes_and_takes_passes(shard):
    """On links without latency, between two stages of two data ranks on hosts of their own."""
    some, codecs = cluster(4, 1, seed=None), coded(compression(embedding_codec="int8"))
    some = dataclasses.replace(some, alpha=np.zeros_like(some.alpha))
    dense = Candidate(2, 2, 1, 1, 4, "eager_1f1b", (6, 6), shard=shard)
    hosts, found = np.arange(4).reshape(1, 2, 2), []
    for c in (dense, dataclasses.replace(dense, coded=codecs)):
        problem = Problem(some, MODEL, c)
        found.append(problem.step(link_seconds.fabric(some), hosts).reduce[0])
    shares = 2 if shard == "optimizer" else 3  # of half a table: to the other rank, to the other stage, to all ranks
    sent = [shares / 2 * TABLE * size / 25e9 for size in (4, 1 + 2 / 64)]
    encode, decode = 5.5, 1.5  # passes, as docs/codecs.md has them for int8
    over, between = encode + decode + 1, (encode + 2 * decode + 1) / 2
    gathered = 0 if shard == "optimizer" else encode / 2 + decode
    passes = (over + between + gathered) * 4 * TABLE / (0.8 * 2.03904e12)  # at 80% of an A100's bandwidth
    launches = 2 * 3 * shares * 5e-6
    np.testing.assert_allclose(found[1] - found[0], sent[1] - sent[0] + passes + launches, rtol=1e-6)


def test_a_reduction_is_a_ring_of_its_bytes():
    some = at_half(4, *["a100-80gb"] * 4)
    c = Candidate(4, 1, 1, 1, 1, "eager_1f1b", (12,))
    step = Problem(some, MODEL, c).step(link_seconds.fabric(some), np.arange(4).reshape(1, 4, 1))
    np.testing.assert_allclose(step.gather, 3e-5 + 3 / 4 * (12 * LAYER + TABLE) * 2 / 25e9, rtol=1e-9)
    # Of the layers' reduction lies behind the last B what does not fit under 11 of its layers, and at least a twelfth.
    layer, ring = by_hand("a100-80gb", tokens=1024)["backward"], 3e-5 + 3 / 4 * 12 * LAYER * 4 / 25e9
    left = max(ring - 11 * layer, ring / 12)
    assert ring / 12 < left < ring
    np.testing.assert_allclose(step.reduce, left + 3e-5 + 3 / 4 * TABLE * 4 / 25e9, rtol=1e-9)


@pytest.mark.parametrize("shard", ["weights", "gradients"])
def test_groups_exchange_layers_inside_and_shards_once_between_them(shard):
    """Two groups of two hosts: F and B wait as they do on two hosts alone."""
    c = Candidate(4, 1, 1, 1, 3, "eager_1f1b", (12,), shard=shard, shard_group=2)
    alone = dataclasses.replace(c, data=2, shard_group=0)
    steps = []
    for one in (c, alone, dataclasses.replace(c, shard_group=0)):
        some = at_half(one.data, *["a100-80gb"] * one.data)
        hosts = np.arange(one.data).reshape(1, one.data, 1)
        steps.append(Problem(some, MODEL, one).step(link_seconds.fabric(some), hosts))
    groups, two, four = steps
    parameters = 12 * LAYER + TABLE
    np.testing.assert_allclose(groups.finish - groups.gather, two.finish - two.gather, rtol=1e-9)
    assert (four.finish - four.gather > groups.finish - groups.gather).all()
    if shard == "weights":
        np.testing.assert_allclose(groups.gather, 1e-5 + parameters / 2 / 2 * 2 / 25e9, rtol=1e-9)
        assert not four.gather.any()
    else:
        np.testing.assert_allclose(groups.gather, four.gather, rtol=1e-9)
    # Nothing lies over what follows the last B.
    np.testing.assert_allclose(groups.reduce, 2e-5 + parameters / 2 / 2 * 4 / 25e9, rtol=1e-9)
    assert not four.reduce.any() and groups.optimizer == four.optimizer


def test_a_stage_that_is_done_before_the_last_row_hides_nothing_in_its_own_op():
    """Stage 1 of two ends one B earlier; in bfloat16 half the bytes travel."""
    some = at_half(4, *["a100-80gb"] * 4)
    c = Candidate(2, 2, 1, 1, 4, "eager_1f1b", (6, 6))
    steps = [
        Problem(some, MODEL, dataclasses.replace(c, reduce_dtype=dtype)).step(
            link_seconds.fabric(some), np.array([[[0, 1], [2, 3]]])
        )
        for dtype in ("float32", "bfloat16")
    ]
    for step, size in zip(steps, (4, 2)):
        swap = 1e-5 + TABLE * 4 / 2 / 25e9
        reduction = 2 * 1e-5 + (6 * LAYER + TABLE) * size / 2 / 25e9
        np.testing.assert_allclose(step.reduce[0, 1], reduction + swap, rtol=1e-9)
        assert step.finish[0, 0] - step.finish[0, 1] >= 6 * by_hand("a100-80gb", tokens=1024)["backward"]
        assert step.reduce[0, 0] < step.reduce[0, 1]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_many_at_once_are_each_by_itself(candidate):
    some = cluster()
    fabric, hosts = link_seconds.fabric(some), placements(6, candidate.data, candidate.pipe, 4 // candidate.tensor)
    problem = Problem(some, MODEL, candidate)
    together = problem.step(fabric, hosts).total
    np.testing.assert_allclose(together, [problem.step(fabric, h[None]).total[0] for h in hosts])
    others = [Problem(some, MODEL, c) for c in CANDIDATES]
    where = [placements(2, c.data, c.pipe, 4 // c.tensor, seed=1) for c in CANDIDATES]
    batch = [(link_seconds.paths(fabric, h, c.tensor), p.kind_of_host[h]) for c, p, h in zip(CANDIDATES, others, where)]
    for problem, h, step in zip(others, where, step_time.steps(others, batch)):
        np.testing.assert_allclose(step.total, problem.step(fabric, h).total)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_relabelling_hosts_changes_nothing(candidate):
    some = cluster(device=["a100-80gb", "h100", "a100-80gb", "h100"])
    order = np.array([2, 0, 3, 1])
    other, new_of = reordered(some, order), np.argsort(order)
    hosts = placements(4, candidate.data, candidate.pipe, 4 // candidate.tensor)
    here = Problem(some, MODEL, candidate).step(link_seconds.fabric(some), hosts).total
    there = Problem(other, MODEL, candidate).step(link_seconds.fabric(other), new_of[hosts]).total
    np.testing.assert_allclose(there, here, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(CANDIDATES), st.integers(0, 10**6))
def test_no_link_that_gets_faster_makes_a_step_slower(candidate, seed):
    some, rng = cluster(seed=seed), np.random.default_rng(seed)
    hosts = placements(3, candidate.data, candidate.pipe, 4 // candidate.tensor, seed)
    samples = some.samples.copy()
    samples[0, rng.integers(4), rng.integers(4)] *= 3
    faster = dataclasses.replace(some, samples=samples)
    total = lambda c: Problem(c, MODEL, candidate).step(link_seconds.fabric(c), hosts).total  # noqa: E731
    assert (total(faster) <= total(some) * (1 + 1e-12)).all()


def test_compression_over_data_takes_the_stages_that_end_the_step():
    slow = cluster(
        4, 4, seed=None, links={"inside": {"alpha": 0, "bandwidth": 3e11}, "between": {"alpha": 0, "bandwidth": 2e9}}
    )
    c = Candidate(4, 4, 1, 1, 4, "eager_1f1b", (3, 3, 3, 3))
    problem, packed = Problem(slow, MODEL, c), Problem(slow, MODEL, dataclasses.replace(c, data_rank=32))
    hosts = host_order(c, 4)
    dense, small = (p.step(link_seconds.fabric(slow), hosts) for p in (problem, packed))
    assert small.compressed.any() and not dense.compressed.any()
    assert small.total < dense.total
    fast = cluster(
        4, 4, seed=None, links={"inside": {"alpha": 0, "bandwidth": 3e13}, "between": {"alpha": 0, "bandwidth": 2e13}}
    )
    step = Problem(fast, MODEL, dataclasses.replace(c, data_rank=32)).step(link_seconds.fabric(fast), hosts)
    assert not step.compressed.any()


SLOW = halved(
    cluster(
        4, 4, seed=None, links={"inside": {"alpha": 0, "bandwidth": 3e11}, "between": {"alpha": 0, "bandwidth": 2e9}}
    )
)
COMPRESSED = Candidate(4, 4, 1, 1, 4, "eager_1f1b", (12,) * 4, data_rank=32)


@pytest.mark.parametrize(("layers", "loop"), [(12, True), (9, True), (8, False), (3, False)])
def test_factors_of_layers_in_a_loop_are_reduced_after_it(layers, loop):
    """Those of unrolled layers travel under the last op's other layers; "auto" loops from 9 layers on."""
    hosts, found = host_order(COMPRESSED, 4), {}
    for scan in ("on", "off", "auto"):
        c = dataclasses.replace(COMPRESSED, counts=(layers,) * 4, scan_layers=scan)
        found[scan] = Problem(SLOW, MODEL, c).step(link_seconds.fabric(SLOW), hosts)
        assert found[scan].compressed[0, 0]
    # Factors of rank 32 have 16 H rows in a layer, 13 H numbers go as they are, and four stages share a host's NIC.
    factors = 2 * 3 / 4 * (32 * 16 + 13) * 1024 * 4 * 4 / 2e9
    backward = by_hand("a100-80gb", tokens=1024)["backward"]
    assert backward < factors
    hidden = found["on"].reduce[0, 0] - found["off"].reduce[0, 0]
    np.testing.assert_allclose(hidden, (layers - 1) * backward, rtol=1e-9)
    assert found["auto"].total == found["on" if loop else "off"].total
    assert found["on"].total > found["off"].total


@pytest.mark.parametrize("scan", ["on", "off", "auto"])
def test_splits_at_once_are_each_by_itself(scan):
    """Some have loops with one setting and none with another."""
    c, fabric = dataclasses.replace(COMPRESSED, scan_layers=scan), link_seconds.fabric(SLOW)
    problem, hosts = Problem(SLOW, MODEL, c), host_order(c, 4)
    splits = [(12, 12, 12, 12), (12, 9, 9, 12), (12, 1, 12, 12), (3, 3, 3, 3), (3, 1, 3, 3)]
    together = step_time.of_splits(problem, splits, problem.paths(fabric, hosts), problem.kind_of_host[hosts])
    alone = [Problem(SLOW, MODEL, dataclasses.replace(c, counts=counts)).step(fabric, hosts).total for counts in splits]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_a_slower_kind_of_device_slows_the_step_by_its_compute():
    """The last stage, which has the head, computes all the time after its first message."""
    c, hosts = Candidate(1, 2, 1, 1, 40, "eager_1f1b", (6, 6)), np.array([[[0, 1]]])

    def total(*kinds: str) -> float:
        some = at_half(2, *kinds)
        return float(Problem(some, MODEL, c).step(link_seconds.fabric(some), hosts).total[0])

    def path(*kinds: str) -> float:
        first, last = (by_hand(kind, tokens=1024) for kind in kinds)
        whole = first["forward"] + first["backward"]
        steady = 40 * (6 * (last["forward"] + last["backward"]) + last["head"])
        messages, swap = 2 * (1e-5 + 1024 * 1024 * 2 / 25e9), 1e-5 + 4 * TABLE / 25e9
        update = (6 * LAYER + TABLE) * max(first["optimizer"], last["optimizer"])
        return 6 * whole + first["embedding"] + messages + steady + swap + update

    for kind in RATES:
        assert total(kind, kind) == pytest.approx(path(kind, kind), rel=1e-9)
    # The first stage waits for the last one, so of its own speed only one F and one B count.
    assert path("h100", "a100-80gb") <= total("h100", "a100-80gb") <= path("a100-80gb", "a100-80gb")
    assert path("h100", "h100") < 0.5 * path("h100", "a100-80gb")


PROFILED = {
    "kind": "cpu",
    "tensor": 1,
    "micro_batch": 2,
    "save": "dots",
    "hidden": 1024,
    "heads": 16,
    "sequence": 1024,
    "vocab": MODEL.padded_vocab,
    "dtype": "bfloat16",
    "forward": 1.0,
    "backward": 2.0,
    "head": 0.5,
    "embedding": 0.1,
    "optimizer": 1e-9,
}


def test_the_source_of_compute_is_told_of_the_devices_that_lack_a_profile():
    assert costs.source(cluster(2, 1)).startswith("data sheet at up to 70% of peak FLOP/s and 80% of memory")
    kinds = ["a100-80gb", "h100"]
    some = costs.source(cluster(2, 1, device=kinds, compute=[PROFILED | {"kind": "a100-80gb"}]))
    assert some.startswith("compute profile of a100-80gb; of the others data sheet at up to 61% of peak FLOP/s and")
    assert costs.source(cluster(2, 1, device="rtx4090")).startswith("data sheet at up to 65% of peak FLOP/s (assumed)")


def test_a_profile_counts_before_the_data_sheet():
    row = PROFILED
    twice = row | {"micro_batch": 4, "forward": 1.8, "backward": 3.6}
    lab: Cluster = cluster(2, 1, device="cpu", memory=1e9, compute=[twice, row])
    at = lambda b, **model: costs.layer(lab, "cpu", dataclasses.replace(MODEL, **model), UNSPLIT, b, "dots")  # noqa: E731
    assert (at(2).forward, at(4).forward) == (1.0, 1.8)
    assert at(3).forward == pytest.approx(1.4)
    assert at(8).backward == pytest.approx(3.6 + 4 * 0.8)
    wider = at(2, hidden=2048, heads=32).forward
    assert 2.8 < wider < 4.2  # four times the products, twice the passes over memory and over the scores
    assert costs.layer(lab, "cpu", MODEL, UNSPLIT, 2, "layer_inputs").backward == pytest.approx(3.0, rel=0.25)
    assert not lab.overlaps

    # The backward's parts are the data sheet's shares of it, or the measured ones.
    shared = at(2)
    assert 2.0 < shared.backward_input + shared.backward_weights < 2.6
    parts = {"backward_input": 1.5, "backward_weights": 0.9}
    lab = cluster(2, 1, device="cpu", memory=1e9, compute=[row | parts])
    assert (at(2).backward, at(2).backward_input, at(2).backward_weights) == (2.0, 1.5, 0.9)
    # W has four times the products and twice the passes, and nothing of attention.
    assert wider < at(2, hidden=2048, heads=32).backward_weights / 0.9 < 4.0
