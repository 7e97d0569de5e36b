"""The flags that say what is searched, and what is made of them; planner.plan and planner.run share them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from paxtrain.config import (
    SAVE_MODES,
    SCHEDULES,
    SPLIT,
    SPLIT_SAVES,
    BatchConfig,
    CompressConfig,
    ModelConfig,
    PipelineConfig,
    read_section,
)
from paxtrain.errors import UserError
from planner.cluster import cluster as clusters
from planner.memory import closed_form
from planner.search import budget
from planner.search.search import Options, Search
from planner.search.space import BACKWARD, TRIED, Choices

_KINDS = ("epilogue", "all", "data")
_SEQUENCE = {"no": (False,), "yes": (True,), "both": (False, True)}
_SECTIONS = {"model": ModelConfig, "pipeline": PipelineConfig, "batch": BatchConfig, "compress": CompressConfig}
_NAMES = (
    "compress",
    "backward_ranks",
    "data_ranks",
    "gain",
    "tensor",
    "pipe",
    "micro_batch",
    "virtual_stages",
    "sequence_parallel",
    "schedules",
    "saves",
    "uneven",
    "tensor_hosts",
    "usable_memory",
    "memory",
    "quantile",
    "top",
    "placed",
    "seed",
)


def define_flags() -> None:
    """Defines the flags named in _NAMES."""
    flags.DEFINE_list(
        "compress", ["epilogue", "data"], f"What may be compressed: none, or some of {', '.join(_KINDS)}."
    )
    flags.DEFINE_list("backward_ranks", ["16"], "Ranks allowed for gradients between stages.")
    flags.DEFINE_list("data_ranks", ["128"], "Ranks allowed for gradients over data.")
    flags.DEFINE_float("gain", 0.01, "What each kind of compression must gain at least, of the step.", lower_bound=0)
    flags.DEFINE_list("tensor", [], "Sizes of the tensor axis to try; all that divide if empty.")
    flags.DEFINE_list("pipe", [], "Sizes of the pipe axis to try; likewise.")
    flags.DEFINE_list("micro_batch", [], "Micro-batches to try; likewise.")
    flags.DEFINE_list("virtual_stages", ["2", "4"], "Chunks per stage of interleaved schedules to try.")
    flags.DEFINE_enum("sequence_parallel", "no", list(_SEQUENCE), "Split the sequence wherever tensor is above 1.")
    flags.DEFINE_list("schedules", list(TRIED), f"Schedules to try, of {', '.join(SCHEDULES)}.")
    flags.DEFINE_list("saves", list(SAVE_MODES), "What a forward may keep for its backward.")
    flags.DEFINE_bool("uneven", True, "Also split layers unevenly over the stages.")
    flags.DEFINE_integer("tensor_hosts", 1, "Hosts in a row that each tensor group spans.", lower_bound=1)
    flags.DEFINE_float("usable_memory", closed_form.USABLE, "Share of a device's memory to use.", 0.05, 1.0)
    flags.DEFINE_enum("memory", "learned", ["learned", "analytic"], "The memory estimate to search by.")
    flags.DEFINE_float("quantile", 0.5, "Of the link samples, for which placements are optimized.", 0.0, 1.0)
    flags.DEFINE_integer("top", 10, "Plans to rank.", lower_bound=1)
    flags.DEFINE_integer("placed", 4, "Plans to place at most.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the annealing.", lower_bound=0)


def given() -> dict[str, Any]:
    """The values of these flags, as JSON values."""
    return {name: getattr(flags.FLAGS, name) for name in _NAMES}


def sections(values: Mapping[str, Any]) -> tuple[ModelConfig, PipelineConfig, BatchConfig, CompressConfig]:
    """What the planner takes of a configuration, nested.

    Raises:
        UserError: a section is missing or wrong, or asks for a compression or an optimizer that the planner does not
            know.
    """
    for name in _SECTIONS:
        if name not in values:
            raise UserError(f"the configuration has no section {name}; build it on configs/base.py")
    found = tuple(read_section(kind, values[name], name) for name, kind in _SECTIONS.items())
    compress = found[-1]
    for name, value, known in (
        ("forward", compress.forward, ("none",)),
        ("embedding", compress.embedding, ("auto", "fused")),
        ("factors", compress.factors, ("auto",)),
    ):
        if value not in known:
            raise UserError(
                f"compress.{name}={value} is not planned for; plan with {known[0]}, and change it afterwards"
            )
    if compress.embedding == "fused" and not found[0].tied_head:
        raise UserError(
            "compress.embedding=fused is about the embedding's tied copies, but model.tied_head=False; choose auto"
        )
    if (optimizer := values.get("optimizer", {}).get("name", "adamw")) != "adamw":
        raise UserError(
            f"optimizer.name={optimizer} is not planned for, whose memory and time are others than AdamW's; "
            "plan with adamw, and train with --plan=plan.json and the other"
        )
    return found


def choices(min_ratio: float) -> Choices:
    """What may be chosen.

    Args:
        min_ratio: as CompressConfig's.

    Raises:
        UserError: a flag names something that there is not.
    """
    f = flags.FLAGS
    kinds = [kind for kind in f.compress if kind != "none"]
    for kind in kinds:
        if kind not in _KINDS:
            raise UserError(f"--compress must be none or some of {', '.join(_KINDS)}, got {kind!r}")
    schedules, saves = _known("schedules", SCHEDULES), _known("saves", SAVE_MODES)
    if set(schedules) <= set(SPLIT) and not set(saves) & set(SPLIT_SAVES):
        known = " or ".join(SPLIT_SAVES)
        raise UserError(f"--schedules={','.join(schedules)} needs --saves={known}, got {','.join(saves)}")
    return Choices(
        tensor=integers("tensor"),
        pipe=integers("pipe"),
        micro_batch=integers("micro_batch"),
        virtual_stages=integers("virtual_stages"),
        sequence_parallel=_SEQUENCE[f.sequence_parallel],
        schedules=tuple(schedules),
        saves=tuple(saves),
        backward=tuple(kind for kind in kinds if kind in BACKWARD),
        backward_ranks=integers("backward_ranks"),
        data_ranks=integers("data_ranks") if "data" in kinds else (),
        min_ratio=min_ratio,
    )


def options() -> Options:
    """How to search.

    Raises:
        UserError: a flag is no number.
    """
    f = flags.FLAGS
    quantile, gain = (_finite(name) for name in ("quantile", "gain"))
    return Options(top=f.top, placed=f.placed, quantile=quantile, seed=f.seed, uneven=f.uneven, gain=gain)


def search(
    cluster: clusters.Cluster, model: ModelConfig, pipeline: PipelineConfig, compress: CompressConfig, global_batch: int
) -> Search:
    """The search that the flags ask for.

    Raises:
        UserError: a flag makes no sense, or nothing is left to choose from.
    """
    how = options()
    limits = budget.Budget(
        _finite("usable_memory"), compress.error, pipeline.scan_layers, learned=flags.FLAGS.memory == "learned"
    )
    return Search(cluster, model, global_batch, choices(compress.min_ratio), limits, how)


def integers(name: str) -> tuple[int, ...]:
    """A list flag of positive integers.

    Raises:
        UserError: it has something else.
    """
    values = getattr(flags.FLAGS, name)
    if not all(value.strip().isdecimal() and int(value) > 0 for value in values):
        raise UserError(f"--{name} must be positive integers joined by commas, got {','.join(values)}")
    return tuple(int(value) for value in values)


def _known(name: str, known: Sequence[str]) -> list[str]:
    values = getattr(flags.FLAGS, name)
    if not values:
        raise UserError(f"--{name} must be some of {', '.join(known)}, got none")
    for value in values:
        if value not in known:
            raise UserError(f"--{name} must be some of {', '.join(known)}, got {value!r}")
    return values


def _finite(name: str) -> float:
    value = getattr(flags.FLAGS, name)
    if not math.isfinite(value):
        raise UserError(f"--{name} must be a number, got {value}")
    return value


def tensor_hosts() -> int:
    """Hosts in a row that each tensor group spans."""
    return flags.FLAGS.tensor_hosts
