"""A slow host is named once, and once more when it is as fast as the others again."""

import json

import pytest

from paxtrain.process import host_speed
from paxtrain.process.host_speed import HostSpeed


class Store:
    """Stands for the key-value store of jax's coordination service, with the speed of hosts that do not run here."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def other(self, number, seconds):
        self.values[f"paxtrain/host_speed/{number}"] = json.dumps([seconds, f"pax{number}"])


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(host_speed.jax_private, "coordination_client", lambda: made)
    monkeypatch.setattr(host_speed.jax_private, "joined_number", lambda: 0)
    monkeypatch.setattr(host_speed.socket, "gethostname", lambda: "pax0")
    monkeypatch.setattr(host_speed, "_seconds", lambda: 0.001)
    return made


def round_of(speed):
    return [line for _ in range(10) for line in speed.sample()]


def test_a_slow_host_is_named_once(store):
    speed = HostSpeed()
    assert round_of(speed) == []  # it is alone so far
    store.other(1, 0.0015)
    store.other(2, 0.0029)
    assert round_of(speed) == []  # 2.9 / 1.5
    store.other(2, 0.0060)
    said = "process 2 on pax2: its CPU takes 4.0 times as long as the others' for the same work; they may wait for it"
    assert round_of(speed) == [said]
    store.other(2, 0.0040)  # still more than twice
    assert round_of(speed) == []
    store.other(2, 0.0016)
    assert round_of(speed) == ["process 2 on pax2: its CPU is as fast as the others again"]
    assert round_of(speed) == []


def test_of_two_hosts_the_slower_one_is_named(store, monkeypatch):
    store.other(1, 0.001)
    monkeypatch.setattr(host_speed, "_seconds", lambda: 0.004)
    [line] = round_of(HostSpeed())
    assert line.startswith("process 0 on pax0: its CPU takes 4.0 times")


def test_only_process_0_speaks(store, monkeypatch):
    monkeypatch.setattr(host_speed.jax_private, "joined_number", lambda: 1)
    store.other(0, 1.0)
    assert round_of(HostSpeed()) == []
    assert json.loads(store.values["paxtrain/host_speed/1"]) == [pytest.approx(0.001), "pax0"]
