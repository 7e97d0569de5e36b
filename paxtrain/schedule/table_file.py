"""A schedule from a file: CSV with a line for each stage and a cell for each step, as PyTorch's pipelining writes it.

A cell is the number of the virtual stage, a letter and the number of the micro-batch: 0F3, 0B3, or 0I3 and 0W3 if the
backward is split; an empty cell is a step in which the stage waits. A cell with brackets, (0F3;7B0)OVERLAP_F_B, has
several ops. Virtual stages are dealt out in turn, virtual stage q on line q mod P of P, or in the shape of a V: if the
last line has virtual stage P, chunks run to the last line and back. Only the order of each line's cells counts;
`row_layout.lay_out` makes the rows.

References:
    torch.distributed.pipelining, the "compute_only" format of `_PipelineScheduleRuntime._load_csv`.
"""

import csv
import dataclasses
import pathlib
import re
from collections.abc import Callable

import numpy as np

from paxtrain.schedule.row_layout import Op
from paxtrain.schedule.stage_map import StageMap, folded, in_turn
from paxtrain.schedule.table import Schedule

_CELL = re.compile(r"(\d{1,7})([FBIW])(\d{1,7})", re.ASCII)
_SEVERAL = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
OpKey = tuple[str, int, int]  # phase, virtual stage, micro-batch


@dataclasses.dataclass(frozen=True)
class Orders:
    """The ops of a file.

    Attributes:
        orders: (phase, micro-batch, chunk) of every stage, in its order.
        chunks: virtual stages per stage.
        micro_batches: number of micro-batches.
        splits: whether the backward runs as B and W.
        place: (P, chunks) -> stages of all virtual stages.
    """

    orders: list[list[Op]]
    chunks: int
    micro_batches: int
    splits: bool
    place: Callable[[int, int], StageMap]

    @property
    def in_flight(self) -> np.ndarray:
        """Most micro-batches, of all chunks, between F and their last op, int [stages]."""
        last = "W" if self.splits else "B"
        steps = [[(phase == "F") - (phase == last) for phase, *_ in order] for order in self.orders]
        return np.array([max(np.cumsum(some)) for some in steps])


def _cells(path: pathlib.Path) -> list[list[tuple[str, OpKey]]]:
    """Return (place, op) of the cells of each line that has any; I is B, as in `Schedule`."""
    try:
        lines = list(csv.reader(path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot read the schedule {path}: {reason}; name a CSV file with a line for each stage"
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        ops: list[tuple[str, OpKey]] = []
        for column, cell in enumerate(line, 1):
            several = _SEVERAL.fullmatch(cell.strip())
            for text in map(str.strip, several[1].split(";") if several else [cell]):
                place, match = f"{path}, line {number}, cell {column}", _CELL.fullmatch(text)
                if text and not match:
                    raise ValueError(f"{place}: {text!r} is no op; cells are such as 0F3, 0B3, 0I3 or 0W3, or empty")
                if match:
                    ops.append((f"{place} ({text})", (match[2], int(match[1]), int(match[3]))))
        if line:
            found.append(ops)
    if not any(found):
        raise ValueError(f"{path} has no op; a line for each stage with cells such as 0F0,0B0 would work")
    return found


def _check_complete(path: pathlib.Path, lines: list[list[tuple[str, OpKey]]]) -> tuple[StageMap, int, bool]:
    """Return the stage map, number of micro-batches and whether the backward is split; every op is there once."""
    stages = len(lines)
    where: dict[OpKey, str] = {}
    keys = [key for line in lines for _, key in line]
    virtual, micro_batches = max(q for _, q, _ in keys) + 1, max(mb for *_, mb in keys) + 1
    if virtual % stages:
        raise ValueError(
            f"{path} has {stages} lines, but the virtual stages 0 to {virtual - 1}; as many on each line would work"
        )
    back = any(q == stages > 1 for _, (_, q, _) in lines[-1])
    stage_map = (folded if back else in_turn)(stages, virtual // stages)
    splits = any(phase in "IW" for phase, *_ in keys)
    for stage, line in enumerate(lines):
        for place, (phase, q, mb) in line:
            if (own := stage_map.stage_of[q]) != stage:
                raise ValueError(f"{place}: virtual stage {q} belongs on line {own + 1} of {stages}")
            for part in "IW" if splits and phase == "B" else phase:
                if (part, q, mb) in where:
                    raise ValueError(f"{place}: the op is there already, at {where[part, q, mb]}")
                where[part, q, mb] = place
    for q in range(virtual):
        for mb in range(micro_batches):
            for phase in "FIW" if splits else "FB":
                if (phase, q, mb) not in where:
                    place = f"{path}, line {stage_map.stage_of[q] + 1}"
                    raise ValueError(f"{place}: {q}{phase}{mb} is missing; every op has to be there once")
    return stage_map, micro_batches, splits


def _check_order(lines: list[list[tuple[str, OpKey]]], last: int) -> None:
    """Require that every op comes behind what it needs, whatever the other lines do."""
    queues = [list(line) for line in lines]
    done: set[OpKey] = set()

    def needs(key: OpKey) -> list[OpKey]:
        phase, q, mb = key
        backward = "B" if ("B", q, mb) in keys else "I"
        if phase == "F":
            return [("F", q - 1, mb)] if q else []
        if phase == "W":
            return [(backward, q, mb)]
        after = [key for key in (("B", q + 1, mb), ("I", q + 1, mb)) if key in keys]
        return [("F", q, mb), *(after if q < last else [])]

    keys = {key for line in lines for _, key in line}
    while any(queues):
        before = len(done)
        for queue in queues:
            while queue and all(key in done for key in needs(queue[0][1])):
                done.add(queue.pop(0)[1])
        if len(done) == before:
            place, key = next(queue[0] for queue in queues if queue)
            missing = next(key for key in needs(key) if key not in done)
            wanted = f"{missing[1]}{missing[0]}{missing[2]}"
            raise ValueError(f"{place}: the op needs {wanted}, which never comes before it; put it behind {wanted}")


def load(path: str) -> Orders:
    """Return the ops of a file.

    Raises:
        ValueError: the file cannot be read, or its schedule cannot run; the message names the file, line and cell.
    """
    file = pathlib.Path(path)
    lines = _cells(file)
    stage_map, micro_batches, splits = _check_complete(file, lines)
    _check_order(lines, stage_map.chunks * len(lines) - 1)
    orders: list[list[Op]] = []
    for line in lines:
        order: list[Op] = []
        for _, (phase, q, mb) in line:
            chunk = q // len(lines)
            order.append(("B" if phase == "I" else phase, mb, chunk))
            if splits and phase == "B":
                order.append(("W", mb, chunk))
        orders.append(order)
    return Orders(orders, stage_map.chunks, micro_batches, splits, folded if stage_map.folded else in_turn)


def text(schedule: Schedule) -> str:
    """Return a table as the text of such a file; a row in which a stage has several ops takes several steps."""
    letters = {"forward": "F", "weights": "W", "backward": "I" if schedule.splits else "B"}
    cells: list[list[list[str]]] = [[[] for _ in range(schedule.stages)] for _ in range(schedule.rows)]
    for phase, letter in letters.items():
        for row, stage, mb, chunk in schedule.ops(phase):
            cells[row][stage].append(f"{schedule.virtual_stage(stage, chunk)}{letter}{mb}")
    lines: list[list[str]] = [[] for _ in range(schedule.stages)]
    for made in cells:
        steps = max(len(own) for own in made)
        for s, own in enumerate(made):
            lines[s] += own + [""] * (steps - len(own))
    return "".join(",".join(line) + "\n" for line in lines)
