"""The rules against brute force, simulation and the pipeline's own schedules."""

import itertools
import math

import numpy as np
import pytest

from compress.policy import AdaptiveRank, compression_ratio, epilogue_sends, largest_rank, selective, start_step
from paxtrain.schedule.schedules import build


class TestRatio:
    def test_is_that_of_the_bytes(self):
        dense, p, w = (
            np.zeros((4096, 3072), np.float16),
            np.zeros((4096, 16), np.float32),
            np.zeros((3072, 16), np.float32),
        )
        assert compression_ratio(4096, 3072, 16, 2, 4) == dense.nbytes / (p.nbytes + w.nbytes)

    @pytest.mark.parametrize("n, k", [(4096, 3072), (3072, 12288), (64, 64), (5, 3), (7, 1), (1, 1)])
    @pytest.mark.parametrize("min_ratio", [1, 2.0, 7.5])
    @pytest.mark.parametrize("widths", [(4, 4), (2, 4), (2, 1)])
    def test_largest_rank_is_the_last_that_saves_enough(self, n, k, min_ratio, widths):
        useful = [r for r in range(1, min(n, k) + 1) if compression_ratio(n, k, r, *widths) >= min_ratio]
        assert largest_rank(n, k, min_ratio, *widths) == max(useful, default=0)


def end(finish, dense, compressed, chosen):
    return max(t + (compressed[s] if s in chosen else dense[s]) for s, t in enumerate(finish))


class TestSelective:
    @pytest.mark.parametrize("seed", range(40))
    def test_no_other_choice_ends_earlier_or_compresses_fewer(self, seed):
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(1, 7))
        # Whole numbers make ties; compression does not help everywhere.
        finish, dense, compressed = rng.integers(0, 12, size=(3, stages)).tolist()
        chosen = selective(finish, dense, compressed)
        subsets = [c for size in range(stages + 1) for c in itertools.combinations(range(stages), size)]
        best = min(end(finish, dense, compressed, c) for c in subsets)
        assert end(finish, dense, compressed, chosen) == best
        optimal = [c for c in subsets if end(finish, dense, compressed, c) == best]
        assert all(set(chosen) <= set(c) for c in optimal)

    @pytest.mark.parametrize("seed", range(10))
    def test_is_the_papers_rule_where_the_first_stage_ends_last(self, seed):
        rng = np.random.default_rng(seed)
        finish = np.sort(rng.uniform(5, 10, size=6))[::-1]
        dense, ratio = rng.uniform(5, 8), rng.uniform(2, 6)
        papers = [s for s in range(6) if finish[0] - finish[s] < dense - dense / ratio]
        assert list(selective(finish, [dense] * 6, [dense / ratio] * 6)) == papers

    def test_the_papers_rule_is_not_always_best(self):
        finish, dense, compressed = [10, 9], [1, 4], [4, 1]  # compressing stage 0 would only cost
        assert selective(finish, dense, compressed) == (1,)
        assert not finish[0] - finish[1] < dense[1] - compressed[0]

    def test_lengths_must_agree(self):
        with pytest.raises(ValueError, match="shorter"):
            selective([1, 2], [1, 2], [1])


def residual(singular, rank):
    """Return the relative residual of the best approximation of a rank, from a matrix's singular values."""
    return math.sqrt(sum(s**2 for s in singular[rank:]) / sum(s**2 for s in singular))


SPECTRA = {
    "flat": np.ones(256),
    "power": np.arange(1, 257) ** -0.8,
    "geometric": 0.95 ** np.arange(256),
    "steep": 0.5 ** np.arange(256),
    "rank 15": np.repeat([1.0, 0.0], [15, 241]),
    "rank 80 with a tail": np.repeat([1.0, 0.02], [80, 176]),
}


class TestAdaptiveRank:
    RULE = AdaptiveRank(minimum=2, maximum=128, low=0.3, high=0.6)

    def run(self, singular, rank, with_floors=True, steps=24, noise=0.0):
        rng = np.random.default_rng(0)
        ranks, floors = [rank], (0,)
        for _ in range(steps):
            left = residual(singular, ranks[-1]) + rng.uniform(-noise, noise)
            [new] = self.RULE.next(ranks[-1:], [left], floors if with_floors else None)
            if new > ranks[-1]:
                floors = (new,)
            ranks.append(new)
        return ranks

    @pytest.mark.parametrize("name", SPECTRA)
    @pytest.mark.parametrize("rank", [2, 16, 128])
    def test_comes_to_rest_on_a_constant_spectrum(self, name, rank):
        *_, before, last = ranks = self.run(SPECTRA[name], rank)
        assert len(set(ranks[8:])) == 1 and before == last
        assert residual(SPECTRA[name], last) <= self.RULE.high or last == self.RULE.maximum
        if rank == 128 and last > 2 and name != "rank 15":
            assert residual(SPECTRA[name], last // 2) > self.RULE.low

    def test_without_floors_it_oscillates_where_the_spectrum_breaks_off(self):
        assert self.run(SPECTRA["rank 15"], 8, with_floors=False)[-4:] == [16, 8, 16, 8]

    @pytest.mark.parametrize("name", SPECTRA)
    def test_noise_changes_it_a_few_times_at_most(self, name):
        ranks = self.run(SPECTRA[name], 128, steps=400, noise=0.25)
        assert sum(a != b for a, b in zip(ranks, ranks[1:])) <= 2 * 6

    def test_each_stage_for_itself_within_bounds(self):
        ranks = self.RULE.next((2, 128, 16, 16, 100, 0, 16), (0.1, 0.9, 0.9, 0.1, 0.9, 0.9, math.nan))
        assert ranks == (2, 128, 32, 8, 128, 0, 16)
        assert self.RULE.next((3,), (0.1,)) == (2,)

    def test_bad_bounds(self):
        with pytest.raises(ValueError, match="minimum"):
            AdaptiveRank(8, 4, 0.3, 0.6)
        with pytest.raises(ValueError, match="low < high"):
            AdaptiveRank(4, 8, 0.6, 0.6)


def test_start_step():
    assert [start_step(f, 30) for f in (0, 0.1, 0.5, 1)] == [0, 3, 15, 30]
    with pytest.raises(ValueError, match="fraction"):
        start_step(1.5, 30)


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (4, 8), (4, 2), (5, 5), (1, 3)])
def test_the_epilogue_is_what_is_sent_after_the_last_forward(stages, micro_batches):
    table = build("1f1b", stages, micro_batches)
    for stage in range(stages):
        last_forward = max(row for row, s, *_ in table.ops("forward") if s == stage)
        drain = [mb for row, s, mb, _ in table.ops("backward") if s == stage and row >= last_forward and stage]
        assert epilogue_sends(stages, stage, micro_batches) == len(drain)
