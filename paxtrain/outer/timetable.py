"""The timetable of a run in groups: which fragment is exchanged at which step."""

import dataclasses

from paxtrain.config import OuterConfig


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The steps at which fragments are sent, and at which the groups take what has come of it.

    Every H/P steps another of P fragments is sent, the last one after each H steps. Steps count from 1.

    Attributes:
        outer: H, P, and the steps that an exchange may take.
        steps: Number of the run's last step, whose exchange is waited for since no step follows.
        settled: Step from which an earlier start's checkpoint is, if its exchange was waited for; 0: none.
    """

    outer: OuterConfig
    steps: int
    settled: int = 0

    def _sent(self, number: int) -> int | None:
        """Return the fragment that is sent after a step."""
        interval = self.outer.every // self.outer.fragments
        return (number // interval - 1) % self.outer.fragments if number > 0 and number % interval == 0 else None

    def waited(self, number: int) -> int | None:
        """Return the fragment that is exchanged after a step while all wait, or None."""
        return self._sent(number) if not self.outer.overlap or number == self.steps else None

    def under(self, number: int) -> int | None:
        """Return the fragment that is exchanged under a step, as it was before that step, or None."""
        return self._sent(number - 1) if self.outer.overlap and number - 1 != self.settled else None

    def joined(self, number: int) -> int | None:
        """Return the fragment of which groups mix their own weights with the shared ones after a step, or None."""
        sent = number - self.outer.overlap
        return self._sent(sent) if self.outer.overlap and sent != self.settled else None

    def pending(self, number: int) -> bool:
        """Return whether an exchange has changed the shared weights after a step, but the groups' own weights not yet.

        Args:
            number: Number of a step; 0: before the first.
        """
        return any(self.under(n) is not None for n in range(max(number - self.outer.overlap + 2, 1), number + 1))
