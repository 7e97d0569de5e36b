"""Check that a model can be trained: python -m paxtrain.testing package.module:Class.

It prints each property of `paxtrain.testing.check_model` that holds, on 8 virtual CPU devices. The exit code is 1 if
one does not hold, and 2 if the trainer would refuse the model.
"""

import sys
from collections.abc import Sequence

import jax

from paxtrain.command_line import run, sentence
from paxtrain.errors import PREFIX, UserError
from paxtrain.testing.models import checked


def main(argv: Sequence[str]) -> None:
    """Check the model that the argument names."""
    if len(argv) != 2 or not argv[1]:
        raise UserError(f"name one model as package.module:Class, got {' '.join(map(repr, argv[1:])) or 'nothing'}")
    # Not on GPUs, whose products of float32 are rounded.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    try:
        for name in checked(argv[1]):
            print(name, flush=True)
    except AssertionError as error:
        print(f"{PREFIX}{sentence(error)}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
