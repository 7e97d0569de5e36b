"""Products beside a list scheduler of tiles, and the limits that no product passes."""

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster.products import WAVE, ProductRates

PEAK, MEMORY, SMS = 300e12, 2e12, 108
RATES = ProductRates(PEAK, MEMORY, SMS, 2)


def scheduled(m: int, n: int, k: int, rows: int, columns: int) -> float:
    """Return the seconds if free multiprocessors take the next tile of one size, with what a tile costs besides."""
    free = [0.0] * SMS
    for _ in range(math.ceil(m / rows) * math.ceil(n / columns)):
        begun = heapq.heappop(free)
        heapq.heappush(free, begun + 2 * rows * columns * k / (PEAK / SMS) + WAVE)
    return max(free)


@pytest.mark.parametrize(("m", "n"), [(2048, 4608), (4096, 4096), (2048, 12288), (27648, 128)])
def test_whole_tiles_take_what_a_list_scheduler_says(m, n):
    """Enough tiles and a large K leave nothing to splitting and to smaller tiles."""
    k, rates = 8192, ProductRates(PEAK, math.inf, SMS, 2)
    expected = min(scheduled(m, n, k, 256, 128), scheduled(m, n, k, 128, 256))
    found = rates.seconds(m, n, k)
    smaller = scheduled(m, n, k, 128, 128) / 0.95  # which may fit the last wave better
    assert found <= expected * (1 + 1e-12)
    assert found >= min(expected, 0.95 * smaller)


def test_one_tile_more_than_multiprocessors_takes_a_wave_more():
    """With tiles of 256 x 128 alone: 108 rows of tiles fill the device once, 109 do not."""
    k, rates = 65536, ProductRates(PEAK, math.inf, SMS, 2)
    full, more = rates.seconds(256 * 108, 128, k), rates.seconds(256 * 109, 128, k)
    assert 2 * 256 * 108 * 128 * k / PEAK == pytest.approx(full, rel=0.01)
    assert 1.4 < more / full < 2.01  # smaller tiles make it less than two waves


def test_a_small_k_is_slower_for_its_operations():
    shares = [2 * 4096 * 4608 * k / RATES.seconds(4096, 4608, k) / PEAK for k in (128, 512, 2048, 8192)]
    assert shares == sorted(shares) and shares[0] < 0.6 * shares[-1]


def test_few_tiles_are_split_along_k():
    alone = 2 * 256 * 128 * 16384 / (PEAK / SMS)  # one tile on one multiprocessor
    assert RATES.seconds(256, 128, 16384) < 0.3 * alone


def test_unknown_multiprocessors_leave_a_roofline():
    plain = ProductRates(PEAK, MEMORY, 0, 2)
    assert plain.seconds(100, 200, 300) == max(2 * 100 * 200 * 300 / PEAK, 2 * (30000 + 60000 + 20000) / MEMORY)
    assert plain.seconds(4096, 4096, 4096) == 2 * 4096**3 / PEAK


sizes = st.integers(1, 6000)


@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64))
def test_no_product_is_above_the_roofline_and_none_gets_quicker_by_growing(m, n, k, batch):
    found = RATES.seconds(m, n, k, batch)
    assert found >= 2 * batch * m * n * k / PEAK * (1 - 1e-12)
    assert found >= 2 * batch * (m * k + k * n + m * n) / MEMORY * (1 - 1e-12)
    larger = (RATES.seconds(m + 64, n, k, batch), RATES.seconds(m, n + 64, k, batch), RATES.seconds(m, n, 2 * k, batch))
    assert all(x >= found * (1 - 1e-12) for x in larger)
    assert RATES.seconds(n, m, k, batch) == pytest.approx(found)  # tiles come in both directions
