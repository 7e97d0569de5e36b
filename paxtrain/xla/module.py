"""A compiled program's text, parsed: instructions by computation, and how often each computation is executed."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEE = re.compile(r"(condition|body|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLERS = ("while", "conditional", "call", "fusion", "async-start", "call-start", "fusion-start")


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One line of a program's text.

    Attributes:
        name: its name.
        shape: shape of its result, as HLO spells it.
        opcode: opcode as HLO spells it.
        arguments: text between its parentheses: operands, or the number of a parameter.
        operands: names of its operands.
        attributes: text behind the parentheses.
        root: whether it is the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def callees(self) -> list[tuple[str, str]]:
        """Return (role, computation) of every computation that this instruction executes."""
        if self.opcode not in _CALLERS:
            return []  # a reducer named by to_apply, or an async-done that repeats its start's calls
        branches = _BRANCHES.search(self.attributes)
        named = [("branch", name) for name in _NAME.findall(branches[1])] if branches else []
        return named + _CALLEE.findall(self.attributes)

    def trips(self) -> int | None:
        """Return the number of trips of a loop, or None if the text does not state it."""
        known = _TRIPS.search(self.attributes)
        return int(known[1]) if known else None


class HloModule:
    """The instructions of each computation, in order, and how often each computation is executed."""

    def __init__(self, text: str, unknown_trip_count: int) -> None:
        """Parse a program's text.

        Raises:
            ValueError: the text is not that of a compiled program.
        """
        self.computations: dict[str, dict[str, HloInstruction]] = {}
        entry = ""
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                instructions = self.computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif match := _INSTRUCTION.match(line):
                root, name, shape, opcode, operands, attributes = match.groups()
                names = tuple(_NAME.findall(operands))
                instructions[name] = HloInstruction(name, shape, opcode, operands, names, attributes, bool(root))
        self.entry = entry
        if not entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
        self.executions: collections.Counter[str] = collections.Counter()
        self.fused: set[str] = set()
        self.wrapped: set[str] = set()
        self._walk(entry, 1, unknown_trip_count)

    def _walk(self, computation: str, times: int, unknown: int) -> None:
        """Count the executions of a computation and of those that it calls.

        Args:
            computation: name of the computation.
            times: number of executions to add.
            unknown: trip count to assume for a loop whose trip count is not known.
        """
        self.executions[computation] += times
        for instruction in self.computations[computation].values():
            for _, callee in instruction.callees():
                trips = instruction.trips() if instruction.opcode == "while" else 1
                factor = unknown if trips is None else trips
                if instruction.opcode.startswith("fusion"):
                    self.fused.add(callee)
                elif instruction.opcode == "async-start":
                    self.wrapped.add(callee)
                self._walk(callee, times * factor, unknown)

    def executed(self) -> Iterator[tuple[str, int, HloInstruction]]:
        """Yield (computation, executions, instruction) of everything that runs."""
        for computation, times in self.executions.items():
            if times:
                for instruction in self.computations[computation].values():
                    yield computation, times, instruction

    def operand_shapes(self, computation: str, instruction: HloInstruction) -> list[str]:
        """Return the shapes of an instruction's operands, as HLO spells them."""
        return [self.computations[computation][name].shape for name in instruction.operands]

    def contains(self, instruction: HloInstruction, opcodes: tuple[str, ...]) -> bool:
        """Return whether the instruction is, or calls something that contains, one of the opcodes."""
        return instruction.opcode in opcodes or any(
            self.contains(inner, opcodes)
            for _, callee in instruction.callees()
            for inner in self.computations[callee].values()
        )


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """Return (dtype, dims) of an array, or of all arrays of a tuple."""
    return [(dtype, [int(d) for d in dims.split(",") if d]) for dtype, dims in _ARRAY.findall(shape)]


def array_bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    total = 0
    for dtype, dims in arrays(shape):
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 8 if dtype == "pred" else 0  # else a token
        total += math.ceil(math.prod(dims) * bits / 8)
    return total
