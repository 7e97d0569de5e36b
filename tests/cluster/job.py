"""The job's command on the lab's devices, whose processes share compiled programs.

    python -m tests.cluster.job --config=... --plan=auto --out=RUN

Otherwise eight processes on two cores would compile all there is eight times, and stretch each other's compute.
"""

from paxtrain import command_line
from paxtrain.process import jax_private
from planner import run
from tests.cluster import device

if __name__ == "__main__":
    jax_private.share_compiled_programs()
    device.install()
    command_line.run(run.main, run.define_flags)
