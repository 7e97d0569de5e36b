"""Codecs of weights and gradients in shards over data: seconds and bytes by hand, states, and what is chosen."""

import dataclasses

import jax
import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.parallel.compression.settled import Compression
from paxtrain.parallel.layout import Layout
from planner.cost import link_seconds
from planner.cost.candidate import Candidate
from planner.cost.coded import Coded, coded
from planner.cost.simulate import candidate_of_config
from planner.cost.step_time import Problem, Step
from planner.memory import closed_form
from planner.report import traffic
from planner.search.enumeration import enumerate_candidates
from planner.search.space import CODED, Choices
from tests import small
from tests.compress_settings import compression
from tests.planner.cost.test_step_time import LAYER
from tests.planner.examples import MODEL, cluster
from tests.planner.report.reports import made_report

KERNELS, MATRICES, LAYERS, M = 12 * 1024**2, 4, 12, 3
LINK, PASS, LAUNCH = (
    1 / 25e9,
    1 / (0.8 * 2.03904e12),
    5e-6,
)  # seconds: of a byte, of a byte read or written, of a kernel
ENCODE, DECODE, LAUNCHES = 7.5, 1.25, 4 + 4  # of int4, as docs/codecs.md has them
INT4 = 1 / 2 + 2 / 64  # bytes of a number


def steps(c: Candidate, codecs: Coded) -> tuple[Step, Step]:
    """Return the steps of a candidate with all collectives exposed on links without latency: dense, and with codecs."""
    some = cluster(c.data, 1, seed=None)
    some = dataclasses.replace(some, alpha=np.zeros_like(some.alpha))
    hosts, found = np.arange(c.data).reshape(1, c.data, 1), []
    for one in (c, dataclasses.replace(c, coded=codecs, data_rank=CODED if codecs.data is not None else 0)):
        problem = Problem(some, MODEL, one)
        problem.overlap = False
        found.append(problem.step(link_seconds.fabric(some), hosts))
    return found[0], found[1]


def candidate(data: int, shard: str, group: int = 0) -> Candidate:
    return Candidate(data, 1, 1, 1, M, "1f1b", (LAYERS,), shard=shard, shard_group=group)


@pytest.mark.parametrize("shard", ["weights", "gradients"])
def test_each_micro_batch_sends_codes_and_takes_passes(shard):
    dense, mine = steps(candidate(2, shard), coded(compression(data_codec="int4")))
    fewer = KERNELS / 2 * (4 - INT4) * LINK
    work = (ENCODE + DECODE + 1) * 4 * LAYER * PASS + 2 * MATRICES * LAUNCHES * LAUNCH
    np.testing.assert_allclose(mine.finish - dense.finish, M * LAYERS * (work - fewer), rtol=1e-6)
    assert mine.compressed.all() and not mine.reduce.any()


def test_groups_with_fast_links_sum_inside_and_send_each_other_codes():
    """Four hosts alike: a group of two sums a half of what each has; half of that crosses as codes."""
    dense, mine = steps(candidate(4, "weights"), coded(compression(data_codec="int4", data_inside=2)))
    before, after = KERNELS * 3 / 4 * 4, KERNELS / 2 * 4 + KERNELS / 4 * INT4
    passes = 2 + ENCODE / 2 + 1 + (DECODE + 1) / 2
    work = passes * 4 * LAYER * PASS + MATRICES * (LAUNCHES + 2 * (4 + 2)) * LAUNCH
    change = (after - before) * LINK + work
    assert mine.compressed.all()
    np.testing.assert_allclose(mine.finish - dense.finish, M * LAYERS * change, rtol=5e-3)  # launches of groups


def test_between_groups_with_copies_codes_travel_once_a_step():
    dense, mine = steps(candidate(4, "weights", 2), coded(compression(data_codec="int4", data_inside=2)))
    np.testing.assert_allclose(mine.finish, dense.finish)
    fewer = LAYERS * KERNELS / 4 * (4 - INT4) * LINK
    work = LAYERS * ((ENCODE + DECODE + 1) / 2 * 4 * LAYER * PASS + 2 * MATRICES * LAUNCHES * LAUNCH)
    np.testing.assert_allclose(mine.reduce - dense.reduce, work - fewer, rtol=1e-6)


def test_weights_are_gathered_as_codes_in_f_and_in_b():
    dense, mine = steps(candidate(2, "weights"), coded(compression(weights_codec="int4")))
    fewer = KERNELS / 2 * (2 - INT4) * LINK
    work = (ENCODE / 2 + DECODE) * 2 * KERNELS * PASS + 2 * MATRICES * 4 * LAUNCH
    np.testing.assert_allclose(mine.finish - dense.finish, 2 * M * LAYERS * (work - fewer), rtol=1e-6)


@pytest.mark.parametrize(("group", "inside"), [(0, 1), (0, 2), (2, 2)])
def test_flows_have_the_bytes_of_codes(group, inside):
    """Four data ranks with a tensor group each on a host of its own; all that a step sends."""
    report = made_report(micro_batches=M, schedule="1f1b", pipe=1)
    codecs = coded(compression(data_codec="int4", data_inside=inside, weights_codec="int8"))
    c = dataclasses.replace(report.chosen.candidate, shard="weights", shard_group=group, coded=codecs, data_rank=CODED)
    chosen = dataclasses.replace(report.chosen, candidate=c)
    found = traffic.traffic(dataclasses.replace(report, chosen=chosen))
    p, shares = report.problem, (lambda n: (n - 1) / n)
    kernels, rest = sum(n * k for n, k in p.kernels), p.rest
    layers, table, item = c.slots, p.embedding_parameters, 2
    ranks, copies = group or 4, 4 // (group or 4)
    gathered = layers * (kernels * (1 + 2 / 64) + rest * item) + table * item
    weights = shares(ranks) * 2 * c.micro_batches * gathered
    weights += shares(copies) * (layers * (kernels + rest) + table) * item / ranks
    if group:
        gradients = shares(ranks) * c.micro_batches * 4 * (layers * (kernels + rest) + table)
        gradients += shares(copies) / ranks * (layers * (kernels * INT4 + rest * 4) + table * 4)
    else:
        sent = shares(inside) * 4 + shares(4 // inside) / inside * INT4
        gradients = c.micro_batches * (layers * (kernels * sent + shares(4) * rest * 4) + shares(4) * table * 4)
    devices = 4 * c.tensor
    assert found["weights over data"].sum() == pytest.approx(devices * weights, rel=1e-6)
    assert found["gradients over data"].sum() == pytest.approx(devices * gradients, rel=1e-6)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ((4, 1, 1), {}),
        ((4, 1, 1), {"data_inside": 2}),
        ((2, 2, 2), {}),
        ((4, 2, 1), {"data_inside": 2, "group": 2}),
        ((4, 1, 1), {"data_options": {"feedback": False}}),
    ],
    ids=str,
)
def test_states_have_the_bytes_of_the_trainers(mesh, changes):
    changes = {"data_codec": "int8", **changes}
    c = small.config(
        mesh,
        (2 * mesh[0], 1),
        model={"layers": 4},
        mesh={"shard": "weights", "shard_group": changes.pop("group", 0)},
        compress=changes,
    )
    state = jax.eval_shape(Compression(Layout(c)).init)["data"]
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / c.mesh.devices
    scans = c.pipeline.scans(c.stage_layers)
    copies = 1 if c.mesh.copies > 1 else 2 + scans  # see the next test
    assert float(closed_form.analytic(closed_form.of(c)).compression) == copies * held
    assert (held > 0) == ("data_options" not in changes)
    assert candidate_of_config(c).inside == c.compress.data.inside


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "copies"), [("off", 1), ("on", 2)])
def test_micro_batches_copy_the_states(scan, copies):
    """Beside those that a step begins with, by XLA's analysis: those of the next step, and of a loop their stack."""
    found = []
    for feedback in (True, False):
        c = small.config(
            (4, 1, 1),
            (16, 2),
            model={"layers": 8, "hidden": 128, "sequence": 8},
            mesh={"shard": "weights"},
            pipeline={"scan_layers": scan},
            compress={"data_codec": "int8", "data_options": {"feedback": feedback}},
        )
        found.append(small.trainer(c).compile_step().memory_analysis())
    held = found[0].argument_size_in_bytes - found[1].argument_size_in_bytes
    assert held == 8 * 12 * 128**2 * 4
    temporary = found[0].temp_size_in_bytes - found[1].temp_size_in_bytes
    assert temporary == pytest.approx(copies * held, rel=0.15)


def test_all_that_the_search_tries_is_accepted_by_the_trainer():
    codecs = coded(compression(data_codec="int4", data_inside=4))
    some = cluster(4, 4, seed=None)
    space = enumerate_candidates(some, MODEL, 32, Choices(backward=(), coded=codecs, pipe=(1,), tensor=(1,)))
    tried = {
        (str(shard), int(group), bool(rank))
        for shard, group, rank in zip(space.shard, space.shard_group, space.data_rank, strict=True)
    }
    assert {one for one in tried if one[1]} == {(s, 4, r) for s in ("2", "3") for r in (False, True)}
    assert {one for one in tried if not one[1]} == {(s, 0, r) for s in "0123" for r in (False, True)}
    other = coded(compression(data_codec="int4", data_inside=2))
    space = enumerate_candidates(some, MODEL, 32, Choices(backward=(), coded=other, pipe=(1,), tensor=(1,)))
    assert not (space.data_rank > 0)[space.shard_group > 0].any() and (space.shard_group > 0).any()


@pytest.mark.parametrize("inside", [1, 4])
def test_a_codec_is_chosen_for_shards_on_slow_links_and_none_on_fast_ones(inside):
    """The plan is the trainer's configuration, which is checked when it is made."""
    values = {"model.hidden": 1024, "model.heads": 8, "model.layers": 4, "batch.global_batch": 64}
    values |= {"compress.data.codec": "int4", "compress.data.inside": inside, "mesh.data": 4}
    config = paxtrain.load_config("tiny", values | {"batch.micro_batch": 1})
    options = planner.PlanOptions(shard=("weights",), pipe=(1,), tensor=(1,), compress=("data",))
    for slower, chosen in ((100.0, True), (0.01, False)):
        made = cluster(4, inside, seed=None)
        across = np.where(np.eye(4, dtype=bool), 1.0, slower)
        made = dataclasses.replace(made, samples=made.samples / across)
        plan = planner.plan(config, made, options).plan
        assert plan.mesh.shard == "weights"
        assert (plan.compress.data.chosen != "none") == chosen
        assert plan.mesh.shard_group == (inside if inside > 1 else 0)
        if chosen:
            assert plan.compress.data.codec == "int4" and plan.compress.data.inside == inside
