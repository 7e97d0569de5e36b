"""The frontier: every codec on every axis in the bytes that it declares, and a page that says what was seen."""

import csv

import pytest

from compress.codecs.named import NAMES
from paxtrain.parallel.step import Trainer
from paxtrain.study import frontier, measurements, runs
from paxtrain.study.report import VariantResult
from tests.paxtrain.study.test_study import QUICK, configuration
from tests.paxtrain.study.test_study import home as home  # a fixture


def test_all_codecs_of_the_library_are_on_every_axis():
    assert len(frontier.variants(configuration())) == 1 + 2 * len(frontier.POINTS)
    found = frontier.variants(configuration(), tuple(frontier.AXES))
    assert len(found) == 1 + 3 * len(frontier.POINTS)
    assert {point.codec for point in frontier.POINTS} == set(NAMES) - {"identity"} | {"lowrank"}
    for variant in found:
        c, axis = variant.config.compress, variant.name.partition(":")[0]
        assert (c.backward.chosen == "all") == (axis == "between")
        assert (c.data.chosen == "all") == (axis == "data")
        assert (c.forward.chosen == "all") == (axis == "activations")
        assert not c.weights.codec and c.data.start == 0
    with pytest.raises(StopIteration):
        next(v for v in frontier.variants(configuration(), ["data"]) if v.name.startswith("between"))


def test_a_class_is_a_point_with_the_options_that_the_configuration_gives_it():
    own = {"backward_codec": "mine.codecs:Mine", "backward_options": {"share": 0.2}, "data_stages": "0"}
    config = configuration(compress=own)
    found = {v.name: v.config.compress for v in frontier.variants(config, codecs=["mine.codecs:Mine", "int4"])}
    assert [name for name in found if "int4" not in name] == [
        "dense",
        "between: mine.codecs:Mine (share=0.2)",
        "data: mine.codecs:Mine",
    ]
    assert sum("int4" in name for name in found) == 4
    between, data = found["between: mine.codecs:Mine (share=0.2)"], found["data: mine.codecs:Mine"]
    assert (between.backward.codec, between.backward.options) == ("mine.codecs:Mine", {"share": 0.2})
    assert not between.data.codec and between.data.chosen == "none"
    assert (data.data.codec, data.data.options, data.backward.codec) == ("mine.codecs:Mine", {}, "")


def test_codecs_work_on_the_links_that_the_configuration_names():
    config = configuration(pipe=4, compress={"backward_codec": "sign", "backward_links": "1"})
    found = frontier.variants(config)
    links = {
        axis: {v.config.compress.backward.links for v in found if v.name.startswith(axis)} for axis in frontier.AXES
    }
    assert links == {"between": {"1"}, "data": {""}, "activations": set()}
    assert frontier._which(found) == "Every message of an axis on links 1 (backward)"


def test_gradients_are_summed_inside_the_groups_that_the_configuration_names():
    config = configuration(mesh={"data": 4}, batch={"global_batch": 16}, compress={"data_inside": 2})
    inside = {v.name.partition(":")[0]: v.config.compress.data.inside for v in frontier.variants(config)}
    assert inside == {"dense": 1, "between": 1, "data": 2}


def made_up():
    """Return outcomes of two seeds: dense, one codec on both axes, and another on one."""
    outcomes = []
    for name, sent, finals in (
        ("dense", (1000, 4000), (2.0, 2.1)),
        ("between: int8", (260, 4000), (2.002, 2.1)),
        ("between: rank 4", (100, 4000), (2.1, 2.31)),
        ("data: int8", (1000, 1200), (2.0, 2.0)),
    ):
        for seed, final in enumerate(finals):
            kinds = dict.fromkeys(measurements.BYTES, 0) | {"backward": sent[0], "reduce-scatter": sent[1]}
            outcomes.append(VariantResult(name, name.partition(": ")[2] or name, seed, 0, kinds, validation={9: final}))
    return outcomes


def test_the_page_has_shares_of_bytes_times_and_the_spread_of_losses(tmp_path, snapshot):
    """Of int8 between stages 26% of 8 Gbit over the rate, and seven passes at 3.35 TB/s; low rank has five."""
    trained = [v for v in frontier.variants(configuration()) if v.name in {one.name for one in made_up()}]
    table = frontier.write(trained[0].config, trained, made_up(), tmp_path)
    page = (tmp_path / frontier.PAGE).read_text()
    assert table in page
    snapshot("frontier.md", page)
    for axis in frontier.DEFAULT_AXES:
        assert (tmp_path / f"frontier_{axis}.png").stat().st_size > 10_000
    rows = list(csv.DictReader((tmp_path / "frontier.csv").read_text().splitlines()))
    assert len(rows) == 6 and {row["seed"] for row in rows} == {"0", "1"}
    assert float(rows[0]["seconds_per_gigabyte_at_1_gbit"]) == pytest.approx(8 * 0.26, rel=1e-2)


def test_no_point_beats_those_of_the_line():
    assert frontier.best([3, 1, 2, 2, 4], [0.1, 5.0, 1.0, 2.0, 0.1]) == [1, 2, 0]


@pytest.mark.slow
def test_codecs_train_and_their_bytes_shrink(home, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "compiler_options", QUICK)
    config = configuration(home, batch={"global_batch": 8}, compress={"min_ratio": 0.0})
    some = frontier.variants(config, tuple(frontier.AXES), ["int8"], steps=4)
    study = runs.Study(some[0].config, str(tmp_path), 1, some, real_mesh=False, examined=False)
    found = {row.axis: row for row in frontier.rows(study.run(workers=2), some)}
    for axis in ("between", "activations"):
        assert 0.25 < found[axis].share < 0.3  # int8 and a scale for 64 numbers, of float32
    assert 0.25 < found["data"].share < 1  # the embedding travels as it is
    assert all(abs(row.losses[0]) < 5 for row in found.values())
