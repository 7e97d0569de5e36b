"""The memory oracle's answer without compiling: a small network learns what closed form and compiler differ by.

It predicts log(oracle / analytic) from features without units (tokens over hidden, layers, ring depth, vocabulary over
hidden, shares of the closed form's parts, save mode, schedule ...), so that it holds for models larger than any that it
was trained on: XLA schedules and packs by structure and proportions. An ensemble, each member trained without some of
the labels: what the members that did not see a label say of it is an honest error, and the largest such error of all n
labels is the safety margin of `bound`. For a configuration like the labels' the margin is exceeded with probability
1/(n+1) (split conformal prediction; Vovk et al. 2005).

Inference is numpy. planner/surrogate_train.py makes labels and weights.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from paxtrain.config import SCHEDULES
from planner.memory.closed_form import USABLE, Memory, Shape, analytic, kept, ring_depths

DATA = pathlib.Path(__file__).parent / "data"
WEIGHTS = DATA / "memory_surrogate.npz"
_SHARES = ("weights", "optimizer", "gradients", "activations", "compression")


class Prediction(NamedTuple):
    """Bytes per device, arrays over candidates.

    Attributes:
        expected: the best estimate of what XLA allocates.
        bound: what it exceeds with the probability that the surrogate's `source` names.
    """

    expected: np.ndarray
    bound: np.ndarray


def features(shape: Shape, memory: Memory) -> np.ndarray:
    """Return the network's inputs, float64 [candidates, features]; no feature has a unit.

    Args:
        memory: the candidates' `analytic`.
    """
    model, total = shape.model, memory.total
    depth, _, gradient = ring_depths(shape)
    layers, logits = shape.slots * shape.virtual_stages, shape.tokens * model.padded_vocab / shape.tensor
    layer = kept(shape)["residuals"]
    # There is no label of zb_h1, whose program is most like that of 1f1b.
    schedule = np.where(np.asarray(shape.schedule) == SCHEDULES.index("zb_h1"), SCHEDULES.index("1f1b"), shape.schedule)
    columns = [
        *(getattr(memory, name) / total for name in _SHARES),
        shape.compute * layers * model.matrices / shape.tensor / total,
        4 * logits / total,
        layer / total,
        layer * shape.slots / total,
        np.log2(shape.tensor),
        np.log2(shape.pipe),
        np.minimum(shape.pipe, 2),
        np.log2(shape.slots),
        np.log2(shape.virtual_stages),
        np.log2(1 + depth),
        np.log2(1 + gradient),
        shape.slots > shape.common,
        np.log2(shape.tokens / model.hidden),
        np.log2(model.padded_vocab / model.hidden),
        np.minimum(shape.micro_batches, 2),
        shape.scan,
        shape.zero1 * np.log2(shape.data),
        np.asarray(shape.data) > 1,
        model.attention == "cudnn",
        *(shape.save == code for code in range(4)),
        *(schedule == code for code in range(4)),
        np.asarray(shape.backward_rank) > 0,
        np.asarray(shape.data_rank) > 0,
    ]
    columns = [np.asarray(column, float) for column in columns]
    return np.stack(np.broadcast_arrays(*columns, np.asarray(total, float))[:-1], axis=-1).reshape(-1, len(columns))


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """A trained ensemble.

    Attributes:
        layers: of all members stacked, (kernel [members, in, out], bias [members, out]).
        mean, scale: of the features, [features].
        low, high: bounds of the answer, those of the labels: beyond them nothing is known.
        margin: added to log(bytes) for `bound`.
        source: what the labels are of, as JSON values.
    """

    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    mean: np.ndarray
    scale: np.ndarray
    low: float
    high: float
    margin: float
    source: dict[str, Any]

    def members(self, x: np.ndarray) -> np.ndarray:
        """log(oracle / analytic) by every member of features [n, features]: [members, n]."""
        # Features beyond the labels' range are taken at its edge: a network extrapolates in a straight line.
        y = np.clip((x - self.mean) / self.scale, -3, 3)[None]
        for kernel, bias in self.layers[:-1]:
            y = np.tanh(y @ kernel + bias[:, None])
        kernel, bias = self.layers[-1]
        return np.clip((y @ kernel + bias[:, None])[..., 0], self.low, self.high)

    def predict(self, shape: Shape, memory: Memory | None = None) -> Prediction:
        """Expected bytes and a bound of them, arrays [candidates].

        Args:
            memory: the candidates' `analytic`, where it is at hand.
        """
        memory = analytic(shape) if memory is None else memory
        correction = self.members(features(shape, memory)).mean(axis=0)
        expected = np.reshape(memory.total, -1) * np.exp(correction)
        return Prediction(expected, expected * np.exp(self.margin))

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the weights as .npz."""
        arrays = {f"{kind}{i}": x for i, pair in enumerate(self.layers) for kind, x in zip(("kernel", "bias"), pair)}
        rest = {name: getattr(self, name) for name in ("mean", "scale", "low", "high", "margin")}
        arrays = {name: np.asarray(x, np.float32) for name, x in (arrays | rest).items()}
        np.savez_compressed(path, source=json.dumps(self.source), **arrays)


@functools.cache
def load(path: str | pathlib.Path = WEIGHTS) -> Surrogate:
    """The surrogate of a file, by default the shipped one."""
    with np.load(path) as file:
        count = sum(name.startswith("kernel") for name in file.files)
        layers = tuple((file[f"kernel{i}"].astype(float), file[f"bias{i}"].astype(float)) for i in range(count))
        low, high, margin = (float(file[name]) for name in ("low", "high", "margin"))
        mean, scale = file["mean"].astype(float), file["scale"].astype(float)
        return Surrogate(layers, mean, scale, low, high, margin, json.loads(str(file["source"])))


def fits(bytes_: Any, device_memory: Any, usable: float = USABLE) -> Any:
    """Return whether the bytes fit into the part of a device's memory that a plan may use.

    Args:
        bytes_: a `bound`, or the oracle's total.
        device_memory: bytes, paxtrain.xla.aot.GPUS[kind].memory.
        usable: see memory.USABLE.
    """
    return np.asarray(bytes_) <= usable * np.asarray(device_memory)
