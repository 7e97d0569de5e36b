"""A process that compiles the links' programs for longer than a process may be silent ends nothing."""

import pytest

from tests.processes import run_processes

LATE = """
import time
import numpy as np
from planner.cluster.link_fit import Filled
from planner.measure import link_timing, profile_links
from planner.measure.machines import Machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup

seconds, silent = float(sys.argv[1]), float(sys.argv[2])

def slow(compile):
    def late(*arguments, **options):
        if process == 1:
            time.sleep(seconds)
        return compile(*arguments, **options)
    return late

for name in ("Exchange", "all_to_all"):
    setattr(link_timing, name, slow(getattr(link_timing, name)))
group = ProcessGroup(silent)
machines = Machines(("a", "b"), (0, 1), tuple(jax.devices()), 2, ("cpu",) * 2, (1e9,) * 2, ("",) * 2)
options = ProfileOptions(sizes=(), repeats=1)
times, left = profile_links.profile_links(group, machines, options, time.monotonic() + 120)
assert not left, left
links = Filled(np.full((2, 2), 1e-5), np.full((1, 2, 2), 1e9), ~np.eye(2, dtype=bool), 0.0)
assert profile_links.time_fan_out(group, machines, links, 1, 1 << 16) >= 0.5
print("profiled", flush=True)
"""
SILENT, SECONDS = 5.0, 8.0


@pytest.mark.slow
def test_link_programs_that_compile_for_longer_than_a_process_may_be_silent():
    for output in run_processes(LATE, str(SECONDS), str(SILENT), devices=2, limit=240):
        assert output.splitlines()[-1] == "profiled"
