"""Benchmarks of the train step: python -m experiments.bench.trainer [--sections=memory,throughput,bubble,passes].

    memory      temporary bytes by schedule, save mode and number of micro-batches (XLA's memory analysis)
    throughput  our step on a 1x1x1 mesh beside a plain jit of the same model: tokens/s, MFU and bytes. The model is a
                small one, or the one that --config=configs/gpt_1_3b.py names.
    bubble      pipe=2 over two real processes, one per core: step time over its bubble-free part. Beside it stands
                the ideal, (m+P-1)/m, or (m+(P-1)/3)/m for F, B and W of equal length.
    passes      how often every codec of the library reads and writes a message in programs compiled for an H100 that is
                not there, beside what it declares; it needs jax's CUDA plugin

Every ratio compares steps that were measured in turn in the same run. Nothing here is a test.
"""

from collections.abc import Sequence

import jax
from absl import flags

from experiments.bench.trainer.bubble import bubble, worker
from experiments.bench.trainer.memory import memory
from experiments.bench.trainer.passes import passes
from experiments.bench.trainer.steps import configuration
from experiments.bench.trainer.throughput import throughput
from paxtrain.command_line import define_config, run
from paxtrain.config import from_dict
from paxtrain.errors import UserError

MEASURED = ("memory", "throughput", "bubble")
SECTIONS = (*MEASURED, "passes")
HINT = f"choose with --sections={','.join(SECTIONS)}"


def main(argv: Sequence[str]) -> None:
    """Run the sections that --sections names."""
    f = flags.FLAGS
    if f.worker is not None:
        worker(f.worker, f.coordinator, f.repeats)
        return
    unknown = set(f.sections) - set(SECTIONS)
    if unknown:
        raise UserError(f"unknown section {sorted(unknown)[0]!r}; known are {', '.join(SECTIONS)}")
    jax.config.update("jax_num_cpu_devices", 8)
    config = from_dict(f.config) if f.config else configuration((1, 1, 1), 8)
    for section in f.sections:
        match section:
            case "memory":
                memory()
            case "throughput":
                throughput(f.repeats, config)
            case "bubble":
                bubble(f.repeats)
            case "passes":
                passes()


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_list("sections", list(MEASURED), f"What to measure: {', '.join(SECTIONS)}.")
    define_config("config", None, "For throughput: a file with model, micro-batch and optimizer.")
    # A file that could not be loaded raises when it is first used, so it is used while flags are parsed.
    flags.register_validator(
        "config", lambda config: config is None or hasattr(config, "items"), "get_config() must return a ConfigDict"
    )
    flags.DEFINE_integer("repeats", 15, "Steps per figure, of which the median counts.", lower_bound=1)
    flags.DEFINE_integer("worker", None, "Used by the processes that the bubble starts.")
    flags.DEFINE_string("coordinator", None, "Used by the processes that the bubble starts.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
