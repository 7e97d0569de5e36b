"""Parts in processes of their own: outcomes, budgets, and what is not measured twice."""

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time

import pytest

from experiments.gpu import __main__ as main
from experiments.gpu import page, running, section
from experiments.gpu.section import (
    DONE,
    FAILED,
    FULL,
    SKIPPED,
    TOY,
    PartOutcome,
    Section,
    SectionPart,
    SectionRecord,
    Setting,
)
from paxtrain.errors import UserError
from tests import mains

HERE = Setting("abc", "cpu", "cpu", 1, TOY, "0")
GPU = Setting("abc", "NVIDIA H100 80GB HBM3", "gpu", 1, FULL, "0")


def measured(folder: pathlib.Path, **arguments) -> section.Result:
    return {"folder": folder.name, **arguments}


def broken(folder: pathlib.Path) -> section.Result:
    raise ValueError("a bad\nvalue")


def sections(*parts: SectionPart, name: str = "first", **more) -> Section:
    def describe(results, folder):
        return f"{len(results)} measured"

    return Section(name, "The first", 10, {TOY: parts, FULL: parts}, describe, **more)


@pytest.fixture
def calls(monkeypatch):
    """Replace the processes by a record of the parts that were started, with the time that they get."""
    started = []

    def start(found, part, size, out, seconds):
        started.append((part.name, seconds))
        return PartOutcome(DONE, result={"size": size})

    monkeypatch.setattr(running, "start_part", start)
    return started


def run(table, tmp_path, setting=HERE, minutes=1.0, again=False):
    return list(running.run_all(table, setting, tmp_path, minutes, again))


def test_parts_that_are_done_are_not_measured_again(calls, tmp_path):
    table = [sections(SectionPart("a", measured), SectionPart("b", measured))]
    [record] = run(table, tmp_path)
    assert record == section.load(tmp_path, "first")
    assert [name for name, _ in calls] == ["a", "b"]
    run(table, tmp_path)
    assert len(calls) == 2
    for change in ({"again": True}, {"setting": dataclasses.replace(HERE, commit="def")}):
        calls.clear()
        run(table, tmp_path, **change)
        assert len(calls) == 2
    record.enter("b", PartOutcome(FAILED))
    record.setting = dataclasses.replace(HERE, commit="def")
    section.save(tmp_path, record)
    calls.clear()
    run(table, tmp_path, setting=record.setting)
    assert [name for name, _ in calls] == ["b"]


def test_a_budget_that_is_spent_skips_the_rest_of_its_section(calls, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])
    slow = running.start_part

    def start(found, part, size, out, seconds):
        now[0] += 40.0
        return slow(found, part, size, out, seconds)

    monkeypatch.setattr(running, "start_part", start)
    first = sections(SectionPart("a", measured), SectionPart("b", measured))
    second = sections(SectionPart("c", measured), name="second")
    records = run([first, second], tmp_path)  # 30 s each
    assert [part.status for part in records[0].parts.values()] == [DONE, SKIPPED]
    assert records[0].parts["b"].reason == "the time was spent"
    # 20 s of the second section's are left, and a part that has begun gets a minute at least.
    assert calls == [("a", 60), ("c", 60)]


def test_parts_that_measure_no_time_run_side_by_side(tmp_path, monkeypatch):
    both = threading.Barrier(2)

    def start(found, part, size, out, seconds):
        try:
            both.wait(0.5)
        except threading.BrokenBarrierError:
            return PartOutcome(FAILED, reason="it ran alone")
        return PartOutcome(DONE)

    monkeypatch.setattr(running, "start_part", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    parts = (SectionPart("a", measured), SectionPart("b", measured))
    [free] = run([sections(*parts, timed=False)], tmp_path / "free")
    assert {name: part.status for name, part in free.parts.items()} == {"a": DONE, "b": DONE}
    [timed] = run([sections(*parts)], tmp_path / "timed")
    assert {part.reason for part in timed.parts.values()} == {"it ran alone"}


def test_parts_for_more_gpus_than_there_are_are_skipped_with_a_note(calls, tmp_path):
    [record] = run([sections(SectionPart("pair", measured, devices=2), several=True)], tmp_path, setting=GPU)
    assert record.parts["pair"].reason == "it needs 2 GPUs, and this host has 1"
    run([sections(SectionPart("pair", measured, devices=2), several=True)], tmp_path)
    assert [name for name, _ in calls] == ["pair"]


def test_a_process_writes_its_result_or_the_errors_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(running.threading, "Thread", lambda **_: type("Idle", (), {"start": lambda self: None})())
    monkeypatch.setattr(running.jax.config, "update", lambda *_: None)
    file = tmp_path / "outcome.json"
    for part, code in ((SectionPart("a", measured, {"x": 1}), 0), (SectionPart("b", broken), 1)):
        with pytest.raises(SystemExit) as end:
            running.run_part(part, tmp_path / "folder", file, 0, None)
        assert end.value.code == code
        found = PartOutcome(**json.loads(file.read_text()))
        if code:
            assert found.reason == "ValueError: a bad value" and "in broken" in found.traceback
        else:
            assert found.result == {"folder": "folder", "x": 1}


def test_processes_end_with_the_first_that_fails_and_at_their_limit(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    fail = [sys.executable, "-c", "import sys; sys.exit(3)"]
    began = time.monotonic()
    for commands, seconds, reason in (
        ([(sleep, {}), (fail, {})], 30, "its process ended with 3"),
        ([(sleep, {})], 0.2, "it was not done in 0 s"),
    ):
        with running._started(commands, tmp_path / "log") as processes:
            assert running._wait(processes, seconds) == reason
        assert all(process.returncode is not None for process in processes)
    assert time.monotonic() - began < 20


def test_every_part_has_a_name_of_its_own_and_json_arguments():
    assert len({s.name for s in main.SECTIONS}) == len(main.SECTIONS)
    for found in main.SECTIONS:
        for size in (FULL, TOY):
            parts = found.parts[size]
            assert parts and len({part.name for part in parts}) == len(parts)
            for part in parts:
                assert json.loads(json.dumps(dict(part.arguments)))
                assert part.devices % part.processes == 0


def test_an_unknown_section_is_one_sentence(monkeypatch, capsys):
    assert mains.run(monkeypatch, mains.load("experiments.gpu.__main__"), "--sections=kernel") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "unknown section 'kernel'; known are correctness, throughput, kernels" in err


# --- The page ---------------------------------------------------------------------------------------------------------


def test_the_page_tells_what_is_missing_and_is_put_into_the_documentation(tmp_path):
    table = [sections(SectionPart("a", measured), SectionPart("b", measured))]
    record = SectionRecord("first", GPU)
    record.enter("a", PartOutcome(DONE, result={"x": 1}))
    record.enter("b", PartOutcome(FAILED, reason="ValueError: no"))
    section.save(tmp_path, record)
    written = page.write(table, tmp_path)
    assert "1 measured" in written.read_text() and "Not measured (failed, ValueError: no): b." in written.read_text()
    docs = tmp_path / "docs.md"
    docs.write_text(f"# Ours\n\n{page.BEGIN}\nold\n{page.END}\n\nBehind.\n")
    for _ in range(2):
        page.publish(written, docs)
        text = docs.read_text()
        assert text.startswith("# Ours") and text.endswith("\n\nBehind.\n") and "old" not in text
        assert text.count("### The first") == 1 and "NVIDIA H100" in text
    docs.write_text("# Ours\n")
    with pytest.raises(UserError, match="has no place for measurements"):
        page.publish(written, docs)


def test_the_documentation_has_a_place_for_measurements(tmp_path):
    text = main.DOCS.read_text()
    assert text.count(page.BEGIN) == text.count(page.END) == 1


def test_a_damaged_record_counts_as_none(tmp_path):
    section.file_of(tmp_path, "first").write_text("{")
    assert section.load(tmp_path, "first") is None
