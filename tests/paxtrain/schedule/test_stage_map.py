"""Where virtual stages are: in turn, or to the last stage and back."""

import pytest

from paxtrain.schedule.stage_map import folded, in_turn


def test_virtual_stages_in_turn_and_in_a_v():
    assert in_turn(3, 2).stage_of == (0, 1, 2, 0, 1, 2)
    assert folded(3, 2).stage_of == (0, 1, 2, 2, 1, 0)
    assert folded(2, 3).stage_of == (0, 1, 1, 0, 0, 1)
    assert in_turn(3, 2).virtual_of.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folded(3, 2).virtual_of.tolist() == [[0, 1, 2], [5, 4, 3]]
    assert [place(3, 2).ends for place in (in_turn, folded)] == [(0, 2), (0,)]
    assert [place(3, 2).links for place in (in_turn, folded)] == [3, 2]
    assert in_turn(1, 1).ends == (0,) and in_turn(4, 1).links == 3
    layers = [10, 11, 12, 13, 14, 15]
    assert folded(3, 2).by_stage(layers).tolist() == [[10, 11, 12], [15, 14, 13]]
    assert folded(3, 2).by_model(folded(3, 2).by_stage(layers)).tolist() == layers


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_stage_gets_one_message_of_a_kind_in_each_lane(stages, chunks, step):
    for place in (in_turn, folded):
        at = place(stages, chunks)
        ways = {
            (at.stage_of[q], at.stage_of[q + step]) for q in range(stages * chunks) if 0 <= q + step < stages * chunks
        }
        received = {(receiver, at.lane(sender, receiver)) for sender, receiver in ways}
        assert len(received) == len(ways)
        assert {lane for _, lane in received} == set(range(at.lanes))
