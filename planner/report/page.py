"""The page report.html, for screen and paper; it has no scripts and fetches nothing."""

import html
import itertools

import numpy as np

from paxtrain.config.axes import MAIN, inside_axes
from paxtrain.model import parameters
from paxtrain.tables import times
from planner.report import drawings, further_text, gantt, groups, traffic
from planner.report.contents import Report, gap
from planner.report.svg import duration
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

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0; background: #f3f5f6; color: #22272e; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue",
  "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 36px 40px 56px; background: #fff; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 44px 0 4px; padding-top: 18px; border-top: 1px solid #e3e7ea; }
p { margin: 4px 0 14px; max-width: 108ch; color: #5c6670; }
p.what { color: #22272e; }
svg { display: block; max-width: 100%; height: auto; font-family: inherit; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 22px 0 8px; }
.tile { background: #f6f8f9; border: 1px solid #e3e7ea; border-radius: 8px; padding: 12px 16px; }
.tile b { display: block; font-size: 24px; line-height: 1.3; font-weight: 650; }
.tile span { color: #5c6670; font-size: 13px; }
.scroll { overflow-x: auto; }
.narrow { display: none; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 10px 0; }
th, td { padding: 5px 12px 5px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #edf0f2; }
th { color: #5c6670; font-weight: 600; border-bottom: 1px solid #c9d0d5; }
td.words, th.words { text-align: left; }
td.long { white-space: normal; text-align: left; }
tr.chosen td { background: #fdf1e7; font-weight: 650; }
td .bar { display: inline-block; height: 9px; background: #2f6f9f; border-radius: 2px; margin-right: 7px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 20px; margin: 10px 0; }
dt { font-weight: 600; } dd { margin: 0; }
code { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
ul.terms { margin: 4px 0 14px; padding-left: 18px; color: #5c6670; font-size: 13px; }
.note { border-left: 3px solid #d55e00; padding: 2px 0 2px 12px; color: #22272e; }
@media screen and (max-width: 760px) {
  main { padding: 18px 14px 32px; } h1 { font-size: 21px; } h2 { margin-top: 30px; }
  .tiles { grid-template-columns: 1fr 1fr; } .tile { padding: 8px 10px; } .tile b { font-size: 19px; }
  .wide { display: none; } .narrow { display: block; } .narrow svg { width: 100%; }
  .scroll svg { width: 900px; max-width: none; }
  .scroll { margin-right: -14px; padding-right: 14px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin: 0 0 10px; }
}
@media print {
  body { background: #fff; font-size: 11px; }
  main { padding: 0; max-width: none; }
  h1 { font-size: 20px; } h2 { font-size: 14px; margin-top: 18px; padding-top: 10px; }
  h2, section > p { break-after: avoid; }
  svg, table, p, .tiles { break-inside: avoid; }
  .tiles { grid-template-columns: repeat(5, 1fr); } .tile { padding: 8px 10px; } .tile b { font-size: 18px; }
  .tile span { font-size: 10px; }
  .scroll { overflow: visible; }
  table { font-size: 10px; } th, td { padding: 3px 7px 3px 0; }
  @page { margin: 14mm; }
}
"""


def page(report: Report) -> str:
    """Return the whole page as HTML."""
    c, model, cluster = report.chosen.candidate, report.model, report.cluster
    size = f"{count(parameters.published(model))} parameters"
    title = f"A plan for {f'{report.named}, {size},' if report.named else size} on {cluster.devices:,} devices"
    schedule_chart, schedule_words = gantt.gantt(report)
    asked = [further_text.free_choice_words(report)] if report.free_choice else []
    links_chart, links_words = drawings.links(report) if len(cluster.hosts) > 1 else ("", "")
    sections = [
        ("What the plan gains", _gains_words(report), _gains(report) if report.comparisons else ""),
        ("Ranked plans", _search_words(report), _ranked(report)),
        ("As asked, and by a free choice", _sentences(asked), ""),
        ("What more hosts bring", further_text.knee_words(report.scaling), _scaling(report))
        if report.scaling
        else _NOTHING,
        ("If the cluster changes", _WHAT_IF_WORDS, _what_ifs(report)) if report.what_ifs else _NOTHING,
        ("Near by", _sentences(nearby_words(report)), ""),
        ("Compression", _sentences(lossy_words(report)), ""),
        ("Groups that train apart", _sentences(list(filter(None, [groups.words(report)]))), ""),
        ("Links before and after placement", links_words, _scrolled(links_chart)),
        ("One training step", schedule_words, _scrolled(schedule_chart)),
        ("Stages", f"Layers per stage: {stage_layers(c.counts)}. {_STAGE_WORDS}", _stages(report)),
        ("Bytes", _bytes_words(), _traffic(report)),
        ("Memory", f"{memory_words(report)}. {_MEMORY_WORDS}", _scrolled(drawings.memory(report)) + _oracle(report)),
        ("Step time against memory", _TRADE_WORDS, _scrolled(drawings.trade(report))),
        ("Why not another plan?", "", _explained(report)),
        ("Where the figures come from", "", _sources(report)),
    ]
    body = "\n".join(
        f"<section><h2>{name}</h2>{f'<p>{html.escape(words)}</p>' if words else ''}{inner}</section>"
        for name, words, inner in sections
        if inner or (words and name in _OF_WORDS)
    )
    where = (
        f"{hosts(len(cluster.hosts))} x {cluster.devices_per_host} {', '.join(dict.fromkeys(cluster.kinds))}: "
        f"{cluster.name}. {model.layers} layers, hidden size {model.hidden}, sequence length {model.sequence}, "
        f"{model.dtype}, global batch {report.global_batch:,}."
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        "<body><main>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(where)}</p>{_head(report)}{body}</main></body></html>\n"
    )


def _scrolled(drawing: str) -> str:
    """Return a drawing that a small screen scrolls sideways instead of making its words unreadable."""
    return f'<div class="scroll">{drawing}</div>' if drawing else ""


def _head(report: Report) -> str:
    c, found = report.chosen.candidate, report.chosen
    tiles = [
        (duration(found.seconds), "predicted step time" + _within(report)),
        (tokens(report.tokens_per_second(found.seconds)), "tokens/s"),
        (share(report.mfu) if report.mfu is not None else "", "model FLOPs utilization (MFU)"),
        (f"{found.memory / 1e9:.3g} GB", f"per device, of {report.limit / 1e9:.3g} GB; {report.memory_source}"),
        (f"≤ {times(1 + over)}", "as long as the best possible plan's step")
        if (over := gap(report, found)) > 1
        else (f"≤ {share(over)}", "slower than the best possible plan"),
    ]
    drawn = "".join(
        f'<div class="tile"><b>{figure}</b><span>{html.escape(w)}</span></div>' for figure, w in tiles if figure
    )
    how = sharded(c)
    how += ", sequence parallel" if c.sequence_parallel else ""
    words = (
        f"{mesh(c)} ({' x '.join(MAIN)}), {how}; {micro_batches(c)} micro-batches of size {c.micro_batch}, "
        f"{schedule(c)} schedule, save={c.save}; {compression_words(c)}."
    )
    return f'<p class="what"><b>{html.escape(words)}</b></p><div class="tiles">{drawn}</div>'


def _within(report: Report) -> str:
    sure = report.outlook(report.chosen)
    return f"; {duration(sure.low)} to {duration(sure.high)} with 80%" if sure else ""


def _gains_words(report: Report) -> str:
    noise = noise_words(report)
    bars = " The error bar is this standard deviation over the samples of the links." if report.noise else ""
    words = f"Longer step time with other ways to plan, simulated on the same links. {noise[0].upper()}{noise[1:]}."
    return words + bars


def _gains(report: Report) -> str:
    """Return the gains twice, of which a screen shows the one that fits it."""
    narrow = drawings.gains(report, 340, narrow=True)
    return f'<div class="wide">{drawings.gains(report)}</div><div class="narrow">{narrow}</div>'


def _sentences(words: list[str]) -> str:
    return " ".join(f"{some[0].upper()}{some[1:]}." for some in words)


def _search_words(report: Report) -> str:
    said = [statistics(report), *filter(None, (ranking_words(report), sure_words(report))), assumed_words(report)]
    return " ".join(f"{words[0].upper()}{words[1:]}." for words in said)


def _cells(cells: list[str], tag: str, words: tuple[int, ...]) -> str:
    return "".join(
        f"<{tag}{' class=words' if i in words else ''}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells)
    )


def _ranked(report: Report) -> str:
    rows = "".join(
        f"<tr{' class=chosen' if found is report.chosen else ''}>{_cells(row, 'td', WORDS)}</tr>"
        for row, found in zip(table(report), report.outcome.ranked)
    )
    where = "".join(f"<li>{html.escape(words)}</li>" for words in terms(report))
    heads = _cells(list(HEADS), "th", WORDS)
    return f'<div class="scroll"><table><tr>{heads}</tr>{rows}</table></div><ul class="terms">{where}</ul>'


_NOTHING = ("", "", "")
# Sections without a drawing or a table.
_OF_WORDS = ("Near by", "Compression", "Groups that train apart", "As asked, and by a free choice")
_WHAT_IF_WORDS = (
    "The plan for the cluster as it would be, and the step time that today's plan would have there, on the same hosts."
)


def _scaling(report: Report) -> str:
    """Return the figure and the table of what more hosts bring."""
    scaling = report.scaling
    assert scaling is not None
    rows = [
        f"<tr{' class=chosen' if size is scaling.knee else ''}>{_cells(row, 'td', (7,))}</tr>"
        for size, row in zip(scaling.sizes, further_text.scaling_rows(scaling))
    ]
    heads = _cells(further_text.scaling_heads(scaling), "th", (7,))
    missing = "".join(f"<p>{hosts(n)}: {html.escape(why)}</p>" for n, why in scaling.missing)
    table = f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'
    return _scrolled(further_text.scaling_figure(scaling)) + table + missing


def _what_ifs(report: Report) -> str:
    rows = "".join(f"<tr>{_cells(row, 'td', (0, 4))}</tr>" for row in further_text.what_if_rows(report))
    return f'<div class="scroll"><table><tr>{_cells(further_text.WHAT_IF_HEADS, "th", (0, 4))}</tr>{rows}</table></div>'


def _bytes_words() -> str:
    inside = f"Sums inside {' and '.join(inside_axes())} groups stay in their hosts and do not count."
    return f"What a step sends, all devices together. {inside}"


def _traffic(report: Report) -> str:
    lines = traffic.rows(report)
    if not lines:
        return ""
    body = "".join(f"<tr>{_cells(row, 'td', (0,))}</tr>" for row in lines[1:])
    return f'<div class="scroll"><table><tr>{_cells(lines[0], "th", (0,))}</tr>{body}</table></div>'


_STAGE_WORDS = (
    "Forward and backward: one micro-batch on the slowest data rank. Busy: share of the step that the stage spends on "
    "the model's own computation. Gradient reduction: over data, behind the stage's last op; what runs under that op "
    "takes no time."
)
_MEMORY_WORDS = (
    "Bars: memory that each stage uses, from a closed-form model. All stages run the same program, so each device "
    "allocates what the fullest stage needs."
)
_TRADE_WORDS = (
    "Every candidate that its lower bound did not rule out, in host order; ranked plans are on their own placements. "
    "No plan was found below or left of the Pareto front."
)


def _stages(report: Report) -> str:
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
    drawn = []
    for row, group in itertools.groupby(range(c.pipe), key=lambda s: rows[s]):
        members = list(group)
        name = str(members[0]) if len(members) == 1 else f"{members[0]} to {members[-1]}"
        spans = [_span(x[0, members]) for x in (step.finish, step.reduce)]
        bar = f'<span class="bar" style="width:{120 * busy[members[0]]:.0f}px"></span>'
        drawn.append(
            f'<tr>{_cells([name, *row[:4]], "td", ())}<td class="words">{bar}{row[4]}</td>'
            f"{_cells([*spans, row[5]], 'td', (2,))}</tr>"
        )
    heads = ["stage", "layers", "forward", "backward", "loss", "busy", "pipeline ends at", "gradient reduction", ""]
    return f'<div class="scroll"><table><tr>{_cells(heads, "th", (5,))}</tr>{"".join(drawn)}</table></div>'


def _span(seconds: np.ndarray) -> str:
    """Return the shortest and the longest of some times in words."""
    low, high = duration(float(seconds.min())), duration(float(seconds.max()))
    return low if low == high else f"{low} to {high}"


def _oracle(report: Report) -> str:
    if not report.oracle:
        return f"<p>{oracle_words(report).capitalize()}.</p>"
    cells = [
        [r.configuration, r.source, f"{r.bytes / 1e9:.2f} GB", f"{r.compile_seconds:.1f} s"] for r in report.oracle
    ]
    rows = "".join(f"<tr>{_cells(row, 'td', (0, 1))}</tr>" for row in cells)
    heads = _cells(["plan", "compiled by", "per device", "compile time"], "th", (0, 1))
    rejected = "".join(
        f'<p class="note">Plan {n} was not chosen: it does not fit in memory once compiled.</p>'
        for n in range(1, len(report.rejected) + 1)
    )
    words = oracle_words(report)
    return f'{rejected}<p>{words.capitalize()}.</p><div class="scroll"><table><tr>{heads}</tr>{rows}</table></div>'


def _explained(report: Report) -> str:
    rows = []
    for line in report.explained:
        what, _, why = line.partition(": ")
        rows.append(f"<tr>{_cells([what], 'td', (0,))}<td class=long>{html.escape(why)}</td></tr>")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _sources(report: Report) -> str:
    items = [f"<dt>{html.escape(name)}</dt><dd>{html.escape(words)}</dd>" for name, words in report.sources.items()]
    if report.command:
        items.append(f"<dt>command</dt><dd><code>{html.escape(report.command)}</code></dd>")
    return f"<dl>{''.join(items)}</dl>" if items else ""
