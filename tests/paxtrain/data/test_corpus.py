import json
import os
from pathlib import Path

import pytest

from paxtrain.data.corpus import documents, input_files
from paxtrain.errors import UserError


def test_inputs_are_files_folders_and_globs_each_file_once(texts):
    folder, _ = texts
    everything = input_files([str(folder)])
    assert [Path(file).name[0] for file in everything] == [*"0246", *"135", "z"]
    again = input_files([str(folder / "2.txt"), str(folder / "**/*.txt"), str(folder)])
    assert again[0] == str(folder / "2.txt")
    assert sorted(again) == sorted(everything)
    (folder.parent / "other").symlink_to(folder)
    names = [f"{folder}/../other/2.txt", os.path.relpath(folder), str(folder)]
    assert len(input_files(names)) == len(everything)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], r"--input is empty"),
        (["no/such/*.txt"], r"--input=no/such/\*\.txt names no files"),
        (["/"], r"--input=/ would read all below /, .*; name a narrower folder"),
        (["/usr/.."], "would read all below /,"),
        (["/**/*.txt"], "would read all below /,"),
        (["/proc/**"], "would read all below /proc,"),
    ],
)
def test_inputs_without_files(inputs, message):
    with pytest.raises(UserError, match=message):
        input_files(inputs)


def test_stdlib_is_about_ten_megabytes_without_tests():
    files = input_files(["stdlib"])
    assert files == sorted(files, key=Path)
    assert any(file.endswith("/json/decoder.py") for file in files)
    assert not any(part in Path(file).parts for file in files for part in ("test", "tests", "site-packages"))
    assert 5e6 < sum(map(os.path.getsize, files)) < 10.5e6


def test_jsonl_takes_another_key_and_skips_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n   \n{"body": ""}\n{"body": "t\\u0077o"}')
    assert list(documents([str(tmp_path / "a.jsonl")], "body")) == ["one", "", "two"]


@pytest.mark.parametrize("name", ["lines.json", "lines.JSONL", "bom.jsonl"])
def test_json_lines_of_any_name_are_documents(cases, name):
    expected = [f'Document number {i}. It says "hello" and ends here.' for i in range(5)]
    assert list(documents([str(cases / name)])) == expected


PACKAGE = '{\n  "name": "text",\n  "version": "1"\n}\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", '\n{"text": "one", "id": 1}\n{"text": "two"}\n', ["one", "two"]),
        ("a.json", '{"text": "one"}', ["one"]),
        ("a.json", json.dumps([{"text": "one"}, {"text": "two"}], indent=1), ["one", "two"]),
        ("a.json", json.dumps({"text": "one", "id": 1}, indent=1), ["one"]),
        ("a.NDJSON", '{"text": "one"}', ["one"]),
        ("a.json", "\ufeff" + '{"text": "one"}\n{"text": "two"}', ["one", "two"]),
        ("a.txt", "\ufeffplain \ufeff text", ["plain \ufeff text"]),
        # What another program reads is one document as ever, and so is text that looks like JSON.
        ("package.json", PACKAGE, [PACKAGE]),
        ("a.json", '{"compact": true}\n', ['{"compact": true}\n']),
        ("a.json", '[{"name": 1}]', ['[{"name": 1}]']),
        ("a.txt", "[1] a note\n{text}\n", ["[1] a note\n{text}\n"]),
        ("a.py", '{"text": 1}["text"]\n', ['{"text": 1}["text"]\n']),
        ("a.txt", "", [""]),
    ],
)
def test_the_content_says_what_a_document_is(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, "utf-8")
    assert list(documents([str(tmp_path / name)])) == expected


def test_an_array_with_an_object_without_the_text_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"body": "two"}]')
    with pytest.raises(UserError, match=r"a\.json, object 2, has no key 'text' but the keys body"):
        list(documents([str(tmp_path / "a.json")]))
