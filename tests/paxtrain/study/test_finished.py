"""Finished runs: on disk when they end, the same when they are read, and of no other configuration."""

import dataclasses
import math

from paxtrain.study import variants
from paxtrain.study.finished import FILE, FinishedRuns, identity
from paxtrain.study.report import VariantResult
from tests.paxtrain.study.test_study import configuration


def result(seed):
    found = VariantResult("cb", "CB", seed, 4, {}, losses=[5.0, math.inf, 0.1 + 0.2], validation={0: 5.5, 20: 1 / 3})
    found.errors = [{"step": 1, "direction": "backward", "link": 0, "relative_error": 0.25}]
    return found


def test_what_was_written_is_read_and_a_cut_line_is_left_out(tmp_path):
    runs = FinishedRuns(tmp_path, resume=True)
    assert runs.results == {}
    for seed in range(3):
        runs.add(f"run {seed}", result(seed))
        assert len((tmp_path / FILE).read_text().splitlines()) == seed + 1
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[:-9])  # as a crash leaves it
    again = FinishedRuns(tmp_path, resume=True)
    assert again.results == {"run 0": result(0), "run 1": result(1)}
    again.add("run 2", result(2))
    assert (tmp_path / FILE).read_text() == whole
    assert FinishedRuns(tmp_path, resume=False).results == {}
    assert (tmp_path / FILE).read_text() == ""


def test_a_run_is_known_by_all_that_it_depends_on():
    config = configuration()
    [dense, naive, *_] = variants.variants(config, [])
    longer = dataclasses.replace(dense, config=configuration(run={"steps": 9}))
    about = [(dense, 0, (True,)), (dense, 1, (True,)), (dense, 0, (False,)), (naive, 0, (True,)), (longer, 0, (True,))]
    assert len({identity(*one) for one in about}) == len(about)
    assert identity(*about[0]) == identity(dataclasses.replace(dense), 0, (True,))
