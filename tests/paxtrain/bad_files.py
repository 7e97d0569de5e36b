"""Good data, and files of every bad kind, for the tests of bad input."""

import json
import pathlib

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, PipelineConfig, plan
from paxtrain.data import token_files


def make(home: pathlib.Path) -> None:
    """Write the files into a folder."""
    for name, tokens in (("train", 257), ("validation", 257), ("few", 20)):
        with token_files.TokenWriter(home / name, 257) as writer:
            writer.extend(range(tokens))
            writer.end_document()
    words = [Tokenizer(WordLevel({word: 0}, word)).to_str() for word in "ab"]
    for name, text in zip(("none", "first", "second"), ("{}", *words)):
        (home / name).mkdir()
        (home / name / "tokenizer.json").write_text(text)
        for suffix in (".idx", ".bin"):
            (home / name / f"train{suffix}").write_bytes((home / f"train{suffix}").read_bytes())
    index, ids = (home / "train.idx").read_bytes(), (home / "train.bin").read_bytes()
    for name, idx, bin in (
        ("empty", b"", ids),
        ("no_ids", index, b""),
        ("cut_index", index[:40], ids),
        ("cut_ids", index, ids[:100]),
        ("magic", b"NOTMAGIC!" + index[9:], ids),
    ):
        (home / f"{name}.idx").write_bytes(idx)
        (home / f"{name}.bin").write_bytes(bin)
    (home / "none.py").write_text("def get_config():\n    return 3\n")
    (home / "syntax.py").write_text("def get_config(:\n")
    (home / "imports.py").write_text("import no_such_module\n")
    (home / "key.py").write_text("def get_config():\n    return {}['model']\n")
    (home / "number.py").write_text("def get_config():\n    return {'run': {1: 2, 'out': ''}}\n")
    mixed = "from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({1: 2, 'run': {}})\n"
    (home / "mixed.py").write_text(mixed)
    (home / "a_file").write_text("kept\n")
    (home / "latin1.txt").write_bytes("Größe".encode("latin-1"))
    (home / "no_json.json").write_text("mesh: 4\n")
    four = plan.Plan(MeshConfig(data=2, pipe=2), PipelineConfig(), BatchConfig(16, 2), CompressConfig())
    plan.save(four, home / "four.json")
    (home / "twice.json").write_text(
        json.dumps(json.loads((home / "four.json").read_text()) | {"device_order": [0] * 4})
    )
    eight = plan.Plan(MeshConfig(pipe=8), PipelineConfig(), BatchConfig(16, 2), CompressConfig())
    plan.save(eight, home / "eight.json")
