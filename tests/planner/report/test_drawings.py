"""Drawings against plain recomputation of their intervals, links, fronts and rasters."""

import base64
import dataclasses
import io
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest

from planner.pipeline.rows import Table
from planner.pipeline.simulator import Seconds
from planner.report import contents, drawings, gantt, svg
from tests.planner.examples import cluster, placements
from tests.planner.report.reports import made_report

EXAMPLE = Seconds(forward=np.full((1, 4), 1.0), backward=np.full((1, 4), 2.0), activation=0.5, gradient=0.5)


@pytest.fixture(scope="module")
def made() -> contents.Report:
    return made_report()


def total(bars: list[gantt.Bar], stage: int, *kinds: str) -> float:
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
        found = gantt.outside(parts, busy)
        np.testing.assert_array_equal(within(found), within(parts) & ~within(busy))
        assert all(a[1] < b[0] for a, b in zip(found, found[1:])), "neighbours are joined"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["eager_1f1b", "gpipe", "1f1b", "zb_h1"])
def test_micro_batches_pass_the_stages_in_order(name, overlap):
    bars = gantt.pipeline(Table(name, 4, 7), dataclasses.replace(EXAMPLE, weights=1.0), overlap)
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
    bars = gantt.pipeline(Table("interleaved_1f1b", 3, 6, 2), seconds, True)
    for stage in range(3):
        for what in "FB":
            numbers = sorted(s.micro_batch for s in bars if s.stage == stage and s.what == what)
            assert numbers == sorted([*range(6)] * 2)


def test_exposed_transfers_are_those_that_1f1b_is_known_for():
    # With equal stages, F = 1, B = 2 and hops of 0.5, 1F1B takes 71 s instead of 57 s. Eager 1F1B takes 60 s, since
    # compute hides most of its hops.
    plain, eager = (gantt.pipeline(Table(name, 4, 16), EXAMPLE, True) for name in ("1f1b", "eager_1f1b"))
    assert total(plain, 0, "exposed") > 10 > total(eager, 0, "exposed") > 0
    for bars in (plain, eager):
        assert total(bars, 2, "F", "B") == pytest.approx(48)
        for stage in range(4):
            mine = sorted((s.begin, s.end) for s in bars if s.stage == stage and s.what != "H")
            assert all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:])), "a stage does one thing at a time"
    free = dataclasses.replace(EXAMPLE, activation=0.0, gradient=0.0)
    assert not [s for s in gantt.pipeline(Table("1f1b", 4, 16), free, True) if s.what == "exposed"]


@pytest.mark.parametrize("name", ["activation", "gradient"])
def test_a_slow_hop_is_exposed_at_its_two_ends_only(name):
    sender, ends = (0, (0, 1)) if name == "activation" else (3, (2, 3))
    hops = {"activation": 0.0, "gradient": 0.0} | {name: 3.0 * (np.arange(4) == sender)[None]}
    slow = dataclasses.replace(EXAMPLE, **hops)
    bars = gantt.pipeline(Table("1f1b", 4, 9), slow, True)
    for stage in range(4):
        assert (total(bars, stage, "exposed") > 1) == (stage in ends)


def test_scrap_is_not_taken_for_work():
    eager = gantt.pipeline(Table("eager_1f1b", 4, 8), EXAMPLE, True)
    assert total(eager, 3, "scrap") > 0
    assert not [s for s in gantt.pipeline(Table("1f1b", 4, 8), EXAMPLE, True) if s.what == "scrap"]


def test_leaving_the_middle_out_changes_nothing_else(monkeypatch):
    alike = cluster(8, 4, seed=None)
    made = made_report(micro_batches=64, schedule="1f1b", pipe=4, cluster=alike)  # rows repeat exactly from early on
    whole = gantt.activity(made)
    monkeypatch.setattr(gantt, "_MOST_OPS", 100)
    part = gantt.activity(made)
    assert whole.left_out == 0 < part.left_out
    assert part.total == whole.total == float(made.step.total[0])

    def key(bar: gantt.Bar) -> tuple[str, int, int]:
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
    work = gantt.activity(made)
    assert max(s.end for s in work.bars) == pytest.approx(made.step.total[0])
    for stage in range(made.chosen.candidate.pipe):
        ends = max(s.end for s in work.bars if s.what in ("B", "H", "F") and s.stage == stage)
        assert ends <= made.step.finish[0, stage] * (1 + 1e-9)
    last = float(made.step.optimizer[0])
    reduced = max(s.end for s in work.bars if s.what == "collective")
    assert reduced == pytest.approx(made.step.total[0] - last)


@pytest.mark.parametrize("micro_batches, cut", [(2, False), (64, True)])
def test_only_long_steps_are_cut(micro_batches, cut):
    drawn, caption = gantt.gantt(made_report(micro_batches=micro_batches))
    assert ("left out" in drawn) == ("cut out" in caption) == cut


# --- Links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_used_links_are_those_that_carry_something(wraps, seed):
    hosts = placements(1, 4, 3, 2, seed)[0]
    found = drawings.used_links(hosts, wraps)
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
    assert drawings.placed_order(hosts).tolist() == [2, 0, 3, 1]


def test_heat_maps_hold_the_bandwidths(made):
    images = [e for e in ET.fromstring(drawings.links(made)[0]).iter() if e.tag == "image"]
    before = pixels(images[0])
    size = len(made.cluster.hosts)
    assert before.shape[:2] == (size, size)
    apart = ~np.eye(size, dtype=bool)
    # Slower links are darker.
    speed, light = (1 / made.fabric.per_byte)[apart], before.sum(axis=2)[apart]
    order = np.argsort(speed)
    assert (np.diff(light[order]) >= -1e-6).all() and light.max() > 2 * light.min()
    order = drawings.placed_order(made.chosen.placement.hosts)
    np.testing.assert_array_equal(pixels(images[1]), before[np.ix_(order, order)])


def test_large_clusters_are_drawn_in_blocks(made, monkeypatch):
    monkeypatch.setattr(drawings, "_MOST_CELLS", 2)
    drawn, words = drawings.links(made)
    assert "mean over 2 x 2" in words
    image = next(e for e in ET.fromstring(drawn).iter() if e.tag == "image")
    assert pixels(image).shape[:2] == (2, 2)


def pixels(image: ET.Element) -> np.ndarray:
    """Return the colors [rows, columns, 3] of an image element, 0 to 1."""
    data = image.attrib["href"].partition("base64,")[2]
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(data)))[..., :3]


# --- Points and scales ------------------------------------------------------------------------------------------------


def test_the_front_is_of_all_points_that_nothing_beats():
    points = np.random.default_rng(1).integers(0, 12, (60, 2)).astype(float)
    beaten = [any((q <= p).all() and (q < p).any() for q in points) for p in points]
    expected = {tuple(p) for p, b in zip(points.tolist(), beaten) if not b}
    front = drawings.pareto(points)
    assert {tuple(p) for p in front.tolist()} == expected and len(front) == len(expected)
    assert (np.diff(front[:, 0]) > 0).all() and (np.diff(front[:, 1]) < 0).all()


@pytest.mark.parametrize("low, high", [(0, 1), (0.0013, 0.0019), (-3, 41), (22.1, 25.9), (1e5, 9e9)])
def test_ticks_are_round_and_inside(low, high):
    found = svg.ticks(low, high, 6)
    assert 3 <= len(found) <= 8 and low - 1e-9 <= found[0] and found[-1] <= high * (1 + 1e-9)
    step = found[1] - found[0]
    assert f"{step:.6e}"[0] in "125" and np.allclose(np.diff(found), step)


def test_a_png_keeps_its_pixels():
    palette = svg.ramp(["#000000", "#ff8000"], 5)
    indices = np.random.default_rng(0).integers(0, 5, (7, 3)).astype(np.uint8)
    back = matplotlib.image.imread(io.BytesIO(svg.png(indices, palette)))[..., :3]
    np.testing.assert_allclose(back, palette[indices] / 255, atol=1e-6)
    assert palette[0].tolist() == [0, 0, 0] and palette[-1].tolist() == [255, 128, 0]


@pytest.mark.parametrize(
    "seconds, words", [(1.8661, "1.866 s"), (0.0124, "12.4 ms"), (3.2e-5, "32 µs"), (0.0, "0"), (123.4, "123.4 s")]
)
def test_durations_read_well(seconds, words):
    assert svg.duration(seconds) == words
