"""Finished runs: on disk when they end, the same when they are read, and of no other configuration."""

import dataclasses
import json
import math

import pytest

from paxtrain.errors import UserError
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


def test_what_is_no_result_is_left_out(tmp_path):
    """Of an older version, or changed by hand."""
    FinishedRuns(tmp_path, resume=True).add("run", result(0))
    good = json.loads((tmp_path / FILE).read_text())
    older = {**good["result"], "validation": {}}
    lines = [[], {}, 3, good | {"result": {"name": "cb"}}, good | {"result": older}, good | {"identity": 3}]
    lines += [good | {"result": good["result"] | change} for change in ({"losses": "x"}, {"seed": "0"}, {"more": 1})]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, good])
    (tmp_path / FILE).write_text(text + "[" * 100_000 + "\n")
    assert FinishedRuns(tmp_path, resume=True).results == {"run": result(0)}
    assert json.loads((tmp_path / FILE).read_text()) == good


def test_a_start_that_does_not_resume_loses_nothing(tmp_path):
    FinishedRuns(tmp_path, resume=True).add("run", result(0))
    for number in (1, 2):
        before = (tmp_path / FILE).read_text()
        runs = FinishedRuns(tmp_path, resume=False)
        assert runs.results == {} and (tmp_path / FILE).read_text() == ""
        assert runs.aside == tmp_path / f"finished.{number}.jsonl" and runs.aside.read_text() == before
        assert FinishedRuns(tmp_path, resume=False).aside is None  # nothing is left to move
        runs.add("another", result(number))


def test_a_start_that_is_killed_as_it_reads_loses_nothing(tmp_path, monkeypatch):
    """At the moment at which the new file is complete and has no name yet."""
    FinishedRuns(tmp_path, resume=True).add("run", result(0))
    before = (tmp_path / FILE).read_text() + "{"
    (tmp_path / FILE).write_text(before)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        FinishedRuns(tmp_path, resume=True)
    assert (tmp_path / FILE).read_text() == before


def test_a_folder_in_its_place_is_named(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(UserError, match=r"finished\.jsonl .*; move it away, or name another --out"):
        FinishedRuns(tmp_path, resume=True)


def test_a_run_is_known_by_all_that_it_depends_on():
    config = configuration()
    [dense, naive, *_] = variants.variants(config, [])
    longer = dataclasses.replace(dense, config=configuration(run={"steps": 9}))
    about = [(dense, 0, (True,)), (dense, 1, (True,)), (dense, 0, (False,)), (naive, 0, (True,)), (longer, 0, (True,))]
    assert len({identity(*one) for one in about}) == len(about)
    assert identity(*about[0]) == identity(dataclasses.replace(dense), 0, (True,))
