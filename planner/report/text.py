"""What the planner found, in words: the table of the ranked plans and what there is to say of the chosen one.

A Report joins what search, placement, comparison and the memory estimates made; text() prints it, and
planner.report.page
draws it.
"""

import dataclasses
import functools
import itertools
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.devices.gpus import GPUS
from paxtrain.run.metrics import flops_per_token
from planner.cluster.cluster import Cluster
from planner.cost.links import Fabric
from planner.cost.step_time import Candidate, Problem, Step
from planner.report.svg import duration
from planner.search.baselines import Comparison
from planner.search.search import Found, Outcome

WIDTH = 120  # columns of a terminal


class Noise(NamedTuple):
    """How sure the gain of the placement over host order is.

    Attributes:
        gain: mean over the link samples of host order's step time over the placement's, less 1.
        std: of that over the samples. words: one sentence on how it was found.
    """

    gain: float
    std: float
    words: str


class OracleRow(NamedTuple):
    """One compilation of the memory oracle: what was compiled, bytes per device, and what it took."""

    configuration: str
    bytes: float
    compile_seconds: float
    source: str


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """All that there is to tell.

    Attributes:
        chosen: the recommended plan, one of outcome.ranked.
        fabric: the links that the search went by.
        memory: of the chosen plan by what it is for, bytes on a device of each stage [P].
        limit: bytes that a device may hold. memory_source: which estimate `memory` and the table's figures are.
        sources: where each kind of figure comes from, by its name.
        noise: of the placement's gain; None: the links were measured once.
        oracle: what was compiled to check the memory; empty: no oracle was at hand.
        explained: a sentence for each plan that was not chosen, "what: why".
        command: that made this.
    """

    cluster: Cluster
    model: ModelConfig
    global_batch: int
    outcome: Outcome
    chosen: Found
    fabric: Fabric
    comparisons: list[Comparison]
    memory: dict[str, np.ndarray]
    limit: float
    memory_source: str
    sources: dict[str, str]
    noise: Noise | None = None
    oracle: tuple[OracleRow, ...] = ()
    explained: tuple[str, ...] = ()
    command: str = ""

    @functools.cached_property
    def problem(self) -> Problem:
        return Problem(self.cluster, self.model, self.chosen.candidate)

    @functools.cached_property
    def step(self) -> Step:
        """The chosen plan's step on its placement, a batch of one."""
        return self.problem.step(self.fabric, self.chosen.placement.hosts[None])

    def tokens_per_second(self, seconds: float) -> float:
        """Of the whole cluster, if a step takes so long."""
        return self.global_batch * self.model.sequence / seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the chosen plan, 0 to 1; None where a device has no data sheet."""
        if not set(self.cluster.kinds) <= set(GPUS):
            return None
        peak = sum(GPUS[kind].peak_flops for kind in self.cluster.kinds) * self.cluster.devices_per_host
        return self.tokens_per_second(self.chosen.seconds) * flops_per_token(self.model) / peak

    @property
    def rejected(self) -> list[Found]:
        """Plans that rank before the chosen one and were not taken."""
        return self.outcome.ranked[: self.outcome.ranked.index(self.chosen)]


# --- Words ------------------------------------------------------------------------------------------------------------


def gap(found: Found) -> float:
    """How much longer the step is at most than on the plan's best placement, as a share; inf: no bound is known."""
    bound = found.placement.bound
    return max(found.seconds / bound - 1, 0.0) if bound > 0 else np.inf


def slower(report: Report, comparison: Comparison) -> float:
    """How much longer the comparison's step is than the chosen plan's, as a share."""
    return comparison.seconds / report.chosen.seconds - 1


def percent(share: float) -> str:
    """A share as a signed percentage of two or three digits."""
    return f"{100 * share:+.{2 if abs(share) < 0.0995 else 1}f} %"


def share(value: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.1f} %"


def tokens(per_second: float) -> str:
    """Tokens/s in four digits or so: "281 k", "1.02 M"."""
    for factor, prefix in ((1e6, " M"), (1e3, " k")):
        if per_second >= factor:
            return f"{per_second / factor:.3g}{prefix}"
    return f"{per_second:.3g}"


def mesh(candidate: Candidate) -> str:
    """ "32 x 4 x 1": data x pipe x tensor, with " seq" behind it where tensor also splits the sequence."""
    sequence = " seq" if candidate.sequence_parallel else ""
    return f"{candidate.data} x {candidate.pipe} x {candidate.tensor}{sequence}"


def schedule(candidate: Candidate) -> str:
    """The schedule with its virtual stages."""
    return candidate.schedule if candidate.chunks == 1 else f"interleaved x{candidate.chunks}"


def stage_layers(counts: Sequence[int], width: int = 1000) -> str:
    """Layers of each virtual stage, equal neighbours together, "5x4,4x2"; or if that is too wide the least and most."""
    runs = [(n, len(list(group))) for n, group in itertools.groupby(counts)]
    words = ",".join(f"{n}x{times}" if times > 1 else str(n) for n, times in runs)
    return words if len(words) <= width else f"{min(counts)} to {max(counts)}"


def compression(candidate: Candidate) -> str:
    """What travels compressed with the ranks of its factors: of the epilogue's or all gradients, and over data."""
    c = candidate
    between = f"{c.backward[:3]}{c.backward_rank}" if c.backward != "none" else ""
    over = f"data{c.data_rank}" if c.data_rank else ""
    return "+".join(filter(None, (between, over))) or "none"


def compression_words(candidate: Candidate) -> str:
    """The same in full."""
    c, parts = candidate, []
    if c.backward != "none":
        which = "of the epilogue" if c.backward == "epilogue" else "all"
        parts.append(f"gradients between stages ({which}) at rank {c.backward_rank}")
    if c.data_rank:
        parts.append(f"gradients over data at rank {c.data_rank}, where they end the step")
    return " and ".join(parts) or "nothing is compressed"


# --- The table --------------------------------------------------------------------------------------------------------

HEADS = ("", "d x p x t", "micro", "schedule", "save", "zero1", "layers", "compress", "step s", "tokens/s", "GB",
         "gap %", "placed")  # fmt: skip
WORDS = (1, 3, 4, 6, 7, 12)  # columns of words


def table(report: Report) -> list[list[str]]:
    """Rows of cells for the ranked plans, to go under HEADS."""
    rows = []
    for n, found in enumerate(report.outcome.ranked, 1):
        c = found.candidate
        rows.append([
            f"{n}{'*' if found is report.chosen else ' '}", mesh(c).replace(" ", ""), str(c.micro_batch), schedule(c),
            c.save, "yes" if c.zero1 else "no", stage_layers(c.counts, 12), compression(c), f"{found.seconds:.4g}",
            tokens(report.tokens_per_second(found.seconds)), f"{found.memory / 1e9:.3g}",
            f"{100 * gap(found):.1f}" if np.isfinite(gap(found)) else "-", found.placement.source,
        ])  # fmt: skip
    return rows


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    between = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    lines = [
        between.join(cell.ljust(w) if i in WORDS else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
    return [line.rstrip()[:WIDTH] for line in lines]


def headline(report: Report) -> str:
    """The chosen plan and what is predicted of it, one sentence."""
    c, found = report.chosen.candidate, report.chosen
    speed = f"{duration(found.seconds)} a step, {tokens(report.tokens_per_second(found.seconds))} tokens/s"
    used = "" if report.mfu is None else f", {share(report.mfu)} of peak FLOP/s"
    return f"{mesh(c)} (data x pipe x tensor), {schedule(c)}, micro-batch {c.micro_batch}: {speed}{used}"


def gains(report: Report) -> list[str]:
    """What the chosen plan saves against each comparison."""
    return [f"{percent(slower(report, other))} {other.name}" for other in report.comparisons]


def noise_words(report: Report) -> str:
    """Whether the placement gains more than the links' measurements repeat."""
    if report.noise is None:
        return "links were measured once, so the noise of the placement's gain is not known"
    gain, std, words = report.noise
    return f"placement gains {100 * gain:.2f} ± {100 * std:.2f} % over host order; {words}"


def memory_words(report: Report) -> str:
    """Bytes of the chosen plan, against the limit, and who says so."""
    used, limit = report.chosen.memory, report.limit
    return f"{used / 1e9:.3g} of {limit / 1e9:.3g} GB per device ({share(used / limit)}), {report.memory_source}"


def oracle_words(report: Report) -> str:
    """What the oracle compiled, and how long that took."""
    if not report.oracle:
        return "no plan was compiled to check its memory"
    total = sum(row.compile_seconds for row in report.oracle)
    plans = "one plan" if len(report.oracle) == 1 else f"{len(report.oracle)} plans"
    return f"{plans} compiled to check the memory, in {total:.1f} s in all"


def statistics(report: Report) -> str:
    """How the search came to it."""
    o = report.outcome
    return (
        f"{o.enumerated:,} candidates, {o.fitting:,} fit, {o.simulated:,} simulated (the others' bounds are above), "
        f"{o.placed} placed; {o.seconds:.1f} s"
    )


def text(report: Report) -> str:
    """The report for a terminal of 120 columns."""
    model, cluster = report.model, report.cluster
    kinds = ", ".join(dict.fromkeys(cluster.kinds))
    lines = [
        f"{model.parameter_count() / 1e9:.3g} B parameters, batch {report.global_batch}, on {cluster.name}: "
        f"{len(cluster.hosts)} hosts x {cluster.devices_per_host} {kinds}",
        "",
        *_aligned([list(HEADS), *table(report)]),
        "",
        *_labelled("chosen", headline(report)),
        *_labelled("others", "step time " + ", ".join(gains(report))) * bool(report.comparisons),
        *_labelled("noise", noise_words(report)),
        *_labelled("memory", f"{memory_words(report)}; {oracle_words(report)}"),
        *_labelled("search", statistics(report)),
    ]
    return "\n".join(lines)


def _labelled(label: str, words: str) -> list[str]:
    """Words wrapped to the terminal, the label before the first line."""
    wrapped = textwrap.wrap(words, WIDTH - 8)
    return [f"{label if i == 0 else '':8}{line}" for i, line in enumerate(wrapped)]
