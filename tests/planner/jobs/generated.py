"""What tests of generated jobs share: stand-ins for SLURM's commands, and the rules of JobSets."""

import dataclasses
import json
import os
import re
import subprocess
import sys

from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from planner.jobs import slurm
from planner.jobs.job import Job

JOB = Job("configs/tiny.py", "auto", "run", nodes=4, min_nodes=2, gpus_per_node=8, max_restarts=2)

# Stand-ins: srun writes its arguments and the text of SAYS, and ends with the code that CODES has for this start (or 0,
# if all steps are "finished", or once it was stopped after a "wait");
# scontrol and scancel write their arguments into a file.
SRUN = """#!{python}
import json, os, pathlib, signal, sys, time
here = pathlib.Path({here!r})
with (here / "srun").open("a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
print(os.environ.get("SAYS", ""), flush=True)
print(os.environ.get("SAYS", ""), file=sys.stderr, flush=True)
starts = len((here / "srun").read_text().splitlines())
code = os.environ["CODES"].split(",")[starts - 1]
if code == "wait":
    until = time.monotonic() + 20
    while "--signal=TERM" not in (here / "asked").read_text() and time.monotonic() < until:
        time.sleep(0.02)
if code == "finished":
    (here / "run" / "finished").touch()
sys.exit(int(code) if code.isdecimal() else 0)
"""
ASKED = """#!/bin/bash
echo "${{0##*/}} $*" >>{here}/asked
[[ $1 == show && $2 == hostnames ]] && printf 'n1\\nn2\\nn3\\n'
[[ $1 == show && $2 == job ]] && echo "JobId=$3 PreemptTime=$PREEMPTED SuspendTime=None"
true
"""


class Batch:
    """A batch script and stand-ins for SLURM's commands, in a folder."""

    def __init__(self, folder, job=JOB, own=slurm.SlurmOptions()):  # noqa: B008
        self.folder, self.job = folder, dataclasses.replace(job, out=str(folder / "run"))
        commands = folder / "bin"
        commands.mkdir()
        (folder / "asked").touch()
        (commands / "srun").write_text(SRUN.format(python=sys.executable, here=str(folder)))
        for name in ("scontrol", "scancel"):
            (commands / name).write_text(ASKED.format(here=folder))
        for file in commands.iterdir():
            file.chmod(0o755)
        self.script = folder / "job.sbatch"
        self.script.write_text(slurm.script(self.job, own))
        self.environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_JOB_NUM_NODES": "3",
            "PREEMPTED": "None",
        }

    def start(self, codes, **variables):
        return subprocess.Popen(
            ["bash", str(self.script)],
            env=self.environment | {"CODES": codes} | variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, codes, **variables):
        popen = self.start(codes, **variables)
        said, _ = popen.communicate(timeout=30)
        return popen.returncode, said

    @property
    def given(self):
        return [json.loads(line) for line in (self.folder / "srun").read_text().splitlines()]

    @property
    def requeued(self):
        return (self.folder / "asked").read_text().count("scontrol requeue 7")


def at(manifest, *path):
    for key in path:
        manifest = manifest[key]
    return manifest


JOB_SPEC = ("spec", "replicatedJobs", 0, "template", "spec")
POD_SPEC = (*JOB_SPEC, "template", "spec")


def assert_valid(manifest):
    """Check a manifest by the JobSet API's types: all fields are known, have the right type and an allowed value."""
    read = JobsetV1alpha2JobSet.from_dict(manifest)
    assert read.to_dict() == manifest  # unknown fields are left out there
    policy = manifest["spec"]["failurePolicy"]  # whose values the types leave open, and the CRD's schema does not
    assert policy["restartStrategy"] in ("Recreate", "BlockingRecreate")
    for rule in policy["rules"]:
        assert rule["action"] in ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")


def as_kubernetes_expands(text: str, variables: dict[str, str]) -> str:
    """Return a command as a container gets it: $$ is a $, and $(NAME) the variable's value if it is set."""
    expanded = lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0])  # noqa: E731
    return re.sub(r"\$\$|\$\(([^)]*)\)", expanded, text)
