"""nanotron's split of layers over stages, against its own words and against runs that failed."""

import dataclasses
import pathlib

import numpy as np
import pytest

from planner.fit import memory
from planner.runs import nanotron, published

RECORD = pathlib.Path(__file__).resolve().parents[4] / "shared" / "data" / "runs" / "ultrascale_1b_8b.csv"
needs_record = pytest.mark.skipif(not RECORD.is_file(), reason="published runs are not in this checkout")


def _by_thresholds(layers, layer, head, pp):
    """Return the stage of each block, as build_model goes over cumulative costs and thresholds."""
    cumulative = np.cumsum([0, *[layer] * layers, 0, head, 0, 0])
    thresholds = [cumulative[-1] * ((rank + 1) / pp) for rank in range(pp)]
    rank, found = 0, []
    for cost in cumulative:
        found.append(rank)
        rank += cost > thresholds[min(rank, pp - 1)]
    return found, rank


@pytest.mark.parametrize(("layers", "hidden", "ffn"), [(16, 2048, 8192), (28, 3072, 8192), (80, 8192, 28672)])
def test_layers_are_split_as_by_thresholds(layers, hidden, ffn):
    for pp in (1, 2, 4, 8, 16):
        found = nanotron.split(layers, hidden, ffn, 131072, pp)
        ranks, last = _by_thresholds(layers, 4 * hidden**2 + 3 * hidden * ffn, 131072 * hidden, pp)
        assert list(found.layers) == np.bincount(ranks[1 : 1 + layers], minlength=pp).tolist()
        assert sum(found.layers) == layers and found.whole == (ranks[-1] == last)
    assert nanotron.split(16, 2048, 8192, 131072, 4).layers == (6, 5, 5, 0)  # the head counts as four of these layers


@needs_record
def test_runs_whose_last_stage_has_no_loss_failed():
    runs = published.read(RECORD)
    broken = [run for run in runs if run.broken]
    assert len(broken) == 66 and sum(run.failed for run in broken) == 65
    assert {(run.layers, run.pp) for run in broken} == {(16, 16)}
    explicit = dataclasses.replace(broken[0], columns={**broken[0].columns, "stage_layers": "1"})
    assert not explicit.broken


@needs_record
def test_peaks_follow_the_split():
    runs = [run for run in published.read(RECORD) if run.memory and run.layers == 32 and run.pp > 2]
    even = [dataclasses.replace(run, stage_layers=(32 // run.pp,) * run.pp) for run in runs]
    measured = np.array([run.memory for run in runs])

    def error(some):
        return np.mean(np.abs(memory.TYPICAL.peaks(some) / measured - 1))

    assert error(runs) < 0.13 < 0.17 < error(even)
