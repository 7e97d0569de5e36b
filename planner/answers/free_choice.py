"""The cost of parts of a plan that flags fix: the plan as asked beside the plan of a free choice."""

import dataclasses

from paxtrain.config import SAVE_MODES, SHARDS
from planner.cluster.cluster import Cluster
from planner.planning.inputs import Values
from planner.planning.options import PlanOptions
from planner.planning.planning import Plans, plan_sections
from planner.report.further import FreeChoice


def freed(options: PlanOptions) -> PlanOptions:
    """Return options that leave mesh, schedule, layers, save mode and splits free, and allow all that was asked.

    What may be compressed stays as it is, since that changes what is trained; so does the share of the memory.
    """
    default = PlanOptions()

    def union(name: str) -> tuple:
        return tuple(dict.fromkeys((*getattr(default, name), *getattr(options, name))))

    return dataclasses.replace(
        options,
        data=(),
        tensor=(),
        pipe=(),
        others=(),
        micro_batch=(),
        virtual_stages=union("virtual_stages"),
        shard=SHARDS,
        sequence_parallel="both",
        schedules=union("schedules"),
        saves=SAVE_MODES,
        uneven=True,
        uneven_data="both",
    )


def free_choice(
    values: Values, cluster: Cluster, options: PlanOptions, asked: Plans, global_batch: int = 0
) -> FreeChoice:
    """Return the plan of a free choice, to compare with the plan that was asked for.

    Args:
        values: sections of the configuration, nested.
        cluster: cluster to plan for.
        options: options with which `asked` was made.
        asked: the plan that was asked for.
        global_batch: sequences per step; 0 for the configuration's.
    """
    free = dataclasses.replace(freed(options), nearby=False, oracle="no")
    found = plan_sections(values, cluster, free, global_batch=global_batch).report.chosen
    # A search is no proof, so what was asked for may turn out quicker.
    quicker = min(found, asked.report.chosen, key=lambda one: one.score(options.gain))
    return FreeChoice(asked.report.chosen, quicker)
