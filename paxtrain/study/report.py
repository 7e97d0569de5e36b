"""The report of a study: CSV files, a table, and a page that says plainly which claims hold and which do not."""

import csv
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from paxtrain.config import Config
from paxtrain.model import parameters
from paxtrain.study.measurements import BYTES, CsvRow

PAGE = "study.md"

# Headings of probe.BYTES in tables.
KINDS = dict(zip(BYTES, ("activations", "gradients", "embedding swap", "all-reduce", "reduce-scatter", "all-gather")))

# Thresholds in percent of the dense loss: runs closer than _CLOSE count as equally good, and differences below _VISIBLE
# as none.
_CLOSE = 1.0
_VISIBLE = 0.1
# Magnitude of a cosine below which errors count as hardly correlated.
_CORRELATED = 0.1


@dataclasses.dataclass
class VariantResult:
    """Result of one run of a variant with one seed.

    Attributes:
        name: name of the variant in files.
        label: name of the variant in tables.
        seed: seed of the run.
        rank: rank of the gradients between stages, if they are compressed.
        bytes: bytes that all devices together put on the links in a step, by the kinds probe.BYTES. If compression over
            data starts late, they are those after its start.
        losses: training loss of every step.
        validation: validation loss by step; step 0 is before the first one.
        errors: rows of probe.link_errors, with their step.
        spectra: rows of step, gradients_of, matrix, index, singular_value.
        skipped: number of steps whose gradients were not finite.
    """

    name: str
    label: str
    seed: int
    rank: int
    bytes: dict[str, int]
    losses: list[float] = dataclasses.field(default_factory=list)
    validation: dict[int, float] = dataclasses.field(default_factory=dict)
    errors: list[CsvRow] = dataclasses.field(default_factory=list)
    spectra: list[CsvRow] = dataclasses.field(default_factory=list)
    skipped: int = 0

    @property
    def final(self) -> float:
        """Validation loss after the last step."""
        return self.validation[max(self.validation)]

    @property
    def total_bytes(self) -> int:
        """Sum of the bytes of all kinds."""
        return sum(self.bytes.values())


def by_run(outcomes: Iterable[VariantResult]) -> dict[str, list[VariantResult]]:
    """Return the results of each variant by name, one per seed."""
    found: dict[str, list[VariantResult]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.name, []).append(outcome)
    return found


def differences(runs: dict[str, list[VariantResult]], name: str, other: str = "dense") -> list[float]:
    """Return the percentage by which a variant's final validation loss exceeds another one's, for each seed.

    Args:
        runs: results by name.
        name: name of the variant.
        other: name of the variant to compare with.
    """
    pairs = zip(runs[name], runs[other], strict=True)
    return [100 * (a.final / b.final - 1) for a, b in pairs]


def _perplexity(loss: float) -> float:
    """Return exp(loss), inf if it exceeds the range of floats."""
    return math.exp(loss) if loss < 700 else math.inf


def _mean(values: Iterable[float]) -> float:
    """Return the mean."""
    return statistics.fmean(values)


# --- Files of numbers -------------------------------------------------------------------------------------------------


def _write_csv(path: pathlib.Path, rows: list[CsvRow], columns: Sequence[str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{x:.7g}" if isinstance(x, float) else x for key, x in row.items()})


def write_csv(outcomes: list[VariantResult], out: pathlib.Path) -> None:
    """Write study.csv with a row per variant and seed, and the long losses.csv, errors.csv and spectra.csv."""
    runs = by_run(outcomes)
    rows = []
    for name, group in runs.items():
        for outcome, percent in zip(group, differences(runs, name), strict=True):
            sent = {f"bytes_{kind.replace('-', '_')}": outcome.bytes[kind] for kind in BYTES}
            rows.append(
                {"run": name, "seed": outcome.seed, "rank": outcome.rank}
                | {"steps": len(outcome.losses), "skipped": outcome.skipped}
                | {"untrained_loss": outcome.validation[0], "validation_loss": outcome.final}
                | {"perplexity": _perplexity(outcome.final), "percent_above_dense": percent}
                | {"bytes": outcome.total_bytes, **sent}
            )
    _write_csv(out / "study.csv", rows, list(rows[0]))

    def each(rows_of: str) -> list[CsvRow]:
        return [{"run": o.name, "seed": o.seed} | row for o in outcomes for row in getattr(o, rows_of)]

    errors = ("step", "direction", "link", "data_rank", "micro_batch", "relative_error", "weight_error", "cosine")
    _write_csv(out / "errors.csv", each("errors"), ("run", "seed", *errors, "error_mean", "change_mean"))
    spectra = ("step", "gradients_of", "matrix", "index", "singular_value")
    _write_csv(out / "spectra.csv", each("spectra"), ("run", "seed", *spectra))
    losses = [
        {"run": o.name, "seed": o.seed, "step": step, "loss": loss, "validation_loss": o.validation.get(step, "")}
        for o in outcomes
        for step, loss in enumerate(["", *o.losses])
    ]
    _write_csv(out / "losses.csv", losses, list(losses[0]))


# --- The table --------------------------------------------------------------------------------------------------------


def _spread(values: Sequence[float], form: str) -> str:
    """Return the mean as text, with the lowest and the highest if there are several values."""
    mean = format(_mean(values), form)
    return mean if len(values) < 2 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def table(outcomes: list[VariantResult]) -> list[list[str]]:
    """Return the table as rows of cells; the first row has the headings."""
    runs = by_run(outcomes)
    heads = ["run", "validation loss", "perplexity", "against dense, %", "kB a step", "times less"]
    rows = [[*heads, *KINDS.values()]]
    for name, group in runs.items():
        one = group[0]
        rows.append(
            [
                one.label,
                _spread([o.final for o in group], ".4f"),
                format(_mean(_perplexity(o.final) for o in group), ".3f"),
                _spread(differences(runs, name), "+.2f") if name != "dense" else "",
                f"{one.total_bytes / 1e3:.0f}",
                f"{runs['dense'][0].total_bytes / one.total_bytes:.2f}",
                *(f"{one.bytes[kind] / 1e3:.0f}" for kind in KINDS),
            ]
        )
    return rows


def _aligned(rows: list[list[str]]) -> str:
    """Return a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def markdown(rows: list[list[str]], words: int = 1) -> str:
    """Return a table in Markdown; the first row has the headings, and the first `words` columns are text."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * words + "|---:" * (len(rows[0]) - words) + "|", *lines[1:]])


# --- Sentences --------------------------------------------------------------------------------------------------------


def _percents(values: Sequence[float]) -> str:
    """Return the mean as text, with the lowest and the highest if there are several seeds."""
    spread = f" ({min(values):+.2f} to {max(values):+.2f})" if len(values) > 1 else ""
    return f"{_mean(values):+.2f} %{spread}"


def _close(name: str, values: Sequence[float]) -> str:
    """Return a sentence on whether a variant trains as well as dense, from the differences of losses in percent."""
    if not all(map(math.isfinite, values)):
        return f"{name} diverges."
    what = f"{_percents(values)} of its validation loss"
    close = sum(abs(value) <= _CLOSE for value in values)
    if close == len(values):
        return f"{name} ends within {_CLOSE:g} % of dense: {what}."
    if close:
        return f"{name} ends within {_CLOSE:g} % of dense in {close} of {len(values)} seeds only: {what}."
    if all(value > _CLOSE for value in values):
        return f"{name} does not end within {_CLOSE:g} % of dense, it is visibly worse: {what}."
    if all(value < -_CLOSE for value in values):
        return f"{name} ends below dense by more than {_CLOSE:g} %: {what}."
    return f"{name} ends more than {_CLOSE:g} % from dense in every seed, in either direction: {what}."


def effect(what: str, values: Sequence[float]) -> str:
    """Return a sentence on whether a change lowers the loss, from the differences that it makes in percent."""
    if not all(map(math.isfinite, values)):
        return f"{what}: one of the two runs diverges."
    found = _percents(values)
    if all(abs(value) < _VISIBLE for value in values):
        return f"{what} changes nothing that can be seen: {found}."
    if all(value < -_VISIBLE for value in values):
        return f"{what} lowers the loss: {found}."
    if all(value > _VISIBLE for value in values):
        return f"{what} raises the loss: {found}."
    return f"{what} has no clear effect, it differs from seed to seed: {found}."


def _errors(group: list[VariantResult], column: str, direction: str = "backward") -> np.ndarray:
    """Return the finite values of a column of error rows in one direction."""
    values = [row.get(column, math.nan) for o in group for row in o.errors if row["direction"] == direction]
    return np.array([value for value in values if math.isfinite(value)])


def _weight_errors(group: list[VariantResult]) -> float:
    """Return the mean relative error of weights' gradients, after all messages that a link compressed in a step."""
    last = {
        (o.seed, row["step"], row["link"], row["data_rank"]): row["weight_error"]
        for o in group
        for row in o.errors
        if row["direction"] == "backward"
    }
    return _mean(last.values())


def _orthogonality(group: list[VariantResult]) -> str:
    """Return sentences on whether the errors of messages are correlated with the changes of activations."""
    cosines, label = _errors(group, "cosine"), group[0].label
    if not cosines.size:
        return f"{label} leaves no error whose direction could be told."
    usual = float(np.quantile(np.abs(cosines), 0.95))
    verdict = "hardly correlated" if usual < _CORRELATED else "correlated"
    means = [float(np.quantile(np.abs(_errors(group, name)), 0.95)) for name in ("error_mean", "change_mean")]
    return (
        f"Errors of messages and changes of activations between micro-batches are {verdict} in {label}: their cosine "
        f"is {cosines.mean():+.4f} on average and below {usual:.3f} in magnitude for 95 % of the messages. Likewise, "
        f"the means over the root mean squares are below {means[0]:.2g} for errors and {means[1]:.2g} for changes."
    )


def _fused(runs: dict[str, list[VariantResult]]) -> str:
    """Return a sentence on the bytes that fusing the embedding's synchronisation saves, and on whether losses agree."""
    values = differences(runs, "cb_fe", "cb_epilogue")
    saved = 1 - runs["cb_fe"][0].total_bytes / runs["cb_epilogue"][0].total_bytes
    what = f"Fusing the embedding's synchronisation (CB + FE against CB epilogue) takes {saved:.1%} off a step's bytes"
    if all(abs(value) <= _CLOSE for value in values):
        return (
            f"{what}; it adds the same numbers in another order, which moves the loss by {_percents(values)}: chance."
        )
    return (
        f"{what}, but moves the loss by {_percents(values)}, more than adding the same numbers in another order should."
    )


def claims(outcomes: list[VariantResult]) -> list[str]:
    """Return one sentence per question, computed from a study's results; the sentences also say which claims fail."""
    runs = by_run(outcomes)
    label = {name: group[0].label for name, group in runs.items()}
    asked: tuple[str, ...] = ("cb_fe_sc", "cb_naive", "cb", "cb_epilogue", "everything")
    asked = (*asked, *(name for name in runs if name.startswith("codec_")))
    found = [_close(label[name], differences(runs, name)) for name in asked]
    found.append(effect("Lazy error propagation (CB against CB naive)", differences(runs, "cb", "cb_naive")))
    lazy, naive = (
        f"{_mean(_errors(runs[name], 'relative_error')):.0%} and {_weight_errors(runs[name]):.0%}"
        for name in ("cb", "cb_naive")
    )
    found.append(
        "Gradients between stages, and the weights' gradients that a step makes of them, are off by "
        f"{lazy} of their norms with it, by {naive} without."
    )
    found.append(_orthogonality(runs["cb"]))
    found.append(_fused(runs))
    by_rank = sorted((group[0].rank, name) for name, group in runs.items() if name == "cb" or "rank" in name)
    losses = ", ".join(f"{rank}: {_percents(differences(runs, name))}" for rank, name in by_rank)
    found.append(f"CB against dense by rank: {losses}.")
    dense = runs["dense"][0].total_bytes
    factors = ", ".join(f"{label[name]} {dense / runs[name][0].total_bytes:.2f}" for name in asked)
    found.append(f"Times fewer bytes on the links than dense: {factors}.")
    return found


# --- The page ---------------------------------------------------------------------------------------------------------


def summary(outcomes: list[VariantResult]) -> str:
    """Return the table without the kinds of bytes, and the sentences, for a terminal."""
    rows = [row[: -len(KINDS)] for row in table(outcomes)]
    return "\n".join([_aligned(rows), "", *(f"- {claim}" for claim in claims(outcomes))])


def _setting(config: Config, seeds: int) -> str:
    """Return the page's paragraph on the model and its training."""
    c, m, compress = config, config.model, config.compress
    message = f"{c.batch.micro_batch * m.sequence} x {m.hidden}"
    dense = f" after the first {compress.data.start:.0%} of the steps" if compress.data.start else ""
    return (
        f"A GPT of {parameters.published(m):,} parameters ({m.layers} layers of {m.hidden}, sequence {m.sequence}, "
        f"{m.dtype}) on a mesh of {c.mesh.data} data ranks x {c.mesh.pipe} stages, {c.pipeline.schedule}, "
        f"{c.micro_batches} micro-batches a step, {c.run.steps} steps of {c.batch.global_batch * m.sequence:,} tokens, "
        f"{seeds} seed{'s' if seeds > 1 else ''}. "
        f"Messages between stages are {message} and travel with rank {compress.backward.rank} (activations "
        f"{compress.forward.rank}); gradients over data with rank {compress.data.rank}{dense}."
    )


_WORDS = """\
- **CB**: gradients between stages as low-rank factors, with lazy error propagation; *naive* without it; *epilogue*:
  only those of the pipeline's drain, as the paper has it.
- **FE**: fused synchronisation of the tied embedding; runs without it synchronise the two copies one after the other.
  Losses are the same but for rounding, so on an emulated mesh CB + FE has the runs of CB epilogue, with its own bytes.
- **SC**: PowerSGD on the gradients over data of stages {stages}.
- **everything**: gradients and activations between stages, all messages, and gradients over data of all stages.
{codecs}
Bytes are those that all devices together put on the links in one step, read from the step as traced for the real mesh;
collectives are taken to run over rings. Where compression over data starts late, they are those after its start."""


# What goes through the codec of a place.
_CODED = {
    "backward": "gradients between stages",
    "forward": "activations between stages",
    "data": "gradients over data",
    "weights": "weights gathered over data",
    "embedding": "the embedding's gradients",
}


def _codecs(config: Config, outcomes: list[VariantResult]) -> str:
    """Return a line of `_WORDS` for each run of a codec that the configuration names besides low rank."""
    labels = {outcome.name: outcome.label for outcome in outcomes}
    return "".join(
        f"- **{labels[f'codec_{place}']}**: {what} through {config.compress.at(place).codec}, with the embedding's "
        "synchronisation fused.\n"
        for place, what in _CODED.items()
        if f"codec_{place}" in labels
    )


def write_page(config: Config, outcomes: list[VariantResult], figures: dict[str, str], out: pathlib.Path) -> None:
    """Write the page `study.md`.

    Args:
        config: configuration of the study.
        outcomes: results of all runs.
        figures: caption of each figure by file name.
        out: folder to write to.
    """
    seeds = len({outcome.seed for outcome in outcomes})
    once = "" if seeds > 1 else "One seed says nothing about chance: `--seeds=3` shows the spread."
    parts = [
        "# What compression does to training",
        _setting(config, seeds),
        _WORDS.format(stages=config.compress.data.stages, codecs=_codecs(config, outcomes)),
        "## Results",
        markdown(table(outcomes)),
        *([once] if once else []),
        "\n".join(f"- {claim}" for claim in claims(outcomes)),
        "## Figures",
        *(f"![{caption}]({name})\n\n*{caption}*" for name, caption in figures.items()),
        "Numbers: study.csv (runs), losses.csv (steps), errors.csv (messages), spectra.csv (singular values).",
    ]
    (out / PAGE).write_text("\n\n".join(parts) + "\n")
