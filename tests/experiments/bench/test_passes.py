"""Codecs declare the memory passes of their programs for an H100 that is not there, to within a quarter."""

import dataclasses

import jax
import pytest

from compress.codec import Passes
from compress.codecs.quantised import QuantisedBlocks
from experiments.bench.trainer import passes
from paxtrain.errors import UserError

QUARTER = 1.25
# In bfloat16 units, since these make float32 arrays of a message.
WIDE = {"int4 rotate": 2.0, "remainder": 1.6}
# XLA fuses the parts of a gradient more closely than a message.
FUSED = {"sign": 1.4}


@pytest.fixture(scope="module")
def meshes():
    jax.devices()  # as in a process that already computes on the CPU
    try:
        return passes.mesh_of("h100", 1), passes.mesh_of("h100", passes.RANKS)
    except UserError as reason:
        pytest.skip(str(reason))


def off(declared: Passes, counted: passes.Counted) -> float:
    """Return the larger of the two over the smaller."""
    some = declared.encode + declared.decode, counted.encode + counted.decode
    return max(some) / min(some)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.label, marks=() if c.label == "int8" else pytest.mark.slow) for c in passes.cases()],
)
def test_declared_passes_are_those_of_the_program(meshes, case):
    one, several = meshes
    declared = case.codec.passes()
    assert off(declared, passes.between(case.codec, one, "float32")) < QUARTER
    assert off(declared, passes.between(case.codec, one, "bfloat16")) < WIDE.get(case.label, QUARTER)
    assert off(case.reducer.passes(), passes.over_data(case.reducer, several)) < FUSED.get(case.label, QUARTER)


@dataclasses.dataclass(frozen=True)
class TwoPasses(QuantisedBlocks):
    def passes(self) -> Passes:
        return Passes(2, 1)


def test_passes_that_are_not_declared_would_be_seen(meshes):
    codec = TwoPasses()
    assert off(codec.passes(), passes.between(codec, meshes[0], "bfloat16")) > 2
