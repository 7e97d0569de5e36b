"""The report as text: the table of the ranked plans, and sentences about the chosen one."""

import itertools
import textwrap
from collections.abc import Sequence

from paxtrain.config.axes import MAIN, more_axes
from paxtrain.config.options import OTHERS, PLACES
from paxtrain.model import parameters
from paxtrain.tables import times
from planner.cluster.cluster import ATTAINED, Cluster
from planner.cost.candidate import Candidate
from planner.report import groups, losses, traffic
from planner.report.contents import Report, gap, quicker, slower
from planner.report.units import duration
from planner.search.baselines import NO_COMPRESSION
from planner.search.tried import Found

WIDTH = 120  # columns of a terminal


# --- Words ------------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """Return a share as a signed percentage with three digits: "+17.7%", "-1.00%"; beyond 100% as "22.1 times"."""
    if share > 1:
        return times(1 + share)
    return f"{100 * share:+.{2 if abs(share) < 0.0995 else 1}f}%"


def longer(share: float) -> str:
    """Return the share by which something takes longer: "+17.7%", "-1.00%", "22.1 times as long"."""
    return percent(share) + " as long" * (share > 1)


def share(value: float) -> str:
    """Return a share as a percentage: "40.5%"."""
    return f"{100 * value:.1f}%"


def tokens(per_second: float) -> str:
    """Return tokens/s with three digits: "281k", "1.02M"."""
    for factor, prefix in ((1e6, "M"), (1e3, "k")):
        if per_second >= factor:
            return f"{per_second / factor:.3g}{prefix}"
    return f"{per_second:.3g}"


def count(number: float) -> str:
    """Return a number of parameters with three digits: "843 k", "125 M", "8.3 B"."""
    for factor, prefix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g}{prefix}"
    return f"{number:g}"


def hosts(number: int) -> str:
    """Return a number of hosts: "1 host", "1,024 hosts"."""
    return f"{number:,} host{'s' * (number != 1)}"


def mesh(candidate: Candidate) -> str:
    """Return the sizes of data, pipe and tensor, as "32 x 4 x 1", and what others have, as " context=4".

    The form of its exchange follows, as " gather", if it is no ring, and " seq" if tensor also splits the sequence.
    """
    sizes = candidate.sizes
    others = [f" {name}={sizes[name]}" for name in more_axes() if sizes[name] > 1]
    others += [f" {candidate.context_form}"] * (candidate.shared > 1 and candidate.context_form != "ring")
    return " x ".join(str(sizes[name]) for name in MAIN) + "".join(others) + " seq" * candidate.sequence_parallel


def schedule(candidate: Candidate) -> str:
    """Return the schedule with its virtual stages."""
    interleaves = candidate.chunks > 1 and not candidate.stage_map.folded
    return f"interleaved x{candidate.chunks}" if interleaves else candidate.schedule


def stage_layers(counts: Sequence[int], width: int = 1000) -> str:
    """Return the layers of each virtual stage with equal neighbors joined, "5x4,4x2".

    If that is wider than `width` characters, return the least and the most, "4 to 5".
    """
    runs = [(n, len(list(group))) for n, group in itertools.groupby(counts)]
    words = ",".join(f"{n}x{times}" if times > 1 else str(n) for n, times in runs)
    return words if len(words) <= width else f"{min(counts)} to {max(counts)}"


def micro_batches(candidate: Candidate) -> str:
    """Return the number of micro-batches, or those of the data ranks with equal neighbors joined, "8x2,4x2"."""
    return stage_layers(candidate.data_micro_batches) if candidate.data_micro_batches else str(candidate.micro_batches)


def compression(candidate: Candidate) -> str:
    """Return the compressed messages and their ranks in short: "epi16+data128", on 2 of 7 links "epi16@2/7"."""
    c = candidate
    codecs = {place: c.coded.name(place).rpartition(":")[2] for place in (*PLACES, *OTHERS)}

    def at(links: tuple[int, ...]) -> str:
        return f"@{len(links)}/{_links(c)}" if links else ""

    there = f"fwd{codecs['forward'] or c.coded.forward_rank}{at(c.forward_links)}" if c.compresses_forward else ""
    between = f"{c.backward[:3]}{codecs['backward'] or c.backward_rank}" if c.backward != "none" else ""
    between += at(c.backward_links) if between else ""
    over = f"data{codecs['data'] or c.data_rank}{f'/{c.inside}' * (c.inside > 1)}" if c.data_rank else ""
    weights = f"wgt{codecs['weights']}" if c.compresses_weights else ""
    table = f"emb{codecs['embedding']}" if c.compresses_embedding else ""
    outer = f"out{codecs['outer']}" if c.compresses_outer else ""
    keys = f"ctx{codecs['context']}" if c.compresses_keys else ""
    return "+".join(filter(None, (between, there, over, table, weights, outer, keys))) or "none"


def _how(codec: str, rank: int) -> str:
    """Return how messages are compressed, by a codec's name, or "" for low rank, and a rank."""
    return f"by {codec}" if codec else f"to rank {rank}"


def _links(c: Candidate) -> int:
    """Return the number of links between stages; see `StageMap.links`."""
    return c.stage_map.links


def _on_links(c: Candidate, links: tuple[int, ...]) -> str:
    """Return the links on which messages are compressed, in words; "" if all."""
    if not links:
        return ""
    named = f"link {links[0]}" if len(links) == 1 else f"{len(links)} of {_links(c)} links"
    return f" on {named} (on the others it would gain nothing)"


def compression_words(candidate: Candidate) -> str:
    """Return the compressed messages and their ranks in a sentence."""
    c, parts = candidate, []
    if c.backward != "none":
        which = "in the epilogue" if c.backward == "epilogue" else "all"
        how = _how(c.coded.name("backward"), c.backward_rank)
        on = _on_links(c, c.backward_links)
        parts.append(f"activation gradients between stages ({which}) compressed {how}{on}")
    if c.compresses_forward:
        how = _how(c.coded.name("forward"), c.coded.forward_rank)
        parts.append(f"activations between stages compressed {how}{_on_links(c, c.forward_links)}")
    if c.data_rank:
        how = _how(c.coded.name("data"), c.data_rank)
        how += f" between groups of {c.inside}" if c.inside > 1 else ""
        parts.append(f"data-parallel gradients on the critical path compressed {how}")
    if c.compresses_embedding:
        parts.append(f"the embedding's gradients compressed by {c.coded.name('embedding')}")
    if c.compresses_weights:
        parts.append(f"weights that are gathered over data compressed by {c.coded.name('weights')}")
    if c.compresses_keys:
        parts.append(f"keys and values of tokens on other devices compressed by {c.coded.name('context')}")
    if c.compresses_outer:
        parts.append(f"differences between groups compressed by {c.coded.name('outer')}")
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:]))) or "no compression"


# --- The table --------------------------------------------------------------------------------------------------------

HEADS = (
    "",
    "d x p x t",
    "micro",
    "schedule",
    "save",
    "shard",
    "layers",
    "compress",
    "step s",
    "80%",
    "GB",
    "gap %",
    "placed",
)
_STATES = {"none": "replicated optimizer state", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "weights": "ZeRO-3"}
WORDS = (1, 3, 4, 5, 6, 7, 12)  # columns of words, which are left-aligned


def sharded(c: Candidate) -> str:
    """Return what is in shards over data, in words."""
    return _STATES[c.shard] + (f" in groups of {c.shard_group}" if c.shard_group else "")


def table(report: Report) -> list[list[str]]:
    """Return a row of cells for each ranked plan, with the columns of HEADS."""
    rows = []
    for n, found in enumerate(report.outcome.ranked, 1):
        c, sure = found.candidate, report.outlook(found)
        rows.append(
            [
                f"{n}{'*' if found is report.chosen else ' '}",
                mesh(c).replace(" x ", "x"),
                f"{c.micro_batch}{' uneven' if c.data_micro_batches else ''}",
                schedule(c),
                c.save,
                f"{c.shard}/{c.shard_group}" if c.shard_group else c.shard,
                stage_layers(c.counts, _LAYERS),
                compression(c),
                step(report, found),
                f"±{100 * max(sure.high / found.seconds - 1, 1 - sure.low / found.seconds):.0f}%" if sure else "",
                f"{found.memory / 1e9:.3g}",
                f"{100 * gap(report, found):.1f}",
                found.placement.source,
            ]
        )
    return rows


def step(report: Report, found: Found) -> str:
    """Return a plan's seconds a step, with the handicap with which it is ranked: "1.699 +1%"."""
    more = found.score(report.gain) / found.seconds - 1
    return f"{found.seconds:.4g}" + (f" +{100 * more:.3g}%" if more > 1e-9 else "")


def ranking_words(report: Report) -> str:
    """Return why a plan stands above a quicker one, if one does; else what the handicap is, if any plan has it."""
    ranked, gain = report.outcome.ranked, report.gain
    if words := _stalling_words(report):
        return words
    why = f"compression changes what is trained, so each kind of it must gain {100 * gain:.3g}% of the step (--gain)"
    for above, found in enumerate(ranked):
        below = [n for n, other in enumerate(ranked) if n > above and other.seconds < found.seconds * (1 - 1e-9)]
        if below and found.score(gain) <= ranked[below[0]].score(gain):
            n, other = below[0] + 1, ranked[below[0]]
            return (
                f"plan {above + 1} ({found.seconds:.4g} s) stands above plan {n} ({other.seconds:.4g} s), which "
                f"compresses and counts as {other.score(gain):.4g} s: {why}"
            )
    if any(found.score(gain) > found.seconds * (1 + 1e-9) for found in ranked):
        return f"a plan counts as longer by the percentage behind its seconds: {why}"
    return ""


def _stalling_words(report: Report) -> str:
    """Return why a plan stands above a quicker one whose runs stall more often; "" if none does."""
    ranked = [(n, found, report.outlook(found)) for n, found in enumerate(report.outcome.ranked, 1)]
    for (n, above, one), (m, below, other) in itertools.combinations(ranked, 2):
        if one and other and below.seconds < above.seconds and other.expected > one.expected:
            words = f"plan {n} ({above.seconds:.4g} s) stands above plan {m} ({below.seconds:.4g} s), since runs of"
            expected = f"expected are {one.expected:.4g} s and {other.expected:.4g} s"
            return f"{words} {report.cluster.execution.trainer} stall: {expected}"
    return ""


def sure_words(report: Report) -> str:
    """Return with which probability the chosen plan is quicker than the next ones; "" if that is not known."""
    others = report.outcome.ranked
    each = [(n, report.outlook(found)) for n, found in enumerate(others, 1) if found is not report.chosen]
    some = [(n, sure.slower) for n, sure in each if sure]
    if not some:
        return ""
    told = [f"plan {n} with {_chance(x)}" for n, x in some[:_TOLD]]
    return f"the chosen plan is quicker than {', '.join(told)}"


def _chance(probability: float) -> str:
    """Return a probability in words: "62%", "more than 99.9%"."""
    return f"{100 * probability:.{0 if probability < 0.995 else 1}f}%" if probability <= 0.999 else "more than 99.9%"


def assumed_words(report: Report) -> str:
    """Return what the times assume: whose constants they are, and the rates of links."""
    words = f"times assume {report.cluster.execution.trainer}'s constants"
    words += f" ({report.sources['trainer']})" if "trainer" in report.sources else ""
    return words + reached_words(report.cluster)


def reached_words(cluster: Cluster) -> str:
    """Return the share of their nominal rates that links count with, in words; "" if their rates were measured."""
    shares = " and ".join(f"{ATTAINED[name]:.0%} {_CLASSES[name]}" for name in cluster.reached)
    return f"; links reach {shares} of their nominal rates, as in published runs" if shares else ""


_LAYERS = 12  # characters of the column of layers
_ALMOST_CERTAIN = 0.95  # probability to fit below which a plan that is surer to fit is told
_TOLD = 3  # plans beside which the chosen one is told
_CLASSES = {"inside": "inside hosts", "between": "between hosts"}
_PLACED = {
    "host order": "in the order of the hosts",
    "layout": "devices in order, neighbors in a pipeline or in a data rank side by side",
    "known": "tried on placements that were found for others of its mesh",
    "climbed": "hosts exchanged as long as that gained",
    "annealed": "hosts exchanged at random first, then as long as that gained",
    "exact": "all placements were tried",
}


def terms(report: Report) -> list[str]:
    """Return what the columns mean whose heads do not say it."""
    sources = {found.placement.source for found in report.outcome.ranked}
    candidates = [found.candidate for found in report.outcome.ranked]
    some = any(c.backward_links or c.forward_links for c in candidates)
    seq = "d x p x t seq: tensor splits the sequence, too (mesh.sequence_parallel)"
    form = "d x p x t context=4 gather: mesh.context=4 with mesh.context_form=gather"
    between = "schedule 1f1b:6: 1f1b with pipeline.in_flight=6"
    groups = "shard weights/8: weights in shards inside groups of 8 data ranks (mesh.shard_group=8)"
    layers = "layers 5x2,4: two virtual stages with 5 layers, then one with 4"
    margin = ", plus a safety margin" * ("closed form +" in report.sources.get("memory of the ranked plans", ""))
    memory = f"by a formula (the closed form) that counts what the program allocates{margin}"
    if report.oracle:
        memory = f"of the plans that were compiled by the compiler, of the others {memory}"
    return [
        *[seq] * any(c.sequence_parallel for c in candidates),
        *[form] * any(c.shared > 1 and c.context_form != "ring" for c in candidates),
        *[between] * any(":" in c.schedule for c in candidates),
        *[groups] * any(c.shard_group for c in candidates),
        *[layers] * any("x" in stage_layers(c.counts, _LAYERS) for c in candidates),
        *(
            ["80%: how much longer or shorter the step is, at most, with a probability of 80%"]
            if report.outlooks
            else []
        ),
        "gap %: how much longer the step is than a bound below which no plan can be; the best is somewhere between",
        f"GB: memory of a device, {memory}",
        *(["compress @2/7: on 2 of the 7 links between stages, since it gains nothing on the others"] if some else []),
        *(f"placed {source}: {words}" for source, words in _PLACED.items() if source in sources),
    ]


def aligned(rows: list[list[str]], words: Sequence[int] = WORDS) -> list[str]:
    """Return the lines of a table whose columns `words` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    between = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    lines = [
        between.join(cell.ljust(w) if i in words else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
    return [line.rstrip()[:WIDTH] for line in lines]


def headline(report: Report) -> str:
    """Return the chosen plan and its prediction in one sentence."""
    c, found = report.chosen.candidate, report.chosen
    sure = report.outlook(found)
    within = f" ({duration(sure.low)} to {duration(sure.high)} with 80%)" if sure else ""
    speed = f"{duration(found.seconds)} a step{within}, {tokens(report.tokens_per_second(found.seconds))} tokens/s"
    used = "" if report.mfu is None else f", {share(report.mfu)} MFU"
    by_rank = f", data ranks of {micro_batches(c)} micro-batches" if c.data_micro_batches else ""
    return f"{mesh(c)} ({' x '.join(MAIN)}), {schedule(c)}, micro-batch {c.micro_batch}{by_rank}: {speed}{used}"


def gains(report: Report) -> list[str]:
    """Return, in words, how much slower each comparison is than the chosen plan."""
    return [f"{other.name} {longer(slower(report, other))} ({other.what})" for other in report.comparisons]


def noise_words(report: Report) -> str:
    """Return a sentence on whether the placement's gain exceeds the noise of the link measurements."""
    if report.noise is None:
        return "the links were measured once, so the noise of the placement's gain is unknown"
    gain, std, words = report.noise
    if gain > 1:
        return f"host order takes {1 + gain:.2f} ± {std:.2f} times as long as the placement; {words}"
    return f"the placement gains {100 * gain:.2f} ± {100 * std:.2f}% over host order; {words}"


def memory_words(report: Report) -> str:
    """Return the chosen plan's memory, its limit, and the origin of the figure."""
    used, limit = report.chosen.memory, report.limit
    words = f"{used / 1e9:.3g} of {limit / 1e9:.3g} GB per device ({share(used / limit)}; {report.memory_source})"
    sure = report.outlook(report.chosen)
    return words + (f", fits with {_chance(sure.fits)}" + _safer(report) if sure else "")


def _safer(report: Report) -> str:
    """Return which plan to take instead if it is not almost certain that the chosen one fits, in words."""
    sure = report.outlook(report.chosen)
    if not sure or sure.fits >= _ALMOST_CERTAIN:
        return ""
    for n, found in enumerate(report.outcome.ranked, 1):
        other = report.outlook(found)
        if other and other.fits >= _ALMOST_CERTAIN:
            later = longer(found.seconds / report.chosen.seconds - 1)
            return f" only; plan {n} fits with {_chance(other.fits)} (step {later})"
    return " only; a smaller --usable_memory looks for leaner plans"


def oracle_words(report: Report) -> str:
    """Return a sentence on the plans that were compiled and the seconds that it took."""
    if not report.oracle:
        return "no plan was compiled to check its memory"
    total = sum(row.compile_seconds for row in report.oracle)
    plans = "one plan" if len(report.oracle) == 1 else f"{len(report.oracle)} plans"
    return f"{plans} compiled in {total:.1f} s to check the memory"


def statistics(report: Report) -> str:
    """Return the numbers of candidates that the search saw, its seconds, and what it proved, in words."""
    o = report.outcome
    return (
        f"{o.enumerated:,} candidates, of which {o.fitting:,} fit in memory, {o.simulated:,} were simulated (others "
        f"cannot be as fast, or are like some that are not) and {o.placed} placed on the links, in {o.seconds:.1f} s; "
        f"gap is over {o.bound:.4g} s, which is less than any plan that fits takes, wherever it is placed"
    )


def nearby_words(report: Report) -> list[str]:
    """Return a sentence for each plan near by that trains more tokens a second."""
    found = []
    for near in report.nearby:
        speed = near.global_batch * report.model.sequence / near.found.seconds
        words = f"{mesh(near.found.candidate)} in {duration(near.found.seconds)}, {tokens(speed)} tokens/s, "
        words += percent(near.gain) + " as many" * (near.gain > 1)
        if near.left_out:
            names = ",".join(near.left_out)
            left = len(report.cluster.hosts) - len(near.left_out)
            found.append(f"{left} of {hosts(len(report.cluster.hosts))} would be quicker: {words}; --without={names}")
        else:
            found.append(f"a global batch of {near.global_batch} divides better: {words}")
    return found


_LEAST = 5e-4  # share of the step that an offer must gain to be told


def loss_words(report: Report) -> str:
    """Return the loss that the probe, or else the study, saw for the chosen plan, in words."""
    c, budgeted = report.chosen.candidate, report.budgeted
    if budgeted is None:
        return losses.words(c) or "nothing is compressed"
    words = losses.probed_words(budgeted, c, report.model)
    dense = next((other for other in report.comparisons if other.name == NO_COMPRESSION), None)
    if dense is None:
        return words
    return f"{words}; a step takes {duration(report.chosen.seconds)} with it, {duration(dense.seconds)} without"


def lossy_words(report: Report) -> list[str]:
    """Return what the chosen plan's compression loses, and, if none was asked for, what each kind would gain and lose.

    They are sentences, without capitals and stops.
    """
    if report.budgeted is not None:
        return [loss_words(report)]
    own = losses.words(report.chosen.candidate)
    found = [f"{compression_words(report.chosen.candidate)}: {own}"] if own else []
    for offer in sorted(report.offers or (), key=lambda offer: offer.found.seconds):
        if (gain := quicker(report, offer)) >= _LEAST:
            plan, c = duration(offer.found.seconds), offer.found.candidate
            words = f"with --compress={offer.compress} ({compression(c)}) it would be {plan}, {share(gain)} quicker"
            found.append(f"{words}; {losses.words(c)}")
    return found or ["no kind of compression would make the step quicker"] * (report.offers is not None)


def text(report: Report) -> str:
    """Return the report for a terminal of 120 columns."""
    model, cluster = report.model, report.cluster
    kinds, real = ", ".join(dict.fromkeys(cluster.kinds)), cluster.parts or cluster
    lines = [
        f"{f'{report.named}: ' * bool(report.named)}{count(parameters.published(model))} parameters, "
        f"global batch {report.global_batch}, on {cluster.name}: "
        f"{hosts(len(real.hosts))} x {real.devices_per_host} {kinds}",
        "",
        *aligned([list(HEADS), *table(report)]),
        "",
        *(line for words in terms(report) for line in labelled("where", words)),
        "",
        *labelled("chosen", headline(report)),
        *(labelled("sure", sure_words(report)) if sure_words(report) else ()),
        *labelled("assumes", assumed_words(report)),
        *labelled("others", "step time relative to chosen: " + ", ".join(gains(report))) * bool(report.comparisons),
        *(line for words in lossy_words(report) for line in labelled("lossy", words)),
        *(labelled("groups", groups.words(report)) if groups.words(report) else ()),
        *labelled("noise", noise_words(report)),
        *(labelled("bytes", traffic.words(report)) if report.cluster.sites else ()),
        *(labelled("trunks", traffic.trunk_words(report)) if report.cluster.trunks else ()),
        *(labelled("rails", rails) if (rails := traffic.rail_words(report)) else ()),
        *labelled("memory", f"{memory_words(report)}; {oracle_words(report)}"),
        *(labelled("ranking", ranking_words(report)) if ranking_words(report) else ()),
        *labelled("search", statistics(report)),
        *(line for words in nearby_words(report) for line in labelled("nearby", words)),
    ]
    return "\n".join(lines)


def labelled(label: str, words: str) -> list[str]:
    """Return the words wrapped to the width of the terminal, with the label before the first line."""
    wrapped = textwrap.wrap(words, WIDTH - 8)
    return [f"{label if i == 0 else '':8}{line}" for i, line in enumerate(wrapped)]
