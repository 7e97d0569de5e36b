"""The compiler's memory of small models, as labels for the closed form: python -m experiments.memory.labels.

Labels are small models of varied proportions, compiled for one kind of GPU: compiling takes as long for small models as
for large ones. A second set with 2 to 8 times the parameters per device of any label is held out. The table at the end
says how far the closed form is off, and how often the compiler exceeds it with its margin (planner/memory/margin.py).
The compiler's answers are kept on disk, so that a run that was stopped continues. Labels that are in the file already
are not compiled again.

    --evaluate      compiles nothing: prints the table of the labels in the file
"""

import csv
import math
import operator
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from paxtrain import command_line
from paxtrain.config import Config, from_dict, to_dict
from paxtrain.config.axes import AXES
from paxtrain.config.load import nested
from paxtrain.errors import UserError, command
from paxtrain.schedule.schedules import spec_of
from planner.memory import closed_form, compiled
from planner.memory.margin import margin

_FLAGS = flags.FLAGS
_HERE = pathlib.Path(__file__).parent
FILES = {family: _HERE / f"{family}.csv" for family in ("gpt2", "llama")}
LABELS, HELD_OUT = 96, 30
LLAMAS, ALONE = 20, 5  # Llamas of all kinds, and more of them without a pipeline
_SETS = ("label", "held out", "without a pipeline")
# Fields of a model that only the labels of Llamas name.
_LLAMA = ("family", "kv_heads", "intermediate", "tied_head")
_SECTIONS = (
    ("model", ("vocab_size", "layers", "hidden", "heads", "sequence", "attention", *_LLAMA)),
    ("mesh", (*AXES, "zero1")),
    ("pipeline", ("schedule", "virtual_stages", "pipe_layers", "save", "scan_layers")),
    ("batch", ("global_batch", "micro_batch")),
    ("compress", ("backward.messages", "backward.rank", "error", "data.stages", "data.rank")),
)
_FIELDS = tuple(f"{section}.{name}" for section, names in _SECTIONS for name in names)


class LabelRow(NamedTuple):
    """A label.

    Attributes:
        set: one of "label" and "held out", for Llamas of "label" and "without a pipeline".
        config: configuration that was compiled.
        memory: answer of the compiler.
    """

    set: str
    config: Config
    memory: compiled.OracleMemory


# --- Which models ---------------------------------------------------------------------------------------------------


_SMALL = {"hidden": (512, 640, 768, 1024), "sequence": (256, 512, 1024), "micro_batch": (1, 2, 4, 8)}
_PARAMETERS = 3e6, 60e6  # of labels, per device


def bytes_of(config: Config) -> float:
    """Return the closed form of a label's program, in which gpipe had one more slot, for scrap."""
    shape = closed_form.of(config)
    memory = closed_form.analytic(shape)
    scrap = config.pipeline.schedule == "gpipe" and config.mesh.pipe > 1
    return float(memory.total + scrap * memory.activations / closed_form.ring_slots(shape))


def parameters(config: Config) -> float:
    """Return the parameters of the model that one device holds whole, before ZeRO-1."""
    return float(closed_form.parameters(closed_form.of(config))[0])


def _draw(rng: np.random.Generator, sizes: dict[str, tuple[int, ...]], lowest: float, highest: float) -> Config:
    """Return a random configuration with lowest to highest parameters per device; deep stages are scanned."""

    def pick(*values: Any, p: Sequence[float] | None = None) -> Any:
        return values[rng.choice(len(values), p=p)]

    while True:
        schedule = pick("eager_1f1b", "1f1b", "gpipe", "interleaved_1f1b", p=[0.5, 0.18, 0.16, 0.16])
        pipe = 2 if spec_of(schedule).interleaves else pick(2, 4)
        if schedule == "eager_1f1b":
            pipe = pick(1, 2, 4, 8, p=[0.2, 0.42, 0.34, 0.04])
        chunks = pick(2, 3, p=[0.9, 0.1]) if spec_of(schedule).interleaves else 1
        stages, scan = pipe * chunks, rng.random() < 0.38
        slots = rng.integers(4, 17) if scan else rng.integers(1, {1: 7, 2: 5}.get(stages, 3))
        counts = np.full(stages, slots)
        if rng.random() < 0.25 and stages > 1 and slots > 1:
            counts[-rng.integers(1, stages) :] -= 1
        hidden, micro_batch, data = pick(*sizes["hidden"]), pick(*sizes["micro_batch"]), pick(1, 2, 4, 8)
        micro_batches = pick(4, 8, 12, 16) if schedule == "gpipe" else pipe * pick(1, 2, 3, 4)
        compress = {"error": pick("lazy", "explicit")}
        if pipe > 1 and rng.random() < 0.15:
            compress["backward"] = {"messages": pick("epilogue", "all"), "rank": pick(8, 16, 32)}
        if data > 1 and rng.random() < 0.12:
            compress["data"] = {"stages": "all", "rank": pick(16, 32, 64)}
        values = {
            "model": {
                "vocab_size": 1024 * round(math.exp(rng.uniform(math.log(2), math.log(64))) * hidden / 1024 + 0.5),
                "layers": int(counts.sum()),
                "hidden": hidden,
                "heads": hidden // pick(64, 128),
                "sequence": pick(*sizes["sequence"]),
                "attention": "xla" if rng.random() < 0.12 else "auto",
            },
            "mesh": {
                "data": data,
                "pipe": pipe,
                "tensor": pick(1, 2, 4, 8, p=[0.35, 0.3, 0.2, 0.15]),
                "zero1": bool(rng.random() < 0.75),
            },
            "pipeline": {
                "schedule": schedule,
                "virtual_stages": chunks,
                "pipe_layers": ",".join(map(str, counts)),
                "save": pick("dots", "layer_inputs", "residuals", "inputs", p=[0.4, 0.2, 0.2, 0.2]),
                "scan_layers": "on" if scan else "off",
            },
            "batch": {"global_batch": micro_batches * micro_batch * data, "micro_batch": micro_batch},
            "compress": compress,
        }
        try:
            config = from_dict(values)
        except UserError:  # such as 5 heads over 2 devices
            continue
        if lowest <= parameters(config) <= highest:
            return config


def _llama(rng: np.random.Generator, alone: bool) -> Config:
    """Return a random Llama; `alone`: without a pipeline."""
    while True:
        config = _draw(rng, _SMALL, *_PARAMETERS)
        if (config.pipeline.scan_layers == "off" and config.model.layers > 10) or (alone and config.mesh.pipe > 1):
            continue
        values, heads, hidden = to_dict(config), config.model.heads, config.model.hidden
        fewer = [n for n in (heads, heads // 2, heads // 4) if n > 0 and heads % n == 0]
        values["model"] |= {
            "family": "llama",
            "kv_heads": fewer[rng.integers(len(fewer))],
            "intermediate": int(rng.choice([2, 2.6875, 3.5]) * hidden) // 64 * 64,
            "tied_head": False,
            "vocab_size": min(config.model.vocab_size, 32768),
        }
        try:
            return from_dict(values)
        except UserError:  # such as one head of keys over 2 devices
            continue


def _gpt2_designs() -> list[tuple[str, Config]]:
    small = _SMALL
    large = {"hidden": (1536, 2048, 3072, 4096), "sequence": (1024, 2048), "micro_batch": (1, 2, 4)}
    labels, held_out = np.random.default_rng(0), np.random.default_rng(1)
    return [("label", _draw(labels, small, *_PARAMETERS)) for _ in range(LABELS)] + [
        ("held out", _draw(held_out, large, 120e6, 480e6)) for _ in range(HELD_OUT)
    ]


def _llama_designs() -> list[tuple[str, Config]]:
    some, alone = np.random.default_rng(2), np.random.default_rng(3)
    drawn = [_llama(some, False) for _ in range(LLAMAS)] + [_llama(alone, True) for _ in range(ALONE)]
    return [(_SETS[2] if config.mesh.pipe == 1 else _SETS[0], config) for config in drawn]


# The configurations of a family to compile, each with its set; they are the same every time.
DESIGNS = {"gpt2": _gpt2_designs, "llama": _llama_designs}


# --- Labels ---------------------------------------------------------------------------------------------------------


def make_labels(
    kind: str, workers: int, seconds: float, known: Sequence[LabelRow] = (), family: str = "gpt2"
) -> list[LabelRow]:
    """Compile all designs except those that are known; report and leave out those that fail or take too long.

    Args:
        kind: kind of GPU.
        workers: number of processes.
        seconds: limit of each compilation.
        known: labels that were made before.
        family: family of the models.
    """
    per_host, before = 8, {_fields(row.config): row for row in known}
    chosen = DESIGNS[family]()
    new = [config for _, config in chosen if _fields(config) not in before]
    requests = [
        compiled.CompileRequest(
            config, kind, math.ceil(config.mesh.devices / per_host), min(config.mesh.devices, per_host)
        )
        for config in new
    ]
    answers = dict(zip(map(_fields, new), compiled.oracles(requests, workers, seconds, progress=True), strict=True))
    rows = []
    for name, config in chosen:
        answer = answers.get(_fields(config))
        if isinstance(answer, str):
            print(f"left out: {answer}")
        else:
            rows.append(LabelRow(name, config, answer) if answer else before[_fields(config)])
    return rows


def _fields(config: Config) -> tuple:
    """Return the values of a configuration that a label keeps."""
    return operator.attrgetter(*_FIELDS)(config)


def write(rows: Sequence[LabelRow], path: pathlib.Path) -> None:
    """Write labels as CSV: set, the configuration's fields that vary, and the compiler's answer."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        answer = list(compiled.OracleMemory.__dataclass_fields__)
        writer.writerow(["set", *_FIELDS, *answer])
        for row in rows:
            figures = [getattr(row.memory, name) for name in answer]
            writer.writerow(
                [row.set, *_fields(row.config), *(round(x, 2) if isinstance(x, float) else x for x in figures)]
            )


def read(path: pathlib.Path) -> list[LabelRow]:
    """Return the labels that `write` wrote.

    Raises:
        UserError: there is no such file.
    """
    if not path.exists():
        raise UserError(f"there are no labels at {path}; {command('experiments.memory.labels')} makes them")
    defaults, rows = Config(), []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            values: dict[str, Any] = {}
            for name, default in zip(_FIELDS, _fields(defaults), strict=True):
                text, kind = line.get(name, str(default)), type(default)
                values[name] = text == "True" if kind is bool else kind(text)
            figures = {name: int(line[name]) for name in ("state", "temporary", "total")}
            answer = compiled.OracleMemory(
                **figures, compile_seconds=float(line["compile_seconds"]), source=line["source"]
            )
            rows.append(LabelRow(line["set"], from_dict(nested(values)), answer))
    return rows


def report(rows: Sequence[LabelRow]) -> str:
    """Return how far the closed form is off on each set, and what compiling took, as a Markdown table."""
    lines = [
        "| set | configurations | parameters/device | closed form: mean, max error "
        "| over the bound | bound over compiler, median | compile s: mean, total |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in _SETS:
        some = [row for row in rows if row.set == name]
        if not some:
            continue
        truth = np.array([row.memory.total for row in some])
        closed = np.array([bytes_of(row.config) for row in some])
        bound = closed * np.exp([margin(r.config.model, r.config.mesh.pipe) for r in some])
        sizes = [parameters(row.config) / 1e6 for row in some]
        seconds = [row.memory.compile_seconds for row in some]
        off = np.abs(closed / truth - 1) * 100
        lines.append(
            f"| {name} | {len(some)} | {min(sizes):.0f} to {max(sizes):.0f} M | {off.mean():.1f}%, {off.max():.1f}% "
            f"| {int((truth > bound).sum())} | {np.median(bound / truth):.2f} "
            f"| {np.mean(seconds):.1f}, {np.sum(seconds):.0f} |"
        )
    return "\n".join(lines)


def _define_flags() -> None:
    flags.DEFINE_enum("family", "gpt2", sorted(FILES), "family of the models")
    flags.DEFINE_string("out", None, "file of the labels; default: the one beside this module")
    flags.DEFINE_string("kind", "h100", "GPU to compile for")
    flags.DEFINE_integer("workers", 2, "compilations at a time", lower_bound=1)
    flags.DEFINE_float("seconds", 300, "limit of one compilation", lower_bound=1)
    flags.DEFINE_boolean("evaluate", False, "print the figures of the labels in --out")


def main(_: Sequence[str]) -> None:
    """Compile the labels that are missing, and print what they say of the closed form."""
    labels = pathlib.Path(_FLAGS.out or FILES[_FLAGS.family])
    if not _FLAGS.evaluate:
        if not compiled.cuda():
            raise UserError("labels need jax's CUDA plugin to compile for GPUs; pip install -r requirements-gpu.txt")
        labels.parent.mkdir(parents=True, exist_ok=True)
        known = read(labels) if labels.exists() else []
        write(make_labels(_FLAGS.kind, _FLAGS.workers, _FLAGS.seconds, known, _FLAGS.family), labels)
    print(report(read(labels)))


if __name__ == "__main__":
    command_line.run(main, _define_flags)
