"""The results page says what its records say, and what was not run."""

import pathlib
import re
import subprocess
import sys
import types

import pytest

from experiments.hosts import scenario
from experiments.lab.page import results
from experiments.lab.records import Records
from paxtrain.errors import UserError
from tests.experiments.lab.made_up_records import add_links, add_predictions, add_schedules


def test_without_records_the_page_says_that_nothing_was_run(tmp_path):
    results.write(tmp_path / "none", tmp_path / "docs" / "results.md")
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| yes |" not in text
    assert text.count("Not run yet.") == 11
    assert "**Not run:** Compression; `python -m experiments.lab --experiments=compression` does." in text
    assert "Nothing says on which machine" in text
    assert not list((tmp_path / "docs" / "results").iterdir())
    for name in set(scenario.names()) - {"uniform"}:
        assert f"`{name}` (" in text


def test_the_page_says_what_was_met_missed_and_not_run(tmp_path):
    lab, page = tmp_path / "lab", tmp_path / "page.md"
    add_links(lab, worst=0.12)
    add_predictions(lab)
    add_schedules(lab)
    Records(lab / "environments.jsonl").add("links", date="2026-01-01", cores=2)
    Records(lab / "environments.jsonl").add("paper", date="2026-01-02", cores=4)
    Records(lab / "environments.jsonl").add("sooner", date="2026-01-01", cores=2)
    Records(lab / "times.jsonl").add("paper", seconds=90, broken=["a host is gone"])
    results.write(lab, page)
    text = page.read_text()
    assert "| Profiled bandwidth of a link of 20 to 200 Mbit/s, largest error | at most 10.0% | 12.0%" in text
    flat = " ".join(text.split())
    [missed] = [line for line in text.splitlines() if line.startswith("| Profiled bandwidth")]
    [unknown] = [line for line in text.splitlines() if line.startswith("| eager_1f1b over 1f1b")]
    assert missed.endswith(" | **no** |") and unknown.endswith(" | open |")
    assert "**Not run:** Growth;" in flat
    assert "| experiments | date | cores |" in text
    assert "| links and sooner | 2026-01-01 | 2 |" in text and "| paper | 2026-01-02 | 4 |" in text
    assert "paper (a host is gone)" in flat and "paper 1.5; 1.5 in all" in flat
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= results.WIDTH
    drawn = re.findall(r"\]\((page/\w+\.png)\)", text)
    assert sorted(drawn) == sorted(f"page/{path.name}" for path in (tmp_path / "page").iterdir())
    assert len(drawn) == len(set(drawn)) > 1


def test_the_page_is_written_again_from_the_records_alone(tmp_path):
    add_schedules(tmp_path / "lab")
    command = [
        sys.executable,
        "-m",
        "experiments.lab.page.results",
        f"--records={tmp_path / 'lab'}",
        f"--page={tmp_path / 'p.md'}",
    ]
    root = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'p.md'}\n"), done.stderr
    assert "## Schedules at several link rates" in (tmp_path / "p.md").read_text()


def test_a_folder_without_records_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        results.flags, "FLAGS", types.SimpleNamespace(records=str(tmp_path), page=str(tmp_path / "p.md"))
    )
    with pytest.raises(UserError, match="there are no records in --records"):
        results.main(["results"])
    assert not (tmp_path / "p.md").exists()


def test_the_page_in_the_documentation_follows_from_the_records_beside_it(tmp_path):
    docs = pathlib.Path(__file__).resolve().parents[3] / "docs"
    page = tmp_path / "results.md"
    results.write(results.folder(docs / "results.md"), page)
    assert page.read_text() == (docs / "results.md").read_text()
    assert {path.name for path in (tmp_path / "results").iterdir()} <= {p.name for p in (docs / "results").iterdir()}
