"""Exports as the trainers that they are for understand them: their own parsers, in environments apart.

`make exports` makes the environments and runs these tests. Without an environment its tests are skipped.
"""

import dataclasses
import json
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.environment import Environment
from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, ModelConfig, PipelineConfig
from paxtrain.config.options import OptionValues
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion
from paxtrain.model import transformer
from planner.export import maxtext, megatron, torchtitan
from planner.export.exported import USUAL_LLAMA3
from tests.planner.export import cases
from tests.planner.export.cases import DEVICES, GPT2, LLAMA, Case

pytestmark = pytest.mark.slow
SCRIPTS = pathlib.Path(__file__).with_name("parsers")
TRAINERS = {"megatron": megatron, "torchtitan": torchtitan, "maxtext": maxtext}
ENVIRONMENTS = {name: Environment(SCRIPTS / f"parse_{name}.py") for name in TRAINERS}
FILES = {"megatron": "megatron.args", "torchtitan": "torchtitan_plan.py", "maxtext": "maxtext.args"}
ALL = [*cases.cases(LLAMA), *cases.cases(GPT2)]
LLAMAS = ALL[: cases.COUNT]  # torchtitan has no GPT-2


def ask(trainer: str, texts: list[str], folder: pathlib.Path, devices: int = DEVICES, arrays=()) -> list[dict]:
    """Return what a trainer's parser makes of each text, or of its model with a file of arrays, in its own process."""
    environment = ENVIRONMENTS[trainer]
    if environment.python is None:
        needs = ", ".join(environment.dependencies)
        pytest.skip(f"there is no environment with {needs} in {environment.folder}; make exports makes it")
    cases = [{"text": text, "devices": devices} for text in texts]
    with_arrays = [case | {"arrays": str(path)} for case, path in zip(cases, arrays)]
    (folder / "cases.json").write_text(json.dumps(with_arrays or cases))
    command = [environment.python, "-W", "ignore", environment.script, folder / "cases.json", folder / "answers.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "answers.json").read_text())


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


def of_families(trainer: str, families: list[tuple[str, dict, dict]], folder: pathlib.Path) -> list[dict]:
    """Return what a trainer understands of models like LLAMA, of other families and with other fields."""
    texts = []
    for family, changes, _ in families:
        values = {name: OptionValues(value) if isinstance(value, dict) else value for name, value in changes.items()}
        model = dataclasses.replace(LLAMA, family=family, **values)
        texts.append(text(trainer, dataclasses.replace(ALL[0], model=model)))
    return ask(trainer, texts, folder)


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
        ("qwen2", {}, {"attention_bias": True}),
        ("qwen3", {"head_size": 64}, {"use_qk_norm": True}),
    ]
    for found, (family, changes, own) in zip(of_families("maxtext", families, tmp_path), families, strict=True):
        assert found["own"] == {**usual, "rope_max_timescale": LLAMA.rope_theta, **own}, family
        assert found["decoder"] == {"llama": "llama2"}.get(family, family)
        assert found["head_dim"] == changes.get("head_size", 128) and found["activations"] == ["silu", "linear"]


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


# --- Numbers ----------------------------------------------------------------------------------------------------------

SMALL = ModelConfig(vocab_size=256, layers=3, hidden=64, heads=4, sequence=32, dtype="float32")
SMALL_LLAMA = dataclasses.replace(SMALL, family="llama", kv_heads=2, intermediate=96, rope_theta=5e5, norm_epsilon=1e-3)
# Llama 3.1's positions; and such that small angles, those of 32 tokens, are among those that are scaled.
LLAMA3 = OptionValues({"rope_type": "llama3", "factor": 8.0, **USUAL_LLAMA3})
SHORT = OptionValues({**LLAMA3, "original_max_position_embeddings": 16})
STRETCHED = OptionValues({"rope_type": "linear", "factor": 4.0})
GEMMA = dataclasses.replace(
    SMALL_LLAMA,
    family="gemma2",
    norm_epsilon=1e-6,
    head_size=24,
    options=OptionValues(
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        }
    ),
)
SMALL_MODELS = {
    "gpt2": SMALL,
    "gpt2 with a head": dataclasses.replace(SMALL, tied_head=False),
    "llama": SMALL_LLAMA,
    "llama with a head": dataclasses.replace(SMALL_LLAMA, tied_head=False),
    "llama with documents": dataclasses.replace(SMALL_LLAMA, tied_head=False, separator=0),
    "llama 3": dataclasses.replace(SMALL_LLAMA, tied_head=False, rope_scaling=LLAMA3),
    "llama with long positions": dataclasses.replace(SMALL_LLAMA, tied_head=False, rope_scaling=SHORT),
    "llama with stretched positions": dataclasses.replace(SMALL_LLAMA, tied_head=False, rope_scaling=STRETCHED),
    "mistral": dataclasses.replace(SMALL_LLAMA, family="mistral", tied_head=False),
    "mistral with a window": dataclasses.replace(
        SMALL_LLAMA, family="mistral", options=OptionValues({"sliding_window": 6})
    ),
    "phi3": dataclasses.replace(
        SMALL_LLAMA, family="phi3", options=OptionValues({"partial_rotary_factor": 0.5, "sliding_window": 9})
    ),
    "qwen2": dataclasses.replace(SMALL_LLAMA, family="qwen2", tied_head=False),
    "qwen3": dataclasses.replace(SMALL_LLAMA, family="qwen3", head_size=24),
    "smollm3": dataclasses.replace(
        SMALL_LLAMA, family="smollm3", layers=4, options=OptionValues({"no_rope_layer_interval": 2})
    ),
    "qwen3 with a head": dataclasses.replace(SMALL_LLAMA, family="qwen3", tied_head=False),
    "phi3 without a window": dataclasses.replace(SMALL_LLAMA, family="phi3", tied_head=False),
    "olmo2": dataclasses.replace(SMALL_LLAMA, family="olmo2", tied_head=False, layers=5),
    "gemma2": dataclasses.replace(GEMMA, family="gemma2", layers=4),
    "gemma2 with stretched positions": dataclasses.replace(
        GEMMA,
        family="gemma2",
        layers=2,
        rope_scaling=STRETCHED,
        options=OptionValues({**GEMMA.options, "sliding_window": 0, "attn_logit_softcapping": 0.0}),
    ),
    "gemma3": dataclasses.replace(
        GEMMA,
        family="gemma3",
        layers=7,
        rope_scaling=STRETCHED,
        options=OptionValues({"sliding_window": 6, "query_pre_attn_scalar": 24}),
    ),
    "gemma3 with a head": dataclasses.replace(
        GEMMA,
        family="gemma3",
        layers=6,
        tied_head=False,
        options=OptionValues({"sliding_window": 5, "query_pre_attn_scalar": 16, "rope_local_base_freq": 100.0}),
        separator=0,
    ),
    "gpt2 with documents": dataclasses.replace(SMALL, tied_head=False, separator=0),
}
ALONE = Plan(MeshConfig(), PipelineConfig("1f1b", save="residuals"), BatchConfig(2, 2), CompressConfig(), ("a",), 1)


def weights_and_tokens(model: ModelConfig):
    """Return random weights, none of them zero or one, and tokens [2, S + 1]; a few of them begin documents."""
    random = np.random.default_rng(1)
    drawn = transformer.init(model, jax.random.key(0))
    params = jax.tree.map(lambda w: w + 0.1 * random.standard_normal(w.shape, np.float32), drawn)
    tokens = random.integers(1, model.vocab_size, (2, model.sequence + 1))
    tokens[:, [0, 9, 20]] = 0
    return params, tokens


def arrays_of(model: ModelConfig, path: pathlib.Path) -> pathlib.Path:
    """Write a model's tokens, their positions in their documents, and its weights by transformers' names."""
    params, tokens = weights_and_tokens(model)
    index = np.broadcast_to(np.arange(model.sequence), (2, model.sequence))
    starts = np.maximum.accumulate(np.where(tokens[:, :-1] == model.separator, index, 0), axis=1)
    np.savez(path, tokens=tokens, positions=index - starts, **conversion.weights(jax.device_get(params), model))
    return path


def difference(found: dict, model: ModelConfig, params, tokens) -> float:
    """Return the largest difference of a trainer's loss and logits from ours."""
    assert "refused" not in found, found
    loss, logits = transformer.loss(params, tokens, model), transformer.logits(params, tokens[:, :-1], model)
    assert 1 < np.abs(logits).max() < 100
    return max(abs(found["loss"] - float(loss)), np.abs(np.array(found["logits"]) - logits).max())


WRONG = {
    "megatron": [
        ("gpt2", "--norm-epsilon 1e-05", "--norm-epsilon 0.1"),
        ("llama", "--rotary-base 500000", "--rotary-base 10000"),
        ("llama 3", "--use-rope-scaling\n", ""),
        ("llama with stretched positions", "interpolation-factor 4", "interpolation-factor 2"),
        ("mistral with a window", "--window-size 5,0", "--window-size 6,0"),
        ("phi3", "--rotary-percent 0.5", "--rotary-percent 1.0"),
        ("smollm3", "--no-rope-freq 2", "--no-rope-freq 4"),
        ("qwen3", "--norm-epsilon 0.001", "--norm-epsilon 0.1"),
        ("qwen2", "--add-qkv-bias\n", ""),
    ],
    "maxtext": [
        ("gpt2", "normalize_embedding_logits=false", "normalize_embedding_logits=true"),
        ("llama", "normalize_embedding_logits=false", "normalize_embedding_logits=true"),
        ("llama with a head", "rope_max_timescale=500000", "rope_max_timescale=10000"),
        ("llama with a head", "epsilon=0.001", "epsilon=1e-05"),
        ("gpt2 with a head", "dtype=float32", "dtype=bfloat16"),
        ("gpt2 with a head", '["gelu"]', '["relu"]'),
        ("llama 3", "rope_type=llama3.1", "rope_type=default"),
        ("llama with stretched positions", "factor=4.0", "factor=1.0"),
        ("qwen3 with a head", "epsilon=0.001", "epsilon=0.1"),
        ("qwen2", "attention_bias=true", "attention_bias=false"),
        ("olmo2", "sliding_window_size=32", "sliding_window_size=8"),
        ("gemma2", "attn_logits_soft_cap=2.0", "attn_logits_soft_cap=4.0"),
        ("gemma2", "final_logits_soft_cap=3.0", "final_logits_soft_cap=6.0"),
        ("gemma2", "sliding_window_size=6", "sliding_window_size=7"),
        ("gemma3", "rope_linear_scaling_factor=4.0", "rope_linear_scaling_factor=1.0"),
        ("gemma3 with a head", "local_rope_max_timescale=100\n", "local_rope_max_timescale=-1\n"),
        ("gemma3 with a head", "model_name=gemma3-27b", "model_name=gemma3-4b"),
        ("gemma3 with a head", "sliding_window_size=5", "sliding_window_size=6"),
    ],
    "torchtitan": [
        ("llama", "theta=500000.0", "theta=10000.0"),
        ("llama", "theta=500000.0", 'theta=5e5, scaling="llama", original_max_position_embeddings=32'),
        ("llama", ".eps = 0.001", ".eps = 1e-05"),
        ("llama", 'mixed_precision_param = "float32"', 'mixed_precision_param = "bfloat16"'),
        ("llama with long positions", 'scaling="llama"', 'scaling="none"'),
        ("qwen3", "qk_norm.eps = 0.001", "qk_norm.eps = 0.1"),
        ("phi3 without a window", "theta=500000.0", "theta=10000.0"),
    ],
}


# What the trainers cannot be told of, and of what their own models run on no CPU.
UNTOLD = {
    "megatron": ["llama with long positions", "olmo2", *(name for name in SMALL_MODELS if "gemma" in name)],
    "maxtext": ["llama with long positions", "mistral with a window", "phi3", "smollm3"],
    "torchtitan": [
        "llama with stretched positions",
        "mistral with a window",
        "phi3",
        "qwen2",
        "smollm3",
        "olmo2",
        *(name for name in SMALL_MODELS if "gpt2" in name or "gemma" in name),
    ],
}
# Documents apart are left to Transformer Engine, which needs a GPU.
NOT_RUN = {"megatron": ("with documents", "Packed sequence is not supported by DotProductAttention")}


@pytest.mark.parametrize("trainer", WRONG)
def test_a_trainers_own_model_computes_what_ours_does(trainer, tmp_path):
    """Loss and logits of the same weights and tokens are ours, and are not with a setting that is wrong."""
    for name in UNTOLD[trainer]:
        with pytest.raises(UserError, match="cannot be told of"):
            TRAINERS[trainer].export(ALONE, SMALL_MODELS[name], (SMALL_MODELS[name].layers,))
    models = {name: model for name, model in SMALL_MODELS.items() if name not in UNTOLD[trainer]}
    exports = {name: TRAINERS[trainer].export(ALONE, model, (model.layers,)) for name, model in models.items()}
    texts = {name: exported.files[FILES[trainer]] for name, exported in exports.items()}
    paths = {name: arrays_of(model, tmp_path / f"{name}.npz") for name, model in models.items()}
    assert all(texts[name].count(right) == 1 for name, right, _ in WRONG[trainer])
    changed = [texts[name].replace(right, wrong) for name, right, wrong in WRONG[trainer]]
    files = [*paths.values(), *(paths[name] for name, _, _ in WRONG[trainer])]
    found = ask(trainer, [*texts.values(), *changed], tmp_path, 1, files)
    words, why = NOT_RUN.get(trainer, ("", ""))
    for (name, model), computed in zip(models.items(), found):
        if words and words in name:
            assert why in computed["refused"]
            continue
        params, tokens = weights_and_tokens(model)
        if trainer == "maxtext" and model.tied_head:
            assert any("rounds the table of a tied head to bfloat16" in words for words in exports[name].inexpressible)
            assert difference(computed, model, params, tokens) > 1e-3
            token = params["embedding"]["token"]
            rounded = jnp.stack([token, token.astype(jnp.bfloat16).astype(jnp.float32)])
            params["embedding"]["token"], model = rounded, dataclasses.replace(model, tied_head=False)
        assert difference(computed, model, params, tokens) < 2e-5, name
    for (name, _, wrong), computed in zip(WRONG[trainer], found[len(models) :], strict=True):
        assert difference(computed, models[name], *weights_and_tokens(models[name])) > 1e-2, wrong


def test_megatrons_model_has_no_other_factor_of_llama_3s_positions(tmp_path):
    """The flag is read, but not handed to the model, so another factor than 8 is refused."""
    model = SMALL_MODELS["llama 3"]
    wrong = dataclasses.replace(model, rope_scaling=OptionValues({**LLAMA3, "factor": 32.0}))
    with pytest.raises(UserError, match="model.rope_scaling.factor=32.0; 8 would work"):
        megatron.export(ALONE, wrong, (model.layers,))
    flags = megatron.export(ALONE, model, (model.layers,)).files["megatron.args"] + "--rope-scaling-factor 32.0\n"
    found = ask("megatron", [flags], tmp_path, 1, [arrays_of(model, tmp_path / "model.npz")])[0]
    assert difference(found, model, *weights_and_tokens(model)) < 2e-5
    assert difference(found, wrong, *weights_and_tokens(model)) > 2e-4
