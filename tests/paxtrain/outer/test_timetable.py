"""The timetable of exchanges, beside the paper's rule in plain loops."""

import dataclasses

import pytest

from paxtrain.config import OuterConfig
from paxtrain.outer.timetable import Timetable

STEPS = 48


def events(table, steps=STEPS):
    """Return what happens at each step, as {kind: {step: fragment}}."""
    kinds = {"waited": table.waited, "under": table.under, "joined": table.joined}
    found = {kind: {n: rule(n) for n in range(1, steps + 1)} for kind, rule in kinds.items()}
    return {kind: {n: f for n, f in some.items() if f is not None} for kind, some in found.items()}


@pytest.mark.parametrize(
    ("every", "fragments", "overlap"), [(12, 1, 0), (12, 4, 0), (12, 4, 2), (12, 1, 11), (6, 2, 1)]
)
def test_each_fragment_is_sent_once_a_round_at_its_own_offset(every, fragments, overlap):
    """Fragment p is sent after the steps t with t = t_p (mod H), and comes tau steps later."""
    found = events(Timetable(OuterConfig(every, fragments=fragments, overlap=overlap), STEPS))
    offsets = [(p + 1) * every // fragments % every for p in range(fragments)]
    sent = {t: p for p, offset in enumerate(offsets) for t in range(1, STEPS + 1) if t % every == offset}
    assert len(sent) == STEPS // every * fragments
    if not overlap:
        assert found == {"waited": sent, "under": {}, "joined": {}}
    else:
        assert found["under"] == {t + 1: p for t, p in sent.items() if t < STEPS}
        assert found["joined"] == {t + overlap: p for t, p in sent.items() if t < STEPS}
        assert found["waited"] == {STEPS: fragments - 1}  # no step follows, under which it could travel


def test_what_an_earlier_start_has_waited_for_is_not_sent_again():
    outer = OuterConfig(12, fragments=4, overlap=2)
    longer = Timetable(outer, 2 * STEPS)
    settled = dataclasses.replace(longer, settled=STEPS)
    every, some = events(longer, 2 * STEPS), events(settled, 2 * STEPS)
    assert every["under"].items() - some["under"].items() == {(STEPS + 1, 3)}
    assert every["joined"].items() - some["joined"].items() == {(STEPS + 2, 3)}
    assert every["waited"] == some["waited"] == {2 * STEPS: 3}


@pytest.mark.parametrize("overlap", [0, 1, 2, 5])
def test_an_exchange_is_pending_from_the_step_over_it_to_the_one_before_it_is_taken(overlap):
    table, flying, pending = Timetable(OuterConfig(12, fragments=2, overlap=overlap), STEPS), False, []
    for number in range(1, STEPS + 1):
        flying = flying or table.under(number) is not None
        flying = flying and table.joined(number) is None
        pending += [number] * flying
    assert [number for number in range(1, STEPS + 1) if table.pending(number)] == pending
    assert bool(pending) == (overlap > 1)
