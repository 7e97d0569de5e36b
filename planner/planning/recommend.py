"""What is made of a search's outcome: the plan, checked by the compiler where there is one, and its report."""

import dataclasses
import shlex
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from paxtrain.config import CompressConfig
from paxtrain.config import plan as plans
from paxtrain.errors import UserError
from planner.cost import compute
from planner.cost.step_time import Problem, host_order
from planner.memory import closed_form
from planner.placement import place
from planner.planning import decision
from planner.report import text
from planner.search import baselines, budget, explain
from planner.search.search import Found, Outcome, Search

# Iterations of the placements on half of the samples: enough to tell a gain from noise, half of what a plan gets.
_HALVES = 150


@dataclasses.dataclass(frozen=True)
class Planner:
    """One search, and what is made of what it finds.

    Attributes:
        compress: what the configuration says of compression besides what the planner decides.
        values: the whole configuration, nested.
        say: shows what is being done.
    """

    search: Search
    compress: CompressConfig
    values: dict[str, Any]
    global_batch: int
    say: Callable[[str], None]

    def plan(self, found: Found, predicted: dict[str, Any] | None = None) -> plans.Plan:
        """A found candidate as the trainer takes it."""
        search = self.search
        problem = Problem(search.cluster, search.model, found.candidate)
        step = problem.step(search.fabric, found.placement.hosts[None])
        return decision.decide(
            search.cluster,
            found.candidate,
            found.placement.hosts,
            step,
            search.model.layers,
            self.global_batch,
            self.compress,
            predicted or {},
            search.budget.scan_layers,
        )

    def recheck(self, outcome: Outcome) -> tuple[Found, tuple[text.OracleRow, ...]]:
        """The best plan that the compiler says fits, and what it was asked.

        Raises:
            UserError: it refuses all of the ranked ones.
        """
        from planner.memory import compiled  # jax: only who can compile waits for it

        cluster, rows = self.search.cluster.parts or self.search.cluster, []
        kind = cluster.kinds[int(np.argmin(cluster.memory))]
        for found in outcome.ranked:
            name = f"{text.mesh(found.candidate)}, {found.candidate.schedule}, {found.candidate.save}"
            self.say(f"compiling {name} for {kind} to check its memory")
            config = self.plan(found).apply(self.values)
            answer = compiled.oracle(config, kind, len(cluster.hosts), cluster.devices_per_host)
            rows.append(text.OracleRow(name, answer.total, answer.compile_seconds, answer.source))
            if answer.total <= self.search.limit:
                return dataclasses.replace(found, memory=float(answer.total)), tuple(rows)
        raise UserError(
            f"none of the {len(rows)} best plans fits into {self.search.limit / 1e9:.1f} GB per device once compiled; "
            f"the least needs {min(row.bytes for row in rows) / 1e9:.1f} GB; a larger --top would try more"
        )

    def tell(self, outcome: Outcome, chosen: Found, rows: tuple[text.OracleRow, ...], reasons: bool) -> text.Report:
        """All there is to tell of the chosen plan."""
        search = self.search
        config = self.plan(chosen).apply(self.values)
        stages = closed_form.per_stage(config, budget.capability(search.cluster))
        estimate = search.budget.source(search.cluster, search.model)
        return text.Report(
            cluster=search.cluster,
            model=search.model,
            global_batch=self.global_batch,
            outcome=outcome,
            chosen=chosen,
            fabric=search.fabric,
            comparisons=baselines.comparisons(search, chosen),
            memory={field.name: getattr(stages, field.name) for field in dataclasses.fields(stages)},
            limit=search.limit,
            memory_source=rows[-1].source if rows else estimate,
            sources=self.sources(rows),
            noise=self.noise(chosen),
            oracle=rows,
            explained=tuple(explain.neighbours(search, chosen, self.global_batch)) if reasons else (),
            command=shlex.join(["python", *sys.orig_argv[1:]]),
        )

    def sources(self, rows: tuple[text.OracleRow, ...]) -> dict[str, str]:
        """Where each kind of figure comes from."""
        search, cluster = self.search, self.search.cluster
        measured = f"{len(cluster.samples)} sample(s), quantile {search.options.quantile:g}"
        return {
            "step times": "event simulation of the schedule's table",
            "compute": compute.source(cluster),
            "links": f"{cluster.source or 'the cluster file'}; {measured}",
            "memory of the ranked plans": search.budget.source(search.cluster, search.model),
            "memory of the chosen plan": rows[-1].source
            if rows
            else search.budget.source(search.cluster, search.model),
            "memory by stage": "closed form",
        }

    def noise(self, chosen: Found) -> text.Noise | None:
        """The placement's gain over host order, and how well it repeats from sample to sample of the links."""
        cluster = self.search.cluster
        if len(cluster.samples) < 2:
            return None
        problem = Problem(cluster, self.search.model, chosen.candidate)
        order = host_order(chosen.candidate, cluster.devices_per_host)[0]
        seed = self.search.options.seed
        found = place.gain(problem, cluster, chosen.placement.hosts, order, seed=seed, iterations=_HALVES)
        return text.Noise(found.mean, found.std, found.words)


def predicted(made: text.Report) -> dict[str, Any]:
    """The plan's own figures with their sources, as JSON values."""
    step, chosen = made.step, made.chosen
    row = lambda x: [float(v) for v in x[0]]  # noqa: E731
    return {
        "step_seconds": chosen.seconds,
        "step_seconds_source": f"{made.sources['step times']}; compute: {made.sources['compute']}",
        "lower_bound_seconds": chosen.placement.bound,
        "host_order_seconds": chosen.plain,
        "memory_bytes": chosen.memory,
        "memory_limit_bytes": made.limit,
        "memory_source": made.memory_source,
        "stages": {
            "gather_seconds": row(step.gather),
            "finish_seconds": row(step.finish),
            "reduce_seconds": row(step.reduce),
        },
        "optimizer_seconds": float(step.optimizer[0]),
        "command": made.command,
    }
