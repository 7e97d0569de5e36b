"""Plans for groups that train apart: what a plan says of them, who takes it, and what is refused."""

import dataclasses
import re

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import plan as plans
from paxtrain.config import to_dict
from paxtrain.config.plan import PlannedGroups
from planner.memory import closed_form
from planner.planning.planning import plan_sections
from planner.report import traffic
from planner.search.budget import capability
from tests.paxtrain.training import configuration
from tests.planner.examples import cluster
from tests.small import corpus

SMALL = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000}
VALUES = {f"model.{name}": value for name, value in SMALL.items()} | {"batch.global_batch": 32, "run.steps": 400}
OUTER = {"outer.every": 20, "outer.groups": 2}
OPTIONS = planner.PlanOptions(memory_margin=False, top=3, placed=1, oracle="no")
SITES = (0, 1, 1, 0)


def two_sites(**changes):
    """Return four hosts of two devices on two sites, between which links are slow."""
    some, site = cluster(4, 2, seed=None), np.array(SITES)
    samples = np.where(site[:, None] != site, some.samples / 300, some.samples)
    return dataclasses.replace(some, samples=samples, sites=SITES, **changes)


def config(**changes):
    return paxtrain.load_config("tiny", VALUES | OUTER | changes)


def planned(outer, some, options):
    """Plan for groups that no mesh of the configuration itself would have."""
    values = to_dict(config())
    return plan_sections(values | {"outer": values["outer"] | outer}, some, options)


@pytest.fixture(scope="module")
def found():
    return planner.plan(config(), two_sites(), OPTIONS, explained=True)


def test_a_plan_states_its_groups_and_the_configuration_takes_them(found, tmp_path):
    found.save(tmp_path)
    plan = plans.load(tmp_path / "plan.json")
    assert plan == found.plan and plan.outer == PlannedGroups(every=20, groups=2)
    applied = plan.apply(to_dict(config()))
    assert applied.groups == 2 and applied.mesh.data % 2 == 0
    step = planner.simulate(applied, two_sites(), found.ranked[0].hosts)
    assert step.seconds == pytest.approx(plan.predicted["step_seconds"], rel=1e-12)
    terms = plan.predicted["terms"]
    between = plan.predicted["groups"]["median_step_seconds"]  # most steps have no exchange
    np.testing.assert_allclose(np.sum(list(terms.values()), axis=0), between)
    assert between == pytest.approx(step.seconds - step.waits, rel=1e-12)
    sites = np.array(SITES)[found.ranked[0].hosts].reshape(2, -1)
    assert len(set(sites[0])) == len(set(sites[1])) == 1 != len(set(sites[:, 0]))


def test_what_crosses_between_groups_is_counted(found):
    step = planner.simulate(found.plan.apply(to_dict(config())), two_sites(), found.ranked[0].hosts)
    told = found.json()["groups"]
    assert told == found.plan.predicted["groups"]
    assert (told["groups"], told["every"], told["data_ranks"]) == (2, 20, found.plan.mesh.data // 2)
    assert told["round_bytes"] == pytest.approx(8 * step.exchanges[0].bytes)  # of all devices
    assert told["step_bytes"] == told["round_bytes"] / 20
    assert told["round_seconds"] == step.exchange and step.waits == step.exchange / 20
    assert told["step_waits_seconds"] == pytest.approx(step.waits, rel=1e-12)
    between = traffic.traffic(found.report)["differences between groups"]
    assert between.sum() == pytest.approx(told["step_bytes"])
    of_others = [sizes[2] for what, sizes in traffic.traffic(found.report).items() if "groups" not in what]
    assert between[2] > 0 and not any(of_others)  # nothing else goes between sites
    assert found.explain()[0].startswith("without groups: the best plan found, data=")
    more = re.search(r"takes ([\d.e-]+) s, ([\d.]+)(?:% more| times as long)$", found.explain()[0])
    alone = planner.plan(paxtrain.load_config("tiny", VALUES), two_sites(), OPTIONS)
    assert float(more[1]) == pytest.approx(alone.ranked[0].seconds, rel=0.02)
    assert alone.plan.outer is None and "groups" not in alone.json() and "outer" not in plans.to_json(alone.plan)


@pytest.mark.parametrize("outer", [{}, {"outer.fragments": 2, "outer.overlap": 1}, {"compress.outer.codec": "int8"}])
def test_memory_is_that_of_the_configuration(outer):
    some = two_sites()
    made = planner.plan(config(**outer), some, dataclasses.replace(OPTIONS, uneven=False))
    shape = closed_form.of(made.plan.apply(to_dict(config(**outer))), capability(some))
    assert shape.copies == 2
    assert ("int8 of differences between groups" in made.plan.predicted["loss"]) == ("compress.outer.codec" in outer)
    assert made.memory_bytes[0] == pytest.approx(float(closed_form.analytic(shape).total), rel=1e-12)


def test_each_site_is_a_group_if_the_options_say_so():
    options = dataclasses.replace(OPTIONS, groups="sites")
    made = planner.plan(config(**{"outer.groups": 0}), two_sites(), options)
    assert made.plan.outer == PlannedGroups(every=20, groups=2)
    assert made.plan.apply(to_dict(config(**{"outer.groups": 0}))).groups == 2
    unnamed = planner.plan(config(**{"outer.groups": 0}), dataclasses.replace(two_sites(), sites=()), options)
    assert unnamed.plan.outer == made.plan.outer  # by the links


@pytest.mark.parametrize(
    ("outer", "options", "words"),
    [
        ({"groups": 3}, {}, r"outer\.groups=3 divides the data axis of no mesh.*outer\.groups=2,4,8 would fit"),
        ({}, {"uneven_data": "yes"}, r"--uneven_data=yes weighs sequences .*outer\.every=20 groups train apart"),
        ({}, {"data": (1,)}, r"outer\.groups=2 divides the data axis of no mesh.*data=1; another --data"),
        ({"every": 0, "groups": 0}, {"groups": "sites"}, "--groups=sites needs groups that train apart"),
        ({"groups": 4}, {"groups": "sites"}, r"--groups=sites makes 2 groups .*outer\.groups=4; leave one out"),
        ({}, {"groups": "hosts"}, "--groups must be one of configured, sites, got 'hosts'"),
    ],
)
def test_groups_that_cannot_be_are_one_sentence(outer, options, words):
    with pytest.raises(paxtrain.UserError, match=words):
        planned(outer, two_sites(), dataclasses.replace(OPTIONS, **options))


@pytest.mark.parametrize(
    ("outer", "changes", "words"),
    [
        ({"every": 30}, {}, r"outer\.every=30 does not divide run\.steps=400"),
        ({"every": 20, "fragments": 5}, {}, r"outer\.fragments=5 is more than model\.layers=4"),
        ({"every": 20, "fragments": 3}, {}, r"outer\.fragments=3 does not divide outer\.every=20"),
        ({}, {"data_micro_batches": "4,4"}, r"batch\.data_micro_batches=4,4 weighs sequences .* groups train apart"),
    ],
)
def test_what_the_trainer_refuses_is_refused_before_the_search(outer, changes, words):
    values = to_dict(config())
    values |= {"outer": values["outer"] | outer, "batch": values["batch"] | changes}
    with pytest.raises(paxtrain.UserError, match=words):
        plan_sections(values, two_sites(), OPTIONS)


def test_a_cluster_of_one_site_has_no_groups_of_its_own():
    options = dataclasses.replace(OPTIONS, groups="sites")
    with pytest.raises(paxtrain.UserError, match="one site: its file names no others"):
        planner.plan(config(), cluster(4, 2, seed=None), options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outer.every": 40}, r"groups with outer\.every=20, but the configuration has outer\.every=40; train with"),
        ({"outer.every": 0, "outer.groups": 0}, r"outer\.every=20, but the configuration has outer\.every=0"),
        ({"outer.groups": 4}, r"outer\.groups=2, but the configuration has outer\.groups=4"),
        ({"outer.fragments": 2}, r"outer\.fragments=1, but the configuration has outer\.fragments=2"),
    ],
)
def test_a_plan_for_other_groups_is_refused(found, changes, words):
    with pytest.raises(paxtrain.UserError, match=words):
        found.plan.apply(
            to_dict(paxtrain.load_config("tiny", VALUES | {"mesh.data": 8, "mesh.pipe": 1} | OUTER | changes))
        )


@pytest.mark.slow
def test_the_trainer_trains_with_the_plan(tmp_path):
    """The plan of a model of two layers, for eight virtual devices, trains two rounds; the mesh is soon compiled."""
    home = corpus(tmp_path)
    short = {"run__steps": 4, "run__eval_every": 0, "optimizer__warmup_steps": 1, "model__layers": 2}
    base = configuration(home, home / "run", **short)
    base = dataclasses.replace(base, outer=paxtrain.config.OuterConfig(every=2, groups=2))
    made = planner.plan(base, two_sites(), dataclasses.replace(OPTIONS, pipe=(1,), tensor=(1,)))
    result = paxtrain.train(base, made, quiet=True)
    assert result.finished and result.step == 4 and np.isfinite(result.losses).all()
    assert result.losses[-1] < result.losses[0]
    other = dataclasses.replace(base, outer=paxtrain.config.OuterConfig(every=4, groups=2))
    with pytest.raises(paxtrain.UserError, match=r"outer\.every=2, but the configuration has outer\.every=4"):
        paxtrain.train(other, made, quiet=True)
