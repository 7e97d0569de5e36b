# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.14.1", "transformers==5.24.0"]
# ///
"""Models by transformers and by paxtrain: logits, 20 training steps, files that come back, greedy text.

In an environment with this and what requirements.txt lists:

    PYTHONPATH=. python tests/paxtrain/huggingface/compare_transformers.py [FAMILY ...]
    PYTHONPATH=. python tests/paxtrain/huggingface/compare_transformers.py TEXT VOCAB MERGES PICTURE.png

transformers makes a small random model of each family and trains it on the CPU with PyTorch's AdamW; paxtrain begins
with the same files. The table has the largest differences of logits and of a step's loss: on one device, on 8 devices
as (data, pipe, tensor) = (2, 2, 2), and with attention within documents beside a block-diagonal mask. The exported
model of the first run has to have the same arrays if nothing was trained, and the same greedy text afterwards. Exits
with 1 if a difference is above 1e-4 or text or arrays differ.

The second command draws the losses of a Qwen 3 that PyTorch has trained on half of a text, in GPT-2's tokens, and that
both go on with.
"""

import copy
import json
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import safetensors.numpy
import torch
import transformers

from paxtrain.config import Config, from_dict
from paxtrain.data import token_files, tokenizer
from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.huggingface import conversion
from paxtrain.huggingface.exporting import export
from paxtrain.huggingface.importing import Model
from paxtrain.model import transformer
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.optimizer import learning_rate
from paxtrain.parallel.step import Trainer
from paxtrain.run import sampling
from paxtrain.run.run import Run
from tests.paxtrain.model.make_references import MODELS

TOLERANCE, STEPS, SEQUENCE, VOCABULARY, BATCH, SEPARATOR = 1e-4, 20, 32, 300, 8, 0
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "max_position_embeddings": SEQUENCE}
COLUMNS = ("logits", "plain", "2x2x2", "documents", "arrays", "text")
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


def theirs(name: str) -> transformers.PreTrainedModel:
    """Return a random model whose norms and biases are far from their usual start."""
    torch.manual_seed(0)
    kind, values = MODELS[name]
    # PyTorch gives an embedding's row no gradient if it is the padding's.
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **values | SIZES | special)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            scale = ("norm" in parameter_name or ".ln_" in parameter_name) and parameter_name.endswith("weight")
            around = 0.0 if kind.startswith("gemma") or not scale else 1.0  # a Gemma's norm multiplies by 1 + weight
            parameter.normal_(around, 0.2 if scale else 0.08)
    return made.eval()


def documents(model: transformers.PreTrainedModel, ids: torch.Tensor) -> dict[str, Any]:
    """Return the mask and the positions with which the tokens of a document see only each other."""
    index = torch.arange(ids.shape[1])
    starts = torch.where(ids == SEPARATOR, index, 0).cummax(1).values
    distance = index[:, None] - index[None, :]
    seen = (starts[:, :, None] == starts[:, None, :]) & (distance >= 0)

    def mask(seen: torch.Tensor) -> torch.Tensor:
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]

    window = getattr(model.config, "sliding_window", None)
    near = mask(seen & (distance < window)) if window else mask(seen)
    both = {"full_attention": mask(seen), "sliding_attention": near}
    per_layer = model.config.model_type.startswith("gemma")
    return {"attention_mask": both if per_layer else near, "position_ids": index - starts}


def batches_of(text: np.ndarray, sequence: int, batch: int, steps: int) -> list[np.ndarray]:
    """Return the samples of each step, [B, S + 1], in the order of a text."""
    places = np.arange(sequence + 1) + sequence * np.arange(batch)[:, None]
    return [text[step * batch * sequence + places] for step in range(steps)]


def made_up() -> np.ndarray:
    """Return a text of few words, int32, so that there is something to learn."""
    rng = np.random.default_rng(0)
    words = rng.integers(1, VOCABULARY, (40, 5))
    text = words[rng.integers(0, 40, STEPS * BATCH * SEQUENCE // 5 + 1)].flatten()
    text[rng.random(text.size) < 0.1] = SEPARATOR
    return text[: STEPS * BATCH * SEQUENCE + 1].astype(np.int32)


def train_theirs(model: transformers.PreTrainedModel, config: Config, batches: Sequence[np.ndarray]) -> list[float]:
    """Train with PyTorch as the configuration says, and return the loss of each step."""
    opt, some = config.optimizer, list(model.parameters())
    matrices = [p for p in some if p.ndim > 1]
    rest = [{"params": [p for p in some if p.ndim < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": opt.weight_decay}, *rest], 1.0, (opt.beta1, opt.beta2), opt.epsilon
    )
    rate, losses = learning_rate(opt, len(batches)), []
    for step, rows in enumerate(batches):
        ids = torch.from_numpy(rows.astype(np.int64))
        more = documents(model, ids[:, :-1]) if config.model.separator >= 0 else {}
        logits = model(ids[:, :-1], **more).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in some))
        for p in some:
            p.grad *= min(1.0, opt.clip_norm / float(norm))
        for group in adamw.param_groups:
            group["lr"] = float(rate(step))
        adamw.step()
        losses.append(loss.item())
    return losses


def train_ours(config: Config, batches: Sequence[np.ndarray]) -> list[float]:
    """Train from `init` on the configuration's mesh, and return the loss of each step."""
    trainer = Trainer(config, make_mesh(config.mesh, devices=jax.devices()[: config.mesh.devices]))
    params, _ = Model(config.init, config.model).params(trainer.abstract_canonical()["params"])
    state, losses = trainer.from_params(params), []
    for rows in batches:
        state, values = trainer.step(state, jax.device_put(rows, trainer.batch_sharding))
        losses.append(float(values["loss"]))
    return losses


def configuration(folder: pathlib.Path, steps: int = STEPS, **sections: Any) -> Config:
    """Return the configuration of a run that begins with folder/theirs and has the data of folder/train."""
    values = json.loads((folder / "theirs/config.json").read_text())
    model = conversion.from_config(values, "config.json")
    model |= {"sequence": SEQUENCE, "vocab_multiple": 8, "dtype": "float32"} | sections.pop("model", {})
    run = {"out": str(folder / "run"), "steps": steps, "eval_every": 0, "eval_batches": 1, "sample_tokens": 0}
    return from_dict(
        {
            "model": model,
            "init": str(folder / "theirs"),
            "data": {"train": str(folder / "train"), "validation": str(folder / "train"), "shuffle": False},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5, "clip_norm": 0.5},
            "batch": {"global_batch": BATCH, "micro_batch": BATCH},
            "run": run | {"stragglers": False},
            **sections,
        }
    )


def difference(x: Any, y: Any) -> float:
    return float(np.abs(np.asarray(x) - np.asarray(y)).max())


def compare(name: str, folder: pathlib.Path) -> dict[str, float | bool]:
    """Return the largest differences of a family by column, and whether arrays and text are the same."""
    theirs(name).save_pretrained(folder / "theirs")
    tokenizer.bytes_tokenizer().save(str(folder / "theirs" / sampling.TOKENIZER))
    (folder / "theirs/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}')
    (folder / "theirs/chat_template.jinja").write_text(TEMPLATE)
    with token_files.TokenWriter(folder / "train", VOCABULARY) as writer:
        writer.extend(made_up())
        writer.end_document()
    batches = batches_of(made_up(), SEQUENCE, BATCH, STEPS)
    found: dict[str, float | bool] = {}
    config = configuration(folder)

    arrays = safetensors.numpy.load_file(folder / "theirs/model.safetensors")
    params = conversion.params(arrays.__getitem__, config.model)
    back = conversion.weights(params, config.model)
    found["arrays"] = back.keys() == arrays.keys() and all(np.array_equal(back[key], arrays[key]) for key in back)
    ids, logits = batches[0][:, :-1], jax.jit(transformer.logits, static_argnums=2)
    with torch.no_grad():
        found["logits"] = difference(
            logits(params, ids, config.model), theirs(name)(torch.from_numpy(ids).long()).logits
        )

    expected = train_theirs(theirs(name), config, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = Run(config, make_mesh(config.mesh, devices=jax.devices()[:1]), quiet=True).train().losses
    found["plain"] = difference(mine, expected)
    mesh = {"data": 2, "pipe": 2, "tensor": 2}
    on_mesh = configuration(folder, mesh=mesh, batch={"global_batch": BATCH, "micro_batch": 2})
    found["2x2x2"] = difference(train_ours(on_mesh, batches), expected)
    apart = configuration(folder, model={"separator": SEPARATOR})
    in_documents = train_theirs(theirs(name), apart, batches)
    found["documents"] = difference(train_ours(apart, batches), in_documents)
    assert difference(in_documents, expected) > 10 * TOLERANCE and expected[-1] < expected[0] - 0.1

    export(folder / "run", folder / "exported")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    words = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    assert words.decode(words("def f():")["input_ids"]) == "def f():"
    assert words.chat_template == TEMPLATE and words.eos_token == words.pad_token == "<|endoftext|>"
    params, _ = sampling.load_params(folder / "run")
    prompt = ids[0, :8].tolist()
    text = sampling.generate(params, config.model, prompt, 16, temperature=0)
    longer = loaded.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 8, dtype=torch.long), max_new_tokens=16, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    found["text"] = longer[0, 8:].tolist() == text
    return found


def continued(text: str, vocab: str, merges: str, out: str) -> None:
    """Train on half of a text with PyTorch, go on in both, and draw the losses and their differences."""
    sequence, batch, steps = 64, 4, 100
    kind, values = MODELS["qwen3"]
    sizes = {"vocab_size": 50257, "hidden_size": 64, "intermediate_size": 160, "head_dim": 16}
    torch.manual_seed(0)
    some = transformers.AutoConfig.for_model(kind, **values | sizes | {"tie_word_embeddings": True})
    model = transformers.AutoModelForCausalLM.from_config(some, attn_implementation="eager")
    with tempfile.TemporaryDirectory() as home:
        folder = pathlib.Path(home)
        options = PrepareOptions(tokenizer="gpt2", vocab=vocab, merges=merges, validation_fraction=0.01)
        prepare([text], folder, options)
        tokens = token_files.load(str(folder / "train"), vocab_size=50257, sequence=sequence)
        half = batch * sequence * steps
        model.save_pretrained(folder / "theirs")
        config = configuration(
            folder,
            model={"sequence": sequence, "vocab_multiple": 128},
            batch={"global_batch": batch, "micro_batch": 1},
            mesh={"data": 2, "pipe": 2, "tensor": 2},
            optimizer={"learning_rate": 1e-3, "warmup_steps": 20},
            steps=steps,
        )
        before = train_theirs(model, config, batches_of(tokens.read(0, half + 1), sequence, batch, steps))
        model.save_pretrained(folder / "theirs")
        more = batches_of(tokens.read(half, 2 * half + 1), sequence, batch, steps)
        again = copy.deepcopy(model).double()
        lines = {"paxtrain, (2, 2, 2)": train_ours(config, more), "PyTorch": train_theirs(model, config, more)}
        exact = train_theirs(again, config, more)
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 5), height_ratios=(2, 1), layout="constrained")
    top.plot(range(1, steps + 1), before, "0.7", label="PyTorch, the first half")
    for (label, losses), style in zip(lines.items(), ("C0", "C1--"), strict=True):
        top.plot(range(steps + 1, 2 * steps + 1), losses, style, label=label)
        bottom.semilogy(range(steps + 1, 2 * steps + 1), np.maximum(np.abs(np.subtract(losses, exact)), 1e-8), style)
        print(f"{label}: {losses[-1]:.6f} at step {2 * steps}; at most {difference(losses, exact):.1e} from float64")
    top.set(ylabel="loss, nats per token")
    top.legend()
    bottom.set(xlabel="step", ylabel="from PyTorch in float64")
    figure.savefig(out, dpi=110)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:] and pathlib.Path(sys.argv[1]).exists():
        continued(*sys.argv[1:])
        return
    print(f"{'':14}" + "".join(f"{column:>10}" for column in COLUMNS), flush=True)
    good = True
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(name, pathlib.Path(folder))
        cells = [found[column] for column in COLUMNS]
        good &= all(cell if isinstance(cell, bool) else cell <= TOLERANCE for cell in cells)
        shown = [("same" if cell else "differ") if isinstance(cell, bool) else f"{cell:.1e}" for cell in cells]
        print(f"{name:14}" + "".join(f"{cell:>10}" for cell in shown), flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
