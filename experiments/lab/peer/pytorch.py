# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy", "torch==2.13.0"]
# ///
"""One host's process of PyTorch's own trainer: torch.distributed.pipelining's 1F1B, with DistributedDataParallel.

The model is paxtrain's GPT-2, written as one would for PyTorch, from the same weights, on the same batches, with the
same optimizer. Tasks come as lines of JSON on standard input, as those of experiments.lab.worker do; it is started by
experiments.lab.measuring.peer in an environment of its own (experiments.environment).
"""

import argparse
import json
import os
import sys
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

# MB: the gradients of a stage travel in several buckets, so that the first ones travel beside the rest of the backward.
# With the default of 25 MB all of so small a stage's gradients would be one bucket, and wait for the whole backward.
BUCKET = 0.5


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int, epsilon: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden, epsilon), nn.LayerNorm(hidden, epsilon)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [B, S, H]."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Stage(nn.Module):
    """A pipeline stage: its layers, on the first one the embedding, on the last one the final norm and the head."""

    def __init__(self, model: dict, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        hidden, epsilon = model["hidden"], model["norm_epsilon"]
        self.token = nn.Embedding(model["vocab_size"], hidden) if first else None
        self.position = nn.Parameter(torch.empty(model["sequence"], hidden)) if first else None
        self.layers = nn.ModuleList(Layer(hidden, model["heads"], epsilon) for _ in layers)
        self.norm = nn.LayerNorm(hidden, epsilon) if last else None
        self.head = nn.Linear(hidden, model["vocab_size"], bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations [B, S, H] of tokens [B, S] or activations, or the last stage's logits [B, S, V]."""
        if self.token is not None:
            x = self.token(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))

    @torch.no_grad()
    def load(self, weights: dict[str, np.ndarray], layers: range) -> None:
        """Copy paxtrain's canonical parameters, whose kernels are [in, out], or [in, 3, out] for q, k and v."""

        def copy(to: torch.Tensor, name: str, index: int | None = None, transpose: bool = False) -> None:
            value = torch.from_numpy(weights[name] if index is None else weights[name][index])
            to.copy_(value.reshape(len(value), -1).T if transpose else value.reshape(to.shape))

        if self.token is not None:
            copy(self.token.weight, "embedding/token", 0)
            copy(self.position, "embedding/position")
        for layer, i in zip(self.layers, layers):
            for name in ("qkv", "out", "up", "down"):
                copy(getattr(layer, name).weight, f"layers/{name}/kernel", i, transpose=True)
                copy(getattr(layer, name).bias, f"layers/{name}/bias", i)
            for name in ("ln1", "ln2"):
                copy(getattr(layer, name).weight, f"layers/{name}/scale", i)
                copy(getattr(layer, name).bias, f"layers/{name}/bias", i)
        if self.head is not None:
            copy(self.norm.weight, "final_norm/scale")
            copy(self.norm.bias, "final_norm/bias")
            copy(self.head.weight, "embedding/token", 1)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Program:
    """A pipeline with its data ranks, and a state to train."""

    def __init__(self, config: dict, weights: str, batches: str, rates: list[float]) -> None:
        """Args:
        config: sections model, mesh, batch and optimizer of paxtrain's configuration.
        weights: npz file of the canonical parameters, by path.
        batches: npy file of the global batches, int [steps, global_batch, sequence + 1].
        rates: the learning rates of the steps.
        """
        data, stages = config["mesh"]["data"], config["mesh"]["pipe"]
        mesh = init_device_mesh("cpu", (data, stages), mesh_dim_names=("data", "pipe"))
        data_rank, stage = mesh.get_coordinate()
        self.first, self.last = stage == 0, stage == stages - 1
        self.pipe, self.options = mesh.get_group("pipe"), config["optimizer"]
        count = config["model"]["layers"] // stages
        layers = range(stage * count, (stage + 1) * count)
        module = Stage(config["model"], layers, self.first, self.last)
        module.load(dict(np.load(weights)), layers)
        self.module = DistributedDataParallel(
            module,
            process_group=mesh.get_group("data"),
            bucket_cap_mb=BUCKET,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
        parameters = list(module.named_parameters())
        plain = [p for name, p in parameters if p.ndim < 2]
        decayed = [p for name, p in parameters if p.ndim >= 2]
        self.parameters = [p for _, p in parameters]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.options["weight_decay"]},
                {"params": plain, "weight_decay": 0.0},
            ],
            betas=(self.options["beta1"], self.options["beta2"]),
            eps=self.options["epsilon"],
            fused=True,
        )
        rows = config["batch"]["global_batch"] // data
        whole = np.load(batches)[:, data_rank * rows : (data_rank + 1) * rows]
        self.batches, self.rates = torch.from_numpy(whole.astype(np.int64)), rates
        # Shapes are given, since to find them out PyTorch would run a backward, of which the buckets know nothing.
        micro_batch, model = config["batch"]["micro_batch"], config["model"]
        sizes = micro_batch, model["sequence"]
        hidden = torch.empty(*sizes, model["hidden"], requires_grad=True)
        pipeline = PipelineStage(
            self.module,
            stage,
            stages,
            torch.device("cpu"),
            input_args=torch.empty(sizes, dtype=torch.int64) if self.first else hidden,
            output_args=torch.empty(*sizes, model["vocab_size"], requires_grad=True) if self.last else hidden,
            group=self.pipe,
        )
        self.schedule = Schedule1F1B(pipeline, rows // micro_batch, loss_fn=_loss)
        self.done = 0

    def step(self) -> float:
        """Run the next step, on batches from the beginning again after the last one; return the last stage's loss."""
        tokens = self.batches[self.done % len(self.batches)]
        losses: list[torch.Tensor] = []
        inputs = (tokens[:, :-1],) if self.first else ()
        targets = {"target": tokens[:, 1:], "losses": losses} if self.last else {}
        self.schedule.step(*inputs, **targets, return_outputs=False)
        # The norm of all stages' gradients: each stage has its own, equal on all data ranks.
        square = nn.utils.get_total_norm([p.grad for p in self.parameters]).square()
        dist.all_reduce(square, group=self.pipe)
        nn.utils.clip_grads_with_norm_(self.parameters, self.options["clip_norm"], square.sqrt())
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[self.done % len(self.rates)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return torch.stack(losses).mean().item() if losses else 0.0


class Worker:
    """State that the tasks work on."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}

    def load(self, name: str, **arguments: object) -> None:
        """Build a pipeline from its weights."""
        self.programs[name] = Program(**arguments)

    def train(self, name: str, steps: int) -> list[float]:
        """Run steps, and return the loss of each over the whole batch."""
        losses = []
        for _ in range(steps):
            program = self.programs[name]
            loss = torch.tensor(program.step(), dtype=torch.float64)  # 0 but on the last stages
            dist.all_reduce(loss)
            losses.append(loss.item() / program.module.process_group.size())
        return losses

    def spend(self, name: str) -> dict[str, float]:
        """Return the seconds of one step, and the seconds of this process's compute, all of its threads together."""
        dist.barrier()
        began, computed = time.perf_counter(), time.process_time()
        self.programs[name].step()
        return {"seconds": time.perf_counter() - began, "computed": time.process_time() - computed}

    def version(self) -> str:
        """Return PyTorch's version."""
        return torch.__version__


def _serve(worker: Worker, answers: object) -> None:
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = {"answer": getattr(worker, task.pop("do"))(**task)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Join the others, report it, and serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, help="HOST:PORT of process 0.")
    parser.add_argument("--num_processes", type=int, required=True, help="How many there are.")
    parser.add_argument("--process_id", type=int, required=True, help="Which of them this is.")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print belongs into the log
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.coordinator}",
        world_size=options.num_processes,
        rank=options.process_id,
    )
    print(json.dumps({"answer": "ready"}), file=answers, flush=True)
    _serve(Worker(), answers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
