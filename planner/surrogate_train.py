"""Makes the labels of the memory surrogate with the oracle, and trains it: `python -m planner.surrogate_train`.

Labels are small models of varied proportions, compiled for one kind of GPU: compiling takes as long for small models as
for large ones, and the network sees proportions only. A second set with 2 to 8 times the parameters per device of any
label is held out; the table at the end says what was predicted of it. The oracle keeps its answers on disk, so a run
that was stopped goes on where it was, and what is in memory_labels.csv already is not compiled again.

    --evaluate      trains nothing: the shipped surrogate and the labels in the file
"""

import csv
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from paxtrain import errors
from paxtrain.config import Config, from_dict
from paxtrain.errors import UserError
from planner.memory import closed_form, compiled, surrogate

_FLAGS = flags.FLAGS
LABELS, HELD_OUT = 96, 30
_SETS = ("label", "held out")
_MEMBERS, _STEPS = 16, 600
_WIDTHS = (16, 8)
_NOISE, _DECAY = 0.6, 0.03  # few labels, many features: each is blurred by 0.6 of its deviation, and weights stay small
_FIELDS = (
    ("model", ("vocab_size", "layers", "hidden", "heads", "sequence", "attention")),
    ("mesh", ("data", "pipe", "tensor", "zero1")),
    ("pipeline", ("schedule", "virtual_stages", "pipe_layers", "save", "scan_layers")),
    ("batch", ("global_batch", "micro_batch")),
    ("compress", ("backward", "backward_rank", "error", "data", "data_rank")),
)


class LabelRow(NamedTuple):
    """A label.

    Attributes:
        set: one of "label" and "held out".
        config: what was compiled.
        memory: what the oracle said.
    """

    set: str
    config: Config
    memory: compiled.OracleMemory


# --- Which models ---------------------------------------------------------------------------------------------------


def parameters(config: Config) -> float:
    """Parameters of the model that one device holds whole, before ZeRO-1."""
    return float(closed_form.parameters(closed_form.of(config))[0])


def _draw(rng: np.random.Generator, sizes: dict[str, tuple[int, ...]], lowest: float, highest: float) -> Config:
    """A random configuration with so many parameters per device; deep stages are scanned, so that it compiles soon."""

    def pick(*values: Any, p: Sequence[float] | None = None) -> Any:
        return values[rng.choice(len(values), p=p)]

    while True:
        schedule = pick("eager_1f1b", "1f1b", "gpipe", "interleaved_1f1b", p=[0.5, 0.18, 0.16, 0.16])
        pipe = 2 if schedule == "interleaved_1f1b" else pick(2, 4)
        if schedule == "eager_1f1b":
            pipe = pick(1, 2, 4, 8, p=[0.2, 0.42, 0.34, 0.04])
        chunks = pick(2, 3, p=[0.9, 0.1]) if schedule == "interleaved_1f1b" else 1
        stages, scan = pipe * chunks, rng.random() < 0.38
        slots = rng.integers(4, 17) if scan else rng.integers(1, {1: 7, 2: 5}.get(stages, 3))
        counts = np.full(stages, slots)
        if rng.random() < 0.25 and stages > 1 and slots > 1:
            counts[-rng.integers(1, stages) :] -= 1
        hidden, micro_batch, data = pick(*sizes["hidden"]), pick(*sizes["micro_batch"]), pick(1, 2, 4, 8)
        micro_batches = pick(4, 8, 12, 16) if schedule == "gpipe" else pipe * pick(1, 2, 3, 4)
        compress = {"error": pick("lazy", "explicit")}
        if pipe > 1 and rng.random() < 0.15:
            compress |= {"backward": pick("epilogue", "all"), "backward_rank": pick(8, 16, 32)}
        if data > 1 and rng.random() < 0.12:
            compress |= {"data": "all", "data_rank": pick(16, 32, 64)}
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


def designs() -> list[tuple[str, Config]]:
    """The configurations to compile and the set of each, the same ones every time."""
    small = {"hidden": (512, 640, 768, 1024), "sequence": (256, 512, 1024), "micro_batch": (1, 2, 4, 8)}
    large = {"hidden": (1536, 2048, 3072, 4096), "sequence": (1024, 2048), "micro_batch": (1, 2, 4)}
    labels, held_out = np.random.default_rng(0), np.random.default_rng(1)
    return [("label", _draw(labels, small, 3e6, 60e6)) for _ in range(LABELS)] + [
        ("held out", _draw(held_out, large, 120e6, 480e6)) for _ in range(HELD_OUT)
    ]


# --- Labels ---------------------------------------------------------------------------------------------------------


def make_labels(kind: str, workers: int, seconds: float, known: Sequence[LabelRow] = ()) -> list[LabelRow]:
    """Compiles all designs but those that are known; those that fail or take too long are reported and left out."""
    per_host, before = 8, {_fields(row.config): row for row in known}
    chosen = designs()
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
    """What of a configuration a label says."""
    return tuple(getattr(getattr(config, section), name) for section, names in _FIELDS for name in names)


def write(rows: Sequence[LabelRow], path: pathlib.Path) -> None:
    """Writes labels as CSV: set, the configuration's fields that vary, and the oracle's answer."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        answer = list(compiled.OracleMemory.__dataclass_fields__)
        writer.writerow(["set", *(f"{section}.{name}" for section, names in _FIELDS for name in names), *answer])
        for row in rows:
            figures = [getattr(row.memory, name) for name in answer]
            writer.writerow(
                [row.set, *_fields(row.config), *(round(x, 2) if isinstance(x, float) else x for x in figures)]
            )


def read(path: pathlib.Path) -> list[LabelRow]:
    """Reads what `write` wrote.

    Raises:
        UserError: there is no such file.
    """
    if not path.exists():
        raise UserError(f"there are no labels at {path}; python -m planner.surrogate_train makes them")
    defaults, rows = Config(), []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            values: dict[str, dict[str, Any]] = {section: {} for section, _ in _FIELDS}
            for section, names in _FIELDS:
                for name in names:
                    text, kind = line[f"{section}.{name}"], type(getattr(getattr(defaults, section), name))
                    values[section][name] = text == "True" if kind is bool else kind(text)
            figures = {name: int(line[name]) for name in ("state", "temporary", "total")}
            answer = compiled.OracleMemory(
                **figures, compile_seconds=float(line["compile_seconds"]), source=line["source"]
            )
            rows.append(LabelRow(line["set"], from_dict(values), answer))
    return rows


# --- Training -------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[LabelRow]) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, features] and log(oracle / analytic) [n]."""
    x, y = [], []
    for row in rows:
        shape = closed_form.of(row.config)
        closed = closed_form.analytic(shape)
        x.append(surrogate.features(shape, closed)[0])
        y.append(math.log(row.memory.total / float(closed.total)))
    return np.array(x), np.array(y)


def train(rows: Sequence[LabelRow], seed: int = 0) -> surrogate.Surrogate:
    """An ensemble of small networks, member i trained without the labels i, i + members, ...

    The error of a label is that of the member that did not see it. What all members say is shrunk by the factor that
    makes these errors smallest: where what is left of the closed form cannot be learned, the closed form stays.
    """
    import jax
    import jax.numpy as jnp
    import optax

    x, y = _table(rows)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y, fold = x[order], y[order], np.arange(len(x)) % _MEMBERS
    mean, scale, spread = x.mean(axis=0), np.maximum(x.std(axis=0), 0.05), y.std()
    inputs = jnp.asarray(np.clip((x - mean) / scale, -3, 3))
    seen = jnp.asarray(fold[None] != np.arange(_MEMBERS)[:, None])
    widths = (x.shape[1], *_WIDTHS, 1)

    def init(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        sizes = list(zip(widths, widths[1:]))
        layers = [(jax.random.normal(k, nm) * nm[0] ** -0.5, jnp.zeros(nm[1])) for k, nm in
                  zip(jax.random.split(key, len(sizes)), sizes)]  # fmt: skip
        return [*layers[:-1], (jnp.zeros(sizes[-1]), jnp.zeros(1))]  # which says: as the closed form

    def predict(layers: list, inputs: jax.Array) -> jax.Array:
        for kernel, bias in layers[:-1]:
            inputs = jnp.tanh(inputs @ kernel + bias)
        kernel, bias = layers[-1]
        return (inputs @ kernel + bias)[:, 0]

    def loss(layers: list, seen: jax.Array, key: jax.Array) -> jax.Array:
        blurred = inputs + _NOISE * jax.random.normal(key, inputs.shape)
        errors = optax.huber_loss(predict(layers, blurred), jnp.asarray(y / spread))
        return (errors * seen).sum() / seen.sum() + _DECAY * sum((kernel**2).sum() for kernel, _ in layers)

    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, _STEPS))

    @jax.jit
    @jax.vmap
    def fit(key: jax.Array, seen: jax.Array) -> list:
        def step(carry: tuple, key: jax.Array) -> tuple:
            layers, state = carry
            updates, state = optimizer.update(jax.grad(loss)(layers, seen, key), state, layers)
            return (optax.apply_updates(layers, updates), state), None

        layers = init(key)
        return jax.lax.scan(step, (layers, optimizer.init(layers)), jax.random.split(key, _STEPS))[0][0]

    fitted = fit(jax.random.split(jax.random.key(seed), _MEMBERS), seen)
    layers = [(np.asarray(kernel, float), np.asarray(bias, float)) for kernel, bias in fitted]

    def ensemble(factor: float, margin: float, source: dict[str, Any]) -> surrogate.Surrogate:
        kernel, bias = layers[-1]
        last = kernel * factor, bias * factor
        bounds = float(min(y.min(), 0)), float(max(y.max(), 0))
        return surrogate.Surrogate((*layers[:-1], last), mean, scale, *bounds, margin, source)

    def unseen(factor: float) -> np.ndarray:
        return ensemble(factor, 0.0, {}).members(x)[fold, np.arange(len(x))]

    raw = unseen(spread)
    shrink = float(np.clip(raw @ y / np.maximum(raw @ raw, 1e-12), 0, 1))
    honest = unseen(spread * shrink)
    source = {
        "labels": len(x),
        "program": rows[0].memory.source,
        "shrink": round(shrink, 3),
        "error": round(float(np.abs(np.expm1(honest - y)).mean()), 4),
        "exceeded": round(1 / (len(x) + 1), 4),
    }
    return ensemble(spread * shrink, float(max(0.0, (y - honest).max())), source)


# --- Figures --------------------------------------------------------------------------------------------------------


def report(rows: Sequence[LabelRow], trained: surrogate.Surrogate) -> str:
    """What closed form and surrogate make of each set, and what the oracle took, as a Markdown table."""
    lines = [
        "| set | configurations | parameters/device | analytic: mean, max error | learned: mean, max error "
        "| over the bound | bound over oracle, median | compile s: mean, total |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in _SETS:
        some = [row for row in rows if row.set == name]
        if not some:
            continue
        shapes = [closed_form.of(row.config) for row in some]
        truth = np.array([row.memory.total for row in some])
        closed = np.array([float(closed_form.analytic(shape).total) for shape in shapes])
        learned = [trained.predict(shape) for shape in shapes]
        expected, bound = (np.array([float(getattr(p, key)[0]) for p in learned]) for key in ("expected", "bound"))
        sizes = [parameters(row.config) / 1e6 for row in some]
        seconds = [row.memory.compile_seconds for row in some]
        off = [np.abs(x / truth - 1) * 100 for x in (closed, expected)]
        lines.append(
            f"| {name} | {len(some)} | {min(sizes):.0f} to {max(sizes):.0f} M "
            + "".join(f"| {x.mean():.1f}%, {x.max():.1f}% " for x in off)
            + f"| {int((truth > bound).sum())} | {np.median(bound / truth):.2f} "
            f"| {np.mean(seconds):.1f}, {np.sum(seconds):.0f} |"
        )
    return "\n".join(lines)


def _define_flags() -> None:
    flags.DEFINE_string("out", str(surrogate.DATA), "folder of memory_labels.csv and memory_surrogate.npz")
    flags.DEFINE_string("kind", "h100", "GPU to compile for")
    flags.DEFINE_integer("workers", 2, "compilations at a time", lower_bound=1)
    flags.DEFINE_float("seconds", 300, "limit of one compilation", lower_bound=1)
    flags.DEFINE_boolean("evaluate", False, "print the figures of the labels and the surrogate in --out")
    flags.DEFINE_boolean("labels", True, "compile the labels; --nolabels trains on those in --out")


def main(_: Sequence[str]) -> None:
    out = pathlib.Path(_FLAGS.out)
    labels, weights = out / "memory_labels.csv", out / surrogate.WEIGHTS.name
    if _FLAGS.labels and not _FLAGS.evaluate:
        if not compiled.cuda():
            raise UserError("labels need jax's CUDA plugin to compile for GPUs; pip install -r requirements-gpu.txt")
        out.mkdir(parents=True, exist_ok=True)
        known = read(labels) if labels.exists() else []
        write(make_labels(_FLAGS.kind, _FLAGS.workers, _FLAGS.seconds, known), labels)
    rows = read(labels)
    if not _FLAGS.evaluate:
        train([row for row in rows if row.set == "label"]).save(weights)
    print(report(rows, surrogate.load(weights)))


if __name__ == "__main__":
    errors.run(main, _define_flags)
