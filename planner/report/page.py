"""The page report.html, for screen and paper: one file with its scripts, which fetches nothing."""

import functools
import importlib.metadata
import itertools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from paxtrain import files
from paxtrain.config.axes import MAIN, inside_axes
from paxtrain.model import parameters
from paxtrain.tables import times
from planner.report import activity, candidates, charts, further_text, groups, traffic
from planner.report.contents import Report, gap, slower
from planner.report.text import (
    HEADS,
    WORDS,
    assumed_words,
    compression_words,
    count,
    hosts,
    lossy_words,
    memory_words,
    mesh,
    micro_batches,
    nearby_words,
    noise_words,
    oracle_words,
    percent,
    ranking_words,
    schedule,
    sharded,
    share,
    stage_layers,
    statistics,
    sure_words,
    table,
    terms,
    tokens,
)
from planner.report.units import duration

_MOST_LINKS = 24  # slowest links in use that the table has


class HtmlTable(NamedTuple):
    """A table of the page.

    Attributes:
        label: what it is about.
        heads: heads of its columns.
        rows: cells of each row.
        words: columns of words, which are left-aligned.
        chosen: row that stands out; -1: none.
        bar: column whose cells have bars; -1: none.
        bars: length of each row's bar, 0 to 1.
    """

    label: str
    heads: list[str]
    rows: list[list[str]]
    words: tuple[int, ...] = ()
    chosen: int = -1
    bar: int = -1
    bars: tuple[float, ...] = ()


class PageSection(NamedTuple):
    """A section of the page.

    Attributes:
        title: its title.
        words: sentences below the title.
        charts: names of its charts.
        tables: its tables, which tell the charts without scripts.
        notes: sentences that stand out.
        terms: what columns mean.
        sources: pairs of names and words.
        zoom: chart that has buttons to zoom; "": none.
        candidates: whether all candidates can be filtered here.
    """

    title: str
    words: str = ""
    charts: tuple[str, ...] = ()
    tables: tuple[HtmlTable, ...] = ()
    notes: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    zoom: str = ""
    candidates: bool = False


@functools.cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as a script, which takes seconds to make and so is kept in the cache."""
    key = ["vega", importlib.metadata.version("vl-convert-python")]
    path = files.kept_file("page", key)
    if (script := files.kept(path)) is None:
        import vl_convert  # here, since a page is written without it if the script is kept

        script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        if "</script" in script.lower():
            raise ValueError("the charts' library has the end of its own element in it")
        files.keep(path, script)
    return str(script)


@functools.cache
def _template() -> Any:
    import jinja2  # here, since only pages need it

    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html")


def specs(report: Report, alone: bool = False) -> dict[str, charts.Spec]:
    """Return the page's charts by name; `alone`: with the rows of all candidates, which the page has beside it."""
    return _drawn(report, activity.activity(report), alone)[0]


def _drawn(report: Report, work: activity.Activity, alone: bool = False) -> tuple[dict[str, charts.Spec], str]:
    """Return the charts by name, and what those of the links show; see `specs` for `alone`."""
    drawn, links_words = {}, ""
    if report.comparisons:
        drawn["gains"] = charts.gains(report)
    if len(report.cluster.hosts) > 1:
        pair, links_words = charts.links(report)
        drawn |= dict(zip(("links_before", "links_after"), pair))
    if report.scaling:
        drawn |= dict(zip(("speed", "hours"), charts.scaling(report)))
    if report.what_ifs:
        drawn["what_ifs"] = charts.what_ifs(report)
    drawn |= {"step": charts.step(report, work), "memory": charts.memory(report)}
    return drawn | {"candidates": candidates.chart(report, alone)}, links_words


def page(report: Report) -> str:
    """Return the whole page as HTML."""
    c, model, cluster = report.chosen.candidate, report.model, report.cluster
    real = cluster.parts or cluster
    size = f"{count(parameters.published(model))} parameters"
    work = activity.activity(report)
    drawn, links_words = _drawn(report, work)
    return _template().render(
        title=f"A plan for {f'{report.named}, {size},' if report.named else size} on {cluster.devices:,} devices",
        where=(
            f"{hosts(len(real.hosts))} x {real.devices_per_host} {', '.join(dict.fromkeys(cluster.kinds))}: "
            f"{cluster.name}. {model.layers} layers, hidden size {model.hidden}, sequence length {model.sequence}, "
            f"{model.dtype}, global batch {report.global_batch:,}."
        ),
        plan=(
            f"{mesh(c)} ({' x '.join(MAIN)}), {sharded(c)}{', sequence parallel' * c.sequence_parallel}; "
            f"{micro_batches(c)} micro-batches of size {c.micro_batch}, {schedule(c)} schedule, save={c.save}; "
            f"{compression_words(c)}."
        ),
        tiles=_tiles(report),
        sections=[section for section in _sections(report, work, drawn, links_words) if any(section[1:])],
        charts=drawn,
        data={"charts": drawn, "candidates": candidates.table(report)},
        library=library(),
    )


def _sections(report: Report, work: activity.Activity, drawn: dict[str, Any], links_words: str) -> list[PageSection]:
    """Return the sections of the page in order; those without content are left out.

    Args:
        report: report on a plan.
        work: one pipeline's step.
        drawn: charts by name.
        links_words: what the charts of the links show.
    """
    c = report.chosen.candidate
    asked = [further_text.free_choice_words(report)] if report.free_choice else []
    stages = f"Layers per stage: {stage_layers(c.counts)}. {_STAGE_WORDS}"

    def some(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in drawn)

    both = some("links_before", "links_after")
    return [
        PageSection("What the plan gains", _gains_words(report), some("gains"), _gains(report)),
        PageSection("Ranked plans", _search_words(report), tables=(_ranked(report),), terms=tuple(terms(report))),
        PageSection("All candidates", _CANDIDATES_WORDS, candidates=True),
        PageSection("As asked, and by a free choice", _sentences(asked)),
        _scaling(report),
        PageSection("If the cluster changes", _WHAT_IF_WORDS, some("what_ifs"), _what_ifs(report))
        if report.what_ifs
        else PageSection(""),
        PageSection("Near by", _sentences(nearby_words(report))),
        PageSection("Compression", _sentences(lossy_words(report))),
        PageSection("Groups that train apart", _sentences([groups.words(report)])),
        PageSection("Links before and after placement", links_words, both, _links(report))
        if links_words
        else PageSection(""),
        PageSection("One training step", activity.caption(report, work), ("step",), zoom="step"),
        PageSection("Stages", stages, tables=(_stages(report),)),
        PageSection("Bytes", _bytes_words(), tables=_traffic(report)) if traffic.rows(report) else PageSection(""),
        _memory(report),
        PageSection("Why not another plan?", tables=_explained(report)),
        PageSection("Where the figures come from", sources=_sources(report)),
    ]


_CANDIDATES_WORDS = (
    "Step time against memory of every candidate. Those that were simulated are in host order, ranked plans on their "
    "own placements with the interval that their step is in with 80%. Of the others only a lower bound is known: their "
    "step lies to the right of the triangle."
)


def _tiles(report: Report) -> list[tuple[str, str]]:
    found, over = report.chosen, gap(report, report.chosen)
    tiles = [
        (duration(found.seconds), "predicted step time" + _within(report)),
        (tokens(report.tokens_per_second(found.seconds)), "tokens/s"),
        (share(report.mfu) if report.mfu is not None else "", "model FLOPs utilization (MFU)"),
        (f"{found.memory / 1e9:.3g} GB", f"per device, of {report.limit / 1e9:.3g} GB; {report.memory_source}"),
        (f"≤ {times(1 + over)}", "as long as the best possible plan's step")
        if over > 1
        else (f"≤ {share(over)}", "slower than the best possible plan"),
    ]
    return [(figure, words) for figure, words in tiles if figure]


def _within(report: Report) -> str:
    sure = report.outlook(report.chosen)
    return f"; {duration(sure.low)} to {duration(sure.high)} with 80%" if sure else ""


def _gains_words(report: Report) -> str:
    bars = " The error bar is this standard deviation over the samples of the links." if report.noise else ""
    words = ["longer step time with other ways to plan, simulated on the same links", noise_words(report)]
    return _sentences(words) + bars


def _gains(report: Report) -> tuple[HtmlTable, ...]:
    rows = [
        [other.name, other.what, duration(other.seconds), percent(slower(report, other))]
        for other in report.comparisons
    ]
    return (HtmlTable("As a table", ["rule", "plan", "step", "longer"], rows, (0, 1)),) if rows else ()


def _sentences(words: list[str]) -> str:
    """Return those words that there are as sentences."""
    return " ".join(f"{some[0].upper()}{some[1:]}." for some in words if some)


def _search_words(report: Report) -> str:
    return _sentences([statistics(report), ranking_words(report), sure_words(report), assumed_words(report)])


def _ranked(report: Report) -> HtmlTable:
    chosen = report.outcome.ranked.index(report.chosen)
    return HtmlTable("Ranked plans", list(HEADS), table(report), WORDS, chosen)


_WHAT_IF_WORDS = (
    "The plan for the cluster as it would be, and the step time that today's plan would have there, on the same hosts."
)


def _scaling(report: Report) -> PageSection:
    """Return what more hosts bring."""
    if (scaling := report.scaling) is None:
        return PageSection("")
    rows = further_text.scaling_rows(scaling)
    heads, knee = further_text.scaling_heads(scaling), scaling.sizes.index(scaling.knee)
    missing = tuple(f"{hosts(n)}: {why}" for n, why in scaling.missing)
    figures = (HtmlTable("As a table", heads, rows, (7,), knee),)
    words = further_text.knee_words(scaling)
    return PageSection("What more hosts bring", words, ("speed", "hours"), figures, missing)


def _what_ifs(report: Report) -> tuple[HtmlTable, ...]:
    rows = further_text.what_if_rows(report)
    return (HtmlTable("As a table", further_text.WHAT_IF_HEADS, rows, (0, 4)),)


def _links(report: Report) -> tuple[HtmlTable, ...]:
    """Return the slowest links that the chosen plan uses."""
    names, rate = report.cluster.hosts, 1e-9 / report.fabric.per_byte
    sent = traffic.between_hosts(report, report.chosen.placement.hosts)
    used = sum(sent.values(), np.zeros(rate.shape))
    order = sorted(zip(*np.nonzero(used)), key=lambda pair: rate[pair])[:_MOST_LINKS]
    rows = [
        [
            names[a],
            names[b],
            f"{rate[a, b]:.2f}",
            f"{used[a, b] / 1e9:.3g}",
            ", ".join(w for w in sent if sent[w][a, b]),
        ]
        for a, b in order
    ]
    return (HtmlTable("The slowest links in use", ["from", "to", "GB/s", "GB a step", "who"], rows, (0, 1, 4)),)


def _bytes_words() -> str:
    inside = f"Sums inside {' and '.join(inside_axes())} groups stay in their hosts and do not count."
    return f"What a step sends, all devices together. {inside}"


def _traffic(report: Report) -> tuple[HtmlTable, ...]:
    heads, *rows = traffic.rows(report)
    return (HtmlTable("Bytes of a step", heads, rows, (0,)),)


_STAGE_WORDS = (
    "Forward and backward: one micro-batch on the slowest data rank. Busy: share of the step that the stage spends on "
    "the model's own computation. Gradient reduction: over data, behind the stage's last op; what runs under that op "
    "takes no time."
)
_MEMORY_WORDS = (
    "Bars: memory that each stage uses, from a closed-form model. All stages run the same program, so each device "
    "allocates what the fullest stage needs."
)


def _stages(report: Report) -> HtmlTable:
    """Return a table with a row per stage; neighboring stages with equal figures share one."""
    problem, step, c = report.problem, report.step, report.chosen.candidate
    kinds = problem.kind_of_host[report.chosen.placement.hosts]  # [D, P]
    stage = np.arange(c.pipe)
    virtual = c.stage_map.virtual_of  # [v, P]
    each = [x[kinds[None], virtual[:, None]].sum(axis=0) for x in (problem.forward, problem.work - problem.forward)]
    counts = np.array(c.rank_micro_batches)
    slow = np.argmax(counts[:, None] * (each[0] + each[1]), axis=0)
    forward, backward = (x[slow, stage] for x in each)
    last = c.stage_map.last
    loss = np.where(stage == last, problem.head[kinds[:, last]].max(), 0.0)
    busy = counts[slow] * (forward + backward + loss) / report.chosen.seconds
    rows = []
    for s in range(c.pipe):
        layers = "+".join(str(c.counts[v]) for v in virtual[:, s])
        times = [duration(float(x)) if x else "" for x in (forward[s], backward[s], loss[s])]
        rows.append((layers, *times, share(busy[s]), "compressed" if step.compressed[0, s] else ""))
    lines, bars = [], []
    for row, group in itertools.groupby(range(c.pipe), key=lambda s: rows[s]):
        members = list(group)
        name = str(members[0]) if len(members) == 1 else f"{members[0]} to {members[-1]}"
        lines.append([name, *row[:5], *(_span(x[0, members]) for x in (step.finish, step.reduce)), row[5]])
        bars.append(float(busy[members[0]]))
    heads = ["stage", "layers", "forward", "backward", "loss", "busy", "pipeline ends at", "gradient reduction", ""]
    return HtmlTable("Stages", heads, lines, (5, 8), bar=5, bars=tuple(bars))


def _span(seconds: np.ndarray) -> str:
    """Return the shortest and the longest of some times in words."""
    low, high = duration(float(seconds.min())), duration(float(seconds.max()))
    return low if low == high else f"{low} to {high}"


def _memory(report: Report) -> PageSection:
    kinds = {name: np.asarray(x, float) for name, x in report.memory.items() if np.any(np.asarray(x) > 0)}
    rows = [
        [str(stage), *(f"{x / 1e9:.2f}" for x in (*sizes, sum(sizes)))]
        for stage, sizes in enumerate(zip(*kinds.values()))
    ]
    tables = [HtmlTable("GB by stage", ["stage", *kinds, "all"], rows)]
    if report.oracle:
        cells = [
            [r.configuration, r.source, f"{r.bytes / 1e9:.2f} GB", f"{r.compile_seconds:.1f} s"] for r in report.oracle
        ]
        heads = ["plan", "compiled by", "per device", "compile time"]
        tables.append(HtmlTable("Plans that were compiled", heads, cells, (0, 1)))
    rejected = range(1, len(report.rejected) + 1)
    notes = [f"Plan {n} was not chosen: it does not fit in memory once compiled." for n in rejected]
    words = f"{memory_words(report)}. {_MEMORY_WORDS} {_sentences([oracle_words(report)])}"
    return PageSection("Memory", words, ("memory",), tuple(tables), tuple(notes))


def _explained(report: Report) -> tuple[HtmlTable, ...]:
    rows = [[what, why] for what, _, why in (line.partition(": ") for line in report.explained)]
    return (HtmlTable("Why not another plan?", ["plan", "why not"], rows, (0, 1)),) if rows else ()


def _sources(report: Report) -> tuple[tuple[str, str], ...]:
    train = "beside this page: python -m paxtrain.train --config=CONFIG --plan=plan.json trains as it says"
    return (*report.sources.items(), *([("command", report.command), ("plan.json", train)] if report.command else []))
