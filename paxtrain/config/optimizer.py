"""The sections about updates: the optimizer, and the outer optimizer of groups that train apart."""

import dataclasses

from paxtrain.config.checks import Checked, bounded, choice, each, multiples_near, near, positive, require


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The optimizer and its learning-rate schedule; steps are optimizer steps.

    Attributes:
        name: "adamw", "muon" (Muon on the layers' matrices, paxtrain/parallel/muon.py, and AdamW on all else), or "sgd"
            (the gradient times the learning rate, with weight decay).
        learning_rate: largest learning rate, reached after the warm-up.
        schedule: "cosine" (to learning_rate * final_fraction at the last step), "wsd" (warm-up, stable, linear decay
            over the last decay_steps) or "constant".
        warmup_steps: steps over which the learning rate grows linearly from zero.
        decay_steps: steps of the decay of "wsd"; other schedules ignore them.
        final_fraction: last learning rate of "cosine" and "wsd" over the largest.
        beta1: decay of AdamW's mean of gradients.
        beta2: decay of AdamW's mean of squared gradients.
        epsilon: addend of AdamW's denominator.
        weight_decay: decay of matrices and embeddings per step, over the learning rate.
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

    def check(self) -> None:
        choice("optimizer.name", self.name, ("adamw", "muon", "sgd"))
        choice("optimizer.schedule", self.schedule, ("cosine", "wsd", "constant"))
        positive("optimizer", self, "learning_rate", "epsilon", "muon_steps")
        for name in ("warmup_steps", "decay_steps", "weight_decay", "clip_norm", "muon_rms"):
            value = getattr(self, name)
            require(value >= 0, f"optimizer.{name} must not be negative, got {value}")
        for name in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name} must be in [0, 1), got {value}")
        require(0 <= self.final_fraction <= 1, f"optimizer.final_fraction must be in [0, 1], got {self.final_fraction}")
        bounded("optimizer", self, muon_steps=1000)
        require(
            self.schedule != "wsd" or self.decay_steps > 0,
            "optimizer.schedule=wsd needs optimizer.decay_steps above 0, got 0",
            {"optimizer.decay_steps": self.warmup_steps or 1},
            {"optimizer.schedule": "constant"},
        )


MIX = 0.5  # one of the shares that Streaming DiLoCo compares


@dataclasses.dataclass(frozen=True)
class OuterConfig(Checked):
    """Groups of data ranks that train apart, and the outer optimizer that joins them (DiLoCo, Douillard et al. 2023).

    Every H steps the groups exchange the differences that they have made to the weights which they share. The mean of
    the differences is the gradient of an outer Nesterov step on the shared weights, from which all groups go on. With
    fragments and an overlap it is Streaming DiLoCo (Douillard et al. 2025).

    Attributes:
        every: steps H between exchanges; 0: no groups, all data ranks train together.
        groups: number of groups of data ranks, each of neighbors in the mesh; 0: each data rank is a group.
        lr: learning rate of the outer step.
        momentum: decay of the outer step's momentum (Nesterov's); 0: none.
        fragments: parts of the weights, of which another is exchanged every H / fragments steps; 1: all at once.
        overlap: steps after which groups take what an exchange has brought, while they train; 0: they wait for it.
        mix: share of a group's own weights when it takes the shared ones after an overlap; 0: it drops its own.
    """

    every: int = 0
    groups: int = 0
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    mix: float = MIX

    def check(self) -> None:
        bounded("outer", self)
        positive("outer", self, "lr", "fragments")
        for name in ("every", "groups", "overlap"):
            value = getattr(self, name)
            require(value >= 0, f"outer.{name} must not be negative, got {value}")
        require(0 <= self.momentum < 1, f"outer.momentum must be in [0, 1), got {self.momentum}")
        require(0 <= self.mix <= 1, f"outer.mix must be in [0, 1], got {self.mix}")
        usual = self.fragments * max(50 // self.fragments, self.overlap + 1)
        for name, unused in (("groups", 0), ("fragments", 1), ("overlap", 0)):
            value = getattr(self, name)
            require(
                self.every > 0 or value == unused,
                f"outer.{name}={value} needs outer.every, the steps between exchanges",
                {"outer.every": usual},
                {f"outer.{name}": unused},
            )
        require(
            self.mix == MIX or self.overlap > 0,
            f"outer.mix={self.mix} needs outer.overlap, the steps after which groups mix",
            {"outer.overlap": 1},
            {"outer.mix": MIX},
        )
        require(
            self.every % self.fragments == 0,
            f"outer.fragments={self.fragments} does not divide outer.every={self.every}",
            each("outer.fragments", near(self.every, self.fragments)),
            each("outer.every", multiples_near(self.fragments, self.every)),
        )
        between = self.every // self.fragments
        require(
            self.overlap < max(between, 1),
            f"outer.overlap={self.overlap} is not below the {between} steps from one exchange to the next "
            f"(outer.every={self.every} / outer.fragments={self.fragments})",
            {"outer.overlap": between - 1},
        )
