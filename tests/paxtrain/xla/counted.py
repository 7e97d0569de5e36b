"""Counts of what a compiled program sends, copies and repeats, read from its text as paxtrain/xla/hlo.py reads it."""

import collections
import dataclasses

from paxtrain.xla.hlo import While, collectives
from paxtrain.xla.module import HloInstruction, HloModule, array_bytes, arrays


@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy of a whole array.

    Attributes:
        computation: name of the computation that contains it.
        shape: dtype and shape as HLO spells them, without layout ("bf16[5,1024]").
        bytes: bytes of the array.
        executions: number of times that one execution of the program runs it.
    """

    computation: str
    shape: str
    bytes: int
    executions: int


def collective_bytes(text: str, unknown_trip_count: int = 1) -> dict[str, int]:
    """Return the bytes of one participant's operands, added up over all executions, for each kind of collective.

    The bytes describe the program. What a device sends depends on its branches and on the permutes that it takes part
    in (`paxtrain.study.measurements.wire_bytes`).
    """
    total: collections.Counter[str] = collections.Counter()
    for op in collectives(text, unknown_trip_count):
        total[op.kind] += op.bytes * op.executions
    return dict(total)


def permute_bytes_by_pair(text: str, unknown_trip_count: int = 1) -> dict[tuple[int, int], int]:
    """Return the bytes that collective-permutes send from one partition to another, by (source, target)."""
    total: collections.Counter[tuple[int, int]] = collections.Counter()
    for op in collectives(text, unknown_trip_count):
        for pair in op.pairs:
            total[pair] += op.bytes * op.executions
    return dict(total)


def permute_bytes(text: str, unknown_trip_count: int = 1) -> int:
    """Return the bytes that collective-permutes send over all links together."""
    return sum(permute_bytes_by_pair(text, unknown_trip_count).values())


def conditionals(text: str, unknown_trip_count: int = 1) -> int:
    """Return the number of conditionals that one execution of the program runs; on a GPU each makes the host wait."""
    return sum(n for _, n, op in HloModule(text, unknown_trip_count).executed() if op.opcode == "conditional")


def whiles(text: str, unknown_trip_count: int = 1) -> list[While]:
    """Return every loop that is executed."""
    return [
        While(dict(op.callees())["body"], op.trips(), times)
        for _, times, op in HloModule(text, unknown_trip_count).executed()
        if op.opcode == "while"
    ]


def _copies_whole(program: HloModule, computation: str, instruction: HloInstruction) -> bool:
    """Return whether a fusion only copies an array: from a parameter to (a part of) its root."""
    body = program.computations[computation]
    source = body[instruction.operands[0]]
    while source.opcode == "bitcast":
        source = body[source.operands[0]]
    if source.opcode != "parameter":
        return False
    results = [next(i for i in body.values() if i.root)]
    while results:
        result = results.pop()
        if result is instruction:
            return True
        if result.opcode in ("bitcast", "tuple"):
            results += [body[name] for name in result.operands]
    return False


def copies(text: str, unknown_trip_count: int = 1) -> list[Copy]:
    """Return every executed copy of a whole array: alone, or as (a part of) a fusion that does nothing else to it."""
    program = HloModule(text, unknown_trip_count)
    found = []
    for computation, times, op in program.executed():
        if op.opcode not in ("copy", "copy-start"):
            continue
        if computation in program.fused and not _copies_whole(program, computation, op):
            continue
        [shape] = program.operand_shapes(computation, op)
        plain = ",".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in arrays(shape))
        found.append(Copy(computation, plain, array_bytes(shape), times))
    return found
