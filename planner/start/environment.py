"""The environment of a run, kept beside its checkpoints: environment.json, a list with one entry per start."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping

from paxtrain import files

FILE = "environment.json"
_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Variables of schedulers, and those that change what the runtime does.
_NAMED = re.compile(
    r"(SLURM|OMPI|PMIX|JOBSET|JOB|NCCL|XLA|JAX|TF|CUDA|UCX|FI|GLOO|OMP|OPENBLAS|MALLOC|PAXTRAIN|LIBTPU)_|KUBERNETES_SERVICE|"
    r"LD_LIBRARY_PATH|LD_PRELOAD|TPU_"
)
_SECRET = re.compile(r"TOKEN|JWT|SECRET|PASS|CREDENTIAL|API_?KEY", re.IGNORECASE)


def packages() -> dict[str, str]:
    """Return the version of every installed distribution."""
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name))


def revision(root: pathlib.Path = _ROOT) -> str | None:
    """Return the git commit of the code, with "+changes" if files differ from it; None without a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the scheduler and the runtime, except those that may be secret."""
    return {
        name: value for name, value in sorted(environment.items()) if _NAMED.match(name) and not _SECRET.search(name)
    }


def describe(**more: object) -> dict[str, object]:
    """Return the facts of this start, and `more`, as JSON values."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "git": revision(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages(),
        "variables": variables(os.environ),
        **more,
    }


def record(out: pathlib.Path, start: Mapping[str, object]) -> None:
    """Add a start to the folder's list; a list that cannot be read is put aside."""
    path = out / FILE
    starts: list[object] = []
    try:
        starts = json.loads(path.read_text())
        if not isinstance(starts, list):
            raise ValueError("no list")
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        starts = []
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".unreadable"))
    files.write(path, json.dumps([*starts, start], indent=1) + "\n")
