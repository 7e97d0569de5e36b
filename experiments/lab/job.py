"""The job's command on the lab's devices: python -m experiments.lab.job --config=... --plan=auto --out=RUN."""

from experiments.lab import device
from paxtrain import command_line
from planner import run

if __name__ == "__main__":
    device.install()
    command_line.run(run.main, run.define_flags)
