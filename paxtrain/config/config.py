"""The configuration: small frozen dataclasses that validate themselves.

Config files (configs/*.py) hold an ml_collections ConfigDict, which absl flags override; `from_dict` turns it
into these dataclasses at the edge; nothing below the mains sees a ConfigDict.
"""

import dataclasses
import math
import typing
from typing import Any

from paxtrain.config.checks import choice, divisors_near, positive, require, steps
from paxtrain.config.compress import SECONDS, CompressConfig
from paxtrain.config.data import DataConfig
from paxtrain.config.model import ModelConfig
from paxtrain.schedule.spec import SPECS, ScheduleSpec

SAVE_MODES = ("dots", "layer_inputs", "residuals", "inputs")
SPLIT_SAVES = ("dots", "residuals")  # save modes of schedules that split the backward


def scans(scan_layers: str, common: Any) -> Any:
    """Return whether layers run in a loop, as PipelineConfig.scan_layers says: one bool, or an array of them.

    Args:
        scan_layers: "auto", "on" or "off".
        common: layers of the smallest virtual stage, a number or an array of candidates'. One alone needs no loop.
    """
    return ((scan_layers == "on") | ((scan_layers == "auto") & (common > 8))) & (common > 1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices.

    Attributes:
        zero1: shard gradients, master weights and optimizer state over data (reduce-scatter and all-gather);
            False replicates them (all-reduce).
        sequence_parallel: split the sequence over a tensor group between the split matrices, so that each device
            keeps and sends a part of the activations.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    zero1: bool = True
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        positive("mesh", self, "data", "pipe", "tensor")
        require(
            not self.sequence_parallel or self.tensor > 1,
            f"mesh.sequence_parallel splits the sequence over tensor, but mesh.tensor={self.tensor}; "
            "choose mesh.tensor of 2 or more, or mesh.sequence_parallel=False",
        )

    @property
    def devices(self) -> int:
        return self.data * self.pipe * self.tensor


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """The flow of micro-batches through the stages.

    Attributes:
        schedule: a name in paxtrain.schedule.spec.SPECS; one that splits the backward needs a save of SPLIT_SAVES.
        virtual_stages: chunks of layers per stage; more than one only with interleaved_1f1b.
        pipe_layers: layers of each virtual stage, "3,4,4,1"; empty: as equal as possible, the last ones shorter.
        save: values a forward keeps for its backward: "dots" (matrix products and attention; the rest is recomputed),
            "layer_inputs", "residuals" (everything, nothing recomputed) or "inputs" (the stage's input only).
        scan_layers: one compiled layer in a loop instead of unrolled ones; "auto": from 9 layers per stage on.
    """

    schedule: str = "eager_1f1b"
    virtual_stages: int = 1
    pipe_layers: str = ""
    save: str = "dots"
    scan_layers: str = "auto"

    def __post_init__(self) -> None:
        choice("pipeline.schedule", self.schedule, tuple(SPECS))
        choice("pipeline.save", self.save, SAVE_MODES)
        choice("pipeline.scan_layers", self.scan_layers, ("auto", "on", "off"))
        positive("pipeline", self, "virtual_stages")
        require(
            self.spec.interleaves or self.virtual_stages == 1,
            f"pipeline.virtual_stages={self.virtual_stages} needs pipeline.schedule="
            f"{' or '.join(name for name, spec in SPECS.items() if spec.interleaves)}, got {self.schedule}",
        )
        require(
            not self.spec.interleaves or self.virtual_stages > 1,
            f"pipeline.schedule={self.schedule} needs pipeline.virtual_stages of 2 or more, got 1",
        )
        require(
            not self.spec.splits or self.save in SPLIT_SAVES,
            f"pipeline.save={self.save} saves no memory with pipeline.schedule={self.schedule}, which keeps a layer's "
            f"residuals until its weight gradients; pipeline.save={' or '.join(SPLIT_SAVES)} would work",
        )
        if self.pipe_layers:
            parts = self.pipe_layers.split(",")
            require(
                all(part.strip().isdecimal() and int(part) > 0 for part in parts),
                f"pipeline.pipe_layers must be positive integers joined by commas, got {self.pipe_layers!r}",
            )

    @property
    def spec(self) -> ScheduleSpec:
        """Facts about the schedule."""
        return SPECS[self.schedule]

    def scans(self, common: Any) -> Any:
        """Return whether layers run in a loop: one bool, or an array of them.

        Args:
            common: layers of the smallest virtual stage, a number or an array of candidates'.
        """
        return scans(self.scan_layers, common)

    def layers_per_virtual_stage(self, layers: int, pipe: int) -> tuple[int, ...]:
        """Return the layers of each of the pipe * virtual_stages virtual stages, in the order of the forward pass.

        Raises:
            UserError: the list has another length or sum, or there are fewer layers than virtual stages.
        """
        stages = pipe * self.virtual_stages
        if self.pipe_layers:
            counts = tuple(int(part) for part in self.pipe_layers.split(","))
            require(
                len(counts) == stages,
                f"pipeline.pipe_layers={self.pipe_layers} names {len(counts)} stages, "
                f"but pipe={pipe} with {self.virtual_stages} virtual stages each needs {stages}",
            )
            require(
                sum(counts) == layers,
                f"pipeline.pipe_layers={self.pipe_layers} adds up to {sum(counts)}, but the model has {layers} layers",
            )
            return counts
        require(
            layers >= stages,
            f"model.layers={layers} cannot fill {stages} virtual stages (mesh.pipe={pipe} x "
            f"pipeline.virtual_stages={self.virtual_stages}); at most {layers} would fit",
        )
        return tuple(layers // stages + (i < layers % stages) for i in range(stages))


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Sequences per optimizer step over the whole mesh, and per micro-batch of one data rank."""

    global_batch: int = 16
    micro_batch: int = 2

    def __post_init__(self) -> None:
        positive("batch", self, "global_batch", "micro_batch")

    def micro_batches(self, data: int) -> int:
        """Return the micro-batches per data rank and step.

        Raises:
            UserError: global_batch is not divisible by data * micro_batch.
        """
        per_round = data * self.micro_batch
        below = self.global_batch // per_round * per_round
        fits = f"{below} or {below + per_round}" if below else str(per_round)
        require(
            self.global_batch % per_round == 0,
            f"batch.global_batch={self.global_batch} is not divisible by mesh.data={data} x "
            f"batch.micro_batch={self.micro_batch}; {fits} would fit",
        )
        return self.global_batch // per_round


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule; steps are optimizer steps.

    Attributes:
        name: "adamw", or "muon": Muon on the layers' matrices (paxtrain/parallel/muon.py) and AdamW on all else.
        schedule: "cosine" (to learning_rate * final_fraction at the last step), "wsd" (warm-up, stable, linear decay
            over the last decay_steps) or "constant".
        clip_norm: largest global gradient norm; 0: no clipping.
        muon_momentum: decay of Muon's momentum (Nesterov's).
        muon_steps: iterations of Newton-Schulz.
        muon_rms: approximate RMS of the entries of an update [n, k], which is scaled by muon_rms x sqrt(max(n, k)).
            At 0.2 updates are as large as AdamW's, and its learning rate and decay serve both (Liu et al. 2025). 0:
            Jordan's sqrt(max(1, k / n)) instead, which needs another learning rate.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 20
    decay_steps: int = 0
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    muon_momentum: float = 0.95
    muon_steps: int = 5
    muon_rms: float = 0.2

    def __post_init__(self) -> None:
        choice("optimizer.name", self.name, ("adamw", "muon"))
        choice("optimizer.schedule", self.schedule, ("cosine", "wsd", "constant"))
        positive("optimizer", self, "learning_rate", "epsilon", "muon_steps")
        for name in ("warmup_steps", "decay_steps", "weight_decay", "clip_norm", "muon_rms"):
            value = getattr(self, name)
            require(value >= 0, f"optimizer.{name} must not be negative, got {value}")
        for name in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name} must be in [0, 1), got {value}")
        require(0 <= self.final_fraction <= 1, f"optimizer.final_fraction must be in [0, 1], got {self.final_fraction}")
        for name in ("learning_rate", "epsilon", "weight_decay", "clip_norm", "muon_rms"):
            value = getattr(self, name)
            require(math.isfinite(value), f"optimizer.{name} must be finite, got {value}")
        require(
            self.schedule != "wsd" or self.decay_steps > 0,
            "optimizer.schedule=wsd needs optimizer.decay_steps above 0, or choose constant",
        )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The interval of checkpoints, and the choice of those that are kept.

    Attributes:
        every: steps between checkpoints; 0: only at the end and on SIGTERM.
        keep: newest checkpoints kept.
        keep_every: interval of checkpoints that are never deleted, in steps; 0: none.
        resume: continue from the newest good checkpoint of the output directory if there is one.
        reset_codec: start compression afresh if the checkpoint's compression state does not fit this run's.
    """

    every: int = 100
    keep: int = 2
    keep_every: int = 0
    resume: bool = True
    reset_codec: bool = False

    def __post_init__(self) -> None:
        positive("checkpoint", self, "keep")
        for name in ("every", "keep_every"):
            value = getattr(self, name)
            require(value >= 0, f"checkpoint.{name} must not be negative, got {value}")
        require(
            not self.keep_every or (self.every and self.keep_every % self.every == 0),
            f"checkpoint.keep_every={self.keep_every} must be a multiple of checkpoint.every={self.every}",
        )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Length of the run, its output folder, and how often it reports.

    Attributes:
        steps: optimizer steps in total, including those before a resume.
        out: folder for checkpoints, metrics and figures.
        eval_every: steps between validations; 0: only before the first step and after the last.
        eval_batches: global batches per validation, the same ones each time.
        sample_tokens: tokens of the sample that is shown at the end; 0: none.
        peak_flops: peak FLOP/s of one device for MFU; 0: looked up by device kind, none for a CPU.
    """

    steps: int = 200
    seed: int = 0
    out: str = "runs/tiny"
    eval_every: int = 100
    eval_batches: int = 8
    log_every: int = 1
    sample_tokens: int = 200
    peak_flops: float = 0.0

    def __post_init__(self) -> None:
        positive("run", self, "steps", "eval_batches", "log_every")
        for name in ("eval_every", "sample_tokens", "peak_flops", "seed"):
            value = getattr(self, name)
            require(value >= 0, f"run.{name} must not be negative, got {value}")
        require(self.seed < 2**63, f"run.seed must be below 2**63, got {self.seed}")
        require(bool(self.out), "run.out must name a directory, got an empty string")


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of one training run; its own checks are those that involve several sections.

    Attributes:
        profile: "10:13" traces the steps 10, 11 and 12 into the run's folder (paxtrain/profiling/profiler.py); "":
        none.
    """

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    batch: BatchConfig = BatchConfig()
    compress: CompressConfig = CompressConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    profile: str = ""

    def __post_init__(self) -> None:
        model, mesh = self.model, self.mesh
        for name, size in model.split_sizes.items():
            require(
                size % mesh.tensor == 0,
                f"model.{name}={size} is not divisible by mesh.tensor={mesh.tensor}; "
                f"tensor={divisors_near(size, mesh.tensor)} would fit",
            )
        below = model.sequence // mesh.tensor * mesh.tensor
        lengths = " or ".join(str(length) for length in (below, below + mesh.tensor) if length)
        require(
            not mesh.sequence_parallel or model.sequence == below,
            f"mesh.sequence_parallel splits model.sequence={model.sequence}, which is not divisible by "
            f"mesh.tensor={mesh.tensor}; model.sequence={lengths} would fit",
        )
        self.batch.micro_batches(mesh.data)
        self.pipeline.layers_per_virtual_stage(model.layers, mesh.pipe)
        require(
            mesh.pipe > 1 or self.pipeline.virtual_stages == 1,
            f"pipeline.schedule=interleaved_1f1b needs mesh.pipe of 2 or more, got {mesh.pipe}",
        )
        opt = self.optimizer
        require(
            opt.warmup_steps + (opt.decay_steps if opt.schedule == "wsd" else 0) <= self.run.steps,
            f"optimizer.warmup_steps={opt.warmup_steps} and decay_steps={opt.decay_steps} "
            f"do not fit into run.steps={self.run.steps}",
        )
        steps("profile", self.profile, self.run.steps)
        self._check_compression()

    def _check_compression(self) -> None:
        c, pipe = self.compress, self.mesh.pipe
        for direction in ("backward", "forward"):
            chosen = getattr(c, direction)
            require(
                chosen == "none" or pipe > 1,
                f"compress.{direction}={chosen} needs messages between stages, but mesh.pipe=1; "
                f"choose mesh.pipe of 2 or more, or compress.{direction}=none",
            )
        require(
            c.embedding != "fused" or pipe > 1,
            "compress.embedding=fused needs tied copies of the embedding on the first and the last stage, "
            "but mesh.pipe=1 holds it once; choose auto",
        )
        require(
            c.embedding == "auto" or self.model.tied_head,
            f"compress.embedding={c.embedding} is about the embedding's tied copies, but model.tied_head=False; choose "
            "auto",
        )
        ranks = c.link_ranks(self.links)
        require(
            pipe == 1 or len(ranks) == self.links,
            f"compress.backward_ranks={c.backward_ranks} names {len(ranks)} links, but there are {self.links} "
            f"between {pipe} stages",
        )
        outside = [s for s in c.data_stages(pipe) if s >= pipe]
        require(
            not outside,
            f"compress.data={c.data} names stage {max(outside, default=0)}, but mesh.pipe={pipe} has stages 0 to "
            f"{pipe - 1}",
        )
        for name, values in zip(SECONDS, c.seconds, strict=True):
            require(
                not values or len(values) == pipe,
                f"compress.{name} names {len(values)} stages, but mesh.pipe={pipe}",
            )

    @property
    def links(self) -> int:
        """Return the number of links between stages; virtual stages add one from the last stage to the first."""
        return self.mesh.pipe - (self.pipeline.virtual_stages == 1)

    @property
    def profiled(self) -> range:
        """Return the steps that `profile` names."""
        return steps("profile", self.profile, self.run.steps)

    @property
    def micro_batches(self) -> int:
        return self.batch.micro_batches(self.mesh.data)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        return self.pipeline.layers_per_virtual_stage(self.model.layers, self.mesh.pipe)


def read_section(cls: type, values: Any, path: str) -> Any:
    """Return a dataclass of this module, made from a mapping of its fields.

    Args:
        path: the section's name, for messages.

    Raises:
        UserError: the values are no mapping, a key is unknown, or a value has another type or is out of bounds.
    """
    require(hasattr(values, "items"), f"{path or 'the configuration'} must be a mapping, got {values!r}")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    kwargs = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        require(key in known, f"unknown configuration key {name}; known here: {', '.join(sorted(known))}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            kwargs[key] = read_section(hint, value, name)
            continue
        if hint is float and type(value) is int:
            value = float(value)
        require(type(value) is hint, f"{name} must be of type {hint.__name__}, got {value!r}")
        kwargs[key] = value
    return cls(**kwargs)


def from_dict(values: Any) -> Config:
    """Return the Config that a (possibly partial) mapping of sections describes.

    Args:
        values: a dict or ConfigDict; sections and keys left out keep their defaults.

    Raises:
        UserError: a key is unknown, a value has another type, or values do not fit each other.
    """
    return read_section(Config, values, "")


def to_dict(config: Config) -> dict[str, Any]:
    """Return the nested dict of plain values that `from_dict` reads."""
    return dataclasses.asdict(config)
