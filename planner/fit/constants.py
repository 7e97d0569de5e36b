"""The constants of a cluster that are fitted to measured runs, with their units and physical ranges."""

import dataclasses

from paxtrain.devices.datasheets import datasheet
from planner.runs.trials import Trial


@dataclasses.dataclass(frozen=True)
class Constant:
    """A property of a cluster that is fitted.

    Attributes:
        name: the name in constants.json.
        unit: unit of its values.
        low: least physical value.
        high: largest physical value.
        typical: value that is assumed without measurements.
        spread: standard deviation of its logarithm among clusters.
        meaning: what the constant describes.
        wide: factor by which low and high are widened if a device kind or a link rate is unknown.
        owner: whose constant it is: each cluster has a value, or each trainer.
    """

    name: str
    unit: str
    low: float
    high: float
    typical: float
    spread: float
    meaning: str
    wide: float = 1.0
    owner: str = "cluster"


CONSTANTS = (
    Constant("matmul", "of the reach", 0.05, 1.5, 0.8, 0.4, "matrix products, over what the device reaches", wide=300),
    Constant("memory", "of the peak", 0.05, 1.0, 0.6, 0.4, "traffic to device memory", wide=100),
    Constant("layer_launch", "s", 1e-6, 2e-2, 3e-4, 1.0, "host time to launch a layer's forward", owner="trainer"),
    Constant("scores", "of the model", 0.01, 7.0, 1.3, 0.7, "passes over attention scores; few if fused"),
    Constant("attention", "of the model", 0.3, 5.0, 1.0, 0.4, "attention that keeps no scores", owner="trainer"),
    Constant("backward", "of F", 1.2, 3.5, 2.0, 0.15, "backward over forward, without recomputation", owner="trainer"),
    Constant("head", "of the model", 0.2, 5.0, 1.0, 0.4, "output layer and loss", owner="trainer"),
    Constant(
        "chunk_seconds", "s", 1e-6, 0.1, 5e-4, 1.2, "constant part of F and of B of a chunk of layers", owner="trainer"
    ),
    Constant("intra_latency", "s", 1e-7, 5e-3, 2e-5, 1.0, "a message inside a host"),
    Constant("intra_efficiency", "of the rate", 0.02, 1.0, 0.6, 0.4, "rate inside a host", wide=100),
    Constant("inter_latency", "s", 1e-6, 2e-2, 5e-5, 1.0, "a message between hosts"),
    Constant("inter_efficiency", "of the rate", 0.02, 1.0, 0.6, 0.4, "rate between hosts", wide=100),
    Constant("spread", "of log", 1e-3, 1.0, 0.02, 1.5, "loss of the rate between hosts with their number, an exponent"),
    Constant(
        "message_seconds",
        "s",
        1e-6,
        0.5,
        2e-4,
        1.5,
        "message between stages on different hosts, besides its bytes",
        owner="trainer",
    ),
    Constant(
        "crossing_launch",
        "s",
        1e-7,
        2e-2,
        1e-5,
        1.5,
        "more of layer_launch for each tensor rank if messages cross hosts",
        owner="trainer",
    ),
    Constant(
        "buckets",
        "of a layer",
        1e-3,
        10.0,
        0.05,
        1.5,
        "collectives over data for each layer, beside one",
        owner="trainer",
    ),
    Constant(
        "hop_ratio", "of the model", 0.2, 10.0, 1.0, 0.4, "bytes and overhead of pipeline messages", owner="trainer"
    ),
    Constant("data_ratio", "of the model", 0.1, 8.0, 1.0, 0.4, "bytes and overhead of gradient rings", owner="trainer"),
    Constant(
        "tied_ratio",
        "of the model",
        0.01,
        5.0,
        1.0,
        0.7,
        "exchange of the embedding's gradients; little if untied",
        owner="trainer",
    ),
    Constant(
        "optimizer_bytes", "bytes", 2.0, 500.0, 40.0, 0.6, "traffic of the optimizer per parameter", owner="trainer"
    ),
    Constant("stall_seconds", "s", 1e-3, 10.0, 0.3, 0.7, "what each message takes longer in a run that stalls"),
    Constant("host_seconds", "s", 1e-6, 2.0, 5e-3, 1.2, "constant part of an iteration", owner="trainer"),
)
NVLINK_LATENCY = 1e-5  # seconds that a step of NCCL's rings over NVLink takes at most; a few microseconds as a rule
_NVLINK = 1e11  # bytes/s between two devices of a host that no PCIe has
NAMES = tuple(constant.name for constant in CONSTANTS)


def known(trial: Trial) -> dict[str, bool]:
    """Return, for each constant with a `wide` range, whether the rate that it refers to is known for this run."""
    kinds = all(datasheet(kind) is not None for kind in trial.device_kinds)
    intra = trial.intra_bytes is not None or kinds
    inter = trial.host_bytes is not None
    return {
        "matmul": kinds,
        "memory": kinds,
        "intra_efficiency": intra,
        "inter_efficiency": inter,
    }


def over_nvlink(trial: Trial) -> bool:
    """Return whether devices of all hosts of a run exchange over NVLink."""
    sheets = [datasheet(kind) for kind in trial.device_kinds]
    return min(trial.intra_bytes or [sheet.intra if sheet else 0.0 for sheet in sheets]) >= _NVLINK
