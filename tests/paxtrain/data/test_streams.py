"""Streamed training sets: samples, states, and what is refused. Ids here are bytes, and documents end with 256."""

import gzip
import json

import numpy as np
import pytest

from paxtrain.config import from_dict
from paxtrain.data import streams
from paxtrain.data.datasets import DataSets
from paxtrain.data.mixture import Mixture
from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.data.token_files import TokenWriter
from paxtrain.errors import UserError

SEQUENCE, BATCH = 20, 6


def documents(name, count):
    """Return documents that all differ, some longer than several samples and some much shorter."""
    return [f"{name}{i} " + name * (i * 37 % 50) for i in range(count)]


WEB, CODE = documents("web", 90), documents("code", 40)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("streams")
    for name, texts, pack in (("a", WEB[:50], gzip.compress), ("b", [*WEB[50:], ""], bytes), ("code", CODE, bytes)):
        lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
        (home / f"{name}.jsonl").write_bytes(pack(lines.encode()))
    (home / "some.txt").write_text("text to validate on, longer than a sample")
    prepare([str(home / "some.txt")], home / "data", PrepareOptions(validation_fraction=0.9))
    return home


def configuration(home, batch=BATCH, model=(), **data):
    stream = {"stream": f"{home}/a.jsonl,{home}/b.jsonl", "json_key": "body"}
    validation = {"validation": str(home / "data/validation"), "train": "nowhere"}
    return from_dict(
        {
            "model": {"vocab_size": 257, "sequence": SEQUENCE, "separator": 256, **dict(model)},
            "batch": {"global_batch": batch, "micro_batch": 1},
            "data": stream | validation | data,
        }
    )


def mixed(home):
    return {"stream": f"web={home}/[ab].jsonl,code={home}/code.jsonl", "weights": "web=2,code=1"}


def read(config, batches, rows=None, state=None):
    """Return the first batches, [batches, rows, sequence + 1], and the state of the iterator after each, as JSON."""
    rows = range(config.batch.global_batch) if rows is None else rows
    iterator, found, states = DataSets(config).training(rows, state=state), [], []
    for _ in range(batches):
        found.append(next(iterator))
        states.append(json.dumps(iterator.get_state()))
    iterator.close()
    return np.stack(found), states


def ids(texts):
    return np.concatenate([[*text.encode(), 256] for text in texts])


def texts_of(samples):
    """Return the documents that samples hold, without the last one, which may be cut."""
    flat = samples.reshape(-1)
    return [bytes(part[part < 256].tolist()).decode() for part in np.split(flat, np.flatnonzero(flat == 256) + 1)[:-1]]


def test_samples_are_the_ids_of_all_documents_in_order_again_and_again(home):
    found, _ = read(configuration(home, shuffle=False), 150)
    flat = found.reshape(-1)
    assert len(flat) > 2 * len(ids(WEB))  # three epochs
    assert flat.dtype == np.int32
    np.testing.assert_array_equal(flat, np.resize(ids(WEB), len(flat)))


def test_documents_are_shuffled_in_windows(home, monkeypatch):
    monkeypatch.setattr(streams, "WINDOW", 45)
    first = texts_of(read(configuration(home), 70)[0])[:90]
    assert sorted(first) == sorted(WEB) and first != WEB  # two windows are an epoch of two files
    again = texts_of(read(configuration(home), 140)[0])
    assert again[:90] == first
    assert sorted(again[90:180]) == sorted(WEB) and again[90:180] != first


@pytest.mark.parametrize("shuffle", [True, False])
def test_it_goes_on_from_its_state_as_if_it_had_not_stopped(home, shuffle, monkeypatch):
    """After each batch, with another batch size and others' rows."""
    monkeypatch.setattr(streams, "WINDOW", 32)
    monkeypatch.setattr(streams, "_AT_ONCE", 5)
    config = configuration(home, **mixed(home), shuffle=shuffle)
    whole, states = read(config, 40)
    samples = whole.reshape(-1, SEQUENCE + 1)
    for done, state in list(enumerate(states, 1))[::3]:
        left = samples[done * BATCH :][:8]
        if len(left) == 8:
            found, _ = read(configuration(home, 8, **mixed(home), shuffle=shuffle), 1, state=json.loads(state))
            np.testing.assert_array_equal(found[0], left)
    parts = [read(config, 40, rows)[0] for rows in ((0, 2, 4), (5, 3, 1))]
    np.testing.assert_array_equal(np.concatenate(parts, 1)[:, [0, 5, 1, 4, 2, 3]], whole)


def test_sets_are_mixed_by_weight_and_each_is_as_by_itself(home):
    samples = read(configuration(home, **mixed(home), shuffle=False), 10)[0].reshape(-1, SEQUENCE + 1)
    chosen = np.array([Mixture([1, 2])(n)[0] for n in range(len(samples))])  # sorted by name: code, web
    for index, texts in enumerate((CODE, WEB)):
        mine = samples[chosen == index].reshape(-1)
        np.testing.assert_array_equal(mine, np.resize(ids(texts), len(mine)))


def test_a_set_is_identified_by_its_files(home):
    one, other = (DataSets(configuration(home, stream=f"{home}/{names}.jsonl")).identity() for names in ("a", "[ab]"))
    assert one != other and json.loads(json.dumps(one)) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream": "{home}/none*.jsonl"}, r"data\.stream=.*none\*\.jsonl names no files"),
        ({"json_key": "text"}, r"a\.jsonl, line 1, has no key 'text' but the keys body; .* data\.json_key"),
        ({"stream": "{home}/empty.jsonl"}, r"data\.stream=.*empty\.jsonl has no text"),
        ({"stream": "{home}/cut.jsonl.gz"}, r"cut\.jsonl\.gz is damaged or cut off"),
        (
            {"model": {"vocab_size": 256, "separator": -1}, "validation": "{home}/few/validation"},
            r"tokenizer\.json has 257 ids, more than .*vocab_size=256",
        ),
        ({"validation": "{home}/unmarked/validation"}, r"unmarked does not say which token ends documents"),
        ({"validation": "{home}/bare/validation"}, r"there is no .*bare/tokenizer\.json; prepare some text"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_the_start(home, change, message):
    (home / "empty.jsonl").write_text('{"body": ""}\n')
    (home / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"body": "x"}\n')[:12])
    for name in ("bare", "few", "unmarked"):
        (home / name).mkdir(exist_ok=True)
        with TokenWriter(home / name / "validation", 257) as writer:
            writer.extend([*range(30), *([] if name == "few" else [256])])
            writer.end_document()
        if name != "bare":
            (home / name / "tokenizer.json").write_bytes((home / "data" / "tokenizer.json").read_bytes())
    (home / "unmarked" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    change = {name: value.format(home=home) if isinstance(value, str) else value for name, value in change.items()}
    with pytest.raises(UserError, match=message):
        DataSets(configuration(home, **change))


def test_what_is_damaged_further_on_is_told_when_it_is_read(home, tmp_path):
    lines = [json.dumps({"body": "x" * 50})] * 20
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]))
    config = configuration(home, stream=str(tmp_path / "a.jsonl"), shuffle=False)
    with pytest.raises(UserError, match=r"a\.jsonl, line 21, is not JSON"):
        read(config, 100)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stream": "a=x.jsonl,b=y.jsonl"}, r"data\.stream has the data sets a, b, but data\.weights is empty"),
        ({"stream": "a=x.jsonl,y.jsonl"}, r"data\.stream must be files without names, or named data sets as web=web/"),
        ({"stream": "x.jsonl,y.jsonl", "weights": "x=1"}, r"data\.weights=x=1 needs data sets with names as .*"),
        ({"stream": "a=x,b=y", "weights": "a=1,c=1"}, r"names the data set 'c', but data\.stream has a, b"),
        ({"stream": "a=x,b=y", "weights": "a=1"}, r"has no weight for b, but data\.stream has a, b"),
    ],
)
def test_sets_and_weights_that_do_not_fit(data, message):
    with pytest.raises(UserError, match=message):
        from_dict({"data": data})


def test_places_in_token_files_are_not_told_of_a_stream():
    with pytest.raises(
        UserError, match=r"run\.log_samples tells places .* data\.stream=x\.jsonl.*run\.log_samples=Fal"
    ):
        from_dict({"data": {"stream": "x.jsonl"}, "run": {"log_samples": True}})
