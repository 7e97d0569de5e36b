"""Interrupted records continue."""

from experiments.lab.records import Records, publish


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


def test_published_records_of_what_was_not_run_anew_stay(tmp_path):
    made, published = tmp_path / "made", tmp_path / "published"
    for folder, name, seconds in ((published, "x", 1.0), (published, "y", 2.0), (made, "y", 3.0)):
        Records(folder / f"{name}.jsonl").add("a", seconds=[seconds])
        Records(folder / "environments.jsonl").add(name, date=f"day {seconds:g}")
    publish(made, published)
    assert [Records(published / f"{name}.jsonl")["a"]["seconds"] for name in "xy"] == [[1.0], [3.0]]
    dates = {line["key"]: line["date"] for line in Records(published / "environments.jsonl")}
    assert dates == {"x": "day 1", "y": "day 3"}
    before = (published / "environments.jsonl").read_text()
    publish(made, published)
    assert (published / "environments.jsonl").read_text() == before
