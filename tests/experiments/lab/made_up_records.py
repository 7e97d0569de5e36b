"""Records that the lab might have made, for the tests of what is said of them."""

import pathlib

from experiments.lab.findings import links, schedules
from experiments.lab.findings import pairs as pairs_of
from experiments.lab.records import Records


def add_links(folder: pathlib.Path, worst: float = 0.05, hosts: int = 3, seconds: float = 40.0) -> None:
    rates = [[100.0] * hosts for _ in range(hosts)]
    measured = [[101.0] * hosts for _ in range(hosts)]
    measured[0][1] = 100 * (1 - worst)
    rates[1][0], measured[1][0] = 10.0, 20.0  # slower than those for which anything is wanted
    measured[2][2] = 1e6  # the diagonal means nothing
    Records(folder / links.SOURCE).add("some hosts", rates=rates, measured=measured, seconds=seconds)


def add_pair(folder: pathlib.Path, scenario: str, plan: str, how: str, hosts: list[int], seconds: list[float], **by):
    by = {"predicted": 1.0, "pipette": 1.0, "amp": 1.0} | by
    values = {"scenario": scenario, "plan": plan, "how": how, "hosts": [hosts], "seconds": seconds}
    Records(folder / pairs_of.SOURCE).add(f"{scenario} | {plan} | {how}", **values, **by)


def add_predictions(folder: pathlib.Path) -> None:
    """Add measured pairs with medians 1, 2, 4 on one scenario and 10, 20 on another."""
    add_pair(folder, "a", "x", "planned", [0, 1], [1.0, 0.9, 5.0], predicted=1.1, pipette=3.0, amp=1.5)
    add_pair(folder, "a", "x", "worst", [1, 0], [2.0, 2.0, 2.0], predicted=1.8, pipette=2.0, amp=2.5)
    add_pair(folder, "a", "y", "planned", [0, 1], [4.0, 3.0, 9.0], predicted=5.0, pipette=1.0, amp=4.5)
    add_pair(folder, "b", "x", "planned", [0, 1], [10.0], predicted=12.0, pipette=9.0, amp=9.0)
    add_pair(folder, "b", "y", "planned", [0, 1], [20.0], predicted=11.0, pipette=18.0, amp=25.0)


def add_schedules(folder: pathlib.Path, overlapping: float = 0.8, share: float = 0.3) -> None:
    predicted = {"eager_1f1b": 1.1, "1f1b": 0.9}
    seconds = {"eager_1f1b": [1.0, 1.0, 1.2], "1f1b": [1.0, 0.8, 1.0]}
    over = {"eager_1f1b": overlapping, "1f1b": 0.9}
    values = {"rate": 50.0, "seconds": seconds, "predicted": predicted, "predicted_overlapping": over}
    Records(folder / schedules.SOURCE).add("50 Mbit/s", transfer_share=share, **values)
