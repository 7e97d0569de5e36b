import itertools
import struct

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paxtrain.data import token_files
from paxtrain.errors import UserError

SEQUENCE = 4
DTYPE_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def megatron_index(code, itemsize, sizes, documents, *, magic=b"MMIDIDX\x00\x00", version=1):
    """Return an .idx file byte by byte, independently of the writer under test."""
    raw = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    raw += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(documents))
    raw += struct.pack(f"<{len(sizes)}i", *sizes)
    raw += struct.pack(f"<{len(sizes)}q", *(itemsize * sum(sizes[:i]) for i in range(len(sizes))))
    return raw + struct.pack(f"<{len(documents)}q", *documents)


def write(prefix, index, ids):
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(ids)


@pytest.fixture
def megatron(tmp_path):
    """Write three sequences in two documents, uint16, with the ids 100 ... 120."""
    prefix = tmp_path / "old"
    write(prefix, megatron_index(8, 2, [5, 6, 10], [0, 2, 3]), struct.pack("<21H", *range(100, 121)))
    return prefix


def token_file(prefix, tokens):
    """Write a file whose token t is t, so that a sample shows the place where it was read."""
    with token_files.TokenWriter(prefix, tokens) as writer:
        writer.extend(range(tokens))
        writer.end_document()
    return token_files.load(prefix, vocab_size=tokens, sequence=SEQUENCE)


def test_files_that_may_not_be_read_are_bad_input(megatron, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(token_files.np, "memmap", refuse)
    with pytest.raises(UserError, match=r"old\.bin and \.idx cannot be read \(.*Permission denied"):
        token_files.load(megatron, vocab_size=121, sequence=SEQUENCE)


def take(file, count, **arguments):
    arguments = {"sequence": SEQUENCE, "global_batch": 1, "rows": [0]} | arguments
    return list(itertools.islice(token_files.batches(file, **arguments), count))


def sample_order(file, count, **arguments):
    """Return the number in the epoch of each of the first `count` global samples."""
    return [int(batch[0, 0]) // SEQUENCE for batch in take(file, count, **arguments)]


def test_a_hand_written_megatron_file_loads(megatron):
    file = token_files.load(megatron, vocab_size=121, sequence=SEQUENCE)
    assert (len(file), file.documents, file.dtype) == (21, 2, np.uint16)
    np.testing.assert_array_equal(file.read(0, 21), np.arange(100, 121))
    assert file.read(3, 8).dtype == np.int32


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_every_integer_dtype_loads(tmp_path, dtype):
    ids = np.arange(7, dtype=f"<{dtype}")
    write(tmp_path / "x", megatron_index(DTYPE_CODES[dtype], ids.itemsize, [3, 4], [0, 1, 2]), ids.tobytes())
    np.testing.assert_array_equal(token_files.TokenFile(tmp_path / "x").read(0, 7), np.arange(7))


def test_a_merged_set_that_lists_no_documents_has_one_for_each_sequence(tmp_path):
    write(tmp_path / "x", megatron_index(8, 2, [5, 6, 10], [0]), struct.pack("<21H", *range(21)))
    file = token_files.load(tmp_path / "x", vocab_size=21, sequence=SEQUENCE, separator=4)
    assert (len(file), file.documents, file.first_document) == (21, 3, 5)


def test_sequence_modes_of_multimodal_sets_do_not_disturb(megatron):
    with megatron.with_suffix(".idx").open("ab") as index:
        index.write(bytes(3))
    assert len(token_files.TokenFile(megatron)) == 21


@pytest.mark.parametrize(("vocab_size", "dtype", "code"), [(2**16, "<u2", 8), (2**16 + 1, "<i4", 4)])
def test_the_writer_writes_megatrons_bytes(tmp_path, vocab_size, dtype, code):
    documents = [[1, 2, 3], [], [vocab_size - 1, 5]]
    with token_files.TokenWriter(tmp_path / "new", vocab_size) as writer:
        for ids in documents:
            writer.extend(ids[:1])
            writer.extend(ids[1:])
            writer.end_document()
        assert (writer.documents, writer.tokens) == (3, 5)
    ids = np.array([i for document in documents for i in document], dtype)
    assert (tmp_path / "new.bin").read_bytes() == ids.tobytes()
    assert (tmp_path / "new.idx").read_bytes() == megatron_index(code, ids.itemsize, [3, 0, 2], [0, 1, 2, 3])
    file = token_files.load(tmp_path / "new", vocab_size=vocab_size, sequence=SEQUENCE)
    np.testing.assert_array_equal(file.read(0, 5), ids)


def test_an_interrupted_writer_leaves_nothing_that_loads(tmp_path):
    with pytest.raises(KeyboardInterrupt), token_files.TokenWriter(tmp_path / "new", 10) as writer:
        writer.extend(range(10))
        writer.end_document()
        raise KeyboardInterrupt
    with pytest.raises(UserError, match=r"no token file .*new\.idx"):
        token_files.TokenFile(tmp_path / "new")


def test_samples_overlap_by_one_token_and_run_over_document_boundaries(megatron):
    file = token_files.load(megatron, vocab_size=121, sequence=SEQUENCE)
    assert token_files.samples_per_epoch(len(file), SEQUENCE) == 5
    batches = take(file, 3, global_batch=2, rows=[0, 1], shuffle=False)
    assert all(batch.dtype == np.int32 and batch.shape == (2, SEQUENCE + 1) for batch in batches)
    expected = [[100 + SEQUENCE * (j % 5) + t for t in range(SEQUENCE + 1)] for j in range(6)]
    np.testing.assert_array_equal(np.concatenate(batches), expected)


@pytest.mark.parametrize(("tokens", "samples"), [(20, 4), (21, 5), (24, 5), (25, 6)])
def test_the_epoch_ends_with_the_last_whole_sample(tmp_path, tokens, samples):
    file = token_file(tmp_path / "x", tokens)
    assert sample_order(file, samples + 1, shuffle=False) == [*range(samples), 0]


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own(tmp_path):
    samples = 101
    file = token_file(tmp_path / "x", samples * SEQUENCE + 1)
    orders = {}
    for seed in (0, 1):
        order = sample_order(file, 3 * samples, seed=seed)
        for epoch in range(3):
            orders[seed, epoch] = tuple(order[epoch * samples : (epoch + 1) * samples])
            assert sorted(orders[seed, epoch]) == list(range(samples))
    assert len({*orders.values(), tuple(range(samples))}) == 7
    assert sample_order(file, samples, seed=0) == list(orders[0, 0])


def test_the_order_never_changes_between_versions(tmp_path):
    # A checkpoint stores how many samples were consumed, so a changed order would repeat and lose samples.
    file = token_file(tmp_path / "x", 1000 * SEQUENCE + 1)
    assert sample_order(file, 6, seed=0) == [233, 815, 962, 246, 407, 428]
    assert sample_order(file, 4, seed=7, start_sample=1998) == [91, 31, 76, 64]


@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_with_another_batch_size_continues_the_same_samples(tmp_path, shuffle):
    file = token_file(tmp_path / "x", 23 * SEQUENCE + 3)
    whole = sample_order(file, 60, seed=3, shuffle=shuffle)
    before = take(file, 5, global_batch=6, rows=range(6), seed=3, shuffle=shuffle)
    after = take(file, 3, global_batch=10, rows=range(10), seed=3, shuffle=shuffle, start_sample=30)
    np.testing.assert_array_equal(np.concatenate(before + after)[:, 0] // SEQUENCE, whole)
    shifted = take(file, 3, global_batch=10, rows=range(10), seed=3, shuffle=shuffle, start_sample=31)
    assert not np.array_equal(np.concatenate(shifted), np.concatenate(after))


def test_processes_share_out_the_rows_of_a_batch(tmp_path):
    file = token_file(tmp_path / "x", 50 * SEQUENCE + 1)
    whole = take(file, 4, global_batch=6, rows=range(6), start_sample=5)
    for rows in ([0, 1, 2], [3, 4, 5], [4], [5, 0]):
        parts = take(file, 4, global_batch=6, rows=rows, start_sample=5)
        for part, batch in zip(parts, whole, strict=True):
            np.testing.assert_array_equal(part, batch[rows])


def test_rows_of_other_processes_are_not_read(tmp_path, monkeypatch):
    file = token_file(tmp_path / "x", 400 * SEQUENCE + 1)
    started = []
    read = token_files.TokenFile.read

    def noted(self, start, stop):
        if self is file:  # earlier tests' prefetching threads may still be at work
            started.append(start // SEQUENCE)
        return read(self, start, stop)

    monkeypatch.setattr(token_files.TokenFile, "read", noted)
    take(file, 3, global_batch=8, rows=[2, 3], shuffle=False, prefetch=2)
    assert {0 * 8 + 2, 0 * 8 + 3, 1 * 8 + 2, 1 * 8 + 3, 2 * 8 + 2, 2 * 8 + 3} <= {*started}
    assert {sample % 8 for sample in started} == {2, 3}
    assert max(started) < 8 * (3 + 2)


def cut(suffix, length):
    def mutate(prefix):
        path = prefix.with_suffix(suffix)
        path.write_bytes(path.read_bytes()[:length])

    return mutate


def index(*arguments, **keywords):
    return lambda prefix: prefix.with_suffix(".idx").write_bytes(megatron_index(*arguments, **keywords))


def gap(prefix):
    raw = bytearray(prefix.with_suffix(".idx").read_bytes())
    struct.pack_into("<q", raw, 34 + 3 * 4 + 8, 12)
    prefix.with_suffix(".idx").write_bytes(raw)


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda prefix: prefix.with_suffix(".bin").unlink(), r"there is no token file .*old\.bin"),
        (lambda prefix: prefix.with_suffix(".idx").unlink(), r"there is no token file .*old\.idx"),
        (cut(".bin", 0), r"old\.bin is empty"),
        (cut(".idx", 0), r"old\.idx is empty"),
        (cut(".bin", 41), r"old\.bin is cut off: 41 bytes, but .* 21 tokens of uint16, 42 bytes"),
        (cut(".idx", 5), r"old\.idx is cut off: 5 bytes"),
        (cut(".idx", 33), r"old\.idx is cut off: 33 bytes"),
        (cut(".idx", 93), r"old\.idx is cut off: 93 bytes, but 3 sequences and 3 document indices take 94"),
        (index(8, 2, [5, 6, 9], [0, 2, 3]), r"old\.bin does not belong to its index: 42 bytes"),
        (index(8, 2, [21], [0, 1], magic=b"TNTIDX\x00\x00\x00"), r"not a Megatron index: it begins with b'TNTIDX"),
        (index(8, 2, [21], [0, 1], version=2), r"version 2 .* only version 1"),
        (index(9, 2, [21], [0, 1]), r"unknown dtype code 9; known are 1 to 8"),
        (index(0, 2, [21], [0, 1]), r"unknown dtype code 0"),
        (index(7, 4, [21], [0, 1]), r"tokens are float32"),
        (index(6, 8, [21], [0, 1]), r"tokens are float64"),
        (index(8, 2, [21], [0, 2]), r"last document index is 2 instead of 1"),
        (index(8, 2, [21], []), r"last document index is none instead of 1"),
        (index(8, 2, [5, 16], [0, 2, 1, 2]), r"document indices do not ascend from 0"),
        (index(8, 2, [5, 16], [1, 2]), r"document indices do not ascend from 0"),
        (index(8, 2, [], [0]), r"lists no sequences"),
        (index(8, 2, [-1, 22], [0, 2]), r"do not follow each other"),
        (gap, r"do not follow each other"),
    ],
)
def test_damaged_files_are_told_in_one_sentence(megatron, mutate, message):
    token_files.TokenFile(megatron)
    mutate(megatron)
    with pytest.raises(UserError, match=message) as caught:
        token_files.TokenFile(megatron)
    assert "\n" not in str(caught.value)


def test_too_few_tokens_for_one_sample(megatron):
    assert len(take(token_files.load(megatron, vocab_size=121, sequence=20), 1, sequence=20)) == 1
    with pytest.raises(UserError, match=r"21 tokens, too few .* model\.sequence=21 .* at most 20"):
        token_files.load(megatron, vocab_size=121, sequence=21)


def test_ids_outside_the_vocabulary_are_found_on_open(megatron):
    with pytest.raises(UserError, match=r"token id 120 at position 20, .* vocabulary of 120 ids"):
        token_files.load(megatron, vocab_size=120, sequence=SEQUENCE)


@pytest.mark.parametrize("documents", [[0, 1, 1, 3], [0, 0, 2, 3]], ids=["an empty one within", "an empty one first"])
def test_the_separator_begins_or_ends_documents(tmp_path, documents):
    sizes = [5, 6, 10]
    write(tmp_path / "x", megatron_index(8, 2, sizes, documents), struct.pack("<21H", *range(100, 121)))
    last = 104 if documents[1] else 110
    assert token_files.TokenFile(tmp_path / "x").first_document == last - 99
    for separator in (-1, 100, last):
        token_files.load(tmp_path / "x", vocab_size=121, sequence=SEQUENCE, separator=separator)
    with pytest.raises(UserError, match=rf"begins with token 100 and ends with token {last}, so model\.separator=3 "):
        token_files.load(tmp_path / "x", vocab_size=121, sequence=SEQUENCE, separator=3)


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**32 + 5])
def test_ids_are_checked_before_they_are_narrowed(tmp_path, wrong):
    write(tmp_path / "x", megatron_index(5, 8, [3], [0, 1]), struct.pack("<3q", 1, wrong, 2))
    with pytest.raises(UserError, match=f"token id {wrong} at position 1"):
        token_files.load(tmp_path / "x", vocab_size=2**31, sequence=2)


def test_ids_of_a_large_file_are_found_on_open_unless_its_tokenizer_has_none_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_SCAN_BYTES", 2 * 10)
    with token_files.TokenWriter(tmp_path / "x", 100) as writer:
        writer.extend([1] * 17 + [99] + [1] * 7)
        writer.end_document()
    for ids in (0, 51):
        if ids:
            Tokenizer(WordLevel({str(i): i for i in range(ids)}, "0")).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UserError, match=r"token id 99 at position 17"):
            token_files.load(tmp_path / "x", vocab_size=50, sequence=SEQUENCE)
    Tokenizer(WordLevel({str(i): i for i in range(50)}, "0")).save(str(tmp_path / "tokenizer.json"))
    file = token_files.load(tmp_path / "x", vocab_size=50, sequence=SEQUENCE)
    stream = token_files.batches(file, sequence=SEQUENCE, global_batch=2, rows=[0, 1], shuffle=False)
    next(stream), next(stream)
    with pytest.raises(UserError, match=r"token id 99 at position 17"):
        next(stream)
