"""A simulated configuration is the candidate that the search would evaluate."""

import dataclasses
import math

import numpy as np
import pytest

import compress
import paxtrain
import planner
from compress.codecs.quantised import QuantisedBlocks
from planner.cost.candidate import host_order
from planner.cost.link_seconds import fabric, paths
from planner.cost.simulate import candidate_of_config, ideal_step
from planner.cost.step_time import Problem
from tests.planner.examples import cluster
from tests.small import trainer

SMALL = {"model.layers": 8, "model.hidden": 64, "model.heads": 4, "mesh.pipe": 4, "mesh.tensor": 1, "mesh.data": 2}


@pytest.mark.parametrize("changes", [{}, {"compress.backward.messages": "epilogue", "compress.data.stages": "all"}])
def test_it_is_the_problems_step(changes):
    config, some = paxtrain.load_config("tiny", SMALL | changes), cluster(2, 4)
    step = planner.simulate(config, some)
    candidate = planner.Candidate(
        2,
        4,
        1,
        4,
        4,
        "eager_1f1b",
        (2, 2, 2, 2),
        backward=config.compress.backward.messages,
        backward_rank=config.compress.backward.rank,
        data_rank=config.compress.data.rank if changes else 0,
    )
    expected = Problem(some, config.model, candidate).step(fabric(some), host_order(candidate, 4))
    assert step.seconds == expected.total[0] > 0
    np.testing.assert_array_equal(step.finish, expected.finish[0])
    np.testing.assert_array_equal(step.hosts, host_order(candidate, 4)[0])
    assert step.gather.shape == step.reduce.shape == step.compressed.shape == (4,)


CODECS = {"compress.backward.codec": "int8", "compress.data.codec": "int4"}


def test_codecs_are_simulated_by_what_they_declare():
    """The bytes of a message are those that the trainer's codec sends; slow links gain as much as they shrink."""
    some = cluster(2, 4, seed=None)
    slow = dataclasses.replace(some, samples=some.samples / 1e5)
    config = paxtrain.load_config("tiny", SMALL | CODECS)
    candidate = candidate_of_config(config)
    sent = compress.wire_bytes(QuantisedBlocks(8), (4, 128, 64), "float32")
    assert Problem(slow, config.model, candidate).packed == sent == 4 * 128 * 64 + 2 * 4 * 128
    apart = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])
    dense, coded = (planner.simulate(paxtrain.load_config("tiny", SMALL | c), slow, apart) for c in ({}, CODECS))
    assert coded.compressed.any() and not dense.compressed.any()
    assert coded.seconds < 0.75 * dense.seconds
    only = {"compress.backward.codec": "int8"}
    assert coded.seconds < planner.simulate(paxtrain.load_config("tiny", SMALL | only), slow, apart).seconds


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"compress.forward.codec": "int8"}, 4 * 128 * 64 + 2 * 4 * 128),  # a scale for 64 numbers
        ({"compress.forward.messages": "all", "compress.forward.rank": 4}, 4 * (4 * 128 + 64) * 4),
    ],
)
def test_compressed_activations_are_smaller_messages_and_work_of_forwards(changes, sent):
    """On slow links a step gains what messages shrink; on free ones it loses the codec's passes."""
    some = cluster(2, 4, seed=None)
    slow = dataclasses.replace(some, samples=some.samples / 1e5)
    free = dataclasses.replace(some, samples=some.samples * 1e9, alpha=some.alpha * 0)
    config, dense = (paxtrain.load_config("tiny", SMALL | c) for c in (changes, {}))
    apart = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])
    problem = Problem(slow, config.model, candidate_of_config(config))
    assert problem.activation == sent and problem.message == 4 * 128 * 64 * 4
    links = problem.links(paths(fabric(slow), apart[None], 1))
    bare = Problem(slow, dense.model, candidate_of_config(dense))
    whole = bare.links(paths(fabric(slow), apart[None], 1))
    shrinks = links.activation[0, :, :-1] / whole.activation[0, :, :-1]
    np.testing.assert_allclose(shrinks, sent / problem.message, rtol=1e-2)  # beside the latency
    assert planner.simulate(config, slow, apart).seconds < planner.simulate(dense, slow, apart).seconds
    assert planner.simulate(config, free, apart).seconds > planner.simulate(dense, free, apart).seconds
    # The first stage only encodes, the last one only decodes, those between do both.
    kinds = bare.kind_of_host[apart][None]
    more = problem.seconds(links, kinds).forward - bare.seconds(whole, kinds).forward
    np.testing.assert_allclose(more[:, 1:-1], (more[:, 0] + more[:, -1])[:, None] * np.ones((1, 2)), rtol=1e-9)
    assert (more > 0).all()


def test_weights_are_gathered_in_the_bytes_of_their_codec():
    some = cluster(2, 4, seed=None)
    slow = dataclasses.replace(some, samples=some.samples / 1e5)
    apart = np.array([[0, 0, 0, 0], [1, 1, 1, 1]])
    dense, coded, same = (
        planner.simulate(paxtrain.load_config("tiny", SMALL | c), slow, apart)
        for c in ({}, {"compress.weights.codec": "int8"}, {"compress.weights.codec": "identity"})
    )
    np.testing.assert_allclose(same.gather, dense.gather, rtol=1e-12)
    assert (coded.gather[1:-1] < 0.3 * dense.gather[1:-1]).all()  # float32 in 8 bits, beside norms and biases
    assert coded.seconds < dense.seconds


def test_an_identity_codec_over_data_takes_no_less_than_the_reduction():
    """Its bytes are those of the reduce-scatter; norms and biases are a message of their own, and the codec works."""
    some = cluster(2, 4, seed=None)
    identity = SMALL | {"compress.data.codec": "identity", "compress.min_ratio": 0.0}
    problems = [
        Problem(some, c.model, candidate_of_config(c))
        for c in (paxtrain.load_config("tiny", SMALL), paxtrain.load_config("tiny", identity))
    ]
    hosts = host_order(problems[0].candidate, 4)
    links = problems[1].links(paths(fabric(some), hosts, 1))
    dense, coded, work, _ = problems[1].reductions(links, problems[1].kind_of_host[hosts])
    np.testing.assert_allclose(coded, dense + links.scatter_latency, rtol=1e-9)
    assert (work > 0).all()


SITES = {"mesh.data": 4, "mesh.pipe": 2, "compress.data.codec": "int8"}


@pytest.mark.parametrize("zero1", [True, False])
def test_groups_inside_sites_send_a_share_between_them(zero1):
    """Two sites of two hosts, with a thousandth of the rate between them; each host has both stages of a data rank."""
    some = cluster(4, 2, seed=None)
    apart = np.abs(np.subtract.outer(np.arange(4) // 2, np.arange(4) // 2)) == 1
    slow = dataclasses.replace(some, samples=np.where(apart, some.samples / 1e3, some.samples))
    values = SMALL | SITES | {"mesh.shard": paxtrain.MeshConfig.of_zero1(zero1)}
    config = paxtrain.load_config("tiny", values | {"compress.data.inside": 2})
    flat, groups, whole, dense = (
        planner.simulate(paxtrain.load_config("tiny", values | changes), slow)
        for changes in ({}, {"compress.data.inside": 2}, {"compress.data.inside": 4}, {"compress.data.codec": ""})
    )
    assert whole.seconds == dense.seconds and not whole.compressed.any()
    assert groups.compressed.all() and groups.seconds < flat.seconds < dense.seconds
    problem = Problem(slow, config.model, candidate_of_config(config))
    hosts = host_order(problem.candidate, 2)
    links = problem.links(problem.paths(fabric(slow), hosts))
    _, small, _, _ = problem.reductions(links, problem.kind_of_host[hosts])
    kernels = 4 * 12 * 64 * 64  # of the four layers of a stage
    near = 2 / some.samples[0, 0, 1]  # seconds per byte: both stages share the NIC
    far = 2 / slow.samples[0, 0, 3]
    inside, between = 1e-5 + kernels / 2 * 4 * near, 1e-5 + kernels / 4 * (1 + 2 / 64) * far
    if not zero1:  # the mean's messages, and the means
        inside, between = 2 * inside, 2 * between
    rest = 4 * (13 * 64) * 4 * 3 / 4 * far * (1 if zero1 else 2) + (1 if zero1 else 2) * 3e-5
    np.testing.assert_allclose(small, inside + between + rest, rtol=1e-6)


def test_low_rank_between_groups_is_of_a_ranks_part():
    some = cluster(4, 2, seed=None)
    low = {"mesh.data": 4, "mesh.pipe": 2, "compress.data.stages": "all", "compress.data.rank": 4}
    problems = [
        Problem(some, c.model, candidate_of_config(c))
        for c in (paxtrain.load_config("tiny", SMALL | low | {"compress.data.inside": k}) for k in (1, 2))
    ]
    rest = 4 * (13 * 64) * 4  # biases and norms of four layers
    shapes = ((64, 192), (64, 64), (64, 256), (256, 64))
    assert problems[0].factor_bytes == 4 * sum(4 * (n + k) for n, k in shapes) * 4 + rest
    assert problems[1].factor_bytes == 4 * sum(4 * (n // 2 + k) for n, k in shapes) * 4


@pytest.mark.parametrize("zero1", [True, False])
def test_kernels_that_would_not_shrink_enough_are_reduced_as_they_are(zero1):
    """The trainer says which kernels these are. Links have 25 GB/s and 10 us, and a kernel starts in 5 us."""
    low = {"compress.data.stages": "all", "compress.data.rank": 4, "compress.min_ratio": 10.0}
    config = paxtrain.load_config(
        "tiny", SMALL | low | {"mesh.data": 4, "mesh.pipe": 1, "mesh.shard": paxtrain.MeshConfig.of_zero1(zero1)}
    )
    compression = trainer(config).compression
    shapes = {path: (shape[0], math.prod(shape[1:])) for path, shape in compression.kernels.items()}
    taken = [shapes.pop(path) for path in compression.compressed_kernels(4)]
    assert sorted(taken) == [(64, 192), (64, 256), (256, 64)] and list(shapes.values()) == [(64, 64)]
    problem, layers = Problem(cluster(4, 1, seed=None), config.model, candidate_of_config(config)), 8
    links = problem.links(problem.paths(fabric(problem.cluster), np.arange(4).reshape(1, 4, 1)))
    _, small, work, _ = problem.reductions(links, np.zeros((1, 4, 1), int))
    latency, per_byte = 3 * 1e-5, 3 / 4 / 25e9  # of a turn of four ranks
    vectors = 192 + 64 + 256 + 64 + 4 * 64  # biases of kernels, and of two norms scales and biases
    factors = latency + layers * (sum(4 * (n + k) for n, k in taken) + vectors) * 4 * per_byte
    dense = latency + layers * 64 * 64 * 4 * per_byte
    np.testing.assert_allclose(small, 2 * (factors + latency) + (1 if zero1 else 2) * dense, rtol=1e-12)
    passes = 7 * 4 * (sum(n * k for n, k in taken) + vectors) * problem.pass_per_byte[0]
    np.testing.assert_allclose(work, layers * (passes + 3 * 12 * 5e-6), rtol=1e-12)


GROUPS = {"mesh.data": 4, "mesh.pipe": 2, "outer.groups": 2, "outer.every": 10}


def test_an_exchange_of_groups_counts_with_its_share_of_a_step():
    """Two sites of two hosts: inside of a site links are quick, between sites a thousandth of that."""
    some = cluster(4, 2, seed=None)
    apart = np.abs(np.subtract.outer(np.arange(4) // 2, np.arange(4) // 2)) == 1
    slow = dataclasses.replace(some, samples=np.where(apart, some.samples / 1e3, some.samples))
    config = paxtrain.load_config("tiny", SMALL | GROUPS)
    steps = {
        every: planner.simulate(paxtrain.load_config("tiny", SMALL | GROUPS | {"outer.every": every}), slow)
        for every in (1, 10, 500)
    }
    group = planner.simulate(config.of_group(), slow)
    assert steps[10].exchange == steps[1].exchange > 5 * group.seconds
    for every, step in steps.items():
        assert step.seconds == pytest.approx(group.seconds + step.exchange / every)
    # All devices send their part of the weights over the one slow link of their ring, half of it and back.
    held = 12.0 * 64 * 64 * 4  # kernels of the four layers of a stage, of which ZeRO-1 leaves a half
    least = 2 * 0.5 * (held / 2) * 4 / slow.samples[0].min()
    assert least < steps[1].exchange < 2.5 * least
    dense = planner.simulate(paxtrain.load_config("tiny", SMALL | {"mesh.data": 4, "mesh.pipe": 2}), slow)
    assert steps[500].seconds < 0.2 * dense.seconds
    coded = paxtrain.load_config("tiny", SMALL | GROUPS | {"compress.outer.codec": "int8"})
    assert 0.2 < planner.simulate(coded, slow).exchange / steps[10].exchange < 0.6  # the embedding goes as it is


def test_slow_links_between_the_stages_show():
    config, some = paxtrain.load_config("tiny", SMALL), cluster(2, 4, seed=None)
    apart = np.array([[0, 1, 0, 1], [0, 1, 0, 1]])
    slow = dataclasses.replace(some, samples=some.samples / 1000)
    assert planner.simulate(config, slow, apart).seconds > planner.simulate(config, slow).seconds


@pytest.mark.parametrize(
    ("changes", "hosts", "words"),
    [
        ({"mesh.tensor": 8, "mesh.pipe": 1, "mesh.data": 1, "model.heads": 8}, None, "does not divide the 4 devices"),
        ({"mesh.data": 8}, None, "the mesh has 32 devices, but the cluster 8"),
        ({}, np.zeros((4, 2)), "hosts must be an array"),
        ({}, np.full((2, 4), 2), "numbers below 2"),
        ({}, np.zeros((2, 4)), "more than the 4 devices of a host on one"),
    ],
)
def test_what_does_not_fit_is_said(changes, hosts, words):
    with pytest.raises(ValueError, match=words):
        planner.simulate(paxtrain.load_config("tiny", SMALL | changes), cluster(2, 4), hosts)


# --- As other trainers run it -----------------------------------------------------------------------------------------


def ideal(some, candidate, hosts=None):
    """Return schedule and seconds of a candidate's ideal step, in host order by default, and those simulated."""
    problem = Problem(some, paxtrain.load_config("tiny", SMALL).model, candidate)
    hosts = host_order(candidate, 4) if hosts is None else hosts[None]
    return *ideal_step(problem, fabric(some), hosts[0]), problem.step(fabric(some), hosts).total[0]


def test_without_messages_between_stages_the_ideal_step_is_the_simulated_one():
    schedule, seconds, simulated = ideal(cluster(2, 4), planner.Candidate(8, 1, 1, 4, 4, "gpipe", (8,)))
    assert schedule == "1f1b" and seconds == pytest.approx(simulated, rel=1e-12)


def test_the_ideal_step_waits_for_no_other_message():
    """On slow links rows wait for messages that the next op does not need; compressed ones are sent as they are."""
    some = cluster(2, 4, seed=None)
    slow = dataclasses.replace(some, samples=some.samples / 1000)
    plain = planner.Candidate(2, 4, 1, 4, 8, "1f1b", (2, 2, 2, 2))
    apart = np.array([[0, 1, 0, 1], [1, 0, 1, 0]])
    schedule, seconds, simulated = ideal(slow, plain, apart)
    assert schedule == "1f1b" and seconds < 0.95 * simulated
    other = dataclasses.replace(plain, schedule="eager_1f1b", backward="all", backward_rank=4, data_rank=4)
    assert ideal(slow, other, apart)[1] == seconds
    uneven = dataclasses.replace(plain, micro_batches=12, data_micro_batches=(12, 4), uneven_data=True)
    assert ideal(slow, uneven, apart)[1] == seconds
    chunked = dataclasses.replace(plain, schedule="interleaved_1f1b", chunks=2, counts=(1,) * 8)
    assert ideal(slow, chunked, apart)[0] == "interleaved_1f1b"


def test_the_ideal_step_of_equal_stages_on_fast_links_is_the_closed_form():
    """Narayanan et al. 2021: m micro-batches take m + (P-1) / v times F and B of a stage, with v chunks on it."""
    some = dataclasses.replace(cluster(2, 4, seed=None), alpha=np.zeros((2, 2)), samples=np.full((1, 2, 2), 1e30))
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2)):
        candidate = planner.Candidate(2, 4, 1, 4, 8, schedule, (2 // chunks,) * 4 * chunks, chunks)
        problem = Problem(some, paxtrain.load_config("tiny", SMALL).model, candidate)
        layer = problem.layer[0]
        stage = 2 * (layer.forward + layer.backward)
        _, seconds, _ = ideal(some, candidate)
        rest = layer.embedding + layer.head  # on the first and on the last stage
        optimizer = float(problem.step(fabric(some), host_order(candidate, 4)).optimizer[0])
        least = (8 + 3 / chunks) * stage + optimizer
        assert least < seconds <= least + 8 * rest + 1e-9
