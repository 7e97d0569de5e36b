"""Several GPUs of one host: schedules against one another, what their traces hide, and the links.

With one process for all GPUs, and with a process for each.
"""

import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.bench.trainer.steps import PipelinedStep
from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart
from experiments.gpu.throughput import SMALL, settings_of
from paxtrain.config.load import load_config
from paxtrain.parallel.compiler_options import GRAPHED
from paxtrain.profiling import canvas
from paxtrain.profiling.breakdown import LINKS, PARTS, breakdown, by_stage
from paxtrain.schedule.schedules import names
from planner.measure import profile_cluster
from planner.measure.machines import find_machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup

# Loops of zero or one trip are parts of CUDA graphs (paxtrain/parallel/compiler_options.py). Instead the host can read
# their conditions, or collectives can be in graphs as well.
_ALL = "all in one graph"
GRAPHS = {"host reads conditions": GRAPHED, _ALL: (*GRAPHED, "WHILE", "COLLECTIVES")}
_SKIPPING = names(lambda spec: not spec.masks(True))  # those whose stages skip in such loops
_AXIS = "ring"


def schedules(
    folder: pathlib.Path,
    model: str,
    settings: dict[str, Any],
    micro_batches: int,
    names: list[str],
    steps: int,
    tensor: int = 1,
) -> Result:
    """Time and trace a step of each schedule, on a mesh of all devices without data parallelism.

    Args:
        folder: folder of the section.
        model: name of a configuration.
        settings: settings of it, by dotted key.
        micro_batches: micro-batches of a step.
        names: names of the schedules.
        steps: steps to time; as many are traced.
        tensor: size of the tensor axis.
    """
    pipe, rows = jax.device_count() // tensor, {}
    for name in names:
        own = {"mesh.data": 1, "mesh.pipe": pipe, "mesh.tensor": tensor} | settings_of(name)
        c = load_config(model, settings | own)
        batch = micro_batches * c.batch.micro_batch
        c = load_config(model, settings | own | {"batch.global_batch": batch})
        one = PipelinedStep(c, jax.devices())
        seconds = []
        for _ in range(steps + 2):
            began = time.perf_counter()
            one()
            seconds.append(time.perf_counter() - began)
        shares, hidden = by_stage(breakdown(one.run, one.compiled, one.mesh, 1), one.mesh)
        rows[name] = {
            "seconds": statistics.median(seconds[2:]),
            "tokens_per_second": batch * c.model.sequence / statistics.median(seconds[2:]),
            "loss": one.loss,
            "parts": {part: float(np.mean(shares[part])) for part in PARTS if shares[part].any()},
            "hidden": {part: float(np.mean(hidden[part])) for part in LINKS if hidden[part].any()},
        }
    return {"devices": jax.device_count(), "processes": jax.process_count(), "schedules": rows}


def _timed(run: Any, x: jax.Array, repeats: int) -> float:
    jax.block_until_ready(run(x))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def links(folder: pathlib.Path, sizes: list[int], turns: int, repeats: int) -> Result:
    """Time permutes around the ring of all devices and all-reduces over it, and profile the links as the planner does.

    Args:
        folder: folder of the section.
        sizes: bytes of a device's array.
        turns: collectives of one timed call.
        repeats: calls per figure.
    """
    n = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), (_AXIS,), axis_types=(AxisType.Auto,))
    spec, around = PartitionSpec(_AXIS), [(i, (i + 1) % n) for i in range(n)]
    kinds = {
        "permute": (lambda x: lax.ppermute(x, _AXIS, around), 1.0),
        # Bytes that a device sends in a ring, over those of its array.
        "all-reduce": (lambda x: lax.psum(x, _AXIS) / n, 2 * (n - 1) / n),
    }
    rows = []
    for size in sizes:
        make = jax.jit(lambda size=size: jnp.ones((n, size // 4), jnp.float32), out_shardings=NamedSharding(mesh, spec))
        for name, (collective, factor) in kinds.items():

            def local(x: jax.Array, collective: Any = collective) -> jax.Array:
                return lax.fori_loop(0, turns, lambda _, x: collective(x), x)

            run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
            seconds = _timed(run, make(), repeats) / turns
            rows.append({"kind": name, "bytes": size, "seconds": seconds, "bandwidth": factor * size / seconds})
    group = ProcessGroup(60)
    options = ProfileOptions(sizes=tuple(sizes), repeats=repeats, micro_batches=())
    cluster, _ = profile_cluster.profile(group, find_machines(group, ""), load_config("tiny"), options, "this host")
    profile = {"bandwidth": float(cluster.bandwidth[0, 0]), "alpha": float(cluster.alpha[0, 0])}
    return {"devices": n, "rows": rows, "profile": profile}


def _draw(results: dict[str, Result], path: pathlib.Path) -> None:
    """Draw the tokens/s of every schedule, in groups by part."""
    figure = canvas.figure(7, 0.8 + 0.28 * sum(len(r["schedules"]) for r in results.values()))
    axes = figure.subplots()
    canvas.style(axes)
    labels, values, colors = [], [], []
    palette = ("#2f6f9f", "#d9622b", "#4f8a3c", "#8a5aa8")
    for number, (part, result) in enumerate(results.items()):
        for name, row in result["schedules"].items():
            labels.append(f"{name}, {part}")
            values.append(row["tokens_per_second"])
            colors.append(palette[number % len(palette)])
    axes.barh(labels, values, color=colors, height=0.65)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s")
    figure.savefig(path)


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text, and draw its picture."""
    trained = {name: r for name, r in results.items() if "schedules" in r}
    lines = ["| part | processes | schedule | tokens/s | ms | transfers waited for | hidden under work | idle |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for part, result in trained.items():
        for name, row in result["schedules"].items():
            total = sum(row["parts"].values())
            shares = (row["parts"].get("pipeline", 0), row["hidden"].get("pipeline", 0), row["parts"].get("idle", 0))
            cells = [part, str(result["processes"]), name, f"{row['tokens_per_second']:,.0f}"]
            cells += [f"{1e3 * row['seconds']:.1f}", *(f"{share / total:.1%}" for share in shares)]
            lines.append("| " + " | ".join(cells) + " |")
    if trained:
        _draw(trained, folder / "many.png")
        lines += ["", "![Tokens/s of the schedules](many.png)"]
    for result in (r for r in results.values() if "profile" in r):
        profile = result["profile"]
        said = f"{profile['bandwidth'] / 1e9:.3g} GB/s, {1e6 * profile['alpha']:.1f} us"
        lines += ["", f"{result['devices']} devices; planner.profile measures {said} between two of them.", ""]
        lines += ["| collective | MB | us | GB/s sent by a device |", "| --- | --- | --- | --- |"]
        for row in result["rows"]:
            figures = f"{1e6 * row['seconds']:.1f} | {row['bandwidth'] / 1e9:.3g}"
            lines.append(f"| {row['kind']} | {row['bytes'] / 1e6:.3g} | {figures} |")
    return "\n".join(lines)


def _flags(kinds: tuple[str, ...]) -> dict[str, str]:
    """Return the environment in which graphs hold instructions of these kinds."""
    return {"XLA_FLAGS": f"--xla_gpu_enable_command_buffer={','.join(kinds)}"}


def _with_tensor(n: int, trained: dict[str, Any]) -> list[SectionPart]:
    """Return parts with tensor parallelism, whose loops can be in graphs only if collectives are."""
    arguments = trained | {"tensor": 2}
    return [
        SectionPart(f"{n}, tensor=2", schedules, arguments, devices=n),
        SectionPart(f"{n}, tensor=2, {_ALL}", schedules, arguments, _flags(GRAPHS[_ALL]), devices=n),
    ]


def _parts(counts: tuple[int, ...], trained: dict[str, Any], linked: dict[str, Any]) -> tuple[SectionPart, ...]:
    found = [SectionPart(f"links of {n}", links, linked, devices=n) for n in counts[-1:]]
    for n in reversed(counts):
        found.append(SectionPart(f"{n} in one process", schedules, trained, devices=n))
        found.append(
            SectionPart(f"{n} processes", schedules, trained | {"names": trained["names"][:1]}, devices=n, processes=n)
        )
        looping = trained | {"names": [name for name in trained["names"] if name in _SKIPPING]}
        for name, kinds in GRAPHS.items():
            found.append(SectionPart(f"{n}, {name}", schedules, looping, _flags(kinds), devices=n))
        found += _with_tensor(n, looping) if n > 2 else []
    return tuple(found)


_LARGE = {"model.sequence": 2048, "batch.micro_batch": 2, "model.layers": 16}
_MIB = 1 << 20
_TRAINED = {"model": "gpt_1_3b", "settings": SMALL | {"model.layers": 2}, "micro_batches": 2, "steps": 1}  # at toy size

SECTION = Section(
    name="many",
    title="Several GPUs of a host",
    seconds=600,
    parts={
        FULL: _parts(
            (2, 4, 8),
            {"model": "gpt_1_3b", "settings": _LARGE, "micro_batches": 16, "names": names(), "steps": 6},
            {"sizes": [_MIB // 4, 4 * _MIB, 64 * _MIB], "turns": 20, "repeats": 5},
        ),
        TOY: (
            *_parts((2,), _TRAINED | {"names": names()[:2]}, {"sizes": [1024, 4096], "turns": 2, "repeats": 2}),
            *_with_tensor(4, _TRAINED | {"names": _SKIPPING[:1]}),
        ),
    },
    describe=describe,
    several=True,
)
