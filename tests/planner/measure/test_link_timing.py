"""Link rounds: all hosts are paired, the programs send the right messages, and times become links."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from planner.cluster.link_fit import Filled
from planner.cost.link_seconds import fabric, paths
from planner.measure import link_timing
from planner.measure.link_timing import Exchange, LinkTimes, MessageTimes, plan_rounds, sampled, tournament
from planner.measure.machines import Machines
from planner.measure.process_group import ProcessGroup
from planner.measure.profile_links import fan_out, time_fan_out
from tests.planner.examples import cluster

MIB = 1 << 20


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 12, 33])
def test_everybody_meets_everybody_once_in_as_few_rounds_as_there_can_be(count):
    rounds = tournament(count)
    assert len(rounds) == count - 1 + count % 2
    for pairs in rounds:
        ends = [end for pair in pairs for end in pair]
        assert len(set(ends)) == len(ends) == count - count % 2
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == sorted(itertools.combinations(range(count), 2))


def test_a_sample_of_the_rounds_still_has_every_host():
    rounds = sampled(tournament(100), 8)
    assert len(rounds) == 8
    assert all(sorted(end for pair in pairs for end in pair) == list(range(100)) for pairs in rounds)
    assert sampled(tournament(6), 8) == tournament(6)


def test_rounds_use_the_first_device_of_a_host_and_for_the_nics_all():
    rounds = plan_rounds(hosts=3, per_host=4, most=63)
    between = [r for r in rounds if r.kind == "between"]
    assert [r.devices for r in between] == [[(4 * a, 4 * b) for a, b in r.hosts] for r in between]
    [inside] = [r for r in rounds if r.kind == "inside"]
    assert inside.devices == [(0, 1), (4, 5), (8, 9)]
    [crowd] = [r for r in rounds if r.kind == "crowd"]
    [(a, b)] = crowd.hosts
    assert crowd.devices == [(4 * a + i, 4 * b + i) for i in range(4)]
    assert plan_rounds(1, 1, 63) == []


def test_all_rounds_are_branches_of_one_program_per_size(monkeypatch):
    compiled = []
    real = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, *a: compiled.append(real(self, *a)) or compiled[-1])
    rounds = plan_rounds(hosts=4, per_host=2, most=63)
    exchange = Exchange(jax.devices(), rounds, (MIB, 2 * MIB))
    assert len(compiled) == 3  # echoes, and two sizes
    text = compiled[1].as_text()
    assert text.count(" conditional(") == 1
    for r in rounds:
        for pairs in (r.devices, [(b, a) for a, b in r.devices]):
            listed = "{" + ",".join(f"{{{a},{b}}}" for a, b in pairs) + "}"
            assert f"source_target_pairs={listed}" in text
    for number in range(len(rounds)):
        times = exchange(number)
        assert times.echo > 0
        assert len(times.there) == len(times.back) == 2
        assert all(second > 0 for second in times.there + times.back)


def test_a_call_during_which_the_machine_was_busy_does_not_count(monkeypatch):
    took = iter([0.32, 9.0, 0.33] + [9.0, 4.2, 4.0] + [6.2, 6.0, 9.0])  # echoes; there; back
    exchange = Exchange(jax.devices(), plan_rounds(8, 1, 1), (MIB,))
    monkeypatch.setattr(exchange, "_echo", lambda number: None)
    monkeypatch.setattr(link_timing, "_seconds", lambda run, branch: next(took))
    assert exchange(0) == MessageTimes(0.01, [2.0], [3.0])


def test_messages_are_as_big_and_as_many_as_said(monkeypatch):
    texts = []
    real = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self, *a: texts.append(self.as_text()) or real(self, *a))
    Exchange(jax.devices(), plan_rounds(8, 1, 1), (2 * MIB,))
    assert "collective_permute" in texts[1]
    assert f"tensor<1x{2 * MIB // 4}xf32>" in texts[1]


def _enter(book, repeat, number, speeds, echo=1e-4, ratio=1.0):
    """Enter the times of a round of three hosts.

    Every host has one more process that took no part, so its times are tiny.

    Args:
        book: times of all rounds, which gets these.
        repeat: index of the repeat.
        number: index of the round.
        speeds: [3, 3] bytes/s of each link.
        echo: seconds of a tiny message.
        ratio: factor of all times of large messages.
    """
    times: dict[int, list[MessageTimes]] = {}
    for a, b in book.rounds[number].hosts:
        there, back = (list(book.sizes / speed * ratio) for speed in (speeds[a, b], speeds[b, a]))
        # The sender may be done before the receiver.
        times.setdefault(a, []).append(MessageTimes(echo, [0.5 * t for t in there], back))
        times.setdefault(b, []).append(MessageTimes(0.9 * echo, there, [0.5 * t for t in back]))
    for host in range(3):
        times.setdefault(host, []).append(MessageTimes(1e-6, [1e-6] * len(book.sizes), [1e-6] * len(book.sizes)))
    book.enter(repeat, number, times)


def test_a_pair_takes_as_long_as_its_slower_end_and_directions_are_kept_apart():
    speeds = np.array([[5e9, 1e8, 2e8], [3e8, 5e9, 4e8], [5e8, 6e8, 5e9]])
    rounds = plan_rounds(3, 2, 63)
    book = LinkTimes(rounds, 3, 2, (MIB, 4 * MIB), repeats=2)
    for number, r in enumerate(rounds):
        _enter(book, 0, number, speeds, ratio=1.5 if r.kind == "crowd" else 1.0)
    alpha, samples = book.links()
    np.testing.assert_allclose(samples[0], speeds, rtol=1e-9)
    np.testing.assert_allclose(alpha, 1e-4)
    assert np.isnan(samples[1]).all()  # the second repeat was never run


@pytest.mark.parametrize(("ratio", "nics"), [(1.0, 2), (1.9, 1), (0.7, 2)])
def test_nics_are_told_from_all_devices_sending_at_once(ratio, nics):
    rounds = plan_rounds(3, 2, 63)
    book = LinkTimes(rounds, 3, 2, (MIB,), repeats=1)
    for number, r in enumerate(rounds):
        _enter(book, 0, number, np.full((3, 3), 1e9), ratio=ratio if r.kind == "crowd" else 1.0)
    assert book.nics() == nics


@pytest.mark.parametrize(
    ("slowness", "flows", "nics", "expected"),
    [
        (7.0, (1, 7), 1, 1.0),  # all seven share one NIC
        (1.0, (1, 7), 1, 7.0),  # each link is free of the others
        (0.9, (1, 7), 1, 7.0),  # and no time makes it more than that
        (2.0, (1, 7), 1, 3.5),
        (10.0, (1, 7), 1, 0.7),  # the NIC is full in one direction while it waits in the other
        (20.0, (1, 7), 1, 0.5),  # a machine that was busy
        (2.0, (2, 14), 1, 7.0),  # two devices share the link of two hosts, which are seven pairs
        (7.0, (2, 14), 2, 1.0),
    ],
)
def test_fan_out_is_told_from_all_to_alls(slowness, flows, nics, expected):
    assert fan_out(slowness, flows, nics) == pytest.approx(expected)


def test_an_all_to_all_of_the_planner_is_as_slow_as_those_that_its_fan_out_was_told_from():
    hosts = np.arange(8).reshape(1, 8, 1)
    some = cluster(8, 1, seed=None, links={"alpha": 0.0, "bandwidth": np.full((8, 8), 1e6).tolist()})
    some = dataclasses.replace(some, fan_out=fan_out(3.0, (1, 7), 1))
    links = dataclasses.replace(fabric(some), rings=False)
    assert paths(links, hosts, 1).scatter[1][0, 0] == pytest.approx(3.0 * 1e-6 / 8)


def test_an_all_to_all_runs_over_the_hosts():
    assert 0 < link_timing.all_to_all(jax.devices(), 2, MIB, pause=1e-3, repeats=1)() < 60


def test_the_fan_out_of_four_hosts_is_timed_and_within_its_bounds():
    devices = jax.devices()[:4]
    machines = Machines(tuple("abcd"), (0,), tuple(devices), 1, ("cpu",) * 4, (1e9,) * 4, ("",) * 4)
    off = ~np.eye(4, dtype=bool)
    filled = Filled(np.full((4, 4), 1e-5), np.full((2, 4, 4), 1e9), off, 0.0)
    assert 0.5 <= time_fan_out(ProcessGroup(30), machines, filled, nics=1, largest=MIB) <= 3.0


def test_rounds_that_were_left_out_are_not_made_up():
    rounds = plan_rounds(3, 1, 63)
    book = LinkTimes(rounds, 3, 1, (MIB,), repeats=1)
    _enter(book, 0, 0, np.full((3, 3), 1e9))
    alpha, samples = book.links()
    [(a, b)] = rounds[0].hosts
    known = np.zeros((3, 3), bool)
    known[a, b] = known[b, a] = True
    assert (np.isnan(samples[0]) == ~known).all()
    assert (np.isnan(alpha) == ~known).all()
    assert book.nics() == 1
