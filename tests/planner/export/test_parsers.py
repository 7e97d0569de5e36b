"""Exports as the trainers that they are for understand them: their own parsers, in environments apart.

`make exports` makes the environments and runs these tests. Without an environment its tests are skipped.
"""

import dataclasses
import pathlib

import pytest

from paxtrain.config import BatchConfig, MeshConfig
from paxtrain.config.options import OptionValues
from planner.export.exported import USUAL_LLAMA3
from tests.planner.export import cases
from tests.planner.export.cases import GPT2, LLAMA, Case
from tests.planner.export.trainers import FILES, TRAINERS, ask

pytestmark = pytest.mark.slow
ALL = [*cases.cases(LLAMA), *cases.cases(GPT2)]
LLAMAS = ALL[: cases.COUNT]  # torchtitan has no GPT-2


def export(trainer: str, case: Case):
    """Return what the planner writes for a trainer."""
    return TRAINERS[trainer].export(case.plan, case.model, case.layers)


def text(trainer: str, case: Case) -> str:
    """Return the file that a trainer's parser reads."""
    return export(trainer, case).files[FILES[trainer]]


@pytest.fixture(scope="module")
def megatrons(tmp_path_factory):
    return ask("megatron", [text("megatron", case) for case in ALL], tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module")
def torchtitans(tmp_path_factory):
    return ask("torchtitan", [text("torchtitan", case) for case in LLAMAS], tmp_path_factory.mktemp("torchtitan"))


@pytest.fixture(scope="module")
def maxtexts(tmp_path_factory):
    return ask("maxtext", [text("maxtext", case) for case in ALL], tmp_path_factory.mktemp("maxtext"))


def offsets(layers: tuple[int, ...]) -> list[list[int]]:
    """Return first layer and number of layers of each virtual stage."""
    return [[sum(layers[:stage]), count] for stage, count in enumerate(layers)]


def check_ranks(trainer: str, case: Case, found: dict) -> None:
    """Require that each rank has, by the trainer, the position that the plan gives to the device it runs on."""
    rows = [line.split(",") for line in export(trainer, case).files["ranks.csv"].splitlines()[1:]]
    for rank, (number, host, device, *position) in enumerate(rows):
        assert int(number) == rank and list(map(int, position)) == found["positions"][rank]
        place = case.plan.hosts.index(host) * case.plan.devices_per_host + int(device)
        assert case.positions[place] == tuple(found["positions"][rank])


def check_refused(trainer: str, right: str, wrong: dict[str, str], folder: pathlib.Path) -> None:
    """Require that a trainer takes a text, and refuses wrong ones for the reasons that are their keys."""
    assert right not in wrong.values()
    first, *others = ask(trainer, [right, *wrong.values()], folder)
    assert "refused" not in first
    for why, found in zip(wrong, others, strict=True):
        assert why in found.get("refused", ""), (why, found)


def of_families(trainer: str, families: list[tuple[str, dict, dict]], folder: pathlib.Path, case=ALL[0]) -> list[dict]:
    """Return what a trainer understands of models like LLAMA, of other families and with other fields."""
    texts = []
    for family, changes, _ in families:
        values = {name: OptionValues(value) if isinstance(value, dict) else value for name, value in changes.items()}
        model = dataclasses.replace(LLAMA, family=family, **values)
        texts.append(text(trainer, dataclasses.replace(case, model=model)))
    return ask(trainer, texts, folder)


# Plans whose weights are in shards, or whose sequences devices share, and what each trainer makes of it: Megatron-LM's
# FSDP, strategy, groups, context and its exchange; torchtitan's groups, shards, gathers and context; MaxText's groups,
# shards, context and its exchange, with its attention.
SHARED: list[tuple[dict, list, list, list]] = [
    (
        {"data": 16, "shard": "weights"},
        [True, "optim_grads_params", 1, 1, ["p2p"]],
        [1, 16, "always", 1],
        [1, 16, 1, "all_gather", "autoselected"],
    ),
    (
        {"data": 8, "tensor": 2, "shard": "weights", "shard_group": 4},
        [True, "optim_grads_params", 2, 1, ["p2p"]],
        [2, 4, "always", 1],
        [2, 4, 1, "all_gather", "autoselected"],
    ),
    (
        {"data": 4, "pipe": 2, "tensor": 2, "shard": "weights"},
        [True, "optim_grads_params", 1, 1, ["p2p"]],
        [1, 4, "always", 1],
        [1, 4, 1, "all_gather", "autoselected"],
    ),
    (
        {"data": 8, "context": 2, "shard": "gradients"},
        [True, "optim_grads", 1, 2, ["p2p"]],
        [1, 8, "never", 2],
        [8, 1, 2, "ring", "cudnn_flash_te"],
    ),
    (
        {"data": 2, "pipe": 2, "context": 2, "tensor": 2, "context_form": "gather"},
        [False, "optim_grads_params", 1, 2, ["allgather"]],
        [1, 2, "never", 2],
        [2, 1, 2, "all_gather", "cudnn_flash_te"],
    ),
    (
        {"data": 2, "context": 8, "context_form": "heads", "shard": "none"},
        [False, "optim_grads_params", 1, 8, ["a2a"]],
        [2, 1, "never", 8],
        [2, 1, 8, "all_gather", "cudnn_flash_te"],
    ),
]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_shards_of_weights_and_shared_sequences_are_understood(trainer, tmp_path):
    every = []
    for values, *_ in SHARED:
        mesh = MeshConfig(**{"data": 1, "pipe": 1, "tensor": 1} | values)
        pipeline = dataclasses.replace(ALL[0].plan.pipeline, pipe_layers="", schedule="1f1b", virtual_stages=1)
        order = sorted(range(cases.DEVICES), key=lambda device: device % 4)
        plan = dataclasses.replace(ALL[0].plan, mesh=mesh, pipeline=pipeline, device_order=tuple(order))
        every.append(Case(plan, LLAMA, pipeline.layers_per_virtual_stage(LLAMA.layers, mesh.pipe)))
    answers = ask(trainer, [text(trainer, case) for case in every], tmp_path)
    column = list(TRAINERS).index(trainer) + 1
    for case, row, found in zip(every, SHARED, answers, strict=True):
        assert "refused" not in found, (found, row[0])
        assert found["shared"] == row[column], row[0]
        assert found["micro_batches"] == case.micro_batches
        check_ranks(trainer, case, found)


# --- Megatron-LM ------------------------------------------------------------------------------------------------------


def test_megatron_understands_all_plans(megatrons):
    for case, found in zip(ALL, megatrons, strict=True):
        assert "refused" not in found, (found, case)
        model, mesh = case.model, case.plan.mesh
        check_ranks("megatron", case, found)
        assert found["layers"] == offsets(case.layers) and found["micro_batches"] == case.micro_batches
        assert found["sequence_parallel"] == mesh.sequence_parallel
        assert found["zero1"] == (mesh.zero1 and mesh.data > 1) and found["reduce_dtype"] == mesh.reduce_dtype
        assert found["sizes"] == [model.layers, model.hidden, model.ffn, model.heads]
        assert found["kv_heads"] == model.key_value_heads and found["gated"] == (model.family == "llama")
        assert found["norm_epsilon"] == model.norm_epsilon and found["tied"] == model.tied_head
        assert found["dtype"] == model.dtype and found["vocab"] == model.padded_vocab
        assert found["rotary"] == (model.rope_theta if model.family == "llama" else None)
        assert found["dropout"] == [model.residual_dropout, 0] and not found["documents_apart"]
        whole = {"inputs": max(case.layers), "layer_inputs": 1}.get(case.plan.pipeline.save)
        recompute = {"dots": ["selective", None, None], "residuals": [None, None, None]}
        assert found["recompute"] == recompute.get(case.plan.pipeline.save, ["full", "uniform", whole])


OWN = {"kv_channels": 128, "add_qkv_bias": False, "qk_layernorm": False, "window_size": None, "no_rope_freq": None}
OWN |= {"rotary_percent": 1.0, "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False}


def test_megatron_understands_what_is_a_familys_own(tmp_path):
    linear, long = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0, **USUAL_LLAMA3}
    families = [
        ("qwen2", {}, {"add_qkv_bias": True}),
        ("qwen3", {"head_size": 64}, {"qk_layernorm": True, "kv_channels": 64}),
        ("mistral", {"options": {"sliding_window": 4096}}, {"window_size": [4095, 0]}),
        ("phi3", {"options": {"partial_rotary_factor": 0.75}}, {"rotary_percent": 0.75}),
        ("smollm3", {}, {"no_rope_freq": [0, 0, 0, 1] * 8}),
        ("llama", {"rope_scaling": linear}, {"rotary_seq_len_interpolation_factor": 4}),
        ("llama", {"rope_scaling": long}, {"use_rope_scaling": True}),
    ]
    for found, (family, _, own) in zip(of_families("megatron", families, tmp_path), families, strict=True):
        assert found["own"] == OWN | own, family
        assert found["gated"] and found["rotary"] == LLAMA.rope_theta


def test_megatron_refuses_what_is_wrong(tmp_path):
    case = next(c for c in ALL if "layout" in text("megatron", c) and (c.plan.mesh.pipe, c.plan.mesh.tensor) == (4, 2))
    right = text("megatron", case)
    wrong = {
        "unrecognized arguments: --micro-batchsize": right.replace("--micro-batch-size", "--micro-batchsize"),
        "world size (16) is not divisible": right.replace(
            "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 3"
        ),
        "must be divisible by pipeline_model_parallel_size": right.replace("Et", "Et|t", 1),
        "layers": right.replace(f"--num-layers {case.model.layers}", f"--num-layers {case.model.layers + 4}"),
        "must be divisible by eval_micro_batch_size": right.replace("--global-batch-size 64", "--global-batch-size 65"),
    }
    check_refused("megatron", right, wrong, tmp_path)


def test_megatron_counts_ranks_otherwise_without_the_flag(tmp_path):
    """A control: what is read of ranks depends on the flag that the export chose."""
    case = next(c for c in ALL if "mapping" in text("megatron", c) and c.plan.mesh.data > 1 and c.plan.mesh.pipe > 1)
    right = text("megatron", case)
    with_flag, without = ask("megatron", [right, right.replace("--use-tp-pp-dp-mapping\n", "")], tmp_path)
    check_ranks("megatron", case, with_flag)
    assert without["positions"] != with_flag["positions"] and without["layers"] == with_flag["layers"]


# --- torchtitan -------------------------------------------------------------------------------------------------------


def test_torchtitan_understands_all_plans(torchtitans):
    for case, found in zip(LLAMAS, torchtitans, strict=True):
        assert "refused" not in found, (found, case)
        mesh, pipeline = case.plan.mesh, case.plan.pipeline
        check_ranks("torchtitan", case, found)
        assert found["layers"] == offsets(case.layers) and found["micro_batches"] == case.micro_batches
        assert found["sequence_parallel"] == mesh.sequence_parallel
        assert found["zero1"] == (mesh.zero1 and mesh.data > 1) and found["sequence"] == case.model.sequence
        recomputed = {"dots": "SelectiveAC.Config", "residuals": None}.get(pipeline.save, "FullAC.Config")
        assert found["recompute"] == recomputed
        model = case.model
        heads = [model.heads, model.key_value_heads]
        assert found["sizes"] == [model.layers, model.hidden, model.ffn, *heads, model.padded_vocab]
        assert found["rope"] == [model.rope_theta, "none"] and found["norm_epsilon"] == [model.norm_epsilon]
        assert (found["tied"], found["dtype"]) == (model.tied_head, model.dtype)
        if mesh.pipe > 1:
            interleaved = pipeline.schedule == "interleaved_1f1b"
            assert found["schedule"] == ("Interleaved1F1B" if interleaved else "1F1B")


def test_torchtitan_understands_what_is_a_familys_own(tmp_path):
    long = {"rope_type": "llama3", "factor": 32.0, **USUAL_LLAMA3}
    complex_rope, pairs = {"kind": "ComplexRoPE.Config"}, {"kind": "CosSinRoPE.Config"}
    llama = {"head_dim": None, "qk_norm": None, "scaled": None, **complex_rope}
    families = [
        ("llama", {}, llama),
        ("llama", {"rope_scaling": long}, {**llama, "scaled": [32.0, 1, 4, 8192]}),
        ("qwen3", {"head_size": 64, "norm_epsilon": 1e-6}, {**llama, **pairs, "head_dim": 64, "qk_norm": 1e-6}),
        ("qwen3", {}, {**llama, **pairs, "head_dim": 128, "qk_norm": LLAMA.norm_epsilon}),
    ]
    for found, (family, _, own) in zip(of_families("torchtitan", families, tmp_path), families, strict=True):
        assert found["own"] == own and found["rope"][0] == LLAMA.rope_theta, family


def test_torchtitan_refuses_what_is_wrong(tmp_path):
    case = next(c for c in LLAMAS if c.plan.pipeline.pipe_layers and c.plan.mesh.pipe == 4 and len(c.layers) == 4)
    right = text("torchtitan", case)
    wrong = {
        "tensor_parallel_size": right.replace("tensor_parallel_degree", "tensor_parallel_size"),
        "Invalid parallel dims": right.replace("pipeline_parallel_degree=4", "pipeline_parallel_degree=8"),
        "CUDA graphs do not support pipeline": right.replace(
            "disable_cuda_graphs = True", "disable_cuda_graphs = False"
        ),
        "must be evenly divisible by": right.replace("microbatch_size=2", "microbatch_size=3"),
        "other parameters": right.replace("'layers.5', ", ""),
        "does not run 4 stages": right.replace('"1F1B"', '"Interleaved1F1B"'),
        "Unknown schedule": right.replace('"1F1B"', '"2F2B"'),
    }
    check_refused("torchtitan", right, wrong, tmp_path)


# --- MaxText ----------------------------------------------------------------------------------------------------------


def test_maxtext_understands_all_plans(maxtexts):
    for case, found in zip(ALL, maxtexts, strict=True):
        model, mesh, pipeline = case.model, case.plan.mesh, case.plan.pipeline
        assert "refused" not in found, (found, case)
        check_ranks("maxtext", case, found)
        assert set(found["others"]) == {1} and found["global_batch"] == case.plan.batch.global_batch
        assert found["micro_batches"] == case.micro_batches
        assert found["sequence_parallel"] == mesh.sequence_parallel
        assert found["zero1"] == (mesh.zero1 and mesh.data > 1) and found["sequence"] == model.sequence
        if mesh.pipe > 1:
            each = model.layers // len(case.layers)
            assert found["stages"] == [each, pipeline.virtual_stages, each * len(case.layers)]
            told = [words for words in export("maxtext", case).inexpressible if "layers on every stage" in words]
            assert bool(told) == (len(set(case.layers)) > 1)
        assert found["sizes"] == [model.layers, model.hidden, model.ffn, model.heads]
        assert [found["kv_heads"], found["head_dim"]] == [model.key_value_heads, model.head_dim]
        llama = model.family == "llama"
        assert found["activations"] == (["silu", "linear"] if llama else ["gelu"])
        assert found["decoder"] == ("llama2" if llama else "gpt3") and found["dtype"] == model.dtype
        assert found["norm_epsilon"] == model.norm_epsilon and found["vocab"] == model.padded_vocab
        assert found["tied"] == model.tied_head


def test_maxtext_understands_what_is_a_familys_own(tmp_path):
    linear, long = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0, **USUAL_LLAMA3}
    usual = {"attention_bias": False, "use_qk_norm": False, "rope_type": "default", "rope_linear_scaling_factor": 1.0}
    families = [
        ("llama", {}, {}),
        ("llama", {"rope_scaling": long}, {"rope_type": "llama3.1"}),
        ("mistral", {"rope_scaling": linear}, {"rope_linear_scaling_factor": 4.0}),
        ("phi3", {}, {}),
        ("qwen2", {}, {"attention_bias": True}),
        ("qwen3", {"head_size": 64}, {"use_qk_norm": True}),
    ]
    for found, (family, changes, own) in zip(of_families("maxtext", families, tmp_path), families, strict=True):
        assert found["own"] == {**usual, "rope_max_timescale": LLAMA.rope_theta, **own}, family
        assert found["decoder"] == {"llama": "llama2", "phi3": "llama2"}.get(family, family)
        assert found["head_dim"] == changes.get("head_size", 128) and found["activations"] == ["silu", "linear"]


def test_maxtext_understands_layers_that_are_not_a_llamas(tmp_path):
    """What is said of them is MaxText's, and not that of the models whose names two of them need."""
    one = next(case for case in LLAMAS if case.plan.mesh.pipe == 1)
    gemma = {"norm_epsilon": 1e-6, "tied_head": True}
    two = gemma | {"options": {"query_pre_attn_scalar": 128}}
    three = {"query_pre_attn_scalar": 256, "sliding_window": 512}
    small = gemma | {"head_size": 256, "options": three, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    families = [
        ("olmo2", {}, ["olmo3", 32, None, None, LLAMA.sequence, -1, 1.0, False, ["silu", "linear"]]),
        ("gemma2", two, ["gemma2", 16, 50.0, 30.0, 4096, -1, 1.0, True, ["gelu", "linear"]]),
        ("gemma3", small, ["gemma3", 32, None, None, 512, 10_000, 2.0, True, ["gelu", "linear"]]),
    ]
    names = ("attn_logits_soft_cap", "final_logits_soft_cap", "sliding_window_size", "local_rope_max_timescale")
    for found, (family, changes, own) in zip(of_families("maxtext", families, tmp_path, one), families, strict=True):
        factor = found["own"]["rope_linear_scaling_factor"]
        of_layers = [found["of_layers"][name] for name in names]
        said = [found["decoder"], found["sizes"][0], *of_layers, factor, found["tied"], found["activations"]]
        assert said == own, family
        assert found["sizes"][1:] == [LLAMA.hidden, LLAMA.ffn, LLAMA.heads] and found["vocab"] == LLAMA.padded_vocab
        assert found["kv_heads"] == LLAMA.kv_heads and found["head_dim"] == changes.get("head_size", 128)
        assert found["norm_epsilon"] == changes.get("norm_epsilon", LLAMA.norm_epsilon)
        assert found["own"]["rope_max_timescale"] == LLAMA.rope_theta and found["own"]["rope_type"] == "default"
    stages = of_families("maxtext", families[1:2], tmp_path)[0]["stages"]
    assert stages == [4, 1, 16]  # of layers in pairs


def test_maxtext_refuses_what_is_wrong(tmp_path):
    case = next(c for c in ALL if c.plan.mesh.pipe == 4 and c.plan.mesh.tensor == 2)
    right = text("maxtext", case)
    wrong = {
        "'ici_tensors_parallelism' not in": right.replace("ici_tensor_parallelism", "ici_tensors_parallelism"),
        "stages (4)": right.replace("num_layers_per_pipeline_stage=", "num_layers_per_pipeline_stage=1"),
        "must be divisible by the number of": right.replace(
            "num_pipeline_microbatches=16", "num_pipeline_microbatches=15"
        ),
        "ICI": right.replace("ici_data_parallelism=2", "ici_data_parallelism=4"),
    }
    check_refused("maxtext", right, wrong, tmp_path)


def test_maxtext_refuses_micro_batches_that_the_export_says_it_refuses(tmp_path):
    batch = BatchConfig(24, 2)  # six micro-batches, which four stages do not divide
    stages = [case for case in LLAMAS if (case.plan.mesh.data, case.plan.mesh.pipe) == (2, 4)]
    odd = [dataclasses.replace(case, plan=dataclasses.replace(case.plan, batch=batch)) for case in stages]
    found = ask("maxtext", [text("maxtext", case) for case in odd], tmp_path)
    for case, each in zip(odd, found, strict=True):
        assert any("refuses micro-batches" in words for words in export("maxtext", case).inexpressible)
        assert "must be divisible by the number of" in each["refused"]
