"""Settings of compression, by place: in files, as overrides, and where older versions had them."""

import pytest

from paxtrain.config import from_dict, plan, to_dict
from paxtrain.config.load import load_config
from paxtrain.config.options import OptionValues
from paxtrain.errors import UserError

NESTED = {
    "backward": {"messages": "epilogue", "codec": "int8", "options": {"block": 32}},
    "data": {"stages": "0", "codec": "topk"},
}


def configured(compress):
    return from_dict({"mesh": {"pipe": 2}, "compress": compress})


def test_a_section_has_parts_by_place():
    found = configured(NESTED).compress
    assert (found.backward.messages, found.backward.codec, found.backward.options) == (
        "epilogue",
        "int8",
        {"block": 32},
    )
    assert (found.data.stages, found.data.codec, found.data.options) == ("0", "topk", {})
    again = from_dict(to_dict(configured(NESTED))).compress
    assert again == found
    assert hash(again) == hash(found)
    assert hash(found) != hash(found.changed(backward={"options": OptionValues(block=64)}))
    assert found.changed(error="none").backward is found.backward


def test_overrides():
    found = load_config("tiny", {"compress.backward.codec": "int4", "compress.backward.options.block": 32})
    assert found.compress.backward.options == OptionValues(block=32)
    assert load_config("tiny", {"compress.backward.messages": "all"}).compress.backward.chosen == "all"


def test_a_codec_that_is_named_takes_all_messages_unless_some_are_chosen():
    named = configured({"backward": {"codec": "int8"}, "data": {"codec": "int8"}}).compress
    assert (named.backward.chosen, named.forward.chosen, named.data.stages_of(2)) == ("all", "none", (0, 1))
    assert configured(NESTED).compress.backward.chosen == "epilogue"


def test_groups_of_data_ranks():
    groups = {"mesh.data": 4, "compress.data.codec": "int8", "compress.data.inside": 2}
    found = load_config("tiny", groups).compress.data
    assert (found.over(4), found.over(2)) == ("all", "none")
    outer = {"outer.every": 10, "outer.groups": 2, "run.steps": 100}
    with pytest.raises(UserError, match=r"data\.inside=4 does not divide the 2 data ranks that train together"):
        load_config("tiny", groups | {"compress.data.inside": 4, **outer})


def test_a_plan_keeps_codecs(tmp_path):
    config = configured(NESTED)
    made = plan.Plan(config.mesh, config.pipeline, config.batch, config.compress)
    plan.save(made, tmp_path / "plan.json")
    assert plan.load(tmp_path / "plan.json") == made


@pytest.mark.parametrize(
    ("compress", "words"),
    [
        ({"backward": {"size": 4}}, ["unknown configuration key compress.backward.size", "known here: codec, links"]),
        ({"backward": "all"}, ["compress.backward must be a mapping, got 'all'"]),
        ({"data_rank": 4}, ["unknown configuration key compress.data_rank; known here: backward, context, data"]),
        ({"backward": {"options": {"k": 1}}}, ["compress.backward.options.k", "lowrank", "compress.backward.rank"]),
        ({"backward": {"codec": "int8", "ranks": "4"}}, ["backward.ranks=4", "int8", "codec=lowrank"]),
        ({"data": {"codec": "int8", "adapt_every": 5}}, ["data.adapt_every=5", "int8", "codec=lowrank"]),
        ({"backward": {"codec": "int8", "messages": "some"}}, ["none, epilogue, all", "'some'"]),
    ],
)
def test_what_does_not_fit_is_one_sentence(compress, words):
    with pytest.raises(UserError) as error:
        configured(compress)
    assert all(word in str(error.value) for word in words), error.value
