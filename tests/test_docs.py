"""The pages of docs/ are true: their snippets run, and their commands and paths exist."""

import importlib
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import types

import pytest
import yaml

import paxtrain
from tests import small
from tests.sources import ROOT

API = ROOT / "docs" / "api.md"
EXAMPLES = [
    pytest.param(path, marks=[] if path.stem == "error_of_compression" else pytest.mark.slow)
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
    """Return a folder with data as `paxtrain.prepare --out=runs/data` writes it."""
    return small.corpus(tmp_path_factory.mktemp("home"), 20_000, "runs/data")


def snippets(page: pathlib.Path) -> list[str]:
    """Return the Python snippets of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.fixture
def smaller_programs(monkeypatch):
    """Put layers into a loop, and let the tiny model have less to do: sooner compiled, it runs the same lines."""
    load = paxtrain.load_config
    looped = {"pipeline.scan_layers": "on"}
    less = {"model.layers": 2, "model.sequence": 64, "batch.global_batch": 16}

    def smaller(path, changes=None):
        return load(path, looped | (less if path == "tiny" else {}) | (changes or {}))

    monkeypatch.setattr(paxtrain, "load_config", smaller)


@pytest.mark.slow
@pytest.mark.usefixtures("smaller_programs")
def test_the_snippets_of_the_interface_run(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    found = snippets(API)
    assert len(found) == 7
    names: dict = {"__name__": "api"}
    for snippet in found:
        exec(compile(snippet, API.name, "exec"), names)
    assert names["run"].finished and len(names["run"].losses) == 6
    assert (names["run"].losses[-1] < names["run"].losses[0]) and (home / "runs" / "zb_h1.png").exists()
    assert "16x" in capsys.readouterr().out


@pytest.mark.once
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run_as_scripts_in_an_empty_folder(path, tmp_path):
    """They are run as a reader does: with a jax that has one device so far, without data, and where nothing lies."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    for again in range(2 if path.stem == "own_codec" else 1):
        script = subprocess.run(
            [sys.executable, str(path)],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert script.returncode == 0, (again, script.stderr)


def commands_of(page: str, module: str) -> list[list[str]]:
    """Return the arguments of the commands in a page's first block that run a module."""
    block = re.search(r"\n\n((?:    .*\n)+)", (ROOT / "docs" / page).read_text())
    assert block
    some = (shlex.split(line, comments=True) for line in block[1].splitlines())
    return [words[3:] for words in some if words[1:3] == ["-m", module]]


def shown(page: str, first: str) -> list[str]:
    """Return the parts of output that a page shows in blocks which begin with a word, without what "..." stands for."""
    blocks = re.findall(rf"\n\n((?:    {first} .*\n)(?:    .*\n|\n(?=    ))*)", (ROOT / "docs" / page).read_text())
    parts = [part for block in blocks for line in block.splitlines() for part in line.split("...")]
    return [" ".join(part.split()) for part in parts if part.strip()]


def printed(module: str, *arguments: str) -> str:
    """Return what a command prints, with its white space made single blanks."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("page", ["your_model.md", "questions.md"])
def test_answers_about_memory_are_what_the_pages_command_prints(page):
    [arguments] = commands_of(page, "planner.memory")
    said, parts = printed("planner.memory", *arguments), shown(page, "answer")
    assert len(parts) > 3 and [part for part in parts if part not in said] == []


@pytest.mark.slow
def test_plans_are_what_the_pages_commands_print(tmp_path):
    """The plan of docs/planner.md is that of `make plan`, and of a question on the page of questions."""
    more = [f"--out={tmp_path}", "--oracle=no"]
    for pages, firsts in (
        (["your_model.md"], ["chosen"]),
        (["questions.md", "planner.md"], ["chosen", "hosts", "what if"]),
    ):
        said = " ".join(printed("planner.plan", *words, *more) for words in commands_of(pages[0], "planner.plan"))
        parts = [part for page in pages for first in firsts for part in shown(page, first)]
        assert len(parts) > 3 and [part for part in parts if part not in said] == []


def modules_of(text: str) -> set[str]:
    """Return the modules that the commands of a text run."""
    return set(re.findall(r"python -m ((?:paxtrain|planner|compress|experiments|tests)(?:\.\w+)*)", text))


def leaves(nav: object) -> list[str]:
    """Return the pages of a nav of mkdocs.yml, which nests titles."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(entry)]


def test_the_site_has_every_page_once():
    """`make docs` checks the links between them, and makes two pages itself."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    found = leaves(config["nav"])
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(found) == sorted(written | {"index.md", "reference.md"})
    assert config["strict"]


@pytest.fixture
def hooks(monkeypatch) -> dict:
    """Return the names of docs/hooks.py; mkdocs, which `make docs` installs, only gives its annotations."""
    for module in ("mkdocs.config.defaults", "mkdocs.structure.files"):
        stand_in = types.SimpleNamespace(MkDocsConfig=object, File=object, Files=object)
        monkeypatch.setitem(sys.modules, module, stand_in)
    return runpy.run_path(str(ROOT / "docs" / "hooks.py"))


def test_the_reference_has_every_public_name_once(hooks):
    entries = re.findall(r"^### (\w+)\.(\w+)\n\n::: ([\w.]+)\.(\w+)$", hooks["reference"](), re.M)
    public = [(package, name) for package in hooks["PACKAGES"] for name in importlib.import_module(package).__all__]
    assert [(package, name) for package, name, _, _ in entries] == public
    for package, name, home, attribute in entries:
        found = getattr(importlib.import_module(home), attribute)
        assert found is getattr(importlib.import_module(package), name), name


def test_the_overview_links_to_pages_of_the_site_only(hooks):
    readme = (ROOT / "README.md").read_text()
    local = r"\]\((?!https:)([^)#]+)(?:#[^)]*)?\)"
    overview = hooks["overview"](readme)
    links = re.findall(local, overview)
    assert "train.md" in links and all((ROOT / "docs" / link).exists() for link in links)
    assert "](https://arxiv.org/abs/2405.18093)" in overview
    control = re.findall(local, readme)
    assert not all((ROOT / "docs" / link).exists() for link in control)


def test_the_readmes_figures_of_the_lab_are_those_of_its_page():
    text = (ROOT / "README.md").read_text()
    readme = " ".join(text.split())
    rows = [line for line in (ROOT / "docs/results.md").read_text().splitlines() if line.startswith("| ")]

    def found(row: str, pattern: str) -> list[str]:
        [line] = [line for line in rows if line.startswith(f"| {row}")]
        return re.findall(pattern, line)

    said = re.search(r"dense step takes ([\d.]+) to ([\d.]+) of .*? within 1%, it takes ([\d.]+) or less", readme)
    removed = re.findall(r"^\| (\d+)% \| (\d+)% \| (\d+)% \| ([\d.]+x) \|$", text, re.M)
    assert said and len(removed) == 3
    dense = found("Dense step over PyTorch's", r"; ([\d.]+)x to ([\d.]+)x\)")
    coded = found("Compressed step over PyTorch's", r"to ([\d.]+)x\)")
    assert said.groups() == (*dense[0], *coded)
    shares = found("Of the time that links cost", r"([\d.]+)% ± [\d.]+% at (\d+)%")
    [coded_row] = [line for line in rows if line.startswith("| int8, all gradients int4 |") and " s ±" in line]
    speedups = re.findall(r"\| ([\d.]+x) ±", coded_row)
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    taken = re.findall(r"(\d+)% where (\d+)% was predicted", page)
    assert removed == [
        (seen, at, f"{float(share):.0f}", x) for (seen, _), (share, at), x in zip(taken, shares, speedups, strict=True)
    ]
    assert [at for _, at in taken] == [at for _, at in shares]


MISSED = {  # what the README says of a target, and how the lab's page begins the same row
    "Optimus-CC's compressed backpropagation, fused": "Speed-up of CB+FE+SC over dense",
    "wall time to dense's final loss": "Wall time to dense's final loss",
    "step time of the planned placement over the best": "Step time of the planned placement against the best",
    "order of plans within a scenario": "Order within a scenario of pairs",
}


@pytest.mark.parametrize(("ours", "theirs"), MISSED.items())
def test_the_readmes_misses_are_those_of_the_labs_page(ours, theirs):
    def figures(page: str, row: str) -> list[str]:
        [line] = [line for line in (ROOT / page).read_text().splitlines() if line.startswith(f"| {row}")]
        _, wanted, seen, *_ = [cell.strip() for cell in line.strip("|").split(" | ")]
        return [re.findall(r"[+\d.]+[x%]?", cell)[0] for cell in (wanted, seen)]

    assert figures("README.md", ours) == figures("docs/results.md", theirs)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FILE = r"(?<![\w/.])((?:paxtrain|planner|compress|experiments|configs|docs|examples)/[\w./-]*\.(?:py|md|json|png))"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_mains_and_paths_exist(page):
    text = page.read_text()
    for module in modules_of(text):
        path = ROOT / module.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert file.exists() and '__name__ == "__main__"' in file.read_text(), module
    for path in re.findall(_FILE, text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        assert (page.parent / path).exists(), path
