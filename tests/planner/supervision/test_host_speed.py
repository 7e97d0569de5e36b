"""A CPU that falls behind its neighbours' is named once, and again when it has caught up."""

import asyncio

import pytest

from planner.supervision import host_speed
from planner.supervision.host_speed import HostSpeed
from planner.supervision.peer_connections import PeerConnections

NAMES = ("pax0", "pax1", "pax2")


def told(me: int, *paces: float) -> tuple[list[str], list[float]]:
    """Return the notes and slowdowns of host `me`, which takes these seconds; its neighbors take a millisecond."""
    said: list[str] = []
    channel = PeerConnections(me, [(name, 1) for name in NAMES], "run", b"secret" * 6)
    watch = HostSpeed(me, NAMES, channel, None, said.append)
    channel.asides = {1: 0.001, 2: 0.001, 3: None}  # one of them is between steps
    slow = []
    for channel.aside in paces:
        watch.tell()
        slow.append(watch.slow)
    return said, slow


def test_who_falls_behind_is_named_until_he_catches_up():
    said, slow = told(1, 0.001, 0.0029, 0.0031, 0.0029, 0.0021, 0.0019, 0.0029)
    assert slow == pytest.approx([0, 0, 3.1, 2.9, 2.1, 0, 0])
    assert said == [
        "note: pax1's CPU takes 3.1 times as long as the others' for the same work; they may wait for it",
        "note: pax1's CPU is as fast as the others again",
    ]


def test_the_first_host_says_it_of_others():
    said: list[str] = []
    for me, lines in ((0, 1), (2, 0)):
        channel = PeerConnections(me, [(name, 1) for name in NAMES], "run", b"secret" * 6)
        watch = HostSpeed(me, NAMES, channel, None, said.append)
        channel.board.put("slow/1", 4.2)
        said.clear()
        watch.tell()
        watch.tell()
        assert [line.startswith("note: pax1's CPU takes 4.2 times") for line in said] == [True] * lines


def test_a_burst_takes_half_a_second_and_tells_a_mean(monkeypatch):
    samples = iter([0.001] * 11 + [0.013])  # one sample was disturbed
    monkeypatch.setattr(host_speed, "_sample", lambda: next(samples))
    assert asyncio.run(host_speed.burst()) == pytest.approx(0.002)
