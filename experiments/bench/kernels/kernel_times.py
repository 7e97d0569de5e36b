"""Times of the compression's passes on this machine's GPU, beside the bandwidth of its memory.

Messages are encoded with the lazy error and decoded, as between pipeline stages. Gradients are reduced over one data
rank and decoded, as in data parallelism, without the collectives. "xla" and "triton" are implementations of
kernels.py. "gram_schmidt" is PowerSGD as the released Optimus-CC does it: an explicit error, and columns that are
orthogonalised one after another.

The bytes of an operation are those that have to move: each matrix counts once for every read and write of the best
form, and thin factors do not count. The share is the rate of these bytes over the bandwidth of a copy in the same run.
It says how close an implementation is to the best possible.
"""

import collections
import csv
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress import kernels
from compress.codec import Tree
from compress.lowrank import LowRank, LowRankState
from compress.powersgd import PowerSGD, PowerState
from compress.reducer import Shard

Pass = Callable[[Tree, Tree], Tree]  # (carry, inputs) -> carry


class Matrices(NamedTuple):
    """Matrices to compress: one bfloat16 message, or float32 gradients that are reduced together.

    Attributes:
        kind: "message" or "gradient".
        number: number of matrices.
        n: rows of each matrix.
        k: columns of each matrix.
        rank: rank of the factors.
    """

    kind: str
    number: int
    n: int
    k: int
    rank: int

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of the matrices."""
        return jnp.dtype("bfloat16" if self.kind == "message" else "float32")

    @property
    def bytes(self) -> int:
        """Bytes of all matrices."""
        return self.number * self.n * self.k * self.dtype.itemsize

    def random(self, rows: int, columns: int) -> list[jax.Array]:
        """Return as many random matrices [rows, columns] of this dtype."""
        keys = jax.random.split(jax.random.key(rows), self.number)
        return [jax.random.normal(key, (rows, columns), self.dtype) for key in keys]


class Timing(NamedTuple):
    """A row of the table.

    Attributes:
        operation: "encode", "reduce" or "decode".
        size: number, rows and columns of the matrices, as in the flags.
        dtype: dtype of the matrices.
        rank: rank of the factors.
        implementation: "gram_schmidt", or one of kernels.IMPLEMENTATIONS.
        microseconds: median time of the operation.
        bytes: bytes that have to move.
        share: share of the copy bandwidth at which they moved.
    """

    operation: str
    size: str
    dtype: str
    rank: int
    implementation: str
    microseconds: float
    bytes: int
    share: float


class Operation(NamedTuple):
    """Operation to time.

    Attributes:
        name: "encode", "reduce" or "decode".
        step: function that runs one pass.
        carry: carry of the first pass.
        inputs: inputs of every pass.
        bytes: bytes that have to move.
    """

    name: str
    step: Pass
    carry: Tree
    inputs: Tree
    bytes: int


def _loop(step: Pass, iterations: int, carry: Tree, inputs: Tree) -> Tree:
    """Return the carry after a number of steps."""
    return lax.fori_loop(0, iterations, lambda _, carry: step(carry, inputs), carry)


def seconds(step: Pass, carry: Tree, inputs: Tree, repeats: int, iterations: int) -> float:
    """Return the median time of a step, in seconds.

    Args:
        step: function to time.
        carry: carry of the first step.
        inputs: inputs of every step.
        repeats: number of runs of a compiled loop.
        iterations: number of steps of a run, large enough to hide the time that Python takes.
    """
    loop = jax.jit(partial(_loop, step, iterations), donate_argnums=0)
    # The carry is donated, and a state may hold an array twice, so it is copied.
    carry = jax.block_until_ready(loop(jax.tree.map(jnp.copy, carry), inputs))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        carry = jax.block_until_ready(loop(carry, inputs))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / iterations


def copy_bandwidth(elements: int, repeats: int, iterations: int) -> float:
    """Return the bytes/s that an elementwise pass reads and writes.

    Args:
        elements: number of bfloat16 elements.
        repeats: number of runs of a compiled loop.
        iterations: number of steps of a run.
    """
    took = seconds(lambda x, _: -x, jnp.ones(elements, jnp.bfloat16), None, repeats, iterations)
    return 2 * 2 * elements / took


def gram_schmidt(p: jax.Array) -> jax.Array:
    """Return the columns of p [n, r] made orthonormal one after another, by the modified Gram-Schmidt process."""

    def normalise(i: jax.Array, p: jax.Array) -> jax.Array:
        unit = p[:, i] / (jnp.linalg.norm(p[:, i]) + 1e-8)
        later = jnp.where(jnp.arange(p.shape[1]) > i, unit @ p, 0)
        return (p - unit[:, None] * later).at[:, i].set(unit)

    return lax.fori_loop(0, p.shape[1], normalise, p)


def _gram_schmidt_step(carry: list, inputs: list[jax.Array]) -> list:
    """Return the error [n, k] and q [k, r] of each input after one more step of PowerSGD."""
    after = []
    for x, (e, q) in zip(inputs, carry, strict=True):
        m, product = kernels.project(x, q, kernels.Explicit(e))
        p = gram_schmidt(product).astype(q.dtype)
        w = kernels.backproject(m, p)[0].astype(q.dtype)
        after.append((kernels.residual(m, p, w), w))
    return after


def compression(case: Matrices, implementation: str) -> Operation:
    """Return the sender's operation: encode a message or reduce gradients; the carry is the sender's state."""
    inputs = case.random(case.n, case.k)
    # A message reads x and the old m, writes the new m and reads it. A gradient reads x and e, writes m, reads it twice
    # and writes e.
    name, passes = ("encode", 4) if case.kind == "message" else ("reduce", 6)
    moved = passes * case.bytes
    if implementation == "gram_schmidt":
        errors = [(jnp.zeros_like(x), q) for x, q in zip(inputs, case.random(case.k, case.rank))]
        return Operation(name, _gram_schmidt_step, errors, inputs, moved)
    if case.kind == "message":
        codec = LowRank(case.rank, implementation=implementation)

        def encode(state: LowRankState, x: jax.Array) -> LowRankState:
            return codec.encode(state, x)[1]

        return Operation(name, encode, codec.init((case.n, case.k), case.dtype), inputs[0], moved)

    reducer = PowerSGD(case.rank, implementation, keep=False)
    shards = [Shard(None, 1, -1)] * case.number

    def reduce(states: list[PowerState], xs: list[jax.Array]) -> list[PowerState]:
        wire, kept = reducer.encode(states, xs, shards)
        return reducer.update(reducer.exchange(wire, kept, shards), kept, shards)[0]

    return Operation(name, reduce, [reducer.init((case.n, case.k), shard) for shard in shards], inputs, moved)


def decompression(case: Matrices, implementation: str) -> Operation:
    """Return the receiver's operation, decode; the carry is the decoded matrices."""
    factors = list(zip(case.random(case.n, case.rank), case.random(case.k, case.rank)))
    carry = [jnp.zeros((case.n, case.k), case.dtype) for _ in factors]

    def decode(carry: list[jax.Array], factors: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        # The factors must depend on the previous pass, or XLA would move the product out of the loop.
        _, factors = lax.optimization_barrier((carry, factors))
        return [kernels.decode(p, w, case.dtype, implementation=implementation) for p, w in factors]

    return Operation("decode", decode, carry, factors, case.bytes)


def measure(
    cases: Iterable[Matrices], implementations: Sequence[str], bandwidth: float, repeats: int, iterations: int
) -> Iterator[Timing]:
    """Yield the timings of all cases, as they are measured.

    Args:
        cases: matrices to compress.
        implementations: "gram_schmidt" and kernels.IMPLEMENTATIONS, or some of them.
        bandwidth: bandwidth of a copy, in bytes/s.
        repeats: number of runs of a compiled loop.
        iterations: number of steps of a run.
    """
    for case, work, implementation in itertools.product(cases, (compression, decompression), implementations):
        if work is decompression and implementation == "gram_schmidt":
            continue
        operation = work(case, implementation)
        took = seconds(operation.step, operation.carry, operation.inputs, repeats, iterations)
        size = "x".join(map(str, (case.number, case.n, case.k)[case.number == 1 :]))
        share = operation.bytes / took / bandwidth
        yield Timing(
            operation.name, size, case.dtype.name, case.rank, implementation, 1e6 * took, operation.bytes, share
        )


def ratios(rows: Iterable[Timing]) -> list[str]:
    """Return a line for each operation and case with "triton": its speed relative to the other implementations."""
    lines, groups = [], collections.defaultdict[tuple, dict[str, float]](dict)
    for row in rows:
        groups[row.operation, row.size, row.dtype, row.rank][row.implementation] = row.microseconds
    for (operation, size, dtype, rank), times in groups.items():
        if "triton" in times:
            triton = times.pop("triton")
            than = ", ".join(f"{took / triton:.2f} times as fast as {name}" for name, took in times.items())
            lines.append(f"{operation} {size} {dtype} rank {rank}: triton is {than}")
    return lines


def table_row(row: Timing | None = None) -> str:
    """Return a row of the table as text, or its head if no row is given."""
    cells = Timing._fields if row is None else (*row[:5], f"{row.microseconds:.1f}", row.bytes, f"{row.share:.0%}")
    return "{:10} {:>14} {:>9} {:>5} {:>15} {:>13} {:>12} {:>6}".format(*cells)


def write_csv(path: str, rows: Iterable[Timing], bandwidth: float) -> None:
    """Write rows to a CSV file, with the copy bandwidth as the last column.

    Args:
        path: file to write.
        rows: rows of the table.
        bandwidth: bandwidth of a copy, in bytes/s.
    """
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Timing._fields, "copy_bandwidth"])
        writer.writerows([*row, bandwidth] for row in rows)
