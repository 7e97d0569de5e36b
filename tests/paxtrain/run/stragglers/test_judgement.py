"""What explains slower steps: a host, a device, one direction of a link, the input, or nothing."""

import dataclasses

import numpy as np
import pytest

from paxtrain.run.stragglers.judgement import JobNames, Judge
from paxtrain.run.stragglers.step_change import StepChange
from paxtrain.run.stragglers.suspects import CPU, DEVICE, INPUT, LINK, Suspect

HOSTS, DEVICES = 4, 2
JOB = JobNames([f"pax{i}" for i in range(HOSTS)], range(HOSTS), ["cpu"] * HOSTS)
SLOWER = StepChange(1.0, 1.4, 8)


def usual(noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    parts = [Suspect(CPU, i) for i in range(HOSTS)] + [
        Suspect(DEVICE, i, d) for i in range(HOSTS) for d in range(DEVICES)
    ]
    parts += [Suspect(LINK, a, (a + step) % HOSTS) for a in range(HOSTS) for step in (1, 3)]
    return {part: (0.01 + 0.001 * i) * float(np.exp(random.normal(0, noise))) for i, part in enumerate(parts)}


def found(slow, change=SLOWER, noise=0.0, seed=9):
    judge = Judge(JOB, [usual(noise, seed) for seed in range(5)])
    now = usual(noise, seed)
    return judge.culprits({part: seconds * slow.get(part, 1.0) for part, seconds in now.items()}, change)


def on(host):
    """Return all that is on a host, and its links."""
    return [part for part in usual() if host in (part.first, *([part.second] if part.kind == LINK else []))]


def test_nothing_explains_slower_steps_if_all_takes_as_long_as_before():
    assert found({}) == []
    assert [culprit for seed in range(50) for culprit in found({}, noise=0.05, seed=seed)] == []


def test_a_slow_host_is_named_and_its_links_are_not():
    [culprit] = found(dict.fromkeys(on(2), 3.0), noise=0.03)
    assert (culprit.name, culprit.host, culprit.link) == ("host/pax2", "pax2", ())
    assert culprit.words.startswith("host pax2 takes ") and culprit.times == pytest.approx(3, rel=0.15)


def test_a_slow_device_is_not_its_host():
    [culprit] = found({Suspect(DEVICE, 1, 1): 1.5})
    assert (culprit.name, culprit.host) == ("device/1.1", "pax1")
    words = "device 1 of process 1 on pax1 takes 1.5 times as long as at the start for the same work"
    assert culprit.words == words


def test_a_slow_cpu_of_a_host_whose_devices_are_not():
    [culprit] = found({Suspect(CPU, 3): 2.0})
    assert (culprit.name, culprit.host) == ("host/pax3", "pax3") and "the CPU of host pax3 takes 2 " in culprit.words


def test_a_link_is_named_in_the_direction_that_is_slow():
    [culprit] = found({Suspect(LINK, 0, 1): 10.0}, noise=0.03)
    assert (culprit.name, culprit.link, culprit.host) == ("link/pax0-to-pax1", ("pax0", "pax1"), "")
    assert culprit.words.startswith("the link from pax0 to pax1 takes ")


def test_a_link_far_slower_than_its_slow_host_is_named_besides_and_the_worst_is_first():
    slow = dict.fromkeys(on(2), 2.0) | {Suspect(LINK, 2, 3): 20.0, Suspect(LINK, 0, 1): 3.0}
    assert [culprit.name for culprit in found(slow)] == ["link/pax2-to-pax3", "link/pax0-to-pax1", "host/pax2"]


def test_what_is_less_slow_than_the_step_does_not_explain_it():
    slow = {Suspect(DEVICE, 0, 0): 1.25}
    assert found(slow, StepChange(1.0, 2.0, 8)) == []
    assert [culprit.name for culprit in found(slow, StepChange(1.0, 1.2, 8))] == ["device/0.0"]


def test_when_all_are_slow_no_host_is_named():
    everything = dict.fromkeys(usual(), 2.0)
    assert {culprit.name for culprit in found(everything)} == {"device/most", "cpu/most", "link/most"}
    slowest = everything | {part: 8.0 for part in on(1) if part.kind != LINK}
    assert "host/pax1" in {culprit.name for culprit in found(slowest)}


def test_a_wait_for_input_explains_a_step_that_lost_as_much():
    judge = Judge(JOB, [usual()])
    for longer, expected in ((0.3, ["term/input"]), (0.1, [])):
        culprits = judge.culprits(usual() | {Suspect(INPUT, 2): longer, Suspect(INPUT, 0): 0.0}, SLOWER)
        assert [culprit.name for culprit in culprits] == expected
        assert all("process 2 on pax2 waits 0.3 s longer for input" in culprit.words for culprit in culprits)


def test_a_host_that_is_slow_from_the_start_is_named_among_those_of_its_kind():
    usual_there = dict.fromkeys(usual(), 0.01)
    assert Judge(JOB, [usual_there]).behind() == []
    slow = usual_there | dict.fromkeys(on(2), 0.03)
    [culprit] = Judge(JOB, [slow]).behind()
    assert culprit.words == "host pax2 takes 3 times as long as most others for the same work"
    kinds = dataclasses.replace(JOB, kinds=["h100", "h100", "v100", "v100"])
    assert Judge(kinds, [slow | dict.fromkeys(on(3), 0.03)]).behind() == []
