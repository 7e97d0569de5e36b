"""Checksums of token files: every bit counts, sha256sum agrees, and data without them works."""

import hashlib
import random
import shutil
import subprocess

import pytest

from paxtrain.data import checksums, token_files
from paxtrain.data.preparation import prepare
from paxtrain.errors import UserError
from tests import mains


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    home = tmp_path_factory.mktemp("checksums")
    for name in "ab":
        (home / f"{name}.txt").write_text(" ".join(map(str, range(900))))
    prepare([str(home / "*.txt")], home / "data")
    return home / "data"


@pytest.fixture
def data(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "data")


def load(data, **more):
    return token_files.load(data / "train", vocab_size=257, sequence=16, **more)


def test_they_are_what_the_standard_says(prepared):
    for name in ("train", "validation"):
        lines = (prepared / f"{name}.sha256").read_text().splitlines()
        for line, file in zip(lines, (f"{name}.bin", f"{name}.idx"), strict=True):
            assert line == f"{hashlib.sha256((prepared / file).read_bytes()).hexdigest()}  {file}"
        if shutil.which("sha256sum"):
            subprocess.run(["sha256sum", "--check", "--quiet", f"{name}.sha256"], cwd=prepared, check=True)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_every_flipped_bit_is_found(data, suffix):
    path, draw = data / f"train.{suffix}", random.Random(0)
    good = path.read_bytes()
    seen = set()
    for _ in range(60):
        bad, place = bytearray(good), draw.randrange(8 * len(good))
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(UserError) as error:
            load(data)
        assert f"train.{suffix}" in str(error.value) or "train.bin" in str(error.value)
        seen.add("SHA-256" in str(error.value))
    assert seen == {suffix == "bin"}  # the index of documents in a row says all twice
    path.write_bytes(good)
    load(data, verify=True)


def test_without_the_checksums_flipped_ids_pass(data):
    """Control: what is found is not found by other checks."""
    (data / "train.sha256").unlink()
    bad = bytearray((data / "train.bin").read_bytes())
    bad[10] ^= 1
    (data / "train.bin").write_bytes(bad)
    load(data)
    with pytest.raises(UserError, match=r"there is no .*train\.sha256 to verify"):
        load(data, verify=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"0" * 64 + b"  train.bin\n",
        b"x  train.bin\ny  train.idx\n",
        b"".join(b"0" * 64 + b"  " + name + b"\n" for name in (b"a.bin", b"b.bin", b"a.idx")),
    ],
)
def test_damaged_checksums_are_one_sentence(data, content):
    (data / "train.sha256").write_bytes(content)
    with pytest.raises(UserError, match=r"train\.sha256 is damaged.*prepare the data set again"):
        load(data)


def test_a_set_that_was_renamed_with_its_checksums_is_verified(data):
    for suffix in ("bin", "idx", "sha256"):
        (data / f"train.{suffix}").rename(data / f"web.{suffix}")
    assert checksums.verify(str(data / "web"))
    bad = bytearray((data / "web.bin").read_bytes())
    bad[10] ^= 1
    (data / "web.bin").write_bytes(bad)
    with pytest.raises(UserError, match=r"web\.bin is damaged: its SHA-256 is not the one in .*web\.sha256"):
        checksums.verify(str(data / "web"))


def test_large_sets_are_verified_when_asked(data, monkeypatch):
    bad = bytearray((data / "train.bin").read_bytes())
    bad[-5] ^= 1
    (data / "train.bin").write_bytes(bad)
    monkeypatch.setattr(token_files, "_SCAN_BYTES", 100)
    load(data)
    with pytest.raises(UserError, match=r"train\.bin is damaged: its SHA-256"):
        load(data, verify=True)


def test_the_command_verifies_a_folder(data, monkeypatch, capsys):
    main = mains.load("paxtrain.prepare")
    assert mains.run(monkeypatch, main, "--verify", f"--out={data}") == 0
    assert "4 files in" in capsys.readouterr().out
    bad = bytearray((data / "validation.idx").read_bytes())
    bad[-1] ^= 1
    (data / "validation.idx").write_bytes(bad)
    assert mains.run(monkeypatch, main, "--verify", f"--out={data}") == 2
    assert "validation.idx is damaged" in capsys.readouterr().err
    assert mains.run(monkeypatch, main, "--verify", f"--out={data / 'none'}") == 2
    assert mains.run(monkeypatch, main, "--verify", f"--out={data.parent}") == 2


def test_data_that_is_prepared_again_has_new_sums(data):
    before = (data / "train.sha256").read_text()
    for name in "ab":
        (data.parent / f"{name}.txt").write_text("other text " * 90)
    prepare([str(data.parent / "*.txt")], data)
    assert (data / "train.sha256").read_text() != before
    assert checksums.verify(str(data / "train")) and checksums.verify(str(data / "validation"))
