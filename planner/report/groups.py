"""The exchange of groups of data ranks that train apart: bytes and seconds of a round, and of a step."""

import numpy as np

from planner.cost import outer
from planner.report.contents import Report
from planner.report.units import duration

Array = np.ndarray


def exchanges(report: Report) -> tuple[outer.FragmentExchange, ...]:
    """Return the exchange of each fragment of the chosen plan; () if all data ranks train together."""
    if report.chosen.candidate.apart == 1:
        return ()
    problem, hosts = report.problem, report.chosen.placement.hosts[None]
    links = problem.links(problem.paths(report.fabric, hosts))
    assert links.outer is not None
    return outer.exchanges(problem, links.outer[0])


def waits(report: Report) -> Array:
    """Return the seconds [H] for which each step of a round waits for an exchange, in no order."""
    c, exposed = report.chosen.candidate, report.step.outer
    assert exposed is not None
    return np.concatenate([exposed[0], np.zeros(c.outer.every - exposed.shape[1])])


def figures(report: Report) -> dict[str, object]:
    """Return the figures of the chosen plan's groups as JSON values; empty if all data ranks train together."""
    if not (found := exchanges(report)):
        return {}
    c, round_bytes, waited = report.chosen.candidate, _round(report), waits(report)
    return {
        "groups": c.apart,
        "data_ranks": c.together,
        "every": c.outer.every,
        "overlap": c.outer.overlap,
        "fragments": [{"device_bytes": x.bytes, "seconds": x.seconds} for x in found],
        "round_bytes": round_bytes,
        "step_bytes": round_bytes / c.outer.every,
        "round_seconds": sum(x.seconds for x in found),
        "step_waits_seconds": float(waited.mean()),
        "median_step_seconds": report.chosen.seconds - float(waited.mean() - np.median(waited)),
    }


def _round(report: Report) -> float:
    """Return the bytes that all devices together send to other groups from one exchange of all weights to the next."""
    return report.cluster.devices * sum(x.bytes for x in exchanges(report))


def words(report: Report) -> str:
    """Return what crosses between the chosen plan's groups, in words; empty if all data ranks train together."""
    if not (found := exchanges(report)):
        return ""
    c, round_bytes = report.chosen.candidate, _round(report)
    ranks = f"{c.together} data rank{'s' * (c.together > 1)}"
    parts = f" in {len(found)} fragments" if len(found) > 1 else ""
    taken = sum(x.seconds for x in found)
    waited = waits(report)
    under = f", of which compute hides {duration(taken - waited.sum())}" if c.outer.overlap else ""
    return (
        f"{c.apart} groups of {ranks} exchange {round_bytes / 1e9:.3g} GB in {c.outer.every} steps{parts}, all devices "
        f"together, {round_bytes / c.outer.every / 1e9:.3g} GB a step; it takes {duration(taken)}{under}, so a step "
        f"is {duration(waited.mean())} longer on average"
    )
