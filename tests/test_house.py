"""The rooms of the house: their imports, their sizes, their docstrings, and one meaning for each name of a type."""

import ast
import collections
import pathlib
import re
import shutil
import subprocess
import sys

from tests import sources
from tests.sources import ROOT

PRODUCT = ("compress", "paxtrain", "planner")
MOST_MODULES = 12


def room(path):
    """Return the room of a file: its package and the first folder in it."""
    return "/".join(pathlib.PurePosixPath(path).parts[:-1][:2])


def rooms():
    """Return the rooms of the product, and the packages themselves."""
    return {room(path) for path in sources.read() if path.startswith(PRODUCT)}


def test_made_up_imports_break_the_contracts(tmp_path):
    """`make lint` holds the contracts of pyproject.toml; this is their control."""
    for path in ("pyproject.toml", *sources.files(ROOT)):
        if path.endswith((".toml", ".py")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "planner" / "unlisted.py").touch()
    wrong = {
        "paxtrain/model/transformer.py": "paxtrain.parallel",
        "paxtrain/outer/exchange.py": "paxtrain.train",
        "paxtrain/files.py": "planner.plan",
        "compress/gpu/tiles.py": "compress.codec",
        "planner/cost/outer.py": "paxtrain.run",
        "planner/measure/link_timing.py": "planner.memory",
        "planner/supervision/supervisor.py": "paxtrain.config",
        "experiments/gpu/running.py": "tests.processes",
    }
    for path, imported in wrong.items():
        with (tmp_path / path).open("a") as file:
            file.write(f"\n\ndef _made_up():\n    import {imported}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run([*command, "--no-cache"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "6 broken" in done.stdout, done.stdout + done.stderr
    said = [line.split(" (l.")[0].lstrip("- ") for line in done.stdout.splitlines()]
    for path, imported in wrong.items():
        assert f"{path.removesuffix('.py').replace('/', '.')} -> {imported}" in said, done.stdout
    assert "- planner.unlisted" in done.stdout


def test_rooms_are_small():
    files = [path for path in sources.read() if path.startswith(PRODUCT) and not path.endswith("__init__.py")]
    folders = collections.Counter(path.rpartition("/")[0] for path in files)  # a room may have folders inside
    assert len(folders) > 30 and {name: count for name, count in folders.items() if count > MOST_MODULES} == {}


def test_a_class_name_has_one_meaning():
    """Names that differ only in leading underscores count as one."""
    homes = collections.defaultdict(list)
    for path in sources.read():
        if path.startswith(PRODUCT):
            found = (node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ClassDef))
            for node in found:
                homes[node.name.lstrip("_")].append(path)
    assert len(homes) > 100
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_the_design_page_lists_every_room():
    """Each between the heading of the house and the next one."""
    house = (ROOT / "docs" / "design.md").read_text().split("\n## ")[1]
    assert {name for name in rooms() if f" {name.rpartition('/')[2]}/ " not in house} == set()


def test_every_room_says_what_lives_there():
    inside = {path.rpartition("/")[0] for path in sources.read() if path.startswith(PRODUCT)}
    for name in inside:
        docstring = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text()))
        assert docstring and (name in PRODUCT or "mport" in docstring), name
        modules = {path.stem for path in (ROOT / name).glob("*.py")} - {"__init__", "__main__"}
        if name not in ("paxtrain", "planner"):  # whose mains README and docs/design.md list
            assert {module for module in modules if f"{module}.py" not in docstring} == set(), name


def unknown_paths(texts):
    """Return the Python files that texts name by their path from the root, and that are not there."""
    named = {path for text in texts for path in re.findall(r"(?<![\w./-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.py\b", text)}
    tops = (*PRODUCT, "configs", "examples", "experiments", "tests")
    return sorted(path for path in named if path.startswith(tops) and not (ROOT / path).exists())


def test_files_that_code_and_pages_name_are_there():
    modules = [(ROOT / path).read_text() for path in sources.read() if path.startswith(PRODUCT)]
    pages = [path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
    assert len(modules) > 100 and len(pages) > 10
    assert unknown_paths([*modules, *pages]) == []
    assert unknown_paths(["see compress/gone.py", "and planner/cost/compute.py"]) == ["compress/gone.py"]
