"""The search finds the best of all candidates, keeps to memory, and makes plans that the trainer takes."""

import collections
import dataclasses
import functools
import re

import numpy as np
import pytest

from paxtrain.config import CompressConfig, from_dict
from paxtrain.config import plan as plans
from paxtrain.config.axes import more_axes
from paxtrain.config.load import nested
from paxtrain.errors import UserError
from paxtrain.schedule import table_file
from paxtrain.schedule.schedules import build, code, name_of, names
from planner.cluster.cluster import merged
from planner.cost.coded import coded
from planner.cost.step_time import Problem
from planner.planning import to_plan
from planner.search import enumeration, explain
from planner.search.budget import Budget
from planner.search.search import Found, Options, Outcome, Search
from planner.search.space import COLUMNS, Choices, Column, numbers_of
from tests.advice import advised
from tests.compress_settings import compression
from tests.planner.examples import MODEL, cluster

CLOSED = Budget(margin=False)
CHOICES = Choices(virtual_stages=(2,), data_ranks=(32,))


def search(some=None, budget: Budget = CLOSED, choices: Choices = CHOICES, batch: int = 32, **options) -> Search:
    return Search(cluster(2, 4) if some is None else some, MODEL, batch, choices, budget, Options(**options))


# Of choices that a test is not about.
FEW = {"schedules": ("1f1b", "eager_1f1b"), "saves": ("dots",)}


@functools.cache
def roomy() -> tuple[Search, Outcome]:
    """Return the search in all memory, and its outcome."""
    one = search(placed=1)
    return one, one.run()


@pytest.mark.parametrize(("nics", "looked_at"), [(1, 0.75), pytest.param(4, 0.5, marks=pytest.mark.slow)])
def test_the_best_are_the_best_of_all(nics, looked_at):
    """The bound knows little about shared NICs, so with one NIC more candidates have to be simulated."""
    some = cluster(2, 4, nics=nics)
    one = search(some, top=5, placed=1)
    every = one.simulate(np.flatnonzero(np.isfinite(one.bounds)).tolist())
    scores = sorted(found.score(one.options.gain) for found in every)
    ranked = search(some, top=5, placed=0).run().ranked
    np.testing.assert_allclose([f.score(one.options.gain) for f in ranked], scores[:5])
    placed = one.run()
    assert placed.simulated < looked_at * len(every)
    assert placed.ranked[0].seconds <= ranked[0].seconds
    for found in placed.ranked:
        assert found.placement.bound <= found.seconds * (1 + 1e-9)
        assert found.screened <= found.seconds


def test_what_certainly_takes_too_long_is_left_out():
    """If devices differ, placements on which a stage takes too long are not simulated, but no candidate is lost."""
    one = search(cluster(4, 2, device=["a100-80gb", "h100"] * 2))
    some = np.argsort(one.scores)[:60].tolist()
    every = {found.index: found for found in one.simulate(some)}
    limit = float(np.median([found.seconds for found in every.values()]))
    few = {found.index: found for found in one.simulate(some, limit)}
    assert few.keys() == every.keys()
    for i, found in every.items():
        assert few[i].seconds == found.seconds if found.seconds < limit else few[i].seconds >= limit


def test_nothing_that_does_not_fit_is_ranked():
    one, best = roomy()
    tight = search(budget=Budget(usable=float(np.quantile(one.bytes, 0.1)) / 85.1e9, margin=False), placed=1)
    outcome = tight.run()
    assert 0 < outcome.fitting < outcome.enumerated / 5
    assert all(found.memory <= tight.limit for found in outcome.ranked)
    assert outcome.ranked[0].seconds > best.ranked[0].seconds


def test_memory_is_that_of_the_split_that_was_taken():
    one = search(choices=Choices(pipe=(4,), tensor=(1,), schedules=("eager_1f1b",), saves=("dots",), backward=()))
    for found in one.run().ranked:
        fullest = dataclasses.replace(
            one.space.take(np.array([found.index])), slots=np.array([max(found.candidate.counts)])
        )
        assert found.memory == pytest.approx(float(CLOSED.bytes(one.cluster, MODEL, fullest)[0]))
    assert any(max(found.candidate.counts) > 3 for found in one.run().ranked)


def test_where_nothing_fits_the_closest_is_told():
    with pytest.raises(UserError) as error:
        search(budget=Budget(usable=0.001, margin=False)).run()
    least = roomy()[0].bytes.min() / 1e9
    assert f"needs {least:.1f} GB, {least - 0.0851:.1f} GB too much" in str(error.value)


def test_compression_must_gain_more_than_its_price():
    choices = dataclasses.replace(CHOICES, **FEW)
    fast = search(cluster(2, 4, seed=None), choices=choices, gain=0.5, placed=1).run().ranked[0].candidate
    assert fast.backward == "none" and not fast.data_rank
    inside, between = {"alpha": 1e-6, "bandwidth": 3e11}, {"alpha": 1e-6, "bandwidth": 1e9}
    some = cluster(4, 2, links={"inside": inside, "between": between})
    slow = search(some, choices=choices, gain=0.01, placed=1)
    found = slow.run().ranked[0]
    assert found.candidate.backward != "none" or found.candidate.data_rank
    assert slow.without_compression(found).seconds > 1.01 * found.seconds


def test_different_devices_get_different_shares_of_the_layers():
    one = search(
        cluster(2, 1, device=["a100-80gb", "h100"]),
        choices=Choices(pipe=(2,), schedules=("eager_1f1b",), backward=(), saves=("dots",)),
    )
    found = one.run().ranked[0]
    on = [one.cluster.kinds[h] for h in found.placement.hosts[0]]
    assert found.candidate.counts[on.index("h100")] > found.candidate.counts[on.index("a100-80gb")]


def test_the_zero_bubble_schedule_is_taken_where_it_fits(monkeypatch):
    """With four stages and few micro-batches 1f1b waits longer; the operands that W waits for take memory."""
    for name in ("BETWEEN", "ALL_BETWEEN"):
        monkeypatch.setattr(enumeration, name, 0)
    choices = Choices((1,), (4,), (2,), schedules=("1f1b", "zb_h1"), saves=("dots",), backward=(), data_ranks=())
    one = search(choices=choices)
    best, least = one.run().ranked[0], {}
    for i in range(len(one.space)):
        least[int(one.space.schedule[i])] = min(least.get(int(one.space.schedule[i]), np.inf), one.bytes[i])
    assert best.candidate.schedule == "zb_h1"
    plain, split = (least[code(name)] for name in choices.schedules)
    tight = Budget(usable=(plain + split) / 2 / float(one.cluster.memory.min()), margin=False)
    assert {f.candidate.schedule for f in search(budget=tight, choices=choices).run().ranked} == {"1f1b"}


def test_a_v_is_taken_where_the_bubble_is_long_and_links_are_fast():
    """On one host, with few micro-batches and enough layers, its bubble is the least."""
    choices = Choices((1,), (4,), (1,), schedules=names(), saves=("dots",), backward=(), data_ranks=())
    model = dataclasses.replace(MODEL, layers=32)
    best = Search(cluster(1, 4, seed=None), model, 8, choices, CLOSED, Options()).run().ranked[0]
    assert (best.candidate.schedule, best.candidate.chunks) == ("zb_v", 2)


def test_sequence_parallelism_is_taken_where_memory_or_links_are_short():
    choices = Choices(tensor=(4,), pipe=(2,), schedules=("1f1b",), sequence_parallel=(False, True))
    one = search(choices=choices)
    assert one.run().ranked[0].candidate.sequence_parallel  # hosts are far from each other
    whole, parts = (one.bytes[one.space.sequence_parallel == value].min() for value in (False, True))
    tight = Budget(usable=(whole + parts) / 2 / float(one.cluster.memory.min()), margin=False)
    assert {f.candidate.sequence_parallel for f in search(budget=tight, choices=choices).run().ranked} == {True}


@pytest.mark.once
@pytest.mark.parametrize(("sequence_parallel", "slower"), [(True, 0), pytest.param(False, 9, marks=pytest.mark.slow)])
def test_the_plan_is_the_candidate_on_its_hosts(sequence_parallel, slower):
    """On links that are ten times slower it also compresses over data, on some stages."""
    fast = cluster(4, 4)
    some = dataclasses.replace(
        fast, hosts=("d", "c", "b", "a"), named=True, samples=fast.samples / (1 + slower * ~np.eye(4, dtype=bool))
    )
    choices = Choices(tensor=(2,), pipe=(4,), data_ranks=(32,), sequence_parallel=(sequence_parallel,), **FEW)
    one = search(some, choices=choices, top=1, placed=1)
    found = one.run().ranked[0]
    step = Problem(some, MODEL, found.candidate).step(one.fabric, found.placement.hosts[None])
    compress = CompressConfig(error="explicit", factors="float32")
    plan = to_plan.decide(
        some, found.candidate, found.placement.hosts, step, MODEL, 32, compress, {"step_seconds": found.seconds}
    )
    assert (plan.hosts, plan.devices_per_host) == (("d", "c", "b", "a"), 4)
    config = plan.apply({"model": dataclasses.asdict(MODEL)})
    assert config.mesh.sequence_parallel == sequence_parallel
    assert config.stage_layers == found.candidate.counts
    assert config.micro_batches == found.candidate.micro_batches
    assert config.compress.error == "explicit"
    assert step.compressed.any() == (slower > 0)
    assert config.compress.data.stages_of(4) == tuple(np.flatnonzero(step.compressed[0]).tolist())
    devices = np.array(plan.device_order).reshape(2, 4, 2)
    np.testing.assert_array_equal(devices // 4, np.broadcast_to(found.placement.hosts[..., None], (2, 4, 2)))
    assert (np.diff(devices, axis=2) == 1).all()


def test_tensor_groups_may_span_hosts_and_the_plan_names_the_real_ones():
    some = dataclasses.replace(cluster(4, 2), hosts=("a", "b", "c", "d"), named=True)
    one = search(merged(some, 2), choices=Choices(tensor=(4,), pipe=(2,), **FEW))
    found = one.run().ranked[0]
    step = Problem(one.cluster, MODEL, found.candidate).step(one.fabric, found.placement.hosts[None])
    plan = to_plan.decide(one.cluster, found.candidate, found.placement.hosts, step, MODEL, 32, CompressConfig(), {})
    assert (plan.hosts, plan.devices_per_host) == (("a", "b", "c", "d"), 2)
    spans = {frozenset(device // 2 for device in plan.device_order[i : i + 4]) for i in (0, 4)}
    assert spans == {frozenset({0, 1}), frozenset({2, 3})}


def test_a_plan_survives_its_file(tmp_path):
    one, outcome = roomy()
    found = outcome.ranked[0]
    step = Problem(one.cluster, MODEL, found.candidate).step(one.fabric, found.placement.hosts[None])
    plan = to_plan.decide(
        one.cluster, found.candidate, found.placement.hosts, step, MODEL, 32, CompressConfig(), {"a": 1}
    )
    plans.save(plan, tmp_path / "plan.json")
    assert plans.load(tmp_path / "plan.json") == plan
    # The hosts are a count, so the trainer takes them in any order; launchers need to know how many devices each has.
    assert plan.hosts == () and plan.devices_per_host == one.cluster.devices_per_host > 1


def rows_that_change(one: Search, found: Found, changed: dict[str, str]) -> list[int]:
    """Return the candidates that differ from a plan by these columns, and else by what follows from them."""
    columns = COLUMNS | dict.fromkeys(more_axes(), Column())
    values = {name: str(columns[name].value(number)) for name, number in numbers_of(found.candidate).items()} | changed
    follows = {"micro_batches", "backward_rank"} - changed.keys()
    return [
        i
        for i in range(len(one.space))
        if all(
            str(columns[name].value(int(one.space.column(name)[i]))) == value
            for name, value in values.items()
            if name not in follows
        )
    ]


@pytest.mark.parametrize("usable", [0.2, 0.04])
def test_every_neighbour_gets_a_reason_whose_figures_hold(usable):
    """Percentages, bytes and steps are those of the candidate that is named, counted anew."""
    one = search(budget=Budget(usable=usable, margin=False), placed=1)
    found = one.run().ranked[0]
    reasons = explain.neighbours(one, found, 32)
    seen = collections.Counter()
    for line in reasons:
        what, why = line.split(": ", 1)
        rows = rows_that_change(one, found, dict(pair.split("=") for pair in what.split()))
        if fit := re.fullmatch(r"does not fit, needs ([\d.]+) GB per device, ([\d.]+) GB too much", why):
            seen["memory"] += 1
            needs, over = map(float, fit.groups())
            assert needs - over == pytest.approx(85.1 * usable, abs=0.11)
            again = CLOSED.bytes(one.cluster, MODEL, one.space.take(np.array(rows))) / 1e9
            assert again == pytest.approx([needs], abs=0.05)
            continue
        said = re.match(r"(takes|simulated) ([\d.e-]+) s( at least)?, ([\d.]+)(% more| times as long)", why)
        assert said, line
        seen[said[1]] += 1
        seconds, more = float(said[2]), float(said[4])
        longer = 1 + more / 100 if said[5] == "% more" else more
        assert seconds / found.seconds == pytest.approx(longer, abs=0.051 if longer > 2 else 0.002)
        [step] = [other.seconds for other in one.simulate(rows)]
        assert step == pytest.approx(seconds, rel=1e-3) if said[1] == "simulated" else step >= seconds * (1 - 1e-3)
    assert seen["simulated"] >= 5 and seen["takes"] and (seen["memory"] > 0) == (usable == 0.04)
    assert len({line.split(": ")[0] for line in reasons}) == len(reasons)


def test_what_a_neighbour_is_said_to_need_makes_it_a_candidate():
    model, choices = dataclasses.replace(MODEL, vocab_multiple=1), Choices(pipe=(1,), backward=(), data_ranks=(), **FEW)
    one = Search(cluster(1, 2), model, 8, choices, CLOSED, Options(placed=0))
    found = one.run().ranked[0]
    [line] = [line for line in explain.neighbours(one, found, 8) if line.startswith("data=1 tensor=2: ")]
    [change] = advised(line)
    model = from_dict(nested(change, {"model": dataclasses.asdict(model)} | nested({"mesh.tensor": 2}))).model
    assert 2 in Search(cluster(1, 2), model, 8, choices, CLOSED, Options()).space.tensor


def test_neighbours_that_take_much_longer_take_so_many_times_as_long():
    choices = Choices(tensor=(1,), pipe=(2, 4), virtual_stages=(2,), backward=(), data_ranks=())
    one = search(choices=choices, placed=1)
    found = one.run().ranked[0]
    quick = dataclasses.replace(found, placement=dataclasses.replace(found.placement, seconds=found.seconds / 50))
    reasons = explain.neighbours(one, quick, 32)
    multiples = [re.search(r" s(?: at least)?, ([\d.,]+) times as long", line) for line in reasons]
    assert any(multiples) and not any("% more" in line for line in reasons)
    assert all(float(match[1].replace(",", "")) > 2 for match in multiples if match)
    assert any("% more" in line for line in explain.neighbours(one, found, 32))


def test_between_1f1b_and_eager_what_fits_is_taken():
    """Where eager_1f1b does not fit and 1f1b takes longer, the search takes as many micro-batches as memory has."""
    inside, between = {"alpha": 1e-6, "bandwidth": 3e11}, {"alpha": 1e-5, "bandwidth": 4e9}
    some = cluster(4, 2, links={"inside": inside, "between": between})
    choices = Choices(
        pipe=(4,), tensor=(2,), micro_batch=(1,), schedules=("1f1b", "eager_1f1b"), saves=("dots",), backward=()
    )
    roomy = search(some, choices=choices)
    order = np.argsort(roomy.bytes)
    names = [name_of(i) for i in roomy.space.schedule[order]]
    assert names == ["1f1b", "1f1b:5", "1f1b:6", "eager_1f1b"]
    assert roomy.run().ranked[0].candidate.schedule == "eager_1f1b"
    seconds = {f.candidate.schedule: f.seconds for f in roomy.run().ranked}
    assert sorted(seconds, key=lambda name: -seconds[name]) == names
    limit = float(roomy.bytes[order][2:].mean()) / 85.1e9
    tight = search(some, choices=choices, budget=Budget(usable=limit, margin=False))
    chosen = tight.run().ranked[0].candidate
    assert chosen.schedule == "1f1b:6"
    pipeline = to_plan.sections(chosen, MODEL.layers, 32, CompressConfig(), np.zeros(4, bool))["pipeline"]
    assert (pipeline.schedule, pipeline.in_flight) == ("1f1b", 6)


def test_a_schedule_from_a_file_is_tried_where_its_numbers_fit(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(table_file.text(build("1f1b", 4, 16, 1, overlap=False)))
    choices = Choices(micro_batch=(2,), schedules=("1f1b", str(path)), saves=("dots",), backward=(), data_ranks=())
    one = search(choices=choices)
    mine = one.space.take(np.flatnonzero(one.space.schedule == code(str(path))))
    assert set(mine.pipe) == {4} and set(mine.micro_batches) == {16}
    found = {f.candidate.schedule: f for f in one.simulate(np.flatnonzero(one.space.pipe == 4).tolist())}
    assert found[str(path)].seconds == pytest.approx(found["1f1b"].seconds)


CODECS = compression(backward_codec="int8", data_codec="int4")
SLOW = {"inside": {"alpha": 1e-6, "bandwidth": 3e11}, "between": {"alpha": 1e-6, "bandwidth": 1e9}}


def test_plans_with_codecs_are_searched_bounded_and_made():
    """Codecs have one candidate for each kind; no bound is above what the simulator finds; plans keep their names."""
    choices = Choices(tensor=(1,), pipe=(4,), schedules=("eager_1f1b",), coded=coded(CODECS))
    one = search(cluster(8, 1, links=SLOW), choices=choices, gain=0.0)
    assert set(one.space.backward_rank.tolist()) == set(one.space.data_rank.tolist()) == {0, 1}
    every = one.simulate(np.flatnonzero(np.isfinite(one.bounds)).tolist())
    assert all(found.screened <= found.seconds * (1 + 1e-9) for found in every)
    found = min(every, key=lambda f: f.seconds)
    c = found.candidate
    assert c.backward != "none" and c.data_rank
    assert one.without_compression(found).seconds > found.seconds
    problem = Problem(one.cluster, MODEL, c)
    step = problem.step(one.fabric, found.placement.hosts[None])
    plan = to_plan.decide(one.cluster, c, found.placement.hosts, step, MODEL, 32, CODECS, {})
    assert (plan.compress.backward.codec, plan.compress.data.codec) == ("int8", "int4")
    assert plan.compress.data.stages_of(c.pipe) == tuple(np.flatnonzero(step.compressed[0]).tolist())
    assert plan.compress.data.rank == CODECS.data.rank


def test_plans_with_groups_of_data_ranks_say_so():
    """Where two groups of two data ranks or more exist; elsewhere plans compress among all data ranks."""
    grouped = compression(data_codec="int4", data_inside=2, embedding_codec="int8")
    choices = Choices(tensor=(1,), pipe=(2, 4), schedules=("eager_1f1b",), backward=(), coded=coded(grouped))
    one = search(cluster(8, 1, links=SLOW), choices=choices, gain=0.0)
    every = one.simulate(np.flatnonzero(np.isfinite(one.bounds)).tolist())
    assert all(found.screened <= found.seconds * (1 + 1e-9) for found in every)
    for data, inside in ((4, 2), (2, 1)):
        c = next(f.candidate for f in every if f.candidate.data == data and f.candidate.data_rank)
        made = to_plan.sections(c, MODEL.layers, 32, grouped, np.ones(c.pipe, bool))["compress"]
        assert c.inside == made.data.inside == inside
        assert made.embedding.codec == "int8"
    assert to_plan.sections(c, MODEL.layers, 32, grouped, np.zeros(c.pipe, bool))["compress"].data.inside == 1
    best = one.run().ranked[0]
    assert best.placement.bound <= best.seconds * (1 + 1e-9)


def test_a_plan_without_compression_names_no_codec():
    """A codec that is named would compress everything."""
    choices = Choices(tensor=(1,), pipe=(4,), backward=(), data_ranks=(), **FEW)
    plain = search(choices=choices, placed=0).run().ranked[0].candidate
    made = to_plan.sections(plain, MODEL.layers, 32, CODECS, np.zeros(4, bool))["compress"]
    assert (made.backward.chosen, made.data.chosen) == ("none", "none")
