"""The project's Python files and their imports, for the tests of BUILD and of the rooms.

A script with inline metadata (PEP 723) brings its own environment and stays outside.
"""

import ast
import dataclasses
import functools
import pathlib
import sys
import types
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("compress", "paxtrain", "planner", "configs", "experiments")
# Distributions that are not named like their module.
DISTRIBUTIONS = {"absl": "absl-py", "backports": "backports-zstd", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}
DISTRIBUTIONS |= {"vl_convert": "vl-convert-python"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python file: whether it is a program, the project's files that it imports, and the distributions it needs."""

    is_main: bool
    imports: frozenset[str]
    distributions: frozenset[str]


def files(root: pathlib.Path) -> dict[str, str]:
    """Return the text by path of the Python files of all packages and tests; that of other files is empty."""
    found = {}
    for path in sorted(file for top in (*PACKAGES, "tests") for file in (root / top).rglob("*") if file.is_file()):
        name = path.relative_to(root)
        if "__pycache__" in name.parts or any(part.startswith(".") for part in name.parts):
            continue
        text = path.read_text() if path.suffix == ".py" else ""
        if "# /// script" not in text.splitlines():
            found[name.as_posix()] = text
    return found


def _imported(tree: ast.Module, modules: dict[str, str], runs: bool) -> Iterator[str]:
    """Yield dotted names that are imported and, if the file `runs` others, modules in strings (`-m paxtrain.train`).

    What a message tells the reader to run (paxtrain.errors.command) is not run by the file.
    """
    told = {id(arg) for node in ast.walk(tree) if isinstance(node, ast.Call) for arg in node.args if _tells(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                for alias in names:
                    submodule = f"{module}.{alias.name}"
                    yield submodule if submodule in modules else module
            case ast.ImportFrom():
                raise ValueError("imports here are absolute")
            case ast.Constant(value=str(text)) if runs and "." in text and text in modules and id(node) not in told:
                yield text


def _tells(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2] == "command"


def _is_main(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and "__name__ == '__main__'" in ast.unparse(node.test) for node in tree.body)


def read(root: pathlib.Path) -> dict[str, Source]:
    """Return every Python file of the packages and the tests, by its path from the root.

    Raises:
        ValueError: an import is relative, or names a module of ours that does not exist.
    """
    texts = {path: text for path, text in files(root).items() if path.endswith(".py")}
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in texts}
    found = {}
    for path, text in texts.items():
        tree = ast.parse(text)
        imports, distributions = set(), set()
        # A library that makes a job only writes commands, which other processes run on the job's hosts.
        for name in _imported(tree, modules, runs=path.startswith(("tests/", "experiments/")) or _is_main(tree)):
            top = name.partition(".")[0]
            if name in modules:
                imports.add(modules[name])
            elif top in (*PACKAGES, "tests"):
                raise ValueError(f"{path} imports {name}, which does not exist")
            elif top not in sys.stdlib_module_names:
                distributions.add(DISTRIBUTIONS.get(top, top).lower().replace("_", "-"))
        found[path] = Source(_is_main(tree), frozenset(imports - {path}), frozenset(distributions))
    return found


@functools.cache
def project() -> types.MappingProxyType[str, Source]:
    """Return what `read` finds in this project, once in a process."""
    return types.MappingProxyType(read(ROOT))
