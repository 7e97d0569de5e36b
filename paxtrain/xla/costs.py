"""Costs of a compiled program's kernels: FLOPs of matrix products, and bytes read and written, from the program's text.

A kernel reads each of its operands once and writes its result once. It reads only a part of an operand that it slices
or gathers from, and of an array that it updates in place it touches the part. Caches are not modelled: what one kernel
writes, the next one reads from memory.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from paxtrain.xla.hlo import COLLECTIVES
from paxtrain.xla.module import HloInstruction, HloModule, array_bytes, arrays

# Opcodes that launch no kernel: they name, order or repeat what others make, or belong to collectives.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_FREE |= {"opt-barrier", "partition-id", "replica-id", "add-dependency", "async-start", "async-update", "async-done"}
_FREE |= {"copy-done", "fusion-done", "send", "send-done", "recv", "recv-done"}
_FREE |= {f"{kind}{end}" for kind in COLLECTIVES for end in ("", "-start", "-done")}
_SLICES = ("dynamic-slice", "slice", "gather")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GEMM = re.compile(r"gemm|matmul")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CONTRACTED_BY_LIBRARY = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program.

    Attributes:
        name: name of its instruction.
        op_name: named scopes and primitive that it comes from; "" if the text does not say.
        executions: number of times that one execution of the program runs it.
        bytes: bytes that one run reads and writes.
        flops: FLOPs of the matrix products of one run. Attention kernels count as the model's FLOPs do: 4 for each
            element of the scores and dim of a head forward, 8 backward, whatever a mask leaves out.
        product: whether it is, or contains, a matrix product or an attention kernel.
    """

    name: str
    op_name: str
    executions: int
    bytes: int
    flops: float
    product: bool


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _flops(module: HloModule, computation: str, op: HloInstruction) -> float:
    """Return the FLOPs of the matrix products that an instruction is or contains."""
    shapes = module.operand_shapes(computation, op)
    if op.opcode == "dot":
        contracted = _numbers(found[1]) if (found := _CONTRACTED.search(op.attributes)) else []
        return _of_product(op.shape, shapes[0], contracted)
    if op.opcode == "custom-call":
        target = found[1] if (found := _TARGET.search(op.attributes)) else ""
        if "fmha" in target:
            q, k = arrays(shapes[0])[0][1], arrays(shapes[1])[0][1]
            return (8 if "Backward" in target else 4) * math.prod(q) * k[1]
        if _GEMM.search(target):
            contracted = _numbers(found[1]) if (found := _CONTRACTED_BY_LIBRARY.search(op.attributes)) else []
            return _of_product(op.shape, shapes[0], contracted)
    return sum(
        _flops(module, callee, inner) for _, callee in op.callees() for inner in module.computations[callee].values()
    )


def _of_product(result: str, left: str, contracted: list[int]) -> float:
    dims = arrays(left)[0][1]
    return 2.0 * math.prod(arrays(result)[0][1]) * math.prod(dims[i] for i in contracted)


def _users(body: dict[str, HloInstruction], name: str) -> Iterator[tuple[HloInstruction, int]]:
    """Yield (instruction, number of the operand) of all uses of a value in a fusion, through bitcasts."""
    for op in body.values():
        for number, operand in enumerate(op.operands):
            if operand == name:
                if op.opcode == "bitcast":
                    yield from _users(body, op.name)
                else:
                    yield op, number


def _read(body: dict[str, HloInstruction], parameter: HloInstruction) -> int:
    """Return the bytes that a fusion reads of a parameter."""
    size, total = array_bytes(parameter.shape), 0
    for user, number in _users(body, parameter.name):
        if user.opcode in _SLICES and number == 0:
            total += array_bytes(user.shape)
        elif user.opcode == "scatter" and number == 0:
            total += array_bytes(body[user.operands[-1]].shape)  # what it adds to
        elif user.opcode != "dynamic-update-slice" or number != 0:
            return size
    return min(size, total)


def _written(body: dict[str, HloInstruction], root: HloInstruction) -> int:
    """Return the bytes that a fusion, or one instruction, writes."""
    if root.opcode == "bitcast":
        return _written(body, body[root.operands[0]])
    if root.opcode == "tuple":
        return sum(_written(body, body[name]) for name in root.operands)
    if root.opcode == "dynamic-update-slice":
        return array_bytes(body[root.operands[1]].shape)
    if root.opcode == "scatter":
        return array_bytes(body[root.operands[-1]].shape)
    return array_bytes(root.shape)


def _bytes(module: HloModule, computation: str, op: HloInstruction) -> int:
    """Return the bytes that one run of a kernel reads and writes."""
    body = module.computations[computation]
    if op.opcode in ("fusion", "fusion-start"):
        fused = module.computations[op.callees()[0][1]]
        root = next(inner for inner in fused.values() if inner.root)
        parameters = {int(inner.arguments): inner for inner in fused.values() if inner.opcode == "parameter"}
        # An operand may be passed more than once.
        read: dict[str, int] = {}
        for number, name in enumerate(op.operands):
            read[name] = max(read.get(name, 0), _read(fused, parameters[number]))
        return sum(read.values()) + _written(fused, root)
    if op.opcode == "copy-start":
        return 2 * array_bytes(body[op.operands[0]].shape)
    if op.opcode in _SLICES:
        return 2 * array_bytes(op.shape)
    if op.opcode == "dynamic-update-slice":
        return 2 * array_bytes(body[op.operands[1]].shape)
    if op.opcode == "scatter":
        return 3 * array_bytes(body[op.operands[-1]].shape)
    return sum(array_bytes(body[name].shape) for name in set(op.operands)) + array_bytes(op.shape)


def kernels(text: str, unknown_trip_count: int = 1) -> list[Kernel]:
    """Return every kernel that is executed, without those of collectives and those that make a scalar (loop counters).

    Args:
        text: `compiled.as_text()`.
        unknown_trip_count: number of trips of a loop whose number is decided at run time.
    """
    module = HloModule(text, unknown_trip_count)
    found = []
    for computation, times, op in module.executed():
        if op.opcode in _FREE or computation in module.fused | module.wrapped:
            continue
        if not any(dims for _, dims in arrays(op.shape)):
            continue
        named = _OP_NAME.search(op.attributes)
        flops = _flops(module, computation, op)
        size = _bytes(module, computation, op)
        found.append(Kernel(op.name, named[1] if named else "", times, size, flops, flops > 0))
    return found
