"""The configuration keeps values that fit, and refuses others by name, with values that would fit.

The sentences of further refusals are in tests/paxtrain/test_bad_input.py.
"""

import dataclasses
import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from ml_collections import ConfigDict

from paxtrain.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    from_dict,
    to_dict,
)
from paxtrain.config.data import DataConfig
from paxtrain.config.parallel import scans
from paxtrain.errors import UserError
from paxtrain.model import parameters, transformer
from tests.advice import advised

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
MIXED = {"train": "a=x,b=y"}


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        function(*args, **kwargs)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_to_dict_and_back():
    config = Config(
        model=ModelConfig(layers=7, dtype="float32", residual_dropout=0.1),
        mesh=MeshConfig(2, 2, 2, shard="none"),
        pipeline=PipelineConfig("interleaved_1f1b", 2, "2,2,2,1", "inputs", "on"),
        batch=BatchConfig(32, 4),
        optimizer=OptimizerConfig(schedule="wsd", decay_steps=30),
    )
    assert from_dict(to_dict(config)) == config
    assert from_dict(ConfigDict(to_dict(config))) == config
    assert hash(from_dict(to_dict(config))) == hash(config)


@pytest.mark.parametrize(
    ("train", "weights", "prefixes", "mixture"),
    [
        ("runs/x", "", {"": "runs/x"}, {"": 1}),
        ("runs/year=2024/a", "", {"": "runs/year=2024/a"}, {"": 1}),
        ("web=runs/x", "", {"web": "runs/x"}, {"web": 1}),
        ("web=w, a.b-c=/u=1/v", "web=0.70,a.b-c=0.3", {"web": "w", "a.b-c": "/u=1/v"}, {"a.b-c": 3, "web": 7}),
        ("a=x,b=y", "a=300,b=600", {"a": "x", "b": "y"}, {"a": 1, "b": 2}),
        ("a=x,b=y,c=z", "a=1/3,b=1/6,c=1e-3", {"a": "x", "b": "y", "c": "z"}, {"a": 1000, "b": 500, "c": 3}),
    ],
)
def test_data_sets_and_their_weights_in_smallest_whole_numbers(train, weights, prefixes, mixture):
    config = DataConfig(train=train, weights=weights)
    assert config.train_sets == prefixes
    assert list(config.mixture.items()) == list(mixture.items())


def test_what_is_left_out_keeps_its_default():
    assert from_dict({}) == Config()
    assert from_dict({"run": {"steps": 50}}) == Config(run=RunConfig(steps=50))


def test_an_integer_is_taken_for_a_float_and_nothing_else_is_converted():
    config = from_dict({"optimizer": {"learning_rate": 1}})
    assert type(config.optimizer.learning_rate) is float


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mehs": {}}, ["unknown configuration key mehs", "mesh", "pipeline"]),
        ({"mesh": 3}, ["mesh must be a mapping", "3"]),
        (3, ["the configuration must be a mapping", "3"]),
        ({"mesh": {"data": 2.0}}, ["mesh.data", "int", "2.0"]),
        ({"mesh": {"data": True}}, ["mesh.data", "int", "True"]),
        ({"mesh": {"zero1": 1}}, ["mesh.zero1", "bool", "1"]),
        ({"mesh": {"reduce_dtype": "float16"}}, ["mesh.reduce_dtype", "float32", "bfloat16", "float16"]),
        ({"mesh": {"data": None}}, ["mesh.data", "int", "None"]),
        ({"run": {"out": 5}}, ["run.out", "str", "5"]),
        ({"optimizer": {"beta1": "high"}}, ["optimizer.beta1", "float", "'high'"]),
    ],
)
def test_keys_and_types(values, words):
    message = refusal(from_dict, values)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (ModelConfig, {"hidden": 0}, ["model.hidden", "positive", "0"]),
        (ModelConfig, {"residual_dropout": 1.0}, ["model.residual_dropout", "[0, 1)", "1.0"]),
        (ModelConfig, {"dtype": "float16"}, ["model.dtype", "bfloat16, float32", "'float16'"]),
        (ModelConfig, {"separator": -2}, ["model.separator", "got -2"]),
        *[
            (DataConfig, {"train": text}, ["data.train", "one prefix, or named data sets", f"got '{text}'"])
            for text in ("a=x,y", "x,y", "a=x,=y", "a=x,", "a=x,b=")
        ],
        (DataConfig, {"weights": "a=1"}, ["data.weights=a=1", "with names", "data.train=runs/data/train"]),
        (DataConfig, MIXED | {"weights": "a=1"}, ["no weight for b", "a, b"]),
        (DataConfig, MIXED | {"weights": "a=1,b"}, ["NAME=WEIGHT", "'a=1,b'"]),
        (DataConfig, MIXED | {"weights": "a=1,a=2,b=3"}, ["gives the data set a two weights"]),
        *[
            (DataConfig, MIXED | {"weights": f"a=1,b={bad}"}, ["a positive number", f"got b={bad}"])
            for bad in ("0", "-1", "nan", "inf", "many", "1/0", "", "1e999999999")
        ],
        (DataConfig, MIXED | {"weights": "a=0.123456,b=0.876544"}, ["15,625 samples", "10,000", "four decimals"]),
        (ModelConfig, {"attention": "flash"}, ["model.attention", "auto, xla, cudnn", "'flash'"]),
        (MeshConfig, {"pipe": -1}, ["mesh.pipe", "positive", "-1"]),
        (PipelineConfig, {"save": "all"}, ["pipeline.save", "dots, layer_inputs, residuals, inputs", "'all'"]),
        (PipelineConfig, {"scan_layers": "yes"}, ["pipeline.scan_layers", "auto, on, off", "'yes'"]),
        (PipelineConfig, {"idle": "sleep"}, ["pipeline.idle", "auto, compute, skip", "'sleep'"]),
        (
            PipelineConfig,
            {"idle": "compute", "schedule": "1f1b"},
            ["pipeline.idle=compute", "pipeline.schedule=eager_1f1b", "got 1f1b", "pipeline.idle=auto"],
        ),
        (PipelineConfig, {"schedule": "interleaved_1f1b"}, ["virtual_stages", "2 or more", "got 1"]),
        (PipelineConfig, {"schedule": "zb_v"}, ["zb_v", "virtual_stages", "2 or more", "got 1"]),
        (
            PipelineConfig,
            {"schedule": "zb_v", "virtual_stages": 4},
            ["zb_v", "2 chunks per stage", "virtual_stages=4", "virtual_stages=2"],
        ),
        (PipelineConfig, {"schedule": "zb_h1", "save": "inputs"}, ["save=inputs", "zb_h1", "dots or residuals"]),
        (PipelineConfig, {"pipe_layers": "2,,2"}, ["pipeline.pipe_layers", "commas", "'2,,2'"]),
        (PipelineConfig, {"pipe_layers": "4,0"}, ["pipeline.pipe_layers", "positive", "'4,0'"]),
        (PipelineConfig, {"pipe_layers": "4;4"}, ["pipeline.pipe_layers", "commas", "'4;4'"]),
        (BatchConfig, {"micro_batch": 0}, ["batch.micro_batch", "positive", "0"]),
        (OptimizerConfig, {"schedule": "step"}, ["optimizer.schedule", "cosine, wsd, constant", "'step'"]),
        (OptimizerConfig, {"learning_rate": 0.0}, ["optimizer.learning_rate", "positive"]),
        (OptimizerConfig, {"learning_rate": math.nan}, ["optimizer.learning_rate", "positive", "nan"]),
        (OptimizerConfig, {"clip_norm": -1.0}, ["optimizer.clip_norm", "negative", "-1.0"]),
        (OptimizerConfig, {"beta1": 1.0}, ["optimizer.beta1", "[0, 1)", "1.0"]),
        (OptimizerConfig, {"clip_norm": math.inf}, ["optimizer.clip_norm", "finite", "inf"]),
        (OptimizerConfig, {"schedule": "wsd"}, ["wsd", "decay_steps above 0", "constant"]),
        (ModelConfig, {"attention": "cudnn", "dtype": "float32"}, ["attention=cudnn", "bfloat16", "float32"]),
        (OptimizerConfig, {"beta2": 1.5}, ["optimizer.beta2", "[0, 1)", "1.5"]),
        (CheckpointConfig, {"keep": 0}, ["checkpoint.keep", "positive"]),
        (CheckpointConfig, {"every": 100, "keep_every": 250}, ["keep_every=250", "multiple", "every=100"]),
        (CheckpointConfig, {"every": 0, "keep_every": 10}, ["keep_every=10", "every=0"]),
        (RunConfig, {"seed": -1}, ["run.seed", "negative"]),
        (RunConfig, {"seed": 2**63}, ["run.seed may be at most 9,223,372,036,854,775,807"]),
        (RunConfig, {"out": ""}, ["run.out", "directory", "empty"]),
        (RunConfig, {"peak_flops": 312}, ["run.peak_flops=312 is in FLOP/s; 312 TFLOP/s would be 3.12e+14"]),
    ],
)
def test_values_of_one_section(section, values, words):
    message = refusal(section, **values)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"batch": {"global_batch": 3, "micro_batch": 4}}, ["batch.global_batch=3", "batch.micro_batch=4", "4 would"]),
        (
            {"mesh": {"pipe": 3}, "pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}},
            ["model.layers=4", "6 virtual stages", "pipeline.virtual_stages=2"],
        ),
        (
            {"pipeline": {"schedule": "interleaved_1f1b", "virtual_stages": 2}},
            ["interleaved_1f1b", "mesh.pipe of 2 or more", "got 1"],
        ),
        ({"mesh": {"pipe": 2}, "pipeline": {"pipe_layers": "1,2,1"}}, ["names 3 stages", "pipe=2", "needs 2"]),
        ({"mesh": {"pipe": 2}, "pipeline": {"pipe_layers": "1,2"}}, ["adds up to 3", "4 layers"]),
        (
            {"optimizer": {"schedule": "wsd", "warmup_steps": 100, "decay_steps": 101}},
            ["warmup_steps=100", "decay_steps=101", "run.steps=200"],
        ),
    ],
)
def test_values_that_do_not_fit_each_other(sections, words):
    message = refusal(from_dict, sections)
    assert all(word in message for word in words), message


@few
@hypothesis.given(st.integers(1, 300), st.integers(1, 300))
def test_suggested_heads_fit(hidden, heads):
    if hidden % heads == 0:
        assert ModelConfig(hidden=hidden, heads=heads).head_dim * heads == hidden
        return
    for change in advised(refusal(ModelConfig, hidden=hidden, heads=heads)):
        ModelConfig(**({"hidden": hidden, "heads": heads} | {name.partition(".")[2]: n for name, n in change.items()}))


@few
@hypothesis.given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 9))
def test_suggested_batches_fit(global_batch, data, micro_batch):
    if global_batch % (data * micro_batch) == 0:
        count = max(BatchConfig(global_batch, micro_batch).rank_micro_batches(MeshConfig(data)))
        assert count * data * micro_batch == global_batch
        return
    for change in advised(refusal(BatchConfig(global_batch, micro_batch).rank_micro_batches, MeshConfig(data))):
        assert max(BatchConfig(change["batch.global_batch"], micro_batch).rank_micro_batches(MeshConfig(data))) >= 1


@few
@hypothesis.given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 4))
def test_layers_are_shared_out_as_equally_as_they_get(layers, pipe, chunks):
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    pipeline = PipelineConfig(schedule=name, virtual_stages=chunks)
    if layers < pipe * chunks:
        refusal(pipeline.layers_per_virtual_stage, layers, pipe)
        return
    counts = pipeline.layers_per_virtual_stage(layers, pipe)
    assert len(counts) == pipe * chunks
    assert sum(counts) == layers
    assert sorted(counts, reverse=True) == list(counts)
    assert max(counts) - min(counts) <= 1


def test_layers_as_they_are_named():
    config = Config(
        model=ModelConfig(layers=12), mesh=MeshConfig(pipe=4), pipeline=PipelineConfig(pipe_layers="3, 4,4,1")
    )
    assert config.stage_layers == (3, 4, 4, 1)
    assert config.micro_batches == 8


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (ModelConfig(vocab_size=50257, layers=12, hidden=768, heads=12, sequence=1024), 124_439_808),
        (ModelConfig(vocab_size=50257, layers=48, hidden=1600, heads=25, sequence=1024), 1_557_611_200),
        (ModelConfig(), None),
    ],
)
def test_parameter_count(config, published):
    """The count agrees with the known numbers of GPT-2 small and XL, and with the sum over the real arrays."""
    padding = (config.padded_vocab - config.vocab_size) * config.hidden
    arrays = sum(math.prod(x.shape) for x in jax.tree.leaves(transformer.shapes(config)))
    assert parameters.published(config) == arrays - padding
    assert published is None or parameters.published(config) == published


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 128), (128, 128), (129, 256), (50257, 50304)])
def test_the_vocabulary_is_padded_whatever_the_mesh(vocab_size, padded):
    assert dataclasses.replace(ModelConfig(), vocab_size=vocab_size).padded_vocab == padded


@pytest.mark.parametrize(
    ("scan_layers", "counts", "loop"),
    [
        ("auto", (8, 8), False),
        ("auto", (9, 9), True),
        ("auto", (12, 8), False),  # the layers that all stages have are in the loop
        ("auto", (32,), False),
        ("auto", (33,), True),
        ("on", (2,), True),
        ("on", (1, 1), False),
        ("off", (99,), False),
    ],
)
def test_a_stage_that_is_alone_compiles_more_layers_one_by_one(scan_layers, counts, loop):
    assert PipelineConfig(scan_layers=scan_layers).scans(counts) is loop
    both = scans(scan_layers, np.array([min(counts), 1]), np.array([len(counts), len(counts)]))
    assert both.tolist() == [loop, False]
