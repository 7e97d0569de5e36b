"""Emulated devices leave their host's cores free, and stand still while gradients are reduced."""

import json
import subprocess
import sys

from experiments.lab.session import ENVIRONMENT, ROOT

CORES = """
from planner.measure import machines
from experiments.lab import device

roster = [machines._Entry("h", 1, "cpu", 1.0, "", "", "", "computer", 2)] * 8
before = machines.crowded_cores(roster)
device.install()
print(set(before), machines.crowded_cores(roster))
"""

# Steps of two data ranks, with 50 ms more for each layer's reduction, or for the real compute of each backward.
CLOCK = """
import json
import time

import jax

from paxtrain.parallel import gradients
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.pipeline.stage import Stage
from experiments.lab import device
from experiments.lab.models import Split

jax.config.update("jax_num_cpu_devices", 2)
slow, found = "", {}
reduce_layers, backward = gradients.reduce_layers, Stage.backward


def late(x):
    return jax.pure_callback(lambda x: (time.sleep(0.05), x)[1], jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def slow_reduction(compression, level, layers, state):
    if slow == "reduction":
        leaves, structure = jax.tree.flatten(layers)
        layers = jax.tree.unflatten(structure, [late(leaves[0]), *leaves[1:]])
    return reduce_layers(compression, level, layers, state)


def slow_backward(self, chunk, mb, residuals, slot, cotangents, *rest):
    g, *others = cotangents
    return backward(self, chunk, mb, residuals, slot, (late(g) if slow == "compute" else g, *others), *rest)


gradients.reduce_layers, Stage.backward = slow_reduction, slow_backward
device.install()
config = Split((2, 1, 1), layers=4, global_batch=16).config
mesh = make_mesh(config.mesh)
for slow in ("", "reduction", "compute"):
    trainer = Trainer(config, mesh)
    state = trainer.init(0)
    batch = jax.device_put(jax.numpy.zeros(trainer.abstract_batch().shape, "int32"), trainer.batch_sharding)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(trainer.step(state, batch))
        seconds.append(time.perf_counter() - began)
    found[slow] = min(seconds[1:])
print(json.dumps(found))
"""


def _said(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout.split("\n")[-2]


def test_processes_with_such_devices_are_not_crowded():
    assert _said(CORES) == "{(8, 2)} ()"


def test_a_backward_takes_its_time_and_that_of_its_reductions_but_hides_real_compute():
    seconds = json.loads(_said(CLOCK))
    compute = 2 * (4 * (1 + 3) * 8e-3 + 8e-3)  # two micro-batches of F, B and head
    assert seconds[""] > compute
    assert seconds["reduction"] > compute + 4 * 0.05
    assert seconds["compute"] < seconds[""] + 0.08  # 0.1 s of real compute lie within the 0.2 s of both backwards
