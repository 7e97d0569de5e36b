"""Plans come back as they were saved, and a file that is no plan is refused by its name."""

import dataclasses
import json

import pytest

from paxtrain.config import (
    BatchConfig,
    Config,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    plan,
    to_dict,
)
from paxtrain.config.plan import Plan, PlannedGroups
from paxtrain.errors import UserError
from tests.compress_settings import compression

PLAN = Plan(
    mesh=MeshConfig(data=2, pipe=2, tensor=2),
    pipeline=PipelineConfig(schedule="1f1b", pipe_layers="3,1", save="layer_inputs"),
    batch=BatchConfig(global_batch=32, micro_batch=4),
    compress=compression(backward_messages="epilogue", data_stages="0"),
    hosts=("a", "b"),
    devices_per_host=4,
    device_order=(0, 1, 4, 5, 2, 3, 6, 7),
    predicted={"seconds": 0.25, "source": "simulation"},
)


def file_of(tmp_path, **changes):
    """Write a plan's JSON with some keys changed, or left out if the new value is None."""
    path = tmp_path / "plan.json"
    plan.save(PLAN, path)
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def refusal(path) -> str:
    with pytest.raises(UserError) as error:
        plan.load(path)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_what_is_saved_comes_back(tmp_path):
    plan.save(PLAN, tmp_path / "plan.json")
    loaded = plan.load(tmp_path / "plan.json")
    assert loaded == PLAN
    assert loaded.predicted == PLAN.predicted
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1


def test_a_plan_knows_the_model_that_it_was_made_for(tmp_path):
    model = ModelConfig(layers=6, hidden=96, heads=4)
    made = dataclasses.replace(PLAN, predicted={"model": {"name": "mine", **plan.shape(model)}})
    plan.save(made, tmp_path / "plan.json")
    loaded = plan.load(tmp_path / "plan.json")
    assert plan.other_model(loaded, model) == plan.other_model(PLAN, model) == ""
    assert plan.other_model(loaded, dataclasses.replace(model, kv_heads=4, intermediate=384, dtype="float32")) == ""
    for field, value in {"layers": 7, "family": "llama", "sequence": 64, "kv_heads": 2, "vocab_size": 300}.items():
        told = plan.other_model(loaded, dataclasses.replace(model, **{field: value}))
        assert told.startswith(f"the plan was made for mine (model.{field}=") and f"has model.{field}={value}:" in told


@pytest.mark.parametrize(
    "kept", [3, [], {"layers": [1]}, {"name": {"a": "\x1b"}, "heads": None}, {"hidden": "9" * 5000}]
)
def test_whatever_a_file_says_of_its_model_is_at_most_a_sentence(kept):
    told = plan.other_model(dataclasses.replace(PLAN, predicted={"model": kept}), ModelConfig())
    assert told == plan.printable(told) and len(told) <= 2000


@pytest.mark.parametrize(("zero1", "shard"), [(True, "optimizer"), (False, "none")])
def test_a_plan_of_an_earlier_version_says_zero1(tmp_path, zero1, shard):
    mesh = {"data": 2, "pipe": 2, "tensor": 2, "zero1": zero1, "sequence_parallel": False, "reduce_dtype": "float32"}
    loaded = plan.load(file_of(tmp_path, mesh=mesh))
    assert loaded == dataclasses.replace(PLAN, mesh=MeshConfig(2, 2, 2, shard))
    assert loaded.mesh.zero1 == zero1


def test_only_the_sections_are_needed(tmp_path):
    path = file_of(tmp_path, hosts=None, devices_per_host=None, device_order=None, predicted=None)
    loaded = plan.load(path)
    assert (loaded.hosts, loaded.device_order, loaded.predicted) == ((), (), {})
    assert (loaded.mesh, loaded.pipeline, loaded.batch) == (PLAN.mesh, PLAN.pipeline, PLAN.batch)
    assert loaded.compress == PLAN.compress


GROUPS = {"every": 10, "groups": 2}
IN_GROUPS = dataclasses.replace(PLAN, outer=PlannedGroups(**GROUPS))


def test_groups_come_back_and_are_checked(tmp_path):
    loaded = plan.load(file_of(tmp_path, outer=GROUPS))
    assert loaded == IN_GROUPS
    for groups in (0, 2):
        values = to_dict(Config()) | {"outer": {"every": 10, "groups": groups, "lr": 0.5}}
        applied = loaded.apply(values).outer
        assert (applied.every, applied.groups, applied.lr) == (10, 2, 0.5)
    for outer, words in (
        ({"every": 20, "groups": 2}, r"outer\.every=10, but the configuration has outer\.every=20"),
        ({}, r"outer\.every=10, but the configuration has outer\.every=0"),
        ({"every": 10, "groups": 1}, r"outer\.groups=2, but the configuration has outer\.groups=1"),
    ):
        with pytest.raises(UserError, match=words):
            loaded.apply(to_dict(Config()) | {"outer": outer})
    with pytest.raises(UserError, match=r"without groups, but the configuration has outer\.every=10"):
        PLAN.apply(to_dict(Config()) | {"outer": GROUPS})
    assert "outer.groups=3 does not divide mesh.data=2" in refusal(file_of(tmp_path, outer=GROUPS | {"groups": 3}))
    assert "outer.every of a plan must be 1 or more" in refusal(file_of(tmp_path, outer=GROUPS | {"every": 0}))
    assert "unknown configuration key outer.lr" in refusal(file_of(tmp_path, outer=GROUPS | {"lr": 0.5}))


def test_a_plan_replaces_its_sections_only():
    config = Config(model=ModelConfig(hidden=64))
    applied = PLAN.apply(to_dict(config) | {"mesh": {"data": 3}})  # what is replaced need not fit
    assert (applied.mesh, applied.pipeline, applied.batch) == (PLAN.mesh, PLAN.pipeline, PLAN.batch)
    assert applied.compress == PLAN.compress
    assert (applied.model, applied.optimizer, applied.run) == (config.model, config.optimizer, config.run)


def test_what_is_replaced_makes_sense_by_itself():
    with pytest.raises(UserError, match=r"compress\.data\.start must"):
        PLAN.apply(to_dict(Config()) | {"compress": {"data": {"start": float("nan")}}})


def test_a_plan_leaves_nothing_to_defaults(tmp_path):
    path = file_of(tmp_path, batch={"global_batch": 8})
    with pytest.raises(UserError, match="batch leaves out micro_batch, data_micro_batches; a plan says all of"):
        plan.load(path)
    forward = to_dict(Config())["compress"]["forward"]
    del forward["rank"]
    path = file_of(tmp_path, compress=to_dict(Config())["compress"] | {"forward": forward})
    with pytest.raises(UserError, match=r"compress\.forward leaves out rank; a plan says all of"):
        plan.load(path)


def test_a_plan_that_does_not_fit_the_model():
    with pytest.raises(UserError, match="adds up to 4, but the model has 6 layers"):
        PLAN.apply({"model": {"layers": 6}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, ["version must be 1", "2"]),
        ({"version": None}, ["version must be 1", "None"]),
        ({"version": True}, ["version must be 1", "True"]),
        ({"version": 1.0}, ["version must be 1", "1.0"]),
        ({"compress": {"min_ratio": 10**400}}, ["compress.min_ratio must be a finite number", "about 400 digits"]),
        ({"meshes": {}}, ["unknown configuration key meshes", "mesh, module, outer, pipeline"]),
        ({"mesh": None}, ["mesh missing; known here"]),
        ({"mesh": [2, 2, 2]}, ["mesh must be a mapping", "[2, 2, 2]"]),
        (
            {"mesh": {"data": 2, "model": 4}},
            [
                "unknown configuration key mesh.model",
                "data, pipe, reduce_dtype, sequence_parallel, shard, shard_group, tensor",
            ],
        ),
        ({"mesh": {"data": "2"}}, ["mesh.data must be of type int", "'2'"]),
        ({"pipeline": {"schedule": "2f2b"}}, ["pipeline.schedule", "eager_1f1b", "'2f2b'"]),
        ({"batch": {"micro_batch": 0}}, ["batch.micro_batch must be positive"]),
        ({"device_order": [0, 1, 2, 3, 4, 5, 6]}, ["device_order", "8 devices", "7 entries"]),
        ({"device_order": [0, 1, 2, 3, 4, 5, 6, 6]}, ["device_order", "8 entries with 7 different"]),
        ({"device_order": [1, 2, 3, 4, 5, 6, 7, 8]}, ["device_order", "8 devices"]),
        ({"device_order": "01234567"}, ["device_order must be a list, got '01234567'"]),
        ({"device_order": [0.0, 1, 2, 3, 4, 5, 6, 7]}, ["device_order[0] must be of type int, got 0.0"]),
        ({"device_order": [False, True, 2, 3, 4, 5, 6, 7]}, ["device_order[0] must be of type int, got False"]),
        (
            {"mesh": dataclasses.asdict(MeshConfig(data=2**16))},
            ["device_order", "8 entries"],
        ),
        (
            {"mesh": dataclasses.asdict(MeshConfig()) | {"data": 10**12}},
            ["mesh.data may be at most 65,536, got 1000000000000"],
        ),
        ({"hosts": ["a", "a"]}, ["hosts must differ", "a, a"]),
        ({"hosts": ["a", "b", "c"]}, ["3 hosts", "12 devices", "needs 8"]),
        ({"hosts": ["a", 2]}, ["hosts[1] must be of type str, got 2"]),
        ({"devices_per_host": 2}, ["2 hosts", "4 devices", "needs 8"]),
        ({"hosts": [], "devices_per_host": 3}, ["devices_per_host must divide", "8 devices", "3"]),
        ({"hosts": [], "devices_per_host": -4}, ["devices_per_host must divide", "-4"]),
        ({"devices_per_host": "4"}, ["devices_per_host must be of type int, got '4'"]),
        ({"predicted": [1]}, ["predicted must be of type dict, got [1]"]),
    ],
)
def test_what_is_wrong_is_told_by_name(tmp_path, changes, words):
    message = refusal(file_of(tmp_path, **changes))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"mesh: 4", b"\xff\xfe", b"[1]", b"null", b"3", b'{"version": ' + b"1" * 5000 + b"}", b"[" * 100_000],
    ids=["empty", "cut off", "yaml", "binary", "list", "null", "number", "long number", "deep"],
)
def test_a_file_that_is_no_plan(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    refusal(path)


def test_a_path_that_is_no_file(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        assert "plan.json as paxtrain/config/plan.py describes it" in refusal(path)


def test_lists_in_lists_in_lists_are_refused_before_anything_walks_them(tmp_path):
    """dataclasses.asdict, which writes a plan, calls itself for each; 600 of them had raised RecursionError."""
    deep: object = 1.0
    for _ in range(30):
        deep = [deep]
    good = plan.load(file_of(tmp_path, predicted={"terms": deep}))
    assert plan.from_json(plan.to_json(good)).predicted == {"terms": deep}
    for _ in range(570):
        deep = {"in": deep}
    assert "at most 32 deep" in refusal(file_of(tmp_path, predicted={"terms": deep}))
