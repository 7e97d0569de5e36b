"""Rotary positions: the angle by which each pair of a head's dims turns from a token to the next. No jax.

References:
    Su et al. 2021, RoFormer; Chen et al. 2023, "Extending Context Window" (linear); Peng et al. 2023, YaRN.
    Grattafiori et al. 2024, "The Llama 3 Herd of Models", and transformers' modeling_rope_utils.py (llama3).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.config.checks import require
from paxtrain.config.options import NO_OPTIONS, OptionValues

_LONG = "original_max_position_embeddings"
# What each type needs, and what it may have besides, with Hugging Face's names and defaults.
TYPES: dict[str, tuple[tuple[str, ...], Mapping[str, float]]] = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _LONG), {}),
    "yarn": (
        ("factor", _LONG),
        {"beta_fast": 32, "beta_slow": 1, "attention_factor": 0, "mscale": 0, "mscale_all_dim": 0, "truncate": True},
    ),
}


class Rotary(NamedTuple):
    """Angles of rotary positions: from a token to the next pair i of R turns by change_i theta^(-i/R) radians.

    Attributes:
        theta: base of the angles.
        pairs: number of pairs that turn, R; they are dims i and i + R of a head. Dims from 2 R on stay.
        change: what a scaling makes of the frequencies, a number or float32 [R].
        factor: factor of the turned dims.
    """

    theta: Any
    pairs: int
    change: Any = 1.0
    factor: float = 1.0


def check(config: ModelConfig, share: float = 1.0) -> None:
    """Require that positions can turn pairs of a head's dims, as model.rope_scaling says.

    Args:
        config: the model's shape.
        share: share of a head's dims that turn.

    Raises:
        UserError: they cannot.
    """
    turned = int(config.head_dim * share)
    require(
        turned > 0 and turned % 2 == 0,
        f"positions turn pairs of a head's dims, and {turned} of the {config.head_dim} of a head turn; "
        f"model.head_size={math.ceil(config.head_dim / 8) * 8} would fit",
    )
    kind = config.rope_scaling.get("rope_type", "default")
    require(
        kind in TYPES,
        f"model.rope_scaling.rope_type={kind!r} is not implemented for training; one of {', '.join(TYPES)} would fit",
    )
    needed, others = TYPES[kind]
    scaling, has = config.rope_scaling, ", ".join((*needed, *others)) or "none"
    for name in needed:
        require(name in scaling, f"model.rope_scaling of the type {kind} needs {', '.join(needed)}, and lacks {name}")
    for name, value in scaling.items():
        require(
            name in (*needed, *others, "rope_type"),
            f"model.rope_scaling.{name} is no value of the type {kind}, which has {has}",
        )
        require(
            name == "rope_type" or (isinstance(value, int | float) and 0 <= value < math.inf),
            f"model.rope_scaling.{name} must be a finite number from 0 on, got {value!r}",
        )
        require(name not in needed or value > 0, f"model.rope_scaling.{name} must be positive, got {value}")
    low, high = (scaling.get(f"{which}_freq_factor", 0) for which in ("low", "high"))
    require(
        kind != "llama3" or low < high,
        f"model.rope_scaling.low_freq_factor={low} must be below high_freq_factor={high}",
    )


def turns(config: ModelConfig, theta: float = 0.0, share: float = 1.0, scaling: OptionValues | None = None) -> Rotary:
    """Return the angles of a model's positions.

    Args:
        config: the model's shape.
        theta: base of the angles; 0: model.rope_theta.
        share: share of a head's dims that turn, the first ones.
        scaling: in place of model.rope_scaling.
    """
    made = Rotary(theta or config.rope_theta, int(config.head_dim * share) // 2)
    scaling = config.rope_scaling if scaling is None else scaling
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return made._replace(change=1 / scaling["factor"])
    plain = made.theta ** (-np.arange(made.pairs) / made.pairs)
    if kind == "llama3":
        return made._replace(change=_llama3(plain, scaling).astype(np.float32))
    if kind == "yarn":
        change, factor = _yarn(plain, made.theta, {**TYPES["yarn"][1], **scaling})
        return made._replace(change=change.astype(np.float32), factor=factor)
    return made


def _llama3(plain: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Return the change that makes waves longer by the factor if they are long beside the original sequence."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling[_LONG] * plain / (2 * math.pi)  # in the original sequence
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return kept + (1 - kept) / scaling["factor"]


def _yarn(plain: np.ndarray, theta: float, scaling: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Return the change that divides slow frequencies by the factor, and the factor of queries and of keys."""
    factor, dims = scaling["factor"], 2 * len(plain)

    def place(turns: float) -> float:
        """Return the pair, as a fraction, that makes some turns in the original sequence."""
        return dims * math.log(scaling[_LONG] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling["beta_fast"]), place(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    slow = np.clip((np.arange(len(plain)) - first) / (last - first or 0.001), 0, 1)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    weights = scaling["mscale"], scaling["mscale_all_dim"]
    usual = scale(weights[0]) / scale(weights[1]) if all(weights) else scale(1)
    return 1 - slow + slow / factor, scaling["attention_factor"] or usual


def from_huggingface(values: Mapping[str, Any], theta: float = 10_000.0) -> tuple[float, OptionValues, float]:
    """Return model.rope_theta, model.rope_scaling and the share of dims that turn, as a config.json says them.

    Args:
        values: content of the config.json, of any age: rope_parameters, or rope_scaling and rope_theta.
        theta: base of the angles where it names none.
    """
    found = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    base = found.pop("rope_theta", values.get("rope_theta", theta))
    share = found.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return base, NO_OPTIONS, share
    needed, others = TYPES.get(kind, ((), {}))  # an unknown one is refused by its name
    if _LONG in needed and not found.get(_LONG):
        found[_LONG] = values.get(_LONG) or values["max_position_embeddings"]
    kept = {name: value for name, value in found.items() if value is not None and name in (*needed, *others)}
    return base, OptionValues({"rope_type": kind, **kept}), share


def to_huggingface(config: ModelConfig, **others: object) -> dict[str, object]:
    """Return what a config.json says of positions, for readers of any age.

    Args:
        config: the model's shape.
        others: further entries, such as partial_rotary_factor.
    """
    scaling = {"rope_type": "default", **config.rope_scaling, **others}
    old = {"rope_scaling": dict(config.rope_scaling)} if config.rope_scaling else {}
    return {
        "rope_theta": config.rope_theta,
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        **old,
        **others,
    }
