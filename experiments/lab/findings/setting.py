"""The runs, and the machine that made them."""

import pathlib
from collections.abc import Iterator

import numpy as np

from experiments.hosts import scenario
from experiments.lab import device, models
from experiments.lab.measuring import compression
from experiments.lab.page.section import Section, listed, table
from experiments.lab.records import ENVIRONMENTS, TIMES, Records

TITLE, SOURCE = "What was run, on what", f"{ENVIRONMENTS}.jsonl"
LINKS = """**Links.** Every host is a network namespace. Every pair of hosts has a separate link (veth), and each
direction of a link has a token bucket (tc tbf) that sets the rate of TCP payload."""


def _devices() -> str:
    model, other = models.MODEL, compression.SPLITS["dense"]
    return f"""**Devices.** Every host is a process on this machine's cores, and the speed of its devices is emulated.
    Forward, backward and loss are really computed, then the process sleeps until {1e3 * device.LAYER:g} ms are over for
    F of a layer on {device.TOKENS} tokens, {device.BACKWARD[models.SAVE]} times that for B, which recomputes F, and
    {1e3 * device.HEAD:g} ms for the loss (with two devices on a host, for compression, six times as long). The model is
    a GPT over bytes of {model["layers"]} layers ({other.layers} for compression), width {model["hidden"]}
    ({other.hidden} for compression), sequence {model["sequence"]}, in {model["dtype"]}. A plan's name has the sizes of
    its axes, data x pipe x tensor, and its schedule."""


def _machines(folder: pathlib.Path) -> str:
    """Return a table with a row for each machine and date, and the experiments that were run there."""
    experiments: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for line in Records(folder / SOURCE):
        values = tuple((name, str(value)) for name, value in line.items() if name != "key")
        experiments.setdefault(values, []).append(line["key"])
    if not experiments:
        return "Nothing says on which machine this was run."
    rows = [[listed(names), *dict(values).values()] for values, names in experiments.items()]
    return table(["experiments", *dict(next(iter(experiments)))], rows, words=2)


def _broken(folder: pathlib.Path) -> Iterator[str]:
    broken = [f"{line['key']} ({why})" for line in Records(folder / f"{TIMES}.jsonl") for why in line["broken"]]
    if broken:
        yield f"""**Broken sessions.** {len(broken)} broke because a collective of gloo failed, and were restarted
        where the records ended: {listed(broken)}."""


def _scenarios() -> str:
    """Return what each scenario is, whether or not it was measured."""
    scenes = [f"`{name}` ({_scene(scenario.load(name, 8))})" for name in scenario.names() if name != "uniform"]
    return f"**Scenarios** are {listed(scenes)}."


def _scene(scene: scenario.Scenario) -> str:
    rates = scene.rates[~np.eye(len(scene.rates), dtype=bool)]
    low, high = rates.min(), rates.max()
    if low < high:
        return f"{scene.what}; {low:.0f} to {high:.0f} Mbit/s"
    return f"{scene.what}; {low:.0f} Mbit/s" if scene.uplinks else f"{scene.what}; rates follow from that"


def _took(folder: pathlib.Path) -> Iterator[str]:
    times = {line["key"]: line["seconds"] for line in Records(folder / f"{TIMES}.jsonl")}
    if times:
        said = listed([f"{name} {taken / 60:.1f}" for name, taken in times.items()])
        yield f"**Time.** Minutes by experiment: {said}; {sum(times.values()) / 60:.1f} in all."


def section(folder: pathlib.Path) -> Section:
    """Return the machine, and the emulated devices and links."""
    blocks = (_devices(), LINKS, _scenarios(), *_broken(folder), *_took(folder), _machines(folder))
    return Section(TITLE, "python -m experiments.lab", (SOURCE,), (), blocks)
