import numpy as np
import pytest

from planner.cost import closed_forms
from planner.pipeline import simulator
from planner.pipeline.rows import Table


def _arrays(stages, micro_batches=1, seed=0):
    random = np.random.default_rng(seed)
    forward, backward = random.uniform(0.5, 2, (2, 5, stages))
    return forward, backward, random.uniform(0, 0.3, (5, stages - 1)), random.uniform(0, 1, 5)


def _published(f, b, hops, data, m, pp):
    """Return Pipette's rule as its released code has it, for one candidate of equal stages."""
    groups, hidden = m // pp, sum(hops)
    if groups:
        return groups * (pp * (f + b) + hidden) + (pp - 1) * (f + b) + data
    return pp * (f + b) + hidden + (m - 1) * (f + b) + data


@pytest.mark.parametrize("stages, m", [(1, 1), (1, 7), (4, 2), (4, 4), (4, 10), (3, 12)])
def test_pipette_is_the_published_rule(stages, m):
    _, _, hops, data = _arrays(stages)
    f, b = np.full((5, stages), 1.5), np.full((5, stages), 2.25)
    expected = [_published(1.5, 2.25, hops[i], data[i], m, stages) for i in range(5)]
    found = closed_forms.pipette(f, b, hops, data, m, stages, as_published=True)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_pipette_counts_the_micro_batches_that_the_published_rule_drops():
    f, b, hops, data = _arrays(4)
    slowest = (f + b).max(axis=1)
    ours = closed_forms.pipette(f, b, hops, data, 11, 4)
    published = closed_forms.pipette(f, b, hops, data, 11, 4, as_published=True)
    np.testing.assert_allclose(ours - published, 3 * slowest, rtol=1e-12)
    whole = [closed_forms.pipette(f, b, hops, data, 12, 4, as_published=p) for p in (False, True)]
    np.testing.assert_array_equal(*whole)


def test_both_are_the_simulator_where_stages_are_equal_and_transfers_free():
    for stages, m in ((1, 3), (2, 2), (4, 9), (4, 2)):
        f, b = np.full((5, stages), 1.5), np.full((5, stages), 2.25)
        hops = np.zeros((5, stages - 1))
        simulated = simulator.pipeline(Table("1f1b", stages, m), simulator.Seconds(f, b)).max(axis=1)
        np.testing.assert_allclose(closed_forms.pipette(f, b, hops, 0, m, stages), simulated, rtol=1e-12)
        np.testing.assert_allclose(closed_forms.amp(f, b, hops, 0, m), simulated, rtol=1e-12)


def test_amp_by_hand():
    f, b = np.array([[1.0, 2.0, 1.0]]), np.array([[2.0, 3.0, 1.0]])
    assert closed_forms.amp(f, b, np.array([[0.25, 0.5]]), 10.0, 4) == pytest.approx(3 * 5 + (3 + 5 + 2) + 0.75 + 10)


def test_pipelines_of_different_length_share_a_batch():
    f, b, hops, data = _arrays(4)
    short = [np.concatenate([x[:, :2], np.zeros((5, 2))], axis=1) for x in (f, b)]
    hops_short = np.concatenate([hops[:, :1], np.zeros((5, 2))], axis=1)
    many, stages = np.array([3, 4, 5, 6, 7]), np.full(5, 2)
    padded = closed_forms.pipette(*short, hops_short, data, many, stages)
    alone = [closed_forms.pipette(f[i, :2], b[i, :2], hops[i, :1], data[i], many[i], 2) for i in range(5)]
    np.testing.assert_allclose(padded, alone, rtol=1e-12)
    np.testing.assert_allclose(
        closed_forms.amp(*short, hops_short, data, many),
        [closed_forms.amp(f[i, :2], b[i, :2], hops[i, :1], data[i], many[i]) for i in range(5)],
    )


def test_ring():
    assert closed_forms.ring(8e9, 4, 1e9) == pytest.approx(12)
    assert closed_forms.ring(8e9, 1, 1e9) == 0
