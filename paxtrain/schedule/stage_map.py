"""The stages of virtual stages: in turn, or to the last stage and back in the shape of a V."""

import dataclasses
import functools

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class StageMap:
    """The stages of all virtual stages. The first virtual stage is on stage 0.

    Attributes:
        stages: P.
        chunks: v, virtual stages of each stage.
        folded: every other chunk runs from the last stage to the first one. So neighbours send in both directions, and
            the two virtual stages at a fold are on one stage, between which nothing travels.
    """

    stages: int
    chunks: int
    folded: bool = False

    @functools.cached_property
    def virtual_of(self) -> np.ndarray:
        """Virtual stage of each chunk of each stage, int [v, P]."""
        table = np.arange(self.stages * self.chunks).reshape(self.chunks, self.stages)
        if self.folded:
            table[1::2] = table[1::2, ::-1].copy()
        return table

    @functools.cached_property
    def stage_of(self) -> tuple[int, ...]:
        """Stage of each virtual stage."""
        return tuple((np.argsort(self.virtual_of, axis=None) % self.stages).tolist())

    @property
    def last(self) -> int:
        """Stage of the last virtual stage, which has the head."""
        return self.stage_of[-1]

    @property
    def ends(self) -> tuple[int, ...]:
        """The stages that hold the first and the last virtual stage, each once."""
        return tuple(sorted({0, self.last}))

    @property
    def links(self) -> int:
        """Number of links between stages; in turn, virtual stages add one from the last stage to the first."""
        return self.stages - (self.folded or self.chunks == 1)

    def by_stage(self, x: ArrayLike) -> np.ndarray:
        """Return [..., v, P] of an array [..., virtual stages]."""
        return np.asarray(x)[..., self.virtual_of]

    def by_model(self, table: ArrayLike) -> np.ndarray:
        """Return [virtual stages] of an array [v, P]."""
        return np.ravel(table)[np.argsort(self.virtual_of, axis=None)]

    @property
    def lanes(self) -> int:
        """Messages of a kind that one stage may get in a row: folded, from the stage before and the one behind."""
        return 1 + self.folded

    def lane(self, sender: int, receiver: int) -> int:
        """Return the lane of a message, so that no two to one receiver are in the same.

        Args:
            sender: stage.
            receiver: another stage; at a fold the same.
        """
        return int(self.folded and (sender > receiver or sender == receiver > 0))


@functools.cache
def in_turn(stages: int, chunks: int) -> StageMap:
    """Return the map that puts virtual stage q on stage q mod P."""
    return StageMap(stages, chunks)


@functools.cache
def folded(stages: int, chunks: int) -> StageMap:
    """Return the map of chunks that run to the last stage and back in turn."""
    return StageMap(stages, chunks, folded=True)
