"""Peaks of memory of other trainers' runs: by hand, and fitted."""

import dataclasses
import itertools

import numpy as np
import pytest

from planner.fit import memory
from planner.runs import trials

ROW = {
    **{"cluster": "lab", "trainer": "nanotron", "family": "llama", "tied_head": 0, "device_kinds": "H100"},
    **{"devices": 16, "devices_per_host": 8, "hidden": 1024, "heads": 16, "layers": 8, "ffn": 4096, "seq": 512},
    **{"vocab": 32000, "global_batch": 64, "micro_batch": 2, "tp": 2, "dp": 2, "pp": 4, "sequence_parallel": 1},
    **{"recompute": "none", "dtype": "bf16", "seconds": 1.0},
}


def _trial(**changes):
    return trials.parse({name: str(value) for name, value in {**ROW, **changes}.items()})


def _of(**changes):
    """Return the peak with one count, all others 0."""

    def peak(name):
        counts = np.array([float(c.name == name) for c in memory.COUNTS])
        return memory.MemoryModel(counts, 0.1, 0).peaks([_trial(**changes)])[0]

    return {c.name: peak(c.name) for c in memory.COUNTS}


def test_what_a_device_holds_by_hand():
    layer = (4 * 1024**2 + 3 * 1024 * 4096) // 2 + 2 * 1024  # parameters of one of two tensor ranks, with its norms
    even, tokens = {"stage_layers": "2;2;2;2"}, 2 * 512
    held, found = 2 * layer + 16000 * 1024, _of(sharding="zero1", **even)
    assert found["weights"] == pytest.approx(held, rel=1e-3) and found["optimizer"] == found["weights"] / 2
    # Four micro-batches are in flight on the first stage, each with two layers; arrays of bfloat16 are split in two.
    assert found["hidden"] == 8 * tokens * 1024 * 2 / 2 and found["ffn"] == 8 * tokens * 4096 * 2 / 2
    assert found["logits"] == 0 and found["gathered"] == 0  # nanotron logs the first stage's peak
    largest = _of(trainer="megatron-lm", **even)
    assert largest["logits"] == tokens * 16000 and largest["earlier"] == largest["logits"]
    one = _of(devices=2, dp=1, pp=1, global_batch=2)  # a single micro-batch keeps no earlier logits
    assert one["earlier"] == 0 and one["weights"] == one["optimizer"]
    assert one["gathered"] == 8 * tokens * 1024 * 2  # whole arrays
    assert _of(devices=1, tp=1, dp=1, pp=1, global_batch=2)["gathered"] == 0
    assert _of(recompute="full", **even)["ffn"] == found["ffn"] / 8


def test_what_is_gathered_is_kept_if_there_is_room():
    counts = np.array([0.0] * (len(memory.COUNTS) - 2) + [1.0, 3.0])
    model, gathered = memory.MemoryModel(counts, 0.1, 0), 3 * 8 * 512 * 1024 * 2
    small, large = (_trial(devices=2, dp=1, pp=1, micro_batch=b, global_batch=b) for b in (2, 4096))
    assert model.peaks([small, large]) == pytest.approx([1e9 + 2 * gathered, 1e9])
    assert np.all(model.fits([small, large]) > 0.99)  # it is no reason to fail


def test_counts_are_found_and_what_does_not_fit_is_told():
    meshes = itertools.product((1, 2, 4), (1, 2, 4), (1, 4, 16), ("none", "zero1"))
    rows = [_trial(tp=t, pp=p, dp=16 // (t * p), micro_batch=b, sharding=s, global_batch=256) for t, p, b, s in meshes]
    random = np.random.default_rng(0)
    exact = memory.MemoryModel(memory.TYPICAL.counts * np.exp(0.5 * random.normal(size=len(memory.COUNTS))), 0.1, 0)
    peaks = exact.peaks(rows) * np.exp(0.03 * random.normal(size=len(rows)))
    measured = [dataclasses.replace(row, memory=float(peak)) for row, peak in zip(rows, peaks)]
    found = memory.fit(measured[::2])
    held = slice(1, None, 2)
    error = np.mean(np.abs(found.peaks(rows)[held] / peaks[held] - 1))
    assert error < 0.06 < np.mean(np.abs(memory.TYPICAL.peaks(rows)[held] / peaks[held] - 1))  # control: typical counts
    assert memory.fit(rows) is memory.TYPICAL  # nothing was measured
    large = [_trial(layers=layers, devices=2, dp=1, pp=1, hidden=4096) for layers in (8, 400)]
    assert np.round(memory.TYPICAL.fits(large), 2).tolist() == [1.0, 0.0]
    assert memory.capacity(_trial(device_kinds="unknown")) == np.inf
