"""Interrupted records continue."""

from tests.cluster.records import Records


def test_the_last_line_of_a_key_counts(tmp_path):
    records = Records(tmp_path / "some" / "x.jsonl")
    records.add("a", seconds=[1.0])
    records.add("b", seconds=[2.0])
    records.add("a", seconds=[3.0])
    again = Records(records.path)
    assert len(again) == 2
    assert "a" in again
    assert "c" not in again
    assert again["a"]["seconds"] == [3.0]
    assert [line["key"] for line in again] == ["a", "b"]


def test_a_line_cut_off_while_it_was_written_is_measured_again(tmp_path):
    records = Records(tmp_path / "x.jsonl")
    records.add("a", seconds=[1.0])
    with records.path.open("a") as file:
        file.write('{"key": "b", "sec')
    again = Records(records.path)
    assert "b" not in again
    again.add("b", seconds=[2.0])
    assert Records(records.path)["b"]["seconds"] == [2.0]
