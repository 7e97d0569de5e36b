"""Convert published measurements to a table for planner.validate: python -m planner.convert INPUT OUTPUT.csv.

INPUT is amp_homogeneous.json or vtrain_single_node.csv, which planner/runs/published.py describes.
"""

from collections.abc import Sequence

from paxtrain.command_line import run
from paxtrain.errors import UserError
from planner.runs import published


def main(argv: Sequence[str]) -> None:
    """Convert the file that the arguments name."""
    if len(argv) != 3:
        raise UserError(
            f"INPUT and OUTPUT must be named, got {len(argv) - 1} names; see planner/runs/published.py for the inputs"
        )
    published.convert(argv[1], argv[2])


if __name__ == "__main__":
    run(main)
