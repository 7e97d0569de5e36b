"""A process that compiles for longer than a collective may take ends nothing: the others wait at a barrier.

PAXTRAIN_LATE=60 makes it a minute late instead of four seconds, at each of some eighty barriers.
"""

import json
import os

import pytest

from paxtrain.config import to_dict
from tests.paxtrain.training import configuration
from tests.processes import run_processes
from tests.small import corpus

LATE = """
import json, time
import paxtrain
from paxtrain import profile
from paxtrain.config import from_dict
from paxtrain.parallel.mesh import make_mesh
from paxtrain.process import distributed

seconds, barriers = float(sys.argv[2]), sys.argv[3] == "with"
wait, gather, places = distributed.wait_for_all, distributed.gather_texts, []

def late(what):
    places.append(what)
    if process == 1:
        time.sleep(seconds)
    if barriers:
        wait(what)

def gathered(text):
    places.append("texts are gathered")
    if process == 1:
        time.sleep(seconds)
    return gather(text)

distributed.wait_for_all, distributed.gather_texts = late, gathered
configs = [from_dict(json.loads(values)) for values in json.loads(sys.argv[1])]
results = [paxtrain.train(config, quiet=True) for config in configs]
if barriers:
    profile.profile(configs[0], make_mesh(configs[0].mesh), 1)
print(json.dumps([places, [result.finished for result in results]]))
"""
PLACES = {
    "texts are gathered",
    "checkpoints are set aside",
    "the first state is compiled",
    "the evaluation is compiled",
    "step 1 is compiled",
    "a checkpoint's form is compiled",
    "fingerprints of a checkpoint is compiled",
    "a checkpoint's state is compiled",
    "the backward without reductions is compiled",
    "a reduction of level 4 is compiled",
    "step 2 is profiled",
    "the step is compiled",
}
SECONDS = int(os.environ.get("PAXTRAIN_LATE", "4"))
LIMIT = SECONDS // 2  # of a collective, in seconds


@pytest.mark.slow
@pytest.mark.parametrize("barriers", ["with", "without"])
def test_a_process_that_is_late_everywhere_ends_nothing(tmp_path, monkeypatch, barriers):
    """Without the barriers the same lateness ends the run in a collective."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_collective_timeout_seconds={LIMIT}")
    home = corpus(tmp_path)
    shape = {"mesh__tensor": 2, "run__eval_every": 0, "run__sample_tokens": 0, "model__layers": 2}
    shape |= {"optimizer__warmup_steps": 1, "checkpoint__every": 0, "checkpoint__keep_every": 0}
    selective = {"compress__data_stages": "selective", "compress__data_rank": 4}

    def values(out, steps, **changes):
        return to_dict(configuration(home, tmp_path / out, run__steps=steps, **shape | changes))

    three = [values("run", 1), values("run", 2), values("chosen", 3, **selective) | {"profile": "2:3"}]
    runs = [json.dumps(each) for each in three]
    arguments = (LATE, json.dumps(runs), str(SECONDS), barriers)
    if barriers == "without":
        with pytest.raises(AssertionError, match=r"(?i)deadline|timed? ?out"):
            run_processes(*arguments, limit=240 + 60 * SECONDS)
        return
    for output in run_processes(*arguments, limit=240 + 60 * SECONDS):
        places, finished = json.loads(output.splitlines()[-1])
        assert finished == [True, True, True]
        assert set(places) >= PLACES
