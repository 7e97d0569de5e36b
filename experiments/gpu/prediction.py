"""Predictions beside measurements on one device: memory, the step's time, and constants fitted anew.

memory      planner.memory's oracle, compiled for the GPU, and the peak that the allocator saw
step        the planner's seconds of a step, from a profile of this device and from its data sheet
constants   constants fitted to measured steps as planner.validate fits them, and their predictions
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax

from experiments.bench.planner.executor import predicted
from experiments.bench.trainer.steps import PipelinedStep
from experiments.bench.trainer.throughput import of_one_device
from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart
from experiments.gpu.throughput import SMALL, gigabytes
from paxtrain.config import Config
from paxtrain.config.load import load_config
from paxtrain.devices import gpus
from planner.fit import fitting
from planner.measure import profile_cluster
from planner.measure.machines import find_machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup
from planner.memory import compiled as oracle
from planner.runs.trials import Trial

_AIM = 0.03
_STAND_IN = "h100"  # whose compiler answers if the device is not listed; without the plugin that of CPUs does


def _config(model: str, settings: dict[str, Any], save: str) -> Config:
    c = of_one_device(load_config(model, settings))
    return dataclasses.replace(c, pipeline=dataclasses.replace(c.pipeline, save=save))


def _seconds(config: Config, steps: int) -> float:
    """Return the median seconds of a step on this process's first device."""
    step = PipelinedStep(config, jax.devices()[:1])
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def memory(folder: pathlib.Path, model: str, settings: dict[str, Any], save: str) -> Result:
    """Run two steps, read the allocator's peak, and ask the oracle.

    Args:
        folder: folder of the section.
        model: name of a configuration.
        settings: settings of it, by dotted key.
        save: save mode.
    """
    c, device = _config(model, settings, save), jax.devices()[0]
    step = PipelinedStep(c, [device])
    step()
    step()
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    found = gpus.find(device.device_kind)
    answer = oracle.oracle(c, found if found in gpus.GPUS else _STAND_IN, hosts=1, per_host=1)
    return {
        "step": f"{model}, save={save}",
        "peak": peak,
        "oracle": answer.total,
        "program": step.bytes,
        "source": answer.source,
    }


def step(
    folder: pathlib.Path, model: str, settings: dict[str, Any], saves: list[str], steps: int, repeats: int
) -> Result:
    """Profile this device as planner.profile does, and predict and time a step of each save mode.

    Args:
        folder: folder of the section.
        model: name of a configuration.
        settings: settings of it, by dotted key.
        saves: save modes.
        steps: steps to time.
        repeats: samples of each compute time.
    """
    group, rows = ProcessGroup(60), []
    machines = find_machines(group, "")
    machines = dataclasses.replace(machines, devices=machines.devices[:1], per_host=1)
    for save in saves:
        c = _config(model, settings, save)
        options = ProfileOptions(repeats=repeats, micro_batches=(c.batch.micro_batch,), tensor=(1,))
        cluster, _ = profile_cluster.profile(group, machines, c, options, "this device")
        sheet = None
        if machines.kinds[0] in gpus.ALL:  # a CPU has no data sheet
            sheet = predicted(dataclasses.replace(cluster, compute=()), c)
        rows.append(
            {"save": save, "seconds": _seconds(c, steps), "profiled": predicted(cluster, c), "data_sheet": sheet}
        )
    return {"model": model, "rows": rows}


def _trial(config: Config, recompute: bool, kind: str, seconds: float) -> Trial:
    m = config.model
    return Trial(
        cluster="this device",
        devices=1,
        devices_per_host=1,
        device_kinds=(kind,),
        host_bytes=None,
        intra_bytes=None,
        hidden=m.hidden,
        heads=m.heads,
        layers=m.layers,
        seq=m.sequence,
        vocab=m.vocab_size,
        global_batch=config.batch.global_batch,
        micro_batch=config.batch.micro_batch,
        tp=1,
        dp=1,
        pp=1,
        stage_layers=(m.layers,),
        recompute="full" if recompute else "none",
        element_bytes=2 if m.dtype == "bfloat16" else 4,
        seconds=seconds,
        columns={},
    )


_FITTED = ("matmul", "memory", "layer_launch", "backward", "head", "optimizer_bytes")


def constants(folder: pathlib.Path, model: str, settings: dict[str, Any], cases: list[list[Any]], steps: int) -> Result:
    """Time some steps, fit the planner's constants to all but the last, and predict that one.

    Args:
        folder: folder of the section.
        model: name of a configuration.
        settings: settings of it, by dotted key.
        cases: [layers, micro-batch, save mode] of each step.
        steps: steps to time.
    """
    kind, trials = jax.devices()[0].device_kind, []
    for layers, micro_batch, save in cases:
        c = _config(model, settings | {"model.layers": layers, "batch.micro_batch": micro_batch}, save)
        trials.append(_trial(c, save in ("layer_inputs", "inputs"), kind, _seconds(c, steps)))
    fitted = fitting.fit(trials[:-1], trials[-1:])
    values = fitted.describe()["clusters"]["this device"]["constants"]
    predictions = fitted.predict(trials)
    return {
        "cases": cases,
        "seconds": [trial.seconds for trial in trials],
        "predicted": [float(value) for value in predictions],
        "constants": {name: {key: values[name][key] for key in ("value", "typical", "unit")} for name in _FITTED},
    }


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text."""
    memories = [r for r in results.values() if "oracle" in r]
    lines = [f"Memory; the oracle is to be within {_AIM:.0%} of the peak:", ""]
    lines += ["| step | peak GB | oracle GB | oracle over peak | this program GB | oracle's compiler |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in memories:
        ratio = f"{row['oracle'] / row['peak']:.3f}" if row["peak"] else "-"
        cells = [row["step"], gigabytes(row["peak"]), gigabytes(row["oracle"]), ratio, gigabytes(row["program"])]
        lines.append("| " + " | ".join([*cells, row["source"]]) + " |")
    steps = [result for result in results.values() if "rows" in result]
    if steps:
        lines += ["", "A step, from a profile of this device and from its data sheet:", ""]
        lines += ["| model | save | measured ms | from the profile | from the data sheet |", "| --- " * 5 + "|"]
    for result in steps:
        for row in result["rows"]:
            guesses = (row["profiled"], row["data_sheet"])
            said = (f"{1e3 * g:.1f} ({g / row['seconds'] - 1:+.1%})" if g else "-" for g in guesses)
            lines.append(
                f"| {result['model']} | {row['save']} | {1e3 * row['seconds']:.1f} | " + " | ".join(said) + " |"
            )
    for result in (r for r in results.values() if "constants" in r):
        lines += ["", "Constants fitted to all steps but the last:", "", "| constant | fitted | typical | unit |"]
        lines.append("| --- | --- | --- | --- |")
        for name, value in result["constants"].items():
            lines.append(f"| {name} | {value['value']:.3g} | {value['typical']:.3g} | {value['unit']} |")
        lines += ["", "| layers | micro-batch | save | measured ms | predicted ms | error |"]
        lines.append("| --- | --- | --- | --- | --- | --- |")
        for case, seconds, guess in zip(result["cases"], result["seconds"], result["predicted"], strict=True):
            figures = f"{1e3 * seconds:.1f} | {1e3 * guess:.1f} | {guess / seconds - 1:+.1%}"
            lines.append("| " + " | ".join(map(str, case)) + f" | {figures} |")
    return "\n".join(lines)


_LARGE = {"model.sequence": 2048, "batch.micro_batch": 4}
_SIX = _LARGE | {"model.layers": 6}
_CASES = [[2, 2, "dots"], [4, 4, "dots"], [4, 2, "layer_inputs"], [6, 1, "dots"], [6, 4, "dots"]]

SECTION = Section(
    name="prediction",
    title="Predictions beside measurements",
    seconds=260,
    parts={
        FULL: (
            SectionPart("memory, gpt_1_3b dots", memory, {"model": "gpt_1_3b", "settings": _LARGE, "save": "dots"}),
            SectionPart(
                "step",
                step,
                {"model": "gpt_1_3b", "settings": _SIX, "saves": ["dots", "residuals"]} | {"steps": 6, "repeats": 3},
            ),
            SectionPart(
                "memory, gpt2_345m residuals", memory, {"model": "gpt2_345m", "settings": _LARGE, "save": "residuals"}
            ),
            SectionPart("constants", constants, {"model": "gpt_1_3b", "settings": _LARGE, "cases": _CASES, "steps": 6}),
            SectionPart(
                "memory, gpt2_125m inputs", memory, {"model": "gpt2_125m", "settings": _LARGE, "save": "inputs"}
            ),
        ),
        TOY: (
            SectionPart("memory", memory, {"model": "gpt2_125m", "settings": SMALL, "save": "dots"}),
            SectionPart(
                "step", step, {"model": "gpt2_125m", "settings": SMALL, "saves": ["dots"], "steps": 3, "repeats": 1}
            ),
            SectionPart(
                "constants",
                constants,
                {"model": "gpt2_125m", "settings": SMALL}
                | {"cases": [[1, 1, "dots"], [2, 2, "dots"], [1, 2, "dots"]], "steps": 3},
            ),
        ),
    },
    describe=describe,
)
