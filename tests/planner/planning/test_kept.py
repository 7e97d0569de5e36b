"""Planning the same again searches nothing and says the same; whatever a plan follows from makes it another one."""

import dataclasses
import importlib.metadata
import json

import pytest

import paxtrain
import planner
from paxtrain import files
from paxtrain.config import plan as plans
from paxtrain.config import to_dict
from planner.planning import kept
from planner.planning.inputs import search_for
from planner.search.search import Search
from tests.planner.examples import cluster

SMALL = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000}
OPTIONS = planner.PlanOptions(memory_margin=False, top=3, placed=1, oracle="no", schedules=("1f1b", "eager_1f1b"))


@pytest.fixture(scope="module")
def config():
    return paxtrain.load_config("tiny", {f"model.{name}": value for name, value in SMALL.items()})


def some_cluster(**changes):
    """Return four hosts, one of which has slow links, so that plans on fewer hosts are looked at."""
    made = cluster(4, 2)
    samples = made.samples.repeat(3, axis=0)
    samples[1] *= 0.9
    samples[:, 3, :3] /= 300
    samples[:, :3, 3] /= 300
    return dataclasses.replace(made, samples=samples, **changes)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def searches(monkeypatch):
    """Return a list that gets the batch of each search that is run."""
    run, found = Search.run, []
    monkeypatch.setattr(Search, "run", lambda self, *a, **k: found.append(self.global_batch) or run(self, *a, **k))
    return found


def said(made):
    return made.text(), made.html(), json.dumps(made.json()), json.dumps(plans.to_json(made.plan))


def test_planning_again_searches_nothing_and_says_the_same(config, folder, searches):
    first = planner.plan(config, some_cluster(), OPTIONS)
    assert searches and first.report.nearby and first.report.offers and first.report.noise
    searches.clear()
    again = planner.plan(config, some_cluster(), OPTIONS)
    assert not searches and again is not first
    assert said(again) == said(first)
    for one, other in zip(first.ranked, again.ranked, strict=True):
        assert one.candidate == other.candidate and (one.hosts == other.hosts).all()
        assert one.seconds == other.seconds and one.bound == other.bound


def test_a_later_explanation_is_what_it_would_have_been(config, folder, searches):
    first = planner.plan(config, some_cluster(), OPTIONS, explained=True).explain()
    assert any("simulated" in line for line in first)
    searches.clear()
    assert planner.plan(config, some_cluster(), OPTIONS, explained=True).explain() == first and not searches


def key(config, some, options=OPTIONS):
    return kept._key(search_for(to_dict(config), some, options), [])


def test_whatever_a_plan_follows_from_is_in_its_name(config, monkeypatch):
    first = key(config, some_cluster())
    assert first is not None and key(config, some_cluster()) == first
    slower = some_cluster()
    slower.samples[2, 0, 1] *= 1 - 1e-9
    for changes in ({"top": 2}, {"seed": 1}, {"gain": 0.02}, {"usable_memory": 0.9}, {"pipe": (2,)}, {"placed": 2}):
        assert key(config, some_cluster(), dataclasses.replace(OPTIONS, **changes)) != first
    for other in (slower, some_cluster(nics=2), some_cluster(host_seconds=0.1), some_cluster(hosts=tuple("abcd"))):
        assert key(config, other) != first
    assert key(dataclasses.replace(config, batch=dataclasses.replace(config.batch, global_batch=48)), slower) != first
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0")
        assert key(config, some_cluster()) != first
    monkeypatch.setattr(kept, "_fingerprint", lambda: "other code")
    assert key(config, some_cluster()) != first


def test_what_follows_from_others_code_is_not_kept(config):
    own = paxtrain.load_config("tiny", {"model.module": "tests.paxtrain.model.parallel_block:ParallelBlock"})
    assert key(own, some_cluster()) is None
    search = search_for(to_dict(config), some_cluster(), OPTIONS)
    search.choices = dataclasses.replace(search.choices, schedules=("1f1b", "mine.csv"))
    assert kept._key(search, []) is None

    class Codec:
        """One of somebody else's."""

    search = search_for(to_dict(config), some_cluster(), OPTIONS)
    search.choices = dataclasses.replace(search.choices, coded=dataclasses.replace(search.coded, backward=Codec()))
    assert kept._key(search, []) is None


def test_damaged_files_and_wrong_prices_are_none(config, folder):
    planner.plan(config, some_cluster(), OPTIONS)
    [path] = folder.iterdir()
    stored = path.read_text()
    search, asked = search_for(to_dict(config), some_cluster(), OPTIONS), [True, OPTIONS.data_ranks]
    assert kept.recall(search, asked) is not None and kept.recall(search, [False, OPTIONS.data_ranks]) is None
    value = json.loads(stored)["value"]
    for found in (value["ranked"][-1], value["offers"][-1][1], value["nearby"][-1]["found"]):
        placement = found["placement"]
        found["placement"] = {**placement, "seconds": placement["seconds"] * (1 + 1e-6)}
        files.keep(path, value)
        assert kept.recall(search, asked) is None
        found["placement"] = placement
    files.keep(path, value)
    assert kept.recall(search, asked) is not None
    for text in ("", "{}", "\x00", stored[:-9], stored.replace(str(value["bound"]), "0.1")):
        path.write_text(text)
        assert kept.recall(search, asked) is None
    for other in ([], 5, {}, {**value, "ranked": [{}]}):  # written whole, by somebody else
        files.keep(path, other)
        assert kept.recall(search, asked) is None
