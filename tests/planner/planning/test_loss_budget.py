"""Codecs within a budget of loss: the choice against all combinations, simulated one by one, and its words."""

import dataclasses
import itertools

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config.options import OptionValues
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import LossProbe, ProbedCodec
from planner.planning import loss_budget
from tests.planner.examples import cluster

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000}
# By place and codec: the losses of two seeds. Eight bits cost little, four bits and low rank more.
SEEN = {
    ("backward", "int8", 0): (0.0010, 0.0012),
    ("backward", "lowrank", 4): (0.030, 0.034),
    ("forward", "int8", 0): (0.0016, 0.0024),
    ("forward", "int4", 0): (0.2, 0.22),
    ("data", "int8", 0): (-0.002, -0.001),
    ("data", "int4", 0): (0.004, 0.005),
}
BUDGETS = (0.0, 0.0015, 0.0045, 0.01, 0.05, 1.0)
OPTIONS = planner.PlanOptions(
    compress=("auto",),
    pipe=(2,),
    data=(2,),
    tensor=(1,),
    micro_batch=(2, 4),
    schedules=("1f1b", "eager_1f1b"),
    saves=("dots",),
    uneven=False,
    gain=0.0,
    memory_margin=False,
    nearby=False,
    top=1,
    placed=1,
    oracle="no",
)


def probe(seen=SEEN):
    codecs = tuple(ProbedCodec(place, codec, losses, rank) for (place, codec, rank), losses in seen.items())
    model = dataclasses.asdict(small().model)
    return LossProbe(model, (2, 2), 2, 50, 1024, (0, 1), (3.0, 3.1), codecs)


def small(changes=()):
    values = {f"model.{name}": value for name, value in MODEL.items()} | {"compress.min_ratio": 1.5}
    return paxtrain.load_config("tiny", values | dict(changes))


@pytest.fixture(scope="module")
def slow():
    """Return four hosts of one device whose links are alike, so that all placements are, and slow."""
    made = cluster(4, 1, seed=None)
    return dataclasses.replace(made, samples=made.samples / 2e3)


@pytest.fixture
def file(tmp_path):
    loss_probe_file.save(probe(), tmp_path / "probe.json")
    return str(tmp_path / "probe.json")


def planned(config, some, file, budget, **changes):
    options = dataclasses.replace(OPTIONS, probe=file, loss_budget=budget, **changes)
    return planner.plan(config, some, options)


@pytest.fixture(scope="module")
def simulated(slow):
    """Return (loss with its standard error, seconds of a step) of every combination, mesh and schedule."""
    places = [[None, *(key for key in SEEN if key[0] == place)] for place in ("backward", "forward", "data")]
    found = []
    for combination in itertools.product(*places):
        changes, losses = {}, []
        for key in filter(None, combination):
            place, codec, rank = key
            changes |= {f"compress.{place}.rank": rank} if rank else {f"compress.{place}.codec": codec}
            changes |= {f"compress.{place}.{'stages' if place == 'data' else 'messages'}": "all"}
            losses.append(np.array(SEEN[key]))
        mean = sum(max(x.mean(), 0) for x in losses)
        loss = mean + np.sqrt(sum(x.var(ddof=1) / len(x) for x in losses))
        kinds = ("all", "epilogue") if combination[0] else ("none",)
        for kind, schedule, micro_batch, zero1 in itertools.product(kinds, OPTIONS.schedules, (2, 4), (True, False)):
            mesh = {"mesh.data": 2, "mesh.pipe": 2, "mesh.tensor": 1, "mesh.shard": paxtrain.MeshConfig.of_zero1(zero1)}
            how = {"pipeline.schedule": schedule, "pipeline.save": "dots", "batch.micro_batch": micro_batch}
            kept = {} if kind == "none" else {"compress.backward.messages": kind}
            found.append((loss, planner.simulate(small(changes | mesh | how | kept), slow).seconds))
    return np.array(found)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_choice_is_the_quickest_of_all_combinations_within_the_budget(slow, simulated, file, budget):
    found = planned(small(), slow, file, budget)
    losses, seconds = simulated.T
    assert found.ranked[0].seconds == pytest.approx(seconds[losses <= budget].min(), rel=1e-9)
    config = found.plan.apply(paxtrain.config.to_dict(small()))  # what the plan says is what was predicted
    assert planner.simulate(config, slow).seconds == pytest.approx(found.ranked[0].seconds, rel=1e-9)


def test_more_budget_is_never_slower_and_none_is_dense(slow, file):
    plans = [planned(small(), slow, file, budget) for budget in BUDGETS]
    seconds = [found.ranked[0].seconds for found in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert len({round(x, 12) for x in seconds}) >= 4, "the budgets would lead to the same plan"
    dense = planner.plan(small(), slow, dataclasses.replace(OPTIONS, compress=()))
    assert seconds[0] == dense.ranked[0].seconds
    compress = plans[0].plan.compress
    assert {compress.at(place).chosen for place in ("backward", "forward", "data")} == {"none"}
    assert "nothing is compressed: no codec" in plans[0].plan.predicted["loss"]


def test_the_combinations_searched_cover_all_within_the_budget():
    made = probe()
    for budget in BUDGETS:
        searched = loss_budget.combinations(made, budget)
        places = [[(), *((one,) for one in made.at(place))] for place in ("backward", "forward", "data")]
        for some in (tuple(itertools.chain(*x)) for x in itertools.product(*places)):
            forward = {one for one in some if one.place == "forward"}
            within = loss_budget.estimate(some) <= budget
            over = [
                other
                for other in searched
                if set(some) <= set(other) and {one for one in other if one.place == "forward"} == forward
            ]
            assert bool(over) == within
        assert all(loss_budget.estimate(some) <= budget for some in searched)


def test_losses_add_up_with_their_noise():
    one, two = ProbedCodec("data", "int8", (0.01, 0.03)), ProbedCodec("backward", "int8", (-0.03, -0.01))
    assert (one.mean, one.noise) == (pytest.approx(0.02), pytest.approx(0.01))
    mean, noise = loss_probe_file.excess((one, two))
    assert mean == pytest.approx(0.02)  # chance below dense buys nothing elsewhere
    assert noise == pytest.approx(0.01 * np.sqrt(2))
    assert loss_probe_file.excess(()) == (0, 0)


def test_a_plan_says_what_the_probe_saw(slow, file):
    found = planned(small(), slow, file, 0.01)
    lost = found.plan.predicted["loss"]
    assert "(2 seeds, 50 steps) saw int8 of gradients between stages +0.11% ± 0.01%" in lost
    assert lost == found.json()["loss"] and not found.report.offers
    c = found.plan.compress
    assert (c.backward.codec, c.forward.codec, c.forward.messages) == ("int8", "int8", "all")


def test_what_is_compressed_beside_the_probes_codecs_is_told(slow, file):
    for budget, begin in ((0.0, "nothing else is compressed: no codec of"), (0.01, "the probe ")):
        found = planned(small({"compress.weights.codec": "int8"}), slow, file, budget, shard=("optimizer",))
        lost = found.plan.predicted["loss"]
        assert found.plan.compress.weights.codec == "int8" and lost.startswith(begin)
        assert "; not probed: int8 of gathered weights, as configured" in lost


def test_the_embeddings_codec_is_chosen_within_the_budget(slow, tmp_path):
    path = tmp_path / "probe.json"
    loss_probe_file.save(probe({("embedding", "int8", 0): (0.001, 0.002), ("data", "int8", 0): (0.2, 0.3)}), path)
    found, without = (planned(small(), slow, str(path), budget) for budget in (0.01, 0.0))
    assert (found.plan.compress.embedding.codec, found.plan.compress.embedding.sync) == ("int8", "auto")
    assert without.plan.compress.embedding.codec == "" and found.plan.compress.data.codec == ""
    assert found.ranked[0].seconds < without.ranked[0].seconds
    config = found.plan.apply(paxtrain.config.to_dict(small()))
    assert planner.simulate(config, slow).seconds == pytest.approx(found.ranked[0].seconds, rel=1e-9)
    assert "saw int8 of the embedding's gradients +0.15% ± 0.05%" in found.plan.predicted["loss"]
    with pytest.raises(paxtrain.UserError, match="of embedding must not be lowrank, which that place does not take"):
        probe({("embedding", "lowrank", 4): (0.0, 0.1)})


def test_options_of_a_codec_are_those_of_the_probe(slow, tmp_path):
    codec = ProbedCodec("data", "topk", (0.0, 0.001), 0, OptionValues({"share": 0.01}))
    loss_probe_file.save(dataclasses.replace(probe(), codecs=(codec,)), tmp_path / "probe.json")
    found = planned(small(), slow, str(tmp_path / "probe.json"), 0.01)
    assert (found.plan.compress.data.codec, found.plan.compress.data.options) == ("topk", {"share": 0.01})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress": ()}, "--probe=.* needs --compress=auto, which it decides, got --compress=none"),
        ({"compress": ("all",)}, "got --compress=all"),
        ({"loss_budget": -0.1}, "--loss_budget must be at least 0, got -0.1"),
        ({"loss_budget": float("nan")}, "--loss_budget must be a number, got nan"),
        ({"probe": "/no/such/probe.json"}, "cannot read the probe .*; name a probe.json of paxtrain.study --probe"),
    ],
)
def test_bad_options_are_one_sentence(slow, file, changes, words):
    with pytest.raises(paxtrain.UserError, match=words):
        planner.plan(small(), slow, dataclasses.replace(OPTIONS, **{"probe": file, **changes}))


def test_what_contradicts_the_probe_is_one_sentence(slow, file, tmp_path):
    with pytest.raises(paxtrain.UserError, match=r"--probe decides .*has compress\.data\.codec=int8; leave it out"):
        planned(small({"compress.data.codec": "int8"}), slow, file, 0.01)
    loss_probe_file.save(probe({("backward", "mine:Codec", 0): (0.0, 0.1)}), tmp_path / "probe.json")
    with pytest.raises(paxtrain.UserError, match=r"compress\.backward\.codec=mine:Codec cannot be imported"):
        planned(small(), slow, str(tmp_path / "probe.json"), 0.01)
