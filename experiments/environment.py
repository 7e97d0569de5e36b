"""Environments apart from this project's own, each once for a machine: what a script's inline metadata names (PEP 723).

python -m experiments.environment SCRIPT... makes those of some scripts.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

from paxtrain import files
from paxtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment below the user's cache, by what is in it.

    Attributes:
        script: the script with the metadata, which is to run in it.
        name: what its folder's name begins with; empty: the script's name.
    """

    script: pathlib.Path
    name: str = ""

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the script's inline metadata."""
        lines = self.script.read_text().split("# ///\n")[0].splitlines()[1:]
        return tomllib.loads("\n".join(line.removeprefix("#").strip() for line in lines))

    @property
    def dependencies(self) -> list[str]:
        """Return what the metadata names, as pip takes it."""
        return self.metadata["dependencies"]

    @property
    def folder(self) -> pathlib.Path:
        """Return where the environment is, or will be."""
        what = f"{self._version} {self.dependencies}"
        return files.cache_folder(f"{self.name or self.script.stem}-{hashlib.sha256(what.encode()).hexdigest()[:12]}")

    @property
    def python(self) -> pathlib.Path | None:
        """Return the environment's Python, or None if it has not been made."""
        return self.folder / "bin" / "python" if (self.folder / "complete").exists() else None

    @property
    def _version(self) -> tuple[int, int]:
        """Return the version of Python in it: this one's, or the oldest that the metadata takes if this is older."""
        oldest = re.search(r">=(\d+)\.(\d+)", self.metadata["requires-python"])
        assert oldest, "the metadata names the oldest Python with >="
        return max(sys.version_info[:2], (int(oldest[1]), int(oldest[2])))

    def _interpreter(self) -> str:
        if self._version == sys.version_info[:2]:
            return sys.executable
        version = "{}.{}".format(*self._version)
        managed = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"), "versions")
        for found in [shutil.which(f"python{version}"), *managed.glob(f"{version}.*/bin/python")]:
            # A version manager's shim is there for versions that are not chosen, too.
            if found and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
                return str(found)
        raise UserError(
            f"{self.script.name} needs python{version}, which is not there or does not start; put it on PATH"
        )

    def make(self) -> pathlib.Path:
        """Make the environment unless it is there; return its Python.

        Raises:
            UserError: there is no Python of the version, or venv or pip fails.
        """
        if found := self.python:
            return found
        python = str(self.folder / "bin" / "python")
        self._run(self._interpreter(), "-m", "venv", "--clear", str(self.folder))
        self._run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.dependencies)
        (self.folder / "complete").touch()
        return self.folder / "bin" / "python"

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise UserError(
                f"{' '.join(command[:4])} fails ({reason}); {self.script.name} needs {', '.join(self.dependencies)}"
            )


def main(scripts: list[str]) -> None:
    """Make the environments of scripts, and say where they are."""
    for script in map(pathlib.Path, scripts):
        print(f"{script.stem}: {Environment(script).make()}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
