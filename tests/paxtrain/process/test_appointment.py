"""Processes that step at their own pace all meet after the same step, and never step past it."""

import json

from paxtrain.process.appointment import Appointment
from tests.processes import run_processes

MEETING = """
import json, time
from paxtrain.process.appointment import Appointment

me, found = jax.process_index(), []
for turn in range(2):  # a second one in the same processes has keys of its own
    with Appointment("meeting") as appointment:
        for step in range(1, 61):
            time.sleep(0.02 if me else 0.05)  # processes that do not wait for each other
            if me == 0 and step in (10, 11, 30):
                appointment.ask()
            if appointment.now(step):
                found.append(step)
        time.sleep(0 if me == 0 else 2.5)  # the slower one is not done
print(json.dumps(found))
"""


def test_all_meet_after_the_same_step_however_far_apart_they_are():
    outputs = run_processes(MEETING, devices=1, processes=3)
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) >= 2 and 10 < found[0][0] < 40  # the first to come is the fastest


def test_a_process_alone_meets_after_the_next_step():
    with Appointment("alone") as appointment:
        assert not appointment.now(1)
        appointment.ask()
        appointment.ask()
        assert [appointment.now(step) for step in (2, 3, 4)] == [True, False, False]
        appointment.ask()
        assert appointment.now(5)
