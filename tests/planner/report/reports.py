"""A report of real objects, small enough to be made quickly."""

import dataclasses
from typing import Any

import numpy as np

from planner.report import contents
from planner.search.baselines import Comparison
from planner.search.budget import Budget
from planner.search.search import Options, Search
from planner.search.space import Choices
from tests.planner.examples import MODEL, cluster


def made_report(
    micro_batches: int = 16, schedule: str = "eager_1f1b", pipe: int = 2, tensor: int = 4, **changes: Any
) -> contents.Report:
    """Return a report on four plans for four hosts of four devices; `changes` replace its attributes.

    A tensor group fills a host, so placements are few.
    """
    some = changes.get("cluster") or cluster(4, 4)
    choices = Choices(
        tensor=(tensor,),
        pipe=(pipe,),
        micro_batch=(1,),
        schedules=(schedule,),
        saves=("dots",),
        data_ranks=(),
        backward=("epilogue",),
        virtual_stages=(2,),
    )
    batch = some.devices // (tensor * pipe) * micro_batches
    search = Search(some, MODEL, batch, choices, Budget(margin=False), Options(top=4, placed=1))
    outcome = search.run()
    chosen = outcome.ranked[0]
    values = {
        "cluster": some,
        "model": MODEL,
        "global_batch": batch,
        "outcome": outcome,
        "chosen": chosen,
        "fabric": search.fabric,
        "comparisons": [
            Comparison("host order", "the same plan on the devices in order", 1.25 * chosen.seconds),
            Comparison("no compression", "another plan", 0.99 * chosen.seconds),
        ],
        "memory": {"weights": np.full(pipe, 8e9), "activations": np.linspace(40e9, 10e9, pipe)},
        "limit": search.limit,
        "memory_source": "closed form",
        "sources": {"links": "made up"},
        "noise": contents.Noise(0.24, 0.01, "over 3 samples of the links"),
        "oracle": (contents.OracleRow("2 x 4 x 2", 7.5e9, 12.5, "XLA for a GPU"),),
        "explained": ("data=4 pipe=2: does not fit, needs 99.0 GB per device",),
        "command": "python -m planner.plan --cluster=a.json",
    }
    return contents.Report(**{**values, **changes})


def other_choice(made: contents.Report, n: int) -> contents.Report:
    """Return the same report with the ranked plan `n` chosen."""
    return dataclasses.replace(made, chosen=made.outcome.ranked[n])
