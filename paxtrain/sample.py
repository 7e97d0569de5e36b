"""Sample text from a checkpoint: python -m paxtrain.sample --checkpoint=runs/tiny --prompt="def "."""

import math
import sys
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import run
from paxtrain.errors import UserError
from paxtrain.run import sampling

HINT = "give the prompt with --prompt="


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("checkpoint", None, "Directory of a training run (its run.out).", required=True)
    flags.DEFINE_integer("step", None, "Step of the checkpoint; the newest good one if not given.")
    flags.DEFINE_string("prompt", "\n", "Text to continue.")
    flags.DEFINE_integer("tokens", 200, "Most tokens to draw; the end of the text ends them.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token each time.", lower_bound=0.0)
    flags.DEFINE_integer("top_k", 0, "Draw from that many likeliest tokens; 0: from all.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Seed of the draws.", lower_bound=0, upper_bound=2**63 - 1)


def main(argv: Sequence[str]) -> None:
    """Print the prompt and its continuation."""
    f = flags.FLAGS
    if not math.isfinite(f.temperature):
        raise UserError(f"--temperature must be a number such as 0.8, got {f.temperature}")
    text = sampling.sample(
        f.checkpoint, f.prompt, f.tokens, temperature=f.temperature, top_k=f.top_k, seed=f.seed, step=f.step
    )
    print(f.prompt + (sampling.printable(text) if sys.stdout.isatty() else text))


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
