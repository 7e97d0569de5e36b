"""The ledger of the 1.3B model's step stays within bounds; programs are compiled for GPUs that are not there."""

import dataclasses
import re

import pytest

from paxtrain.config import Config
from paxtrain.config.axes import UNSPLIT
from paxtrain.config.load import load_config
from paxtrain.devices.gpus import GPUS
from paxtrain.profiling import ledger
from paxtrain.xla import aot, hlo
from planner.program.cache import layer_program
from tests.paxtrain.xla import counted
from tests.programs import gpus

H100 = GPUS["h100"]


@pytest.fixture(scope="module", autouse=True)
def plugin():
    gpus()


def of(save: str) -> ledger.Ledger:
    c = ledger.one_device(load_config("gpt_1_3b", {"pipeline.save": save}))
    return ledger.read(ledger.ours(c, "h100"), c, H100)


@pytest.fixture(scope="module")
def residuals() -> ledger.Ledger:
    return of("residuals")


def test_the_step_runs_the_models_products_and_moves_little_else(residuals):
    """The bound of the bytes is what the plain step moved when the ledger was first kept."""
    assert 0.99 < residuals.executed < 1.001
    assert residuals.total < 35.2e9
    assert residuals.moved["head"] < 4.9e9
    assert residuals.moved["layers"] < 13.5e9
    assert residuals.temporary < 5.3e9
    assert residuals.mfu > 0.545


def test_saving_products_only_runs_none_of_them_twice_and_moves_little_more(residuals):
    dots = of("dots")
    assert dots.executed < 1.001
    assert dots.total < 1.15 * residuals.total
    assert dots.temporary < 4.1e9
    # What the planner reads from the layer's trace is what XLA makes of it.
    c = ledger.one_device(load_config("gpt_1_3b"))
    itself = dataclasses.replace(c.model, module="paxtrain.architectures.gpt2:GPT2")
    for save, compiled in (("residuals", residuals), ("dots", dots)):
        program = layer_program(itself, UNSPLIT, False, save)
        moved = sum(size.of(c.batch.micro_batch) for size in (program.forward.moved, program.moved))
        assert c.model.layers * moved == pytest.approx(compiled.moved["layers"], rel=0.1)


def test_the_plain_step_runs_the_same_products():
    c = ledger.one_device(load_config("gpt_1_3b"), layers=1)
    plain = ledger.read(ledger.plain(c, "h100"), c, H100)
    assert 0.99 < plain.executed < 1.001


def test_reductions_and_transfers_of_a_mesh_lie_under_products():
    sent = ledger.collectives(ledger.ours(ledger.on_mesh(load_config("gpt_1_3b"), layers=4), "h100"))
    # The rest: the table's gradient, which its exchange between the stages waits for, and one layer of each stage.
    assert sent["reduce-scatter"].hidden > 0.25
    assert sent["collective-permute"].hidden > 0.7


def small(schedule: str, tensor: int = 1) -> Config:
    config = load_config("gpt_1_3b", {"model.hidden": 512, "model.heads": 4, "model.sequence": 512})
    return ledger.scheduled(config, schedule, tensor, pipe=2)


@pytest.mark.parametrize(
    "schedule", ["zb_h1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "eager_1f1b"))]
)
def test_the_host_reads_a_condition_less_than_once_per_row(schedule):
    """What is left are the loops in which some stages gather the table and reduce their gradients over data."""
    c = small(schedule)
    found = ledger.host_time(ledger.trainer_for(c, "h100"), ledger.ours(c, "h100"))
    assert found.left <= 4
    assert found.most <= found.rows


@pytest.mark.slow
def test_without_graphs_it_would_read_several(monkeypatch):
    """Negative control: the user's flags leave loops out of graphs."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    c = small("1f1b")
    trainer = ledger.trainer_for(c, "h100")
    assert "xla_gpu_enable_command_buffer" not in trainer.compiler_options
    found = ledger.host_time(trainer, ledger.ours(c, "h100"))
    assert found.left == found.read
    assert found.most > 2 * found.rows


def test_loops_are_in_graphs_where_xla_puts_them(tmp_path):
    """The reference is XLA's own list of what the host starts, in which a graph's instructions are indented."""
    c = small("1f1b")
    trainer = ledger.trainer_for(c, "h100")
    lowered = trainer.step.lower(trainer.abstract_state(), trainer.abstract_batch())
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    text = aot.compile(lowered, trainer.compiler_options | dump).as_text()
    [file] = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    inside: list[tuple[int, str]] = []
    outside = 0
    for line in file.read_text().splitlines():
        if thunk := re.match(r"( *)\d+: k(\w+)", line):
            depth, kind = len(thunk[1]), thunk[2]
            while inside and inside[-1][0] >= depth:
                inside.pop()
            outside += kind == "While" and "CommandBuffer" not in {around for _, around in inside}
            if kind in ("While", "CommandBuffer"):
                inside.append((depth, kind))
    asked, known = hlo.host_loops(text, graphs=True), [loop for loop in counted.whiles(text) if loop.trips is not None]
    assert len(asked) <= outside <= len(asked) + len(known)
    assert len(hlo.host_loops(text)) > outside


def test_a_product_that_runs_twice_would_be_seen():
    """Negative control: with layer inputs saved, B runs the layers' forward again."""
    c = ledger.one_device(load_config("gpt_1_3b", {"pipeline.save": "layer_inputs"}), layers=2)
    c = dataclasses.replace(c, model=dataclasses.replace(c.model, hidden=512, heads=4, vocab_size=1024))
    assert ledger.read(ledger.ours(c, "h100"), c, H100).executed > 1.1
