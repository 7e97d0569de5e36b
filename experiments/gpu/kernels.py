"""The compression's kernels: each implementation beside the bandwidth of a copy, and Gram-Schmidt PowerSGD."""

import pathlib
from typing import Any

import jax

from compress.kernels import on_gpu
from experiments.bench.kernels import kernel_times
from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart

_AIM = 0.7  # of a copy's bandwidth, encoding
_REFERENCE = "gram_schmidt"


def measure(folder: pathlib.Path, cases: list[list[Any]], elements: int, repeats: int, iterations: int) -> Result:
    """Time encoding, reducing and decoding by every implementation that this device has.

    Args:
        folder: folder of the section.
        cases: [kind, number, rows, columns, rank] of the matrices, as `kernel_times.Matrices` takes them.
        elements: elements of the array whose copy gives the bandwidth.
        repeats: runs per figure.
        iterations: operations of a run.
    """
    bandwidth = kernel_times.copy_bandwidth(elements, repeats, iterations)
    here = on_gpu(float(getattr(jax.devices()[0], "compute_capability", 0)))
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for case in (kernel_times.Matrices(*values) for values in cases):
        for implementation in (_REFERENCE, *here):
            try:
                timings = kernel_times.measure([case], [implementation], bandwidth, repeats, iterations)
                rows += [timing._asdict() for timing in timings]
            except Exception as error:  # one that this GPU cannot run must not hide the others
                failed.append(f"{implementation} with {case}: {' '.join(str(error).split())[:300]}")
    if not rows:
        raise RuntimeError(failed[0])
    return {"bandwidth": bandwidth, "rows": rows, "failed": failed}


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text."""
    rows = [row for result in results.values() for row in result["rows"]]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    cases: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        case = (row["operation"], row["size"], row["dtype"], str(row["rank"]))
        cases.setdefault(case, {})[row["implementation"]] = f"{row['microseconds']:.1f} ({row['share']:.0%})"
    copies = ", ".join(f"{result['bandwidth'] / 1e12:.3g}" for result in results.values())
    lines = [f"A copy moves {copies} TB/s. Encoding is to reach {_AIM:.0%} of it. A cell has us, and the share of it."]
    lines += ["", "| operation | size | dtype | rank | " + " | ".join(names) + " |", "| --- " * (4 + len(names)) + "|"]
    for matrices, times in cases.items():
        lines.append("| " + " | ".join([*matrices, *(times.get(name, "-") for name in names)]) + " |")
    return "\n".join([*lines, *(f"\nFailed: {text}" for result in results.values() for text in result["failed"])])


_SIZES = {"elements": 1 << 29, "repeats": 10}


def _messages(rank: int) -> SectionPart:
    cases = [["message", 1, 4096, k, rank] for k in (3072, 12288)]
    return SectionPart(f"messages, rank {rank}", measure, {"cases": cases, "iterations": 50} | _SIZES)


_GRADIENTS = [["gradient", 1, 3072, 12288, rank] for rank in (128, 64, 16)] + [["gradient", 8, 2048, 8192, 128]]

SECTION = Section(
    name="kernels",
    title="The compression's kernels",
    seconds=130,
    parts={
        FULL: (
            _messages(128),
            _messages(16),
            SectionPart("gradients", measure, {"cases": _GRADIENTS, "iterations": 20} | _SIZES),
        ),
        TOY: (
            SectionPart(
                "messages",
                measure,
                {"cases": [["message", 1, 64, 48, 8], ["gradient", 2, 64, 48, 8]], "elements": 1 << 16}
                | {"repeats": 2, "iterations": 3},
            ),
        ),
    },
    describe=describe,
)
