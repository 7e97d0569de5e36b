"""What the probe times: each device of a process, and each link between hosts, at the end that receives."""

import json

import jax
import numpy as np
import pytest

from paxtrain.run.stragglers import probe
from tests.processes import run_processes


def test_devices_work_for_a_time_that_is_chosen_at_the_start():
    work = probe.DeviceWork(jax.local_devices()[:2])
    of_a_turn = np.array(work())
    assert of_a_turn.shape == (2,) and all(of_a_turn * work._turns > 0.1 * probe._WORK)  # one shares its core with more


PROBE = """
import json, time
import numpy as np
from paxtrain.config import MeshConfig
from paxtrain.parallel.mesh import make_mesh
from paxtrain.run.stragglers.probe import Probe

probe = Probe(make_mesh(MeshConfig(data=2, pipe=2)), [0, 1], 4096)
print(json.dumps([[*part, seconds] for part, seconds in probe().items()]))
"""


def test_each_process_times_its_own_parts():
    outputs = run_processes(PROBE, devices=2)
    for me, output in enumerate(outputs):
        found = {tuple(part): seconds for *part, seconds in json.loads(output.splitlines()[-1])}
        assert set(found) == {("link", 1 - me, me), ("device", me, 0), ("cpu", me, 0)}
        assert min(found.values()) > 0


@pytest.mark.parametrize("bytes_", [1, 1 << 30])
def test_messages_are_neither_tiny_nor_huge(bytes_, monkeypatch):
    shapes = []
    monkeypatch.setattr(probe.jnp, "zeros", lambda shape, _: shapes.append(shape) or 1 / 0)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    monkeypatch.setattr(probe, "neighbors", lambda *_: {(0, 1): (0, 1)})
    with pytest.raises(ZeroDivisionError):
        probe.LinkWork(mesh, [0], bytes_)
    assert shapes == [(2, 16_384 if bytes_ == 1 else 4 << 20)]
