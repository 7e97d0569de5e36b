"""Codecs by name and by path, and what is said of names and options that do not fit."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Optional

import pytest

import compress
from compress.codecs import named
from compress.codecs.quantised import QuantisedBlocks
from compress.codecs.topk import TopK
from compress.reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Sized as Missing

HERE = __name__


@dataclasses.dataclass(frozen=True)
class Halves(compress.Identity):
    """A codec with options of every type, one of which is required."""

    count: int
    share: float = 0.5
    name: str = "a"
    on: bool = True
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if self.count < 0:
            raise ValueError(f"count must not be negative, got {self.count}")


@dataclasses.dataclass(frozen=True)
class Perhaps(compress.Identity):
    """A codec with options of unions and of a Literal."""

    seed: int | None = None
    scale: Optional[float] = None  # noqa: UP045  # the older spelling of a union
    width: int | str = 1
    kind: Literal["a", "b"] = "a"
    other: Any = 0


@dataclasses.dataclass(frozen=True)
class Unread(compress.Identity):
    """A codec with an annotation that only type checkers can read."""

    count: "Missing" = ()


@dataclasses.dataclass
class NotFrozen(compress.Codec):
    pass


@dataclasses.dataclass(frozen=True)
class NoCodec:
    pass


@dataclasses.dataclass(frozen=True)
class Raising(compress.Identity):
    def __post_init__(self):
        raise KeyError("nothing")


def test_names_and_paths():
    assert named.build("identity", {}) == compress.Identity()
    assert named.build("int8", {"block": 32}) == QuantisedBlocks(8, 32)
    assert named.build("int4", {"rotate": True}) == QuantisedBlocks(4, rotate=True)
    assert named.build("topk", {"share": 1}) == TopK(1.0)
    made = named.build(f"{HERE}:Halves", {"count": 3, "share": 1, "sizes": [1, 2]})
    assert made == Halves(3, 1.0, sizes=(1, 2))
    assert isinstance(made.share, float)
    reducer = named.build("compress.powersgd:PowerSGD", {"rank": 4}, (compress.Codec, Reducer))
    assert reducer == compress.PowerSGD(4)


def test_options_of_unions_take_a_value_of_any_of_their_types():
    made = named.build(f"{HERE}:Perhaps", {"seed": 3, "scale": 2, "width": "a", "kind": "b", "other": 1.5})
    assert made == Perhaps(3, 2.0, "a", "b", 1.5)
    assert type(made.scale) is float
    assert named.build(f"{HERE}:Perhaps", {"seed": None, "scale": None}) == Perhaps()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "int5",
            {},
            "int5 is no codec; known are fp8, identity, int4, int8, lowrank, remainder, sign, topk or "
            "package.module:Class",
        ),
        ("no_such.module:Class", {}, "cannot be imported (No module named 'no_such')"),
        (f"{HERE}:Nothing", {}, "cannot be imported (module"),
        (f"{HERE}:HERE", {}, "is no dataclass"),
        (f"{HERE}:NotFrozen", {}, "is not frozen"),
        (f"{HERE}:NoCodec", {}, "is no codec: it lacks decode, describe, encode"),
        ("int8", {"blok": 3}, "int8 has no option 'blok'; its options are block, feedback, rotate"),
        ("int8", {"bits": 4}, "int8 has no option 'bits'"),
        ("int8", {"block": "a"}, "int8 takes block of type int, got 'a'"),
        ("int8", {"block": True}, "int8 takes block of type int, got True"),
        ("int8", {"block": 7}, "int8: block must be even, at least 2 and at most 65536, got 7"),
        (f"{HERE}:Raising", {}, "Raising raises KeyError: 'nothing'"),
        ("tests.compress.codecs.raising:Codec", {}, "cannot be imported: its module raises SystemExit: 3"),
        ("identity", {"a": 1}, "identity has no option 'a'; it has none"),
        (f"{HERE}:Halves", {}, "needs the option count; its options are count, name, on, share, sizes"),
        (f"{HERE}:Perhaps", {"seed": "a"}, "Perhaps takes seed of type int or None, got 'a'"),
        (f"{HERE}:Perhaps", {"seed": True}, "Perhaps takes seed of type int or None, got True"),
        (f"{HERE}:Unread", {"count": 2}, "has annotations that cannot be read (NameError: name 'Missing' is not"),
        (f"{HERE}:Halves", {"count": -1}, "count must not be negative, got -1"),
        ("compress.powersgd:PowerSGD", {"rank": 4}, "PowerSGD is no codec: it lacks on_link, problem"),
    ],
)
def test_what_does_not_fit_is_one_sentence(name, options, words):
    with pytest.raises(ValueError) as error:
        named.build(name, options)
    assert words in str(error.value)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)
