"""The tokens of sample n of a mixture depend on seed, n and weights alone."""

import itertools
import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paxtrain.config import from_dict
from paxtrain.data import settings, token_files
from paxtrain.data.datasets import DataSets
from paxtrain.data.mixture import Mixture
from paxtrain.errors import UserError

SEQUENCE = 4
# Samples per epoch and first token of each data set, so that a token tells where it was read.
SETS = {"code": (7, 0), "talk": (5, 1000), "web": (23, 2000)}
WEIGHTS = {"code": 2, "talk": 1, "web": 7}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("sets")
    for name, (samples, first) in SETS.items():
        (home / name).mkdir()
        with token_files.TokenWriter(home / name / "train", 3000) as writer:
            writer.extend(range(first, first + samples * SEQUENCE + 1))
            writer.end_document()
    return home


def named(home, *names):
    return ",".join(f"{name}={home / name / 'train'}" for name in names)


def weighted(weights):
    return weights if isinstance(weights, str) else ",".join(f"{name}={weight}" for name, weight in weights.items())


def opened(home, weights=WEIGHTS, seed=0, batch=1, **values):
    values = {"train": named(home, *weights), "weights": weighted(weights)} | values
    return DataSets(
        from_dict(
            {
                "model": {"vocab_size": 3000, "sequence": SEQUENCE},
                "batch": {"global_batch": batch, "micro_batch": 1},
                "data": {"validation": str(home / "code" / "train")} | values,
                "run": {"seed": seed},
            }
        )
    )


def take(sets, count, rows=(0,), **arguments):
    """Return the first tokens of some batches' rows, [count * rows]."""
    batches = itertools.islice(sets.training(rows, **arguments), count)
    return np.concatenate([batch[:, 0] for batch in batches])


def test_places_say_where_samples_were_read(home):
    sets = opened(home, batch=20)
    batch = next(sets.training(range(20), start_sample=20))
    found = [text.split(":") for text in sets.places(20).split()]
    assert [SETS[name][1] + int(place) * SEQUENCE for name, place in found] == batch[:, 0].tolist()
    alone = opened(home, weights="", train=str(home / "web" / "train"), batch=23)
    places = list(map(int, alone.places(0).split()))
    assert sorted(places) == list(range(23)) != places


def by_set(tokens):
    """Return the numbers of the samples that came from each data set, in order."""
    return {
        name: [int(t - first) // SEQUENCE for t in tokens if first <= t < first + 1000]
        for name, (_, first) in SETS.items()
    }


def test_the_samples_of_a_mixture(home):
    """Sets follow the weights, in the order of their names; each has separate epochs in a different order."""
    tokens = take(opened(home), 200)
    mixture = Mixture(list(WEIGHTS.values()))
    assert (tokens // 1000).tolist() == [mixture(n)[0] for n in range(200)]
    for name, order in by_set(tokens).items():
        length = SETS[name][0]
        epochs = [tuple(order[i : i + length]) for i in range(0, len(order) - length + 1, length)]
        assert len(epochs) >= 3 and all(sorted(epoch) == list(range(length)) for epoch in epochs)
        assert len({*epochs, tuple(range(length))}) == len(epochs) + 1


def test_a_set_keeps_its_order_whatever_it_is_mixed_with(home):
    orders = by_set(take(opened(home), 200))
    for weights in ({"code": 1}, {"web": 1, "code": 5}, {"web": 30, "talk": 1, "code": 2}):
        found = by_set(take(opened(home, weights), 200))
        for name in weights:
            shared = min(len(found[name]), len(orders[name]))
            assert shared > 5 and found[name][:shared] == orders[name][:shared]
    assert by_set(take(opened(home, seed=1), 200))["web"][:23] != orders["web"][:23]


def test_one_set_without_a_name_is_read_as_ever(home):
    sets = opened(home, train=str(home / "web" / "train"), weights="", seed=3)
    alone = token_files.batches(
        token_files.TokenFile(home / "web" / "train"), sequence=SEQUENCE, global_batch=1, rows=[0], seed=3
    )
    expected = np.concatenate([batch[:, 0] for batch in itertools.islice(alone, 50)])
    np.testing.assert_array_equal(take(sets, 50), expected)


def test_resuming_on_other_processes_with_another_batch_continues_the_same_samples(home):
    whole = take(opened(home), 60)
    before = take(opened(home, batch=6), 5, rows=range(6))
    after = opened(home, batch=10)
    parts = [take(after, 3, rows=rows, start_sample=30).reshape(3, -1) for rows in (range(4), range(4, 10))]
    np.testing.assert_array_equal(np.concatenate([before, np.concatenate(parts, axis=1).ravel()]), whole)
    assert not np.array_equal(take(after, 3, rows=range(10), start_sample=31), whole[30:])


def test_identity_is_what_decides_the_samples(home):
    """The order in which sets are written, a common factor of the weights and the files' folder do not count."""
    identity = opened(home).identity()
    reordered = {"train": named(home, "web", "talk", "code"), "weights": "web=0.7,code=0.2,talk=0.1"}
    assert opened(home, **reordered).identity() == identity
    np.testing.assert_array_equal(take(opened(home, **reordered), 50), take(opened(home), 50))
    others = [
        opened(home, {**WEIGHTS, "web": 6}),
        opened(home, seed=1),
        opened(home, {"code": 2, "web": 7}),
        opened(home, train=named(home, "code", "talk", "web").replace("code/", "talk/")),
    ]
    assert all(other.identity() != identity for other in others)
    alone = opened(home, train=str(home / "web" / "train"), weights="").identity()
    assert set(alone) == {"tokens", "beginning", "seed", "sequence"}  # as checkpoints have always had it


def test_the_table_tells_shares_and_epochs(home):
    rows = dict(opened(home, batch=1).describe())
    assert rows["train on web"] == "0.7 of all samples, 6.09 epochs of 93 tokens"  # of 200 steps
    assert opened(home, train=str(home / "web" / "train"), weights="").describe() == []


@pytest.fixture
def tokenized(home, tmp_path):
    """Write the three sets with tokenizers, two of which are one in two spellings."""
    one, other = (Tokenizer(WordLevel({token: 0, "</s>": 1}, token)).to_str(pretty=True) for token in "ab")
    for name, text in (("code", one), ("talk", json.dumps(json.loads(one))), ("web", other)):
        (tmp_path / name).mkdir()
        for suffix in (".bin", ".idx"):
            (tmp_path / name / f"train{suffix}").write_bytes((home / name / f"train{suffix}").read_bytes())
        (tmp_path / name / "tokenizer.json").write_text(text)
    return tmp_path


def test_sets_of_different_tokenizers_are_refused(tokenized):
    tmp_path = tokenized
    same = {"code": 1, "talk": 1}
    validation = str(tmp_path / "code" / "train")
    assert opened(tmp_path, same, validation=validation).tokenizer == tmp_path / "code" / "tokenizer.json"
    for changes in ({"weights": {**same, "web": 1}}, {"validation": str(tmp_path / "web" / "train")}):
        with pytest.raises(UserError, match=r"code/tokenizer.json and .*web/tokenizer.json are different tokenizers"):
            opened(tmp_path, **({"weights": same, "validation": validation} | changes))
    (tmp_path / "code" / "tokenizer.json").unlink()
    assert opened(tmp_path, same, validation=validation).tokenizer == tmp_path / "talk" / "tokenizer.json"


def test_sets_whose_documents_begin_or_end_otherwise_are_refused(tokenized):
    ends = {"eos_token": "</s>", "add_bos_token": False, "split_special_tokens": True}
    begins = {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "add_bos_token": True}
    (tokenized / "code" / "tokenizer_config.json").write_text(json.dumps(ends))
    values = {"weights": {"code": 1, "talk": 1}, "validation": str(tokenized / "code" / "train")}
    assert opened(tokenized, **values).settings == [ends]
    (tokenized / "talk" / "tokenizer_config.json").write_text(json.dumps(begins))
    with pytest.raises(
        UserError, match=r"begin with their text and end with </s>, beside .* <s> and </s>; .*--begin_of"
    ):
        opened(tokenized, **values)
    # Text that is not to forge special tokens beside text that has them is one mixture.
    (tokenized / "talk" / "tokenizer_config.json").write_text(json.dumps(ends | {"split_special_tokens": False}))
    found = opened(tokenized, **values).settings
    assert settings.of_run({"chat_template": "kept"}, found)["split_special_tokens"] is False
