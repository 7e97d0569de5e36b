"""The lab's records as a page with figures: targets beside results, and what the results cannot say.

    python -m experiments.lab.page.results

writes the page again from the existing records, and measures nothing.
"""

import pathlib
import textwrap
from collections.abc import Iterator, Sequence

from absl import flags

from experiments.lab.findings import (
    accuracy,
    adaptive,
    compression,
    growth,
    joint,
    links,
    paper,
    peer,
    placement,
    schedules,
    setting,
    sooner,
)
from experiments.lab.page.section import NOT_RUN, Drawing, Section, Target, table
from paxtrain.command_line import run
from paxtrain.errors import UserError

WIDTH = 120  # columns of a paragraph
_MET = {True: "yes", False: "**no**", None: "open"}
PARTS = (
    *(setting, links, accuracy, placement, compression, paper, sooner, adaptive),
    *(schedules, joint, growth, peer),
)
INTRODUCTION = """This page says how well the planner predicts and how much placement and compression gain, on clusters
that are made of one machine. Each section names its records and the flag of `python -m experiments.lab` that makes
them. Times are medians over repeats, taken in turn. A spread is half the distance between the quartiles, of a speed-up
that of the single repeats, paired as they were taken."""
CAVEATS = (
    """**Devices are emulated**, except beside PyTorch, at a speed set in `experiments/lab/device.py`. The figures do
    not show how fast a GPU is, nor compute that varies.""",
    """**The CPU backend waits for what it receives.** Transfers that overlap with compute on GPUs do not overlap
    here. The simulator's blocking model is tested; its overlapping model is only shown.""",
    """**One machine.** All hosts share its cores and its clock. There are no switches and almost no latency.""",
    """**A small model.** The fixed cost of a message weighs more than with large messages on fast links.""",
    """**A reduce-scatter is an all-to-all here**, because
    [gloo's own is wrong now and then](compression.md#sums-between-processes-on-cpus).""",
    """**One seed** of rates, placements and training. The spread is taken over repeats within one run.""",
)


def _filled(text: str, begin: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(
        begin + words, WIDTH, subsequent_indent=" " * len(begin), break_long_words=False, break_on_hyphens=False
    )


def _targets(targets: list[Target]) -> str:
    rows = [(t.what, t.wanted, t.seen, "-" if t.seen == NOT_RUN else _MET[t.met]) for t in targets]
    return table(["what", "target", "seen", "met?"], rows, words=4)


def _not_run(sections: list[Section]) -> Iterator[str]:
    """Yield what has not been run, with the command that does."""
    for section in sections:
        if not section.blocks:
            yield f"**Not run:** {section.title}; `{section.command}` does."
        for t in section.targets if section.blocks else ():
            if t.seen == NOT_RUN:
                yield f"**Not run:** {t.what}; `{section.command}` does."


def _blocks(section: Section, folder: str) -> Iterator[str]:
    sources = ", ".join(f"`{source}`" for source in section.sources)
    yield f"## {section.title}"
    made = f"({sources}, by `{section.command.removeprefix('python -m experiments.lab ')}`.)"
    for block in section.blocks or ("Not run yet.",):
        if isinstance(block, Drawing):
            yield f"![{block.name}]({folder}/{block.name}.png)\n{_filled(block.caption)}"
        else:
            yield block if block.startswith("|") else _filled(f"{block} {made}".rstrip())
            made = ""


def folder(page: pathlib.Path) -> pathlib.Path:
    """Return where the records lie that a page is written from."""
    return page.with_suffix("") / "records"


def write(records: pathlib.Path, page: pathlib.Path) -> None:
    """Write the page from the records, with its figures in a folder of the same name beside it."""
    sections = [part.section(records) for part in PARTS]
    beside = page.with_suffix("")
    beside.mkdir(parents=True, exist_ok=True)
    for drawing in (drawing for section in sections for drawing in section.drawings):
        drawing.figure.savefig(beside / f"{drawing.name}.png")
    text = [
        "# Results on the test cluster",
        "    make lab        # measures it, as root, except paper, sooner and adaptive, "
        'which ARGS="--experiments=..." names\n'
        "    .venv/bin/python -m experiments.lab.page.results     # writes this page again from docs/results/records",
        _filled(INTRODUCTION),
        _targets([target for section in sections for target in section.targets]),
        "## What these figures cannot say",
        "\n".join(_filled(text, "- ") for text in (*_not_run(sections), *CAVEATS)),
        *(block for section in sections for block in _blocks(section, beside.name)),
    ]
    page.write_text("\n\n".join(text) + "\n")


def main(argv: Sequence[str]) -> None:
    """Write the page from a folder of records."""
    f = flags.FLAGS
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; the folder of records is named with --records=FOLDER")
    records = pathlib.Path(f.records)
    if not any(records.glob("*.jsonl")):
        raise UserError(f"there are no records in --records={f.records}; `make lab` makes some")
    write(records, pathlib.Path(f.page))
    print(f"wrote {f.page}")


def define_flags() -> None:
    """Define the flags of this main."""
    flags.DEFINE_string("records", "docs/results/records", "Folder of the lab's records.")
    flags.DEFINE_string(
        "page", "docs/results.md", "The page that is written, figures in a folder of its name beside it."
    )


if __name__ == "__main__":
    run(main, define_flags)
