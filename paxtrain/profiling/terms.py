"""Terms of a step as a plan predicted them beside those that a run measured."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from paxtrain.config.plan import (
    BACKWARD,
    COMPRESSION,
    FORWARD,
    GATHER,
    HEAD,
    HOST,
    OPTIMIZER,
    REDUCE,
    SYNC,
    TRANSFER,
)

_THIS = "paxtrain"  # trainer, as plans name it
# Parts of the breakdown (breakdown.py) that belong to each term.
PARTS = {
    FORWARD: ("forward", "tensor/forward"),
    BACKWARD: ("backward", "tensor/backward"),
    HEAD: ("head", "tensor/head"),
    COMPRESSION: ("compression",),
    TRANSFER: ("pipeline",),
    GATHER: ("gather",),
    REDUCE: ("data", "embedding"),
    SYNC: ("sync",),
    OPTIMIZER: ("optimizer",),
    HOST: ("other", "input", "idle"),
}
_COMPUTE = "kernels take another time than where they were profiled; profile again with all processes of the job"
_LINKS = "collectives over data take another time than planned; profile the links again"
_MENDS = {
    FORWARD: _COMPUTE,
    BACKWARD: _COMPUTE,
    HEAD: _COMPUTE,
    COMPRESSION: "codecs take another time than they declare; those over data are planned as part of reduce",
    TRANSFER: "messages between stages take another time than planned; profile the links again",
    GATHER: _LINKS,
    REDUCE: _LINKS,
    SYNC: "stages wait for one that is slow; look for it in the breakdown",
    OPTIMIZER: "memory is slower or faster than where it was profiled; profile compute again",
    HOST: "the host, casts and copies take another time than planned; the next plan here has what was measured",
}


def other_trainer(predicted: Mapping[str, Any]) -> str:
    """Return the trainer whose seconds a plan predicts, if it is another one than this; else an empty text.

    Args:
        predicted: the plan's `predicted`, which may hold anything.
    """
    found = predicted.get("trainer", _THIS)
    return found if isinstance(found, str) and found != _THIS else ""


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """A step as it was predicted and as it was measured.

    Attributes:
        predicted: predicted seconds of a step.
        measured: median seconds of the steps of this start.
        steps: number of these steps.
        spread: standard error of the median of these steps, as a share of it.
        terms: for each term, predicted and measured seconds of a traced step by stage; empty if no step was traced or
            the plan has no terms.
        trainer: another trainer, whose seconds were predicted; empty: this one's were.
    """

    predicted: float
    measured: float
    steps: int
    spread: float
    terms: Mapping[str, tuple[np.ndarray, np.ndarray]]
    trainer: str = ""

    def worst(self) -> str:
        """Return the term that is off by most seconds, as a mean over the stages; empty without terms."""
        off = {name: float(np.mean(np.abs(b - a))) for name, (a, b) in self.terms.items()}
        return max(off, key=off.__getitem__, default="")

    def figures(self) -> dict[str, float]:
        """Return the metrics: the step and the mean of each term, predicted and measured, in seconds."""
        found = {"predicted_step": self.predicted, "measured_step": self.measured}
        for name, (a, b) in self.terms.items():
            found |= {f"predicted_{name}": float(np.mean(a)), f"measured_{name}": float(np.mean(b))}
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Return the table as rows of (label, figures)."""
        error = f"{self.predicted / self.measured - 1:+.0%}"
        of = f" for {self.trainer}" if self.trainer else ""
        step = f"{self.predicted:.4g} s predicted{of}, {self.measured:.4g} s measured ({error}), median of {self.steps}"
        rows = [("step", step)]
        for name, (a, b) in self.terms.items():
            between = f"; by stage {_each(a)} and {_each(b)}" if len(a) > 1 and name in (FORWARD, BACKWARD) else ""
            rows.append((name, f"{np.mean(a):.4f} s predicted, {np.mean(b):.4f} s measured{between}"))
        if self.trainer:  # whose seconds say nothing of what is wrong here
            return rows
        if worst := self.worst():
            rows.append(("most off", f"{worst}: {_MENDS[worst]}"))
        else:
            rows.append(("terms", "not traced; --config.profile=10:13 traces three steps and tells which is off"))
        return rows


def _each(seconds: np.ndarray) -> str:
    return " ".join(f"{value:.4f}" for value in seconds)


def _planned(told: object) -> np.ndarray:
    """Return a term of a plan's file, which may hold anything; an empty array if it holds no numbers."""
    numbers = isinstance(told, list) and all(_finite(value) for value in told)
    return np.array(told if numbers else [], float)


def _finite(told: object) -> TypeGuard[float]:
    """Return whether a value of a plan's file is a number that a float can hold."""
    return isinstance(told, int | float) and abs(told) <= sys.float_info.max


def compare(
    predicted: Mapping[str, Any], steps: Sequence[float], parts: Mapping[str, np.ndarray]
) -> StepComparison | None:
    """Compare a plan's prediction with a run; return None if the plan has none, or no step was timed.

    Args:
        predicted: the plan's `predicted`.
        steps: seconds of the steps of this start.
        parts: seconds [P] of each part of a traced step; empty if none was traced.
    """
    groups = predicted.get("groups")  # whose median step has no exchange, or few
    median_step = groups.get("median_step_seconds") if isinstance(groups, dict) else None
    seconds = predicted.get("step_seconds") if median_step is None else median_step
    if not _finite(seconds) or not seconds > 0 or not steps:
        return None
    told, terms = predicted.get("terms"), {}
    if parts and isinstance(told, dict):
        for name, of in PARTS.items():
            measured = np.sum([parts[part] for part in of], axis=0)
            # Plans that were made before this term was planned lack it.
            planned = _planned(told.get(name, [0.0] * len(measured) if name == HOST else None))
            if planned.shape == measured.shape:
                terms[name] = (planned, measured)
    median = float(np.median(steps))
    # 1.2533 sigma / sqrt(n), with sigma from the quartiles, which single slow steps do not move.
    sigma = float(np.subtract(*np.percentile(steps, [75, 25]))) / 1.349
    spread = 1.2533 * sigma / math.sqrt(len(steps)) / median
    return StepComparison(float(seconds), median, len(steps), spread, terms, other_trainer(predicted))
