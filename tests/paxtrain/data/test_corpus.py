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
    assert list(documents([str(tmp_path / "a.jsonl")], "body")) == ["one", "two"]
