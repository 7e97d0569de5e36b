"""The planner measures a cluster, predicts the time and memory of training on it, places the ranks, and picks a plan.

It imports paxtrain and compress, which do not import it. cluster/ is what measure/, given/ and traces/ make. A plan
comes from planning/: search/ takes the best of all candidates, by seconds (cost/, on pipeline/ and program/), bytes
(memory/) and hosts (placement/). report/ and answers/ tell it, export/ hands it to others' trainers, start/ and jobs/
run it, and runs/ and fit/ learn from what was measured.

The mains lie directly in this package (`python -m planner.plan`) or are a room's own (`python -m planner.export`,
`python -m planner.memory`); everything else lives in rooms. The names below are the interface for programs that import
planner. Each is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster
    from planner.cost.candidate import Candidate
    from planner.cost.simulate import SimulatedStep, simulate
    from planner.planning.options import PlanOptions
    from planner.planning.planning import Plans, RankedPlan, plan

# The module and the name in it of each public name.
_EXPORTS = {
    "Candidate": "planner.cost.candidate:Candidate",
    "Cluster": "planner.cluster.cluster:Cluster",
    "PlanOptions": "planner.planning.options:PlanOptions",
    "Plans": "planner.planning.planning:Plans",
    "RankedPlan": "planner.planning.planning:RankedPlan",
    "SimulatedStep": "planner.cost.simulate:SimulatedStep",
    "plan": "planner.planning.planning:plan",
    "simulate": "planner.cost.simulate:simulate",
}
__all__ = [
    "Candidate",
    "Cluster",
    "PlanOptions",
    "Plans",
    "RankedPlan",
    "SimulatedStep",
    "plan",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
