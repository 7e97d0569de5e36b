"""Facts about a compiled XLA program, read from its text: what it sends, which compute hides that, when the host waits.

Every function takes `compiled.as_text()`: optimized HLO, whose instructions stand in the order in which they are
scheduled. Counts follow the calls from ENTRY. The body of a loop counts as often as the loop's known trip count says,
and each branch of a conditional counts once. A loop whose trip count is decided at run time counts `unknown_trip_count`
times. The default, 1, suits loops of zero or one trip that serve as conditionals: it gives the largest possible count.

CPU programs carry bfloat16 collectives as float32, so read bytes on the wire from a GPU program (paxtrain.xla.aot).
"""

import dataclasses
import itertools
import math
import re

import numpy as np

from paxtrain.xla.module import HloInstruction, HloModule, array_bytes, arrays

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all")

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_GROUPS_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}")
_GROUPS_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_GROUPS_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? *\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_LIBRARY_MATMUL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cudnn)')
_KERNELS = ("fusion", "custom-call", "dot", "convolution")
# What xla/backends/gpu/runtime/command_buffer_conversion_pass.cc does not convert, or only with options that we leave.
_NOT_IN_GRAPHS = ("conditional", "async-start", "send", "recv", "infeed", "outfeed")
_GRAPHED_CALL = re.compile(r'custom_call_target="[^"]*(?:cublas|cudnn|triton|AllocateBuffer)')


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
    program = HloModule(text, unknown_trip_count)
    found = []
    for computation, times, op in program.executed():
        if kind := _kind(op.opcode):
            operands, groups = program.operand_shapes(computation, op), _groups(op.attributes)
            named = _OP_NAME.search(op.attributes)
            found.append(
                Collective(
                    kind=kind,
                    dtype=arrays(operands[0])[0][0],
                    bytes=sum(map(array_bytes, operands)),
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
    program = HloModule(text, unknown_trip_count=1)
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


def _in_a_graph(program: HloModule, op: HloInstruction) -> bool:
    """Return whether XLA can put an instruction, with all that it runs, into a CUDA graph without collectives."""
    if _kind(op.opcode) or op.opcode in _NOT_IN_GRAPHS:
        return False
    if op.opcode == "custom-call" and not _GRAPHED_CALL.search(op.attributes):
        return False
    return op.opcode == "fusion" or all(
        _in_a_graph(program, inner) for _, callee in op.callees() for inner in program.computations[callee].values()
    )


def host_loops(text: str, graphs: bool = False) -> list[While]:
    """Return the loops whose condition the host reads from the GPU, before each trip and once more at the end.

    Before each reading the GPU runs out of work, because the host waits until all that it has launched is done. Loops
    with a known number of trips are not among them.

    Args:
        text: text of a program compiled for GPUs.
        graphs: whether loops become parts of CUDA graphs if they can (xla_gpu_enable_command_buffer with WHILE); such
            a loop's condition stays on the GPU. Loops with collectives inside cannot.
    """
    program = HloModule(text, unknown_trip_count=1)
    return [
        While(dict(op.callees())["body"], None, times)
        for _, times, op in program.executed()
        if op.opcode == "while" and op.trips() is None and not (graphs and _in_a_graph(program, op))
    ]


def _starts(program: HloModule, op: HloInstruction, kind: str) -> bool:
    """Return whether an instruction starts an asynchronous collective of a kind."""
    return op.opcode == f"{kind}-start" or (op.opcode == "async-start" and program.contains(op, (kind,)))


def _kernels(program: HloModule, op: HloInstruction) -> tuple[int, int]:
    """Return the numbers of (kernels, kernels with a matrix product) that an instruction launches for certain.

    Conditionals, and loops whose number of trips is unknown and may be zero, count as none.
    """
    if op.opcode in ("call", "while"):
        times = (op.trips() or 0) if op.opcode == "while" else 1
        inner = [_kernels(program, i) for _, callee in op.callees() for i in program.computations[callee].values()]
        return times * sum(n for n, _ in inner), times * sum(m for _, m in inner)
    if op.opcode not in _KERNELS or not any(dims for _, dims in arrays(op.shape)):
        return 0, 0
    return 1, int(program.contains(op, ("dot", "convolution")) or bool(_LIBRARY_MATMUL.search(op.attributes)))


def overlap(text: str, unknown_trip_count: int = 1, kind: str = "collective-permute") -> list[Overlap]:
    """Return the compute between start and done of every collective of a kind that is executed.

    Args:
        text: text of a compiled program.
        unknown_trip_count: see above.
        kind: one of COLLECTIVES.
    """
    program = HloModule(text, unknown_trip_count)
    found = []
    for computation, times in program.executions.items():
        if not times or computation in program.wrapped:
            continue
        in_flight: dict[str, Overlap] = {}
        for op in program.computations[computation].values():
            if op.opcode == kind or _starts(program, op, kind):
                size = sum(map(array_bytes, program.operand_shapes(computation, op)))
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
