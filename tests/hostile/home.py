"""The files that the command lines of `cases` read, as they work."""

import json
import pathlib
import shutil

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, PipelineConfig, plan
from paxtrain.data.preparation import prepare as prepare_data
from planner.fit.trials import COLUMNS

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
    root = pathlib.Path(__file__).resolve().parents[2]
    for folder in ("one", "two", "model"):
        (home / folder).mkdir(parents=True)
    shutil.copy(root / "configs/tiny.py", home / "config.py")
    (home / "text.txt").write_text("all work and no play " * 200)
    (home / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(50)))
    prepare_data([str(home / "lines.jsonl")], home / "data")
    for part in ("train", "validation"):
        for suffix in ("idx", "bin"):
            shutil.copy(home / f"data/{part}.{suffix}", home / f"{part}.{suffix}")
    for where in ("tokenizer.json", "one/tokenizer.json"):
        shutil.copy(home / "data/tokenizer.json", home / where)
    shutil.rmtree(home / "data")
    rows = [
        f"some,8,4,A100,100,2000,1024,16,24,1024,50257,64,{b},{t},{8 // t // p},{p},,,,,,0,fp16,{0.5 + b / 10}"
        for b in (1, 2, 4)
        for t in (1, 2)
        for p in (1, 2)
    ]
    (home / "trials.csv").write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    for run in ("one", "two"):
        lines = [{"step": step, "loss": 5.0 - step / 10, "learning_rate": 1e-3} for step in range(1, 20)]
        (home / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan.save(
        plan.Plan(MeshConfig(2, 2, 2), PipelineConfig(), BatchConfig(16, 2), CompressConfig()), home / "plan.json"
    )
    links = {"bandwidth": [[3e11, 2e10], [2e10, 3e11]], "alpha": 1e-5}
    cluster = {"name": "two", "hosts": 2, "devices_per_host": 4, "device": "a100_80gb", "links": links}
    (home / "cluster.json").write_text(json.dumps(cluster))
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
            }
        )
    )
    (home / "amp_homogeneous.json").write_text(json.dumps([AMP]))
