"""The candidates are those that the trainer accepts: all of them, and no others."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from paxtrain.config import SAVE_MODES, SHARDS, ModelConfig, from_dict
from paxtrain.config.checks import divisors
from paxtrain.config.load import nested
from paxtrain.config.options import OptionValues
from paxtrain.errors import UserError
from paxtrain.schedule.schedules import name_of, names, parts
from planner.cost.coded import coded
from planner.cost.sizes import Sizes
from planner.search.budget import Budget
from planner.search.enumeration import enumerate_candidates
from planner.search.explain import require_compression
from planner.search.space import BACKWARD, Choices, candidate_of
from tests.compress_settings import compression
from tests.planner.examples import MODEL, cluster


def test_all_candidates_and_no_others():
    """The reference is the trainer's check of every combination of sizes."""
    some = cluster(3, 2)
    plain = Choices(saves=("dots",), shards=("optimizer",), backward=(), data_ranks=(), schedules=("eager_1f1b",))
    space = enumerate_candidates(some, MODEL, 12, plain)
    found = set(zip(*(getattr(space, name).tolist() for name in ("data", "pipe", "tensor", "micro_batch"))))
    expected = set()
    for data, pipe, tensor, micro_batch in itertools.product(range(1, 7), range(1, 7), (1, 2), range(1, 13)):
        sizes = {"mesh": {"data": data, "pipe": pipe, "tensor": tensor}}
        batch = {"batch": {"global_batch": 12, "micro_batch": micro_batch}}
        try:
            from_dict({"model": dataclasses.asdict(MODEL), **sizes, **batch})
        except UserError:
            continue
        if data * pipe * tensor == 6:
            expected.add((data, pipe, tensor, micro_batch))
    assert found == expected
    assert len(space) == len(found)


def test_every_candidate_is_a_configuration():
    choices = Choices(schedules=names(), backward_ranks=(16, 64), sequence_parallel=(False, True))
    space = enumerate_candidates(cluster(2, 4), MODEL, 16, choices)
    assert {parts(name_of(i))[0] for i in space.schedule} == set(names())
    assert set(zip(space.tensor, space.sequence_parallel)) == {(1, 0), (2, 0), (2, 1), (4, 0), (4, 1)}
    for i in np.random.default_rng(0).choice(len(space), 300, replace=False):
        row = {name: column[i].tolist() for name, column in vars(space).items() if isinstance(column, np.ndarray)}
        config = from_dict(
            {
                "model": dataclasses.asdict(MODEL),
                "mesh": {
                    **{axis: row[axis] for axis in ("data", "pipe", "tensor")},
                    "sequence_parallel": bool(row["sequence_parallel"]),
                    "shard": SHARDS[row["shard"]],
                },
                "pipeline": {
                    "schedule": parts(name_of(row["schedule"]))[0],
                    "in_flight": parts(name_of(row["schedule"]))[1],
                    "virtual_stages": row["chunks"],
                    "save": SAVE_MODES[row["save"]],
                },
                "batch": {"global_batch": 16, "micro_batch": row["micro_batch"]},
                "compress": {"backward": {"messages": BACKWARD[row["backward"]], "rank": row["backward_rank"] or 16}},
            }
        )
        assert config.micro_batches == row["micro_batches"]
        assert max(config.stage_layers) == row["slots"]


def test_the_budget_of_quality_is_kept():
    some = cluster(2, 4)
    nothing = enumerate_candidates(some, MODEL, 16, Choices(backward=(), data_ranks=()))
    assert not nothing.backward.any() and not nothing.data_rank.any()
    space = enumerate_candidates(
        some, MODEL, 16, Choices(backward=("all",), backward_ranks=(8, 4096), data_ranks=(64, 999))
    )
    assert set(space.backward_rank.tolist()) == {0, 8}  # at other ranks the trainer would not compress
    assert set(space.data_rank.tolist()) == {0, 64}
    assert not space.backward[space.pipe == 1].any() and not space.data_rank[space.data == 1].any()


def test_what_a_codec_refuses_is_no_candidate():
    """A rank of 600 needs messages of as many rows, and one of 160 parts of gradients."""
    ranks = {f"{place}_options": OptionValues({"rank": rank}) for place, rank in (("backward", 600), ("data", 160))}
    codecs = coded(compression(backward_codec="remainder", data_codec="remainder", **ranks))
    choices = Choices(
        tensor=(2,), sequence_parallel=(True,), backward=("all",), min_ratio=1.0, coded=codecs, schedules=("1f1b",)
    )
    some = cluster(2, 4)
    space = enumerate_candidates(some, MODEL, 16, choices)
    assert set(space.data.tolist()) == {1, 2, 4}
    assert set(space.data[space.data_rank > 0].tolist()) == {2}  # among 4 a part of the smallest matrix has 128 rows
    assert set(space.micro_batch[space.pipe > 1].tolist()) == {1, 2, 4, 8, 16}
    assert set(space.micro_batch[space.backward > 0].tolist()) == {2, 4, 8, 16}  # one sequence has 512 rows on a device
    assert np.isfinite(Budget(coded=codecs).bytes(some, MODEL, space)).all()
    refused = int(np.flatnonzero((space.micro_batch == 1) & (space.pipe == 2))[0])
    sizes = Sizes(MODEL, candidate_of(space, refused, (6, 6), choices))
    assert sizes.packed == sizes.message


def test_ranks_and_codecs_that_fit_nowhere_are_told():
    some, kinds = cluster(2, 4), {"backward": ("all",), "schedules": ("1f1b",)}
    for choices, words in (
        (Choices(backward_ranks=(9000, 9001), **kinds), "--backward_ranks=9000,9001 does not make anything 2 times"),
        (Choices(data_ranks=(257,), tensor=(1,)), "1024 x 1024; the largest useful rank is 256"),
    ):
        with pytest.raises(UserError) as error:
            require_compression(enumerate_candidates(some, MODEL, 16, choices), MODEL, choices)
        assert words in str(error.value)
    table = Choices(min_ratio=8.0, coded=coded(compression(embedding_codec="int8")))
    with pytest.raises(UserError, match=r"compress\.embedding\.codec=int8 does not make a table of .* x 1024 8 times"):
        enumerate_candidates(some, MODEL, 16, table)
    fits = Choices(data_ranks=(256, 257), tensor=(1,), backward_ranks=(16, 9000), **kinds)
    require_compression(enumerate_candidates(some, MODEL, 16, fits), MODEL, fits)
    alone = Choices(pipe=(1,), data=(1,), tensor=(4,))  # nothing is sent that could be compressed
    require_compression(enumerate_candidates(cluster(1, 4), MODEL, 16, alone), MODEL, alone)


def test_a_sequence_that_tensor_does_not_divide_stays_whole():
    odd = dataclasses.replace(MODEL, sequence=1022)
    space = enumerate_candidates(cluster(2, 4), odd, 16, Choices(sequence_parallel=(True,)))
    assert set(zip(space.tensor, space.sequence_parallel)) == {(1, 0), (2, 1), (4, 0)}


def test_any_number_of_hosts_and_more_stages_than_hosts():
    space = enumerate_candidates(cluster(3, 4), MODEL, 24, Choices())
    assert {3, 6, 12} <= set(space.pipe.tolist())
    assert set(space.tensor.tolist()) == {1, 2, 4}


@pytest.mark.parametrize(
    ("batch", "choices", "sentence"),
    [
        (7, Choices(tensor=(1,), pipe=(1,)), "a global batch of 7 cannot be split"),
        (16, Choices(tensor=(3,)), "--tensor=3 does not divide 8 devices; 1, 2 or 4 would fit"),
        (16, Choices(tensor=(8,)), "--tensor=8 does not divide the 4 devices of a host; 1, 2 or 4 would fit"),
        (16, Choices(pipe=(16,)), "--pipe=16 does not divide 8 devices; 1, 2, 4 or 8 would fit"),
        (16, Choices(pipe=(5, 3)), "none of --pipe=5,3 divides 8 devices; 1, 2, 4 or 8 would fit"),
        (16, Choices(data=(3,)), "--data=3 does not divide 8 devices; 1, 2, 4 or 8 would fit"),
        (16, Choices(data=(4,), pipe=(4,)), "--data=4 --pipe=4 do not fit 8 devices, 4 a host, together; leave one of"),
    ],
)
def test_what_cannot_be_split_is_told(batch, choices, sentence):
    with pytest.raises(UserError) as error:
        enumerate_candidates(cluster(2, 4), MODEL, batch, choices)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("model", "choices", "sentence"),
    [
        ({"layers": 2}, Choices(pipe=(4, 8)), "--pipe=4,8 is more than model.layers=2; 1 or 2 would fit"),
        (
            {"heads": 23, "hidden": 23 * 64},
            Choices(tensor=(2,)),
            "--tensor=2 does not divide model.heads=23; 1 would fit",
        ),
    ],
)
def test_sizes_that_the_model_rules_out_are_told_with_those_that_it_allows(model, choices, sentence):
    with pytest.raises(UserError) as error:
        enumerate_candidates(cluster(2, 4), dataclasses.replace(MODEL, **model), 16, choices)
    assert str(error.value) == sentence
    found = [int(size) for size in re.findall(r"\d+", sentence.partition("; ")[2])]
    [name] = [name for name, some in choices.sizes.items() if some]
    space = enumerate_candidates(cluster(2, 4), dataclasses.replace(MODEL, **model), 16, Choices())
    assert sorted(set(space.column(name).tolist())) == found


def test_a_vocabulary_that_is_advised_lets_tensor_divide_it():
    odd, choices = dataclasses.replace(MODEL, vocab_multiple=1), Choices(tensor=(2, 4))
    with pytest.raises(UserError) as error:
        enumerate_candidates(cluster(2, 4), odd, 16, choices)
    advised = re.findall(r"; --model\.(\S+)=(\d+) would let tensor=(\d) divide the vocabulary", str(error.value))
    assert [tensor for *_, tensor in advised] == ["2", "4"]
    for key, value, tensor in advised:
        model = from_dict(nested({key: int(value)}, {"model": dataclasses.asdict(odd)})).model
        assert int(tensor) in enumerate_candidates(cluster(2, 4), model, 16, choices).tensor


def test_divisors():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]


def test_groups_of_data_ranks_that_cut_no_kernel_are_told():
    model = ModelConfig(vocab_size=64, layers=2, hidden=15, heads=3, sequence=8)
    choices = Choices(tensor=(1,), pipe=(1,), data_ranks=(2,), coded=coded(compression(data_inside=7)))
    some = enumerate_candidates(cluster(14, 1, seed=None), model, 14, choices)
    with pytest.raises(UserError, match=r"compress\.data\.inside=7 cuts no kernel of a layer .*, or leave it out"):
        require_compression(some, model, choices)
