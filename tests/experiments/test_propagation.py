"""Lazy error propagation with it and without: the variants, and the page that says whether it helps."""

import csv

from experiments import propagation
from paxtrain.study import frontier, loss_probe
from paxtrain.study.report import VariantResult
from tests.paxtrain.study.test_study import configuration


def test_runs_differ_in_error_propagation_alone():
    found = propagation.variants(configuration(), (2, 4), steps=20)
    assert [variant.name for variant in found] == ["dense", "2 lazy", "2 none", "4 lazy", "4 none"]
    assert found[0].config.compress.backward.chosen == "none"
    for variant in found[1:]:
        c = variant.config.compress
        rank, error = variant.name.split()
        assert (c.backward.messages, c.backward.rank, c.error) == ("all", int(rank), error)
        assert c.forward.chosen == c.data.chosen == "none"
        assert variant.config.run.steps == 20


def test_ranks_of_single_links_do_not_replace_those_that_are_tried():
    own = configuration(pipe=4, compress={"backward_ranks": "2,1,2"})
    found = [variant.config.compress for variant in propagation.variants(own, (2, 4), steps=20)[1:]]
    assert {(c.backward.rank, c.backward.ranks) for c in found} == {(2, ""), (4, "")}
    assert not loss_probe.settled(own, 10).compress.backward.ranks
    assert not any(variant.config.compress.backward.ranks for variant in frontier.variants(own))


def test_the_page_compares_pairs_of_the_same_seed(tmp_path):
    losses = {"dense": (2.0, 4.0), "2 lazy": (2.2, 4.4), "2 none": (2.5, 4.4), "4 lazy": (2.1, 4.2)}
    losses["4 none"] = (2.0, 4.0)
    outcomes = [
        VariantResult(name, name, seed, 0, {}, validation={20: final})
        for name, finals in losses.items()
        for seed, final in enumerate(finals)
    ]
    made = propagation.write(configuration(), outcomes, tmp_path)
    row = "| 2 | +17.50 (+10.00 to +25.00) | +10.00 (+10.00 to +10.00) | -6.00 (-12.00 to +0.00) |"
    assert row in made
    assert "At rank 2 lazy error propagation has no clear effect, it differs from seed to seed" in made
    assert "At rank 4 lazy error propagation raises the loss: +5.00 % (+5.00 to +5.00)" in made
    assert made in (tmp_path / propagation.PAGE).read_text()
    rows = list(csv.DictReader((tmp_path / "lep.csv").read_text().splitlines()))
    assert len(rows) == 10 and rows[2]["percent_above_dense"] == "10"
