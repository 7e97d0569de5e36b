"""A dataclass of options as flags: types, defaults, help and bounds are those of its fields and its docstring."""

import dataclasses

import pytest
from absl import flags

from paxtrain.errors import UserError
from paxtrain.knobs import check, define, given, knob


@dataclasses.dataclass(frozen=True)
class Meal:
    """What is eaten.

    Attributes:
        guests: number of guests,
            children too.
        courses: courses in their order.
        sizes: sizes of plates.
        notes: note to the cook; repeatable.
        drink: what is drunk.
        spice: share of spice.
        late: whether it is late.
        host: who invites.
        cook: who cooks.

    Raises:
        UserError: never here: what: this is.
    """

    guests: int = knob(2, least=1, most=8)
    courses: tuple[str, ...] = knob(("soup",), among=("soup", "fish"))
    sizes: tuple[int, ...] = knob((20, 30))
    notes: tuple[str, ...] = knob((), repeat=True)
    drink: str = knob("tea", among=("tea", "water"))
    spice: float = knob(0.5, least=0)
    late: bool = knob(False)
    host: str | None = knob(None)
    cook: str = "nobody"


@pytest.fixture
def values(monkeypatch):
    """The flags of a process of its own."""
    values = flags.FlagValues()
    for name in ("string", "list", "multi_string", "enum", "bool", "integer", "float"):
        original = getattr(flags, f"DEFINE_{name}")

        def bound(*args, original=original, **kwargs):
            return original(*args, flag_values=values, **kwargs)

        monkeypatch.setattr(flags, f"DEFINE_{name}", bound)
    monkeypatch.setattr(flags, "FLAGS", values)
    return values


def test_flags_are_the_fields(values):
    define(Meal, named={"late": "is_late"})
    assert {"guests", "courses", "sizes", "notes", "drink", "spice", "is_late", "host", "cook"} == set(values)
    assert values["guests"].help == "Number of guests, children too."
    assert values["courses"].help == "Courses in their order. Of soup, fish."
    assert values["cook"].help == "Who cooks."
    values(["meal"])
    assert given(Meal, named={"late": "is_late"}) == Meal()
    line = ["--guests=3", "--courses=fish,soup", "--sizes=1,2", "--notes=a,b", "--notes=c", "--spice=2", "--is_late"]
    values(["meal", *line, "--drink=water", "--host=x"])
    found = given(Meal, named={"late": "is_late"}, cook="me")
    assert found == Meal(3, ("fish", "soup"), (1, 2), ("a,b", "c"), "water", 2.0, True, "x", "me")


def test_some_fields_and_other_defaults(values):
    define(Meal, "guests", "courses", courses=["none"])
    assert set(values) == {"guests", "courses"} and values["courses"].default == ["none"]
    values(["meal", "--guests=5"])
    assert given(Meal, courses=()) == Meal(5, ())


@pytest.mark.parametrize("argument", ["--guests=0", "--guests=9", "--drink=milk", "--spice=-1"])
def test_the_command_line_is_held_to_the_bounds(values, argument):
    define(Meal)
    with pytest.raises(flags.IllegalFlagValueError):
        values(["meal", argument])


def test_numbers_in_lists_are_whole(values):
    define(Meal, "sizes")
    values(["meal", "--sizes=1,1.5"])
    with pytest.raises(UserError, match=r"--sizes must be positive integers joined by commas, got 1,1\.5"):
        given(Meal)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"guests": 9}, "--guests must be 1 to 8, got 9"),
        ({"spice": -1.0}, "--spice must be at least 0, got -1"),
        ({"spice": float("nan")}, "--spice must be a number, got nan"),
        ({"drink": "milk"}, "--drink must be one of tea, water, got 'milk'"),
        ({"courses": ("soup", "nuts")}, "--courses must be some of soup, fish, got 'nuts'"),
        ({"courses": ()}, "--courses must be some of soup, fish, got none"),
        ({"sizes": (1, 0)}, "--sizes must be positive integers joined by commas, got 1,0"),
        ({"sizes": (True,)}, "--sizes must be positive integers joined by commas, got True"),
    ],
)
def test_values_of_a_program_are_held_to_the_bounds(changes, words):
    check(Meal())
    with pytest.raises(UserError) as error:
        check(Meal(**changes))
    assert str(error.value) == words
    check(Meal(**changes), *changes)
