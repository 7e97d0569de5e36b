"""Planning from Python: ranked plans, figures as arrays, and options."""

import dataclasses
import json

import altair
import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import plan as plans
from paxtrain.config import to_dict
from planner.planning import planning
from planner.planning.inputs import search_for
from planner.planning.offers import offers
from planner.planning.planning import PLAN, REPORT, plan_sections
from planner.report import losses, text
from planner.search.search import Search
from tests.planner.examples import cluster

SMALL = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000}
OPTIONS = planner.PlanOptions(memory_margin=False, top=3, placed=1, oracle="no")


@pytest.fixture(scope="module")
def config():
    return paxtrain.load_config("tiny", {f"model.{name}": value for name, value in SMALL.items()})


@pytest.fixture(scope="module")
def found(config):
    return planner.plan(config, cluster(2, 4), OPTIONS, explained=True)


def test_a_plan_for_another_trainer(config):
    """It follows the trainer's schedules, by its executor; the page draws that one's step."""
    options = dataclasses.replace(OPTIONS, trainer="nanotron", nearby=False, pipe=(2,), tensor=(1,), micro_batch=(1,))
    found = planner.plan(config, cluster(2, 4), options)
    assert {one.candidate.schedule for one in found.ranked} <= {"1f1b", "interleaved_1f1b"}
    assert {one.candidate.save for one in found.ranked} <= {"residuals", "layer_inputs"}
    predicted = found.plan.predicted
    assert predicted["trainer"] == "nanotron" and 0 < predicted["stalls"] < 1
    assert predicted["expected_seconds"] > predicted["step_seconds"]
    [ideal] = predicted["ideal_step_seconds"].values()
    assert ideal == pytest.approx(predicted["step_seconds"])
    expected = [one["expected_seconds"] for one in found.json()["ranked"]]
    assert expected == sorted(expected) and "One training step" in found.html()
    assert found.ranked[0].low < found.ranked[0].seconds < found.ranked[0].high
    own = planner.plan(config, cluster(2, 4), dataclasses.replace(options, trainer="paxtrain"))
    assert own.plan.predicted["trainer"] == "paxtrain" and own.step_seconds[0] != found.step_seconds[0]


def test_plans_are_ranked_with_figures_as_arrays(found):
    assert 1 <= len(found.ranked) <= OPTIONS.top
    assert found.step_seconds.shape == found.memory_bytes.shape == (len(found.ranked),)
    assert found.step_seconds[0] > 0 and (found.step_seconds >= [plan.bound for plan in found.ranked]).all()
    best = found.ranked[0]
    mesh = found.plan.mesh
    assert (mesh.data, mesh.pipe, mesh.tensor) == (best.candidate.data, best.candidate.pipe, best.candidate.tensor)
    assert mesh.devices == 8 and best.hosts.shape == (best.candidate.data, best.candidate.pipe)
    assert found.plan.predicted["step_seconds"] == best.seconds
    assert found.explain()


def test_a_cluster_may_be_named_by_its_file(config, found, tmp_path):
    path = tmp_path / "cluster.json"
    cluster(2, 4).save(path)
    for given in (path, str(path)):
        made = planner.plan(config, given, OPTIONS)
        assert plans.to_json(made.plan) == plans.to_json(found.plan)
        run = made.plan.apply(to_dict(config))
        assert planner.simulate(run, given).seconds == planner.simulate(run, cluster(2, 4)).seconds
    for call in (planner.plan, planner.simulate):
        with pytest.raises(paxtrain.UserError, match=r"^there is no shipped file 'a100'; did you mean"):
            call(config, "a100")
        with pytest.raises(paxtrain.UserError, match=r"^cluster must be a planner\.Cluster, .* got dict$"):
            call(config, {"hosts": 2})


def test_what_is_saved_is_what_the_trainer_reads(found, tmp_path):
    found.save(tmp_path / "new")
    assert plans.load(tmp_path / "new" / PLAN) == plans.from_json(json.loads(json.dumps(plans.to_json(found.plan))))
    page = (tmp_path / "new" / REPORT).read_text()
    assert page == found.html() and 'data-chart="step"' in page
    assert found.text() == text.text(found.report)  # which has no answers to other questions
    (tmp_path / "file").write_text("")
    with pytest.raises(paxtrain.UserError, match="cannot write the plan to"):
        found.save(tmp_path / "file")


def test_notebooks_show_the_charts_with_the_numbers_of_the_plans_json(found):
    told = found.json()
    shown = found.chart()
    assert "vegaEmbed" in shown._repr_mimebundle_()["text/html"]
    with altair.renderers.enable("mimetype"):
        made = shown._repr_mimebundle_()[0]
    [spec] = [value for kind, value in made.items() if "vegalite" in kind]
    data = spec["data"]["values"]
    assert 0 < len(data) <= told["candidates"]
    assert sum(row["state"] != "lower bound" for row in data) == told["simulated"]
    assert sum(row["gb"] <= told["memory_limit_bytes"] / 1e9 for row in data) == told["fitting"]
    ranked = sorted((row["seconds"], row["gb"]) for row in data if row["state"] in ("ranked", "chosen"))
    wanted = sorted((row["step_seconds"], row["memory_bytes"] / 1e9) for row in told["ranked"])
    assert np.array(ranked) == pytest.approx(np.array(wanted), rel=1e-4, abs=1e-3)
    [chosen] = [row["seconds"] for row in data if row["state"] == "chosen"]
    assert chosen == pytest.approx(told["ranked"][told["chosen"]]["step_seconds"], rel=1e-4)
    asked = {one["field"] for layer in spec["layer"] for one in layer["encoding"].get("tooltip", ())}
    assert asked and all(asked <= set(row) for row in data)
    with pytest.raises(paxtrain.UserError, match=r"no chart 'steps', but gains, .*step, memory, candidates$"):
        found.chart("steps")


@pytest.mark.parametrize("scan", ["on", "off"])
def test_a_plan_keeps_the_configurations_loop_and_predicts_with_it(config, scan):
    """On links so slow that the factors of its gradients end the step."""
    links = {"inside": {"alpha": 0, "bandwidth": 1e7}, "between": {"alpha": 0, "bandwidth": 1e7}}
    some = cluster(2, 4, seed=None, links=links)
    looped = dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, scan_layers=scan))
    options = dataclasses.replace(OPTIONS, data=(4,), pipe=(2,), compress=("data",), data_ranks=(8,))
    made = planner.plan(looped, some, options)
    assert made.plan.pipeline.scan_layers == made.ranked[0].candidate.scan_layers == scan
    run = made.plan.apply(to_dict(looped))
    step = planner.simulate(run, some, made.ranked[0].hosts)
    assert step.seconds == pytest.approx(made.ranked[0].seconds, rel=1e-12)
    other = dataclasses.replace(run, pipeline=dataclasses.replace(run.pipeline, scan_layers="on"))
    assert (planner.simulate(other, some, made.ranked[0].hosts).seconds > step.seconds) == (scan == "off")


@pytest.mark.parametrize(
    ("changes", "devices", "words"),
    [
        ({"pipe": (1,), "schedules": ("interleaved_1f1b",)}, {}, "none of --schedules=interleaved_1f1b fits"),
        ({"oracle": "yes"}, {"device": "rtx4090"}, "--oracle=yes compiles for .*, but not for rtx4090"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_searched(config, monkeypatch, changes, devices, words):
    monkeypatch.setattr(Search, "run", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(paxtrain.UserError, match=words):
        planner.plan(config, cluster(2, 4, **devices), dataclasses.replace(OPTIONS, **changes))


def test_nothing_is_compiled_for_cpus():
    some = cluster(2, 4, device="cpu", memory=1e9)
    assert not planning._compiles("auto", some)
    with pytest.raises(paxtrain.UserError, match="--oracle=yes compiles for GPUs, but the cluster has CPUs"):
        planning._compiles("yes", some)


def compressed(ranked):
    return ranked.candidate.backward != "none" or ranked.candidate.data_rank > 0


def test_a_batch_beyond_any_is_refused_before_its_divisors_are_sought(config):
    with pytest.raises(paxtrain.UserError, match=r"batch\.global_batch may be at most 1,048,576"):
        plan_sections(to_dict(config), cluster(2, 4), OPTIONS, global_batch=2**63 - 1)


SLOW = dataclasses.replace(OPTIONS, pipe=(4,), micro_batch=(1,), backward_ranks=(4,), data_ranks=(8,))


@pytest.fixture(scope="module")
def lossless(config):
    return planner.plan(config, slow_cluster(), SLOW)


def slow_cluster():
    made = cluster(4, 2)
    return dataclasses.replace(made, samples=made.samples / 1e3)


def as_slow_as(found, seconds):
    return dataclasses.replace(found, placement=dataclasses.replace(found.placement, seconds=seconds))


@pytest.fixture
def slow_search(config):
    return search_for(to_dict(config), slow_cluster(), SLOW, 0)


def test_nothing_is_compressed_unless_it_is_asked_for(config, lossless):
    assert not any(map(compressed, lossless.ranked))
    assert lossless.plan.compress.backward.messages == lossless.plan.compress.data.stages == "none"
    assert lossless.plan.predicted["loss"] == "nothing is compressed"
    asked = planner.plan(config, slow_cluster(), dataclasses.replace(SLOW, compress=("auto",)))
    assert compressed(asked.ranked[0]) and asked.ranked[0].seconds < lossless.ranked[0].seconds
    assert asked.plan.predicted["loss"] == losses.words(asked.ranked[0].candidate) and not asked.report.offers


def test_the_report_offers_what_compression_would_gain(config, lossless):
    offers = {offer["compress"]: offer for offer in lossless.json()["offers"]}
    assert set(offers) == {"epilogue", "all", "data", "auto"}
    best, said = lossless.ranked[0].seconds, " ".join(lossless.text().split())
    for flag, offer in offers.items():
        assert offer["gain"] == pytest.approx(1 - offer["step_seconds"] / best)
        assert (f"--compress={flag} " in said) == (offer["gain"] > 5e-4)
        assert offer["loss"] and "docs/study.md" in offer["loss"]
    most = max(offers, key=lambda flag: offers[flag]["gain"])
    assert offers[most]["gain"] > 0.05
    # Whoever follows an offer gets at least that: the search then looks at these plans among others.
    asked = planner.plan(config, slow_cluster(), dataclasses.replace(SLOW, compress=("data",), gain=0.0))
    assert asked.ranked[0].seconds <= offers["data"]["step_seconds"] * (1 + 1e-9)


def test_compression_that_cannot_be_quicker_is_not_offered(config, lossless, slow_search):
    """A kind is offered as long as its quickest plan beats the chosen one, and that plan is as without limit."""
    chosen, ranks = slow_search.run().ranked[0], OPTIONS.data_ranks
    free = {offer.compress: offer.found for offer in offers(slow_search, ranks, as_slow_as(chosen, np.inf))}
    for seconds in (0.0, *sorted(found.seconds * (1 + 1e-6) for found in free.values())):
        some = {offer.compress: offer.found for offer in offers(slow_search, ranks, as_slow_as(chosen, seconds))}
        for flag, found in free.items():
            if found.seconds < seconds:
                assert some[flag].seconds == found.seconds
            elif flag in some:
                assert some[flag].seconds >= found.seconds > seconds
    assert not offers(slow_search, ranks, as_slow_as(chosen, 0.0))
    none = dataclasses.replace(lossless.report, offers=())
    assert text.lossy_words(none) == ["no kind of compression would make the step quicker"]
    assert not text.lossy_words(dataclasses.replace(none, offers=None))


def test_a_codec_that_the_configuration_names_is_asked_for(config):
    values = {"compress.data.codec": "int8"}
    named = paxtrain.load_config("tiny", {**{f"model.{k}": v for k, v in SMALL.items()}, **values})
    found = planner.plan(named, slow_cluster(), dataclasses.replace(SLOW, gain=0.0))
    assert found.plan.compress.data.codec == "int8" and found.plan.compress.backward.messages == "none"
    assert "int8" in found.plan.predicted["loss"] and not found.json()["offers"]


def test_gathered_weights_that_are_compressed_are_told_beside_the_offers():
    """Weights are compressed as the configuration says; what else could be is offered as without."""
    values = {f"model.{name}": value for name, value in SMALL.items()} | {"compress.weights.codec": "int4"}
    options = dataclasses.replace(SLOW, pipe=(2,), tensor=(1,), data=(4,), shard=("optimizer",))
    found = planner.plan(paxtrain.load_config("tiny", values), slow_cluster(), options)
    own, *offered = text.lossy_words(found.report)
    assert found.plan.compress.weights.codec == "int4"
    assert own.startswith("weights that are gathered over data compressed by int4: ")
    assert own.endswith(found.plan.predicted["loss"]) and any(
        words.startswith("with --compress=auto") for words in offered
    )


def test_options_narrow_the_choice(config, found):
    pipe = found.plan.mesh.pipe
    other = next(size for size in (1, 2, 4) if size != pipe)
    narrowed = planner.plan(config, cluster(2, 4), dataclasses.replace(OPTIONS, pipe=(other,)))
    assert narrowed.plan.mesh.pipe == other
    assert np.min([plan.seconds for plan in narrowed.ranked]) >= found.step_seconds.min()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress": ("everything",)}, "--compress must be none, auto or some of epilogue"),
        ({"compress": ("auto", "all")}, "--compress must be none, auto or some of epilogue.*got 'auto'"),
        ({"schedules": ()}, "--schedules must be some of .*, got none"),
        ({"schedules": ("zb_h1",), "saves": ("inputs",)}, "--schedules=zb_h1 needs --saves=dots or residuals"),
        ({"pipe": (0,)}, "--pipe must be positive integers"),
        ({"tensor": ("2",)}, "--tensor must be positive integers"),
        ({"quantile": float("nan")}, "--quantile must be a number, got nan"),
        ({"usable_memory": 1.5}, "--usable_memory must be 0.05 to 1, got 1.5"),
        ({"top": 0}, "--top must be at least 1, got 0"),
        ({"oracle": "perhaps"}, "--oracle must be one of auto, yes, no"),
        ({"virtual_stages": (2, 1)}, "--virtual_stages must be integers from 2 on, got 2,1"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(changes, words):
    with pytest.raises(paxtrain.UserError, match=words):
        planner.PlanOptions(**changes)


# --- Data ranks of different speed ------------------------------------------------------------------------------------

HALVES = dataclasses.replace(
    OPTIONS, nearby=False, saves=("residuals",), shard=("optimizer",), schedules=("1f1b",), virtual_stages=()
)


@pytest.fixture(scope="module")
def halves():
    """Return four hosts with an A100 each and four with a V100, joined by 100 Gbit/s, and a model of 12 layers."""
    made = cluster(8, 1, seed=None, device=["a100-80gb"] * 4 + ["v100"] * 4)
    made = dataclasses.replace(made, samples=np.where(np.eye(8, dtype=bool), made.samples, 12.5e9))
    model = {"layers": 12, "hidden": 1024, "heads": 16, "sequence": 1024, "vocab_size": 50257, "dtype": "bfloat16"}
    values = {f"model.{name}": value for name, value in model.items()}
    config = paxtrain.load_config("tiny", values | {"batch.global_batch": 128, "batch.micro_batch": 4})
    return config, made


@pytest.mark.once
def test_data_ranks_on_slow_hosts_get_fewer_micro_batches(halves):
    config, made = halves
    found = planner.plan(config, made, HALVES, explained=True)
    equal = planner.plan(config, made, dataclasses.replace(HALVES, uneven_data="no"))
    assert found.ranked[0].seconds < 0.95 * equal.ranked[0].seconds
    assert not equal.plan.batch.data_micro_batches
    assert not any(plan.candidate.data_micro_batches for plan in equal.ranked)

    plan = found.plan
    ranks = [int(n) for n in plan.batch.data_micro_batches.split(",")]
    assert sum(ranks) * plan.batch.micro_batch == 128 and len(ranks) == plan.mesh.data
    on = [sum(made.kinds[host] == "a100-80gb" for host in row) for row in found.ranked[0].hosts.tolist()]
    assert min(n for n, fast in zip(ranks, on) if fast) > max(n for n, fast in zip(ranks, on) if not fast)
    assert any(line.startswith("uneven_data=False: ") and "more" in line for line in found.explain())

    # The trainer takes the plan, and a simulation of its configuration says the same.
    planned = plan.apply(to_dict(config))
    again = planner.simulate(planned, made, found.ranked[0].hosts)
    assert planned.rank_micro_batches == tuple(ranks)
    assert again.seconds == pytest.approx(plan.predicted["step_seconds"], rel=1e-9)


def test_hosts_that_are_alike_get_equal_numbers(found):
    assert not any(plan.candidate.uneven_data for plan in found.ranked)


def test_uneven_ranks_may_be_demanded(halves):
    config, made = halves
    narrow = dataclasses.replace(HALVES, data=(2,), micro_batch=(2,), uneven_data="yes")
    found = planner.plan(config, made, narrow)
    assert all(len(set(plan.candidate.data_micro_batches)) == 2 for plan in found.ranked)


def test_the_gain_of_uneven_ranks_on_links_that_were_measured_twice_is_told_without_placing_anew(halves):
    config, made = halves
    twice = dataclasses.replace(made, samples=np.concatenate([made.samples, made.samples * 0.98]))
    narrow = dataclasses.replace(HALVES, data=(2, 4), micro_batch=(2,), uneven_data="yes")
    found = planner.plan(config, twice, narrow)
    assert found.ranked[0].candidate.data_micro_batches
    assert found.report.noise.words.startswith("data ranks differ in micro-batches, so it was not placed anew")
