"""Exports: flags say what the plan says, ranks lie where the plan puts them, and what cannot be said is told."""

import dataclasses
import itertools
import os
import re
import runpy
import subprocess
import sys
import types

import numpy as np
import pytest

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, ModelConfig, PipelineConfig
from paxtrain.config import plan as plans
from paxtrain.config.options import OptionValues
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from planner.export import maxtext, megatron, torchtitan
from planner.export.exported import USUAL_LLAMA3, mesh_ranks
from tests import mains
from tests.compress_settings import compression

MODEL = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, sequence=8192)
NAMES = ("a", "b", "c", "d")


def plan(order=None, pipe_layers="", **changes) -> Plan:
    """Return a plan 2 x 4 x 2 on four hosts of four devices."""
    pipeline = {"schedule": "1f1b", "pipe_layers": pipe_layers, "save": "layer_inputs", **changes}
    return Plan(
        mesh=MeshConfig(2, 4, 2),
        pipeline=PipelineConfig(**pipeline),
        batch=BatchConfig(64, 2),
        compress=CompressConfig(),
        hosts=NAMES,
        devices_per_host=4,
        device_order=tuple(range(16)) if order is None else tuple(order),
    )


def flags(text: str) -> dict[str, str]:
    """Return the values of flags, one a line."""
    return dict((line.split(" ", 1) + [""])[:2] for line in text.splitlines())


# --- Ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(("data", "pipe", "tensor"))))
def test_every_rank_runs_on_the_device_of_its_position(order):
    devices = np.random.default_rng(1).permutation(16)
    found = mesh_ranks(plan(devices), order)
    sizes = {"data": 2, "pipe": 4, "tensor": 2}
    for rank, (host, device) in enumerate(zip(found.host, found.device)):
        position, rest = {}, rank
        for axis in reversed(order):
            position[axis], rest = rest % sizes[axis], rest // sizes[axis]
        place = (position["data"] * 4 + position["pipe"]) * 2 + position["tensor"]
        assert 4 * host + device == devices[place]
        assert found.positions[rank].tolist() == [position[axis] for axis in ("data", "pipe", "tensor")]


def test_a_hostfile_is_enough_if_the_ranks_of_each_host_follow_each_other():
    straight = megatron.export(plan(), MODEL, (8, 8, 8, 8))
    # In order, a host has two stages of one data rank: so tensor, pipe, data.
    assert "--use-tp-pp-dp-mapping" in straight.files["megatron.args"]
    assert (
        straight.files["hostfile"] == "".join(f"{name} slots=4\n" for name in NAMES) and "torchrun" in straight.command
    )
    # Data ranks side by side on a host: Megatron-LM's own order.
    order = np.arange(16).reshape(4, 2, 2).transpose(1, 0, 2).ravel()
    side = megatron.export(plan(order), MODEL, (8, 8, 8, 8))
    assert "mapping" not in side.files["megatron.args"] and "hostfile" in side.files
    crossed = megatron.export(plan([0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]), MODEL, (8,) * 4)
    assert "rankfile" in crossed.files and "mpirun" in crossed.command
    assert crossed.files["rankfile"].splitlines()[1] == "rank 1=b slot=0"
    # Tensor parallelism needs a variable that validate_args asks for.
    for one in (straight, side, crossed):
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in one.command
    for one in (straight, side, crossed):
        lines = one.files["ranks.csv"].splitlines()
        assert len(lines) == 17 and len({line.split(",", 1)[1] for line in lines}) == 17


@pytest.mark.parametrize("order", [range(16), [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]])
@pytest.mark.parametrize("trainer", [megatron, torchtitan, maxtext])
def test_a_plan_that_names_no_hosts_keeps_its_placement(trainer, order):
    named = trainer.export(
        dataclasses.replace(plan(order), hosts=("host0", "host1", "host2", "host3")), MODEL, (8,) * 4
    )
    nameless = trainer.export(dataclasses.replace(plan(order), hosts=()), MODEL, (8,) * 4)
    assert nameless.files == named.files and nameless.command == named.command
    assert set(nameless.inexpressible) - set(named.inexpressible) == {
        "the plan names no hosts, so host0, host1 and so on stand for them; write yours in their place"
    }


def test_a_hostfile_has_a_host_and_its_slots_a_line_as_mpi_reads_it():
    two = dataclasses.replace(plan(), hosts=("n1", "n2"), devices_per_host=8)
    assert megatron.export(two, MODEL, (8,) * 4).files["hostfile"] == "n1 slots=8\nn2 slots=8\n"


def test_a_plan_that_does_not_know_its_hosts_is_refused():
    with pytest.raises(UserError, match="devices_per_host=0, so its ranks have no hosts; plan anew"):
        megatron.export(dataclasses.replace(plan(), hosts=(), devices_per_host=0), MODEL, (8,) * 4)


def test_ranks_of_a_rankfile_get_their_variables(tmp_path):
    """Open MPI starts rank.sh on every host; trainers read the variables that torchrun would set."""
    order = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
    for module in (megatron, torchtitan, maxtext):
        found = module.export(plan(order), MODEL, (8,) * 4)
        assert "mpirun -n 16 --rankfile rankfile sh rank.sh" in found.command
        for name, text in found.files.items():
            (tmp_path / name).write_text(text)
        rows = [line.split(",") for line in found.files["ranks.csv"].splitlines()[1:]]
        for rank, _, device, *_ in (rows[0], rows[6], rows[15]):
            given = {"PATH": os.environ["PATH"], "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "16"}
            said = subprocess.run(["sh", tmp_path / "rank.sh", "env"], env=given, capture_output=True, text=True).stdout
            got = dict(line.split("=", 1) for line in said.splitlines())
            assert (got["RANK"], got["NODE_RANK"], got["WORLD_SIZE"], got["NNODES"]) == (rank, rank, "16", "16")
            assert got["LOCAL_RANK"] == got["SLURM_STEP_GPUS"] == device
            assert got["MASTER_ADDR"] == got["JAX_COORDINATOR_IP"] == rows[0][1] and got["MASTER_PORT"].isdigit()


# --- Megatron-LM ------------------------------------------------------------------------------------------------------


def test_megatron_gets_mesh_batch_model_and_recomputation():
    found = flags(megatron.export(plan(), MODEL, (8, 8, 8, 8)).files["megatron.args"])
    expected = {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--micro-batch-size": "2",
        "--global-batch-size": "64",
        "--num-layers": "32",
        "--ffn-hidden-size": "14336",
        "--num-query-groups": "8",
        "--recompute-num-layers": "1",
        "--use-distributed-optimizer": "",
        "--swiglu": "",
        "--bf16": "",
    }
    assert expected.items() <= found.items() and "--sequence-parallel" not in found
    assert "--pipeline-model-parallel-layout" not in found


def test_megatron_gets_uneven_stages_as_a_layout():
    uneven = megatron.export(plan(pipe_layers="9,9,8,6"), MODEL, (9, 9, 8, 6)).files["megatron.args"]
    assert flags(uneven)["--pipeline-model-parallel-layout"] == "Et*9|t*9|t*8|t*6L"
    chunked = plan(schedule="interleaved_1f1b", virtual_stages=2)
    assert (
        flags(megatron.export(chunked, MODEL, (4,) * 8).files["megatron.args"])[
            "--num-layers-per-virtual-pipeline-stage"
        ]
        == "4"
    )


def test_what_megatron_does_otherwise_is_told():
    assert megatron.export(plan(), dataclasses.replace(MODEL, vocab_size=256), (8,) * 4).inexpressible == ()
    eager = megatron.export(plan(schedule="eager_1f1b", save="dots"), MODEL, (8,) * 4).inexpressible
    folded = megatron.export(plan(schedule="zb_v", virtual_stages=2, save="dots"), MODEL, (4,) * 8).inexpressible
    assert any("interleaved 1F1B instead of zb_v" in line for line in folded)
    runs = torchtitan.export(plan(schedule="zb_v", virtual_stages=2, save="dots"), MODEL, (4,) * 8)
    assert runs.schedule == "zb_v" and any("ZBVZeroBubble" in text for text in runs.files.values())
    assert any("1F1B instead of eager_1f1b" in words for words in eager) and any(
        "save=dots" in words for words in eager
    )
    small = dataclasses.replace(plan(), compress=compression(data_stages="0", data_rank=8))
    assert "uncompressed" in megatron.export(small, MODEL, (8,) * 4).inexpressible[0]
    assert "the 127 rows that pad the vocabulary to 384 take part in the softmax" in eager


# --- torchtitan and MaxText -------------------------------------------------------------------------------------------


def test_torchtitan_gets_a_configuration_that_runs(monkeypatch, tmp_path):
    """Stand-ins for torchtitan's modules record what the file makes of them."""

    class Recorded(types.SimpleNamespace):
        pass

    def layer(**sizes):
        return Recorded(**sizes, attention_norm=Recorded(), ffn_norm=Recorded())

    built = types.SimpleNamespace(Config=Recorded)
    llama3 = types.SimpleNamespace(
        Llama3Model=built,
        _build_llama3_layers=lambda n_layers, **sizes: [layer(**sizes) for _ in range(n_layers)],
        _output_linear_init=lambda dim: dim**-0.5,
        **{name: name for name in ("_EMBEDDING_INIT", "_EMBEDDING_SKIP_INIT", "_NORM_INIT")},
    )
    made = Recorded(training=Recorded(), model_spec=Recorded(), loss=Recorded(loss_fn=Recorded()))
    stand_ins = {
        "torchtitan.config": {"ParallelismConfig": Recorded},
        "torchtitan.distributed.activation_checkpoint": {"FullAC": Recorded(Config=lambda: "full")},
        "torchtitan.models": {"llama3": llama3},
        "torchtitan.models.common": dict.fromkeys(("ComplexRoPE", "Embedding", "Linear", "RMSNorm"), built),
        "torchtitan.models.llama3.config_registry": {"llama3_8b": lambda: made},
    }
    for name, attributes in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**attributes))
    found = torchtitan.export(plan(pipe_layers="9,9,8,6"), MODEL, (9, 9, 8, 6))
    path = tmp_path / "torchtitan_plan.py"
    path.write_text(found.files["torchtitan_plan.py"])
    config = runpy.run_path(str(path))["planned"]()
    assert config.training == Recorded(
        local_batch_size=32,
        global_batch_size=64,
        seq_len=8192,
        disable_cuda_graphs=True,
        mixed_precision_param="bfloat16",
    )
    made_model = config.model_spec.model
    assert len(made_model.layers) == 32 and {each.attention_norm.eps for each in made_model.layers} == {1e-5}
    rope = Recorded(dim=128, max_seq_len=8192, theta=10_000.0)
    assert made_model.layers[0].rope == rope and made_model.layers[0].hidden_dim == 14336
    assert not made_model.enable_weight_tying and config.loss.loss_fn.global_vocab_size == 384
    p = config.parallelism
    assert (p.data_parallel_shard_degree, p.pipeline_parallel_degree, p.tensor_parallel_degree) == (2, 4, 2)
    assert p.pipeline_parallel_schedule == "1F1B" and p.pipeline_parallel_microbatch_size == 2
    assert [len(names) for names in p.module_fqns_per_model_part] == [
        10,
        9,
        8,
        8,
    ] and config.activation_checkpoint == "full"
    layers = [name for names in p.module_fqns_per_model_part for name in names if name.startswith("layers.")]
    assert layers == [f"layers.{n}" for n in range(32)]
    assert any("head has a table of its own" in words for words in found.inexpressible)  # MODEL ties it
    with pytest.raises(
        UserError, match=r"cannot be told of model\.family=gpt2; the families llama, mistral, phi3, qwen3 would"
    ):
        torchtitan.export(plan(), ModelConfig(layers=32), (8,) * 4)


@pytest.mark.parametrize(
    ("mesh", "degrees", "reshard"),
    [
        (MeshConfig(16, shard="weights", shard_group=4), (4, 4), "always"),
        (MeshConfig(16, shard="weights"), (1, 16), "always"),
        (MeshConfig(16), (1, 16), "never"),
        (MeshConfig(16, shard="none"), (16, 1), "never"),
    ],
)
def test_torchtitan_gets_groups_as_replicas_of_shards(mesh, degrees, reshard):
    found = torchtitan.export(dataclasses.replace(plan(), mesh=mesh), MODEL, (32,))
    text = found.files["torchtitan_plan.py"]
    found_degrees = re.findall(r"data_parallel_(?:replicate|shard)_degree=(\d+),", text)
    assert tuple(map(int, found_degrees)) == degrees
    assert f'fsdp_reshard_after_forward="{reshard}"' in text
    words = "the optimizer's state is split inside groups of 4 data ranks alone, so it takes 4 times the memory"
    assert (words in found.inexpressible) == (mesh.copies > 1)


def test_maxtext_gets_settings_that_multiply_up():
    found = maxtext.export(plan(), MODEL, (8,) * 4)
    s = dict(line.split("=", 1) for line in found.files["maxtext.args"].splitlines())
    devices = int(s["ici_data_parallelism"]) * int(s["ici_pipeline_parallelism"]) * int(s["ici_tensor_parallelism"])
    assert devices == 16 and float(s["per_device_batch_size"]) * devices == 64
    assert int(s["num_pipeline_microbatches"]) == 16 and s["num_layers_per_pipeline_stage"] == "8"
    assert s["shard_optimizer_over_data"] == "true" and s["decoder_block"] == "llama2"
    assert any("circular pipeline" in words for words in found.inexpressible)
    uneven = maxtext.export(plan(pipe_layers="9,9,8,6"), MODEL, (9, 9, 8, 6)).inexpressible
    assert any("8 layers on every stage, not 9,9,8,6" in words for words in uneven)
    odd = dataclasses.replace(MODEL, layers=34)
    found = maxtext.export(plan(pipe_layers="9,9,9,7"), odd, (9, 9, 9, 7))
    s = dict(line.split("=", 1) for line in found.files["maxtext.args"].splitlines())
    assert (s["num_layers_per_pipeline_stage"], s["pipeline_parallel_layers"]) == ("8", "32")
    assert any("runs 2 of the 34 layers outside" in words for words in found.inexpressible)


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_command_writes_the_files_and_says_what_is_wrong_in_one_sentence(monkeypatch, capsys, tmp_path):
    main = mains.load("planner.export.__main__")
    made = dataclasses.replace(plan(schedule="eager_1f1b"), mesh=MeshConfig(2, 4, 2))
    plans.save(made, tmp_path / "plan.json")
    base = ["--model=configs/llama_7b.py", f"--plan={tmp_path / 'plan.json'}", f"--out={tmp_path / 'out'}"]
    for to, name in (("megatron", "megatron.args"), ("torchtitan", "torchtitan_plan.py"), ("maxtext", "maxtext.args")):
        assert mains.run(monkeypatch, main, *base, f"--to={to}") == 0
        said = capsys.readouterr().out
        assert (tmp_path / "out" / name).exists() and "cannot" in said and "start" in said
        assert "expect" not in said  # the plan does not say it
    assert mains.run(monkeypatch, main, *base) == 2
    assert capsys.readouterr().err.startswith("error: --to is missing")
    assert mains.run(monkeypatch, main, "--to=megatron", f"--plan={tmp_path / 'none.json'}") == 2
    assert "cannot read the plan" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_command_says_which_step_to_expect_of_the_trainers_schedule(monkeypatch, capsys, tmp_path):
    main = mains.load("planner.export.__main__")
    base = ["--model=configs/llama_7b.py", f"--plan={tmp_path / 'plan.json'}", f"--out={tmp_path / 'out'}"]
    words = "expect  1.234 s a step of 1f1b, if ops begin as soon as their messages are there\n"
    # Megatron-LM runs 1F1B in the place of either; torchtitan has gpipe, and MaxText a schedule of its own.
    for schedule, runs_it in (("eager_1f1b", ("megatron", "torchtitan")), ("gpipe", ("megatron",))):
        made = dataclasses.replace(plan(schedule=schedule), predicted={"ideal_step_seconds": {"1f1b": 1.2341}})
        plans.save(made, tmp_path / "plan.json")
        for to in ("megatron", "torchtitan", "maxtext"):
            assert mains.run(monkeypatch, main, *base, f"--to={to}") == 0
            assert (words in capsys.readouterr().out) is (to in runs_it)


# --- Families ---------------------------------------------------------------------------------------------------------


def of(family: str, **changes) -> ModelConfig:
    """Return a model of a family; options and scaled positions may be plain dicts."""
    made = {name: OptionValues(value) if isinstance(value, dict) else value for name, value in changes.items()}
    return dataclasses.replace(MODEL, family=family, **made)


def llama3(factor: float, **changes) -> dict:
    return {"rope_type": "llama3", "factor": factor, **USUAL_LLAMA3, **changes}


def gemma(family: str = "gemma2", **changes) -> ModelConfig:
    """Return a Gemma with some options and some fields."""
    fields = {"norm_epsilon": 1e-6, **{name: changes.pop(name) for name in list(changes) if hasattr(MODEL, name)}}
    return of(family, options=changes, **fields)


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (of("qwen2"), {"--add-qkv-bias", "--disable-bias-linear"}),
        (of("qwen3", head_size=64), {"--qk-layernorm", "--kv-channels 64"}),
        (of("mistral", options={"sliding_window": 4096}), {"--window-size 4095,0"}),
        (of("phi3", options={"partial_rotary_factor": 0.75}), {"--rotary-percent 0.75"}),
        (of("smollm3"), {"--no-rope-freq 4"}),
        (of("llama", rope_scaling=llama3(8.0)), {"--use-rope-scaling"}),
        (of("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}), {"--rotary-seq-len-interpolation-factor 4"}),
    ],
    ids=lambda x: getattr(x, "family", None),
)
def test_megatron_is_told_what_is_a_familys_own(model, lines):
    of_llama, found = (
        set(megatron.export(plan(), one, (8,) * 4).files["megatron.args"].splitlines()) for one in (MODEL, model)
    )
    assert lines <= found and lines - of_llama | of_llama == found


def test_maxtext_and_torchtitan_are_told_what_is_a_familys_own():
    def settings(model: ModelConfig) -> set[str]:
        return set(maxtext.export(plan(), model, (8,) * 4).files["maxtext.args"].splitlines())

    def written(model: ModelConfig) -> str:
        return torchtitan.export(plan(), model, (8,) * 4).files["torchtitan_plan.py"]

    assert settings(of("qwen2")) - settings(MODEL) == {"decoder_block=qwen2", "attention_bias=true"}
    assert settings(of("qwen3")) - settings(MODEL) == {"decoder_block=qwen3", "use_qk_norm=true"}
    assert settings(of("llama", rope_scaling=llama3(8.0))) - settings(MODEL) == {"rope_type=llama3.1"}
    linear = of("mistral", rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert settings(linear) - settings(MODEL) == {"decoder_block=mistral", "rope_linear_scaling_factor=4.0"}
    text = written(of("llama", rope_scaling=llama3(32.0)))
    assert (
        'scaling="llama", scaling_factor=32.0, low_freq_factor=1, high_freq_factor=4, '
        "original_max_position_embeddings=8192)" in text
    )
    text = written(of("qwen3", head_size=64, norm_epsilon=1e-4))
    assert "head_dim=64,\n" in text and "layer.attention.qk_norm.eps = 0.0001" in text
    assert "CosSinRoPE.Config(dim=64, max_seq_len=8192, theta=10000.0)" in text and "llama3" not in text


@pytest.mark.parametrize(
    ("trainer", "model", "words"),
    [
        (
            megatron,
            of("granite"),
            "model.family=granite; the families gpt2, llama, mistral, phi3, qwen2, qwen3, smollm3",
        ),
        (megatron, of("llama", rope_scaling=llama3(32.0)), "model.rope_scaling.factor=32.0; 8 would work"),
        (megatron, of("llama", rope_scaling=llama3(8.0, low_freq_factor=2)), "rope_scaling.low_freq_factor=2; 1 would"),
        (
            megatron,
            of("llama", rope_scaling={"rope_type": "linear", "factor": 2.5}),
            "factor=2.5; a whole number would",
        ),
        (megatron, of("smollm3", options={"no_rope_layer_interval": 3}), "interval=3 with model.layers=32; a divisor"),
        (torchtitan, of("llama", head_size=64), "a llama with model.head_size=64; 0, or model.family=qwen3 would"),
        (torchtitan, of("qwen3", rope_scaling=llama3(8.0)), "the types default would work"),
        (maxtext, of("mistral", options={"sliding_window": 9}), "model.options.sliding_window=9; 0 would work"),
        (maxtext, of("llama", rope_scaling=llama3(32.0)), "model.rope_scaling.factor=32.0; 8 would work"),
        (torchtitan, of("phi3", options={"sliding_window": 9}), "model.options.sliding_window=9; 0 would work"),
        (maxtext, of("phi3", options={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5; 1.0 would work"),
        (maxtext, of("smollm3"), "phi3, qwen2, qwen3, olmo2, gemma2, gemma3 would work"),
        (maxtext, of("olmo2"), "model.family=olmo2 with mesh.pipe=4; mesh.pipe=1 would work"),
        (maxtext, of("gemma2"), "model.norm_epsilon=1e-05 of a Gemma; 1e-06 would work"),
        (maxtext, gemma(), "model.options.query_pre_attn_scalar=256; 128 would work"),
        (maxtext, gemma(query_pre_attn_scalar=128, layers=31), "model.layers=31 of a Gemma 2; an even number would"),
        (maxtext, gemma(query_pre_attn_scalar=128, layers=6), "4 stages of 4 layers in pairs; fewer stages would"),
        (maxtext, gemma(query_pre_attn_scalar=128, tied_head=False), "capping=30.0 with a head of its own; 0 would"),
        (maxtext, gemma("gemma3", query_pre_attn_scalar=128), "model.family=gemma3 with mesh.pipe=4; mesh.pipe=1"),
        (maxtext, gemma("gemma3", query_pre_attn_scalar=1, head_size=64), "pre_attn_scalar=1; 128 or 64 would work"),
        (maxtext, gemma("gemma3", query_pre_attn_scalar=128, sliding_window_pattern=4), "pattern=4; 6 would work"),
    ],
    ids=lambda x: getattr(x, "family", getattr(x, "__name__", "").rpartition(".")[2] or None),
)
def test_what_a_trainer_cannot_be_told_is_a_sentence(trainer, model, words):
    with pytest.raises(UserError, match=re.escape(words)):
        trainer.export(plan(), model, (model.layers // 4,) * 4)
