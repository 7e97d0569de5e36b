"""Further questions: more hosts, a cluster that changes, and the price of what flags fix."""

import dataclasses

import numpy as np
import pytest

from paxtrain.errors import UserError
from planner.answers import free_choice, hosts, what_if
from planner.cluster.variants import alike, resized, with_devices
from planner.planning.inputs import search_for
from planner.planning.options import PlanOptions
from planner.planning.planning import plan_sections
from planner.report.further import Scaling, Size
from tests.planner.examples import cluster, values

LINKS = {"inside": {"alpha": 3e-6, "bandwidth": 3e11}, "between": {"alpha": 1e-5, "bandwidth": 25e9}}
OPTIONS = PlanOptions(compress=(), oracle="no", nearby=False, top=2, placed=1, schedules=("1f1b",), saves=("dots",))


# --- Clusters like a given one ----------------------------------------------------------------------------------------


def test_hosts_are_added_only_if_all_are_alike():
    equal, differing = cluster(4, 4, seed=None), cluster(4, 4)
    assert alike(equal) and not alike(differing)
    grown = resized(equal, 7)
    assert len(set(grown.hosts)) == 7 and alike(grown) and not grown.named
    assert (grown.bandwidth.diagonal() == 300e9).all() and grown.bandwidth[0, 6] == grown.bandwidth[6, 5] == 25e9
    assert resized(differing, 3).hosts == differing.hosts[:3]
    for some in (differing, cluster(1, 4)):
        with pytest.raises(UserError, match="cannot be told from"):
            resized(some, 8)


def test_devices_that_were_measured_are_not_exchanged_for_a_data_sheet():
    other = with_devices(cluster(2, 4), "h200")
    assert other.kinds == ("h200",) * 2 and other.memory.min() > 150e9
    with pytest.raises(UserError, match="no known device"):
        with_devices(cluster(2, 4), "h900")


# --- Changes as one writes them ---------------------------------------------------------------------------------------


@pytest.fixture
def named():
    return dataclasses.replace(cluster(3, 4), hosts=("a", "b-1", "c"))


def test_a_change_changes_what_it_names_and_nothing_else(named):
    def factors(text: str) -> np.ndarray:
        return what_if.changed(named, text).bandwidth / named.bandwidth

    both = factors("link a-b-1 x 0.5")
    expected = np.ones((3, 3))
    expected[0, 1] = expected[1, 0] = 0.5
    assert both == pytest.approx(expected)
    one_way = factors("link a>b-1 x 0.5")
    assert one_way[0, 1] == 0.5 and one_way[1, 0] == 1
    assert factors("link *-c x 3") == pytest.approx(np.array([[1, 1, 3], [1, 1, 3], [3, 3, 1]]))
    assert factors("network x 2") == pytest.approx(2 - np.eye(3))
    more = what_if.changed(named, "network 100 Gbit/s  more").bandwidth - named.bandwidth
    assert more == pytest.approx(12.5e9 * (1 - np.eye(3)))
    assert what_if.changed(named, "link a-c 8 Gbit/s").bandwidth[2, 0] == pytest.approx(1e9)
    bare = what_if.changed(named, "100 Gbit/s more").bandwidth - named.bandwidth
    assert bare == pytest.approx(more)
    assert what_if.changed(named, "without host b-1").hosts == ("a", "c")
    assert what_if.changed(named, "devices h100").kinds == ("h100",) * 3


@pytest.mark.parametrize("slow", ["a", "b-1", "c"])
def test_one_host_less_is_the_one_with_the_slowest_links(named, slow):
    slower = what_if.changed(named, f"link {slow}-* x 0.1")
    assert what_if.changed(slower, "One host  less").hosts == tuple(host for host in named.hosts if host != slow)
    equal = dataclasses.replace(cluster(3, 4, seed=None), hosts=named.hosts)
    assert what_if.changed(equal, "one host less").hosts == ("a", "b-1")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("more of everything", "cannot be read; write"),
        ("link a-d x 2", "names no two hosts"),
        ("link a-a x 2", "is no link between two hosts"),
        ("without d", "there is no host 'd'"),
        ("without a,b-1,c", "all 3 hosts are left out"),
        ("network x 0", "nothing would be left"),
        ("network 900 Gbit/s less", "nothing would be left"),
        ("devices h900", "no known device"),
        ("trunks x 2", "has no trunks; its file would name them"),
    ],
)
def test_a_change_that_makes_no_sense_is_one_sentence(named, text, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        what_if.changed(named, text)
    assert str(error.value).startswith("--what_if=")


def test_a_change_of_the_network_is_one_of_its_trunks_too():
    some = cluster(4, 4, trunks=[{"hosts": ["host0", "host1"], "bandwidth": 1e9}])
    rate = lambda text: what_if.changed(some, text).trunks.bandwidth.tolist()  # noqa: E731
    assert rate("trunks x 3") == [3e9] and rate("network x 0.5") == [0.5e9] and rate("network 8 Gbit/s more") == [1e9]
    assert what_if.changed(some, "trunks x 3").bandwidth.tolist() == some.bandwidth.tolist()
    with pytest.raises(UserError, match="nothing would be left of a trunk"):
        what_if.changed(some, "trunks x 0")


def test_a_factor_gives_back_the_nominal_rates_of_the_network():
    """Plans take 70% of nominal rates between hosts; what is measured stays as it is."""
    some = cluster(2, 4, seed=None, links=LINKS)
    rate = lambda one: float(search_for(values(), one, OPTIONS).cluster.bandwidth[0, 1])  # noqa: E731
    assert rate(some) == pytest.approx(0.7 * 25e9)
    assert rate(what_if.changed(some, f"network x {1 / 0.7:.6f}")) == pytest.approx(25e9, rel=1e-5)
    assert rate(cluster(2, 4, seed=None, links=LINKS | {"nominal": []})) == 25e9


def test_a_plan_is_kept_only_where_it_fits_into_other_devices():
    """V100s have no flash attention, so a plan that keeps all residuals needs several times as much on them."""
    fixed = dataclasses.replace(
        OPTIONS, data=(1,), pipe=(4,), tensor=(1,), micro_batch=(8,), saves=("residuals", "dots"), schedules=("gpipe",)
    )
    some, given = cluster(4, 1), values()
    given["batch"]["global_batch"] = 16
    today = plan_sections(given, some, dataclasses.replace(fixed, saves=("residuals",)))
    made = what_if.what_ifs(given, some, fixed, today, ["devices v100", "devices h100"])
    other, alike = made.report.what_ifs
    assert today.report.chosen.memory < 16e9 * OPTIONS.usable_memory  # on A100s it needs less than a V100 has
    assert other.kept is None and alike.kept is not None


def test_a_quicker_network_helps_and_a_lost_host_hurts():
    some = cluster(4, 1)
    today = plan_sections(values(), some, OPTIONS)
    made = what_if.what_ifs(values(), some, OPTIONS, today, ["network x 8", "one host less", "network x 1"])
    quick, fewer, same = made.report.what_ifs
    assert fewer.change == f"one host less ({what_if.slowest_host(some)})"
    assert quick.found.seconds <= quick.kept < today.report.chosen.seconds
    assert fewer.kept is None and fewer.found.seconds > today.report.chosen.seconds
    assert same.found.seconds == pytest.approx(today.report.chosen.seconds) == pytest.approx(same.kept)
    assert [answer["kept_seconds"] for answer in made.json()["what_if"]] == [quick.kept, None, same.kept]


# --- More hosts -------------------------------------------------------------------------------------------------------


def test_each_number_of_hosts_has_its_own_plan():
    some, options = cluster(2, 2, seed=None), dataclasses.replace(OPTIONS, tensor=(1,), micro_batch=(4, 8))
    made = hosts.scaling(values(), some, options, hosts.ScalingOptions((2, 1, 4), tokens=2e9, price=3.0))
    scaling = made.report.scaling
    assert [size.hosts for size in scaling.sizes] == [1, 2, 4] and not scaling.missing
    for size in scaling.sizes:
        alone = plan_sections(values(), resized(some, size.hosts), options).report
        assert size.found.seconds == pytest.approx(alone.chosen.seconds) and size.devices == 2 * size.hosts
        hours = 2e9 / (64 * 1024) * size.found.seconds * size.devices / 3600
        assert scaling.device_hours(size) == pytest.approx(hours)
    assert scaling.efficiency(scaling.sizes[0]) == 1 and scaling.efficiency(scaling.sizes[-1]) < 1
    assert made.report.cluster.devices == scaling.knee.devices
    assert made.json()["hosts"][1]["cost"] == pytest.approx(3 * scaling.device_hours(scaling.sizes[1]))


def test_the_knee_is_where_a_step_up_brings_less_than_half(some_found):
    def of(*speeds: float) -> Scaling:
        sizes = tuple(Size(2**n, 8 * 2**n, some_found, speed) for n, speed in enumerate(speeds))
        return Scaling(sizes, (), 1e9)

    assert of(1, 2, 4).knee.hosts == 4
    assert of(1, 1.8, 2.2, 4).knee.hosts == 2  # the third brings 0.2 of what the first ones do
    assert of(1, 1.4).knee.hosts == 1 and of(1).knee.hosts == 1


@pytest.fixture(scope="module")
def some_found():
    return plan_sections(values(), cluster(1, 4), OPTIONS).report.chosen


def test_numbers_without_a_plan_are_told():
    made = hosts.scaling(values(), cluster(4, 4, seed=None), OPTIONS, hosts.ScalingOptions((1, 37)))
    [(count, why)] = made.report.scaling.missing
    assert count == 37 and "cannot be split" in why
    with pytest.raises(UserError, match="no number of hosts has a plan"):
        hosts.scaling(values(), cluster(4, 4, seed=None), OPTIONS, hosts.ScalingOptions((37,)))


def test_numbers_that_no_cluster_has_are_refused_before_links_are_laid_out(monkeypatch):
    assert hosts.counts(["2", " 8192", "0004"]) == (2, 8192, 4)
    for word in ("four", "0", "8193", "50000", "000000001999999", "-2", "²", "9" * 6000):
        with pytest.raises(UserError, match="--hosts must be numbers from 1 to 8,192 joined by commas, as 2,4,8, got"):
            hosts.counts(["2", word])
    some = cluster(4, 4, seed=None)
    monkeypatch.setattr(np, "where", lambda *_: pytest.fail("links were laid out"))
    with pytest.raises(UserError, match="a cluster may have 8,192 hosts, got 50,000"):
        resized(some, 50_000)
    with pytest.raises(UserError, match="a cluster may have 8,192 hosts, got 8,193"):
        hosts.scaling(values(), some, OPTIONS, hosts.ScalingOptions((2, 8193)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
@pytest.mark.parametrize("name", ["tokens", "price"])
def test_tokens_and_price_are_numbers(name, value):
    with pytest.raises(UserError, match=f"--{name} must be a number from [01] to 1e\\+"):
        hosts.ScalingOptions((2,), **{name: value})


# --- A free choice ----------------------------------------------------------------------------------------------------


def test_what_was_asked_for_has_its_price():
    some, small = cluster(2, 2), values(layers=4)
    asked = dataclasses.replace(OPTIONS, pipe=(4,), micro_batch=(8,))
    assert free_choice.freed(free_choice.freed(asked)) == free_choice.freed(asked) != asked
    plans = plan_sections(small, some, asked)
    found = free_choice.free_choice(small, some, asked, plans)
    best = plan_sections(small, some, dataclasses.replace(free_choice.freed(asked), nearby=False))
    assert found.free.seconds == pytest.approx(best.report.chosen.seconds) and found.price > 0


def test_a_free_choice_allows_what_was_asked():
    asked = PlanOptions(
        schedules=("zb_h1",), saves=("dots",), sequence_parallel="yes", virtual_stages=(3,), compress=()
    )
    free = free_choice.freed(asked)
    assert "zb_h1" in free.schedules and 3 in free.virtual_stages and free.sequence_parallel == "both"
    assert free.compress == () and free.usable_memory == asked.usable_memory


@pytest.mark.parametrize("asked", ["no", "yes"])
def test_the_micro_batches_of_slow_data_ranks_are_free_too(asked):
    options = dataclasses.replace(OPTIONS, uneven_data=asked)
    assert free_choice.freed(options).uneven_data == "both" != options.uneven_data


def test_even_micro_batches_have_their_price_on_devices_of_two_kinds():
    some = cluster(2, 1, seed=None, device=["a100-80gb", "v100"])
    asked = PlanOptions(compress=(), oracle="no", nearby=False, top=2, placed=1, uneven_data="no")
    small = values(layers=2)
    found = free_choice.free_choice(small, some, asked, plan_sections(small, some, asked))
    assert found.price > 0.02 and len(set(found.free.candidate.data_micro_batches)) > 1
    assert not found.asked.candidate.data_micro_batches
