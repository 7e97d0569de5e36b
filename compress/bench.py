"""Times of the compression's passes on this machine's GPU, beside what its memory allows.

    python -m compress.bench --out=bench.csv

Messages are encoded with the lazy error and decoded, as between pipeline stages; gradients are reduced over one data
rank and decoded, as in data parallelism, without the collectives. "xla" and "triton" are the implementations of
kernels.py; "gram_schmidt" is PowerSGD as the released Optimus-CC does it, with an explicit error and one column
orthogonalised after another.

Bytes are what has to move: every matrix that the best of the forms reads and writes, once, without the thin factors. So
the share of the bandwidth, which is that of a copy in the same run, says how far an implementation is from the best.
"""

import csv
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax

from compress import kernels
from compress.codec import LowRank
from compress.collectives import init_power, mean_lowrank

# step(carry, inputs) -> carry
Step = Callable[[Any, Any], Any]


class Case(NamedTuple):
    """`count` matrices [n, k]: one bfloat16 message, or float32 gradients that are reduced together."""

    kind: str
    count: int
    n: int
    k: int
    rank: int

    @property
    def dtype(self) -> jnp.dtype:
        """Of the matrices."""
        return jnp.dtype("bfloat16" if self.kind == "message" else "float32")

    @property
    def bytes(self) -> int:
        """Of the matrices."""
        return self.count * self.n * self.k * self.dtype.itemsize

    def random(self, rows: int, columns: int) -> list[jax.Array]:
        """As many random matrices of this dtype."""
        keys = jax.random.split(jax.random.key(rows), self.count)
        return [jax.random.normal(key, (rows, columns), self.dtype) for key in keys]


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        operation: encode, reduce or decode.
        size: of the matrices, as in the flags.
        bytes: that have to move.
        share: of the copy bandwidth at which they moved.
    """

    operation: str
    size: str
    dtype: str
    rank: int
    implementation: str
    microseconds: float
    bytes: int
    share: float


def parse_size(size: str) -> tuple[int, int, int]:
    """(count, n, k) of "NxK" or "COUNTxNxK".

    Raises:
        ValueError: it is neither; the message is one sentence.
    """
    numbers = size.split("x")
    if len(numbers) not in (2, 3) or not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"sizes are written like 4096x3072 or 8x2048x8192, got {size!r}")
    count, n, k = map(int, ["1", *numbers][-3:])
    return count, n, k


def _loop(step: Step, iterations: int, carry: Any, inputs: Any) -> Any:
    return lax.fori_loop(0, iterations, lambda _, carry: step(carry, inputs), carry)


def seconds(step: Step, carry: Any, inputs: Any, repeats: int, iterations: int) -> float:
    """Median time of a step over `repeats` runs of a compiled loop of `iterations`, which hides Python's share."""
    loop = jax.jit(partial(_loop, step, iterations), donate_argnums=0)
    # Donated; and a state may hold an array twice.
    carry = jax.block_until_ready(loop(jax.tree.map(jnp.copy, carry), inputs))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        carry = jax.block_until_ready(loop(carry, inputs))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / iterations


def copy_bandwidth(elements: int, repeats: int, iterations: int) -> float:
    """Bytes/s read and written by an elementwise pass over that many bfloat16 numbers."""
    took = seconds(lambda x, _: -x, jnp.ones(elements, jnp.bfloat16), None, repeats, iterations)
    return 2 * 2 * elements / took


def gram_schmidt(p: jax.Array) -> jax.Array:
    """Orthonormal columns in place of p's [n, r], by the modified Gram-Schmidt process, a column at a time."""

    def normalise(i, p):
        unit = p[:, i] / (jnp.linalg.norm(p[:, i]) + 1e-8)
        later = jnp.where(jnp.arange(p.shape[1]) > i, unit @ p, 0)
        return (p - unit[:, None] * later).at[:, i].set(unit)

    return lax.fori_loop(0, p.shape[1], normalise, p)


def _gram_schmidt_step(carry: list, inputs: list[jax.Array]) -> list:
    """PowerSGD of each x; carry: its error [n, k] and q [k, r]."""
    after = []
    for x, (e, q) in zip(inputs, carry, strict=True):
        m, product = kernels.project(x, q, kernels.Explicit(e))
        p = gram_schmidt(product).astype(q.dtype)
        w = kernels.backproject(m, p)[0].astype(q.dtype)
        after.append((kernels.residual(m, p, w), w))
    return after


def compression(case: Case, implementation: str) -> tuple[str, Step, Any, Any, int]:
    """What the sender does: its name, the step, the carry (its state) and inputs, and the bytes that have to move."""
    inputs = case.random(case.n, case.k)
    # Read x and the old m, write and read the new m; or read x and e, write and read m, read it again and write e.
    name, passes = ("encode", 4) if case.kind == "message" else ("reduce", 6)
    if implementation == "gram_schmidt":
        carry = [(jnp.zeros_like(x), q) for x, q in zip(inputs, case.random(case.k, case.rank))]
        return name, _gram_schmidt_step, carry, inputs, passes * case.bytes
    if case.kind == "message":
        codec = LowRank(case.rank, implementation=implementation)
        step, carry, inputs = (
            lambda state, x: codec.encode(state, x)[1],
            codec.init((case.n, case.k), case.dtype),
            *inputs,
        )
    else:
        step = lambda state, xs: mean_lowrank(xs, state, case.rank, None, implementation)[1]  # noqa: E731
        carry = init_power([(case.n, case.k)] * case.count, case.rank, seed=0)
    return name, step, carry, inputs, passes * case.bytes


def decompression(case: Case, implementation: str) -> tuple[str, Step, Any, Any, int]:
    """The same of what the receiver does; its results are the carry."""
    factors = list(zip(case.random(case.n, case.rank), case.random(case.k, case.rank)))
    carry = [jnp.zeros((case.n, case.k), case.dtype) for _ in factors]

    def step(carry, factors):
        # Tied to the one before, since nothing that is the same in every iteration need stay in a loop.
        _, factors = lax.optimization_barrier((carry, factors))
        return [kernels.decode(p, w, case.dtype, implementation=implementation) for p, w in factors]

    return "decode", step, carry, factors, case.bytes


def measure(
    cases: Iterable[Case], implementations: Sequence[str], bandwidth: float, repeats: int, iterations: int
) -> Iterator[Row]:
    """Rows of all cases, as they are measured.

    Args:
        bandwidth: of a copy, bytes/s.
        repeats, iterations: see `seconds`.
    """
    for case, work, implementation in itertools.product(cases, (compression, decompression), implementations):
        if work is decompression and implementation == "gram_schmidt":
            continue
        name, step, carry, inputs, moved = work(case, implementation)
        took = seconds(step, carry, inputs, repeats, iterations)
        size = "x".join(map(str, (case.count, case.n, case.k)[case.count == 1 :]))
        share = moved / took / bandwidth
        yield Row(name, size, case.dtype.name, case.rank, implementation, 1e6 * took, moved, share)


def ratios(rows: Iterable[Row]) -> list[str]:
    """One line per operation and case that "triton" was measured on: how many times as fast as the others it is."""
    lines, groups = [], {}
    for row in rows:
        groups.setdefault(row[:4], {})[row.implementation] = row.microseconds
    for (operation, size, dtype, rank), times in groups.items():
        if "triton" in times:
            triton = times.pop("triton")
            than = ", ".join(f"{took / triton:.2f} times as fast as {name}" for name, took in times.items())
            lines.append(f"{operation} {size} {dtype} rank {rank}: triton is {than}")
    return lines


def table_row(row: Row | None = None) -> str:
    """A row of the table; without one its head."""
    cells = Row._fields if row is None else (*row[:5], f"{row.microseconds:.1f}", row.bytes, f"{row.share:.0%}")
    return "{:10} {:>14} {:>9} {:>5} {:>15} {:>13} {:>12} {:>6}".format(*cells)


def write_csv(path: str, rows: Iterable[Row], bandwidth: float) -> None:
    """The rows, with the copy bandwidth in bytes/s as a last column."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Row._fields, "copy_bandwidth"])
        writer.writerows([*row, bandwidth] for row in rows)


def define_flags() -> None:
    """Defines this main's flags."""
    flags.DEFINE_list("sizes", ["4096x3072", "4096x12288"], "Messages, rows x columns.")
    flags.DEFINE_list("ranks", ["16", "128"], "Ranks of the messages.")
    flags.DEFINE_list("gradient_sizes", ["3072x12288", "8x2048x8192"], "Gradients, [how many x] rows x columns.")
    flags.DEFINE_list("gradient_ranks", ["128"], "Ranks of the gradients.")
    flags.DEFINE_integer("repeats", 20, "Runs per figure, of which the median counts.", lower_bound=1)
    flags.DEFINE_integer("iterations", 50, "Steps of a run.", lower_bound=1)
    flags.DEFINE_string("out", None, "CSV file for the table.")


def parse_cases(kind: str, sizes: Sequence[str], ranks: Sequence[str]) -> list[Case]:
    """All cases of some sizes and ranks, as they are written on the command line.

    Raises:
        ValueError: one of them is wrong; the message is one sentence.
    """
    cases = []
    for size, rank in itertools.product(sizes, ranks):
        count, n, k = parse_size(size)
        if kind == "message" and count > 1:
            raise ValueError(f"a message is one matrix, got {size!r}")
        if not rank.isdecimal() or not 1 <= int(rank) <= min(n, k, 128):
            raise ValueError(f"ranks of {size} must be between 1 and {min(n, k, 128)}, got {rank!r}")
        cases.append(Case(kind, count, n, k, int(rank)))
    return cases


def main(argv: Sequence[str]) -> int:
    """Measures and prints; the exit code."""
    options = flags.FLAGS
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}; what is measured is named with flags")
        cases = parse_cases("message", options.sizes, options.ranks)
        cases += parse_cases("gradient", options.gradient_sizes, options.gradient_ranks)
        device = jax.devices()[0]
        if device.platform != "gpu":
            raise ValueError(
                f"compress.bench needs an NVIDIA GPU, found {device.platform}; on a machine that has one, "
                "pip install -r requirements-gpu.txt"
            )
        if options.out:
            open(options.out, "a").close()  # before anything slow
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth(1 << 29, options.repeats, options.iterations)
    print(f"{device.device_kind}, jax {jax.__version__}: a copy moves {bandwidth / 1e12:.2f} TB/s\n{table_row()}")
    rows = []
    for row in measure(cases, ("gram_schmidt", "xla", "triton"), bandwidth, options.repeats, options.iterations):
        print(table_row(row), flush=True)
        rows.append(row)
    print("\n".join(ratios(rows)))
    if options.out:
        write_csv(options.out, rows, bandwidth)
    return 0


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=_parse)
