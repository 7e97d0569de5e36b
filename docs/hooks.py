"""Pages that `make docs` makes itself: the overview from README.md, and the reference from what the packages export."""

import importlib
import pathlib
import re
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("paxtrain", "planner", "compress")


def overview(readme: str) -> str:
    """Return README.md as a page of docs/: links into docs/ are its own, those to other files are plain words."""
    inside = re.sub(r"\]\(docs/", "](", readme)
    inside = re.sub(r"\[docs/([\w.-]+)\]", r"[\1]", inside)
    kept = r"(?![\w-]+\.(?:md|png)[#)])(?!results/|https://)"
    return re.sub(rf"\[([^\]]+)\]\({kept}[^)]*\)|\[([A-Z]+\.md)\]\([A-Z]+\.md\)", r"`\1\2`", inside)


def reference() -> str:
    """Return the page of all public names, each with its docstring."""
    lines = ["# Reference", "", "All public names. Each is loaded when it is first used.", ""]
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## {package}", ""]
        for name in module.__all__:
            home, _, attribute = module._EXPORTS[name].partition(":")
            lines += [f"### {package}.{name}", "", f"::: {home}.{attribute or name}", ""]
    return "\n".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    sys.path.insert(0, str(ROOT))
    files.append(File.generated(config, "index.md", content=overview((ROOT / "README.md").read_text())))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files
