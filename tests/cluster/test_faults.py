"""Four hosts and the promises of docs/faults.md: each fault ends, or is survived, as said there; no sample is lost.

The tests break one and the same run, in their order; each starts it again for the next one.
"""

import pytest

from experiments.hosts import hosts
from experiments.lab import faults

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")
LIMITS = faults.LIMITS
AT_ONCE = 2.0 + LIMITS.settle + LIMITS.grace  # seconds to the end of a fault that is noticed at once


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    home = tmp_path_factory.mktemp("faults")
    with faults.lab(home / "lab") as lab:
        yield lab


def assert_ended(found, within):
    assert 0 < found["end_seconds"] < within < LIMITS.bound < LIMITS.heartbeat
    assert 0 <= found["lost_steps"] < 3 * faults.EVERY  # what was done since the last checkpoint


def test_a_killed_worker(lab):
    assert_ended(faults.killed_worker(lab), AT_ONCE)


def test_a_link_that_is_cut_for_less_than_the_limit(lab):
    found = faults.short_cut(lab)
    assert faults.SHORT_CUT <= found["cut_seconds"] < LIMITS.link
    assert faults.SHORT_CUT <= found["stood_seconds"] < 2 * faults.SHORT_CUT + 3
    assert "pax1 hears pax2 again, after" in found["sentence"]


def test_a_slow_host(lab):
    assert "pax2's CPU takes" in faults.slow_host(lab)["sentence"]


def test_a_killed_host_without_which_training_goes_on(lab):
    found = faults.killed_host(lab)
    assert_ended(found, AT_ONCE)
    assert found["hosts_left"] == 3 and found["steps_on_the_rest"] > 0


def test_a_link_that_is_cut_for_longer_than_the_limit(lab):
    assert_ended(faults.long_cut(lab), LIMITS.link + AT_ONCE + 1)


def test_a_full_disk(lab):
    found = faults.full_disk(lab)
    assert 0 < found["end_seconds"] < 60  # it shows when the next checkpoint is written
    assert "found its disk full" in found["sentence"] and "free some of it and start again" in found["sentence"]


def test_a_damaged_checkpoint(lab):
    found = faults.corrupted_checkpoint(lab)
    assert "is damaged" in found["sentence"] and "not used" in found["sentence"]


def test_no_sample_is_lost_and_none_comes_twice(lab):
    """The curves agree to rounding; leaving a batch out changes them more than a hundred times as much."""
    found = faults.whole_curve(lab)
    assert found["samples"] == faults.BATCH * found["steps"]
    assert found["difference"] < 3e-5 < 3e-3 < found["difference_a_batch_late"]
