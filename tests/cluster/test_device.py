"""Emulated devices leave their host's cores free, as a profile must know."""

import subprocess
import sys

from tests.cluster.session import ENVIRONMENT, ROOT

PROGRAM = """
from planner.measure import machines
from tests.cluster import device

roster = [machines._Entry("h", 1, "cpu", 1.0, "", "", "", "computer", 2)] * 8
before = machines.crowded_cores(roster)
device.install()
print(set(before), machines.crowded_cores(roster))
"""


def test_processes_with_such_devices_are_not_crowded():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[-2] == "{(8, 2)} ()"
