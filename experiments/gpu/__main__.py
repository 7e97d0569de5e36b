"""Measure GPUs: python -m experiments.gpu [--sections=throughput,kernels] [--minutes=22] [--again].

The sections run in order of value, each of their parts in a process of its own, until the time is spent. After each
part its section's record is written (runs/gpu/SECTION.json). Started again, the program goes on with the parts that are
not done. After each section it writes the page, runs/gpu/gpu.md; on GPUs it also puts it into docs/gpu.md.

Without a GPU everything runs at toy size on CPUs, in runs/gpu/toy. The exit code is 1 if a part has failed.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from experiments.gpu import (
    breakdown,
    correctness,
    kernels,
    many,
    options,
    page,
    prediction,
    running,
    throughput,
    virtual_stages,
)
from experiments.gpu.section import FAILED, FULL, TOY
from paxtrain.command_line import run
from paxtrain.errors import UserError

# In order of value.
SECTIONS = tuple(
    module.SECTION
    for module in (correctness, throughput, kernels, breakdown, many, prediction, options, virtual_stages)
)
HINT = f"choose with --sections={','.join(section.name for section in SECTIONS)}"
DOCS = running.ROOT / "docs" / "gpu.md"


def define_flags() -> None:
    """Define this main's flags."""
    names = [section.name for section in SECTIONS]
    flags.DEFINE_list("sections", names, f"What to measure, of {', '.join(names)}.")
    flags.DEFINE_enum("size", "auto", ("auto", FULL, TOY), "Sizes of models and messages; auto: full on GPUs.")
    flags.DEFINE_string("out", "runs/gpu", "Folder of the records and the page; toy size has its folder toy.")
    flags.DEFINE_float("minutes", 22, "Time of the sections about one GPU together.", lower_bound=0.1)
    flags.DEFINE_bool("again", False, "Measure parts again that are already measured here by this commit.")
    flags.DEFINE_bool("publish", True, "Put measurements on GPUs into docs/gpu.md.")
    flags.DEFINE_bool("look", False, "Print what the devices are as JSON; used by the program itself.")
    flags.DEFINE_string("part", None, "SectionPart to run in this process; used by the program itself.")
    flags.DEFINE_string("result", None, "File of a part's outcome; used by the program itself.")
    flags.DEFINE_integer("process", 0, "Number of this process of a part; used by the program itself.")
    flags.DEFINE_string("coordinator", None, "Where a part's processes meet; used by the program itself.")


def main(argv: Sequence[str]) -> None:
    """Measure all sections, or one part in this process."""
    f = flags.FLAGS
    if f.look:
        print(json.dumps(running.describe_devices()))
        return
    unknown = [name for name in f.sections if name not in {section.name for section in SECTIONS}]
    if unknown:
        raise UserError(f"unknown section {unknown[0]!r}; known are {', '.join(section.name for section in SECTIONS)}")
    chosen = [section for section in SECTIONS if section.name in f.sections]
    out = pathlib.Path(f.out).absolute()
    if f.part:
        [section] = chosen
        part = section.part(f.size, f.part)
        running.run_part(part, out / section.name, pathlib.Path(f.result), f.process, f.coordinator)
    setting = running.look(f.size)
    out = out / TOY if setting.size == TOY else out
    out.mkdir(parents=True, exist_ok=True)
    print(f"{setting.count} x {setting.device}, {setting.size} size, commit {setting.commit}, {out}", flush=True)
    failed = []
    for record in running.run_all(chosen, setting, out, f.minutes, f.again):
        written = page.write(SECTIONS, out)
        failed += [f"{record.section}, {name}" for name, part in record.parts.items() if part.status == FAILED]
    print(f"wrote {written}")
    if f.publish and setting.size == FULL and setting.platform == "gpu":
        page.publish(written, DOCS)
        print(f"wrote {DOCS}")
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
