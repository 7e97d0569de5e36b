"""When a step counts as late, and the line that says why."""

import dataclasses

import pytest

from planner.supervision.slow_step import SlowStepClock, StepView, seen
from tests.planner.supervision.statuses import RUNNING

NAMES = ("pax0", "pax1", "pax2 (stage 1)", "pax3")
WAITING = dataclasses.replace(RUNNING, told_age=9.0, step_seconds=2.0)
EVEN = {0: (2.4e7, 2.5e7), 1: (2.2e7, 2.5e7), 2: (2.6e7, 2.5e7), 3: (2.4e7, 2.5e7)}


def looks(clock: SlowStepClock, *steps: float, first: int = 0, median: float = 2.0, **changes) -> list[int]:
    """Return the steps that the clock calls late; they take so many seconds each, and it looks four times a second."""
    late = []
    for number, seconds in enumerate(steps, first):
        for quarter in range(int(4 * seconds)):
            status = dataclasses.replace(
                WAITING, step=number, told_age=quarter / 4, step_seconds=median if number else None, **changes
            )
            if clock.look(status):
                late.append(number)
    return late


def test_a_late_step_is_told_once():
    clock = SlowStepClock(3.0)
    assert looks(clock, *[2.0] * 8, 7.0, 2.0, 2.0, 9.0) == [8, 11]
    assert looks(clock, 5.9, first=12) == []


def test_slow_steps_that_follow_each_other_are_one_trouble():
    clock = SlowStepClock(3.0)
    assert looks(clock, *[2.0] * 6, 7.0, 8.0, 7.0, 2.0, 7.0) == [6, 10]


@pytest.mark.parametrize(
    "changes", [{"doing": "saving a checkpoint"}, {"doing": "compiling"}, {"state": "ended"}, {"failed": True}]
)
def test_what_is_no_step_is_never_late(changes):
    clock = SlowStepClock(3.0)
    assert looks(clock, *[2.0] * 8) == []
    assert looks(clock, 60.0, first=8, **changes) == []


def test_short_steps_and_first_steps_are_not_late():
    assert (
        looks(SlowStepClock(3.0), *[0.25] * 8, 2.0, median=0.25) == []
    )  # eight times the median, and not worth a line
    assert looks(SlowStepClock(3.0), *[0.25] * 8, 3.0, median=0.25) == [8]
    assert looks(SlowStepClock(3.0), 2.0, 2.0, 60.0, 2.0) == []  # too few to know how long one takes


def views(**changes) -> dict[int, StepView]:
    """Return each host's view as it travels: pax1={...} changes that of pax1; None means that it has not answered."""
    found = {}
    for rank in range(len(NAMES)):
        links = {other: EVEN[other] for other in ((rank + 1) % 4, (rank - 1) % 4)}
        change = changes.get(f"pax{rank}", {})
        if change is not None:
            worker = dataclasses.replace(WAITING, **change.get("worker", {}))
            values = {"late": True, "about": 41, "pace": 0.001, "links": links}
            values |= {name: value for name, value in change.items() if name != "worker"}
            found[rank] = StepView.from_json(StepView(worker, **values).to_json())
    return found


FIRST = "is the one the others wait for: "
SLOW = {3: (1.1e6, 2.5e7), 1: EVEN[1]}


@pytest.mark.parametrize(
    ("changes", "text", "hosts"),
    [
        ({}, "nothing to be seen from outside", ()),
        ({"pax3": None}, f"pax3 {FIRST}its supervisor does not answer", (3,)),
        ({"pax2": {"worker": {"frozen": "stopped by a signal"}}}, f"pax2 (stage 1) {FIRST}stopped by a signal", (2,)),
        (
            {
                "pax0": {"worker": {"frozen": "waiting for a disk"}},
                "pax1": {"worker": {"frozen": "waiting for a disk"}},
            },
            f"pax0 {FIRST}waiting for a disk, and so is pax1",
            (0, 1),
        ),
        ({"pax1": {"pace": 0.0042}}, f"pax1 {FIRST}its CPU takes 4.2 times as long as the others' for the same", (1,)),
        ({"pax1": {"pace": 0.0029}}, "nothing to be seen", ()),
        ({"pax2": {"links": SLOW}}, "the link pax2 (stage 1) - pax3 carries 1.1 MB/s, 25 MB/s when the run", (2, 3)),
        ({"pax2": {"links": {3: (0.0, 2.5e7)}}}, "the link pax2 (stage 1) - pax3 carries next to nothing, 25", (2, 3)),
        ({"pax2": {"links": {3: (7e6, 2.5e7)}}}, "nothing to be seen", ()),
        ({"pax2": {"links": {3: (0.0, 0.0)}}}, "nothing to be seen", ()),  # no less than at the start
        ({"pax2": {"links": {3: (2e8, 5e9)}}}, "nothing to be seen", ()),  # above 0.5 GB/s the CPU is the limit
        ({"pax2": {"links": {3: (1e8, 5e9)}}}, "the link pax2 (stage 1) - pax3 carries 100 MB/s, over 500", (2, 3)),
        (
            {"pax0": {"links": {1: (2e6, 2.5e7), 3: (1e6, 2.5e7)}}},
            "the links of pax0 are slow: that to pax3 carries 1 MB/s, 25 MB/s when the run began",
            (0,),
        ),
        (
            {"pax0": {"links": {1: (2e6, 2.5e7)}}, "pax2": {"links": SLOW}},
            "the link pax2 (stage 1) - pax3 carries 1.1 MB/s, 25 MB/s when the run began; 1 more is slow, too",
            (2, 3),
        ),
        ({"pax3": {"worker": {"step": 40}}}, f"pax3 {FIRST}it has not finished step 41", (3,)),
        ({name: {"worker": {"step": 40}} for name in ("pax0", "pax1", "pax2")}, "nothing to be seen", ()),
    ],
)
def test_what_is_said(changes, text, hosts):
    found = seen(views(**changes), NAMES)
    assert found.text.startswith(text) and found.hosts == hosts


def test_what_explains_others_comes_first():
    """A slow CPU makes the links slow that end there, and a worker that waits for a slow link is behind."""
    changes = {"pax2": {"links": SLOW}, "pax3": {"worker": {"step": 40}}}
    assert seen(views(**changes), NAMES).text.startswith("the link pax2")
    changes["pax2"] |= {"pace": 0.01}
    assert "pax2 (stage 1) is the one the others wait for: its CPU" in seen(views(**changes), NAMES).text
    changes["pax1"] = {"worker": {"frozen": "stopped by a signal"}}
    assert seen(views(**changes), NAMES).text.startswith(f"pax1 {FIRST}stopped")
    changes["pax0"] = None
    assert seen(views(**changes), NAMES).hosts == (0,)


def test_one_host_alone():
    assert seen({0: StepView(WAITING, pace=0.1)}, NAMES[:1]).hosts == ()


def test_ages_grow_on_the_way():
    assert StepView(WAITING).older(1.5).worker.told_age == 10.5
