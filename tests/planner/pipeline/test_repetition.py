"""Many repetitions take the time of a plain replay, and few are replayed."""

import numpy as np
import pytest

from planner.pipeline import simulator
from planner.pipeline.rows import Table, runs
from planner.pipeline.simulator import Seconds


def seconds(table: Table, seed: int, spread: float, batch: int = 24) -> Seconds:
    """Return random durations whose logarithms have the standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: np.exp(rng.normal(0, spread, (batch, *shape)))  # noqa: E731
    virtual = table.stages * table.chunks
    return Seconds(
        forward=draw(virtual),
        backward=2 * draw(virtual),
        activation=0.3 * draw(table.stages),
        gradient=0.3 * draw(table.stages),
        head=draw(),
        start=draw(table.stages),
    )


def replayed(table: Table, durations: Seconds, overlap: bool) -> np.ndarray:
    """Return the seconds with every repetition replayed."""
    state = simulator._Replay(simulator.spread(table, durations), table, overlap, None)
    for rows, times in runs(table, overlap=overlap):
        for _ in range(times):
            state.replay(rows)
    return state.now.T


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("spread", [0.01, 0.3, 1.5])
@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe", "interleaved_1f1b", "1f1b:6"])
def test_repetitions_equal_a_plain_replay(schedule, spread, overlap):
    table = Table(schedule, 4, 400, 2 if schedule.startswith("inter") else 1)
    for seed in range(3):
        durations = seconds(table, seed, spread)
        found = simulator.pipeline(table, durations, overlap)
        np.testing.assert_allclose(found, replayed(table, durations, overlap), rtol=1e-9)


def test_stages_in_step_are_not_replayed_to_the_end(monkeypatch):
    """Some are in step after pairs of repetitions alone; 401 leaves one of a pair over."""
    count, plain = 0, simulator._Replay.replay

    def counted(self, rows):
        nonlocal count
        count += 1
        plain(self, rows)

    monkeypatch.setattr(simulator._Replay, "replay", counted)
    for micro_batches in (400, 401):
        table = Table("1f1b", 4, micro_batches)
        durations = seconds(table, 0, 0.3)
        found = simulator.pipeline(table, durations)
        few, count = count, 0
        np.testing.assert_allclose(found, replayed(table, durations, True), rtol=1e-9)
        few, count = few / count, 0
        assert few < 0.3


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b"])
@pytest.mark.parametrize("messages", [(0.1, 0.4), (1, 4)])
def test_rough_times_are_close(schedule, messages):
    """Equal stages whose messages take one of two times are those that come in step late."""
    table, rng = Table(schedule, 8, 1000), np.random.default_rng(0)
    sent = [rng.choice(messages, (60, 8)) * np.exp(rng.normal(0, 0.01, (60, 8))) for _ in range(2)]
    durations = Seconds(np.exp(rng.normal(0, 1e-3, (60, 8))), np.full((60, 8), 2.0), *sent)
    right, rough = (simulator.pipeline(table, durations, rough=value) for value in (False, True))
    assert np.abs(rough.max(axis=1) / right.max(axis=1) - 1).max() < 0.02
