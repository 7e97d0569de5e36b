"""The nightly run's verdicts, with parts that fail in each place where bash would go on."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.sources import ROOT

# Instead of make: makes environments, and fails for the target FAILS. Their Python fails if its arguments have FAILS.
MAKE = r"""#!/bin/bash
for argument in "$@"; do
  [[ $argument != "$FAILS" ]] || exit 2
  [[ $argument != VENV=* ]] || venv=${argument#VENV=}
done
mkdir -p "${venv:=.venv}/bin"
printf '#!/bin/bash\n[[ " $venv $* " != *" $FAILS "* ]]\n' > "$venv/bin/python"
printf '#!/bin/bash\necho nowhere.md >&2; exit 1\n' > "$venv/bin/mkdocs"
chmod +x "$venv"/bin/*
"""


def nightly(home: pathlib.Path, fails: str, *parts: str) -> tuple[int, list[str]]:
    """Return the exit code of .ci/nightly with these parts, and the parts with their verdicts."""
    shutil.copytree(ROOT / ".ci", home / ".ci")
    for folder in ("docs", "compress", "paxtrain", "planner", "bin"):
        (home / folder).mkdir()
    for file in ("README.md", "mkdocs.yml"):
        (home / file).touch()
    (home / "bin/make").write_text(MAKE)
    (home / "bin/make").chmod(0o755)
    variables = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "FAILS": fails}
    variables |= {"XDG_CACHE_HOME": str(home / "cache"), "PYENV_ROOT": str(home)}
    done = subprocess.run(
        [home / ".ci/nightly", *parts], env={**os.environ, **variables}, capture_output=True, text=True
    )
    table = done.stdout.rpartition("== nightly\n")[2].splitlines()
    return done.returncode, [" ".join(line.split()[:2]) for line in table]


@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ("nothing", ""),
        ("test-lab", "lab"),
        ("lint", "users"),  # the first of several commands
        ("train", "users"),  # the last one
        ("tests.hostile", "hostile"),
        ("pytest", "cuda"),  # in a pipe, before other commands
    ],
)
def test_a_part_that_fails_is_said_to_and_the_others_go_on(tmp_path, fails, failed):
    parts = ["lab", "users", "hostile", "cuda", "exports"]
    code, verdicts = nightly(tmp_path, fails, *parts)
    assert verdicts == [f"{part} {'FAILED' if part == failed else 'passed'}" for part in parts]
    assert code == bool(failed)
