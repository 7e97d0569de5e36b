"""Convert measured runs to a table for planner.validate: python -m planner.convert INPUT OUTPUT.csv [COLUMN=VALUE ...].

INPUT is a published file that planner/runs/published.py describes, or the log of a run by Megatron-LM, torchtitan,
MaxText, nanotron or this trainer (planner/runs/logs.py). A log gives one row, which is added to OUTPUT if that is
there; what it does not say is named behind, such as cluster=mine devices=64 hidden=4096.
"""

from collections.abc import Sequence

from paxtrain.command_line import run
from paxtrain.errors import UserError
from planner.runs import published


def main(argv: Sequence[str]) -> None:
    """Convert the file that the arguments name."""
    if len(argv) < 3:
        raise UserError(
            f"INPUT and OUTPUT must be named, got {len(argv) - 1} names; see planner/runs/published.py and logs.py for "
            "the inputs"
        )
    _, source, out, *cells = argv
    if wrong := [cell for cell in cells if "=" not in cell]:
        raise UserError(f"what follows INPUT and OUTPUT must be written column=value, got {wrong[0]!r}")
    published.convert(source, out, dict(cell.split("=", 1) for cell in cells))


if __name__ == "__main__":
    run(main)
