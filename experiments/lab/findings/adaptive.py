"""The planner's choice of codecs by a probe: predicted against measured steps, and the loss against its budget."""

import pathlib
import statistics

import numpy as np

from experiments.lab.findings import gains
from experiments.lab.findings.gains import Gain, measured
from experiments.lab.laboratory import summary
from experiments.lab.measuring import adaptive as experiment
from experiments.lab.page.section import Section, Target, lab, listed, percent, seconds, signed, span, table
from experiments.lab.records import Records
from paxtrain.study.loss_probe_file import WORDS, ProbedCodec, excess

TITLE, SOURCE = "Codecs chosen by a probe", "adaptive.jsonl"
DENSE, CHOSEN = experiment.DENSE, experiment.CHOSEN
_PLAN = "the plan whose codecs the planner chooses by a probe of the model and a profile of the links"
PREDICTED = Target.at_most(f"Predicted step, dense and of {_PLAN}, largest error", 0.08, percent)
WITHIN = Target.at_most(
    f"Validation loss of {_PLAN}, against dense after equal steps, for a budget of {percent(experiment.BUDGET)}",
    experiment.BUDGET,
    lambda x: f"{100 * x:+z.2f}%",
)
FASTER = Target(f"Step of {_PLAN}", "faster than dense")


def error(line: dict, kind: str) -> float:
    """Return the share by which the prediction of a kind's step is above the measured median."""
    return float(line["predicted"][kind] / summary(line["seconds"][kind])["median"] - 1)


def captured(line: dict) -> Gain:
    """Return the share of the time that links cost a dense step which the plan removes."""
    return gains.captured(line["seconds"][DENSE], line["seconds"][CHOSEN], line["unlimited"])


def losses(records: Records, plan: str) -> list[float]:
    """Return the share by which a plan's last validation loss is above dense's with the same seed, for each seed."""
    last: dict[str, dict[int, float]] = {}
    for line in records:
        if "validation" in line:
            last.setdefault(line["plan"], {})[line["seed"]] = line["validation"][-1][1]
    dense = last.get(experiment.BASE.name, {})
    return [loss / dense[seed] - 1 for seed, loss in last.get(plan, {}).items() if seed in dense]


def _codecs(values: list[dict]) -> list[ProbedCodec]:
    return [ProbedCodec(one["place"], one["label"], tuple(one["losses"])) for one in values]


def _noisy(mean: float, noise: float) -> str:
    return f"{100 * mean:+z.2f}% ± {noise:.2%}"


def _lost(found: list[float]) -> str:
    """Return the mean over the seeds, with its standard error."""
    noise = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return _noisy(statistics.fmean(found), noise) if found else "not trained"


# --- Words and tables -------------------------------------------------------------------------------------------------


def _at(line: dict) -> str:
    return f"{line['share']:.0%} ({line['rate']:.0f} Mbit/s)"


def _words(records: Records, lines: list[dict]) -> str:
    split, trained = experiment.BASE, [line for line in records if "validation" in line]
    seeds = len({line["seed"] for line in trained})
    repeats = span(len(times) for line in lines for times in line["seconds"].values())
    words = f"""[A probe](study.md#on-your-own-model) trains the lab's model densely and with each codec at each place.
    Links are then set so that communication takes a given share of a dense step, by the planner's prediction, and
    profiled. From both the planner chooses codecs within a budget of {percent(experiment.BUDGET)} loss, on mesh
    {"x".join(map(str, split.mesh))} with {split.schedule}; {repeats} repeats. All else is as under Compression, with
    the embedding synchronised fused."""
    if seeds:
        words += f""" Losses are validation losses after {trained[0]["validation"][-1][0]} steps against dense with the
        same seed: mean and standard error over {seeds} seeds, none of which the probe has seen."""
    return words


def _probe(line: dict) -> str:
    rows = [(WORDS[one.place], one.label, _noisy(one.mean, one.noise)) for one in _codecs(line["codecs"])]
    return table((f"probe, {line['steps']} steps, {line['seeds']} seeds", "codec", "loss against dense"), rows, words=2)


def _plan(line: dict) -> str:
    """Return what goes through which codec."""
    stages = line["compress"].get("data.stages", "none")
    some = stages.count(",") + 1 < experiment.BASE.mesh[1]
    which = {
        "backward": "" if line["compress"].get("backward.messages") == "all" else " of the epilogue",
        "data": f" of stages {stages}" if some else "",
    }
    said = [f"{one.label} for {WORDS[one.place]}{which.get(one.place, '')}" for one in _codecs(line["codecs"])]
    return listed(said) or "nothing compressed"


def _times(records: Records, lines: list[dict]) -> str:
    rows = []
    for line in lines:
        dense = line["seconds"][DENSE]
        for kind, times in line["seconds"].items():
            more = ("", "", "", "")
            if kind == CHOSEN:
                expected = _noisy(*excess(_codecs(line["codecs"])))
                lost = _lost(losses(records, line["plan"]))
                more = (gains.speedup(dense, times).as_factor, captured(line).as_share, expected, lost)
            what = DENSE if kind == DENSE else _plan(line)
            foretold = (seconds(line["predicted"][kind]), signed(error(line, kind)))
            rows.append((_at(line), what, measured(times), *foretold, *more))
        free = line["unlimited"]
        bound = (gains.bound(dense, free).as_factor, "100%")
        rows.append((_at(line), "dense, links without limits", measured(free), "", "", *bound, "", ""))
    headings = ("communication", "", "step", "predicted", "error", "speed-up", "captured", "loss, probed", "loss")
    return table(headings, rows, words=2)


def _targets(records: Records, lines: list[dict]) -> tuple[Target, ...]:
    within, notes = WITHIN, []
    errors = {(kind, line["key"]): error(line, kind) for line in lines for kind in line["seconds"]}
    for line in lines:
        notes.append(f"dense {signed(errors[DENSE, line['key']])}, the plan {signed(errors[CHOSEN, line['key']])}")
    said = "; ".join(f"{note} at {line['share']:.0%}" for note, line in zip(notes, lines))
    predicted = PREDICTED.judged(float(np.max(np.abs(list(errors.values())))), said)
    found = {line["plan"]: losses(records, line["plan"]) for line in lines}
    if all(found.values()):
        worst = max(found.values(), key=statistics.fmean)
        note = f"{len(worst)} seeds, {span(worst, WITHIN.show)}"
        within = WITHIN.judged(statistics.fmean(worst), note)
    found_gains = [gains.speedup(line["seconds"][DENSE], line["seconds"][CHOSEN]) for line in lines]
    faster = ", ".join(
        f"{gain.as_factor} at {line['share']:.0%}, of at most "
        f"{gains.bound(line['seconds'][DENSE], line['unlimited']).as_factor} without limits of links; "
        f"{captured(line).as_share} captured"
        for gain, line in zip(found_gains, lines)
    )
    return predicted, within, FASTER.said(faster, min(gain.value for gain in found_gains) > 1)


def section(folder: pathlib.Path) -> Section:
    """Return the probe, and beside its predictions the steps and the loss of dense training and of the plan."""
    records = Records(folder / SOURCE)
    lines = [line for line in records if "predicted" in line]
    if not lines:
        return Section(TITLE, lab("adaptive"), (SOURCE,), (PREDICTED, WITHIN, FASTER))
    probed = [_probe(records[experiment.PROBE])] if experiment.PROBE in records else []
    blocks = (_words(records, lines), *probed, _times(records, lines))
    return Section(TITLE, lab("adaptive"), (SOURCE,), _targets(records, lines), blocks)
