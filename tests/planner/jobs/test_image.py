"""The Dockerfile, read as text: its sources exist, and its images have what the JobSet's commands need."""

import importlib.util
import pathlib
import re

import pytest

from planner.jobs import jobset
from planner.jobs.job import Job

ROOT = pathlib.Path(__file__).resolve().parents[3]
STAGES = ("cpu", "cuda")


def _stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return (instruction, arguments) of each stage, with those of the stage that it is built from first."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            found[name] = list(found.get(base, []))
        elif name:
            found[name].append((instruction, arguments))
    return found


@pytest.fixture(scope="module")
def stages():
    return _stages((ROOT / "Dockerfile").read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_every_copied_source_exists(stages, stage):
    sources = [s for what, arguments in stages[stage] if what == "COPY" for s in arguments.split()[:-1]]
    assert sources and [source for source in sources if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("stage", STAGES)
def test_the_image_has_the_modules_that_the_jobset_runs(stages, stage):
    """They are found from any working folder: the copied packages are on PYTHONPATH, and nothing wraps the command."""
    job = Job("gpt_8b", "auto", "/data/run", nodes=2, min_nodes=2, gpus_per_node=8)
    manifest = jobset.manifest(job, jobset.JobSetOptions("tiny", "registry/paxtrain:1", "claim"))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [script] = pod["containers"][0]["args"]
    modules = re.findall(r"-m ([\w.]+)", script)
    assert modules == ["planner.run"]
    instructions = stages[stage]
    assert not [what for what, _ in instructions if what in ("ENTRYPOINT", "CMD")]
    copied = [a.split() for what, a in instructions if what == "COPY"]
    [home] = [a for what, a in instructions if what == "WORKDIR"]
    assert any(f"PYTHONPATH={home}" in a.split() for what, a in instructions if what == "ENV")
    for module in modules:
        file = pathlib.Path(importlib.util.find_spec(module).origin).relative_to(ROOT)
        assert [file.parts[0], file.parts[0]] in copied
    for package in ("compress", "paxtrain", "configs"):
        assert [package, package] in copied
    assert "--config=gpt_8b" in script


@pytest.mark.parametrize("stage, requirements", [("cpu", "requirements.txt"), ("cuda", "requirements-gpu.txt")])
def test_the_image_installs_the_requirements_and_does_not_run_as_root(stages, stage, requirements):
    installed = " ".join(a for what, a in stages[stage] if what == "RUN")
    assert f"--requirement {requirements} " in installed and "kubernetes" in installed
    users = [a for what, a in stages[stage] if what == "USER"]
    assert users and users[-1] not in ("root", "0")
    volume = jobset.JobSetOptions("tiny", "image", "claim").mount
    assert f"mkdir {volume}" in installed and f"chown paxtrain {volume}" in installed
