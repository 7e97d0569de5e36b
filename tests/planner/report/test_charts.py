"""Charts and what they show, against plain recomputation; the specifications, against Vega-Lite's schema."""

import copy
import dataclasses
import io

import altair
import matplotlib.image
import numpy as np
import pytest

from planner.cost.candidate import host_order
from planner.cost.step_time import Problem
from planner.pipeline.rows import Table
from planner.pipeline.simulator import Seconds
from planner.report import activity, candidates, charts, contents, traffic, units
from planner.search.space import numbers_of
from tests.planner.examples import cluster, placements
from tests.planner.report.reports import asked_for_nothing, made_report

EXAMPLE = Seconds(forward=np.full((1, 4), 1.0), backward=np.full((1, 4), 2.0), activation=0.5, gradient=0.5)


@pytest.fixture(scope="module")
def made() -> contents.Report:
    return made_report()


def total(bars: list[activity.Bar], stage: int, *kinds: str) -> float:
    """Return the seconds that a stage spends on some kinds of work."""
    return sum(s.end - s.begin for s in bars if s.stage == stage and s.what in kinds)


# --- Schedule ---------------------------------------------------------------------------------------------------------


def within(intervals: list[tuple[float, float]]) -> np.ndarray:
    """Return whether each of the 40 unit cells from 0 on lies in one of the intervals."""
    return np.array([any(begin < cell + 0.5 < end for begin, end in intervals) for cell in range(40)])


def test_outside_is_what_a_fine_grid_says():
    rng = np.random.default_rng(0)
    for _ in range(50):
        parts, busy = (
            [tuple(sorted(pair)) for pair in rng.integers(0, 40, (n, 2)).tolist()] for n in rng.integers(0, 7, 2)
        )
        found = activity.outside(parts, busy)
        np.testing.assert_array_equal(within(found), within(parts) & ~within(busy))
        assert all(a[1] < b[0] for a, b in zip(found, found[1:])), "neighbours are joined"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["eager_1f1b", "gpipe", "1f1b", "zb_h1"])
def test_micro_batches_pass_the_stages_in_order(name, overlap):
    bars = activity.pipeline(Table(name, 4, 7), dataclasses.replace(EXAMPLE, weights=1.0), overlap)
    when = {(s.what, s.stage, s.micro_batch): s for s in bars if s.what in ("F", "B", "W", "H")}
    phases = "FBW" if name == "zb_h1" else "FB"
    losses = {("H", 3, m) for m in range(7)}
    assert set(when) == losses | {(k, s, m) for k in phases for s in range(4) for m in range(7)}
    for (what, stage, m), bar in when.items():
        before = {"F": ("F", stage - 1, m), "B": ("B", stage + 1, m), "W": ("B", stage, m), "H": ("F", 3, m)}[what]
        if stage == 3 and what == "B":
            before = ("H", 3, m)
        if before in when:
            hop = 0.5 if before[1] != stage else 0.0
            assert bar.begin >= when[before].end + hop - 1e-9


def test_virtual_stages_run_every_micro_batch_once_each():
    seconds = Seconds(forward=np.ones((1, 6)), backward=np.ones((1, 6)))
    bars = activity.pipeline(Table("interleaved_1f1b", 3, 6, 2), seconds, True)
    for stage in range(3):
        for what in "FB":
            numbers = sorted(s.micro_batch for s in bars if s.stage == stage and s.what == what)
            assert numbers == sorted([*range(6)] * 2)


def test_exposed_transfers_are_those_that_1f1b_is_known_for():
    # With equal stages, F = 1, B = 2 and hops of 0.5, 1F1B takes 71 s instead of 57 s. Eager 1F1B takes 60 s, since
    # compute hides most of its hops.
    plain, eager = (activity.pipeline(Table(name, 4, 16), EXAMPLE, True) for name in ("1f1b", "eager_1f1b"))
    assert total(plain, 0, "exposed") > 10 > total(eager, 0, "exposed") > 0
    for bars in (plain, eager):
        assert total(bars, 2, "F", "B") == pytest.approx(48)
        for stage in range(4):
            mine = sorted((s.begin, s.end) for s in bars if s.stage == stage and s.what != "H")
            assert all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:])), "a stage does one thing at a time"
    free = dataclasses.replace(EXAMPLE, activation=0.0, gradient=0.0)
    assert not [s for s in activity.pipeline(Table("1f1b", 4, 16), free, True) if s.what == "exposed"]


@pytest.mark.parametrize("name", ["activation", "gradient"])
def test_a_slow_hop_is_exposed_at_its_two_ends_only(name):
    sender, ends = (0, (0, 1)) if name == "activation" else (3, (2, 3))
    hops = {"activation": 0.0, "gradient": 0.0} | {name: 3.0 * (np.arange(4) == sender)[None]}
    slow = dataclasses.replace(EXAMPLE, **hops)
    bars = activity.pipeline(Table("1f1b", 4, 9), slow, True)
    for stage in range(4):
        assert (total(bars, stage, "exposed") > 1) == (stage in ends)


def test_scrap_is_not_taken_for_work():
    eager = activity.pipeline(Table("eager_1f1b", 4, 8), EXAMPLE, True)
    assert total(eager, 3, "scrap") > 0
    assert not [s for s in activity.pipeline(Table("1f1b", 4, 8), EXAMPLE, True) if s.what == "scrap"]


def test_leaving_the_middle_out_changes_nothing_else(monkeypatch):
    alike = cluster(8, 4, seed=None)
    made = made_report(micro_batches=64, schedule="1f1b", pipe=4, cluster=alike)  # rows repeat exactly from early on
    whole = activity.activity(made)
    monkeypatch.setattr(activity, "_MOST_OPS", 100)
    part = activity.activity(made)
    assert whole.left_out == 0 < part.left_out
    assert part.total == whole.total == float(made.step.total[0])

    def key(bar: activity.Bar) -> tuple[str, int, int]:
        return bar.what, bar.stage, bar.micro_batch

    by_key = {key(s): s for s in whole.bars if s.what in ("F", "B", "H", "optimizer")}
    shifts = []
    for bar in part.bars:
        if bar.what in ("F", "B", "H", "optimizer"):
            other = by_key[key(bar)]
            assert bar.end - bar.begin == pytest.approx(other.end - other.begin)
            shifts.append(other.begin - bar.begin)
    last = [max(s.end for s in work.bars if s.what == "collective") for work in (whole, part)]
    assert last[0] - last[1] == pytest.approx(part.left_out)
    early = np.isclose(shifts, 0, atol=1e-9)
    assert (early | np.isclose(shifts, part.left_out)).all() and 0 < early.sum() < len(shifts)


def test_the_step_ends_with_its_reduction_and_the_optimizer(made):
    work = activity.activity(made)
    assert max(s.end for s in work.bars) == pytest.approx(made.step.total[0])
    for stage in range(made.chosen.candidate.pipe):
        ends = max(s.end for s in work.bars if s.what in ("B", "H", "F") and s.stage == stage)
        assert ends <= made.step.finish[0, stage] * (1 + 1e-9)
    last = float(made.step.optimizer[0])
    reduced = max(s.end for s in work.bars if s.what == "collective")
    assert reduced == pytest.approx(made.step.total[0] - last)


def test_ops_wait_for_what_the_schedule_says():
    bars = activity.pipeline(Table("1f1b", 4, 9), EXAMPLE, True)
    needs = dict(zip(((s.what, s.stage, s.micro_batch) for s in bars), activity.waits(bars, (0, 1, 2, 3))))
    assert needs["F", 0, 5] == needs["exposed", 0, -1] == ""
    assert needs["F", 2, 5].startswith("forward of micro-batch 5 on stage 1")
    assert needs["B", 2, 5].startswith("backward of micro-batch 5 on stage 3")
    assert needs["B", 3, 5] == "loss of micro-batch 5 on stage 3"
    # The first forward of stage 3 comes behind three forwards of 1 s and three hops of 0.5 s.
    assert needs["F", 3, 0] == "forward of micro-batch 0 on stage 2, 4.5 s after the op before"


# --- Links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_used_links_are_those_that_carry_something(wraps, seed):
    hosts = placements(1, 4, 3, 2, seed)[0]
    found = charts.used_links(hosts, wraps)
    hops = set()
    for row in hosts.tolist():
        for a, b in zip(row, row[1:] + row[:1] * wraps):
            hops |= {(a, b), (b, a)} if a != b else set()
    assert set(map(tuple, found["hops"].tolist())) == hops
    for stage in hosts.T.tolist():
        own = list(dict.fromkeys(stage))
        turn = {(a, b) for a, b in zip(own, own[1:] + own[:1]) if a != b}
        assert turn <= set(map(tuple, found["rings"].tolist()))


def test_placed_order_lists_each_host_once_by_its_first_place():
    hosts = np.array([[2, 0, 0], [3, 3, 1]])
    assert charts.placed_order(hosts).tolist() == [2, 0, 3, 1]


def rows_of(spec: dict) -> list[dict]:
    """Return the rows of a chart, of columns that are flattened, too."""
    [flatten] = [step["flatten"] for step in spec["transform"] if "flatten" in step]
    [columns] = spec["data"]["values"]
    return [dict(zip(flatten, row)) for row in zip(*(columns[name] for name in flatten), strict=True)]


def test_matrices_have_rate_and_noise_and_bytes_of_each_link(made):
    pair, _ = charts.links(made)
    c = made.chosen.candidate
    orders = np.arange(4), charts.placed_order(made.chosen.placement.hosts)
    for spec, order, hosts in zip(pair, orders, (host_order(c, 4)[0], made.chosen.placement.hosts)):
        [names] = [param["value"] for param in spec["params"]]
        assert names == [made.cluster.hosts[i] for i in order]
        used, sent = charts.used_links(hosts, False), np.zeros((4, 4))
        placement = dataclasses.replace(made.chosen.placement, hosts=hosts)
        placed = dataclasses.replace(made, chosen=dataclasses.replace(made.chosen, placement=placement))
        for _, senders, receivers, size in traffic.flows(placed):
            for a, b, x in zip(senders.ravel(), receivers.ravel(), np.broadcast_to(size, senders.shape).ravel()):
                sent[a, b] += x
        found = {(order[row["from"]], order[row["to"]]): row for row in rows_of(spec)}
        assert len(found) == 16
        for (a, b), row in found.items():
            if a == b:
                assert row["rate"] is None and not row["who"]
                continue
            samples = made.cluster.samples[:, a, b]
            assert row["rate"] == pytest.approx(1e-9 / made.fabric.per_byte[a, b], abs=1e-3)
            assert row["noise"] == pytest.approx(100 * samples.std() / samples.mean(), abs=0.06)
            assert row["gb"] == pytest.approx(sent[a, b] / 1e9, rel=6e-3) and bool(row["who"]) == (sent[a, b] > 0)
            for kind in ("hops", "rings"):
                assert row[kind] == ((a, b) in set(map(tuple, used[kind].tolist())))


def test_large_clusters_are_drawn_in_blocks(made, monkeypatch):
    monkeypatch.setattr(charts, "_MOST_CELLS", 2)
    (before, _), words = charts.links(made)
    assert "mean over 2 x 2" in words
    rates = 1e-9 / made.fabric.per_byte
    assert {(row["from"], row["to"]): row["rate"] for row in rows_of(before)}[0, 1] == pytest.approx(
        rates[:2, 2:].mean(), abs=1e-3
    )


# --- Specifications ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that check the schema
def test_specifications_are_vega_lites(made):
    """With a control: a channel that does not exist is refused."""
    answers = asked_for_nothing()
    every = [
        charts.gains(made),
        *charts.links(made)[0],
        charts.step(made, activity.activity(made)),
        charts.memory(made),
    ]
    every += [*charts.scaling(answers), charts.what_ifs(answers), candidates.chart(made)]
    for spec in every:
        altair.LayerChart.from_dict(spec)
    wrong = copy.deepcopy(every[0])
    wrong["layer"][0]["encoding"]["colour"] = {"value": "red"}
    with pytest.raises(Exception, match="colour"):
        altair.LayerChart.from_dict(wrong)


def test_a_chart_is_a_picture_and_altairs(made):
    assert charts.chart(charts.memory(made), 500).to_dict(validate=False)["width"] == 500
    picture = matplotlib.image.imread(io.BytesIO(charts.png(charts.memory(made), 500)))
    assert 800 < picture.shape[1] <= 1100 and picture[..., :3].std() > 0.05


def test_bars_are_as_long_as_what_they_stand_for(made):
    values = charts.gains(made)["data"]["values"]
    assert [row["more"] for row in values] == [pytest.approx(25), pytest.approx(-1)]
    assert (values[0]["low"], values[0]["high"]) == (pytest.approx(23), pytest.approx(25))
    sizes = {(row["kind"], row["stage"]): row["gb"] for row in charts.memory(made)["data"]["values"]}
    assert sizes == {("weights", 0): 8, ("weights", 1): 8, ("activations", 0): 40, ("activations", 1): 10}


def test_the_step_has_each_op_where_it_runs(made):
    work = activity.activity(made)
    rows = rows_of(charts.step(made, work))
    assert len(rows) == len(work.bars)
    for row, bar in zip(rows, work.bars):
        factor = units.unit(work.total)[0]
        assert (row["begin"], row["end"]) == pytest.approx((bar.begin * factor, bar.end * factor), rel=1e-5, abs=1e-9)
        assert (row["stage"], row["mb"]) == (bar.stage, bar.micro_batch)


@pytest.mark.parametrize(
    "seconds, words", [(1.8661, "1.866 s"), (0.0124, "12.4 ms"), (3.2e-5, "32 µs"), (0.0, "0"), (123.4, "123.4 s")]
)
def test_durations_read_well(seconds, words):
    assert units.duration(seconds) == words


# --- Candidates -------------------------------------------------------------------------------------------------------


def test_all_candidates_are_told_with_what_is_known_of_them(made):
    found, outcome = candidates.table(made), made.outcome
    states = [found["states"][state] for state in found["state"]]
    assert len(states) == outcome.enumerated and states.count("chosen") == 1
    assert states.count("ranked") == len(outcome.ranked) - 1
    assert sum(state != "lower bound" for state in states) == outcome.simulated
    fitting = [size / 1e3 <= found["limit"] for size in found["mb"]]
    assert sum(fitting) == outcome.fitting
    for n, plan in enumerate(outcome.ranked):
        assert found["seconds"][plan.index] == pytest.approx(plan.seconds, rel=1e-4)
        for column in found["columns"]:
            number = numbers_of(plan.candidate)[column["name"]]
            assert column["codes"][plan.index] == np.unique(outcome.space.column(column["name"])).tolist().index(number)
        told = found["details"][str(plan.index)]
        assert told["rank"] == n + 1 and sum(told["terms"]) == pytest.approx(plan.seconds)
    for i, state in enumerate(states):
        if state == "lower bound":
            assert found["seconds"][i] == pytest.approx(outcome.bounds[i], rel=1e-4)


def test_the_best_of_each_mesh_has_terms(made):
    leaders = made.outcome.leaders
    assert leaders[0].index == made.outcome.ranked[0].index
    assert len({tuple(f.candidate.sizes.values()) for f in leaders}) == len(leaders)
    told = candidates.table(made)["details"]
    for f in leaders:
        step = Problem(made.cluster, made.model, f.candidate).step(made.fabric, f.placement.hosts[None])
        if f.index not in {ranked.index for ranked in made.outcome.ranked}:
            assert sum(told[str(f.index)]["terms"]) == pytest.approx(float(step.total[0]))
