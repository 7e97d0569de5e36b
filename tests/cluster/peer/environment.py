"""An environment with PyTorch, apart from this project's own: what the script's metadata names, once for a machine."""

import hashlib
import os
import pathlib
import subprocess
import sys
import tomllib

from paxtrain.errors import UserError

SCRIPT = pathlib.Path(__file__).with_name("pytorch.py")


def dependencies() -> list[str]:
    """Return what the script's inline metadata names (PEP 723)."""
    lines = SCRIPT.read_text().split("# ///\n")[0].splitlines()[1:]
    return tomllib.loads("\n".join(line.removeprefix("#").strip() for line in lines))["dependencies"]


def folder() -> pathlib.Path:
    """Return where the environment is, or will be: below the user's cache, by what is in it."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    what = f"{sys.version_info[:2]} {dependencies()}"
    return cache / "paxtrain" / f"torch-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def python() -> pathlib.Path | None:
    """Return the environment's Python, or None if it has not been made."""
    return folder() / "bin" / "python" if (folder() / "complete").exists() else None


def make() -> pathlib.Path:
    """Make the environment unless it is there; return its Python.

    Raises:
        UserError: pip cannot install PyTorch.
    """
    if found := python():
        return found
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder())], check=True)
    install = [str(folder() / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*install, *dependencies()], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise UserError(
            f"PyTorch cannot be installed ({reason}); the experiment peer needs {', '.join(dependencies())}"
        )
    (folder() / "complete").touch()
    return folder() / "bin" / "python"
