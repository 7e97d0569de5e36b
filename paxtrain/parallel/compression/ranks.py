"""Ranks of the stages' low-rank factors over data, from step to step of a run."""

import dataclasses
from typing import Any, Self

import numpy as np

from compress.policy import AdaptiveRank, start_step
from paxtrain.config import Config

Ranks = tuple[int, ...]


@dataclasses.dataclass
class StageRanks:
    """The rank of each stage: 0 (dense) until `start`, then `chosen`, adapted to the compression error at intervals.

    All processes observe the same errors, so they choose the same ranks.

    Attributes:
        chosen: Ranks with which compression starts, 0 for stages that stay dense.
        start: Number of the last dense step.
        every: Steps between adaptations; 0: ranks do not change.
        rule: Rule by which ranks adapt.
        current: Ranks since the last adaptation.
        floors: Highest rank that doubling has led to, by stage.
        left_out: Sum of the observed relative errors since the last adaptation, by stage.
        observed: Number of steps in `left_out`.
    """

    chosen: Ranks
    start: int
    every: int
    rule: AdaptiveRank
    current: Ranks
    floors: Ranks
    left_out: list[float]
    observed: int = 0

    @classmethod
    def of(cls, config: Config, chosen: Ranks) -> Self:
        """Return the ranks of a new run that compresses with the ranks `chosen`, by stage."""
        c = config.compress
        rule = AdaptiveRank(c.data.rank_min, c.data.rank, c.data.residual_low, c.data.residual_high)
        start = start_step(c.data.start, config.run.steps) if any(chosen) else 0
        return cls(chosen, start, c.data.adapt_every, rule, chosen, (0,) * len(chosen), [0.0] * len(chosen))

    def at(self, step: int) -> Ranks:
        """Return the ranks of a step; the first step is 1."""
        return self.current if step > self.start else (0,) * len(self.chosen)

    def observe(self, left_out: np.ndarray) -> None:
        """Add the relative errors of a step.

        Args:
            left_out: relative error of each stage's compression, float [stages], as in reduction.Reduced.
        """
        self.left_out = [total + float(new) for total, new in zip(self.left_out, left_out, strict=True)]
        self.observed += 1

    def due(self, step: int) -> bool:
        """Return whether ranks adapt after this step."""
        after = step - self.start
        return bool(any(self.chosen) and self.every and after > 0 and after % self.every == 0)

    def adapt(self) -> bool:
        """Adapt the ranks to the errors observed since the last adaptation. Return whether any rank changed."""
        if not self.observed:
            return False
        before = self.current
        means = [total / self.observed for total in self.left_out]
        self.current = self.rule.next(before, means, self.floors)
        self.floors = tuple(
            max(floor, new) if new > old else floor
            for floor, new, old in zip(self.floors, self.current, before, strict=True)
        )
        self.left_out, self.observed = [0.0] * len(self.chosen), 0
        return self.current != before

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON values."""
        return {
            "chosen": list(self.chosen),
            "start": self.start,
            "current": list(self.current),
            "floors": list(self.floors),
            "left_out": self.left_out,
            "observed": self.observed,
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Continue from what `to_json` returned."""
        self.chosen, self.current, self.floors = (tuple(saved[key]) for key in ("chosen", "current", "floors"))
        self.start, self.left_out, self.observed = saved["start"], saved["left_out"], saved["observed"]
