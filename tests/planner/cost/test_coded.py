"""The planner's closed forms of low rank are what the codec and the reducer declare, and what a count by hand gives."""

import math

import pytest

import compress
from paxtrain.config import MeshConfig, from_dict
from paxtrain.config.options import OptionValues
from paxtrain.parallel.compression.settled import Compression
from paxtrain.parallel.layout import Layout
from planner.cost import compute
from planner.cost.candidate import Candidate
from planner.cost.coded import POWER_LAUNCHES, POWER_PASSES, Coded, coded
from planner.cost.simulate import candidate_of_config
from planner.cost.sizes import Sizes
from planner.memory import closed_form
from tests.compress_settings import compression, nested
from tests.planner.examples import MODEL

RANK = 24


# Reads and writes of a message: by project, by back-project, and by the update of the error.
READS_AND_WRITES = {"none": (1, 1, 0), "lazy": (3, 1, 0), "explicit": (3, 1, 2)}


@pytest.mark.parametrize("error", READS_AND_WRITES)
@pytest.mark.parametrize("data_codec", ["", "int8"])
def test_passes_over_a_message_are_those_of_its_kernels(error, data_codec):
    codecs = coded(compression(error=error, data_codec=data_codec))
    encode, decode, _ = codecs.message_passes("backward")
    assert (encode, decode) == (sum(READS_AND_WRITES[error]), 1)  # decode writes the message
    assert tuple(compress.LowRank(RANK, error).passes()) == codecs.message_passes("backward")


def test_passes_over_gradients_are_those_of_the_reducers_kernels():
    # The gradient and the error are read and their sum is written, which back-project reads. Decode reads the sum, and
    # writes the gradient and the error.
    by_hand = 3 + 1 + 3
    reducer = compress.PowerSGD(RANK)
    assert Coded().passes_of(reducer) == (POWER_PASSES, POWER_LAUNCHES) and by_hand == POWER_PASSES
    passes, _ = Coded().passes_of(compress.Hierarchical(reducer, 4))
    # In groups the sum inside reads and writes the whole gradient, and its gather writes it; a rank has a quarter.
    assert passes == 3 + by_hand / 4


@pytest.mark.parametrize(("data", "inside"), [(4, 1), (4, 2)])
def test_bytes_are_those_that_the_codec_and_the_reducer_declare(data, inside):
    codecs = coded(compression(data_stages="all", data_inside=inside))
    candidate = Candidate(
        data, 4, 1, 2, 4, "1f1b", (3,) * 4, backward="all", backward_rank=RANK, data_rank=RANK, coded=codecs
    )
    sizes = Sizes(MODEL, candidate)
    codec = compress.LowRank(RANK, factors=MODEL.dtype)
    assert sizes.packed == codec.wire_bytes((2, MODEL.sequence, MODEL.hidden), MODEL.dtype)
    reducer = compress.PowerSGD(RANK)
    if inside > 1:
        reducer = compress.Hierarchical(reducer, inside)
    groups, shard = data // inside, compress.Shard("data", data, 0)
    sent = sum(reducer.wire_bytes(shape, shard) for shape in sizes.kernels)
    rest = 0 if inside > 1 else sizes.rest * compute.ITEM[candidate.reduce_dtype]
    assert 2 * (groups - 1) / groups * (sizes.factor_bytes / 3 - rest) == pytest.approx(sent)


@pytest.mark.parametrize("zero1", [True, False])
@pytest.mark.parametrize(("hidden", "data", "inside"), [(24, 4, 1), (24, 4, 2), (15, 4, 2), (20, 8, 2)])
def test_kernels_that_are_compressed_over_data_are_the_trainers(hidden, data, inside, zero1):
    """A kernel of 15 x 15 has no halves, and one of 20 x 20 has halves but no eighths for ZeRO-1."""
    model = {"layers": 2, "hidden": hidden, "heads": 5 if hidden < 24 else 3, "sequence": 8, "vocab_size": 64}
    compress = nested(
        {"data_stages": "all", "data_rank": 2, "data_rank_min": 2, "data_inside": inside, "min_ratio": 1.0}
    )
    sections = {
        "mesh": {"data": data, "shard": MeshConfig.of_zero1(zero1)},
        "batch": {"global_batch": data, "micro_batch": 1},
    }
    config = from_dict({"model": model, "compress": compress, **sections})
    trainer, sizes = Compression(Layout(config)), Sizes(config.model, candidate_of_config(config))
    matrix = lambda shape: (shape[0], math.prod(shape[1:]))  # noqa: E731
    taken = [matrix(trainer.kernels[path]) for path in trainer.data_kernels]
    assert sorted(sizes.compressed_kernels) == sorted(taken) and len(taken) == (2 if hidden == 15 else 4)
    parts = [matrix(trainer.reduced[path][0]) for path in trainer.data_kernels]
    states = sum(n * k + 2 * k for n, k in parts)  # errors and right factors of rank 2
    assert closed_form.analytic(closed_form.of(config)).compression == 2 * 4 * states  # two layers in float32


def test_a_codec_is_asked_with_its_options():
    options = OptionValues({"feedback": False})
    codecs = coded(compression(backward_codec="int8", backward_options=options))
    assert codecs.message_passes("backward") == (2.5, 1.5, 3)
    assert coded(compression(backward_codec="int8")).message_passes("backward") == (5.5, 1.5, 3)
