"""The memory oracle: what it compiles, what it remembers, and its message if it cannot compile."""

import dataclasses

import jax
import pytest

from paxtrain import files
from paxtrain.config import Config
from paxtrain.errors import UserError
from planner.memory import closed_form
from planner.memory import compiled as oracle
from tests import small


def config(**sections) -> Config:
    base = {
        "model": {"vocab_size": 256, "layers": 2, "hidden": 64, "heads": 2, "sequence": 32},
        "mesh": {"data": 1, "pipe": 2, "tensor": 1},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optimizer": {"warmup_steps": 0},
    }
    return small.merged(base, sections)


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paxtrain" / "oracle"


@pytest.fixture
def no_plugin(monkeypatch):
    monkeypatch.setattr(oracle, "cuda", lambda: False)


def test_without_the_plugin_the_cpu_compilation_is_named_as_such(no_plugin):
    c = config()
    found = oracle.oracle(c, "h100", hosts=1, per_host=2)
    assert found.source == f"CPU compilation, jax {jax.__version__}"
    closed, tokens = closed_form.of(c, (0, 0)), 4 * 4 * (c.model.sequence + 1)
    exact = 12 * int(closed_form.parameters(closed)[1]) + tokens
    assert 0 <= found.state - exact < 64  # and a few counters
    assert found.temporary > 0
    assert found.total >= found.state + found.temporary
    assert found.compile_seconds > 0


def test_an_answer_is_kept_until_what_it_depends_on_changes(no_plugin, monkeypatch, private_cache):
    first = oracle.oracle(config(), "h100", 1, 2)
    compiled = []
    monkeypatch.setattr(oracle, "_compile", lambda request: compiled.append(request) or first)
    same = config(optimizer={"learning_rate": 0.5}, run={"out": "elsewhere"}, pipeline={"pipe_layers": "1,1"})
    assert oracle.oracle(same, "h100", 1, 2) == first
    assert oracle.cached(oracle.CompileRequest(same, "h100", 1, 2)) == first
    assert not compiled
    other = [
        config(batch={"micro_batch": 1}),
        config(mesh={"shard": "none"}),
        config(pipeline={"save": "inputs"}),
        config(model={"hidden": 96}),
        config(optimizer={"clip_norm": 0.0}),
        *(config(outer={"every": 10} | more) for more in ({}, {"momentum": 0.0}, {"overlap": 1}, {"fragments": 2})),
    ]
    for changed in other:
        assert oracle.cached(oracle.CompileRequest(changed, "h100", 1, 2)) is None
        oracle.oracle(changed, "h100", 1, 2)
    assert len(compiled) == len(other)
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "_sources", lambda: "other code")
        assert oracle.cached(oracle.CompileRequest(config(), "h100", 1, 2)) is None
    for file in private_cache.iterdir():
        file.write_text("{damaged")
    assert oracle.cached(oracle.CompileRequest(config(), "h100", 1, 2)) is None


def test_of_overlapped_exchanges_the_step_over_the_largest_fragment_is_compiled(no_plugin):
    """Fragment 0 has the tables, which are as large as eight layers, and fragment 1 the two layers."""
    sections = {"model": {"vocab_size": 6400}, "mesh": {"data": 2, "pipe": 1}}
    outer = {"every": 10, "fragments": 2}
    waits, flies = (oracle.oracle(config(**sections, outer=outer | {"overlap": n}), "h100", 1, 2) for n in (0, 1))
    assert abs(waits.state - flies.state) < 64  # an exchange in flight is no state
    assert flies.total - waits.total > 4 * 6400 * 64


def test_with_the_plugin_kind_and_cluster_count(monkeypatch):
    monkeypatch.setattr(oracle, "cuda", lambda: True)
    files = {
        oracle._cache_file(oracle.CompileRequest(config(), *where))
        for where in [("h100", 1, 2), ("h200", 1, 2), ("h100", 2, 1), ("h100", 1, 2)]
    }
    assert len(files) == 3


def test_too_few_cpu_devices_are_one_sentence(no_plugin):
    c = config(mesh={"data": 16}, batch={"global_batch": 64})
    with pytest.raises(UserError, match=r"takes as many CPU devices, but this process has 8; .*jax_num_cpu_devices=32"):
        oracle.oracle(c, "h100", hosts=4, per_host=8)


def test_a_cluster_of_another_size_than_the_mesh_is_refused(no_plugin):
    with pytest.raises(UserError, match="there are 4"):
        oracle.oracle(config(), "h100", hosts=1, per_host=4)


def test_for_a_gpu_xla_counts_the_gpus_memory():
    if not oracle.cuda():
        pytest.skip("jax's CUDA plugin is not installed")
    jax.devices()
    found = oracle.oracle(config(), "h100", hosts=1, per_host=2)
    assert found.source == f"XLA for NVIDIA H100 80GB HBM3, jax {jax.__version__}"
    assert found.state < found.total < 100 * found.state
    with pytest.raises(UserError, match="unknown GPU 'h1000'"):
        oracle.oracle(config(), "h1000", hosts=1, per_host=2)


def test_many_go_through_processes_of_their_own_and_a_failure_is_a_sentence():
    good, bad = oracle.CompileRequest(config(), "h100", 1, 2), oracle.CompileRequest(config(), "h100", 1, 4)
    answers = oracle.oracles([bad, good], workers=1)
    assert "UserError: " in answers[0]
    assert "there are 4" in answers[0]
    assert dataclasses.replace(answers[1], compile_seconds=0) == dataclasses.replace(
        oracle.cached(good), compile_seconds=0
    )


def test_one_that_takes_too_long_is_ended_and_the_next_is_answered(no_plugin, monkeypatch):
    slow, known = (
        oracle.CompileRequest(config(), "h100", 1, 2),
        oracle.CompileRequest(config(model={"hidden": 96}), "h100", 1, 2),
    )
    answer = oracle.OracleMemory(1, 2, 3, 0.5, "of old")
    files.keep(oracle._cache_file(known), dataclasses.asdict(answer))
    assert oracle.oracles([slow, known], workers=1, seconds=0.01) == ["not compiled in 0.01 s", answer]
