"""Measured pairs of a plan and a placement, and how good predictions of their step times are."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.lab.laboratory import summary
from experiments.lab.records import Records

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


def differ(measured: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Return which two pairs differ by more than both of their spreads together, bool [pairs, pairs].

    Args:
        measured: [pairs] medians, seconds.
        spread: [pairs] half the distance between the quartiles, seconds.
    """
    return np.abs(measured[:, None] - measured) > spread[:, None] + spread


def somers_d(predicted: np.ndarray, measured: np.ndarray, spread: np.ndarray) -> float:
    """Return Somers' D of predictions over all comparisons of pairs whose measured times differ; NaN without any.

    It is the share of comparisons whose order is predicted, less the share of those predicted the other way round.
    Equal predictions are neither. Without spreads it is `scipy.stats.somersd` of the predictions given the measured
    times.

    Args:
        predicted: [pairs] seconds.
        measured: [pairs] medians, seconds.
        spread: [pairs] half the distance between the quartiles, seconds.
    """
    agree = np.sign(predicted[:, None] - predicted) * np.sign(measured[:, None] - measured)
    compared = agree[differ(measured, spread)]
    return float(compared.mean()) if compared.size else math.nan


def regret(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Return the measured time of the pair predicted best, over that of the best one, less 1."""
    return float(measured[np.argmin(predicted)] / measured.min() - 1)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Accuracy of predictions.

    Attributes:
        mape, median: of |predicted - measured| / measured.
        somers_d: order of the pairs whose measured times differ by more than their spreads.
        spearman: rank correlation of all pairs, alike ones included.
        compared: share of two pairs each that differ so.
        regret: measured time of the pair predicted best over that of the best one, less 1.
    """

    mape: float
    median: float
    somers_d: float
    spearman: float
    compared: float
    regret: float


def score(found: Sequence[Pair], form: str) -> Scores:
    """Return the scores of a form's predictions over all pairs."""
    predicted = np.array([pair.predicted[form] for pair in found])
    measured = np.array([pair.measured for pair in found])
    spread = measured * np.array([pair.spread for pair in found])
    off, most = np.abs(errors(predicted, measured)), len(found) * (len(found) - 1)
    return Scores(
        mape=float(off.mean()),
        median=float(np.median(off)),
        somers_d=somers_d(predicted, measured, spread),
        spearman=spearman(predicted, measured),
        compared=float(differ(measured, spread).sum() / most) if most else 0.0,
        regret=regret(predicted, measured),
    )
