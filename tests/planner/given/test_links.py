"""Latencies and bandwidths that logs were made with come back from them."""

import pytest

from paxtrain.errors import UserError
from planner.given import links, nccl_tests, units
from tests.planner.given import logs

TWO = ["a"] * 8 + ["b"] * 8


@pytest.fixture
def fitted(tmp_path):
    def fit(*arguments, **how):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        path.write_text(logs.log(*arguments, **how))
        return links.fit(nccl_tests.read(path))

    return fit


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("test", nccl_tests.TESTS)
def test_a_line_is_found_again(fitted, test, noise):
    """Of 31 sizes with 3% noise each, of which the quicker one counts, 31 sizes leave about 3%."""
    found = fitted(test, TWO, 40e-6, 90e9, noise=noise)
    within = 1e-3 if not noise else 0.04
    assert found.start == pytest.approx(40e-6, rel=within)
    assert found.bandwidth == pytest.approx(90e9, rel=within)
    assert found.error < within and (found.worst > 0.02) == bool(noise)


def test_a_ring_has_these_hops(fitted):
    """4 hosts of 2: 14 steps of an all-reduce, 6 of which are 3 links between hosts, both ways."""
    four = [name for name in "abcd" for _ in range(2)]
    assert fitted("all_reduce", four, 1e-5, 1e10).hops == (8, 6)
    assert fitted("reduce_scatter", four, 1e-5, 1e10).hops == (4, 3)
    assert fitted("sendrecv", four, 1e-5, 1e10).hops == (0, 1)
    assert fitted("all_gather", ["a"] * 8, 1e-5, 1e10).hops == (7, 0)


def test_inside_and_between_are_told_apart(fitted):
    """14 hops of 2 us inside; 28 of these and 2 of 10 us between; 8 NICs carry 320 GB/s."""
    one, two = fitted("all_reduce", ["a"] * 8, 28e-6, 400e9), fitted("all_reduce", TWO, 76e-6, 320e9)
    inside = links.inside([one, two])
    assert inside.alpha == pytest.approx(2e-6, rel=1e-2) and inside.bandwidth == pytest.approx(400e9, rel=1e-2)
    between = links.between([two], inside.alpha, 8)
    assert between.alpha == pytest.approx(10e-6, rel=3e-2) and between.bandwidth == pytest.approx(40e9, rel=1e-2)
    assert links.between([two], inside.alpha, 1).bandwidth == pytest.approx(320e9, rel=1e-2)
    # Without a log of one host, a hop inside takes a third of one between: 76 = 28 a/3 + 2 a.
    assert links.between([two], None, 8).alpha == pytest.approx(76e-6 / (28 / 3 + 2), rel=1e-2)
    assert links.inside([two]) is None


def test_a_flow_beside_a_ring_tells_the_nics(fitted):
    ring, flow = fitted("all_reduce", TWO, 76e-6, 190e9), fitted("sendrecv", ["a", "b"], 9e-6, 48e9)
    assert links.nics([ring, flow]) == 4
    assert links.nics([ring]) is None and links.nics([flow]) is None
    between = links.between([ring, flow], 2e-6, 4)
    assert (between.alpha, between.bandwidth) == (pytest.approx(9e-6, rel=1e-2), pytest.approx(48e9, rel=1e-2))


def test_pairs_have_links_of_their_own_if_several_were_measured(fitted):
    pairs = [fitted("sendrecv", ["a", b], 9e-6, rate) for b, rate in (("b", 48e9), ("c", 12e9))]
    found = links.pairs(pairs, None, 1)
    assert {pair: round(link.bandwidth / 1e9) for pair, link in found.items()} == {("a", "b"): 48, ("a", "c"): 12}
    assert links.pairs(pairs[:1], None, 1) == {}


def test_latency_is_not_told_by_large_sizes(fitted):
    large = fitted("all_reduce", ["a"] * 8, 28e-6, 400e9, sizes=(1 << 23, 1 << 24, 1 << 30))
    assert large.start is None and large.bandwidth == pytest.approx(400e9, rel=1e-2)
    assert links.inside([large]).alpha is None


def test_bandwidth_is_not_told_by_small_sizes(fitted):
    with pytest.raises(UserError, match="0 sizes from 1 MiB on"):
        fitted("all_reduce", ["a"] * 8, 28e-6, 400e9, sizes=(8, 1024))
    with pytest.raises(UserError, match=r"different numbers of ranks \(a: 3, b: 1\)"):
        fitted("all_reduce", ["a", "a", "a", "b"], 28e-6, 400e9)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("a100_1_host_sendrecv_perf.log", 62, 74),  # the highest in the log is 73.8
        ("h100_1_host_all_reduce_perf.log", 465, 477),
        ("h100_2_hosts_all_reduce_perf.log", 88, 103),
        ("h200_2_hosts_all_gather_perf.log", 310, 333),
    ],
)
def test_published_logs_have_the_bandwidth_of_their_large_sizes(name, least, most):
    found = links.fit(nccl_tests.read(logs.DATA / name))
    assert least < found.bandwidth / 1e9 < most
    assert found.error < 0.15
    assert not any("warning: that is no line" in text for _, text in links.told(found))


def test_a_busy_machine_is_told(tmp_path):
    """Times of 8 KiB to 8 MiB are up to 40 times those of a line."""
    found = links.fit(nccl_tests.read(logs.DATA / "dgx_h100_2_hosts_all_reduce_perf.log"))
    assert found.worst > 0.9
    text = " ".join(text for _, text in links.told(found))
    assert "472 GB/s = 3,779 Gbit/s" in text and "NCCL_ALGO=RING" in text


def test_rates_are_said_in_both_units():
    assert units.rate(370e9) == "370 GB/s = 2,960 Gbit/s"
    assert units.rate(12.3456e9) == "12.3 GB/s = 98.8 Gbit/s"
    assert units.rate(1e3) == "0.000001 GB/s = 0.000008 Gbit/s"
    assert units.nic_rate("x", 400) == 50e9
    for gbit, hint in {
        12.5: "write 100 if 12.5 is in GB/s",
        200_000: "write 200 if 200000 is in Mbit/s",
        77: "NICs have",
    }.items():
        with pytest.raises(UserError, match=hint):
            units.nic_rate("x", gbit)
