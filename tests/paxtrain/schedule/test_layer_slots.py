"""The layer slots that virtual stages with layers of several kinds share."""

import itertools
import random

import pytest

from paxtrain.schedule.layer_slots import filled, shared_slots


def is_found_in(layers, slots) -> bool:
    rest = iter(slots)
    return all(kind in rest for kind in layers)


def test_stages_of_one_kind_share_the_slots_of_the_longest_and_fill_the_first():
    assert shared_slots([("",) * 3, ("",) * 5, ("",) * 4]) == ("",) * 5
    assert filled(("",) * 5, ("",) * 3) == (0, 1, 2)


def test_a_dense_layer_of_the_first_stage_is_a_slot_that_the_others_leave_empty():
    slots = shared_slots([("dense", "experts"), ("experts", "experts")])
    assert slots == ("dense", "experts", "experts")
    assert filled(slots, ("dense", "experts")) == (0, 1) and filled(slots, ("experts", "experts")) == (1, 2)


@pytest.mark.parametrize("seed", range(20))
def test_two_stages_share_as_few_slots_as_a_search_of_all_sequences_finds(seed):
    rng = random.Random(seed)
    stages = [tuple(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(2)]
    slots = shared_slots(stages)
    least = next(
        n
        for n in itertools.count()
        if any(all(is_found_in(one, some) for one in stages) for some in itertools.product("ab", repeat=n))
    )
    assert len(slots) == least


@pytest.mark.parametrize("seed", range(20))
def test_layers_of_any_stages_lie_in_slots_of_their_kinds_in_order(seed):
    rng = random.Random(seed)
    stages = [tuple(rng.choices("abc", k=rng.randint(0, 6))) for _ in range(rng.randint(1, 6))]
    slots = shared_slots(stages)
    assert len(slots) <= sum(map(len, stages))
    for layers in stages:
        own = filled(slots, layers)
        assert list(own) == sorted(set(own)) and tuple(slots[slot] for slot in own) == layers
