"""Answer whether a model fits a cluster: python -m planner.memory --model=gpt_8b --cluster=a100_16x8.

It prints whether it fits, on how few devices it would, what to change, and what takes how much of a device's memory.
The flags of planner.plan that narrow a plan narrow what is looked at. The exit code is 1 if nothing fits.
"""

import dataclasses
import gc
import json
import sys
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import run
from planner import planning_flags
from planner.answers.memory import memory_answer

HINT = "overrides are written --model.section.key=value"


def main(argv: Sequence[str]) -> None:
    """Read the model and the cluster, and answer."""
    f = flags.FLAGS
    values = planning_flags.decided_values()
    answer = memory_answer(values, planning_flags.cluster(), planning_flags.options(oracle="no"), f.global_batch)
    answer = dataclasses.replace(answer, named=planning_flags.model_name())
    print(json.dumps(answer.json()) if f.json else answer.text())
    if not answer.fits:
        sys.exit(1)


def define_flags() -> None:
    """Define the flags of this main."""
    planning_flags.define_inputs()
    planning_flags.define_flags()
    flags.DEFINE_bool("json", False, "Print the answer as one JSON object.")


if __name__ == "__main__":
    gc.disable()  # jax's import and the traces make much and drop little: a sixth of a first answer's time
    run(main, define_flags, hint=HINT)
