"""Rank of each stage's factors over data, from step to step of a run."""

import dataclasses
from typing import Any, Self

import numpy as np

from compress.policy import AdaptiveRank, start_step
from paxtrain.config import Config

Ranks = tuple[int, ...]


@dataclasses.dataclass
class StageRanks:
    """Dense until the start, then the chosen stages' ranks, adapted every so often to what they left out.

    All processes see the same figures and so decide the same.

    Attributes:
        chosen: ranks with which compression starts, 0 for stages that stay dense.
        start: the last dense step.
        every: steps between adaptions; 0: ranks stay.
        rule: how ranks adapt.
        current: ranks since the last adaption.
        floors: per stage the highest rank that doubling has led to.
        left_out: per stage the sum of the parts left out since then, and `observed`, of how many steps.
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
        """The ranks of a fresh run."""
        c = config.compress
        rule = AdaptiveRank(c.data_rank_min, c.data_rank, c.residual_low, c.residual_high)
        start = start_step(c.data_start, config.run.steps) if any(chosen) else 0
        return cls(chosen, start, c.data_adapt_every, rule, chosen, (0,) * len(chosen), [0.0] * len(chosen))

    def at(self, step: int) -> Ranks:
        """Ranks of step number `step`, the first being 1."""
        return self.current if step > self.start else (0,) * len(self.chosen)

    def observe(self, left_out: np.ndarray) -> None:
        """Takes what a step left out, by stage, 0 to 1."""
        self.left_out = [total + float(new) for total, new in zip(self.left_out, left_out, strict=True)]
        self.observed += 1

    def due(self, step: int) -> bool:
        """Whether ranks adapt after this step."""
        after = step - self.start
        return bool(any(self.chosen) and self.every and after > 0 and after % self.every == 0)

    def adapt(self) -> bool:
        """Adapts the ranks to what was observed since the last time; whether any changed."""
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
        """What a checkpoint keeps of it."""
        return {
            "chosen": list(self.chosen),
            "start": self.start,
            "current": list(self.current),
            "floors": list(self.floors),
            "left_out": self.left_out,
            "observed": self.observed,
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Continues from what `to_json` gave."""
        self.chosen, self.current, self.floors = (tuple(saved[key]) for key in ("chosen", "current", "floors"))
        self.start, self.left_out, self.observed = saved["start"], saved["left_out"], saved["observed"]
