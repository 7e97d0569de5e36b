"""Lengths of documents by hand, and the balance of devices that share sequences against whole masks."""

import csv

import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain.attention import split
from paxtrain.config import ModelConfig
from paxtrain.data import documents
from paxtrain.data.datasets import DataSets
from paxtrain.data.preparation import prepare
from paxtrain.data.token_files import TokenFile, TokenWriter
from paxtrain.model import transformer
from tests import small

SEPARATOR = 5


def test_a_histogram_counts_each_document_once():
    rows = documents.histogram([0, 1, 2, 3, 4, 5, 8, 9, 1000])
    assert rows == [(0, 1, 2, 1), (2, 2, 1, 2), (3, 4, 2, 7), (5, 8, 2, 13), (9, 16, 1, 9), (513, 1024, 1, 1000)]
    assert documents.histogram([]) == []


def test_prepare_writes_the_lengths_of_its_documents(tmp_path):
    """In bytes, each document ends with a token more."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"x" * n}"}}\n' for n in [3] * 30 + [100] * 10))
    prepared = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / documents.FILE).read_text().splitlines()))
    assert {(row["least"], row["most"]) for row in rows} <= {("3", "4"), ("65", "128")}
    for name, count, tokens in zip(("train", "validation"), prepared.documents, prepared.tokens, strict=True):
        own = [row for row in rows if row["set"] == name]
        assert sum(int(row["documents"]) for row in own) == count
        assert sum(int(row["tokens"]) for row in own) == tokens
        assert all(int(row["tokens"]) == int(row["documents"]) * (4 if row["most"] == "4" else 101) for row in own)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_a_device_has_the_pairs_of_its_tokens_masks(context):
    """The masks are whole, from the model's own starts, and devices have the parts that attention gives them."""
    rng, sequence = np.random.default_rng(0), 64
    tokens = np.where(rng.random((6, sequence)) < 0.08, SEPARATOR, 1).astype(np.int32)
    tokens[0] = 1
    starts = np.asarray(transformer.document_starts(jnp.asarray(tokens), ModelConfig(separator=SEPARATOR)))
    mask = (starts[:, :, None] == starts[:, None, :]) & np.tri(sequence, dtype=bool)
    own = split._order(context).reshape(context, 2)
    rows = np.arange(sequence).reshape(2 * context, -1)
    right = np.stack([mask[:, rows[parts].ravel()].sum((1, 2)) for parts in own], axis=1)
    found = documents.pairs(tokens, SEPARATOR, context)
    np.testing.assert_array_equal(found, right)
    assert len(set(found[0])) == 1  # a single document is even
    assert context == 1 or np.ptp(found[1:], axis=1).any()


def test_a_run_tells_the_balance_of_its_corpus(tmp_path):
    """Samples of a document of three quarters and short ones: by hand, of two devices."""
    sequence = 16
    with TokenWriter(tmp_path / "train", 61) as train:
        for _ in range(8):
            train.extend([SEPARATOR, *[1] * 11])
            train.end_document()
            for _ in range(2):
                train.extend([SEPARATOR, 2])
                train.end_document()
        train.extend([SEPARATOR])
        train.end_document()
    # Parts of four tokens: 1 + ... + 4, 5 + ... + 8, 9 + ... + 12, and twice 1 + 2.
    parts = [10, 26, 42, 6]
    devices = parts[0] + parts[3], parts[1] + parts[2]
    right = max(devices) / (sum(devices) / 2)
    found = documents.imbalance([(TokenFile(tmp_path / "train"), 1.0)], sequence, SEPARATOR, 2)
    assert found == pytest.approx(right)
    c = small.config(
        (1, 1, 1, 2),
        model={"sequence": sequence, "separator": SEPARATOR},
        data={"train": str(tmp_path / "train"), "validation": str(tmp_path / "train")},
    )
    assert DataSets(c).describe() == [
        ("sharing sequences", f"the busiest of 2 devices has {right:.2f} times the mean's attention within documents")
    ]
    one = small.config((1, 1, 1, 1), model={"sequence": sequence, "separator": SEPARATOR}, data=vars(c.data))
    assert DataSets(one).describe() == []
