"""SIGTERM to one of two processes stops both after the same step; one by itself ends at the second."""

import json
import signal

import pytest

from paxtrain.process.stopping import Stop
from tests.processes import run_processes

STOPPING = """
import json, os, signal, tempfile, time
import numpy as np
from paxtrain.run.checkpoint import Checkpoints
from paxtrain.config import CheckpointConfig
from paxtrain.process.stopping import Stop
from jax.experimental import multihost_utils

folder, when = sys.argv[1], int(sys.argv[2])  # steps of this start before the signal
first, asked = 1000, []  # as of a run that was resumed after step 1000
everywhere = jax.make_mesh((8,), ("data",))
state = {"w": jax.device_put(np.zeros(8, np.float32), jax.NamedSharding(everywhere, jax.P("data")))}
with Stop() as stop, Checkpoints(folder, CheckpointConfig()) as checkpoints:
    for step in range(first + 1, first + 40):
        if step == first + 1 + when:
            if jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)  # they have agreed before the next question
        multihost_utils.sync_global_devices("the step")
        time.sleep(0.05)
        asked.append(stop.now())
        if asked[-1]:
            break
        if step % 4 == 0:
            checkpoints.save(step, state, {"step": step})
print(json.dumps(asked))
"""


@pytest.mark.parametrize("when", [0, 4])  # before the first step, and after a checkpoint
def test_both_stop_after_the_same_step_soon_after_the_signal(tmp_path, when):
    outputs = run_processes(STOPPING, tmp_path / "checkpoints", str(when))
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    assert when < len(first) < when + 20 and first[-1] and not any(first[:-1])


def test_a_second_signal_goes_to_the_former_handler():
    seen = []
    former = signal.signal(signal.SIGTERM, lambda *_: seen.append("former"))
    try:
        with Stop() as stop:
            assert not stop.now()
            signal.raise_signal(signal.SIGTERM)
            assert stop.now() and seen == []
            signal.raise_signal(signal.SIGTERM)
            assert seen == ["former"]
    finally:
        signal.signal(signal.SIGTERM, former)
