"""The training step compiled for GPU clusters without GPUs; skipped if jax's CUDA plugin is not installed."""

import dataclasses
import functools
import importlib
import itertools
import math
import re
import time

import jax
import pytest

from paxtrain.config import Config, from_dict
from paxtrain.config.axes import AXES, TENSOR
from paxtrain.config.options import LINKED, OptionValues
from paxtrain.model import parameters
from paxtrain.parallel.compiler_options import GPU_OPTIONS
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.reduction import DataReduction
from paxtrain.parallel.step import Trainer
from paxtrain.xla import aot, hlo, module
from tests.compress_settings import compression
from tests.paxtrain.compressed import matrices
from tests.paxtrain.xla import counted
from tests.programs import gpus


def trainer(config: Config, kind: str = "h100") -> Trainer:
    devices = gpus(kind, hosts=math.ceil(config.mesh.devices / 8), per_host=min(8, config.mesh.devices))
    return Trainer(config, make_mesh(config.mesh, devices=devices))


def compiled(trained: Trainer, **options) -> jax.stages.Compiled:
    lowered = trained.step.lower(trained.abstract_state(), trained.abstract_batch())
    return aot.compile(lowered, trained.compiler_options | options)


def gpt(name: str, **sections: dict) -> Config:
    values = importlib.import_module(f"configs.{name}").get_config()
    values.update(sections)
    return from_dict(values)


def small(schedule: str = "eager_1f1b", layers: int = 4, **pipeline) -> Config:
    """Return a configuration so large that no other array has the size of a ring or a weight."""
    return gpt(
        "gpt_1_3b",
        model={"layers": layers, "hidden": 1024, "heads": 8, "sequence": 1024},
        batch={"global_batch": 32, "micro_batch": 2},
        pipeline={"schedule": schedule, **pipeline},
    )


@functools.cache
def small_step() -> tuple[Trainer, jax.stages.Compiled]:
    """Return the step of `small()`, compiled once for the tests that read it."""
    trained = trainer(small())
    return trained, compiled(trained)


# Workers that are told so (--dist loadgroup) leave all of these to one of them.
reads_small_step = pytest.mark.xdist_group("small_step")


def steady(text: str) -> list[hlo.Overlap]:
    return [transfer for transfer in hlo.overlap(text) if transfer.executions > 1]


def assert_no_large_copy(trained: Trainer, text: str) -> None:
    """Assert that no executed copy is as large as the smallest weight matrix of a layer, or has a ring's slots."""
    c = trained.config
    weight = c.model.hidden**2 // c.mesh.tensor
    message = c.batch.micro_batch * c.model.sequence * c.model.hidden
    large = [copy for copy in counted.copies(text) if copy.bytes > 2 * max(weight, message)]
    assert not large, large


def layer_bytes(trained: Trainer) -> int:
    """Return the bytes of one layer's gradients on one device."""
    leaves = jax.tree_util.tree_leaves_with_path(trained.layout.shapes)
    layers = [(path, x) for path, x in leaves if path[0].key == "layers"]
    parts = [trained.config.mesh.tensor if TENSOR in trained.layout.axis_dims(path) else 1 for path, _ in layers]
    return sum(4 * math.prod(x.shape[1:]) // part for (_, x), part in zip(layers, parts, strict=True))


def reduced_under_compute(trained: Trainer, text: str) -> float:
    """Return how many layers' gradients are reduced with matrix products between start and done.

    XLA may reduce the gradient of a table, which is final before a layer's, together with that of a layer.
    """
    table = 4 * trained.config.model.padded_vocab * trained.config.model.hidden // trained.config.mesh.tensor
    ops = [op for op in hlo.overlap(text, kind="reduce-scatter") if op.matmuls]
    return sum((op.bytes - table * (op.bytes >= table)) * op.executions for op in ops) / layer_bytes(trained)


def table_permute_bytes(trained: Trainer) -> int:
    """Return the transfers of the schedule on all links of all data and tensor ranks, and of the tied embedding."""
    c = trained.config
    groups = c.mesh.data * c.mesh.tensor
    message = math.prod(trained.compression.message.shape) * 2
    embedding = c.model.padded_vocab * c.model.hidden * 4
    shards = c.mesh.data if c.mesh.zero1 else 1
    swapped = 2 * embedding // shards * c.mesh.data if trained.layout.swaps else 0
    return trained.schedule.messages() * message * groups + swapped


@pytest.mark.parametrize("name", [pytest.param("gpt_1_3b", marks=pytest.mark.slow), "gpt_8b"])
def test_configurations_compile_and_overlap(name, capsys):
    trained = trainer(gpt(name, batch={"global_batch": 64}))
    started = time.perf_counter()
    program = compiled(trained)
    memory, text = program.memory_analysis(), program.as_text()
    seconds, gpu = time.perf_counter() - started, trained.mesh.devices.flat[0].device_kind
    state, temporary = (getattr(memory, f"{kind}_size_in_bytes") / 1e9 for kind in ("argument", "temp"))
    with capsys.disabled():
        print(f"\n{name} on 8 x {gpu}: compiled in {seconds:.0f} s, {state:.1f} GB state, {temporary:.1f} GB temporary")
    transfers = steady(text)
    assert len(transfers) == 2
    for transfer in transfers:
        assert transfer.matmuls >= trained.config.stage_layers[0], transfer
    assert counted.conditionals(text) == 0
    assert_no_large_copy(trained, text)


@pytest.mark.parametrize(
    ("schedule", "pipeline"),
    [
        pytest.param("eager_1f1b", {}, marks=reads_small_step),
        ("gpipe", {}),
        ("1f1b", {}),
        ("interleaved_1f1b", {"virtual_stages": 2}),
        ("zb_h1", {}),
        pytest.param("eager_1f1b", {"pipe_layers": "3,1"}, marks=pytest.mark.slow),
        ("1f1b", {"scan_layers": "on"}),
        pytest.param("zb_h1", {"scan_layers": "on"}, marks=pytest.mark.slow),
        pytest.param("zb_v", {"virtual_stages": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())),
)
def test_nothing_large_is_copied_and_the_bytes_are_the_tables(schedule, pipeline):
    if schedule == "eager_1f1b" and not pipeline:
        trained, program = small_step()
    else:
        trained = trainer(small(schedule, **pipeline))
        program = compiled(trained)
    text = program.as_text()
    assert_no_large_copy(trained, text)
    assert counted.conditionals(text) == 0
    assert counted.permute_bytes(text) == table_permute_bytes(trained)
    if schedule == "zb_v" or (schedule in ("1f1b", "gpipe", "zb_h1") and not pipeline):
        # Transfers lie under the loops of no or one trip in which a stage's F, B or W runs.
        transfers = steady(text)
        assert len(transfers) >= 2
        assert all(transfer.whiles >= 1 for transfer in transfers), transfers
    assert reduced_under_compute(trained, text) >= 0.99 * (min(trained.config.stage_layers) - 1)
    # Inside loops that only the stages concerned run: nothing else waits for a reduction.
    scattered = {op.computation for op in hlo.collectives(text) if op.kind == "reduce-scatter"}
    assert scattered <= {loop.body for loop in counted.whiles(text)}


def test_with_one_stage_the_last_micro_batch_reduces_layer_by_layer():
    c = small()
    trained = trainer(dataclasses.replace(c, mesh=dataclasses.replace(c.mesh, data=4, pipe=1)))
    text = compiled(trained).as_text()
    assert_no_large_copy(trained, text)
    assert reduced_under_compute(trained, text) >= 0.99 * 3


def sharded(shard: str, scan: str) -> jax.stages.Compiled:
    """Return the step of eight layers of Llama 3 8B on 8 GPUs, at two micro-batches."""
    c = gpt(
        "llama_7b",
        model={
            "layers": 8,
            "kv_heads": 8,
            "intermediate": 14336,
            "sequence": 8192,
            "vocab_size": 128256,
        },
        mesh={"data": 8, "pipe": 1, "tensor": 1, "shard": shard},
        batch={"global_batch": 16, "micro_batch": 1},
        pipeline={"scan_layers": scan},
    )
    return compiled(trainer(c))


def under_products(text: str, kind: str, table: int) -> float:
    """Return the share of the layers' bytes of a kind of collective that have matrix products from start to done.

    Args:
        text: text of the compiled program.
        kind: the kind.
        table: bytes of a table's operand.
    """
    ops = [op for op in hlo.overlap(text, kind=kind) if op.bytes < table]
    return sum(op.bytes * op.executions for op in ops if op.matmuls) / sum(op.bytes * op.executions for op in ops)


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "gathered", "reduced"), [("off", 0.95, 0.84), ("on", 0.87, 0.93)])
def test_weights_in_shards_travel_under_compute(scan, gathered, reduced):
    """Under nothing lie the first layer's gathers of F and the last layer's reductions of B, if not in a loop."""
    text, table = sharded("weights", scan).as_text(), 128256 * 4096
    assert under_products(text, "all-gather", 2 * table // 8) > gathered
    assert under_products(text, "reduce-scatter", 4 * table) > reduced


@pytest.mark.slow
def test_weights_in_shards_take_less_memory():
    temporary = [sharded(shard, "off").memory_analysis().temp_size_in_bytes for shard in ("optimizer", "weights")]
    assert temporary[1] < 0.5 * temporary[0]


@pytest.mark.slow
@reads_small_step
def test_reductions_behind_the_rows_would_be_seen_and_take_as_much_memory(monkeypatch):
    """Negative control: no matrix product lies over a reduction that comes behind the last op."""
    monkeypatch.setattr(DataReduction, "closes", lambda self, stages: False)
    late_trained = trainer(small())
    late = compiled(late_trained)
    assert reduced_under_compute(late_trained, late.as_text()) == 0
    monkeypatch.undo()
    trained, program = small_step()
    temporary = [p.memory_analysis().temp_size_in_bytes for p in (program, late)]
    assert temporary[0] <= temporary[1] + layer_bytes(trained)


@pytest.mark.slow
def test_without_selective_copies_they_would_lie_under_nothing():
    """Negative control: XLA would put the products over the copies of reduced gradients instead."""
    option = "xla_gpu_experimental_enable_selective_memcpy_overlap"
    if option not in GPU_OPTIONS:
        pytest.skip("this jax has no such option")
    trained = trainer(small())
    assert reduced_under_compute(trained, compiled(trained, **{option: False}).as_text()) == 0


@pytest.mark.slow
def test_sequence_parallelism_keeps_and_sends_less():
    """The shape is the 1.3B model's, with two layers a stage on (2,2,2)."""
    c = gpt("gpt_1_3b", batch={"global_batch": 32, "micro_batch": 2})
    c = dataclasses.replace(c, model=dataclasses.replace(c.model, layers=4))
    activations, slots = c.batch.micro_batch * c.model.sequence * c.model.hidden * 2, 4
    temporary, kinds = [], []
    for sequence in (False, True):
        trained = trainer(dataclasses.replace(c, mesh=dataclasses.replace(c.mesh, sequence_parallel=sequence)))
        program = compiled(trained)
        text = program.as_text()
        assert counted.permute_bytes(text) == table_permute_bytes(trained)
        assert all(transfer.matmuls >= 1 for transfer in steady(text))
        assert_no_large_copy(trained, text)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
        sent = [op for op in hlo.collectives(text) if op.dtype == "bf16" and op.bytes == activations]
        kinds.append({op.kind for op in sent} - {"collective-permute"})
    assert kinds == [{"all-reduce"}, {"reduce-scatter"}]
    kept = slots * 2 * 2 * activations  # of two layers the input and the middle
    assert temporary[0] - temporary[1] >= kept / c.mesh.tensor


def test_both_transfers_lie_under_unrolled_compute():
    """Gradients have all of F, whose products are 16, and activations all of B."""
    gradients, activations = steady(compiled(trainer(small(layers=8))).as_text())
    assert gradients.matmuls >= 15
    assert activations.matmuls >= 32


@pytest.mark.slow
def test_without_the_latencies_of_gpus_xla_starts_late_in_f():
    control, _ = steady(compiled(trainer(small(layers=8)), xla_gpu_enable_analytical_latency_estimator=False).as_text())
    assert control.matmuls <= 2


@pytest.mark.slow
def test_messages_between_the_rows_would_lie_under_nothing():
    """Negative control: the rows of devices that wait for transfers, compiled for GPUs."""
    trained = dataclasses.replace(trainer(small("1f1b")), overlap=False)
    transfers = steady(compiled(trained).as_text())
    assert [transfer.whiles for transfer in transfers if transfer.whiles == 0]


@pytest.mark.slow
def test_with_one_collective_in_flight_they_would_not():
    """Negative control: without the option hardly any matrix product runs beside either transfer."""
    one = {"xla_gpu_experimental_parallel_collective_overlap_limit": 1}
    assert one.keys() <= GPU_OPTIONS.keys()
    gradients, activations = steady(compiled(trainer(small()), **one).as_text())
    assert gradients.matmuls == 0
    assert activations.matmuls <= 1


@pytest.mark.slow
def test_a_ring_that_goes_through_a_conditional_or_an_unordered_loop_would_be_seen(monkeypatch):
    """Negative control of `assert_no_large_copy`: without the order of reads and writes XLA copies the rings."""
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
    trained = trainer(small("1f1b"))
    text = compiled(trained).as_text()
    with pytest.raises(AssertionError):
        assert_no_large_copy(trained, text)


# --- Compression ------------------------------------------------------------------------------------------------------


def steady_order(text: str) -> list[str]:
    """Return compression kernels, "send" and "arrived" in the order in which the steady loop's body launches them."""
    body = next(t.computation for t in hlo.overlap(text) if t.executions > 1)
    lines = iter(text.splitlines())
    marks = {"collective-permute-start(": "send", "collective-permute-done(": "arrived"}
    found = []
    for line in itertools.dropwhile(lambda line: not line.startswith(f"%{body} "), lines):
        if line.startswith("}"):
            return found
        found += re.findall(r'custom-call\(.*op_name="[^"]*/(lowrank_\w+)', line)
        found += [name for mark, name in marks.items() if mark in line]
    raise AssertionError(f"no computation {body}")


def compressed(**compress) -> Trainer:
    config = small()
    return trainer(dataclasses.replace(config, compress=compression(**compress)), "h200")


@pytest.mark.parametrize("error", [pytest.param("explicit", marks=pytest.mark.slow), "lazy"])
def test_compressed_transfers_lie_under_compute_and_the_error_update_behind_the_send(error):
    trained = compressed(backward_messages="all", error=error, implementation="triton")
    text = compiled(trained).as_text()
    wire = 16 * (2 * 1024 + 1024) * 2
    sizes = {transfer.bytes: transfer for transfer in steady(text)}
    assert sizes.keys() == {wire, 2 * 1024 * 1024 * 2}
    assert sizes[wire].matmuls >= 1
    assert sizes[2 * 1024 * 1024 * 2].matmuls >= 4
    assert_no_large_copy(trained, text)
    assert counted.conditionals(text) == 0
    update = ["lowrank_residual"] if error == "explicit" else []
    left, right = (
        ["lowrank_project", "lowrank_gram", "lowrank_left"],
        ["lowrank_backproject", "lowrank_fit", "lowrank_right"],
    )
    kernels = [*left, *right, "send", *update, "arrived", "lowrank_decode"]
    assert steady_order(text)[: len(kernels)] == kernels


def test_every_byte_of_a_compressed_step_on_gpus():
    """bfloat16 messages and factors have their real widths, unlike on CPUs, and no message has a dense copy."""
    trained = compressed(backward_messages="epilogue", backward_rank=8, data_stages="0", data_rank=64)
    text = compiled(trained).as_text()
    groups = 4
    dense = table_permute_bytes(trained)
    message, wire = 2 * 1024 * 1024 * 2, 8 * (2 * 1024 + 1024) * 2
    packed = len(trained.schedule.epilogue())
    assert packed == 1
    assert counted.permute_bytes(text) == dense - packed * groups * (message - wire)
    [sizes] = [matrices(trained.compression)]
    # The first stage's layers are reduced one after the other, within its last B.
    p = sum(n for n, _ in sizes.values()) * 64 * 4
    w = sum(k for _, k in sizes.values()) * 64 * 4
    reduced = {op.bytes for op in hlo.collectives(text) if op.kind == "all-reduce"}
    assert {p, w} <= reduced


def state_shapes(trained: Trainer) -> set[str]:
    """Return the shapes of the reducer's states of kernels on one device, as HLO has them."""
    states = jax.eval_shape(trained.compression.init)["data"]
    return {f"f32[{','.join(map(str, x.shape[len(AXES) :]))}]" for x in jax.tree.leaves(states)}


def assert_large_copies_are_of_states(trained: Trainer, text: str) -> None:
    """Assert that what is as large as a weight or a message is copied once a step at most, and is a reducer's state.

    A step that is not finite keeps the old state, so it cannot be written in place.
    """
    c = trained.config
    large = 2 * max(c.model.hidden**2 // c.mesh.tensor, math.prod(trained.compression.message.shape))
    copies = [copy for copy in counted.copies(text) if copy.bytes > large]
    assert all(copy.executions == 1 for copy in copies), copies
    assert {copy.shape for copy in copies} <= state_shapes(trained), copies


def coded(codec: str, options: dict, layers: int = 4) -> Trainer:
    """Return the trainer of a step whose gradients between stages and over data go through a codec."""
    both = {
        f"{place}_{what}": value
        for place in ("backward", "data")
        for what, value in (("codec", codec), ("options", OptionValues(options)))
    }
    return trainer(dataclasses.replace(small(layers=layers), compress=compression(**both, data_start=0.0)))


def assert_codec_sends_under_compute(trained: Trainer, text: str, exposed: int) -> None:
    """Assert that messages lie under matrix products, and so do the parts of the first stage's layers but `exposed`."""
    made, message = trained.compression.backward_codec, trained.compression.message
    sizes = {transfer.bytes: transfer for transfer in steady(text)}
    assert sizes.keys() == {made.wire_bytes(message.shape, message.dtype), 2 * math.prod(message.shape)}
    assert all(transfer.matmuls >= 1 for transfer in sizes.values())
    assert counted.conditionals(text) == 0
    assert_large_copies_are_of_states(trained, text)
    layers, reducer, shards = trained.config.stage_layers[0], trained.compression.reducer, trained.compression.shards
    # What a rank sends to itself is part of the operand.
    kernels = [(shape, shards[path]) for path, shape in trained.compression.kernels.items()]
    size = sum(reducer.wire_bytes(*one) * one[1].members / (one[1].members - 1) for one in kernels)
    sent = [op for op in hlo.overlap(text, kind="all-to-all") if op.bytes == size]
    assert len(sent) == layers
    assert sum(op.matmuls > 0 for op in sent) >= layers - exposed


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("int8", {}),
        *(pytest.param("int4", some, marks=pytest.mark.slow) for some in ({}, {"rotate": True})),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("sign", "fp8", "remainder", "topk")),
    ],
    ids=["int8", "int4", "rotated", "sign", "fp8", "remainder", "topk"],
)
def test_codecs_send_their_bytes_under_compute(codec, options):
    """XLA does not know how long a sort takes, and may leave two layers' parts of top-k under nothing."""
    trained = coded(codec, options, layers=4 if codec == "int8" else 8)
    assert_codec_sends_under_compute(trained, compiled(trained).as_text(), exposed=2 if codec == "topk" else 1)


@pytest.mark.slow
def test_both_forms_of_messages_travel_where_some_links_compress():
    """Neither of them, nor the choice between them on a stage, copies a message or makes a branch."""
    links = {f"{place}_{what}": value for place in LINKED for what, value in (("codec", "int8"), ("links", "1"))}
    config = small(layers=8)
    mesh = dataclasses.replace(config.mesh, data=1, pipe=4)
    trained = trainer(dataclasses.replace(config, mesh=mesh, compress=compression(**links)))
    text, message = compiled(trained).as_text(), trained.compression.message
    dense, eight = (
        2 * math.prod(message.shape),
        trained.compression.backward_codec.wire_bytes(message.shape, "bfloat16"),
    )
    assert sorted(transfer.bytes for transfer in steady(text)) == [eight, eight, dense, dense]
    assert counted.conditionals(text) == 0
    assert [copy for copy in counted.copies(text) if copy.bytes > dense] == []


def test_flash_attention_stays_within_documents():
    config = small(layers=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, separator=50256))
    kernels = {"fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"}
    assert kernels == set(re.findall(r'"__cudnn\$(\w+)"', compiled(trainer(config)).as_text()))


def long(sequence: int, context: int, form: str = "ring") -> Config:
    """Return two layers of Llama 3's shape, with a small vocabulary, on sequences that devices share."""
    model = {"layers": 2, "hidden": 2048, "heads": 16, "kv_heads": 4, "intermediate": 4096, "vocab_size": 4096}
    return gpt(
        "llama_1b",
        model=model | {"sequence": sequence},
        mesh={"context": context, "context_form": form, "data": 1, "pipe": 1, "tensor": 1},
        batch={"global_batch": 1, "micro_batch": 1},
        pipeline={"save": "layer_inputs"},
    )


def transfers_under_products(text: str, kind: str) -> float:
    """Return the share of a collective's bytes that travel under matrix products or attention."""
    ops = hlo.overlap(text, kind=kind)
    return sum(op.bytes * op.executions for op in ops if op.matmuls) / sum(op.bytes * op.executions for op in ops)


def test_a_rings_transfers_lie_under_attention_and_no_array_has_all_scores():
    """Sixteen times the scores of 8,192 tokens: with as many tokens a device memory stays, and so does each array."""
    temporary = []
    # Of two devices the last message, which brings gradients home, is a third of the bytes and under nothing.
    for sequence, context, share in ((8192, 2, 0.6), (32768, 8, 0.95)):
        program = compiled(trainer(long(sequence, context)))
        text, part = program.as_text(), sequence // context
        assert transfers_under_products(text, "collective-permute") > share
        assert '"__cudnn$fmhaSoftmaxBackward"' in text
        assert max(math.prod(dims) for _, dims in module.arrays(text)) < 16 * part**2
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[1] == pytest.approx(temporary[0], rel=0.05)


@pytest.mark.slow
@reads_small_step
def test_memory_does_not_grow_with_micro_batches():
    def temporary(global_batch: int, schedule: str) -> int:
        config = small(schedule)
        config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, global_batch=global_batch))
        return compiled(trainer(config)).memory_analysis().temp_size_in_bytes

    eager, few = temporary(128, "eager_1f1b"), small_step()[1].memory_analysis().temp_size_in_bytes
    assert eager <= 1.03 * few
    assert temporary(128, "gpipe") > 2 * eager


def test_muon_deals_matrices_out_with_all_to_alls_and_sends_nothing_else():
    """The momentum moves there and back, over data and over tensor, as test_muon.py asserts for CPU programs."""
    values = {"mesh": {"data": 2, "pipe": 2, "tensor": 2}, "optimizer": {"name": "muon"}}
    trained = trainer(gpt("llama_1b", model={"layers": 8, "hidden": 512, "intermediate": 1408}, **values))
    state, c = trained.abstract_state(), trained.config
    update = jax.jit(
        lambda state, loss, grads: trained.update(state, loss, grads, state.codec),
        out_shardings=(trained.state_shardings, None),
    )
    program = aot.compile(update.lower(state, jax.ShapeDtypeStruct((), "float32"), state.params))
    sent = {kind: size for kind, size in counted.collective_bytes(program.as_text()).items() if size > 1000}
    assert sent == {"all-to-all": 4 * 4 * c.model.layers * parameters.count(c.model, role="kernel") // c.mesh.devices}
