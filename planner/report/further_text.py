"""The records of further questions (further.py) as text."""

from typing import Any

from planner.report.contents import Report
from planner.report.further import Scaling, WhatIf
from planner.report.text import aligned, hosts, labelled, longer, mesh, percent, schedule, share, tokens
from planner.report.units import duration
from planner.search.tried import Found


def lines(report: Report) -> list[str]:
    """Return the answers for a terminal, as lines; none if nothing was asked."""
    found: list[str] = []
    if report.free_choice is not None:
        found += labelled("asked", free_choice_words(report))
    if report.scaling is not None:
        scaling = report.scaling
        found += ["", *aligned([scaling_heads(scaling), *scaling_rows(scaling)], words=(6, 7)), ""]
        found += labelled("knee", knee_words(scaling))
        found += [line for n, why in scaling.missing for line in labelled("no plan", f"{hosts(n)}: {why}")]
    if report.what_ifs:
        found += ["", *aligned([WHAT_IF_HEADS, *what_if_rows(report)], words=(0, 4))]
    return found


def json(report: Report) -> dict[str, Any]:
    """Return the answers as JSON values; none if nothing was asked."""
    found: dict[str, Any] = {}
    if report.free_choice is not None:
        asked, free = report.free_choice
        found["free_choice"] = {"asked_seconds": asked.seconds, **_figures(free), "price": report.free_choice.price}
    if (scaling := report.scaling) is not None:
        found["hosts"] = [
            {
                "hosts": size.hosts,
                "devices": size.devices,
                "tokens_per_second": size.tokens_per_second,
                "efficiency": scaling.efficiency(size),
                "device_hours": scaling.device_hours(size),
                "cost": scaling.price * scaling.device_hours(size) if scaling.price else None,
                "knee": size is scaling.knee,
                **_figures(size.found),
            }
            for size in scaling.sizes
        ]
        found["tokens"] = scaling.tokens
    if report.what_ifs:
        found["what_if"] = [{"change": w.change, "kept_seconds": w.kept, **_figures(w.found)} for w in report.what_ifs]
    return found


def _figures(found: Found) -> dict[str, Any]:
    return {"step_seconds": found.seconds, "memory_bytes": found.memory, "plan": plan_words(found)}


def plan_words(found: Found) -> str:
    """Return mesh, micro-batch, schedule and save mode in short."""
    c = found.candidate
    return f"{mesh(c).replace(' ', '')} mb {c.micro_batch} {schedule(c)} {c.save}"


# --- A free choice ----------------------------------------------------------------------------------------------------


def free_choice_words(report: Report) -> str:
    """Return what the parts of the plan cost that were fixed by flags."""
    assert report.free_choice is not None
    asked, free = report.free_choice
    if free is asked or free.seconds >= asked.seconds:
        return f"as asked {duration(asked.seconds)} a step; a free choice found nothing quicker"
    words = f"as asked {duration(asked.seconds)} a step, free choice {duration(free.seconds)} ({plan_words(free)})"
    price = report.free_choice.price
    return f"{words}: what was asked for {'takes' if price > 1 else 'costs'} {longer(price)}"


# --- More hosts -------------------------------------------------------------------------------------------------------


def scaling_heads(scaling: Scaling) -> list[str]:
    """Return the heads of the columns of `scaling_rows`."""
    heads = ["hosts", "devices", "step s", "tokens/s", "efficiency", f"device hours/{tokens_short(scaling.tokens)}"]
    heads += ["", "plan", "GB"]
    return [*heads[:6], f"cost/{tokens_short(scaling.tokens)}", *heads[7:]] if scaling.price else heads


def scaling_rows(scaling: Scaling) -> list[list[str]]:
    """Return a row of cells for each number of hosts."""
    rows = []
    for size in scaling.sizes:
        hours = scaling.device_hours(size)
        rows.append(
            [
                f"{size.hosts}{'*' if size is scaling.knee else ' '}",
                f"{size.devices:,}",
                f"{size.found.seconds:.4g}",
                tokens(size.tokens_per_second),
                share(scaling.efficiency(size)),
                _number(hours),
                _number(hours * scaling.price) if scaling.price else "",
                plan_words(size.found),
                f"{size.found.memory / 1e9:.3g}",
            ]
        )
    return rows


def knee_words(scaling: Scaling) -> str:
    """Return where the knee is, and what it means."""
    knee = scaling.knee
    days = scaling.tokens / knee.tokens_per_second / 86400
    took = f"{days:.3g} days" if days >= 1 else f"{24 * days:.3g} hours"
    words = f"{hosts(knee.hosts)}: {tokens_short(scaling.tokens)} tokens in {took}. "
    after = [size for size in scaling.sizes if size.hosts > knee.hosts]
    if after:
        words += (
            f"A device that comes with the step to {hosts(after[0].hosts)} brings {share(scaling.marginal(after[0]))} "
            "of what one brings among the fewest, less than half. "
        )
    return words + "The global batch is the same for all, and efficiency is over the fewest hosts."


def tokens_short(count: float) -> str:
    """Return a number of tokens in short: "1B", "300B", "1.5T"."""
    for factor, prefix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= factor:
            return f"{count / factor:.4g}{prefix}"
    return f"{count:.4g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# --- A cluster that changes -------------------------------------------------------------------------------------------

WHAT_IF_HEADS = ["what if", "step s", "to today", "today's plan kept", "new plan"]


def what_if_rows(report: Report) -> list[list[str]]:
    """Return a row of cells for today's plan, and one for each change."""
    today = report.chosen
    return [
        ["(today)", f"{today.seconds:.4g}", "", "", plan_words(today)],
        *(_what_if(today, w) for w in report.what_ifs),
    ]


def _what_if(today: Found, changed: WhatIf) -> list[str]:
    kept = "cannot run"
    if changed.kept is not None:
        kept = f"{changed.kept:.4g} ({percent(changed.kept / today.seconds - 1)})"
    return [
        changed.change,
        f"{changed.found.seconds:.4g}",
        percent(changed.found.seconds / today.seconds - 1),
        kept,
        plan_words(changed.found),
    ]
