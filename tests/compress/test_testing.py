"""Every codec of the library has the properties that `check` asks for, and codecs without one of them are caught."""

import jax.numpy as jnp
import pytest

import compress
from compress.codecs import named
from compress.codecs.float8 import Float8Blocks
from compress.codecs.quantised import QuantisedBlocks
from compress.codecs.remainder import LowRankRemainder
from compress.codecs.sign import Signs
from compress.codecs.topk import TopK
from compress.testing import check

pytestmark = pytest.mark.once
LOW = [
    compress.LowRank(4, error, factors)
    for error, factors in (("lazy", "float32"), ("explicit", "bfloat16"), ("none", "float32"), ("lazy", "int8"))
]
BLOCKS = [
    QuantisedBlocks(8),
    QuantisedBlocks(4),
    QuantisedBlocks(4, 32, rotate=True),
    QuantisedBlocks(8, 30, feedback=False),
    Float8Blocks(),
    Float8Blocks("e5m2", 30, feedback=False),
    Signs(64),
    Signs(64, feedback=False),
    LowRankRemainder(4),
    LowRankRemainder(2, 8, factors="float32", feedback=False),
]


ALL = [compress.Identity(), TopK(0.1), TopK(0.1, feedback=False), *BLOCKS, *LOW]
FURTHER = [*BLOCKS[2:4], BLOCKS[5], BLOCKS[7], BLOCKS[9], *LOW[1:3], TopK(0.1)]


def test_none_of_the_library_is_left_out():
    paths = {f"{type(codec).__module__}:{type(codec).__name__}" for codec in ALL}
    assert {entry.path for entry in named.NAMES.values()} <= paths


@pytest.mark.parametrize(
    "codec", [pytest.param(codec, marks=pytest.mark.slow if codec in FURTHER else ()) for codec in ALL], ids=repr
)
def test_codecs_of_the_library_have_all_properties(codec):
    found = check(codec)
    assert len(found) == 16
    assert not any("not checked" in name for name in found)


@pytest.mark.parametrize(
    "codec",
    [
        TopK(0.1),
        QuantisedBlocks(4, rotate=True),
        compress.LowRank(4),
        *(
            pytest.param(codec, marks=pytest.mark.slow)
            for codec in (QuantisedBlocks(8), Float8Blocks(), Signs(64), LowRankRemainder(4))
        ),
    ],
    ids=repr,
)
def test_codecs_have_them_in_bfloat16(codec):
    check(codec, dtype="bfloat16")


@pytest.mark.parametrize("reducer", [compress.PowerSGD(4), compress.Scattered(TopK())])
def test_reducers_have_them(reducer):
    assert len(check(reducer)) == 7


class WrongBytes(TopK):
    def wire_bytes(self, shape, dtype):
        return super().wire_bytes(shape, dtype) - 4


class NoPasses(TopK):
    def passes(self):
        return compress.Passes(0, 0)


class AlwaysActive(TopK):
    def encode(self, state, x, active=True):
        return super().encode(state, x, True)


class Finite(TopK):
    def encode(self, state, x, active=True):
        return super().encode(state, jnp.nan_to_num(x, posinf=1, neginf=1), active)


class Forgetful(TopK):
    def residual(self, state, like):
        return 0.9 * state


class Silent(TopK):
    """A codec that keeps an error and does not tell it."""

    def residual(self, state, like):
        return jnp.zeros(like.shape, like.dtype)


class ZeroForGood(TopK):
    """A codec that remembers the largest number so far, and divides by it."""

    def init(self, shape, dtype):
        return jnp.float32(-1)

    def encode(self, state, x, active=True):
        scale = jnp.where(state < 0, jnp.max(jnp.abs(x)), state)
        wire = jnp.where(scale > 0, x, 0)
        return wire, jnp.where(active, scale, state)

    def decode(self, wire, like):
        return wire

    def residual(self, state, like):
        return jnp.zeros(like.shape, like.dtype)


class OtherShape(TopK):
    def decode(self, wire, like):
        return super().decode(wire, like).reshape(-1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WrongBytes, "declared bytes are those of the program: wire_bytes says"),
        (NoPasses, "those of the program: passes() says 0, the program makes"),
        (AlwaysActive, "leaves the state alone: encode with active=False changed"),
        (Finite, "arrives as such: a message with one"),
        (Forgetful, "add up: given, arrived and residual differ by"),
        (Silent, "add up: residual says that nothing is left, but a message of zeros brings"),
        (ZeroForGood, "after zero messages every message arrives as zeros"),
        (OtherShape, "decode returns float32"),
    ],
)
def test_a_codec_without_a_property_is_caught(kind, words):
    with pytest.raises(AssertionError) as error:
        check(kind(0.1))
    assert words in str(error.value)
    assert str(error.value).startswith(kind.__name__)


class Unsummed(compress.Scattered):
    """A reducer that forgets one of the ranks."""

    def _mean(self, wires, cut):
        return self._decoded(wires, cut)[0]


class FewBytes(compress.PowerSGD):
    def traffic(self, shape, shard):
        return super().traffic(shape, shard)[:1]


class FewPasses(compress.PowerSGD):
    def passes(self):
        return compress.Passes(0.5, 0.5)


class SilentReducer(compress.PowerSGD):
    """A reducer that keeps an error and does not tell it."""

    def residual(self, state, like, shard):
        return jnp.zeros(like.shape, jnp.float32)


@pytest.mark.parametrize(
    ("reducer", "words"),
    [
        (Unsummed(TopK(0.1)), "add up: given, arrived and residual"),
        (FewBytes(4), "wire_bytes says"),
        (FewPasses(4), "passes over data are not far below those of the program: passes() says 1, the program makes"),
        (SilentReducer(4), "add up: residual says that nothing is left, but a message of zeros brings"),
    ],
)
def test_a_reducer_without_a_property_is_caught(reducer, words):
    with pytest.raises(AssertionError) as error:
        check(reducer)
    assert words in str(error.value)
