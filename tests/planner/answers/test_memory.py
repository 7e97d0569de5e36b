"""The memory answer: its parts add up, it agrees with the search, and what it says would fit does."""

import dataclasses
import json

import numpy as np
import pytest

from planner.answers import memory
from planner.answers.memory import memory_answer, use_of
from planner.planning.inputs import search_for
from planner.planning.options import PlanOptions
from tests import mains
from tests.planner.examples import cluster, values

OPTIONS = PlanOptions(compress=(), oracle="no")


def test_the_parts_add_up_to_what_the_search_goes_by():
    search = search_for(values(), cluster(2, 4), OPTIONS)
    for i in range(0, len(search.space), 97):
        use = use_of(search, i)
        assert use.total == pytest.approx(search.bytes[i]) and use.margin > 0
        assert min(use.parts.values()) >= 0 and use.parts["weights"] > 0


def test_what_fits_is_counted_and_the_leanest_is_the_leanest():
    some = cluster(2, 4, memory=6e9)
    search, answer = search_for(values(), some, OPTIONS), memory_answer(values(), some, OPTIONS)
    assert answer.fits and 0 < answer.fitting == int((search.bytes <= search.limit).sum()) < answer.candidates
    assert answer.uses["leanest"].total == pytest.approx(search.bytes.min())
    quickest = answer.uses["quickest by its bound"]
    assert quickest.total <= answer.limit and quickest.bound == pytest.approx(search.bounds.min())
    text = answer.text()
    assert text.startswith("answer  it fits: ") and all(len(line) <= 120 for line in text.splitlines())
    asked = [text.index(f"\n{word} ") for word in ("fewest", "change", "GB a device", "model", "cluster", "source")]
    assert asked == sorted(asked) and "optimizer state" in text


def test_the_fewest_devices_are_enough_and_half_of_them_are_not():
    wide, some = values(hidden=2048, heads=16), cluster(4, 4, memory=9e9)
    hosts, devices, use = memory_answer(wide, some, OPTIONS).fewest
    assert (
        hosts == 1
        and devices in (1, 2, 4)
        and use.candidate.data * use.candidate.pipe * use.candidate.tensor == devices
    )
    one = dataclasses.replace(cluster(1, devices, memory=9e9))
    assert memory_answer(wide, one, OPTIONS).fits
    if devices > 1:
        assert not memory_answer(wide, cluster(1, devices // 2, memory=9e9), OPTIONS).fits


def test_fewer_devices_are_not_looked_for_if_tensor_groups_span_hosts():
    answer = memory_answer(values(), cluster(4, 4), dataclasses.replace(OPTIONS, tensor_hosts=2))
    assert answer.fits and "not looked for, since groups span hosts" in answer.text()


def test_ranks_that_train_alone_share_no_optimizer_state():
    asked = values() | {"outer": {"every": 50}}
    told = memory_answer(asked, cluster(2, 4), dataclasses.replace(OPTIONS, data=(8,))).text()
    assert "split (ZeRO-1)" not in told and "whole" in told


def test_if_nothing_fits_what_would_is_told_and_does():
    some = cluster(1, 4, memory=4e9)
    answer = memory_answer(values(hidden=4096, heads=16, layers=24), some, OPTIONS)
    assert not answer.fits and answer.fewest is None and list(answer.uses) == ["leanest"]
    assert "it does not fit" in answer.text()
    told = {change.what: change for change in answer.changes}
    assert told["b200 instead"].bytes <= told["b200 instead"].limit
    other = memory_answer(values(hidden=4096, heads=16, layers=24), cluster(1, 4, device="b200"), OPTIONS)
    assert other.uses[next(iter(other.uses))].total <= other.limit


def test_more_hosts_are_told_as_far_as_a_cluster_has_them_and_take_no_memory(monkeypatch):
    some = cluster(2, 4, memory=4e9)
    monkeypatch.setattr(memory, "MOST_HOSTS", 8)
    answer = memory_answer(values(hidden=4096, heads=16, layers=24), some, OPTIONS)
    told = {change.what for change in answer.changes}
    assert {"2 times as many hosts", "4 times as many hosts"} <= told and "8 times as many hosts" not in told
    links = np.broadcast_to(np.float64(1), (4096, 4096))
    names = tuple(map(str, range(4096)))
    large = dataclasses.replace(
        some, hosts=names, kinds=some.kinds[:1] * 4096, memory=np.full(4096, 4e9), alpha=links, samples=links[None]
    )
    twice = memory._several(large, 2)
    assert twice.alpha.shape == (8192, 8192) and twice.samples.shape == (1, 8192, 8192)
    assert twice.alpha.strides == (0, 0) and twice.samples.strides[1:] == (0, 0) and len(set(twice.hosts)) == 8192


def test_a_change_of_the_plan_saves_what_it_says():
    some = cluster(2, 4)
    asked = dataclasses.replace(OPTIONS, saves=("residuals",), data=(4,), pipe=(2,), tensor=(1,), micro_batch=(4,))
    changes = {change.what: change for change in memory_answer(values(), some, asked).changes}
    change = next(change for what, change in changes.items() if what.startswith("--saves="))
    freed = dataclasses.replace(asked, saves=(next(what for what in changes if "saves" in what).partition("=")[2],))
    assert change.bytes < memory_answer(values(), some, asked).uses["quickest by its bound"].total
    assert change.bytes in [pytest.approx(float(size)) for size in search_for(values(), some, freed).bytes]


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_command_answers_and_says_so_by_its_exit_code(monkeypatch, capsys, tmp_path):
    path = tmp_path / "cluster.json"
    cluster(2, 4).save(path)
    main = mains.load("planner.memory.__main__")
    base = ["--model=configs/gpt2_125m.py", "--global_batch=32"]
    assert mains.run(monkeypatch, main, *base, f"--cluster={path}", "--json") in (None, 0)
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["fewest"]["devices"] == 1
    for plan in found["plans"].values():
        assert sum(plan["bytes"].values()) + plan["margin"] == pytest.approx(plan["total"])
    assert np.isfinite(found["limit_bytes"])
    small = tmp_path / "small.json"
    cluster(1, 1, memory=1e9).save(small)
    assert mains.run(monkeypatch, main, *base, f"--cluster={small}") == 1
    assert "it does not fit" in capsys.readouterr().out
    model = tmp_path / "llama"
    model.mkdir()
    rest = {"num_attention_heads": 8, "vocab_size": 32000, "max_position_embeddings": 2048}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **rest}))
    for devices, words in ((4, "1 host x 4 h100"), (16, "2 hosts x 8 h100"), (256, "32 hosts x 8 h100")):
        assert mains.run(monkeypatch, main, f"--model={model}", f"--devices={devices}") in (None, 0)
        told = capsys.readouterr()
        assert words in told.out
        assert "2,048 tokens a sample (--model.model.sequence) and 2,048 samples a step (--global_batch)" in told.err
    assert mains.run(monkeypatch, main, f"--model={model}", "--devices=12") == 2
    assert "--devices=12 is no multiple of the 8 devices of a host" in capsys.readouterr().err
