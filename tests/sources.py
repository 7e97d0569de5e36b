"""BUILD, derived from the files and their imports: `python tests/build_file.py` rewrites it.

Each package is a py_library, each main a py_binary of its own, each test a py_test that pytest runs; what else lies
in a folder of tests (conftest.py, helpers, data) is that folder's py_library. A script with inline metadata (PEP 723)
brings its own environment and stays outside.
"""

import ast
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("compress", "paxtrain", "planner", "configs")
# Those that are not named like their module.
DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}
HEADER = """\
# Written by `python tests/build_file.py` from the files and their imports.

load("@rules_python//python:py_binary.bzl", "py_binary")
load("@rules_python//python:py_library.bzl", "py_library")
load("@rules_python//python:py_test.bzl", "py_test")
"""


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python file, and what it imports anywhere: paths of ours, distributions of others."""

    is_main: bool
    imports: frozenset[str]
    distributions: frozenset[str]


def _files(root: pathlib.Path) -> dict[str, str]:
    """Text by path of the Python files of all packages and tests; that of other files is left empty."""
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
    """Dotted names: imports, and if it `runs` others, modules of ours in strings (a test has `-m paxtrain.train`)."""
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
            case ast.Constant(value=str(text)) if runs and "." in text and text in modules:
                yield text


def _is_main(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.If) and "__name__ == '__main__'" in ast.unparse(node.test) for node in tree.body)


def sources(root: pathlib.Path = ROOT) -> dict[str, Source]:
    """Every Python file of the packages and the tests, by its path from the root.

    Raises:
        ValueError: a relative import, or one of a module of ours that does not exist.
    """
    texts = {path: text for path, text in _files(root).items() if path.endswith(".py")}
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in texts}
    found = {}
    for path, text in texts.items():
        tree = ast.parse(text)
        imports, distributions = set(), set()
        # A library that makes a job only writes commands, which the job's hosts run.
        for name in _imported(tree, modules, runs=path.startswith("tests/") or _is_main(tree)):
            top = name.partition(".")[0]
            if name in modules:
                imports.add(modules[name])
            elif top in (*PACKAGES, "tests"):
                raise ValueError(f"{path} imports {name}, which does not exist")
            elif top not in sys.stdlib_module_names:
                distributions.add(DISTRIBUTIONS.get(top, top).lower().replace("_", "-"))
        found[path] = Source(_is_main(tree), frozenset(imports - {path}), frozenset(distributions))
    return found


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in pathlib.PurePosixPath(path).parents[:-1]]


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and pathlib.PurePosixPath(path).match("test_*.py")


def _target_name(path: str, mains: list[str]) -> str:
    stem = pathlib.PurePosixPath(path).stem
    if _is_test(path):
        return "_".join(["test", *path.split("/")[1:-1], stem.removeprefix("test_")])
    if path in mains:
        unique = [pathlib.PurePosixPath(main).stem for main in mains].count(stem) == 1
        return stem if unique else path.removesuffix(".py").replace("/", "_")
    return _parents(path)[0].replace("/", "_") if path.startswith("tests/") else path.partition("/")[0]


def _formatted(rule: str, attributes: dict[str, str | bool | list[str]]) -> str:
    lines = [f"{rule}("]
    for name, value in attributes.items():
        if value is True:
            lines.append(f"    {name} = True,")
        elif isinstance(value, list) and len(value) > 1:
            lines += [f"    {name} = [", *(f"        {json.dumps(item)}," for item in value), "    ],"]
        elif value:
            lines.append(f"    {name} = {json.dumps(value)},")
    return "\n".join([*lines, ")\n"])


def build_text(root: pathlib.Path = ROOT) -> str:
    """The text of BUILD for the files under root, in buildifier's format."""
    found = sources(root)
    mains = [path for path, source in found.items() if source.is_main]
    names = {path: _target_name(path, mains) for path in _files(root)}
    members: dict[str, list[str]] = {}
    for path, name in names.items():
        members.setdefault(name, []).append(path)

    def deps(name: str) -> list[str]:
        local, others = set(), set()
        for path in (path for path in members[name] if path in found):
            reached = {path, *found[path].imports}
            # Importing a.b runs a/__init__.py, too.
            reached |= {f"{parent}/__init__.py" for file in reached for parent in _parents(file)}
            others |= found[path].distributions
            if _is_test(path):
                reached |= {f"{parent}/conftest.py" for parent in _parents(path)}
                others.add("pytest")
            local |= {names[file] for file in reached if file in names}
        labels = (f"@pypi//{distribution.replace('-', '_')}" for distribution in others)
        return sorted(f":{dep}" for dep in local - {name}) + sorted(labels)

    libraries, binaries, tests = [], [], []
    for name, paths in sorted(members.items()):
        srcs = [path for path in paths if path in found]
        ends = {"deps": deps(name)}
        if _is_test(paths[0]):
            # A test file run as a program would define its tests and run none.
            run = {"args": srcs, "data": ["pyproject.toml"], "main_module": "pytest"}
            tests.append(_formatted("py_test", {"name": name, "srcs": srcs, **run, **ends}))
        elif paths[0] in mains:
            binaries.append(_formatted("py_binary", {"name": name, "srcs": srcs, "main": srcs[0], **ends}))
        else:
            rest = {"testonly": name.startswith("tests"), "srcs": srcs, "data": [p for p in paths if p not in found]}
            libraries.append(_formatted("py_library", {"name": name, **rest, **ends}))
    return "\n".join([HEADER, *libraries, *binaries, *tests])


if __name__ == "__main__":
    (ROOT / "BUILD").write_text(build_text())
