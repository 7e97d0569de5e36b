"""The files that the command lines of `commands` read, as they work."""

import itertools
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import safetensors.numpy

from experiments.published.comparison import BEGIN, END
from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, ModelConfig, PipelineConfig, plan, to_dict
from paxtrain.config.load import load_config
from paxtrain.data.preparation import prepare as prepare_data
from paxtrain.huggingface import conversion
from paxtrain.model import transformer
from paxtrain.schedule import table_file
from paxtrain.schedule.schedules import build
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import LossProbe, ProbedCodec
from planner.fit.constants import CONSTANTS
from planner.runs import trials
from tests.planner.given import logs
from tests.planner.traces.runs import Run, write
from tests.sources import ROOT

# The model with whose weights a run begins.
MODEL = {"vocab_size": 257, "layers": 2, "hidden": 32, "heads": 4, "sequence": 32}
# A row of a table of trials, besides what differs among its rows.
TRIAL = dict.fromkeys(trials.COLUMNS, "") | {
    "cluster": "some",
    "devices": 8,
    "devices_per_host": 4,
    "device_kinds": "A100",
    "host_gbit": 100,
    "intra_gbit": 2000,
    "hidden": 1024,
    "heads": 16,
    "layers": 24,
    "seq": 1024,
    "vocab": 50257,
    "global_batch": 64,
    "recompute": 0,
    "dtype": "fp16",
}

AMP = {
    "file": "a.txt",
    "setting": "homogeneous",
    "config": {
        "stage_boundaries": [0, 30],
        "micro_batch": 1,
        "tp": 1,
        "dp": 16,
        "pp": 1,
        "global_batch": 32,
        "stage_layer_counts": [30],
    },
    "model": {"hidden": 1024, "seq": 1024, "layers": 24, "vocab": 52256, "type": "gpt2"},
    "cluster": {
        "nodes": 4,
        "gpus_per_node": 4,
        "gpus": "4 nodes x 4x T4",
        "inter_gbps": [50] * 4,
        "intra_gbps": [50] * 4,
    },
    "measured_seconds": 1.32,
    "failed": False,
}


def prepare(home: pathlib.Path) -> None:
    """Write the files of all command lines."""
    for folder in ("one", "two", "model"):
        (home / folder).mkdir(parents=True)
    shutil.copy(ROOT / "configs/tiny.py", home / "config.py")
    (home / "config.json").write_text(json.dumps(to_dict(load_config("tiny"))))
    (home / "text.txt").write_text("all work and no play " * 200)
    texts = [f"line {i} " * 40 + "a" * 400 + "x" for i in range(50)]
    (home / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_data([str(home / "lines.jsonl")], home / "data")
    for part in ("train", "validation"):
        for suffix in ("idx", "bin"):
            shutil.copy(home / f"data/{part}.{suffix}", home / f"{part}.{suffix}")
    for where in ("tokenizer.json", "own_tokenizer.json", "model/tokenizer.json"):
        shutil.copy(home / "data/tokenizer.json", home / where)
    shutil.rmtree(home / "data")
    rows = [
        TRIAL | {"micro_batch": b, "tp": t, "dp": 8 // t // p, "pp": p, "seconds": 0.5 + b / 10}
        for b, t, p in itertools.product((1, 2, 4), (1, 2), (1, 2))
    ]
    trials.write(home / "trials.csv", rows)
    for run in ("one", "two"):
        lines = [{"step": step, "loss": 5.0 - step / 10, "learning_rate": 1e-3} for step in range(1, 20)]
        (home / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan.save(
        plan.Plan(MeshConfig(2, 2, 2), PipelineConfig(), BatchConfig(16, 2), CompressConfig(), devices_per_host=4),
        home / "plan.json",
    )
    _cluster(home)
    _at_hand(home)
    _planning(home)
    (home / "amp_homogeneous.json").write_text(json.dumps([AMP]))
    _model(home)


def _cluster(home: pathlib.Path) -> None:
    """Write a cluster twice, with its links in its file and beside it."""
    links = {"bandwidth": [[3e11, 2e10], [2e10, 3e11]], "alpha": 1e-5}
    cluster = {"version": 1, "name": "two", "hosts": 2, "devices_per_host": 4, "device": "a100-80gb", "links": links}
    (home / "cluster.json").write_text(json.dumps(cluster))
    (home / "arrays.json").write_text(json.dumps(cluster | {"links": {"npz": "links.npz"}}))
    np.savez(home / "links.npz", alpha=np.full((2, 2), 1e-5), bandwidth=np.array(links["bandwidth"]))


def _at_hand(home: pathlib.Path) -> None:
    """Write logs, a host's topologies, SLURM's, and traces."""
    for name, hosts, start, rate in (
        ("one", ["dev0"] * 8, 3e-5, 4e11),
        ("two", ["dev0"] * 8 + ["dev7"] * 8, 7e-5, 2e11),
    ):
        (home / f"{name}.log").write_text(logs.log("all_reduce", hosts, start, rate))
    data = {
        "matrix.topo": "h100_12_nics.topo",
        "host.xml": "h100_vm_nccl_topo.xml",
        "topology.conf": "tree_topology.conf",
    }
    for name, source in data.items():
        shutil.copy(logs.DATA / source, home / name)
    run = Run(steps=1)
    write(home / "trace.json", run.torch())
    run.nsys(home / "trace.sqlite")


def _planning(home: pathlib.Path) -> None:
    """Write constants, a probe, a schedule and a page, and the files of GPT-2's tokenizer."""
    constants = {constant.name: {"value": constant.typical} for constant in CONSTANTS}
    (home / "constants.json").write_text(json.dumps({"clusters": {"lab": {"constants": constants}}}))
    codecs = (
        ProbedCodec("backward", "lowrank", (0.01, 0.02), 16),
        ProbedCodec("data", "int8", (0.001, 0.002)),
    )
    probe = LossProbe({"hidden": 128}, (2, 2), 4, 100, 4096, (0, 1), (3.5, 3.6), codecs)
    loss_probe_file.save(probe, home / "probe.json")
    (home / "schedule.csv").write_text(table_file.text(build("1f1b", 2, 4, overlap=False)))
    (home / "page.md").write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    (home / "vocab.json").write_text(json.dumps(json.loads((home / "tokenizer.json").read_text())["model"]["vocab"]))
    (home / "merges.txt").write_text("#version: 0.2\n")


def _model(home: pathlib.Path) -> None:
    """Write a model in Hugging Face's layout, and a run that began with its weights, at step 1."""
    (home / "model/config.json").write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "n_layer": 2,
                "n_embd": 32,
                "n_head": 4,
                "n_positions": 32,
                "vocab_size": 257,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "bos_token_id": 256,
                "eos_token_id": 256,
            }
        )
    )
    config = ModelConfig(**MODEL)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.01, np.float32), transformer.shapes(config))
    safetensors.numpy.save_file(conversion.weights(params, config), home / "model/model.safetensors")
    # In another process: one that has used its devices cannot be forked.
    command = [sys.executable, "-W", "ignore", "-m", "paxtrain.train", f"--config={home / 'config.py'}"]
    given = {"init": home / "model", "run.out": home / "trained", "run.steps": 1, "run.eval_batches": 1}
    given |= {"optimizer.warmup_steps": 0, "mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 1}
    given |= {f"data.{part}": home / part for part in ("train", "validation")}
    given |= {"run.sample_tokens": 0, **{f"model.{name}": value for name, value in MODEL.items()}}
    command += [f"--config.{name}={value}" for name, value in given.items()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
