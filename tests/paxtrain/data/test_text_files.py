"""Files that are compressed, and of Parquet; test_corpus.py has those of text and JSON."""

import gzip
import json
import sys

import pytest
from backports import zstd

from paxtrain.data import token_files
from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.data.text_files import texts
from paxtrain.errors import UserError
from tests.paxtrain.data.texts import TRICKY

DOCUMENTS = [TRICKY[i:] for i in range(5)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(DOCUMENTS)).encode()
PACK = {"gz": gzip.compress, "zst": zstd.compress}


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed, which reads Parquet")


@pytest.fixture
def table(parquet, tmp_path):
    """Return table(rows per group, **columns): the path of a Parquet file with these columns."""
    pyarrow = sys.modules["pyarrow"]

    def write(rows=2, **columns):
        path = str(tmp_path / "a.parquet")
        parquet.write_table(pyarrow.table(columns), path, row_group_size=rows)
        return path

    return write


@pytest.mark.parametrize("kind", PACK)
def test_what_is_compressed_is_as_it_was_before(tmp_path, kind):
    parts = LINES[:100], LINES[100:]  # also in two members, as tools that work in parallel write them
    for name, content, expected in (
        (f"a.jsonl.{kind}", b"".join(map(PACK[kind], parts)), DOCUMENTS),
        (f"a.json.{kind}", PACK[kind](b'[{"text": "one"}, {"text": "two"}]'), ["one", "two"]),
        (f"a.txt.{kind}", PACK[kind]("plain".encode("utf-8-sig")), ["plain"]),
        ("named_otherwise", PACK[kind](LINES), DOCUMENTS),
    ):
        (tmp_path / name).write_bytes(content)
        assert list(texts(str(tmp_path / name), "text")) == expected, name


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-9], "is damaged or cut off: .* before the end"),
        (lambda raw: raw[:40] + bytes(16) + raw[56:], "is damaged or cut off"),
        (lambda raw: b"", "is empty, which no compressed file is"),
        (lambda raw: LINES, "is damaged or cut off: "),
    ],
)
def test_what_is_damaged_is_refused(tmp_path, kind, change, message):
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(change(PACK[kind](LINES)))
    with pytest.raises(UserError, match=message):
        list(texts(str(path), "text"))


def test_a_text_of_a_parquet_file_is_a_document(table):
    assert list(texts(table(text=DOCUMENTS, id=list(range(5))), "text")) == DOCUMENTS
    assert list(texts(table(rows=5000, body=DOCUMENTS * 600), "body")) == DOCUMENTS * 600


def test_bad_parquet_files_are_told(table, tmp_path):
    def told(path):
        with pytest.raises(UserError) as caught:
            list(texts(path, "text"))
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(f"{tmp_path}/a.parquet")

    named = "; name the one of the text with --json_key, or in a run with data.json_key"
    assert told(table(url=["x"], body=["y"])) == f" has no column 'text' but the columns url, body{named}"
    assert told(table(text=["x", None])) == ", row 2, has NoneType under 'text' instead of a string"
    assert told(table(text=[1])) == ", row 1, has int under 'text' instead of a string"
    path = table(text=DOCUMENTS * 100, rows=1000)
    raw = (tmp_path / "a.parquet").read_bytes()
    for damaged in (b"", raw[:-5], raw[: len(raw) // 2], raw[:20] + bytes(100) + raw[120:]):
        (tmp_path / "a.parquet").write_bytes(damaged)
        assert told(path).startswith(" cannot be read as Parquet: ")


def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"a\.parquet is a Parquet file, which needs pyarrow .*; pip install pyarrow"):
        list(texts(str(tmp_path / "a.parquet"), "text"))


def test_token_files_of_all_kinds_of_files_are_the_same(table, tmp_path):
    (tmp_path / "b.jsonl").write_bytes(LINES)
    inputs = [str(tmp_path / "b.jsonl"), table(text=DOCUMENTS)]
    for kind, pack in PACK.items():
        (tmp_path / f"b.jsonl.{kind}").write_bytes(pack(LINES))
        inputs.append(str(tmp_path / f"b.jsonl.{kind}"))
    prepared = [prepare([each], tmp_path / str(i), PrepareOptions(seed=1)) for i, each in enumerate(inputs)]
    found = [token_files.TokenFile(one.prefixes[0]).read(0, one.tokens[0]).tolist() for one in prepared]
    assert found == [found[0]] * 4
    both = prepare(inputs[:2], tmp_path / "both", PrepareOptions(seed=1))
    assert sum(both.tokens) == 2 * sum(prepared[0].tokens)
