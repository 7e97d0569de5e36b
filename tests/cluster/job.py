"""The job's command on the lab's devices: python -m tests.cluster.job --config=... --plan=auto --out=RUN."""

from paxtrain import command_line
from planner import run
from tests.cluster import device

if __name__ == "__main__":
    device.install()
    command_line.run(run.main, run.define_flags)
