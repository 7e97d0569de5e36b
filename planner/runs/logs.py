"""Logs of training runs as rows of the table: the seconds of a step, and what else a log says of a run.

What a log does not say, the model and the layout, is given beside it, as cells of the table. A run's seconds are the
median of its steps without the first ones, in which programs are compiled and allocators warm up.

Megatron-LM     "iteration 122/ 250000 | ... | elapsed time per iteration (ms): 86545.2 | ... | global batch size: 1024"
nanotron        "iteration: 7 / 100 | ... | elapsed_time_per_iteration_ms: 11.5K | ... | global_batch_size: 64"
torchtitan      "step: 10 ... memory: 44.84GiB(47.19%)  tps: 5,615  ...", tokens per second of a device
MaxText         "completed step: 9, seconds: 5.667, TFLOP/s/device: ..."
paxtrain        metrics.jsonl of a run, whose lines have "step_seconds"
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paxtrain.errors import UserError
from planner.runs.trials import COLUMNS

_WARM = 3  # steps that do not count, if as many are left
_NUMBER = r"([0-9][0-9.,]*(?:[eE][+-]?[0-9]+)?)"
_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


class Logged(NamedTuple):
    """What a log says of a run.

    Attributes:
        trainer: who wrote it.
        steps: seconds of each step; or tokens per second of a device, if `per_device`.
        cells: cells of the table that it tells.
        per_device: see steps.
    """

    trainer: str
    steps: list[float]
    cells: dict[str, str]
    per_device: bool = False


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    return found[-1] if found else ""


def _megatron(text: str) -> Logged:
    steps = re.findall(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}", text)
    batch = _last(r"global batch size:\s*([0-9]+)", text)
    return Logged("megatron-lm", [_number(x) / 1e3 for x in steps], {"global_batch": batch})


def _nanotron(text: str) -> Logged:
    steps = re.findall(rf"elapsed_time_per_iteration_ms:\s*{_NUMBER}\s*([KMG]?)", text)
    batch = _last(r"global_batch_size:\s*([0-9]+)", text)
    return Logged("nanotron", [_number(x) * _SUFFIXES[s] / 1e3 for x, s in steps], {"global_batch": batch})


def _torchtitan(text: str) -> Logged:
    lines = re.findall(rf"step:\s*([0-9]+)\s.*?memory:\s*{_NUMBER}GiB.*?\btps:\s*{_NUMBER}", text)
    each = {int(step): (_number(memory), _number(rate)) for step, memory, rate in lines}  # ranks repeat a step
    peak = max((memory for memory, _ in each.values()), default=0.0)
    cells = {"memory_gb": f"{peak * 2**30 / 1e9:.4g}"} if each else {}
    return Logged("torchtitan", [rate for _, rate in each.values()], cells, per_device=True)


def _maxtext(text: str) -> Logged:
    steps = re.findall(rf"completed step:\s*[0-9]+,\s*seconds:\s*{_NUMBER}", text)
    return Logged("maxtext", [_number(x) for x in steps], {})


def _paxtrain(text: str) -> Logged:
    steps = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return Logged("", [], {})
        if isinstance(row, dict) and isinstance(row.get("step_seconds"), float):
            steps.append(row["step_seconds"])
    return Logged("", steps, {})


_READERS: tuple[Callable[[str], Logged], ...] = (_megatron, _nanotron, _torchtitan, _maxtext, _paxtrain)


def read(text: str) -> Logged | None:
    """Return what a log says of its run; None if it is no log that this module knows."""
    return next((found for reader in _READERS if (found := reader(text)).steps), None)


def row(found: Logged, given: Mapping[str, str]) -> dict[str, object]:
    """Return a run as a row of the table.

    Args:
        found: what its log says.
        given: cells that somebody says of it, which count more.

    Raises:
        UserError: a cell has no column, or a figure that the seconds follow from is missing.
    """
    if unknown := [name for name in given if name not in COLUMNS]:
        raise UserError(f"{unknown[0]} is no column of the table of runs; it has {', '.join(COLUMNS)}")
    cells = {"trainer": found.trainer, **found.cells, **given}
    steps = found.steps[_WARM:] or found.steps
    middle = statistics.median(steps)
    if found.per_device:
        try:
            tokens = int(cells["global_batch"]) * int(cells["seq"]) / int(cells["devices"])
        except (KeyError, ValueError):
            raise UserError(
                "the log has tokens per second of a device, so the seconds of a step need seq, devices and "
                "global_batch; give them as seq=4096 devices=64 global_batch=256"
            ) from None
        middle = tokens / middle
    whole: dict[str, object] = {name: cells.get(name, "") for name in COLUMNS}
    return whole | {"seconds": f"{middle:.6g}"}
