"""Train a GPT: python -m paxtrain.train --config=gpt2_125m --config.mesh.pipe=4 [--plan=plan.json]."""

from collections.abc import Sequence

from paxtrain import flags as shared_flags
from paxtrain.command_line import OVERRIDES, run
from paxtrain.process import distributed
from paxtrain.run.training import train_together

HINT = OVERRIDES
define_flags = shared_flags.define_training


def main(argv: Sequence[str]) -> None:
    """Read the configuration, join the other processes and train."""
    config, chosen = shared_flags.configured()
    with shared_flags.progress() as progress:
        shared_flags.join()
        shared_flags.tell_cpu_devices(config)
        train_together(config, chosen, distributed.host_names() if chosen and chosen.hosts else [], progress)


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
