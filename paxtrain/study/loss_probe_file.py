"""The file of a loss probe, probe.json: what each codec costs in loss on one model, over seeds.

The planner reads it (`planner.plan --probe`), so this module imports no jax.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from paxtrain import files
from paxtrain.config.checks import MOST, shown
from paxtrain.config.compress import LOW_RANK
from paxtrain.config.options import NO_OPTIONS, PLACES, PROBED, OptionValues
from paxtrain.errors import UserError

VERSION = 1
FILE = "probe.json"
# What goes through the codec of a place, in words.
WORDS = {
    "backward": "gradients between stages",
    "forward": "activations between stages",
    "data": "gradients over data",
    "embedding": "the embedding's gradients",
}
_LEAST_SEEDS = 2  # with one the noise is unknown
_MOST = 12  # codecs of a place: a planner looks at all combinations


@dataclasses.dataclass(frozen=True)
class ProbedCodec:
    """A codec of one place, and what it cost in loss.

    Attributes:
        place: place in the configuration, one of config.options.PROBED.
        codec: name of the codec as the configuration has it; "lowrank" takes `rank`.
        losses: shares by which the validation loss was above that of dense training with the same seed.
        rank: rank of low rank; 0 for other codecs.
        options: options of another codec.
    """

    place: str
    codec: str
    losses: tuple[float, ...]
    rank: int = 0
    options: OptionValues = NO_OPTIONS

    @property
    def label(self) -> str:
        """Name in tables: "int8", "rank 16", "topk share=0.1"."""
        if self.rank:
            return f"rank {self.rank}"
        return " ".join([self.codec, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def mean(self) -> float:
        """Mean of the losses over the seeds."""
        return statistics.fmean(self.losses)

    @property
    def noise(self) -> float:
        """Standard error of the mean."""
        return statistics.stdev(self.losses) / math.sqrt(len(self.losses))


def excess(codecs: Iterable[ProbedCodec]) -> tuple[float, float]:
    """Return the excess loss of training with several codecs at once, and its standard error, as shares of dense's.

    Losses of places add up, as small independent changes do. A codec that came out below dense counts as no loss, so
    that chance at one place buys nothing at another. The errors are independent, so their squares add up.

    Args:
        codecs: at most one codec of each place.
    """
    some = list(codecs)
    return sum(max(one.mean, 0.0) for one in some), math.sqrt(sum(one.noise**2 for one in some))


@dataclasses.dataclass(frozen=True)
class LossProbe:
    """The losses of codecs on one model, from short training.

    Attributes:
        model: the configuration's section model, as JSON values.
        mesh: data ranks and stages.
        micro_batch: sequences of a micro-batch.
        steps: optimizer steps of each run.
        tokens: tokens of a step.
        seeds: seed of each run of a codec.
        dense: validation loss of dense training with each seed.
        codecs: the codecs.
    """

    model: Mapping[str, Any]
    mesh: tuple[int, int]
    micro_batch: int
    steps: int
    tokens: int
    seeds: tuple[int, ...]
    dense: tuple[float, ...]
    codecs: tuple[ProbedCodec, ...]

    def __post_init__(self) -> None:
        if len(self.seeds) < _LEAST_SEEDS:
            raise UserError(
                f"seeds must be {_LEAST_SEEDS} or more, since one says nothing of the noise, got {len(self.seeds)}"
            )
        runs = [("dense", self.dense), *((f"{one.place} {one.label}", one.losses) for one in self.codecs)]
        for name, losses in runs:
            if len(losses) != len(self.seeds):
                raise UserError(f"{name} must have a loss for each of {len(self.seeds)} seeds, got {len(losses)}")
        for place in PROBED:
            if len(self.at(place)) > _MOST:
                raise UserError(f"codecs must have at most {_MOST} of {place}, got {len(self.at(place))}")
        known = [(one.place, one.label) for one in self.codecs]
        if twice := [pair for pair in known if known.count(pair) > 1]:
            raise UserError(f"{' '.join(twice[0])} must be there once, got it {known.count(twice[0])} times")

    def at(self, place: str) -> tuple[ProbedCodec, ...]:
        """Return the codecs of a place."""
        return tuple(one for one in self.codecs if one.place == place)


def save(probe: LossProbe, path: str | pathlib.Path) -> None:
    """Write a probe as JSON."""
    files.write(path, json.dumps({"version": VERSION, **dataclasses.asdict(probe)}, indent=2) + "\n")


def load(path: str | pathlib.Path) -> LossProbe:
    """Read a probe.

    Raises:
        UserError: the file cannot be read or is no JSON object, or it has wrong keys or values.
    """
    return files.read_json(path, "probe", f"name a {FILE} of python -m paxtrain.study --probe", from_json)


_NUMBER, _HUGE = (int, float), 1e100  # whose square is a float, too
_KEYS: Mapping[str, tuple[type, ...]] = {
    "model": (dict,),
    "mesh": (list,),
    "micro_batch": (int,),
    "steps": (int,),
    "tokens": (int,),
    "seeds": (list,),
    "dense": (list,),
    "codecs": (list,),
}
_CODEC_KEYS: Mapping[str, tuple[type, ...]] = {
    "place": (str,),
    "codec": (str,),
    "losses": (list,),
    "rank": (int,),
    "options": (dict,),
}


def from_json(values: object) -> LossProbe:
    """Return the probe that JSON values describe.

    Raises:
        UserError: the values are no JSON object, keys are unknown or missing, or values do not fit.
    """
    if isinstance(values, dict) and values.get("version") != VERSION:
        raise UserError(f"version must be {VERSION}, got {values.get('version')!r}")
    found = _checked("a probe", values, {"version": (int,), **_KEYS})
    for key in ("micro_batch", "steps", "tokens"):
        if not 1 <= found[key] <= MOST:
            raise UserError(f"{key} must be from 1 to {MOST:,}, got {shown(found[key])}")
    mesh, seeds = _numbers("mesh", found["mesh"], whole=True), _numbers("seeds", found["seeds"], whole=True)
    if len(mesh) != 2 or min(mesh) < 1:
        raise UserError(f"mesh must be data ranks and stages, got {found['mesh']}")
    dense = _numbers("dense", found["dense"])
    if not all(loss > 0 for loss in dense):
        raise UserError(f"dense must be losses above 0, got {found['dense']}")
    return LossProbe(
        model=found["model"],
        mesh=(int(mesh[0]), int(mesh[1])),
        micro_batch=found["micro_batch"],
        steps=found["steps"],
        tokens=found["tokens"],
        seeds=tuple(map(int, seeds)),
        dense=dense,
        codecs=tuple(_codec(f"codecs[{n}]", one) for n, one in enumerate(found["codecs"])),
    )


def _codec(name: str, values: object) -> ProbedCodec:
    """Return a codec of the file."""
    found = _checked(name, values, _CODEC_KEYS)
    if found["place"] not in PROBED:
        raise UserError(f"{name}.place must be one of {', '.join(PROBED)}, got {found['place']!r}")
    if not found["codec"]:
        raise UserError(f"{name}.codec must be the name of a codec, got ''")
    if (found["rank"] > 0) != (found["codec"] == LOW_RANK) or found["rank"] < 0:
        raise UserError(f"{name}.rank must be positive for {LOW_RANK} and 0 for others, got {found['rank']}")
    if found["rank"] and found["place"] not in PLACES:
        raise UserError(f"{name}.codec must not be {LOW_RANK} at the place {found['place']}, which does not take it")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in found["options"].items()}
    for key, value in options.items():
        if not all(isinstance(one, int | float | str) for one in (value if isinstance(value, tuple) else (value,))):
            raise UserError(f"{name}.options.{key} must be a number, a text or a list of these, got {value!r}")
    losses = _numbers(f"{name}.losses", found["losses"])
    return ProbedCodec(found["place"], found["codec"], losses, found["rank"], OptionValues(options))


def _checked(name: str, values: object, keys: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Return an object of the file that has exactly some keys, with values of their types."""
    if not isinstance(values, dict):
        raise UserError(f"{name} must be a JSON object, got {type(values).__name__}")
    if unknown := [key for key in values if key not in keys]:
        raise UserError(f"{name} has the unknown key {unknown[0]}; known are {', '.join(keys)}")
    for key, types in keys.items():
        if key not in values:
            raise UserError(f"{name} lacks the key {key}")
        if type(values[key]) not in types:
            raise UserError(f"{key} of {name} must be of type {types[0].__name__}, got {values[key]!r}")
    return values


def _numbers(name: str, values: list[object], whole: bool = False) -> tuple[float, ...]:
    """Return finite numbers of the file."""
    kinds = (int,) if whole else _NUMBER
    for value in values:
        if type(value) not in kinds or not abs(value) < _HUGE:  # type: ignore[arg-type]  # its type is one of these
            raise UserError(f"{name} must be {'whole ' * whole}numbers below {_HUGE:g}, got {value!r}")
    return tuple(values)  # type: ignore[arg-type]
