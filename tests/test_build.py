"""BUILD, the requirements and the direction of imports agree with the files on disk.

BUILD is Starlark that is also Python, so the tests run it, with stand-ins for the rules.
"""

import ast
import graphlib
import pathlib
import re
import shutil
import subprocess

import pytest

from tests import rooms, sources
from tests.sources import ROOT

SHIPPED = ("compress/", "configs/", "paxtrain/", "planner/")  # the packages that BUILD has
MINIATURE = {
    "BUILD": (ROOT / "BUILD").read_text(),
    "compress/__init__.py": "",
    "compress/codec.py": "import jax.numpy as jnp",
    "paxtrain/__init__.py": "",
    "paxtrain/model.py": "def f():\n    import orbax.checkpoint\n    from compress.codec import g",
    "paxtrain/train.py": "from absl import app\nif __name__ == '__main__':\n    app.run(None)",
    "paxtrain/data/reference.npz": "",
    "tests/test_train.py": "import pytest\nRUN = ['-m', 'paxtrain.train']",
}


def targets(root, text=None):
    """Return the attributes and the rule of each target of a BUILD, by name; `glob` looks at the files under root."""
    found = {}

    def rule(kind):
        def add(name, **attributes):
            assert name not in found, f"two targets are called {name}"
            found[name] = attributes | {"rule": kind}

        return add

    def glob(include, exclude=()):
        paths = (path.relative_to(root) for pattern in include for path in root.glob(pattern + "/*" * _all(pattern)))
        kept = {path.as_posix() for path in paths if (root / path).is_file()}
        return sorted(path for path in kept if not any(_matches(path, pattern) for pattern in exclude))

    rules = {kind: rule(kind) for kind in ("py_library", "py_binary")}
    text = (root / "BUILD").read_text() if text is None else text
    exec(text, {"load": lambda *_: None, "package": lambda **_: None, "glob": glob, **rules})
    return found


def _all(pattern):
    """Return the files that match: a final `**` means files to Bazel, and folders to Python."""
    return pattern.endswith("**")


def _matches(path, pattern):
    folder = pathlib.PurePosixPath(path)
    if pattern == "**/__pycache__/**":
        return "__pycache__" in folder.parts
    return folder.suffix == ".py" if pattern == "**/*.py" else path == pattern


def complaints(root, text=None):
    """Return the differences between BUILD and the files under root, as sentences."""
    built, read = targets(root, text), sources.project() if root == ROOT else sources.read(root)
    of_rule = {
        kind: {name: target for name, target in built.items() if target["rule"] == kind}
        for kind in ("py_library", "py_binary")
    }
    held = [path for target in built.values() for path in (*target.get("srcs", ()), *target.get("data", ()))]
    known = {path for path in sources.files(root) if path.startswith(SHIPPED)}
    found = [f"{path} is in {held.count(path)} targets" for path in sorted(known) if held.count(path) != 1]
    found += [f"{path} is not there" for path in sorted(set(held) - known)]
    for top, allowed in rooms.packages().items():
        mine = [source for path, source in read.items() if path.startswith(f"{top}/")]
        if not mine:
            continue
        reached = {imported.partition("/")[0] for source in mine for imported in source.imports} - {top}
        found += [f"{top} imports {other}" for other in sorted(reached - allowed)]
        if f"{top}/" not in SHIPPED:
            continue
        others = {distribution.replace("-", "_") for source in mine for distribution in source.distributions}
        needs = {f":{other}" for other in reached} | {f"@pypi//{other}" for other in others}
        has = set(of_rule["py_library"][top].get("deps", ()))
        if has != needs:
            found.append(f"{top} needs {sorted(needs - has)} and does not need {sorted(has - needs)}")
    modules = [target["main_module"] for target in of_rule["py_binary"].values()]
    found += [f"{module} has {modules.count(module)} binaries" for module in set(modules) if modules.count(module) > 1]
    programs = {target["main_module"]: target["deps"] for target in of_rule["py_binary"].values()}
    for path, source in read.items():
        module = path.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
        if source.is_main and path.startswith(SHIPPED) and programs.pop(module, None) != [f":{path.partition('/')[0]}"]:
            found.append(f"{module} has no binary of its package")
    return found + [f"{module} is no program" for module in programs]


def requirements(name):
    """Return version bounds by normalized distribution name."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    matches = [re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?\s*(.*)", line) for line in lines if line and line[0] != "-"]
    return {match[1].lower().replace("_", "-"): match[2] for match in matches}


def circles(read):
    try:
        graphlib.TopologicalSorter({path: source.imports for path, source in read.items()}).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.fixture
def miniature(tmp_path):
    """Make a small project with a correct BUILD: its programs and its deps."""
    for name, text in MINIATURE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    text = (tmp_path / "BUILD").read_text()
    text = re.sub(r"(\nPROGRAMS = \[).*?\n\]", r'\1"paxtrain.train"]', text, flags=re.S)
    wanted = {
        "compress": ["@pypi//jax"],
        "paxtrain": [":compress", "@pypi//absl_py", "@pypi//orbax_checkpoint"],
    }
    for name, deps in wanted.items():
        text = re.sub(rf'(    name = "{name}",.*?    deps = )\[.*?\]', rf"\1{deps}", text, count=1, flags=re.S)
    (tmp_path / "BUILD").write_text(text)
    return tmp_path


@pytest.mark.once
def test_build_says_what_the_files_say():
    assert complaints(ROOT) == []
    assert len((ROOT / "BUILD").read_text().splitlines()) < 150


def test_a_known_tree_has_these_targets(miniature):
    assert complaints(miniature) == []
    found = targets(miniature)
    assert found["paxtrain"]["srcs"] == ["paxtrain/__init__.py", "paxtrain/model.py", "paxtrain/train.py"]
    assert found["paxtrain"]["data"] == ["paxtrain/data/reference.npz"]
    assert found["paxtrain_train"]["main_module"] == "paxtrain.train"


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("compress/codec.py", "", "compress needs [] and does not need ['@pypi//jax']"),
        ("compress/new.py", "import optax", "compress needs ['@pypi//optax'] and does not need []"),
        ("compress/new.py", "import paxtrain.model", "compress imports paxtrain"),
        ("paxtrain/train.py", "from absl import app", "paxtrain.train is no program"),
        ("paxtrain/sample.py", "if __name__ == '__main__':\n    pass", "paxtrain.sample has no binary of its package"),
    ],
)
def test_files_that_build_does_not_know_are_told(miniature, path, text, complaint):
    (miniature / path).write_text(text)
    assert complaint in complaints(miniature)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('glob(["paxtrain/**/*.py"])', '["paxtrain/model.py"]', "paxtrain/train.py is in 0 targets"),
        ('srcs = glob(["planner/**/*.py"])', 'srcs = ["compress/codec.py"]', "compress/codec.py is in 2 targets"),
        ('glob(["compress/**/*.py"])', '["compress/gone.py"]', "compress/gone.py is not there"),
        ('"paxtrain.train"', "", "paxtrain.train has no binary of its package"),
        ("for program in PROGRAMS", 'for program in PROGRAMS + ["planner.gone"]', "planner.gone is no program"),
    ],
)
def test_targets_that_the_files_do_not_bear_out_are_told(miniature, old, new, complaint):
    text = (miniature / "BUILD").read_text()
    assert old in text
    assert complaint in complaints(miniature, text.replace(old, new))


@pytest.mark.parametrize("line", ["from . import model", "import paxtrain.missing"])
def test_unclear_imports_are_refused(miniature, line):
    (miniature / "paxtrain/other.py").write_text(line)
    with pytest.raises(ValueError, match=r"absolute|does not exist"):
        sources.read(miniature)


def test_imports_have_no_circles(miniature):
    assert not circles(sources.project())
    (miniature / "compress/codec.py").write_text("def f():\n    import paxtrain.model")
    assert set(circles(sources.read(miniature))) == {"compress/codec.py", "paxtrain/model.py"}


def test_targets_have_no_circles():
    graph = {f":{name}": [dep for dep in target["deps"] if dep[0] == ":"] for name, target in targets(ROOT).items()}
    graphlib.TopologicalSorter(graph).prepare()
    assert {dep for deps in graph.values() for dep in deps} <= set(graph)


def test_requirements_have_lower_and_upper_bounds():
    for name in (path.name for path in ROOT.glob("requirements*.txt")):
        for distribution, bounds in requirements(name).items():
            assert re.fullmatch(r">=[\d.]+,(!=[\d.]+,)*<[\d.]+|==[\d.]+", bounds), f"{name}: {distribution} {bounds}"


def test_requirements_are_what_is_imported():
    run, dev = set(requirements("requirements.txt")), set(requirements("requirements-dev.txt"))
    by_product, by_tests = set(), set()
    for path, source in sources.project().items():
        (by_tests if path.startswith("tests/") else by_product).update(source.distributions)
    assert by_product == run
    assert by_tests <= run | dev


def test_build_is_starlark():
    """It has no statements except calls, assignments and comprehensions, as Starlark at the top level of a file."""
    allowed = (ast.Expr, ast.Assign)
    assert all(isinstance(node, allowed) for node in ast.parse((ROOT / "BUILD").read_text()).body)


@pytest.mark.skipif(not shutil.which("buildifier"), reason="buildifier is not on PATH")
def test_build_is_formatted():
    subprocess.run(["buildifier", "-mode=check", "-lint=warn", ROOT / "BUILD"], check=True, stdin=subprocess.DEVNULL)
