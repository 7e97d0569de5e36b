"""Streaming DiLoCo: the trainer beside the paper's algorithm in plain loops, and what its programs send."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from paxtrain.config import Config, from_dict, to_dict
from paxtrain.model import transformer
from paxtrain.outer.timetable import Timetable
from paxtrain.outer.trainer import GROUP, on_host, trainer_of
from paxtrain.parallel.mesh import make_mesh
from paxtrain.profiling.breakdown import axes
from paxtrain.xla import aot, hlo
from tests import small
from tests.paxtrain.compressed import FAST, assert_close
from tests.paxtrain.xla import counted
from tests.programs import gpus

pytestmark = pytest.mark.once
GROUPS, BATCH, RATE = 2, 4, 0.1
OF_LAYER = (1, 0, 1)  # fragment of each layer of the model below, which has smaller tables than layers


def config(every, fragments=1, compress=None, steps=100, **outer) -> Config:
    """Return a model of 3 layers on stages of 2 and of 1 layer, and groups of one data rank."""
    sgd = {"name": "sgd", "learning_rate": RATE, "schedule": "constant"}
    return small.config(
        (GROUPS, 2),
        (GROUPS * BATCH, 2),
        model={"layers": 3, "vocab_multiple": 64},
        optimizer=sgd | {"warmup_steps": 0, "weight_decay": 0.0, "clip_norm": 0.0},
        outer={"every": every, "fragments": fragments} | outer,
        compress=compress or {},
        run={"steps": steps},
    )


@functools.cache
def start():
    return jax.device_get(small.canonical(config(1).model))


def tokens(steps):
    return small.tokens(config(1), (steps,))


@functools.cache
def compiled(c: Config, fragment=None):
    made = small.trainer(c, fragment=fragment)
    return made.step.lower(made.abstract_state(), made.abstract_batch()).compile(FAST)


def trained(c: Config):
    """Return the trainer, the state after the configuration's steps, and the loss of each."""
    made, table = small.trainer(c), Timetable(c.outer, c.run.steps)
    state, losses = made.from_params(start()), []
    for number, batch in enumerate(tokens(c.run.steps), 1):
        state, metrics = compiled(c, table.under(number))(state, jax.device_put(batch, made.batch_sharding))
        losses.append(float(on_host(metrics)["loss"]))
        if (fragment := table.joined(number)) is not None:
            state = made.joined(state, np.int32(fragment))
        if (fragment := table.waited(number)) is not None:
            state = made.exchanged(state, fragment)
    return made, state, losses


# --- The paper's algorithm 2, on one device ---------------------------------------------------------------------------


def pick(fragment, fragments, inside, outside):
    """Return one tree in the places of a fragment, and another elsewhere."""

    def one(path, a, b):
        numbers = np.array(OF_LAYER) % fragments if path[0].key == "layers" else np.zeros(1, int)
        return np.where((numbers == fragment).reshape(-1, *[1] * (np.ndim(a) - 1)), a, b)

    return jax.tree_util.tree_map_with_path(one, inside, outside)


def mixed(own, shared, mix):
    return jax.tree.map(lambda a, b: mix * a + (1 - mix) * b, own, shared)


def simulated(c: Config):
    """Return the shared weights, those of each group and the mean losses, by the paper's algorithm 2 in float64.

    Only gradients are jax's, in float32. At the last step the exchange comes at once, since no step follows.
    """
    gradients = jax.jit(jax.value_and_grad(functools.partial(transformer.loss, config=c.model)))
    outer, steps = c.outer, c.run.steps
    shared = jax.tree.map(np.float64, start())
    own, momentum, losses, flying = [shared] * GROUPS, jax.tree.map(np.zeros_like, shared), [], {}
    for t in range(1, steps + 1):
        parts = np.split(tokens(steps)[t - 1], GROUPS)
        found = [gradients(jax.tree.map(np.float32, w), part) for w, part in zip(own, parts)]
        losses.append(np.mean([float(loss) for loss, _ in found]))
        own = [jax.tree.map(lambda w, g: w - RATE * np.float64(g), w, g) for w, (_, g) in zip(own, found)]
        for p in range(outer.fragments):
            if (t - (p + 1) * outer.every // outer.fragments) % outer.every == 0:
                delay = outer.overlap if t < steps else 0
                flying[t + delay] = p, delay, jax.tree.map(lambda w, *some: w - np.mean(some, axis=0), shared, *own)
        if t in flying:
            p, delay, delta = flying.pop(t)
            velocity = jax.tree.map(lambda m, d: outer.momentum * m + d, momentum, delta)
            new = jax.tree.map(lambda w, v, d: w - outer.lr * (outer.momentum * v + d), shared, velocity, delta)
            place = functools.partial(pick, p, outer.fragments)
            shared, momentum = place(new, shared), place(velocity, momentum)
            own = [place(mixed(w, shared, outer.mix if delay else 0.0), w) for w in own]
    assert not flying
    return shared, own, losses


CASES = [
    {"every": 4, "fragments": 2, "steps": 8},
    {"every": 6, "fragments": 2, "overlap": 2, "mix": 0.3, "steps": 12},
    {"every": 3, "fragments": 1, "overlap": 1, "mix": 0.5, "steps": 6},
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[0], marks=pytest.mark.slow), CASES[1], pytest.param(CASES[2], marks=pytest.mark.slow)],
    ids=["waiting", "overlapped", "whole"],
)
def test_training_is_the_papers_algorithm(case):
    c = config(**case)
    made, state, losses = trained(c)
    shared, own, right = simulated(c)
    np.testing.assert_allclose(losses, right, rtol=3e-6)
    assert_close(jax.device_get(made.canonical(state))["params"], shared, 2e-5)
    mine = jax.device_get(made.canonical(state))["outer"]["params"]
    for group, weights in enumerate(own):
        assert_close(jax.tree.map(lambda x, g=group: x[g], mine), weights, 2e-5)


def test_another_mixing_or_another_delay_would_show():
    c = config(**CASES[1])
    shared, *_ = simulated(c)
    for change in ({"mix": 0.5}, {"overlap": 1}):
        other, *_ = simulated(dataclasses.replace(c, outer=dataclasses.replace(c.outer, **change)))
        with pytest.raises(AssertionError):
            assert_close(other, shared, 2e-5)


def test_all_fragments_at_once_are_diloco_bit_for_bit():
    """With an outer step in which nothing is rounded twice, since XLA fuses other ones in other ways."""
    plain = {"every": 4, "lr": 1.0, "momentum": 0.0}
    c = config(fragments=2, **plain)
    whole, parts = small.trainer(config(**plain)), small.trainer(c)
    state, _ = compiled(c)(parts.from_params(start()), jax.device_put(tokens(1)[0], parts.batch_sharding))
    copy = jax.tree.map(lambda x: x + 0, state)
    mine, right = parts.exchanged(parts.exchanged(state, 0), 1), whole.exchanged(copy)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(mine), jax.device_get(right))


# --- What programs send -----------------------------------------------------------------------------------------------

# Bytes that a device sends around a ring, over those that it puts in: an all-gather takes a shard, the others all.
RING = {"all-reduce": 2 * (GROUPS - 1) / GROUPS, "all-gather": GROUPS - 1, "all-to-all": (GROUPS - 1) / GROUPS}


def sent_to_groups(text, made):
    """Return the bytes that a device sends to other groups by a program's text, without the 4 of skipped steps."""
    found = [op for op in hlo.collectives(text) if not op.pairs and op.bytes > 4]
    found = [op for op in found if GROUP in axes(op.groups, made.mesh)]
    return sum(RING[op.kind] * op.bytes * op.executions for op in found)


@pytest.mark.parametrize("compress", [{}, {"outer_codec": "int8", "outer_options": {"block": 32}, "min_ratio": 0.0}])
def test_an_exchange_sends_the_bytes_of_its_fragment(compress):
    made = small.trainer(config(every=4, fragments=2, compress=compress))
    whole = small.trainer(config(every=4, compress=compress))
    for fragment in (0, 1):
        function = jax.jit(
            functools.partial(made._exchanged, fragment=fragment),
            in_shardings=(made.state_shardings,),
            out_shardings=made.state_shardings,
            donate_argnums=0,
        )
        text = function.lower(made.abstract_state()).compile(FAST).as_text()
        assert sent_to_groups(text, made) == made.exchange.sent(fragment) > 0
    assert max(made.sent()) < 0.7 * sum(whole.sent()) and sum(made.sent()) == pytest.approx(sum(whole.sent()), rel=0.01)


def test_only_a_step_over_an_exchange_crosses_groups():
    c = config(**CASES[1])
    made = small.trainer(c)
    assert sent_to_groups(compiled(c).as_text(), made) == 0
    for fragment in (0, 1):
        assert sent_to_groups(compiled(c, fragment).as_text(), made) == made.exchange.sent(fragment)


def test_gpus_compute_while_a_fragment_travels():
    """Compiled for two hosts, a group on each; skipped if jax's CUDA plugin is not installed."""
    values = to_dict(config(100, fragments=2, overlap=1))
    values["model"] |= {"layers": 4, "hidden": 1024, "sequence": 1024, "dtype": "bfloat16", "attention": "xla"}
    values["mesh"] |= {"data": 4}
    values["batch"] = {"global_batch": 32, "micro_batch": 2}
    values["outer"] |= {"groups": GROUPS}
    c = from_dict(values)
    made = dataclasses.replace(trainer_of(c, make_mesh(c.mesh, devices=gpus("h100", 2, 4))), fragment=1)
    lowered = made.step.lower(made.abstract_state(), made.abstract_batch())
    text = aot.compile(lowered, made.compiler_options).as_text()
    found = [op for op in hlo.collectives(text) if op.kind == "all-reduce" and GROUP in axes(op.groups, made.mesh)]
    sizes = {op.bytes for op in found if op.bytes > 4}
    over = [op for op in hlo.overlap(text, kind="all-reduce") if op.bytes in sizes]
    assert sum(op.bytes for op in over) == made.exchange.sent(1) and all(op.matmuls for op in over)
    assert not [copy for copy in counted.copies(text) if copy.bytes >= min(sizes) // 4]
