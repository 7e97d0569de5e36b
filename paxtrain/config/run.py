"""The sections about a run as a whole: its length, its folder, its reports and its checkpoints."""

import dataclasses

from paxtrain.config.checks import Checked, bounded, each, multiples_near, positive, require

LOGGERS = ("tensorboard", "wandb")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """The interval of checkpoints, and the choice of those that are kept.

    Attributes:
        every: steps between checkpoints; 0: only at the end and on SIGTERM.
        keep: newest checkpoints kept.
        keep_every: interval of checkpoints that are never deleted, in steps; 0: none.
        resume: whether to continue from the newest good checkpoint of the output directory if there is one.
        reset_codec: whether to start compression afresh if the checkpoint's compression state does not fit this run's.
    """

    every: int = 100
    keep: int = 2
    keep_every: int = 0
    resume: bool = True
    reset_codec: bool = False

    def check(self) -> None:
        bounded("checkpoint", self)
        positive("checkpoint", self, "keep")
        for name in ("every", "keep_every"):
            value = getattr(self, name)
            require(value >= 0, f"checkpoint.{name} must not be negative, got {value}")
        require(
            not self.keep_every or (self.every > 0 and self.keep_every % self.every == 0),
            f"checkpoint.keep_every={self.keep_every} must be a multiple of checkpoint.every={self.every}",
            each("checkpoint.keep_every", multiples_near(self.every, self.keep_every) if self.every else ()),
            {"checkpoint.every": self.keep_every},
            {"checkpoint.keep_every": 0},
        )


@dataclasses.dataclass(frozen=True)
class RunConfig(Checked):
    """Length of the run, its output folder, and how often it reports.

    Attributes:
        steps: optimizer steps in total, including those before a resume.
        seed: seed of the parameters, the order of the samples and dropout.
        resume_step: step of the checkpoint to go back to; 0: the newest. A start that finds a checkpoint which was made
            since goes on from that one.
        out: folder for checkpoints, metrics and figures.
        eval_every: steps between validations; 0: only before the first step and after the last.
        eval_batches: global batches per validation, the same ones each time.
        log_every: steps between records of metrics; a step whose gradients are not finite is always recorded.
        loggers: what gets the metrics besides metrics.jsonl, joined by commas: tensorboard, and wandb, which takes its
            project, name and mode from the environment (WANDB_PROJECT); "": nothing.
        log_samples: whether each step prints where its samples lie in the data: PLACE, which begins at token PLACE *
            sequence of the file, or SET:PLACE.
        stragglers: whether to look for the host, device or link that makes steps slower, when they become so.
        sample_tokens: tokens of the sample that is shown at the end; 0: none.
        peak_flops: peak FLOP/s of one device for MFU; 0: looked up by device kind, none for a CPU.
    """

    steps: int = 200
    seed: int = 0
    resume_step: int = 0
    out: str = "runs/tiny"
    eval_every: int = 100
    eval_batches: int = 8
    log_every: int = 1
    loggers: str = "tensorboard"
    log_samples: bool = False
    stragglers: bool = True
    sample_tokens: int = 200
    peak_flops: float = 0.0

    def check(self) -> None:
        bounded("run", self, seed=2**63 - 1, sample_tokens=2**20, eval_batches=2**20)
        positive("run", self, "steps", "eval_batches", "log_every")
        for name in ("eval_every", "sample_tokens", "peak_flops", "seed", "resume_step"):
            value = getattr(self, name)
            require(value >= 0, f"run.{name} must not be negative, got {value}")
        peak = self.peak_flops
        require(not 0 < peak < 1e9, f"run.peak_flops={peak:g} is in FLOP/s; {peak:g} TFLOP/s would be {peak * 1e12:g}")
        unknown = [name for name in self.named_loggers if name not in LOGGERS]
        require(
            not unknown, f"run.loggers={self.loggers} must be some of {', '.join(LOGGERS)}, got {', '.join(unknown)}"
        )
        require(bool(self.out), "run.out must name a directory, got an empty string")

    @property
    def named_loggers(self) -> tuple[str, ...]:
        """Names of the loggers, each once."""
        return tuple(dict.fromkeys(self.loggers.split(","))) if self.loggers else ()
