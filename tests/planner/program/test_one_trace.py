"""One trace of a layer serves tensor groups of all sizes: what it says of each beside a trace with that group."""

import itertools

import pytest

from paxtrain.config import ModelConfig
from paxtrain.config.axes import TENSOR, AxisSizes
from paxtrain.config.model import FAMILIES
from paxtrain.config.options import OptionValues
from planner.program import reading

# Parts of a feed-forward as wide as the layer, and devices with a head of each kind.
SHAPE = {"vocab_size": 500, "hidden": 512, "heads": 8, "intermediate": 2048, "sequence": 256}
OTHERS = {
    "kept": {"attention": "xla"},
    "flash": {"attention": "cudnn"},
    "documents": {"attention": "cudnn", "separator": 7, "residual_dropout": 0.1},
    "in float32": {"attention": "xla", "dtype": "float32", "separator": 7, "residual_dropout": 0.1},
}
SHARED = ("gemma2", "gemma3", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")  # keys, by several queries
WINDOWS = ("gemma2", "gemma3")  # unless an option says otherwise


def model(family: str, how: str, **changes: object) -> ModelConfig:
    return ModelConfig(**SHAPE | {"family": family} | OTHERS[how] | changes)


def both(monkeypatch, one: ModelConfig, tensor: int, sequence: bool) -> tuple[reading._Primes, dict, dict]:
    """Return the primes of a layer's trace, what is read from it, and what a trace with the group itself says."""
    mesh = AxisSizes({TENSOR: tensor})
    primes, found = reading._primes(one, mesh, sequence, ""), reading.read(one, mesh, sequence, "")
    with monkeypatch.context() as patch:
        patch.setattr(reading, "_primes", lambda *_: reading._Primes(primes.batch))
        return primes, found, reading.read(one, mesh, sequence, "")


def compare(monkeypatch, family: str, how: str) -> None:
    """Compare what a trace says of groups of which one has a head of each kind, or a feed-forward as wide as the layer.

    The scores of some are not cuDNN's, and a window needs a trace of the sequence's length.
    """
    bounded = family == "gemma2" and OTHERS[how]["attention"] == "cudnn"
    shared = 4 if family in SHARED and how != "in float32" else 0
    one = model(family, how, kv_heads=shared, **{"attention": "xla"} if bounded else {})
    for tensor, sequence in ((4, False), (2 if shared else 8, True)):
        primes, found, expected = both(monkeypatch, one, tensor, sequence)
        assert (primes.devices > 1) == (not sequence or family not in WINDOWS)
        assert found == expected, (tensor, sequence)


@pytest.mark.parametrize(("family", "how"), [*zip(FAMILIES, itertools.cycle(OTHERS))])
def test_it_says_what_a_trace_with_the_group_does(monkeypatch, family, how):
    compare(monkeypatch, family, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_does_so_with_all_attentions(monkeypatch, family, how):
    compare(monkeypatch, family, how)


def test_sizes_that_the_primes_divide_are_marked_by_others(monkeypatch):
    eleven = {"hidden": 11 * 64, "heads": 11, "intermediate": 11 * 256}
    for tensor, changes in ((11, eleven), (2, {"intermediate": 2 * 101 * 13}), (2, {"sequence": 2 * 11 * 13})):
        primes, found, expected = both(monkeypatch, model("llama", "flash", **changes), tensor, tensor == 2)
        assert primes.devices > 1 and (primes.devices, primes.parts) != (11, 101) and found == expected


@pytest.mark.parametrize(("window", "same"), [(300, False), (100, True)])
def test_a_window_longer_than_the_sequence_needs_a_trace_of_its_length(monkeypatch, window, same):
    """Control: in a longer one it is one, and a layer has the kernels with it and without."""
    one = model("gemma3", "flash", options=OptionValues({"sliding_window": window}))
    primes, found, expected = both(monkeypatch, one, 2, True)
    assert primes.devices == 1 and found == expected
    few = reading._primes(one, AxisSizes({TENSOR: 2}), False, "")
    monkeypatch.setattr(reading, "_primes", lambda *_: few)
    assert (reading.read(one, AxisSizes({TENSOR: 2}), True, "") == expected) == same
