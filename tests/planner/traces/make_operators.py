# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.14.1", "transformers==5.24.0"]
# ///
"""Make data/*.json.gz: the operators of a training step of small models, as torch.profiler traces them on a CPU.

python -m experiments.environment tests/planner/traces/make_operators.py names the interpreter to run this with. The
kernels that a GPU would run are added by the test that reads them.
"""

import gzip
import json
import pathlib
import tempfile
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

OUT = pathlib.Path(__file__).parent / "data"
LAYERS, PASSES = 2, 2
SIZES = {"vocab_size": 97, "use_cache": False}


def gpt2() -> torch.nn.Module:
    """Return a GPT-2 without dropout, with a tied head."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_layer=LAYERS, n_embd=32, n_head=4, n_positions=16, **SIZES, **dropouts)
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    """Return a Llama that recomputes its layers in the backward."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **SIZES))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run a training step with accumulated and clipped gradients."""
    for _ in range(PASSES):
        tokens = torch.randint(0, SIZES["vocab_size"], (1, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def traced(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the trace's events of operators and ranges, without their arguments."""
    optimizer = torch.optim.AdamW(model.train().parameters())
    step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kept = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    first = min(event["ts"] for event in kept)
    return [
        {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "dur")} | {"ts": round(event["ts"] - first, 3)}
        for event in kept
    ]


def main() -> None:
    """Write the files."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    models = {"gpt2": gpt2(), "llama_recomputed": llama()}
    for name, model in models.items():
        text = json.dumps({"traceEvents": traced(model)}, separators=(",", ":"))
        (OUT / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
