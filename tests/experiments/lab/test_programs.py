"""Programs that one process compiles and another one loads without tracing."""

import os
import subprocess
import sys

from experiments.lab.session import ROOT

_BOTH = """
import pathlib, sys
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from experiments.lab.programs import Programs

jax.config.update("jax_num_cpu_devices", 2)
folder, key = pathlib.Path(sys.argv[1]), sys.argv[2]
programs, devices = Programs(folder), jax.devices()
"""
_COMPILE = """
spread = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
make = lambda: jnp.tile(jnp.linalg.qr(jnp.diag(jnp.arange(1.0, 3.0)))[1], (2, 1)) * jnp.arange(1.0, 5.0)[:, None]
lowered = jax.jit(make, out_shardings=spread).lower()
(first, found), (again, found_again) = (programs.compile(lowered, {}, devices) for _ in range(2))
assert first == again and (found, found_again) == (False, True)
print(first)
"""
# jnp.linalg.qr calls LAPACK, whose functions nothing in the second process has looked up.
_LOAD = """
for order in (devices, devices[::-1]):
    x = programs.load(key, order)()
    assert [shard.device for shard in sorted(x.addressable_shards, key=lambda s: s.index[0].start)] == order
    print(abs(x).tolist())
"""


def _run(script: str, *arguments: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _BOTH + script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_program_runs_in_another_process_on_devices_in_any_order(tmp_path):
    key = _run(_COMPILE, str(tmp_path), "")
    expected = "[[1.0, 0.0], [0.0, 4.0], [3.0, 0.0], [0.0, 8.0]]"
    assert _run(_LOAD, str(tmp_path), key).splitlines() == [expected, expected]
