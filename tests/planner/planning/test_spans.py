"""Sequences that devices of several hosts share: their seconds by hand, the search for them, and their plans."""

import dataclasses
import itertools

import numpy as np
import pytest

import planner
from paxtrain.config import CONTEXT_FORMS, ModelConfig, from_dict
from paxtrain.config.axes import layer_sizes
from paxtrain.errors import UserError
from planner.cluster.cluster import merged
from planner.cost import compute
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement.host_rings import host_rings
from planner.planning.spans import search_over
from planner.search.budget import Budget
from planner.search.search import Options, Search
from planner.search.space import Choices
from tests.planner.examples import cluster
from tests.planner.placement.test_host_rings import partitions

LONG = ModelConfig(
    family="llama",
    vocab_size=4096,
    layers=4,
    hidden=1024,
    heads=16,
    kv_heads=16,
    intermediate=4096,
    sequence=65536,
    dtype="bfloat16",
)
CHOICES = Choices(
    schedules=("1f1b",), saves=("dots",), shards=("optimizer",), micro_batch=(1,), backward=(), data_ranks=()
)
KEYS = 65536 // 8 * 1024 * 2  # bytes of the keys that one device of eight has, or of its values


def two_hosts(rate: float, latency: float = 0.0, nics: int = 1):
    """Return two hosts of 8 devices as one, whose links between them have some rate and latency."""
    made = cluster(2, 8, seed=None, nics=nics)
    apart = ~np.eye(2, dtype=bool)
    links = {"samples": np.where(apart, rate, made.samples), "alpha": np.where(apart, latency, made.alpha)}
    return merged(dataclasses.replace(made, **links), 2)


def forward(some, mesh: dict[str, int], form: str) -> float:
    return compute.layer(some, some.kinds[0], LONG, layer_sizes(mesh, form), 1, "residuals").forward


# Bytes on a link between hosts that is so slow that all but a constant is exposed. 2 x 8 devices have a ring over all,
# or two side by side if tensor splits heads, which share one NIC, but not two. With `heads` 8 of 16 parts of queries,
# keys, values and outputs of 8 devices leave by the NIC, half of a sixteenth of the tokens each.
CASES = [
    ("ring", {"context": 16}, 1, 15 * 2 * KEYS / 2),
    ("ring", {"context": 8, "tensor": 2}, 1, 7 * 2 * KEYS / 2 * 2),
    ("ring", {"context": 8, "tensor": 2}, 2, 7 * 2 * KEYS / 2),
    ("gather", {"context": 16}, 1, 15 * 2 * KEYS / 2),
    ("gather", {"context": 8, "tensor": 2}, 1, 7 * 2 * KEYS / 2 * 2),
    ("heads", {"context": 4, "tensor": 4}, 1, 4 * (KEYS * 2 / 4) / 2 * 8),
    ("heads", {"context": 4, "tensor": 4}, 4, 4 * (KEYS * 2 / 4) / 2 * 2),
]


@pytest.mark.parametrize(("form", "mesh", "nics", "sent"), CASES)
def test_seconds_between_hosts_are_those_of_the_slowest_hop(form, mesh, nics, sent):
    slow, slower = (forward(two_hosts(rate, nics=nics), mesh, form) for rate in (2e6, 1e6))
    assert slower - slow == pytest.approx(sent * (1e-6 - 0.5e-6), rel=1e-9)
    hops = {"ring": 2 * (mesh["context"] - 1), "gather": 2 * (mesh["context"] - 1), "heads": 4 * 2}
    late = forward(two_hosts(1e6, latency=1.0, nics=nics), mesh, form)
    assert late - slower == pytest.approx(hops[form] * (1 - 3e-6 * (form != "heads")), rel=1e-9)  # less those inside


def test_tensor_groups_inside_hosts_do_not_wait_for_the_links_between_them():
    """Their all-reduces take as long on links that are a millionth as fast, under which the ring alone takes longer."""
    mesh = {"context": 2, "tensor": 8}
    slow, slower = (forward(two_hosts(rate), mesh, "ring") for rate in (2e6, 1e6))
    turn = 2 * KEYS * 8 / 2 / 8 * 8  # keys and values of half of the tokens, of an eighth of the heads; eight rings
    assert slower - slow == pytest.approx(turn * (1e-6 - 0.5e-6), rel=1e-9)


@pytest.mark.parametrize(("shard", "ended", "waited"), [("optimizer", 6, 0), ("gradients", 2, 4), ("weights", 0, 8)])
def test_gradients_are_summed_and_weights_gathered_between_hosts(shard, ended, waited):
    """A ring of 16 sends 15/16 of a parameter's bytes: 4 as it is summed, 2 as it is gathered, once or in F and B."""

    def seconds(rate: float, shard: str) -> tuple[Problem, float]:
        some = two_hosts(rate)
        problem = Problem(some, LONG, Candidate(1, 1, 1, 1, 3, "1f1b", (4,), shard=shard, others=(16,)))
        problem.overlap = False
        return problem, problem.step(fabric(some), np.zeros((1, 1, 1), int)).finish[0, 0]

    (problem, slow), (_, dense) = seconds(1e3, shard), seconds(1e3, "optimizer")
    sent = (problem.layer_parameters + problem.embedding_parameters) * 15 / 16
    assert problem.sums[0] == pytest.approx(sent * ended / 1e3, rel=1e-6)
    assert slow - dense == pytest.approx(3 * sent * waited / 1e3, rel=1e-6)


def make(some, choices) -> Search:
    return Search(some, LONG, 8, choices, Budget(margin=False, usable=1e6), Options(uneven=False))


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_of_all_pairs_of_hosts(seed):
    """Each mesh with context=4 on four hosts of two devices, each way to pair the hosts, and each placement."""
    some, best = cluster(4, 2, seed), np.inf
    for (a, b), (c, d) in partitions([0, 1, 2, 3], 2):
        two = merged(some, 2, ((a, b), (c, d))), merged(some, 2, ((a, b), (d, c)))
        for data, pipe in ((2, 1), (1, 2)):
            plain = Candidate(data, pipe, 1, 1, 8 // data, "1f1b", (4 // pipe,) * pipe, others=(4,))
            for form, one in itertools.product(CONTEXT_FORMS, two):
                problem = Problem(one, LONG, dataclasses.replace(plain, context_form=form))
                where = np.array([list(order) for order in itertools.permutations(range(2))]).reshape(-1, data, pipe)
                best = min(best, problem.step(fabric(one), where).total.min())
    asked = dataclasses.replace(CHOICES, others=(("context", (4,)),), tensor=(1,))
    found = search_over(some, asked, make)
    assert found.cluster.parts is some and set(map(len, found.cluster.blocks)) == {2}
    assert best * (1 - 1e-9) <= found.run(top=1, placed=1).ranked[0].seconds <= best * 1.01


def test_sizes_that_are_asked_for_are_tried_on_as_many_hosts_as_are_quickest():
    """context=4 with tensor=2 fills all four hosts, with tensor=1 two of them."""
    some, seconds = cluster(4, 2), {}
    asked = dataclasses.replace(CHOICES, others=(("context", (4,)),))
    for together, tensor in ((2, 1), (4, 2)):
        one = make(merged(some, together, host_rings(some, together)), dataclasses.replace(asked, tensor=(tensor,)))
        seconds[together] = one.run(top=1, placed=1).ranked[0].seconds
    found = search_over(some, asked, make)
    assert found.run(top=1, placed=1).ranked[0].seconds == pytest.approx(min(seconds.values()))
    inside = search_over(some, dataclasses.replace(CHOICES, others=(("context", (2,)),)), make)
    assert inside.cluster is some
    both = search_over(some, dataclasses.replace(CHOICES, others=(("context", (2, 4)),)), make)
    least = inside.run(top=1, placed=1).ranked[0].seconds
    assert both.run(top=1, placed=1).ranked[0].seconds == pytest.approx(min(least, *seconds.values()))


def test_no_more_hosts_are_tried_where_a_host_is_enough_or_nothing_would_help():
    tried = []

    def counted(some, choices) -> Search:
        tried.append(some)
        return make(some, choices)

    some = cluster(4, 2)
    assert search_over(some, CHOICES, counted).cluster is some and tried == [some]
    with pytest.raises(UserError, match=r"--context=3 "):
        search_over(some, dataclasses.replace(CHOICES, others=(("context", (3,)),)), counted)
    short = dataclasses.replace(LONG, sequence=1024)
    full = search_over(
        some, CHOICES, lambda one, among: Search(one, short, 8, among, Budget(usable=1e-4), Options(uneven=False))
    )
    with pytest.raises(UserError, match="no configuration fits"):
        full.require_one()


def test_a_plan_of_sequences_that_no_host_holds_has_them_over_two():
    """Only a sixteenth of a sequence fits; the plan's devices are numbered by the hosts of the file, not by rings."""
    model = dataclasses.replace(LONG, sequence=2**20, vocab_size=163840)
    values = from_dict({"model": dataclasses.asdict(model), "batch": {"global_batch": 4, "micro_batch": 1}})
    rack = np.arange(4) % 2
    some = cluster(4, 8, seed=None)
    rates = np.where(rack[:, None] == rack, 25e9, 2.5e9)
    np.fill_diagonal(rates, 300e9)
    some = dataclasses.replace(some, samples=rates[None])
    options = planner.PlanOptions(
        schedules=("1f1b",),
        saves=("layer_inputs",),
        tensor=(1,),
        nearby=False,
        top=3,
        placed=1,
        oracle="no",
        memory_margin=False,
    )
    found = planner.plan(values, some, options)
    chosen = found.ranked[0].candidate
    assert (chosen.shared, chosen.data) == (16, 2)
    order = np.array(found.plan.device_order).reshape(2, 16)
    assert sorted(order.ravel().tolist()) == list(range(32))
    assert sorted(set(map(tuple, (order // 8).tolist()))) == [(0,) * 8 + (2,) * 8, (1,) * 8 + (3,) * 8]
    assert "4 hosts x 8 a100-80gb" in found.text()
    with pytest.raises(UserError, match="no configuration fits"):
        planner.plan(values, some, dataclasses.replace(options, others=(("context", (8,)),)))
