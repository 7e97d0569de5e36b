"""Do all programs run, are their losses and gradients those of the CPU, and does a run resume with equal bits?

The reference is jax.grad of the plain model on the CPU, in float32 with float32 products. Our step computes the same on
this device: with one stage for every save mode, with every schedule on two stages that the device emulates, and with
each sequence on two emulated devices. In bfloat16, where cuDNN computes the attention, the plain model differs from the
reference on the CPU, too; ours may differ twice as much.
"""

import dataclasses
import functools
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart
from experiments.gpu.throughput import settings_of
from paxtrain.config import Config, MeshConfig
from paxtrain.config.load import load_config
from paxtrain.data.preparation import prepare
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.run import metrics
from paxtrain.run.training import train
from paxtrain.schedule.schedules import names

# Largest relative errors: of the loss, and of any parameter's gradient as the norm of the difference over the norm.
FLOAT32 = {"loss": 1e-5, "gradient": 1e-4}
_BFLOAT16 = 2.0  # times the error of the plain model in bfloat16 on the CPU
_NOISE = 1e-3  # least error that a bfloat16 loss may have

Gradients = tuple[float, transformer.Params]


def _plain(config: Config, dtype: str, params: transformer.Params, tokens: np.ndarray) -> Gradients:
    """Return loss and gradients of the plain model on the CPU."""
    model = dataclasses.replace(config.model, dtype=dtype, attention="xla")
    run = jax.jit(jax.value_and_grad(functools.partial(transformer.loss, config=model)))
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        loss, grads = run(params, tokens)
    return float(loss), jax.device_get(grads)


def _ours(config: Config, virtual: bool, params: transformer.Params, tokens: np.ndarray) -> Gradients:
    """Return loss and gradients of our step on this process's first device."""
    mesh = make_mesh(MeshConfig() if virtual else config.mesh, devices=jax.devices()[:1])
    trainer = Trainer(config, mesh, virtual=virtual)
    placed = jax.device_put(jax.jit(trainer.layout.from_canonical)(params), trainer.state_shardings.params)

    def run(params: transformer.Params, tokens: jax.Array) -> tuple[jax.Array, transformer.Params]:
        loss, grads, *_ = trainer.loss_and_gradients(params, tokens)
        return loss, trainer.layout.to_canonical(grads)

    with jax.default_matmul_precision("highest" if config.model.dtype == "float32" else "default"):
        placed_tokens = jax.device_put(tokens, trainer.batch_sharding)
        compiled = jax.jit(run).lower(placed, placed_tokens).compile(trainer.compiler_options)
    loss, grads = compiled(placed, placed_tokens)
    return float(loss), jax.device_get(grads)


def _errors(found: Gradients, reference: Gradients) -> dict[str, float]:
    """Return the relative errors of the loss and of the worst gradient."""

    def norm(x: np.ndarray) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float64)))

    each = jax.tree.map(lambda a, b: norm(np.asarray(a, np.float64) - b) / norm(b), found[1], reference[1])
    loss = abs(found[0] - reference[0]) / abs(reference[0])
    return {"loss": loss, "gradient": max(jax.tree.leaves(each))}


def gradients(folder: pathlib.Path, model: dict[str, Any], cases: list[dict[str, Any]], dtype: str) -> Result:
    """Compare losses and gradients with the CPU's.

    Args:
        folder: folder of the section.
        model: settings of the configuration "tiny" that all cases share, by dotted key.
        cases: settings of each case; "name" is its name, "virtual" says whether the device emulates the mesh.
        dtype: dtype of the model.

    Raises:
        UserError: errors are above the bounds; the message names the cases.
    """
    model = model | {"model.dtype": dtype}
    config = load_config("tiny", model | _ONE)
    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.device_get(transformer.init(config.model, jax.random.key(0)))
        # Large and random, so that zeros hide no error.
        params = jax.tree.map(lambda x: x + 0.02 * np.random.default_rng(x.size).standard_normal(x.shape), params)
        params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    shape = (config.batch.global_batch, config.model.sequence + 1)
    tokens = np.random.default_rng(1).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    reference = _plain(config, "float32", params, tokens)
    bounds = FLOAT32
    if dtype != "float32":
        noise = _errors(_plain(config, dtype, params, tokens), reference)
        bounds = {name: _BFLOAT16 * max(error, _NOISE) for name, error in noise.items()}
    found: dict[str, dict[str, float]] = {}
    for case in cases:
        settings = {key: value for key, value in case.items() if "." in key}
        virtual = case["virtual"]
        ours = _ours(load_config("tiny", model | _ONE | settings), virtual, params, tokens)
        found[case["name"]] = _errors(ours, reference)
    wrong = [name for name, errors in found.items() if any(not errors[key] <= bounds[key] for key in bounds)]
    if wrong:
        worst = max(wrong, key=lambda name: found[name]["gradient"])
        raise UserError(f"{', '.join(wrong)} differ from the CPU's {dtype} beyond {bounds}: {worst} has {found[worst]}")
    return {"dtype": dtype, "loss": reference[0], "bounds": bounds, "errors": found}


def resume(folder: pathlib.Path, settings: dict[str, Any], steps: int) -> Result:
    """Train without a stop, and with a stop and a restart from the checkpoint; compare all bits of the metrics.

    Args:
        folder: folder of the section, for data, checkpoints and metrics.
        settings: settings of the configuration "tiny", by dotted key.
        steps: steps of the run; it is stopped behind half of them.

    Raises:
        UserError: the runs differ.
    """
    folder /= settings.get("model.dtype", "float32")  # runs of other dtypes may go on beside this one
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "numbers.txt").write_text(" ".join(map(str, range(20_000))))
    prepare([str(data / "numbers.txt")], data / "tokens")
    paths = {"data.train": data / "tokens" / "train", "data.validation": data / "tokens" / "validation"}
    common = {name: str(path) for name, path in paths.items()} | {
        "mesh.data": 1,
        "mesh.pipe": 1,
        "mesh.tensor": 1,
        "optimizer.schedule": "constant",  # the same rate whatever the length of the run is
        "optimizer.warmup_steps": 1,
        "run.sample_tokens": 0,
        "run.eval_every": 0,
        "run.eval_batches": 1,
    }
    curves = {}
    for name, stops in (("whole", (steps,)), ("resumed", (steps // 2, steps))):
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        for number, stop in enumerate(stops):
            more = {"run.out": str(out), "run.steps": stop, "checkpoint.resume": number > 0}
            train(load_config("tiny", common | settings | more), quiet=True)
        curves[name] = [(r["step"], r["loss"], r["grad_norm"]) for r in metrics.read(out / metrics.FILE) if "loss" in r]
    whole, resumed = ({step: values for step, *values in curve} for curve in curves.values())
    different = [step for step in range(1, steps + 1) if whole.get(step) != resumed.get(step) or step not in whole]
    if different:
        step = different[0]
        raise UserError(f"step {step} has {resumed.get(step)} after a resume, and {whole.get(step)} without one")
    return {"steps": steps, "equal": len(whole), "loss": whole[steps][0]}


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text."""
    compared = [result for result in results.values() if "errors" in result]
    dtypes = {result["dtype"]: result["bounds"] for result in compared}
    programs: dict[str, dict[str, str]] = {}
    for result in compared:
        for case, errors in result["errors"].items():
            programs.setdefault(case, {})[result["dtype"]] = f"{errors['loss']:.1e}, {errors['gradient']:.1e}"
    headings = [f"{name}; at most {bound['loss']:.1g}, {bound['gradient']:.1g}" for name, bound in dtypes.items()]
    lines = ["Errors of the loss and of the worst gradient:", "", "| program | " + " | ".join(headings) + " |"]
    lines.append("| --- " * (1 + len(headings)) + "|")
    for case, found in programs.items():
        lines.append("| " + " | ".join([case, *(found.get(name, "-") for name in dtypes)]) + " |")
    for name, result in results.items():
        if "equal" in result:
            lines += ["", f"{name}: all {result['equal']} steps have equal losses and norms, bit for bit."]
    return "\n".join(lines)


_SAVES = [
    {"name": f"save={save}", "virtual": False, "pipeline.save": save}
    for save in ("dots", "residuals", "layer_inputs", "inputs")
]
_ONE = {"mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 1}
_TWO = {"virtual": True} | _ONE | {"mesh.pipe": 2}
_SCHEDULES = [_TWO | {"name": f"{name}, 1x2x1"} | settings_of(name) for name in names()]
_SPLIT = [_TWO | {"name": f"{name}, 1x2x1"} | settings_of(name) for name in names(lambda spec: spec.splits)[:1]]
_SHARED = [
    {"name": f"context=2, {form}", "virtual": True, "mesh.context": 2, "mesh.context_form": form} | _ONE
    for form in ("ring", "gather")
]
_UNTUNED = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}  # finding fast products takes most of the time of compiling
_DETERMINISTIC = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
_MODEL = {
    "model.layers": 4,
    "model.hidden": 512,
    "model.heads": 8,
    "model.sequence": 256,
    "batch.global_batch": 16,
    "batch.micro_batch": 2,
}
_SMALL = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 4,
    "model.sequence": 16,
    "batch.global_batch": 8,
    "batch.micro_batch": 2,
}


def _gradients(
    model: dict[str, Any], dtype: str, saves: list[dict[str, Any]], schedules: list[dict[str, Any]]
) -> list[SectionPart]:
    """Return the parts of a dtype: the save modes together, and each schedule, whose compiling takes longer."""
    parts = {"save modes": saves} | {case["name"]: [case] for case in schedules}
    return [
        SectionPart(f"{dtype}, {name}", gradients, {"model": model, "cases": cases, "dtype": dtype}, _UNTUNED)
        for name, cases in parts.items()
    ]


SECTION = Section(
    name="correctness",
    title="Losses and gradients",
    seconds=210,
    parts={
        FULL: (
            *_gradients(_MODEL, "float32", _SAVES, _SCHEDULES + _SHARED),
            *_gradients(_MODEL, "bfloat16", _SAVES, _SCHEDULES + _SHARED),
            SectionPart("resume, float32", resume, {"settings": {}, "steps": 8}, _DETERMINISTIC),
            SectionPart(
                "resume, bfloat16", resume, {"settings": {"model.dtype": "bfloat16"}, "steps": 8}, _DETERMINISTIC
            ),
        ),
        TOY: (
            *_gradients(_SMALL, "float32", _SAVES[:1], _SPLIT + _SHARED[:1]),
            *_gradients(_SMALL, "bfloat16", _SAVES[:1], []),
            SectionPart("resume", resume, {"settings": _SMALL, "steps": 4}, _DETERMINISTIC),
        ),
    },
    describe=describe,
    timed=False,
)
