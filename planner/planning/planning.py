"""Planning for a configuration on a cluster: the search, the compiler's check of memory, the report."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from paxtrain import files
from paxtrain.config import CompressConfig, Config, to_dict
from paxtrain.config import plan as plans
from paxtrain.devices.gpus import GPUS
from paxtrain.errors import UserError, started
from planner.cluster.cluster import PAXTRAIN, Cluster
from planner.cost import compute
from planner.cost.candidate import Candidate, host_order
from planner.cost.simulate import ideal_step
from planner.cost.step_time import Problem
from planner.cost.terms import terms
from planner.fit.applied import profile_source
from planner.memory import closed_form
from planner.placement.gain import gain
from planner.planning import kept, loss_budget, to_plan
from planner.planning.inputs import Values, search_for, sections
from planner.planning.intervals import believe, by_expected
from planner.planning.offers import offers
from planner.planning.options import PlanOptions
from planner.report import charts, contents, further_text, groups, losses, page, text
from planner.search import baselines, budget, explain, nearby
from planner.search.explain import require_compression
from planner.search.nearby import Nearby
from planner.search.search import Found, Outcome, Search

if TYPE_CHECKING:
    import altair

PLAN, REPORT = "plan.json", "report.html"
# Iterations of the placements on half of the samples: enough to tell a gain from noise, and half of what a plan gets.
_HALVES = 150


def _silent(_: str) -> None:
    pass


@dataclasses.dataclass(frozen=True, eq=False)
class RankedPlan:
    """A plan that the search ranked, with its prediction.

    Attributes:
        candidate: mesh, micro-batches, schedule, layers of each virtual stage, save mode, compression.
        hosts: int [data, pipe], host of each tensor group.
        seconds: predicted seconds of a step.
        bound: lower bound of these seconds over all placements of the candidate.
        host_order_seconds: predicted seconds with the devices in host order, as in a run without a plan.
        memory_bytes: bytes per device.
        low: seconds that the step stays above with 90%.
        high: seconds that it stays below with 90%.
        fits: probability that it fits into memory.
    """

    candidate: Candidate
    hosts: np.ndarray
    seconds: float
    bound: float
    host_order_seconds: float
    memory_bytes: float
    low: float
    high: float
    fits: float


@dataclasses.dataclass(frozen=True, eq=False)
class Plans:
    """The ranked plans, the recommended one, and the report on it.

    Attributes:
        plan: the recommended plan, as `paxtrain.train` takes it.
        ranked: the best plans, quickest first.
        report: contents of the text and the page.
    """

    plan: plans.Plan
    ranked: tuple[RankedPlan, ...]
    report: contents.Report

    @property
    def step_seconds(self) -> np.ndarray:
        """Predicted seconds of a step, float [ranked]."""
        return np.array([found.seconds for found in self.ranked])

    @property
    def memory_bytes(self) -> np.ndarray:
        """Bytes per device, float [ranked]."""
        return np.array([found.memory_bytes for found in self.ranked])

    def named(self, model: str) -> "Plans":
        """Return the plans with the name of the model, which the report tells and the plan keeps."""
        made = dataclasses.replace(self.report, named=model)
        predicted = {**self.plan.predicted, "model": {**self.plan.predicted["model"], "name": model}}
        return dataclasses.replace(self, report=made, plan=dataclasses.replace(self.plan, predicted=predicted))

    def text(self) -> str:
        """Return the report for a terminal: the table of the ranked plans, and sentences about the recommended one."""
        return "\n".join([text.text(self.report), *further_text.lines(self.report)])

    def html(self) -> str:
        """Return the report with its figures as an HTML page."""
        return page.page(self.report)

    def chart(self, name: str = "candidates") -> "altair.LayerChart":
        """Return one of the report's charts as an object of Altair's, which notebooks show.

        Raises:
            UserError: the report has no chart of that name.
        """
        specs = page.specs(self.report, alone=True)
        if name not in specs:
            raise UserError(f"the report has no chart {name!r}, but {', '.join(specs)}")
        return charts.chart(specs[name])

    def explain(self) -> tuple[str, ...]:
        """Return why each neighbor of the plan is not the recommended one; empty unless `explained` was set."""
        return self.report.explained

    def json(self) -> dict[str, object]:
        """Return the ranking and the plans near by as JSON values; the recommended plan is `ranked[chosen]`."""
        made = self.report
        return {
            "chosen": made.outcome.ranked.index(made.chosen),
            "ranked": [figures_of(made, found, made.global_batch) for found in made.outcome.ranked],
            "nearby": [
                {**figures_of(made, near.found, near.global_batch), "gain": near.gain, "without": list(near.left_out)}
                for near in made.nearby
            ],
            "offers": [
                {
                    "compress": offer.compress,
                    **figures_of(made, offer.found, made.global_batch),
                    "gain": contents.quicker(made, offer),
                    "loss": losses.words(offer.found.candidate),
                }
                for offer in made.offers or ()
            ],
            "loss": text.loss_words(made),
            **_if_any("groups", groups.figures(made)),
            "bound_seconds": made.outcome.bound,
            "memory_limit_bytes": made.limit,
            "candidates": made.outcome.enumerated,
            "fitting": made.outcome.fitting,
            "simulated": made.outcome.simulated,
            "search_seconds": made.outcome.seconds,
            **further_text.json(made),
            "sources": made.sources,
            "command": made.command,
        }

    def save(self, folder: str | pathlib.Path, pictures: bool = False) -> None:
        """Write plan.json, which `paxtrain.train --plan` takes, and report.html.

        Args:
            folder: where they go.
            pictures: whether each chart of the report goes there as a PNG, too.

        Raises:
            UserError: the folder cannot be written.
        """
        out = pathlib.Path(folder)
        try:
            out.mkdir(parents=True, exist_ok=True)
            files.write(out / REPORT, self.html())
            plans.save(self.plan, out / PLAN)
            for name, spec in page.specs(self.report, alone=True).items() if pictures else ():
                files.write(out / f"{name}.png", charts.png(spec))
        except OSError as error:
            raise UserError(f"cannot write the plan to {out} ({error}); name a folder that can be written") from error


def plan(
    config: Config,
    cluster: Cluster | str | pathlib.Path,
    options: PlanOptions | None = None,
    *,
    explained: bool = False,
    say: Callable[[str], None] = _silent,
) -> Plans:
    """Rank the plans for training a configuration on a cluster, and recommend one.

    Args:
        config: configuration. Its model, its global batch and its compression, except the ranks, are used.
        cluster: cluster to plan for, or its file as `Cluster.load` takes it.
        options: options of the choice and of the search; None for the defaults.
        explained: whether to explain why each neighbor of the plan is not the recommended one.
        say: function that gets the name of each phase as it begins.

    Raises:
        UserError: the cluster's file cannot be read, the planner does not support the configuration, or no plan fits.
    """
    return plan_sections(to_dict(config), Cluster.of(cluster), options or PlanOptions(), explained=explained, say=say)


def plan_sections(
    values: Values,
    cluster: Cluster,
    options: PlanOptions,
    *,
    global_batch: int = 0,
    explained: bool = False,
    predicted: Mapping[str, object] | None = None,
    say: Callable[[str], None] = _silent,
) -> Plans:
    """Rank the plans for a configuration whose mesh need not fit the cluster; see `plan`.

    Args:
        values: sections of the configuration, nested. The mesh and the schedule are not used.
        cluster: cluster to plan for.
        options: options of the choice and of the search.
        global_batch: sequences per step; 0 for the configuration's.
        explained: whether to explain why each neighbor of the plan is not the recommended one.
        predicted: more figures to keep in the plan, as JSON values.
        say: function that gets the name of each phase as it begins.

    Raises:
        UserError: the planner does not support the configuration, or no plan fits.
    """
    budgeted = None
    if options.probe:
        values, options, budgeted = loss_budget.choose(values, cluster, options, global_batch, say)
    search, compress = search_for(values, cluster, options, global_batch), sections(values)[-1]
    if not budgeted:
        require_compression(search.space, search.model, options.asked(search.choices))
    own = options.trainer == PAXTRAIN.trainer
    compiles = _compiles(options.oracle if own else "no", cluster)
    planning = _Planning(search, compress, values, search.global_batch, say)
    search.require_one()
    offered = None if budgeted or options.kinds(search.coded) or not own else options.data_ranks
    asked = [options.nearby, offered]
    known = kept.recall(search, asked)
    if known is None:
        say(f"searching {len(search.space):,} candidates for {cluster.devices} devices on {len(cluster.hosts)} host(s)")
    else:
        say("pricing the plans that were found before")
    searched = known.outcome if known else search.run(progress=say)
    outcome = searched if own else dataclasses.replace(searched, ranked=by_expected(search, searched.ranked))
    chosen = outcome.ranked[0]
    rows: tuple[contents.OracleRow, ...] = ()
    if compiles:
        chosen, rows = planning.recheck(outcome)
        ranked = [chosen if found.index == chosen.index else found for found in outcome.ranked]
        outcome = dataclasses.replace(outcome, ranked=ranked)
    if known is None or known.chosen != chosen.index:
        near = planning.nearby(outcome.ranked[outcome.ranked.index(chosen) :]) if options.nearby else ()
        say("comparing")
        more = None if offered is None else offers(search, offered, chosen)
        comparisons = baselines.comparisons(search, chosen)
        known = kept.Findings(searched, chosen.index, near, more, comparisons, planning.noise(chosen))
        kept.keep(search, asked, known)
    made = planning.report(outcome, known, chosen, rows, explained)
    sure = believe(search, outcome.ranked, (chosen,) if rows else ()).outlooks(outcome.ranked.index(chosen))
    made = dataclasses.replace(made, budgeted=budgeted, outlooks=sure)
    return Plans(
        plan=planning.plan(chosen, {**figures(made), **(predicted or {})}),
        ranked=tuple(map(_ranked, outcome.ranked, sure)),
        report=made,
    )


def _ranked(found: Found, sure: contents.Outlook) -> RankedPlan:
    c, placement = found.candidate, found.placement
    figures = found.seconds, placement.bound, found.plain, found.memory
    return RankedPlan(c, placement.hosts, *figures, sure.low, sure.high, sure.fits)


def _compiles(wanted: str, cluster: Cluster) -> bool:
    """Return whether the best plans are compiled to check their memory.

    Raises:
        UserError: the options demand it, but the cluster has other devices, or jax has no CUDA plugin.
    """
    if wanted == "yes" and "cpu" in cluster.kinds:
        raise UserError("--oracle=yes compiles for GPUs, but the cluster has CPUs; use --oracle=no")
    if wanted == "no" or "cpu" in cluster.kinds:
        return False
    unknown = sorted(set(cluster.kinds) - set(GPUS))
    if unknown:
        if wanted == "yes":
            raise UserError(f"--oracle=yes compiles for {', '.join(GPUS)}, but not for {unknown[0]}; use --oracle=no")
        return False
    from planner.memory import compiled  # here, since it imports jax, which takes long

    if compiled.cuda():
        return True
    if wanted == "yes":
        raise UserError("--oracle=yes needs jax's CUDA plugin; pip install -r requirements-gpu.txt, or --oracle=auto")
    return False


@dataclasses.dataclass(frozen=True)
class _Planning:
    """A search, and the plan and the report that are made of its outcome.

    Attributes:
        search: the search.
        compress: the configuration's compression, for the settings that the planner does not decide.
        values: the whole configuration, nested.
        global_batch: sequences per step.
        say: function that gets the name of each phase as it begins.
    """

    search: Search
    compress: CompressConfig
    values: Values
    global_batch: int
    say: Callable[[str], None]

    def plan(self, found: Found, predicted: Mapping[str, object] | None = None) -> plans.Plan:
        """Return the trainer's plan of a candidate that the search found."""
        search = self.search
        problem = Problem(search.cluster, search.model, found.candidate)
        step = problem.step(search.fabric, found.placement.hosts[None])
        return to_plan.decide(
            search.cluster,
            found.candidate,
            found.placement.hosts,
            step,
            search.model,
            self.global_batch,
            self.compress,
            dict(predicted or {}),
        )

    def recheck(self, outcome: Outcome) -> tuple[Found, tuple[contents.OracleRow, ...]]:
        """Return the best plan that fits once compiled, and a row for each plan that was compiled.

        Raises:
            UserError: none of the ranked plans fits.
        """
        from planner.memory import compiled  # here, since it imports jax, which takes long

        cluster, rows = self.search.cluster.parts or self.search.cluster, []
        kind = cluster.kinds[int(np.argmin(cluster.memory))]
        for found in outcome.ranked:
            name = f"{text.mesh(found.candidate)}, {found.candidate.schedule}, {found.candidate.save}"
            self.say(f"compiling {name} for {kind} to check its memory")
            config = self.plan(found).apply(self.values)
            answer = compiled.oracle(config, kind, len(cluster.hosts), cluster.devices_per_host)
            rows.append(contents.OracleRow(name, answer.total, answer.compile_seconds, answer.source))
            if answer.total <= self.search.limit:
                return dataclasses.replace(found, memory=float(answer.total)), tuple(rows)
        raise UserError(
            f"none of the {len(rows)} best plans fits into {self.search.limit / 1e9:.1f} GB per device once compiled; "
            f"the smallest needs {min(row.bytes for row in rows) / 1e9:.1f} GB; a larger --top would try more"
        )

    def nearby(self, ranked: list[Found]) -> tuple[Nearby, ...]:
        """Return quicker plans on fewer hosts and plans for batches near by that train more tokens a second.

        Args:
            ranked: plans, of which the first is the one to compare with.
        """
        self.say("looking at fewer hosts and at batches near by")
        return (*nearby.fewer_hosts(self.search, ranked)[:1], *nearby.batches(self.search, ranked)[:2])

    def report(
        self,
        outcome: Outcome,
        known: kept.Findings,
        chosen: Found,
        rows: tuple[contents.OracleRow, ...],
        reasons: bool,
    ) -> contents.Report:
        """Return the report on the chosen plan.

        Args:
            outcome: the ranked plans and the statistics of the search.
            known: what was found besides these.
            chosen: the recommended plan, one of the ranked ones.
            rows: plans that were compiled to check their memory.
            reasons: whether to explain why each neighbor of the plan is not the recommended one.
        """
        search = self.search
        config = self.plan(chosen).apply(self.values)
        stages = closed_form.per_stage(config, budget.capability(search.cluster))
        sources = self.sources(chosen, rows)
        return contents.Report(
            cluster=search.cluster,
            model=search.model,
            global_batch=self.global_batch,
            outcome=outcome,
            chosen=chosen,
            fabric=search.fabric,
            comparisons=known.comparisons,
            memory={field.name: getattr(stages, field.name) for field in dataclasses.fields(stages)},
            limit=search.limit,
            memory_source=sources["memory of the chosen plan"],
            sources=sources,
            noise=known.noise,
            nearby=known.nearby,
            offers=known.offers,
            oracle=rows,
            explained=self.explained(chosen) if reasons else (),
            command=started(),
            gain=search.options.gain,
        )

    def explained(self, chosen: Found) -> tuple[str, ...]:
        """Return why each neighbor of the chosen plan was not chosen; first what training without groups takes."""
        self.say("looking at the neighbors")
        together = explain.without_groups(self.search, chosen)
        return (*together, *explain.neighbours(self.search, chosen, self.global_batch))

    def sources(self, chosen: Found, rows: tuple[contents.OracleRow, ...]) -> dict[str, str]:
        """Return the source of each kind of figure."""
        search, cluster = self.search, self.search.cluster
        measured = f"{len(cluster.samples)} sample(s), quantile {search.options.quantile:g}"
        return {
            "step times": "event simulation of the schedule's table",
            **({"trainer": profile_source(by)} if (by := cluster.execution.trainer) != PAXTRAIN.trainer else {}),
            "compute": compute.source(cluster) + compute.unread(search.model),
            "links": f"{cluster.source or 'the cluster file'}; {measured}{text.reached_words(cluster)}",
            "memory of the ranked plans": search.budget.source(search.cluster, search.model),
            "memory of the chosen plan": rows[-1].source
            if rows
            else search.budget.source(search.cluster, search.model, chosen.candidate.pipe),
            "memory by stage": "closed form",
        }

    def noise(self, chosen: Found) -> contents.Noise | None:
        """Return the placement's gain over host order and its spread over the link samples; None with one sample."""
        cluster = self.search.cluster
        if len(cluster.samples) < 2:
            return None
        problem = Problem(cluster, self.search.model, chosen.candidate)
        order = host_order(chosen.candidate, cluster.devices_per_host)[0]
        seed = self.search.options.seed
        found = gain(problem, cluster, chosen.placement.hosts, order, seed=seed, iterations=_HALVES)
        return contents.Noise(found.mean, found.std, found.words)


def figures_of(made: contents.Report, found: Found, global_batch: int) -> dict[str, object]:
    """Return a ranked plan and its prediction as JSON values.

    Args:
        made: report that has it.
        found: plan.
        global_batch: sequences of an optimizer step.
    """
    return {
        **found.candidate.figures(),
        "global_batch": global_batch,
        "step_seconds": found.seconds,
        "tokens_per_second": global_batch * made.model.sequence / found.seconds,
        "memory_bytes": found.memory,
        **outlook_figures(made, found),
        "placement_bound_seconds": found.placement.bound,
        "host_order_seconds": found.plain,
        "placed": found.placement.source,
        "hosts": found.placement.hosts.tolist(),
    }


def outlook_figures(made: contents.Report, found: Found) -> dict[str, object]:
    """Return how sure a ranked plan's prediction is, as JSON values; nothing of other plans."""
    if found not in made.outcome.ranked or not (sure := made.outlook(found)):
        return {}
    return {
        "step_seconds_low": sure.low,
        "step_seconds_high": sure.high,
        "expected_seconds": sure.expected,
        "stalls": sure.stalls,
        "fits": sure.fits,
    }


def _if_any(name: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values under a name, or nothing if there are none."""
    return {name: values} if values else {}


def figures(made: contents.Report) -> dict[str, object]:
    """Return the plan's figures with their sources, as JSON values."""
    step, chosen = made.step, made.chosen

    def row(x: np.ndarray) -> list[float]:
        return [float(v) for v in x[0]]

    return {
        "step_seconds": chosen.seconds,
        **outlook_figures(made, chosen),
        "trainer": made.cluster.execution.trainer,
        "step_seconds_source": f"{made.sources['step times']}; compute: {made.sources['compute']}",
        "ideal_step_seconds": dict([ideal_step(made.problem, made.fabric, chosen.placement.hosts)]),
        "lower_bound_seconds": chosen.placement.bound,
        "host_order_seconds": chosen.plain,
        "loss": text.loss_words(made),
        **_if_any("groups", groups.figures(made)),
        "memory_bytes": chosen.memory,
        "memory_limit_bytes": made.limit,
        "memory_source": made.memory_source,
        "stages": {
            "gather_seconds": row(step.gather),
            "finish_seconds": row(step.finish),
            "reduce_seconds": row(step.reduce),
        },
        "optimizer_seconds": float(step.optimizer[0]),
        "model": {"name": made.named, **plans.shape(made.model)},
        "terms": {name: x.tolist() for name, x in terms(made.problem, made.fabric, chosen.placement.hosts).items()},
        "command": made.command,
    }
