"""The record of a run: rows that planner.validate reads, and corrections of the next plan's profile."""

import csv
import dataclasses

import numpy as np
import pytest

from paxtrain.config import BatchConfig, CompressConfig, Config, MeshConfig, PipelineConfig
from paxtrain.config.plan import Plan
from paxtrain.profiling.terms import StepComparison
from planner.measure.machines import Machines
from planner.runs import trials
from planner.start import run_record
from tests import small
from tests.planner.examples import cluster

TIMES = {"forward": 1e-3, "backward": 2e-3, "head": 1e-3, "embedding": 1e-4, "optimizer": 1e-10}
ROW = {"kind": "a100-80gb", "tensor": 1, "micro_batch": 1, "save": "dots", "hidden": 64, **TIMES}
MACHINES = Machines(("a", "b"), (0, 1), (), 2, ("a100-80gb",) * 2, (8e10,) * 2, ("", ""))


def config(out, **changes) -> Config:
    """Return a configuration; `changes` are sections of which some settings are other ones."""
    base = {
        "model": {"layers": 5, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000},
        "mesh": {"data": 2, "pipe": 2, "tensor": 1},
        "batch": {"global_batch": 8, "micro_batch": 2},
        "run": {"out": str(out)},
    }
    return small.merged(base, changes)


def plan(order: tuple[int, ...] = (), hosts: tuple[str, ...] = (), correction: object = None, **mesh: int) -> Plan:
    sizes = MeshConfig(**({"data": 2, "pipe": 2} | mesh))
    told = {} if correction is None else {"correction": correction}
    per_host = sizes.devices // len(hosts) if hosts else 0
    sections = PipelineConfig(), BatchConfig(), CompressConfig()
    return Plan(sizes, *sections, hosts, per_host, order, predicted=told)


def row_of(out, config: Config, plan: Plan, machines: Machines = MACHINES) -> trials.Trial:
    """Return the last row of the record, after this start."""
    assert run_record.record(out, config, machines, comparison([1.0, 1.0]), plan) == ""
    return trials.read(out / run_record.TRIALS)[-1]


def comparison(backward: list[float], spread: float = 0.0) -> StepComparison:
    """Return a comparison whose B was to take 1 s on both stages, and whose optimizer 0.5 s; the head takes twice."""
    half, none = np.array([0.5, 0.5]), np.zeros(2)
    terms = {"backward": (np.ones(2), np.array(backward)), "optimizer": (half, half), "transfer": (none, half)}
    terms["head"] = np.array([0.0, 0.1]), np.array([0.0, 0.2])
    return StepComparison(2.0, 3.0, 12, spread, terms)


def profiled():
    return dataclasses.replace(cluster(2, 2), compute=(ROW,))


def test_every_start_is_a_row_that_validate_reads(tmp_path):
    for seconds in (3.0, 2.5):
        found = dataclasses.replace(comparison([1.0, 1.0]), measured=seconds)
        run_record.record(tmp_path, config(tmp_path), MACHINES, found, plan())
    untraced = dataclasses.replace(comparison([1.0, 1.0]), terms={})
    run_record.record(tmp_path, config(tmp_path), MACHINES, untraced, plan())
    rows = trials.read(tmp_path / run_record.TRIALS)
    assert [row.seconds for row in rows] == [3.0, 2.5, 3.0]
    assert rows[0].device_kinds == ("a100-80gb", "a100-80gb")
    assert (rows[0].dp, rows[0].pp, rows[0].stage_layers) == (2, 2, config(tmp_path).stage_layers)
    assert rows[0].columns["predicted_backward"] == "1"
    assert rows[2].columns["predicted_backward"] == ""


def test_a_row_says_how_the_run_was_split(tmp_path):
    uneven = row_of(tmp_path, config(tmp_path, pipeline={"pipe_layers": "4,1"}), plan())
    assert uneven.stage_layers == (4, 1) and uneven.schedule == "eager_1f1b" and uneven.placement == (0, 1, 0, 1)
    chunks = {"schedule": "interleaved_1f1b", "virtual_stages": 2, "pipe_layers": "2,1,1,1"}
    row = row_of(tmp_path, config(tmp_path, pipeline=chunks), plan())
    assert (row.stage_layers, row.schedule, row.virtual_stages) == ((3, 2), "interleaved_1f1b", 2)
    row = row_of(tmp_path, config(tmp_path, pipeline={"schedule": "1f1b", "in_flight": 3}), plan())
    assert row.schedule == "1f1b:3"
    batch = {"global_batch": 14, "data_micro_batches": "2,5"}
    row = row_of(tmp_path, config(tmp_path, batch=batch), plan())
    assert row.data_micro_batches == (2, 5) and row.seconds == 3.0
    assert len(trials.read(tmp_path / run_record.TRIALS)) == 4


def test_a_row_says_where_the_run_was_placed(tmp_path):
    """The mesh counts tensor fastest, then pipe, then data; a row's ranks count data before pipe."""
    machines = dataclasses.replace(MACHINES, kinds=("h100", "a100-80gb"))
    swapped = plan((2, 3, 0, 1), ("b", "a"))  # the first data rank is on the second of the plan's hosts, which is a
    row = row_of(tmp_path, config(tmp_path), swapped, machines)
    assert row.device_kinds == ("a100-80gb", "h100") and row.placement == (1, 0, 1, 0)
    in_order = row_of(tmp_path, config(tmp_path), plan((0, 2, 1, 3), ("a", "b")), machines)
    assert in_order.device_kinds == ("h100", "a100-80gb") and in_order.placement == ()
    tensor = config(tmp_path, mesh={"data": 1, "tensor": 2})
    assert row_of(tmp_path, tensor, plan((2, 3, 0, 1), data=1, tensor=2)).placement == (1, 0)
    problem = run_record.record(
        tmp_path, tensor, MACHINES, comparison([1.0, 1.0]), plan((0, 3, 1, 2), data=1, tensor=2)
    )
    assert "tensor groups span hosts" in problem and len(trials.read(tmp_path / run_record.TRIALS)) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outer": {"every": 10, "groups": 2}}, "2 groups train apart"),
        ({"model": {"family": "llama"}}, "the model is a llama with a feed-forward part of 256"),
        ({"model": {"module": "mine:Model"}}, "the model is a mine:Model with a feed-forward part of 256"),
        ({"model": {"intermediate": 128}}, "the model is a gpt2 with a feed-forward part of 128"),
        ({"compress": {"backward": {"messages": "epilogue"}}}, "messages are compressed"),
        ({"compress": {"forward": {"messages": "all"}}}, "messages are compressed"),
        ({"compress": {"data": {"stages": "1"}}}, "messages are compressed"),
    ],
)
def test_what_the_table_cannot_say_gets_no_row(tmp_path, changes, words):
    problem = run_record.record(tmp_path, config(tmp_path, **changes), MACHINES, comparison([2.0, 2.0]), plan())
    assert words in problem and "\n" not in problem
    assert not (tmp_path / run_record.TRIALS).exists()
    assert run_record.read_corrections(tmp_path)["backward"][0] == pytest.approx(2)  # which has no need of it


def test_a_schedule_of_a_file_gets_no_row(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    told = config(tmp_path, pipeline={"schedule": str(path)})
    problem = run_record.record(tmp_path, told, MACHINES, comparison([1.0, 1.0]), plan())
    assert f"its schedule is the file {path}" in problem and not (tmp_path / run_record.TRIALS).exists()


def test_a_folder_without_a_name_of_its_own_has_one_in_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert row_of(tmp_path, config("."), plan()).cluster == tmp_path.name
    assert row_of(tmp_path, config("/"), plan()).cluster == "run"


def test_rows_that_cost_all_others_are_dropped(tmp_path):
    row_of(tmp_path, config(tmp_path), plan())
    path = tmp_path / run_record.TRIALS
    with open(path, newline="") as file:
        [good] = csv.DictReader(file)
    lines = path.read_text().splitlines()
    odd = ",".join((good | {"global_batch": "13"}).values())
    path.write_text("\n".join([*lines, odd, lines[1] + ",more", "lab,8"]) + "\n")
    row_of(tmp_path, config(tmp_path), plan())
    assert [row.global_batch for row in trials.read(path)] == [8, 8]


def test_a_record_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / run_record.TRIALS).mkdir()
    with pytest.raises(OSError):
        run_record.record(tmp_path, config(tmp_path), MACHINES, comparison([1.0, 1.0]), plan())


@pytest.mark.parametrize(
    ("backward", "spread", "factor"),
    [
        ([2.0, 2.0], 0.01, 2.0),
        ([2.0, 2.0], 0.6, 1.0),  # the steps differ so much that it may be chance
        ([0.7, 2.3], 0.0, 1.0),  # the stages do
        ([1.0, 1.0], 0.0, 1.0),
    ],
)
def test_a_term_is_corrected_if_it_was_off_by_more_than_chance(tmp_path, backward, spread, factor):
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison(backward, spread), plan())
    found, told = run_record.corrected(profiled(), tmp_path)
    expected = {"backward": factor, "head": 2.0 if spread < 0.2 else 1.0}
    for name, seconds in TIMES.items():
        assert found.compute[0][name] == pytest.approx(expected.get(name, 1.0) * seconds)
    assert found.compute[0]["hidden"] == 64
    assert told.get("correction", {}) == pytest.approx({name: x for name, x in expected.items() if x != 1.0})
    assert ("backward x" in found.source) == (factor != 1.0)


def test_a_plan_that_was_made_with_a_correction_corrects_it(tmp_path):
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison([2.0, 2.0]), plan())
    _, told = run_record.corrected(profiled(), tmp_path)
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison([1.3, 1.3]), plan(correction=told["correction"]))
    assert run_record.read_corrections(tmp_path)["backward"][0] == pytest.approx(2 * 1.3)


@pytest.mark.parametrize(("seconds", "expected"), [([0.2, 0.2], 0.2), ([0.0, 0.4], 0.0), ([0.0, 0.0], 0.0)])
def test_a_later_plan_has_the_hosts_seconds_that_were_measured(tmp_path, seconds, expected):
    """Unless they are within two standard errors of none; a cluster without a compute profile has them, too."""
    found = comparison([1.0, 1.0])
    found = dataclasses.replace(found, terms={**found.terms, "host": (np.array([0.1, 0.1]), np.array(seconds))})
    run_record.record(tmp_path, config(tmp_path), MACHINES, found, plan())
    for some in (profiled(), cluster(2, 2)):
        other, told = run_record.corrected(some, tmp_path)
        assert other.host_seconds == pytest.approx(expected)
        assert told.get("correction", {}).get("host", 0.0) == pytest.approx(expected)
        assert ("host 0.2 +- 0 s" in other.source) == (expected > 0)


ODD_HOSTS = ('{"host": {"factor": 2, "error": 0}}', '{"host": {"seconds": 1e9, "error": 0}}')


@pytest.mark.parametrize(
    "text", [*ODD_HOSTS, "", "[]", "3", "{", '{"head": 3}', '{"head": {"factor": "a", "error": 0}}']
)
def test_a_damaged_record_corrects_nothing(tmp_path, text):
    (tmp_path / run_record.CORRECTIONS).write_text(text)
    (tmp_path / run_record.TRIALS).write_bytes(b"\xff\xfe")
    assert run_record.read_corrections(tmp_path) == {}
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison([2.0, 2.0]), plan(correction="damaged"))
    assert len(trials.read(tmp_path / run_record.TRIALS)) == 1
