import subprocess
import sys
from pathlib import Path

from paxtrain.data import token_files
from tests import mains

ROOT = Path(__file__).parents[2]


def run_main(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "paxtrain.prepare", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_main_reports_what_it_wrote(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"document {name}<|endoftext|>")
    (tmp_path / "c.txt").touch()
    result = run_main(f"--input={tmp_path}/*.txt", f"--out={tmp_path / 'out'}")
    assert (result.returncode, result.stderr) == (0, "")
    assert "input: 2 documents, without 1 empty ones, 46 bytes of 3 files\n" in result.stdout
    assert "the first document: 'document a<|endoftext|>'\n" in result.stdout
    assert "documents begin with their text and end with <|endoftext|>\n" in result.stdout
    assert "special tokens in the text, as text; --special_tokens takes them as their ids: 2 <|endo" in result.stdout
    assert f"vocabulary: 257 ids, {tmp_path}/out/tokenizer.json" in result.stdout
    for name in ("train", "validation"):
        tokens = len(token_files.TokenFile(tmp_path / "out" / name))
        assert f"1 documents, {tokens:,} tokens, {tmp_path}/out/{name}.bin and .idx" in result.stdout


def test_a_set_is_shown(tmp_path, monkeypatch, capfd):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{name * 40}"}}\n' for name in "xxx"))
    main = mains.load("paxtrain.prepare")
    assert mains.run(monkeypatch, main, f"--input={tmp_path}/a.jsonl", f"--out={tmp_path}") == 0
    capfd.readouterr()
    assert mains.run(monkeypatch, main, f"--show={tmp_path}/train") == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path}/train: 2 documents, 82 tokens of uint16"
    assert said[1] == "the first document: 41 tokens, " + " ".join(["120"] * 32)  # x is 120 in ASCII
    assert said[2] == f"as text: {'x' * 32!r}"
    assert mains.run(monkeypatch, main, f"--show={tmp_path}/none") == 2
    assert "there is no token file" in capfd.readouterr().err


def test_the_main_says_what_is_wrong_and_leaves_with_2(tmp_path):
    result = run_main(f"--input={tmp_path}/none.txt", f"--out={tmp_path}")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --input=") and result.stderr.count("\n") == 1


def test_the_main_takes_no_positional_arguments(monkeypatch, capfd):
    assert mains.run(monkeypatch, mains.load("paxtrain.prepare"), "--out=nowhere", "a.txt") == 2
    assert "unexpected argument 'a.txt'; name text files with --input=" in capfd.readouterr().err
