"""The job's command as it is, on the lab's devices, whose processes share compiled programs.

    python -m tests.cluster.job --config=... --plan=auto --out=RUN

Otherwise eight processes on two cores would compile all there is eight times, and stretch each other's compute.
"""

from paxtrain import errors
from planner import run
from tests.cluster import device
from tests.cluster.programs import share_programs

if __name__ == "__main__":
    share_programs()
    device.install()
    errors.run(run.main, run.define_flags)
