"""The planner's joint choice beside each choice alone."""

import pathlib

from experiments.lab.laboratory import summary
from experiments.lab.page.section import Section, Target, factor, lab, percent, seconds, signed, span, table
from experiments.lab.records import Records

TITLE, SOURCE = "Joint choice against each alone", "joint.jsonl"
NOTHING, JOINT = "nothing", "joint"
FASTEST = Target("Joint choice of plan, placement and compression", "faster than the best single choice")


def section(folder: pathlib.Path) -> Section:
    """Return each way to choose, and its gain over choosing nothing."""
    records = Records(folder / SOURCE)
    lines = {line["key"]: line for line in records if "predicted" in line}
    if not lines:
        return Section(TITLE, lab("placements"), (SOURCE,), (FASTEST,))
    times = {key: summary(line["seconds"]) for key, line in lines.items()}
    target = FASTEST
    single = [key for key in lines if key not in (NOTHING, JOINT)]
    if JOINT in lines and single:
        best = min(single, key=lambda key: times[key]["median"])
        gain = times[best]["median"] / times[JOINT]["median"]
        target = FASTEST.said(f"{factor(gain)} over {lines[best]['what']}", gain > 1)
    baseline = times[NOTHING if NOTHING in lines else next(iter(lines))]["median"]
    rows = [
        (
            line["what"],
            line.get("plan", ""),
            seconds(time["median"]),
            percent(time["spread"] / time["median"]),
            seconds(line["predicted"]),
            signed(line["predicted"] / time["median"] - 1),
            factor(baseline / time["median"]),
            f"{sum(line['wire'].values()) / 1e6:.2f}",
        )
        for line, time in zip(lines.values(), times.values())
    ]
    headings = (
        "what the planner chooses",
        "plan",
        "step",
        "spread",
        "predicted",
        "error",
        "speed-up",
        "MB on the wire",
    )
    words = f"""All runs use the links of two_racks, {span(len(line["seconds"]) for line in lines.values())} repeats.
    The baseline is 1F1B over hosts in order without compression. Each single choice is the quickest of its
    kind by the planner's prediction. MB on the wire are those of all devices in a step, counted in the compiled
    program."""
    return Section(TITLE, lab("placements"), (SOURCE,), (target,), (words, table(headings, rows, words=2)))
