"""Plan for the nodes that a job got, and train on them: python -m planner.run --config=... --out=RUN.

Start it as training is started, with one process per node or per device. With
--plan=auto it takes the plan of an earlier start on the same nodes. If there is none, it measures their links, unless
a recent profile exists, and plans. With --plan=FILE hosts are matched by name, in whatever order they come.
"""

import contextlib
import json
import math
import os
import pathlib
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags

from paxtrain import files
from paxtrain import flags as shared_flags
from paxtrain.command_line import OVERRIDES, define_config, group, run
from paxtrain.config import Config, to_dict
from paxtrain.config import plan as plans
from paxtrain.data.datasets import DataSets
from paxtrain.errors import MOST_SECONDS, UserError
from paxtrain.parallel.mesh import MOST_CPU_DEVICES
from paxtrain.process import distributed, launchers
from paxtrain.process.progress import Progress
from paxtrain.profiling.terms import StepComparison
from paxtrain.run import training
from paxtrain.run.run_lock import RunLock
from planner import planning_flags
from planner.measure import flags as measure_flags
from planner.measure.machines import Machines, find_machines
from planner.measure.process_group import ProcessGroup
from planner.planning.inputs import sections
from planner.planning.options import PlanOptions
from planner.start import allocation, environment, job_plan, replanning, run_record
from planner.start.job_plan import Decision, PlanRequest
from planner.start.replanning import Replanning

HINT = OVERRIDES
AUTO = "auto"
FINISHED = "finished"


def _launch(variables: Mapping[str, str]) -> tuple[str | None, int | None, int | None, float]:
    """Return the coordinator, the number of processes, this one's number, and the timeout for distributed.initialize.

    Raises:
        UserError: neither flags nor variables say which processes take part.
    """
    f = flags.FLAGS
    given = (f.coordinator, f.num_processes, f.process_id)
    if given == (None, None, None) and not launchers.is_launched(variables):
        raise UserError(
            "nothing says which processes take part: there are neither flags nor variables of SLURM, MPI, torchrun or "
            "Kubernetes; start it with srun or mpirun, or give --coordinator=HOST:PORT --num_processes=N "
            "--process_id=I, or --num_processes=1 for this process alone"
        )
    return *given, f.coordinator_timeout


def _check_data(group: ProcessGroup, config: Config) -> None:
    """Check on every process that it can read the data, before anything is measured."""
    problem = ""
    try:
        DataSets(config)
    except UserError as error:
        problem = str(error)

    def verdict(problems: list[str]) -> None:
        for name, each in zip(group.names, problems):
            if each:
                raise UserError(each if all(problems) else f"{name}: {each}")

    group.gather(problem, verdict)


def _given_plan(group: ProcessGroup) -> plans.Plan | None:
    """Return the plan of --plan=FILE, which process 0 reads for all; None if the plan is to be made."""
    path = flags.FLAGS.plan
    return None if path == AUTO else plans.from_json(group.gather(None, lambda _: plans.to_json(plans.load(path))))


def _decide(
    group: ProcessGroup,
    machines: Machines,
    request: PlanRequest,
    progress: Progress,
    given: plans.Plan | None,
) -> Decision:
    """Return the plan that --plan and --replan ask for, the same on every process."""
    f, began = flags.FLAGS, time.monotonic()
    if given is None:
        return job_plan.decide(group, machines, request, "", progress)

    def judge(_: object) -> str:
        reason = allocation.why_not(given, machines)
        if reason and not f.replan:
            raise UserError(
                f"the plan {f.plan} is not for these nodes: {reason}; start on its nodes, or plan anew with --replan"
            )
        if reason:
            sections(request.values)
        return reason

    reason = group.gather(None, judge)
    if reason:
        why = f"{f.plan} is not for these nodes: {reason}"
        return job_plan.decide(group, machines, request, why, progress)
    return Decision(given, f"{f.plan}, for these nodes", time.monotonic() - began, given=True)


def _record(decision: Decision, machines: Machines, config: Config, processes: int) -> None:
    plan = {name: value for name, value in plans.to_json(decision.plan).items() if name != "predicted"}
    start = environment.describe(
        flags=shared_flags.values(),
        config=to_dict(config),
        nodes={"hosts": machines.hosts, "devices_per_host": machines.per_host, "kinds": machines.kinds},
        processes=processes,
        plan={"source": decision.source, **plan},
    )
    out = pathlib.Path(config.run.out)
    with files.writable(f"--out={out}", "name a folder that can be written"):
        environment.record(out, start)


def given() -> tuple[dict[str, Any], PlanOptions, Config]:
    """Return the configuration's values, the planner's options, and the configuration that is measured.

    planner.launch calls it before it writes a job, so that what the job would refuse is refused there.

    Raises:
        UserError: a flag makes no sense.
    """
    f = flags.FLAGS
    values = f.config.to_dict()
    told = {name: value for name, value in (("out", f.out), ("peak_flops", f.peak)) if value}
    values["run"] = {**values.get("run", {}), **told}
    for name in ("profile_seconds", "profile_age", "answer_timeout"):
        if not getattr(f, name) <= MOST_SECONDS:
            given = getattr(f, name)
            raise UserError(f"--{name} must be a number of seconds, got {given}; {MOST_SECONDS:,.0f} is the most")
    options = planning_flags.options(oracle="no") if f.plan == AUTO or f.replan else PlanOptions()
    if f.plan == AUTO:
        sections(values)
    elif os.path.isfile(f.plan):  # else process 0 says that there is none, or a pod has what is not here
        plan = plans.load(f.plan)
        if not f.replan:  # with it the plan may be for other nodes, and then does not count
            plan.apply(values)
    return values, options, job_plan.measurable(values)


def _record_times(
    out: pathlib.Path, config: Config, machines: Machines, found: StepComparison, plan: plans.Plan
) -> None:
    """Add what was predicted and measured to the folder's record; what cannot be recorded costs no training."""
    try:
        problem = run_record.record(out, config, machines, found, plan)
    except OSError as error:
        print(f"the times of this start are not in {out / run_record.TRIALS}, which cannot be written ({error})")
        return
    if problem:
        print(f"the times of this start are not in {out / run_record.TRIALS}: {problem}")


def main(argv: Sequence[str]) -> None:
    """Join the other processes, plan, and train."""
    f = flags.FLAGS
    values, options, neutral = given()
    out = pathlib.Path(neutral.run.out)
    launched = _launch(os.environ)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices)
    with contextlib.ExitStack() as held, shared_flags.progress() as progress:
        distributed.initialize(*launched, f.lost_timeout)
        group = ProcessGroup(f.answer_timeout)
        with group.ends_together():
            chosen = _given_plan(group)
            if f.gpus is not None:
                allocation.check_devices(group, f.gpus, f.host_name or socket.gethostname())
            machines = find_machines(group, f.rack, f.host_name, f.site, f.peak)
            allocation.check_shared(group, out)
            group.gather(None, lambda _: held.enter_context(RunLock(out)) and None)
            _check_data(group, neutral)
            request = PlanRequest(values, options, out, f.profile_seconds, f.profile_age, f.compute_hosts)
            decision = _decide(group, machines, request, progress, chosen)
            if group.process == 0:
                print(job_plan.describe(decision, machines), flush=True)
            if not decision.given:
                # A new plan may compress something else. The codecs' state then starts afresh, and the run says so.
                values["checkpoint"] = {**values.get("checkpoint", {}), "reset_codec": True}
            config = decision.plan.apply(values)
            group.gather(None, lambda _: _record(decision, machines, config, group.count))
        finished = out / FINISHED
        if group.process == 0:
            finished.unlink(missing_ok=True)
        names = [machines.hosts[host] for host in machines.of_process]
        advise = None
        if group.process == 0 and config.run.stragglers:
            kept = allocation.kept_profile(out / job_plan.PROFILES, machines, neutral.model, math.inf)
            cluster = run_record.corrected(kept.cluster, out)[0] if kept else None
            search = replanning.given(planning_flags.SEARCH)
            advise = held.enter_context(Replanning(out, values, decision.plan, cluster, search))
        result = training.train_together(config, decision.plan, names, progress, advise=advise)
        if group.process == 0:
            if result.comparison:
                _record_times(out, config, machines, result.comparison, decision.plan)
            if result.finished:
                files.write(finished, json.dumps({"steps": config.run.steps}) + "\n")
            elif f.stopped_code:
                sys.exit(f.stopped_code)


def define_flags() -> None:
    """Define the flags of this main."""
    flags.DEFINE_string("plan", AUTO, f"Path of a plan.json; {AUTO}: the plan for these nodes, made at the start.")
    flags.DEFINE_bool("replan", False, "Plan anew if --plan=FILE is for other nodes.")
    flags.DEFINE_string("out", None, "The run's folder, which all nodes share; default: run.out of the configuration.")
    about = "Exit code of process 0 if SIGTERM has stopped the run, which then has a checkpoint."
    flags.DEFINE_integer("stopped_code", 0, about, 0, 255)
    with group("This host"):
        flags.DEFINE_string("host_name", "", "Its name; default: the one that the operating system gives it.")
        flags.DEFINE_integer("gpus", None, "GPUs that this process must find, 0: CPUs; default: any.", lower_bound=0)
        flags.DEFINE_integer("cpu_devices", 1, "Virtual CPU devices per process.", 1, MOST_CPU_DEVICES)
    with group("Measuring the nodes"):
        flags.DEFINE_float("profile_seconds", 45, "Seconds that links and compute may take.", lower_bound=1)
        flags.DEFINE_float("profile_age", 86_400, "Seconds for which a profile of these nodes is valid.", lower_bound=0)
        measure_flags.define_flags()
    with group("Several processes"):
        flags.DEFINE_float("answer_timeout", 60, "Seconds after which a silent process counts as lost.", lower_bound=1)
        distributed.define_flags()
    with group("What a plan may choose"):
        planning_flags.define_flags()
    define_config("config", "tiny", "The configuration: a file, or the name of one in configs/.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
