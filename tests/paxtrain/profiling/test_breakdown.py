"""The breakdown of a step: the part of each instruction, the attribution of time, and known times found again."""

import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain import profile
from paxtrain.model import transformer
from paxtrain.profiling.breakdown import (
    LINKS,
    OVER_TENSOR,
    PARTS,
    SCOPES,
    Breakdown,
    attribute,
    axes,
    breakdown,
    by_stage,
    part,
    parts,
    table,
)
from paxtrain.profiling.trace import INPUT, Part, Span
from paxtrain.xla import hlo
from tests import small

WORK, WAIT, SEND = Part("forward", False), Part("pipeline", True), Part("data", True)


def config(mesh, schedule="1f1b", compress=None):
    return small.config(
        mesh, (8 * mesh[0], 4), model={"layers": 2}, pipeline={"schedule": schedule}, compress=compress or {}
    )


def mesh_of(*sizes):
    return small.mesh_of(config(sizes))


def stepper(trained, compiled):
    """Return a function that calls the compiled step and keeps its state."""
    state = trained.init(0)
    tokens = jax.device_put(np.zeros(trained.abstract_batch().shape, np.int32), trained.batch_sharding)

    def run():
        nonlocal state
        state, metrics = compiled(state, tokens)
        return metrics

    return run


def assert_adds_up(found: Breakdown):
    assert set(found.seconds) == set(PARTS) and set(found.hidden) == set(LINKS)
    for values in [*found.seconds.values(), *found.hidden.values()]:
        assert values.shape == (len(found.devices),) and (values >= 0).all()
    np.testing.assert_allclose(sum(found.seconds.values()), found.total, rtol=1e-9)
    assert 0 < found.seconds["idle"].max() < found.total


# --- What an instruction counts as ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), {"tensor"}),
        (((0, 2), (1, 3), (4, 6), (5, 7)), {"pipe"}),
        (((0, 4), (1, 5)), {"data"}),
        (((0, 3),), {"pipe", "tensor"}),
        (((0,), (7,)), set()),
        ((), {"data", "pipe", "tensor"}),
    ],
)
def test_axes_are_those_along_which_a_groups_devices_differ(groups, expected):
    assert axes(groups, mesh_of(2, 2, 2)) == expected


@pytest.mark.parametrize(
    ("opcode", "name", "groups", "expected"),
    [
        ("fusion", "jit(_step)/shard_map/while/body/forward/jvp()/mul", (), Part("forward", False)),
        ("fusion", "jit(_step)/shard_map/forward/head/while/body/jvp()/exp", (), Part("head", False)),
        ("dot", "jit(_step)/jvp(forward)/dot_general", (), Part("forward", False)),
        ("fusion", "jit(_step)/shard_map/forward_looking/mul", (), Part("other", False)),
        ("copy", "", (), Part("other", False)),
        ("collective-permute-start", "jit(_step)/shard_map/ppermute", ((0, 2), (4, 6)), Part("pipeline", True)),
        ("collective-permute", "jit(_step)/embedding/ppermute", ((0, 2), (2, 0)), Part("embedding", True)),
        ("all-reduce", "jit(_step)/backward/psum", ((0, 1), (2, 3)), Part("tensor/backward", True)),
        ("all-reduce", "jit(_step)/forward/head/psum", ((0, 1), (2, 3)), Part("tensor/head", True)),
        ("all-reduce", "jit(_step)/reduce_gradients/psum", ((0, 1), (2, 3)), Part("tensor/backward", True)),
        ("all-gather", "jit(_step)/gather_weights/all_gather", ((0, 4), (1, 5)), Part("gather", True)),
        ("all-reduce", "jit(_step)/compression/psum", ((0, 4), (1, 5)), Part("data", True)),
        ("reduce-scatter", "", ((0, 4), (1, 5)), Part("data", True)),
        ("all-reduce", "jit(_step)/sync/psum", ((0, 4), (1, 5)), Part("sync", True)),
        ("all-reduce", "jit(_step)/optimizer/reduce_sum", ((0, 1), (2, 3)), Part("sync", True)),
        ("all-to-all", "jit(_step)/optimizer/muon/sharding_constraint", ((0, 4), (1, 5)), Part("data", True)),
        ("all-reduce", "", (), Part("sync", True)),
    ],
)
def test_a_collective_counts_by_its_axis_and_all_else_by_the_innermost_scope(opcode, name, groups, expected):
    assert part(hlo.Instruction(opcode, name, groups), mesh_of(2, 2, 2)) == expected


# --- How instants are shared out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "seconds", "hidden"),
    [
        ([], {"idle": 10}, {}),
        ([(-5, 2, WORK), (2, 3, WAIT), (9, 20, WORK)], {"forward": 3, "pipeline": 1, "idle": 6}, {}),
        ([(1, 7, WAIT), (2, 4, WORK)], {"forward": 2, "pipeline": 4, "idle": 4}, {"pipeline": 2}),
        ([(0, 4, WAIT), (2, 4, SEND)], {"pipeline": 3, "data": 1, "idle": 6}, {}),
        ([(0, 8, WORK), (0, 8, WORK), (0, 8, Part("head", False))], {"forward": 16 / 3, "head": 8 / 3, "idle": 2}, {}),
        ([(0, 10, WORK), (0, 10, WORK), (5, 7, SEND), (6, 8, SEND)], {"forward": 10}, {"data": 3}),
        (
            [(0, 9, INPUT), (2, 4, WORK), (3, 5, WAIT)],
            {"input": 6, "forward": 2, "pipeline": 1, "idle": 1},
            {"pipeline": 1},
        ),
    ],
)
def test_every_instant_counts_once_and_work_before_collectives(spans, seconds, hidden):
    found = attribute([Span(*span) for span in spans], 0.0, 10.0)
    assert [{k: v for k, v in counter.items() if v} for counter in found] == [pytest.approx(seconds), hidden]


# --- Whole steps ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything():
    """Return the trainer and the compiled step of a step with all parts, on all three axes."""
    compress = {
        "backward_messages": "all",
        "backward_rank": 2,
        "data_stages": "all",
        "data_rank": 2,
        "data_rank_min": 2,
    }
    trained = small.trainer(config((2, 2, 2), compress=compress))
    return trained, trained.compile_step()


# jax's names of the collectives, which are known of each besides the groups that XLA writes.
PRIMITIVES = {
    "ppermute": {"pipeline", "embedding"},
    "all_gather": {"gather", "data", "embedding"},
    "all_to_all": {"data", "embedding"},  # a reduce-scatter on CPUs
    "pmax": {"tensor/head"},
    "reduce_sum": {"sync"},
}


@pytest.mark.once
def test_every_collective_of_a_step_has_the_part_of_what_it_was_written_for(everything):
    trained, compiled = everything
    text = compiled.as_text()
    found, kinds = parts(text, trained.mesh), set()
    for name, instruction in hlo.instructions(text).items():
        if not instruction.kind:
            continue
        *scopes, primitive = instruction.op_name.split("/")
        if primitive in ("", "shard_map"):
            allowed = {"sync"}  # added by XLA: what the stages left out, gathered for the metrics
        elif "sync" in scopes:
            allowed = {"sync"}
        elif primitive in PRIMITIVES:
            allowed = PRIMITIVES[primitive]
        elif "compression" in scopes:
            allowed = {"data", "sync"}  # the factors, and the norm of what they leave out
        elif within := [scope for scope in scopes if scope in ("forward", "backward", "head")]:
            allowed = {f"tensor/{within[-1]}"}
        else:
            allowed = {"data"}  # means of what is neither sharded nor compressed
        assert found[name].link and found[name].name in allowed, (name, instruction)
        assert found[name].name != "embedding" or "embedding" in scopes
        assert found[name].name != "gather" or "gather_weights" in scopes
        kinds.add(found[name].name)
    assert kinds == set(LINKS)
    assert {p.name for p in found.values() if p and not p.link} == {*SCOPES, "other"}


def test_all_parts_of_a_step_are_there_and_add_up_and_the_head_is_the_last_stages(everything):
    trained, compiled = everything
    found = breakdown(stepper(trained, compiled), compiled, trained.mesh, steps=2)
    assert_adds_up(found)
    assert found.devices == tuple(jax.devices())
    assert {name for name, values in found.seconds.items() if not values.any()} == {"input"}
    head = found.seconds["head"].reshape(2, 2, 2)
    # The least: a thread that had to wait for a core took as long as a head.
    assert head[:, 1].min() > 5 * head[:, 0].min()


def test_what_a_mesh_does_not_have_takes_no_time():
    settings = config((2, 1, 1), "eager_1f1b")
    found = profile.profile(settings, small.trainer(settings).mesh, steps=1)
    assert_adds_up(found)
    absent = {name for name, values in found.seconds.items() if not values.any()}
    assert absent == {"pipeline", *OVER_TENSOR, "compression", "input"}
    seconds, _ = by_stage(found, small.trainer(settings).mesh)
    assert seconds["forward"] == pytest.approx([found.seconds["forward"].mean()])


def test_the_table_has_shares_of_the_step_and_no_part_that_takes_no_time(snapshot):
    seconds = dict.fromkeys(PARTS, np.zeros(2)) | {"forward": np.array([0.5, 1.0]), "backward": np.array([1.25, 1.0])}
    seconds |= {"pipeline": np.array([0.25, 0.0])}
    hidden = dict.fromkeys(LINKS, np.zeros(2)) | {"data": np.array([0.125, 0.0])}
    snapshot("breakdown.txt", table(seconds, hidden))


@pytest.mark.once
def test_a_head_that_sleeps_shows_in_the_head_and_where_the_other_stage_waits_for_it(monkeypatch):
    pause, head = 0.5, transformer.head_gradients  # long beside what another program on this machine takes at a time

    def sleep(x):
        time.sleep(pause)
        return np.zeros_like(x)

    def slow(final_norm, table, y, *rest):
        first = jax.lax.stop_gradient(y.reshape(-1)[0])
        late = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), first)
        return head(final_norm, table, y + late, *rest)

    monkeypatch.setattr(transformer, "head_gradients", slow)
    trained = small.trainer(config((1, 2, 1)))
    compiled = trained.compile_step()
    found = breakdown(stepper(trained, compiled), compiled, trained.mesh, steps=1)
    assert_adds_up(found)
    slept = pause * trained.config.micro_batches
    first, last = ({name: values[stage] for name, values in found.seconds.items()} for stage in (0, 1))
    assert last.pop("head") > slept * 0.99 and first.pop("pipeline") > slept / 2
    assert sum(first.values()) < slept and sum(last.values()) < slept / 2
    assert first["data"] == first["tensor/backward"] == first["compression"] == 0


def test_the_command_refuses_a_mesh_of_another_size():
    root = pathlib.Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "paxtrain.profile", "--config=configs/tiny.py", "--cpu_devices=3"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: mesh.data=2 x mesh.pipe=2 x mesh.tensor=2 is 8 devices, but "
    )


def test_a_program_that_did_not_run_is_refused(everything):
    trained, compiled = everything
    with pytest.raises(ValueError, match="no instruction of the program on device 0"):
        breakdown(lambda: jnp.ones(3) + 1, compiled, trained.mesh, steps=1)
