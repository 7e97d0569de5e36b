"""Measured pairs of a plan and a placement, and how good predictions of their step times are."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np
from scipy import stats

from tests.cluster.laboratory import summary
from tests.cluster.records import Records

SOURCE = "placements.jsonl"
FORMS = {"simulator": "predicted", "Pipette's form": "pipette", "AMP's form": "amp"}  # and where a record has it


@dataclasses.dataclass(frozen=True)
class Pair:
    """A plan on a placement.

    Attributes:
        hows: in what ways it was chosen; several ways may choose the same placement.
        measured: median seconds of a step. spread: half the distance between the quartiles, over the median.
        predicted: seconds by each of FORMS.
    """

    scenario: str
    plan: str
    hows: tuple[str, ...]
    measured: float
    spread: float
    repeats: int
    predicted: dict[str, float]


def pairs(folder: pathlib.Path) -> list[Pair]:
    """Return all measured pairs; a placement that was chosen in several ways is one pair with all its repeats."""
    found: dict[tuple[str, str, str], list[dict]] = {}
    for line in Records(folder / SOURCE):
        if "how" in line:
            found.setdefault((line["scenario"], line["plan"], str(line["hosts"])), []).append(line)
    made = []
    for (scenario, plan, _), lines in found.items():
        time = summary([second for line in lines for second in line["seconds"]])
        predicted = {form: lines[0][column] for form, column in FORMS.items()}
        hows = tuple(line["how"] for line in lines)
        spread, repeats = time["spread"] / time["median"], time["repeats"]
        made.append(Pair(scenario, plan, hows, time["median"], spread, repeats, predicted))
    return made


def grouped(found: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Return the pairs by scenario."""
    return {name: [p for p in found if p.scenario == name] for name in dict.fromkeys(p.scenario for p in found)}


def short_names(plans: Sequence[str]) -> dict[str, str]:
    """Return the plans' names without the words that all of them share."""
    unique = list(dict.fromkeys(plans))
    shared = set.intersection(*(set(plan.split()) for plan in unique)) if len(unique) > 1 else set()
    return {plan: " ".join(word for word in plan.split() if word not in shared) for plan in unique}


# --- Scores -----------------------------------------------------------------------------------------------------------


def errors(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return signed errors of predictions, relative to the measured times."""
    return predicted / measured - 1


def spearman(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Return the rank correlation; NaN if there is nothing to rank."""
    if np.unique(predicted).size < 2 or np.unique(measured).size < 2:
        return math.nan
    return float(stats.spearmanr(predicted, measured)[0])


def regret(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Return the measured time of the pair predicted best, over that of the best one, less 1."""
    return float(measured[np.argmin(predicted)] / measured.min() - 1)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Accuracy of predictions: mean and median of |predicted - measured| / measured, rank correlation and regret."""

    mape: float
    median: float
    spearman: float
    regret: float


def score(found: Sequence[Pair], form: str) -> Scores:
    """Return the scores of a form's predictions over all pairs."""
    predicted = np.array([pair.predicted[form] for pair in found])
    measured = np.array([pair.measured for pair in found])
    off = np.abs(errors(predicted, measured))
    return Scores(float(off.mean()), float(np.median(off)), spearman(predicted, measured), regret(predicted, measured))
