"""Facts about a compiled XLA program, read from its text: what it sends, what it copies, which compute hides transfers.

Every function takes `compiled.as_text()`: optimized HLO, whose instructions stand in the order in which they are
scheduled. Counts follow the calls from ENTRY. The body of a loop counts as often as the loop's known trip count says,
and each branch of a conditional counts once. A loop whose trip count is decided at run time counts `unknown_trip_count`
times. The default, 1, suits loops of zero or one trip that serve as conditionals: it gives the largest possible count.

CPU programs carry bfloat16 collectives as float32, so read bytes on the wire from a GPU program (paxtrain.xla.aot).
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all")

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEE = re.compile(r"(condition|body|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_GROUPS_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}")
_GROUPS_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUPS_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? *\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_LIBRARY_MATMUL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cudnn)')
_CALLERS = ("while", "conditional", "call", "fusion", "async-start", "call-start", "fusion-start")
_KERNELS = ("fusion", "custom-call", "dot", "convolution")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of COLLECTIVES.
        dtype: dtype of the first operand, as HLO spells it ("bf16").
        bytes: bytes of one participant's operands: for an all-gather its shard, for a reduce-scatter all that it
            reduces.
        pairs: (source, target) partition ids of a collective-permute; a partition id is a position in
            `mesh.devices.flat`, not a device's id.
        groups: groups of partition ids that exchange values; empty for a collective-permute, or if all partitions
            exchange values.
        executions: number of times that one execution of the program runs it.
        computation: name of the computation that contains it.
        op_name: named scopes and primitive that it comes from, "" if XLA has added it without a name.
    """

    kind: str
    dtype: str
    bytes: int
    pairs: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    executions: int
    computation: str
    op_name: str


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction that runs by itself: a kernel, a collective or a loop, but none inside a fusion.

    Attributes:
        opcode: opcode as HLO spells it; that of the start for an asynchronous pair, and of the wrapped instruction for
            a wrapper.
        op_name: named scopes and primitive that it comes from ("jit(step)/forward/dot_general"). An instruction that
            XLA has added without a name gets that of the loop around it, or "" outside of loops.
        groups: groups of partition ids that exchange values in a collective, or a collective-permute's pairs; empty if
            all partitions exchange values. A partition id is a position in `mesh.devices.flat`.
    """

    opcode: str
    op_name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def kind(self) -> str | None:
        """Collective that it runs or starts, one of COLLECTIVES, or None."""
        return _kind(self.opcode)


@dataclasses.dataclass(frozen=True)
class While:
    """One loop.

    Attributes:
        body: name of the computation that it repeats.
        trips: number of trips, None if it is decided at run time.
        executions: number of times that one execution of the program enters it.
    """

    body: str
    trips: int | None
    executions: int


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Instructions scheduled between the start and the done of one collective; zeros if it is synchronous.

    Attributes:
        computation: name of the computation that contains it.
        executions: number of times that one execution of the program runs it.
        bytes: bytes of one participant's operands.
        kernels: number of fusions, matrix products and custom calls, except those with a scalar result (loop counters).
            Those in a loop with a known trip count count as often as they run, those in other loops not at all.
        matmuls: number of the kernels that contain a matrix product or convolution.
        whiles: number of loops of either kind.
    """

    computation: str
    executions: int
    bytes: int
    kernels: int
    matmuls: int
    whiles: int


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


@dataclasses.dataclass(frozen=True)
class _HloInstruction:
    """One line of a program's text."""

    name: str
    shape: str
    opcode: str
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


class _HloModule:
    """The instructions of each computation, in order, and how often each computation is executed."""

    def __init__(self, text: str, unknown_trip_count: int) -> None:
        """Parse a program's text.

        Raises:
            ValueError: the text is not that of a compiled program.
        """
        self.computations: dict[str, dict[str, _HloInstruction]] = {}
        entry = ""
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                instructions = self.computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            elif match := _INSTRUCTION.match(line):
                root, name, shape, opcode, operands, attributes = match.groups()
                names = tuple(_NAME.findall(operands))
                instructions[name] = _HloInstruction(name, shape, opcode, names, attributes, bool(root))
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

    def executed(self) -> Iterator[tuple[str, int, _HloInstruction]]:
        """Yield (computation, executions, instruction) of everything that runs."""
        for computation, times in self.executions.items():
            if times:
                for instruction in self.computations[computation].values():
                    yield computation, times, instruction

    def operand_shapes(self, computation: str, instruction: _HloInstruction) -> list[str]:
        """Return the shapes of an instruction's operands, as HLO spells them."""
        return [self.computations[computation][name].shape for name in instruction.operands]

    def contains(self, instruction: _HloInstruction, opcodes: tuple[str, ...]) -> bool:
        """Return whether the instruction is, or calls something that contains, one of the opcodes."""
        return instruction.opcode in opcodes or any(
            self.contains(inner, opcodes)
            for _, callee in instruction.callees()
            for inner in self.computations[callee].values()
        )

    def copies_whole(self, computation: str, instruction: _HloInstruction) -> bool:
        """Return whether a fusion only copies an array: from a parameter to (a part of) its root."""
        body = self.computations[computation]
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


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
    """Return (dtype, dims) of an array, or of all arrays of a tuple."""
    return [(dtype, [int(d) for d in dims.split(",") if d]) for dtype, dims in _ARRAY.findall(shape)]


def _bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    total = 0
    for dtype, dims in _arrays(shape):
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 8 if dtype == "pred" else 0  # else a token
        total += math.ceil(math.prod(dims) * bits / 8)
    return total


def _kind(opcode: str) -> str | None:
    """Return the collective that an opcode runs or starts, or None."""
    kind = opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pairs of a collective-permute; empty for other collectives."""
    listed = _PAIRS.search(attributes)
    return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", listed[1])) if listed else ()


def _numbers(text: str) -> list[int]:
    """Return the numbers in a text."""
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Return partition ids in the order that HLO writes as [dims]T(order)."""
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order)) if order else ids


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of a collective in any of HLO's spellings; empty if all partitions are one group."""
    if listed := _GROUPS_LISTED.search(attributes):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"[\d,]+", listed[1]) if group != ",")
    ids: np.ndarray
    if iota := _GROUPS_IOTA.search(attributes):
        ids = _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))
    elif mesh := _GROUPS_MESH.search(attributes):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        # 'a':(2)4 is a part of an axis: the second of the dims 2 x 4 x the rest into which the axis is cut.
        chosen = [(name, int(outer or 1), int(size or axes[name])) for name, outer, size in _AXIS.findall(mesh[3])]
        dims: dict[tuple[str, int], int] = {}  # sizes of the parts into which axes are cut, by where they begin
        for name, whole in axes.items():
            cuts = {1, whole, *(cut for other, outer, size in chosen if other == name for cut in (outer, outer * size))}
            dims |= {(name, low): high // low for low, high in itertools.pairwise(sorted(cuts))}
        if not mesh[2]:
            ids = np.arange(math.prod(axes.values()))
        elif order := _IOTA.fullmatch(mesh[2]):
            ids = _iota(*order.groups())
        else:
            ids = np.array(_numbers(mesh[2]))
        last = [list(dims).index((name, outer)) for name, outer, size in chosen if size > 1]
        ids = np.moveaxis(ids.reshape(list(dims.values())), last, range(-len(last), 0))
        ids = ids.reshape(-1, math.prod(size for _, _, size in chosen))
    else:
        return ()
    return tuple(tuple(group) for group in ids.tolist())


def collectives(text: str, unknown_trip_count: int = 1) -> list[Collective]:
    """Return every collective that is executed; an asynchronous one is listed once, where it starts."""
    program = _HloModule(text, unknown_trip_count)
    found = []
    for computation, times, op in program.executed():
        if kind := _kind(op.opcode):
            operands, groups = program.operand_shapes(computation, op), _groups(op.attributes)
            named = _OP_NAME.search(op.attributes)
            found.append(
                Collective(
                    kind=kind,
                    dtype=_arrays(operands[0])[0][0],
                    bytes=sum(map(_bytes, operands)),
                    pairs=_pairs(op.attributes),
                    groups=groups,
                    executions=times,
                    computation=computation,
                    op_name=named[1] if named else "",
                )
            )
    return found


def instructions(text: str) -> dict[str, Instruction]:
    """Return every instruction that can run, by its name, which is the name of a profiler's events."""
    program = _HloModule(text, unknown_trip_count=1)
    found: dict[str, Instruction] = {}

    def visit(computation: str, around: str) -> None:
        for op in program.computations[computation].values():
            does = op
            if op.opcode == "async-start":
                does = next(i for _, callee in op.callees() for i in program.computations[callee].values() if i.root)
            named = _OP_NAME.search(op.attributes) or _OP_NAME.search(does.attributes)
            op_name = named[1] if named else around
            groups = _pairs(does.attributes) or _groups(does.attributes)
            found[op.name] = Instruction(does.opcode, op_name, groups)
            for _, callee in op.callees():
                if callee not in program.fused | program.wrapped:
                    visit(callee, op_name)

    visit(program.entry, "")
    return found


def collective_bytes(text: str, unknown_trip_count: int = 1) -> dict[str, int]:
    """Return the bytes of one participant's operands, added up over all executions, for each kind of collective.

    The bytes describe the program. What a device sends depends on its branches and on the permutes that it takes part
    in (`paxtrain.study.probe.wire_bytes`).
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
    return sum(n for _, n, op in _HloModule(text, unknown_trip_count).executed() if op.opcode == "conditional")


def whiles(text: str, unknown_trip_count: int = 1) -> list[While]:
    """Return every loop that is executed."""
    return [
        While(dict(op.callees())["body"], op.trips(), times)
        for _, times, op in _HloModule(text, unknown_trip_count).executed()
        if op.opcode == "while"
    ]


def _starts(program: _HloModule, op: _HloInstruction, kind: str) -> bool:
    """Return whether an instruction starts an asynchronous collective of a kind."""
    return op.opcode == f"{kind}-start" or (op.opcode == "async-start" and program.contains(op, (kind,)))


def _kernels(program: _HloModule, op: _HloInstruction) -> tuple[int, int]:
    """Return the numbers of (kernels, kernels with a matrix product) that an instruction launches for certain.

    Conditionals, and loops whose number of trips is unknown and may be zero, count as none.
    """
    if op.opcode in ("call", "while"):
        times = (op.trips() or 0) if op.opcode == "while" else 1
        inner = [_kernels(program, i) for _, callee in op.callees() for i in program.computations[callee].values()]
        return times * sum(n for n, _ in inner), times * sum(m for _, m in inner)
    if op.opcode not in _KERNELS or not any(dims for _, dims in _arrays(op.shape)):
        return 0, 0
    return 1, int(program.contains(op, ("dot", "convolution")) or bool(_LIBRARY_MATMUL.search(op.attributes)))


def overlap(text: str, unknown_trip_count: int = 1, kind: str = "collective-permute") -> list[Overlap]:
    """Return the compute between start and done of every collective of a kind that is executed.

    Args:
        text: text of a compiled program.
        unknown_trip_count: see above.
        kind: one of COLLECTIVES.
    """
    program = _HloModule(text, unknown_trip_count)
    found = []
    for computation, times in program.executions.items():
        if not times or computation in program.wrapped:
            continue
        in_flight: dict[str, Overlap] = {}
        for op in program.computations[computation].values():
            if op.opcode == kind or _starts(program, op, kind):
                size = sum(map(_bytes, program.operand_shapes(computation, op)))
                in_flight[op.name] = Overlap(computation, times, size, kernels=0, matmuls=0, whiles=0)
            if op.opcode == kind:
                found.append(in_flight.pop(op.name))
            elif op.opcode in (f"{kind}-done", "async-done"):
                found += [in_flight.pop(name) for name in op.operands if name in in_flight]
            else:
                kernels, matmuls = _kernels(program, op)
                for name, flight in in_flight.items():
                    in_flight[name] = dataclasses.replace(
                        flight,
                        kernels=flight.kernels + kernels,
                        matmuls=flight.matmuls + matmuls,
                        whiles=flight.whiles + (op.opcode == "while"),
                    )
    return found


def copies(text: str, unknown_trip_count: int = 1) -> list[Copy]:
    """Return every executed copy of a whole array: alone, or as (a part of) a fusion that does nothing else to it."""
    program = _HloModule(text, unknown_trip_count)
    found = []
    for computation, times, op in program.executed():
        if op.opcode not in ("copy", "copy-start"):
            continue
        if computation in program.fused and not program.copies_whole(computation, op):
            continue
        [shape] = program.operand_shapes(computation, op)
        plain = ",".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in _arrays(shape))
        found.append(Copy(computation, plain, _bytes(shape), times))
    return found
