"""BUILD, the requirements and the direction of imports agree with the files on disk."""

import ast
import difflib
import graphlib
import re
import shutil
import subprocess

import pytest

from tests import build_file
from tests.build_file import ROOT

MAY_IMPORT = {
    "compress": {"compress"},
    "paxtrain": {"paxtrain", "compress"},
    "planner": {"planner", "paxtrain", "compress"},
    "configs": {"configs", "paxtrain"},
    "tests": {"tests", "planner", "paxtrain", "compress", "configs"},
}
MINIATURE = {
    "compress/__init__.py": "",
    "compress/codec.py": "import os\nimport jax.numpy as jnp",
    "compress/bench.py": "from compress import codec\nif __name__ == '__main__':\n    codec",
    "paxtrain/__init__.py": "",
    "paxtrain/model.py": "def f():\n    import orbax.checkpoint\n    from compress.codec import g",
    "paxtrain/train.py": "from absl import app\nif __name__ == '__main__':\n    app.run(None)",
    "paxtrain/bench.py": "import paxtrain.model\nif __name__ == '__main__':\n    pass",
    "tests/conftest.py": "import jax",
    "tests/paxtrain/help.py": "",
    "tests/paxtrain/reference.npz": "",
    "tests/paxtrain/make.py": "# /// script\n# ///\nimport torch",
    "tests/paxtrain/test_train.py": "from tests.paxtrain import help\nRUN = ['-m', 'paxtrain.train']",
}
MINIATURE_TARGETS = {
    "compress": (["compress/__init__.py", "compress/codec.py"], ["@pypi//jax"]),
    "paxtrain": (["paxtrain/__init__.py", "paxtrain/model.py"], [":compress", "@pypi//orbax_checkpoint"]),
    "compress_bench": (["compress/bench.py"], [":compress"]),
    "paxtrain_bench": (["paxtrain/bench.py"], [":paxtrain"]),
    "train": (["paxtrain/train.py"], [":paxtrain", "@pypi//absl_py"]),
    "tests": (["tests/conftest.py"], ["@pypi//jax"]),
    "tests_paxtrain": (["tests/paxtrain/help.py"], []),
    "test_paxtrain_train": (
        ["tests/paxtrain/test_train.py"],
        [":paxtrain", ":tests", ":tests_paxtrain", ":train", "@pypi//pytest"],
    ),
}


def targets(text):
    """Attributes by target name; Starlark's calls of rules are Python's, too."""
    calls = [node.value for node in ast.parse(text).body if node.value.func.id != "load"]
    parsed = [{word.arg: ast.literal_eval(word.value) for word in call.keywords} for call in calls]
    assert len({target["name"] for target in parsed}) == len(parsed)
    return {target["name"]: target for target in parsed}


def requirements(name):
    """Version bounds by normalised distribution name."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    matches = [re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?\s*(.*)", line) for line in lines if line and line[0] != "-"]
    return {match[1].lower().replace("_", "-"): match[2] for match in matches}


def circles(sources):
    try:
        graphlib.TopologicalSorter({path: source.imports for path, source in sources.items()}).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def wrong_directions(sources):
    found = [(path, imported) for path, source in sources.items() for imported in source.imports]
    return [(a, b) for a, b in found if b.partition("/")[0] not in MAY_IMPORT[a.partition("/")[0]]]


@pytest.fixture
def miniature(tmp_path):
    for name, text in MINIATURE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_build_says_what_the_files_say():
    written, expected = (ROOT / "BUILD").read_text(), build_file.build_text()
    changes = "".join(difflib.unified_diff(written.splitlines(True), expected.splitlines(True), "BUILD", "expected"))
    if changes:
        pytest.fail(f"BUILD is not up to date; `python tests/build_file.py` makes it so:\n{changes}", pytrace=False)


def test_generated_targets_are_those_of_a_known_tree(miniature):
    found = targets(build_file.build_text(miniature))
    assert {name: (target["srcs"], target.get("deps", [])) for name, target in found.items()} == MINIATURE_TARGETS
    assert found["tests_paxtrain"]["data"] == ["tests/paxtrain/reference.npz"]
    assert found["test_paxtrain_train"]["args"] == ["tests/paxtrain/test_train.py"]
    assert found["train"]["main"] == "paxtrain/train.py"


@pytest.mark.parametrize("line", ["from . import model", "import paxtrain.missing"])
def test_unclear_imports_are_refused(miniature, line):
    (miniature / "paxtrain/other.py").write_text(line)
    with pytest.raises(ValueError, match=r"absolute|does not exist"):
        build_file.build_text(miniature)


def test_imports_have_one_direction_and_no_circles(miniature):
    sources = build_file.sources()
    assert not wrong_directions(sources)
    assert not circles(sources)
    (miniature / "compress/codec.py").write_text("def f():\n    import paxtrain.model")
    assert wrong_directions(build_file.sources(miniature)) == [("compress/codec.py", "paxtrain/model.py")]
    assert set(circles(build_file.sources(miniature))) == {"compress/codec.py", "paxtrain/model.py"}


def test_targets_have_no_circles():
    """The modules may have none and their targets one: a library that imports a main of its own package."""
    found = targets((ROOT / "BUILD").read_text())
    graph = {f":{name}": [dep for dep in target.get("deps", []) if dep[0] == ":"] for name, target in found.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_requirements_have_lower_and_upper_bounds():
    for name in (path.name for path in ROOT.glob("requirements*.txt")):
        for distribution, bounds in requirements(name).items():
            assert re.fullmatch(r">=[\d.]+,<[\d.]+|==[\d.]+", bounds), f"{name}: {distribution} {bounds}"


def test_requirements_are_what_is_imported():
    run, dev = set(requirements("requirements.txt")), set(requirements("requirements-dev.txt"))
    by_product, by_tests = set(), set()
    for path, source in build_file.sources().items():
        (by_tests if path.startswith("tests/") else by_product).update(source.distributions)
    assert by_product == run
    assert by_tests <= run | dev


@pytest.mark.skipif(not shutil.which("buildifier"), reason="buildifier is not on PATH")
def test_build_is_formatted():
    subprocess.run(["buildifier", "-mode=check", "-lint=warn", ROOT / "BUILD"], check=True, stdin=subprocess.DEVNULL)
