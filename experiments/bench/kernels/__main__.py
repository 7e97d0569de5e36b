"""The benchmark of the compression's kernels: python -m experiments.bench.kernels --out=bench.csv, on an NVIDIA GPU.

kernel_times.py describes the measurements.
"""

import itertools
import sys
from collections.abc import Sequence

import jax
from absl import app, flags

from compress.kernels import on_gpu
from experiments.bench.kernels.kernel_times import (
    Matrices,
    Timing,
    copy_bandwidth,
    measure,
    ratios,
    table_row,
    write_csv,
)


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_list("sizes", ["4096x3072", "4096x12288"], "Messages, rows x columns.")
    flags.DEFINE_list("ranks", ["16", "128"], "Ranks of the messages.")
    flags.DEFINE_list("gradient_sizes", ["3072x12288", "8x2048x8192"], "Gradients, [how many x] rows x columns.")
    flags.DEFINE_list("gradient_ranks", ["128"], "Ranks of the gradients.")
    flags.DEFINE_integer("repeats", 20, "Runs per figure, of which the median counts.", lower_bound=1)
    flags.DEFINE_integer("iterations", 50, "Steps of a run.", lower_bound=1)
    flags.DEFINE_string("out", None, "CSV file for the table.")


def parse_size(size: str) -> tuple[int, int, int]:
    """Return (number, n, k) of a size "NxK" or "NUMBERxNxK".

    Raises:
        ValueError: the size has neither form; the message is one sentence.
    """
    numbers = size.split("x")
    if len(numbers) not in (2, 3) or not all(x.isdecimal() and int(x) for x in numbers):
        raise ValueError(f"sizes are written like 4096x3072 or 8x2048x8192, got {size!r}")
    number, n, k = map(int, ["1", *numbers][-3:])
    return number, n, k


def parse_cases(kind: str, sizes: Sequence[str], ranks: Sequence[str]) -> list[Matrices]:
    """Return all combinations of sizes and ranks.

    Args:
        kind: "message" or "gradient".
        sizes: sizes as on the command line, "4096x3072".
        ranks: ranks as on the command line.

    Raises:
        ValueError: a size or a rank is wrong; the message is one sentence.
    """
    cases = []
    for size, rank in itertools.product(sizes, ranks):
        number, n, k = parse_size(size)
        if kind == "message" and number > 1:
            raise ValueError(f"a message is one matrix, got {size!r}")
        if not rank.isdecimal() or not 1 <= int(rank) <= min(n, k, 128):
            raise ValueError(f"ranks of {size} must be between 1 and {min(n, k, 128)}, got {rank!r}")
        cases.append(Matrices(kind, number, n, k, int(rank)))
    return cases


def main(argv: Sequence[str]) -> int:
    """Measure all cases, print the table and return the exit code."""
    options = flags.FLAGS
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}; what is measured is named with flags")
        cases = parse_cases("message", options.sizes, options.ranks)
        cases += parse_cases("gradient", options.gradient_sizes, options.gradient_ranks)
        device = jax.devices()[0]
        if device.platform != "gpu":
            raise ValueError(
                f"experiments.bench.kernels needs an NVIDIA GPU, found {device.platform}; on a machine that has one, "
                "pip install -r requirements-gpu.txt"
            )
        if options.out:
            open(options.out, "a").close()  # a wrong path fails here, before the slow measurements
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth(1 << 29, options.repeats, options.iterations)
    print(f"{device.device_kind}, jax {jax.__version__}: a copy moves {bandwidth / 1e12:.2f} TB/s\n{table_row()}")
    rows: list[Timing] = []
    implementations = ["gram_schmidt", *reversed(on_gpu(float(device.compute_capability)))]
    for row in measure(cases, implementations, bandwidth, options.repeats, options.iterations):
        print(table_row(row), flush=True)
        rows.append(row)
    print("\n".join(ratios(rows)))
    if options.out:
        write_csv(options.out, rows, bandwidth)
    return 0


def _parse(argv: Sequence[str]) -> list[str]:
    """Return the command line without its flags, or exit with one sentence if a flag is wrong."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=_parse)
