"""The batch script of a job under SLURM, written so that it can be read before it is submitted."""

import dataclasses
import re
import shlex

from paxtrain.process.progress import FAULT
from planner.jobs.job import GPU_VARIABLES, Job, shell


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """Options of a job that only SLURM knows.

    Attributes:
        name: name of the job.
        time: time limit in SLURM's notation; "" for the partition's.
        partition: partition; "" for the user's default.
        account: account; "" for the user's default.
        lines: further `#SBATCH` options.
        setup: shell lines before everything else.
    """

    name: str = "paxtrain"
    time: str = ""
    partition: str = ""
    account: str = ""
    lines: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


_SCRIPT = """\
#!/bin/bash
# Written by planner.launch; submit it with sbatch, from the folder that has paxtrain in it.
#
# It starts planner.run for each process. SLURM requeues the job when a node fails or a job of higher priority preempts
# it. The script itself requeues it with a checkpoint when the time limit is near, and after a fault if all nodes live.
# Training continues from the last good checkpoint, on the nodes of the new start.
{options}
{setup}set -u

out={out}
processes={processes}  # of each node
restarts={restarts}  # after faults, so often at most
{variables}
say() { printf '%s %s\\n' "$(date '+%F %T')" "$*"; }

requeue() { # why
  say "$1; the job is requeued"
  scontrol requeue "$SLURM_JOB_ID" && exit 0  # SLURM ends this script now, or when it begins again
  say "SLURM did not requeue it; sbatch it again, and it goes on from its last checkpoint"
  exit 1
}

# What all nodes say alike is passed on once.
once() {
  local line
  local -A said=()
  while IFS= read -r line || [[ -n $line ]]; do
    case $line in
      'error: '* | 'note: '*)
        [[ -n ${said["$line"]:-} ]] && continue
        said["$line"]=1
        ;;
    esac
    printf '%s\\n' "$line"
  done
}

# srun names the task that fails first, and ends all others.
step() {
  srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * processes)) \\
    --ntasks-per-node="$processes" --distribution=block --cpu-bind=none --mpi=none --kill-on-bad-exit=1 --wait=600 \\
    python {run} 2>&1 | once
  return "${PIPESTATUS[0]}"
}

limit=  # set when the time limit is near
trap 'limit=near; say "the time limit is near"; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

mkdir -p "$out" || exit 2
say "start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID, on $SLURM_JOB_NODELIST"
step &
while true; do
  wait "$!"
  code=$?
  kill -0 "$!" 2>/dev/null || break  # else a signal has ended the wait, not the step
done

if [[ $code == 0 && -e $out/finished ]]; then
  say "finished"
  exit 0
elif ((code == 2)); then
  if ((SLURM_JOB_NUM_NODES < {nodes})); then
    say "bad input with $SLURM_JOB_NUM_NODES of {nodes} nodes; if only so few do not fit, sbatch it again for more"
  else
    say "bad input: to start again would not help"
  fi
  exit 2
elif [[ -n $limit ]]; then
  requeue "stopped ahead of the time limit"
elif ((code == 0)); then
  # SIGTERM to the steps alone comes from a preemption with a grace time, or from the user.
  if scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
    requeue "preempted"
  fi
  # SLURM forgets an ended job after MinJobAge, 300 s by default; a new job finds the checkpoint just as well.
  say "stopped by SIGTERM; scontrol requeue $SLURM_JOB_ID (within minutes) or sbatch continues from its last checkpoint"
  exit 0
fi

count=$out/faults.$SLURM_JOB_ID
faults=$(cat "$count" 2>/dev/null)
[[ $faults =~ ^[0-9]{1,6}$ ]] || faults=0  # bash would run commands that are in a number
faults=$((10#$faults + 1))
if ((faults > restarts)); then
  say "the last of $faults faults, of which $restarts are allowed (--max_restarts)"
  exit {fault}
elif ! echo "$faults" >"$count"; then
  say "cannot write to $out"
  exit {fault}
fi
requeue "fault $faults of $restarts"
"""


def _options(job: Job, slurm: SlurmOptions) -> list[str]:
    """Return the `#SBATCH` lines."""
    nodes = f"{job.min_nodes}-{job.nodes}" if job.min_nodes < job.nodes else str(job.nodes)
    # No --ntasks-per-node, which is srun's: with it SLURM gives the fewest nodes of the range, though more are idle.
    given = [f"--job-name={slurm.name}", f"--nodes={nodes}"]
    if job.gpus_per_node:
        given.append(f"--gpus-per-node={job.gpus_per_node}")
    given += ["--exclusive", "--mem=0"]  # all cores and memory of a node; otherwise a task has one core
    for name in ("time", "partition", "account"):
        if value := getattr(slurm, name):
            given.append(f"--{name}={value}")
    given += ["--requeue", "--open-mode=append", f"--output={slurm.name}-%j.log"]
    given.append(f"--signal=B:USR1@{job.signal_ahead}")  # to this script alone
    return [f"#SBATCH {option}" for option in (*given, *slurm.lines)]


def _variables(job: Job) -> list[str]:
    """Return the lines that set environment variables: on GPUs if they are not set, on CPUs in any case."""
    if not job.gpus_per_node:
        return ["", "# Also where jax would find GPUs.", "export JAX_PLATFORMS=cpu"]
    lines = [""]
    for name, (value, why) in GPU_VARIABLES.items():
        lines += [f"# {why}", f"export {name}=${{{name}:-{value}}}"]
    lines += [
        "# A start after a fault compiles nothing: programs are kept beside the checkpoints.",
        "export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/cache}",
    ]
    return lines


def script(job: Job, slurm: SlurmOptions) -> str:
    """Return the text of the batch script."""
    values = {
        "options": "\n".join(_options(job, slurm)),
        "out": shlex.quote(job.out),
        "nodes": str(job.nodes),
        "processes": str(job.processes_per_node),
        "restarts": str(job.max_restarts),
        # Setup comes before `set -u`, since conda's scripts read unset variables, and before the script's variables,
        # since it may set `out`.
        "setup": "".join(f"{line}\n" for line in slurm.setup),
        "variables": "".join(f"{line}\n" for line in _variables(job)),
        "run": shell(job.run()),
        "fault": str(FAULT),
    }
    return re.sub(r"(?<!\$)\{([a-z]+)\}", lambda found: values[found[1]], _SCRIPT)
