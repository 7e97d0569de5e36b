"""The file of a loss probe, probe.json: what each codec costs in loss on one model, over seeds.

The planner reads it (`planner.plan --probe`), so this module imports no jax.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from paxtrain import files
from paxtrain.config.checks import MOST, shown
from paxtrain.config.compress import LOW_RANK
from paxtrain.config.load import read_section
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
_HUGE = 1e100  # losses are below it, whose square is a float, too
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

    def __post_init__(self) -> None:
        where = f"the codec {self.codec!r} of {self.place}"
        if self.place not in PROBED:
            raise UserError(f"{where} must be at one of {', '.join(PROBED)}")
        if not self.codec or (self.rank > 0) != (self.codec == LOW_RANK) or not 0 <= self.rank <= MOST:
            raise UserError(
                f"{where} must have a name, and a rank if and only if it is {LOW_RANK}, from 1 to {MOST:,}, "
                f"got {shown(self.rank)}"
            )
        if self.rank and self.place not in PLACES:
            raise UserError(f"{where} must not be {LOW_RANK}, which that place does not take")
        options = {key: tuple(x) if isinstance(x, list) else x for key, x in self.options.items()}
        for key, value in options.items():
            if not all(isinstance(one, int | float | str) for one in (value if isinstance(value, tuple) else (value,))):
                raise UserError(f"{where}: options.{key} must be a number, a text or a list of these, got {value!r}")
        object.__setattr__(self, "options", OptionValues(options))

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

    model: dict[str, Any]
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
        for key in ("micro_batch", "steps", "tokens"):
            if not 1 <= getattr(self, key) <= MOST:
                raise UserError(f"{key} must be from 1 to {MOST:,}, got {shown(getattr(self, key))}")
        if not 1 <= min(self.mesh) <= max(self.mesh) <= MOST:
            raise UserError(f"mesh must be data ranks and stages, 1 to {MOST:,} each, got {shown(self.mesh)}")
        if not 0 <= min(self.seeds) <= max(self.seeds) <= MOST:
            raise UserError(f"seeds must be from 0 to {MOST:,}, got {shown(self.seeds)}")
        runs = [("dense", self.dense), *((f"{one.place} {one.label}", one.losses) for one in self.codecs)]
        for name, losses in runs:
            if len(losses) != len(self.seeds):
                raise UserError(f"{name} must have a loss for each of {len(self.seeds)} seeds, got {len(losses)}")
            if not all(abs(loss) < _HUGE for loss in losses) or (name == "dense" and min(losses) <= 0):
                raise UserError(f"the losses of {name} must be {'positive ' * (name == 'dense')}numbers, got {losses}")
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
    return files.read_json(path, "probe", f"name a {FILE} of paxtrain.study --probe", from_json)


def from_json(values: object) -> LossProbe:
    """Return the probe that JSON values describe.

    Raises:
        UserError: the values are no JSON object, keys are unknown or missing, or values do not fit.
    """
    if isinstance(values, dict) and type(values.get("version")) is int and values["version"] == VERSION:
        return read_section(LossProbe, {key: value for key, value in values.items() if key != "version"}, "")
    raise UserError(f"it must be an object with version {VERSION}, got {shown(values)[:100]}")
