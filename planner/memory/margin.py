"""The safety margins of the closed form.

A margin is the most by which the compiler exceeded the closed form on labels: small programs of a family, compiled by
XLA for H100s, with jax 0.10.2 (experiments/memory/labels.py). A configuration like those of n labels exceeds it with
probability 1 / (n + 1) (split conformal prediction; Vovk et al. 2005). A learned correction of the closed form was
tried: with errors measured on labels that it had not seen, the best correction was none.
"""

from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from paxtrain.config import ModelConfig


class Margin(NamedTuple):
    """A margin.

    Attributes:
        log: log(compiler's bytes / closed form's), the largest among the labels.
        labels: number of the labels.
    """

    log: float
    labels: int

    @property
    def words(self) -> str:
        """The addend, and the programs that it was measured on."""
        return f"{np.expm1(self.log):.0%}, the most that the compiler exceeded it by on {self.labels} programs"


# Llamas without a pipeline have a margin of their own: XLA's scheduler runs far ahead there.
MARGINS = {"gpt2": Margin(0.20066, 65), "llama": Margin(0.11056, 17)}
ALONE = {"llama": Margin(0.48607, 8)}


def _measured(model: ModelConfig) -> bool:
    return not model.module and model.family in MARGINS


def _margins(model: ModelConfig) -> tuple[Margin, Margin]:
    """Return the margins of a model with a pipeline and without; the largest known if none was measured."""
    if not _measured(model):
        return max(MARGINS.values()), max(ALONE.values())
    several = MARGINS[model.family]
    return several, ALONE.get(model.family, several)


def margin(model: ModelConfig, pipe: Any) -> Any:
    """Return the logarithm of a model's margin for sizes of the pipe axis."""
    several, alone = _margins(model)
    return np.where(np.asarray(pipe) == 1, alone.log, several.log)


def chance(model: ModelConfig, pipe: int, room: float) -> float:
    """Return the probability that a program of a model fits, by the errors of the closed form on the labels.

    Their logarithms count as normal, with the largest of n at its quantile n / (n + 1).

    Args:
        model: the model.
        pipe: size of the pipe axis.
        room: logarithm of the limit over the closed form's bytes, without a margin.
    """
    several, alone = _margins(model)
    known = alone if pipe == 1 else several
    normal = NormalDist()
    return normal.cdf(room / (known.log / normal.inv_cdf(known.labels / (known.labels + 1))))


def origin(model: ModelConfig, pipe: int = 0) -> str:
    """Return what the estimate with a margin is, and what the margin was measured on.

    Args:
        model: the model.
        pipe: size of the pipe axis of the plan that it is about; 0: of plans with a pipeline and without.
    """
    several, alone = _margins(model)
    words = f"closed form + {(alone if pipe == 1 else several).words}"
    if alone != several:
        of_both = f"; without a pipeline + {alone.words}"
        words += of_both if not pipe else f" {'without' if pipe == 1 else 'with'} a pipeline"
    return words + ("" if _measured(model) else f"; none of them of {model.module or model.family}")
