"""The computations of the experiments: placements by moving links, others' forms, rates for a share."""

import dataclasses
import subprocess

import numpy as np
import pytest

from experiments.hosts import scenario
from experiments.lab.measuring import adaptive, compression, joint, paper, placements, sooner
from experiments.lab.models import MODEL, Split
from experiments.lab.records import Records
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import LossProbe, ProbedCodec
from planner.cluster.cluster import Cluster, between
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem

ROW = {name: MODEL[name] for name in ("hidden", "heads", "sequence", "dtype")}
TIMES = {"forward": 8e-3, "backward": 24e-3, "head": 8e-3, "embedding": 1e-4, "optimizer": 1e-9}


def cluster(hosts=8, devices=1, tensor=1, hidden=64, micro_batch=4, seed=0):
    """Return hosts whose links differ, with a compute profile as the lab's devices have it."""
    rates = np.exp(np.random.default_rng(seed).uniform(np.log(20), np.log(200), (hosts, hosts)))
    row = ROW | TIMES | {"sequence": 32, "hidden": hidden, "kind": "cpu", "tensor": tensor, "micro_batch": micro_batch}
    row |= {"save": "layer_inputs", "vocab": 260}
    return Cluster(
        name="made up",
        source="",
        hosts=tuple(f"pax{i}" for i in range(hosts)),
        devices_per_host=devices,
        kinds=("cpu",) * hosts,
        memory=np.full(hosts, 1e10),
        nics=1,
        alpha=np.full((hosts, hosts), 3e-4),
        samples=rates[None] * 1e6 / 8,
        compute=(row,),
    )


@pytest.mark.parametrize("mesh", [(2, 4, 1), (4, 2, 1), (1, 8, 1)])
def test_moving_links_is_placing(mesh):
    found, split, random = cluster(), Split(mesh), np.random.default_rng(1)
    problem = Problem(found, split.config.model, split.candidate)
    still = np.arange(8).reshape(1, *mesh[:2])
    seen = []
    for _ in range(5):
        hosts = random.permutation(8).reshape(still.shape[1:])
        grid = np.ix_(hosts.ravel(), hosts.ravel())
        links = dataclasses.replace(found, samples=found.samples[0][grid][None])
        placed = float(problem.step(fabric(found), hosts[None]).total[0])
        assert float(problem.step(fabric(links), still).total[0]) == pytest.approx(placed, rel=1e-12)
        seen.append(placed)
    assert np.ptp(seen) > 0.01 * np.mean(seen)  # else any order would do


def test_others_forms_are_their_formulas():
    found, split = cluster(), Split((2, 4, 1), "1f1b")
    problem = Problem(found, split.config.model, split.candidate)
    hosts = np.arange(8).reshape(2, 4)
    f, b = 2 * TIMES["forward"], 2 * TIMES["backward"]
    half = 0.5 * TIMES["embedding"]
    stages = [f + b + 2 * half, f + b, f + b, f + b + TIMES["head"]]
    message = 4 * 32 * 64 * 4
    hop = lambda a, b: 3e-4 + message / found.bandwidth[a, b]  # noqa: E731
    pipelines = [sum(hop(a, b) + hop(b, a) for a, b in zip(row, row[1:])) for row in hosts]
    parameters = problem.layer_parameters * 4
    ring = [2 * (1 / 2) * parameters / min(found.bandwidth[a, b], found.bandwidth[b, a]) for a, b in hosts.T]
    seconds = placements.closed(problem, found, hosts)
    m, pp = 8, 4
    assert seconds["amp"] == pytest.approx((m - 1) * max(stages) + sum(stages) + max(pipelines) + max(ring))
    assert seconds["pipette"] == pytest.approx((m + pp - 1) * max(stages) + (m // pp) * max(pipelines) + ring[0])


def test_planned_placements_are_among_the_pairs_and_predicted_quickest():
    found = cluster()
    chosen = placements.pairs(found, random=3, seed=0)
    assert len(chosen) == len(placements.SPLITS) * 6
    for split in placements.SPLITS:
        problem = Problem(found, split.config.model, split.candidate)
        mine = [pair for pair in chosen if pair.split == split]
        seconds = {pair.how: float(problem.step(fabric(found), pair.hosts[None]).total[0]) for pair in mine}
        assert min(seconds, key=seconds.get) == "planned"
        assert max(seconds, key=seconds.get) == "worst"
        assert all(sorted(pair.hosts.ravel()) == list(range(8)) for pair in mine)


def test_the_rate_for_a_share_gives_that_share():
    found = cluster(devices=2, tensor=2, hidden=128, micro_batch=2)
    split = compression.SPLITS["dense"]
    rates = [compression.rate_for(found, split, share) for share in (0.3, 0.6)]
    assert rates[0] > rates[1]
    for rate, share in zip(rates, (0.3, 0.6)):
        samples = np.where(between(found), rate * 1e6 / 8, found.samples)
        at = dataclasses.replace(found, samples=samples)
        assert compression._share(at, split.config.model, split.candidate) == pytest.approx(share, abs=0.01)


def test_nothing_gains_more_than_all_that_communication_takes():
    gains = compression.paper_speedups()
    assert 1 < gains["CB"] < gains["CB+SC"] < gains["all gradients"] < 1 / (1 - compression.paper_share())


def test_traffic_has_the_proportions_of_the_papers_setting():
    """There: 16 messages of 8,192 tokens, and a table and 18 layers of width 3072 in eight parts, on four ranks."""
    (there, left_there), (here, left_here) = (paper.both()[where] for where in ("there", "here"))
    assert there.backward == 16 * 8 * 1024 * 3072 * 2
    assert there.embedding == pytest.approx(50257 * 3072 / 8 * 4 * 2.5, rel=0.02)  # padded
    assert there.data == pytest.approx(18 * 12 * 3072**2 / 8 * 4 * 1.5, rel=0.01)
    np.testing.assert_allclose(here.shares, there.shares, atol=0.02)
    assert left_there.message < left_here.message < 0.02
    assert left_here.kernels == pytest.approx(left_there.kernels, abs=0.01)


def test_kinds_remove_their_own_traffic():
    """Each kind is predicted to take the codec's bytes off, and none more than links cost."""
    found = cluster(devices=2, tensor=2, hidden=512, micro_batch=1)
    slow = compression.with_rate(found, 20.0)
    split = paper.programs("1f1b", "all")["dense"]
    assert split.config.batch.micro_batch == 1 and split.candidate.micro_batches == 16
    assert split.config.model.padded_vocab == 384 and "v128" in split.name
    most = paper.most(slow, "1f1b")
    message = 96 * 512 * 4
    assert most["CB"] == pytest.approx(3 * message * (1 - 608 / (96 * 512)) * 2 * 8 / 20e6)
    assert most["FE"] == pytest.approx(0.5 * 384 * 256 * 4 * 2 * 8 / 20e6)
    assert most["SC"] > most["CB"] > most["FE"]
    seconds = {kind: compression.predicted(slow, one) for kind, one in paper.programs("1f1b", "all").items()}
    assert seconds["dense"] > seconds["CB"] > seconds["CB+FE+SC"]


def test_the_best_codecs_are_the_quickest_within_one_percent(tmp_path):
    records = Records(tmp_path / "compression.jsonl")
    assert sooner.best(records) == compression.INT8
    times = {"dense": [3.0], compression.INT8: [2.0], compression.MIXED: [1.5], compression.GRADIENTS: [1.0]}
    records.add("share 0.5", share=0.5, rate=10.0, seconds=times)
    for kind, loss in (
        ("dense", 2.0),
        (compression.INT8, 2.0),
        (compression.MIXED, 2.01),
        (compression.GRADIENTS, 3.0),
    ):
        for seed in (0, 1):
            records.add(f"{kind} {seed}", kind=kind, seed=seed, validation=[[0, 6.0], [100, loss + seed]])
    assert sooner.best(records) == compression.MIXED


@pytest.fixture
def probed(tmp_path):
    """Return a function that writes a probe in which every codec costs as much, and returns its file."""

    def write(loss):
        places = [(place, codec) for place in ("backward", "forward", "data") for codec in ("int8", "int4")]
        codecs = tuple(ProbedCodec(place, codec, (loss, loss)) for place, codec in places)
        model = dataclasses.asdict(adaptive.BASE.config.model)
        loss_probe_file.save(LossProbe(model, (2, 4), 2, 50, 1024, (0, 1), (3.0, 3.1), codecs), tmp_path / "probe.json")
        return tmp_path / "probe.json"

    return write


def test_the_choice_by_a_probe_is_run_as_it_is_predicted(probed):
    """The plan becomes a split of the lab, which the planner predicts to take the plan's seconds."""
    slow = compression.with_rate(cluster(devices=2, tensor=2, hidden=128, micro_batch=2), 10.0)
    chosen = adaptive.choose(slow, probed(0.003), seed=0)
    compress = chosen.split.config.compress
    assert [one.place for one in chosen.codecs] == ["backward", "forward", "data"]
    assert {one.place: one.codec for one in chosen.codecs} == {
        place: compress.at(place).codec for place in ("backward", "forward", "data")
    }
    assert chosen.seconds == pytest.approx(compression.predicted(slow, chosen.split), rel=1e-9)
    assert chosen.seconds < 0.8 * compression.predicted(slow, adaptive.BASE)
    few = adaptive.choose(slow, probed(0.009), seed=0)
    assert len(few.codecs) == 1 and chosen.seconds < few.seconds
    none = adaptive.choose(slow, probed(0.02), seed=0)
    assert none.codecs == () and none.split.config == adaptive.BASE.config
    assert none.seconds == pytest.approx(compression.predicted(slow, adaptive.BASE), rel=1e-9)


def test_the_study_takes_the_command_of_the_probe(tmp_path):
    command = [*adaptive.probe_command("runs/data", 0, tmp_path), "--axes=sideways"]  # the first that is refused
    done = subprocess.run(command, cwd=scenario.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --axes must be some of backward, forward, data, embedding with --probe")


def test_processes_of_one_machine_are_one_host():
    """Without network namespaces all of the lab's hosts have one name, and are one host to the planner."""
    one = cluster(hosts=1, devices=4)
    chosen = joint.choices(joint.base(4), one, seed=0)
    assert all(split.mesh[0] * split.mesh[1] == 4 for split, _, _ in chosen.values())


def test_the_joint_choice_may_have_more_than_two_data_ranks():
    """If links are fast and messages between stages cost most, the planner takes data ranks alone."""
    fast = dataclasses.replace(cluster(), alpha=np.full((8, 8), 3e-2), samples=np.full((1, 8, 8), 1e10))
    assert joint.choices(joint.BASE, fast, seed=0)["joint"][0].mesh == (8, 1, 1)


def test_the_joint_choice_is_predicted_quickest():
    chosen = joint.choices(joint.BASE, cluster(), seed=0)
    seconds = {what: found[-1] for what, found in chosen.items()}
    assert min(seconds, key=seconds.get) == "joint"
    assert max(seconds, key=seconds.get) == "nothing"
    assert chosen["joint"][0].global_batch == joint.BASE.global_batch
