"""Documents and vocabularies for the tests of data."""

import json
from pathlib import Path

import pytest

from tests.paxtrain.data.texts import TRICKY

SHARED = Path(__file__).parents[4] / "shared"
GPT2 = SHARED / "data" / "gpt2"


@pytest.fixture
def texts(tmp_path):
    """Write ten documents to a folder, the last three in a .jsonl file."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    contents = [f"document {i}: {TRICKY[: 10 * i + 5]}" for i in range(10)]
    for i, text in enumerate(contents[:7]):
        (folder / ("deep" if i % 2 else ".") / f"{i}.txt").write_bytes(text.encode())
    (folder / "z.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in contents[7:]))
    (folder / ".hidden").write_bytes(b"\xff")
    return folder, contents


@pytest.fixture
def gpt2_files():
    if not GPT2.is_dir():
        pytest.skip(f"GPT-2's vocabulary is not at {GPT2}")
    return str(GPT2 / "vocab.json"), str(GPT2 / "merges.txt")


@pytest.fixture
def cases():
    """Return the folder of inputs that users had trouble with."""
    if not (SHARED / "cases").is_dir():
        pytest.skip(f"the cases of users are not at {SHARED / 'cases'}")
    return SHARED / "cases"
