"""Bytes that a study counts on the wire, against formulas and against the compiled step."""

import collections
import types

import pytest

from paxtrain.study import measurements
from tests import small
from tests.paxtrain.study.test_study import QUICK, configuration
from tests.paxtrain.xla import counted

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.mark.parametrize("fused", [True, False])
def test_bytes_are_those_that_formulas_say(fused):
    """The middle one of three stages has no embedding, the first one compresses over data; error feedback is free."""
    compress = {
        "backward_messages": "all",
        "embedding_sync": "fused" if fused else "unfused",
        "data_stages": "0" if fused else "none",
    }
    compress["error"] = "lazy" if fused else "none"
    config = configuration(pipe=3, compress=compress, batch={"global_batch": 8})
    found = measurements.wire_bytes(small.trainer(config))
    pipe, ranks, m, h, r = 3, 2, 2, 16, 2
    table, position, layer, norm = 384 * h * 4, 8 * h * 4, (12 * h * h + 13 * h) * 4, 2 * h * 4
    kernels = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    assert found["forward"] == ranks * (pipe - 1) * m * (2 * 8 * h * 4)
    assert found["backward"] == ranks * (pipe - 1) * m * r * (2 * 8 + h) * 4
    assert found["embedding"] == 2 * ranks * table // (ranks if fused else 1)
    # In a ring of two an all-reduce of V bytes sends V from each rank; the other collectives send half of it.
    everywhere = pipe * (layer + position + norm)
    dense = sum(n * k * 4 for n, k in kernels)
    factors = sum(r * (n + k) * 4 for n, k in kernels)
    expected = {
        "all-gather": everywhere + 2 * table,
        "reduce-scatter": everywhere + 2 * table - dense if fused else everywhere,
        "all-reduce": 2 * factors if fused else 2 * 2 * table,
    }
    for kind, size in expected.items():
        assert abs(found[kind] - size) < 1500, (kind, found[kind], size)  # losses and norms: scalars


@pytest.mark.slow
def test_the_compiled_step_sends_what_its_trace_asks_for():
    """Except losses and norms, a few numbers that XLA may send once where the trace asks twice."""
    compress = {"backward_messages": "epilogue", "embedding_sync": "fused", "data_stages": "all", "data_start": 0.0}
    config = configuration(compress=compress, batch={"global_batch": 8})
    trainer = small.trainer(config)
    sent = collections.Counter()
    for op in measurements.asked(trainer):
        sent[op.kind] += op.bytes * op.executions
    text = trainer.step.lower(trainer.abstract_state(), trainer.abstract_batch()).compile(QUICK).as_text()
    compiled = counted.collective_bytes(text)
    assert set(sent) == set(compiled)
    assert all(abs(sent[kind] - compiled[kind]) < 200 for kind in sent), (sent, compiled)


def test_bytes_of_tensor_groups_stay_inside_of_hosts():
    """Each rank of a group sends its shards, and all that the ranks share: messages, norms, positions, some biases."""
    found = {}
    for tensor in (1, 2):
        config = configuration(batch={"global_batch": 8}, mesh={"tensor": tensor}, compress={"data_stages": "none"})
        trainer = small.trainer(config)
        found[tensor] = measurements.wire_bytes(trainer)
    pipe, h, sequence = 2, 16, 8
    for kind in ("forward", "backward"):
        assert found[2][kind] == 2 * found[1][kind] > 0
    assert found[2]["embedding"] == found[1]["embedding"] > 0  # its table is split
    alike = pipe * (6 * h + 2 * h + sequence * h) * 4
    for kind in ("all-gather", "reduce-scatter"):
        assert abs(found[2][kind] - found[1][kind] - alike) < 500  # scalars
    assert found[2]["all-reduce"] < 1500  # losses and norms: scalars


@pytest.mark.parametrize(
    ("scopes", "stages"),
    [
        ("rows_21_to_21/while/body/reduce_gradients/embedding/all_to_all", {0}),
        ("while/body/reduce_gradients/embedding/while/body/all_to_all", {3}),
        ("reduce_gradients/embedding/while/body/all_gather", {0, 3}),  # of the sum over both
        # Over gloo the stages between take part, and XLA may join the collective with that of the layers.
        ("while/body/reduce_gradients/embedding/all_to_all", {1, 2, 3}),
        ("while/body/reduce_gradients/(psum:reduce_gradients/embedding/psum)", {1, 2, 3}),
        ("sync/psum", {0, 1, 2, 3}),
    ],
)
def test_a_stage_counts_the_collectives_that_it_runs(scopes, stages):
    """The first of four stages ends the step, so it alone reduces in the last row."""
    mesh, schedule = types.SimpleNamespace(pipe=4), types.SimpleNamespace(closing=(0,))
    trainer = types.SimpleNamespace(config=types.SimpleNamespace(mesh=mesh), schedule=schedule)
    assert {
        stage for stage in range(4) if measurements.runs(trainer, stage, f"jit(_step)/shard_map/{scopes}")
    } == stages
