"""Draw the losses of several runs in one figure: python -m paxtrain.compare --runs=runs/a,runs/b --out=losses.png."""

from collections.abc import Sequence

from absl import flags

from paxtrain import files
from paxtrain.command_line import run
from paxtrain.errors import UserError
from paxtrain.run import plots

HINT = "runs are named --runs=FOLDER,FOLDER"


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_list("runs", None, "Folders of the runs, joined by commas.", required=True)
    flags.DEFINE_string("out", None, "The PNG.", required=True)


def main(argv: Sequence[str]) -> None:
    """Draw the figure that the flags describe."""
    out = flags.FLAGS.out
    if not out.endswith(".png"):
        raise UserError(f"--out={out} must be the name of a .png")
    if not flags.FLAGS.runs:
        raise UserError("--runs names no folder; write --runs=runs/a,runs/b")
    with files.writable(out, "name a file in a folder that exists"):
        plots.plot_runs(flags.FLAGS.runs, out)


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
