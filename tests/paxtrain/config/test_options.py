"""Dotted settings of codecs: in files, as overrides and on command lines."""

import dataclasses

import pytest

from paxtrain.config import from_dict, plan, to_dict
from paxtrain.config.load import load_config
from paxtrain.config.options import CodecOptions, flat_argument
from paxtrain.errors import UserError

NESTED = {
    "backward": {"messages": "epilogue", "codec": "int8", "options": {"block": 32}},
    "data": {"stages": "0", "codec": "topk"},
}


def configured(compress):
    return from_dict({"mesh": {"pipe": 2}, "compress": compress})


def test_a_nested_section_is_the_flat_one():
    found = configured(NESTED).compress
    assert (found.backward, found.backward_codec, found.backward_options) == ("epilogue", "int8", {"block": 32})
    assert (found.data, found.data_codec, found.data_options) == ("0", "topk", {})
    again = from_dict(to_dict(configured(NESTED))).compress
    assert again == found
    assert hash(again) == hash(found)
    assert hash(found) != hash(dataclasses.replace(found, backward_options=CodecOptions(block=64)))


def test_overrides_take_both_spellings():
    dotted = load_config("tiny", {"compress.backward.codec": "int4", "compress.backward.options.block": 32})
    flat = load_config("tiny", {"compress.backward_codec": "int4", "compress.backward_options.block": 32})
    assert dotted == flat
    assert dotted.compress.backward_options == CodecOptions(block=32)
    assert load_config("tiny", {"compress.backward": "all"}).compress.backward == "all"


def test_a_codec_that_is_named_takes_all_messages_unless_some_are_chosen():
    named = configured({"backward_codec": "int8", "data_codec": "int8"}).compress
    assert (named.chosen("backward"), named.chosen("forward"), named.data_stages(2)) == ("all", "none", (0, 1))
    assert configured(NESTED).compress.chosen("backward") == "epilogue"


def test_groups_of_data_ranks_have_a_dotted_setting():
    found = load_config("tiny", {"mesh.data": 4, "compress.data.codec": "int8", "compress.data.inside": 2}).compress
    assert found.data_inside == 2
    assert (found.over_data(4), found.over_data(2)) == ("all", "none")
    assert flat_argument("--config.compress.data.inside=2") == "--config.compress.data_inside=2"
    outer = {"outer.every": 10, "outer.groups": 2, "run.steps": 100}
    with pytest.raises(UserError, match=r"data\.inside=4 does not divide the 2 data ranks that train together"):
        load_config("tiny", {"mesh.data": 4, "compress.data.codec": "int8", "compress.data.inside": 4, **outer})


def test_a_plan_keeps_codecs(tmp_path):
    config = configured(NESTED)
    made = plan.Plan(config.mesh, config.pipeline, config.batch, config.compress)
    plan.save(made, tmp_path / "plan.json")
    assert plan.load(tmp_path / "plan.json") == made


def test_arguments_of_a_command_line():
    assert flat_argument("--config.compress.backward.codec=a.b:C") == "--config.compress.backward_codec=a.b:C"
    assert flat_argument("--model.compress.data.options.k=3") == "--model.compress.data_options.k=3"
    assert flat_argument("--config.compress.data.stages=0,1") == "--config.compress.data=0,1"
    for same in ("--config.compress.backward=all", "compress.backward.codec=1", "--out=compress.backward.codec"):
        assert flat_argument(same) == same


@pytest.mark.parametrize(
    ("compress", "words"),
    [
        ({"backward": {"rank": 4}}, ["unknown configuration key compress.backward.rank"]),
        ({"backward": {"options": {"k": 1}}}, ["compress.backward.options.k", "lowrank", "compress.backward_rank"]),
        ({"backward_codec": "int8", "backward_ranks": "4"}, ["backward_ranks=4", "int8", "codec=lowrank"]),
        ({"data_codec": "int8", "data_adapt_every": 5}, ["data_adapt_every=5", "int8", "codec=lowrank"]),
        ({"backward_codec": "int8", "backward": "some"}, ["none, epilogue, all", "'some'"]),
    ],
)
def test_what_does_not_fit_is_one_sentence(compress, words):
    with pytest.raises(UserError) as error:
        configured(compress)
    assert all(word in str(error.value) for word in words), error.value
