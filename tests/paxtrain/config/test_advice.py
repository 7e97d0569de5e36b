"""Whoever follows the advice of refusals is accepted, whichever advice it is and whatever else was set."""

import ast
import pathlib
import random
import traceback

import pytest

import paxtrain.config
from paxtrain.config import CompressConfig, Config, read_section
from paxtrain.config.load import nested
from paxtrain.errors import UserError
from tests.advice import refusal, steps_to_fit

FOLDER = pathlib.Path(paxtrain.config.__file__).parent
SCHEDULE = "schedule.csv"  # of two stages and two micro-batches, in the folder in which the tests run
XL = {"model.hidden": 1600, "model.heads": 25, "model.vocab_size": 50257}
SECONDS = ("stage_seconds", "reduce_seconds", "compressed_seconds")
GROUPS = {"outer.every": 10, "mesh.data": 4, "run.steps": 100}
# Settings that break a rule, by name: at least one for each rule that has advice.
CASES = {
    "model: heads": {"model.hidden": 130},
    "model: heads of a prime": XL | {"model.hidden": 1601},
    "model: key heads": {"model.family": "llama", "model.heads": 6, "model.hidden": 96, "model.kv_heads": 4},
    "model: heads and key heads": {
        "model.family": "llama", "model.hidden": 1600, "model.heads": 30, "model.kv_heads": 6,
    },
    "model: key heads of GPT-2": {"model.kv_heads": 3},
    "model: separator": {"model.separator": 257},
    "model: separator below": {"model.separator": -3},
    "data: samples of a stream": {"data.stream": "text.jsonl", "run.log_samples": True},
    "model: cuDNN": {"model.attention": "cudnn", "model.dtype": "float32"},
    "mesh: parts of the sequence on one device": {"mesh.sequence_parallel": True},
    "mesh: parts of sequences": {"mesh.context": 3},
    "mesh: parts of sequences, and of those": {"mesh.context": 8, "mesh.tensor": 2, "mesh.sequence_parallel": True,
                                               "model.sequence": 72},
    "mesh: heads in exchange": {"mesh.context_form": "heads", "mesh.context": 8},
    "mesh: parts of the sequence, odd heads": {"mesh.sequence_parallel": True} | XL,
    "mesh: groups that share nothing": {"mesh.shard_group": 2, "mesh.data": 2},
    "mesh: groups": {"mesh.shard": "weights", "mesh.shard_group": 3, "mesh.data": 4},
    "pipeline: in flight": {"pipeline.in_flight": 1},
    "pipeline: in flight and chunks": {"pipeline.in_flight": 1, "pipeline.virtual_stages": 2, "mesh.pipe": 2},
    "pipeline: idle": {"pipeline.idle": "compute", "pipeline.schedule": "1f1b"},
    "pipeline: chunks": {"pipeline.virtual_stages": 2, "mesh.pipe": 2},
    "pipeline: no chunks": {"pipeline.schedule": "interleaved_1f1b", "mesh.pipe": 2},
    "pipeline: chunks of a V": {"pipeline.schedule": "zb_v", "pipeline.virtual_stages": 4, "mesh.pipe": 2},
    "pipeline: save": {"pipeline.schedule": "zb_h1", "pipeline.save": "inputs"},
    "optimizer: decay": {"optimizer.schedule": "wsd"},
    "outer: groups without exchanges": {"outer.groups": 2, "mesh.data": 4},
    "outer: fragments without exchanges": {"outer.fragments": 3, "outer.overlap": 20, "run.steps": 100},
    "outer: mix": {"outer.mix": 0.25},
    "outer: mix in groups": {"outer.mix": 0.25} | GROUPS,
    "outer: fragments": {"outer.every": 12, "outer.fragments": 5, "outer.overlap": 2, "run.steps": 96, "mesh.data": 4},
    "outer: overlap": {"outer.overlap": 10} | GROUPS,
    "checkpoint: kept": {"checkpoint.keep_every": 250},
    "checkpoint: kept of none": {"checkpoint.keep_every": 10, "checkpoint.every": 0},
    "data: weights": {"data.train": "a=x,b=y"},
    "data: weights of one set": {"data.weights": "a=1"},
    "data: weights of another set": {"data.train": "a=x,b=y", "data.weights": "a=1,c=1"},
    "data: too few weights": {"data.train": "a=x,b=y", "data.weights": "a=1"},
    "compress: low rank of weights": {"compress.weights.codec": "lowrank", "mesh.data": 2},
    "compress: low rank of keys": {"compress.context.codec": "lowrank", "mesh.context": 2},
    "compress: options of no codec": {"compress.outer.options": {"block": 3}},
    "compress: options of low rank": {"compress.backward.options": {"block": 3}},
    "compress: ranks of another codec": {
        "compress.backward.codec": "int8", "compress.backward.ranks": "4", "mesh.pipe": 2,
    },
    "compress: adaptation of another codec": {
        "compress.data.codec": "int8", "compress.data.adapt_every": 5, "mesh.data": 2,
    },
    "compress: links of no codec": {"compress.forward.links": "0"},
    "compress: lowest rank": {"compress.data.rank_min": 256},
    "compress: residuals": {"compress.data.residual_low": 0.7},
    "compress: one of three times": {"compress.data.stage_seconds": "1,2", "mesh.pipe": 2},
    "compress: codec of two tables": {
        "compress.embedding.codec": "int8", "compress.embedding.sync": "unfused", "mesh.data": 2,
    },
    "profile from 0": {"profile": "0:3"},
    "profile of no step": {"profile": "13:13"},
    "profile of no step beyond": {"profile": "300:200"},
    "profile beyond": {"profile": "199:203"},
    "profile far beyond": {"profile": "1:100000000000000000000"},
    "vocabulary": XL | {"mesh.tensor": 5},
    "heads": XL | {"mesh.tensor": 6},
    "vocabulary, few rows": {"model.vocab_multiple": 1, "mesh.tensor": 2},
    "parts of the sequence": {"mesh.sequence_parallel": True, "model.sequence": 127, "mesh.tensor": 2},
    "parts of the sequence of three heads": {
        "mesh.sequence_parallel": True, "model.sequence": 127, "model.heads": 3, "model.hidden": 96, "mesh.tensor": 4,
    },
    "batch": {"mesh.data": 3},
    "batch of many ranks": {"mesh.data": 3, "mesh.tensor": 3, "mesh.pipe": 3, "optimizer.warmup_steps": 300},
    "ranks' batches": {"mesh.data": 3, "batch.data_micro_batches": "4,4"},
    "sum of ranks' batches": {"mesh.data": 2, "batch.data_micro_batches": "4,3"},
    "idle stages": {"mesh.data": 2, "batch.data_micro_batches": "5,3", "pipeline.idle": "compute"},
    "too few in flight": {"pipeline.schedule": "1f1b", "pipeline.in_flight": 2, "mesh.pipe": 4},
    "too many in flight": {"pipeline.schedule": "1f1b", "pipeline.in_flight": 8, "mesh.pipe": 4},
    "file of a schedule": {"pipeline.schedule": SCHEDULE},
    "file of a schedule, ranks' batches": {
        "pipeline.schedule": SCHEDULE, "mesh.data": 2, "mesh.pipe": 4, "batch.data_micro_batches": "5,3",
    },
    "file of a schedule, chunks": {"pipeline.schedule": SCHEDULE, "pipeline.virtual_stages": 2},
    "stages' layers": {"mesh.pipe": 2, "pipeline.pipe_layers": "1,2,1"},
    "sum of stages' layers": {"mesh.pipe": 2, "pipeline.pipe_layers": "1,2"},
    "layers": {"mesh.pipe": 5},
    "layers of chunks": {"mesh.pipe": 3, "pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_stages": 2},
    "one layer of chunks": {"model.layers": 1, "pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_stages": 2},
    "chunks of one stage": {"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_stages": 2},
    "warm-up": {"optimizer.warmup_steps": 300},
    "warm-up and decay": {"optimizer.schedule": "wsd", "optimizer.warmup_steps": 100, "optimizer.decay_steps": 101},
    "warm-up of one step": {"optimizer.schedule": "wsd", "optimizer.decay_steps": 101, "run.steps": 1},
    "warm-up of groups": {"outer.every": 7, "run.steps": 14, "optimizer.warmup_steps": 16, "mesh.data": 4},
    "resume": {"run.resume_step": 5, "checkpoint.resume": False},
    "no messages": {"compress.backward.codec": "int8", "compress.backward.options": {"block": 32}, "model.layers": 1},
    "messages of a V": {
        "compress.backward.codec": "int8", "pipeline.schedule": "zb_v", "pipeline.virtual_stages": 2, "mesh.pipe": 2,
    },
    "no messages, but links": {"compress.forward.messages": "all", "compress.forward.links": "0,2"},
    "fused": {"compress.embedding.sync": "fused", "model.layers": 1},
    "fused, untied": {"compress.embedding.sync": "fused", "model.tied_head": False},
    "unfused, untied": {"compress.embedding.sync": "unfused", "model.tied_head": False, "mesh.pipe": 2},
    "ranks of links": {"compress.backward.messages": "all", "compress.backward.ranks": "8,4,2", "mesh.pipe": 3},
    "ranks of too few links": {"compress.backward.messages": "all", "compress.backward.ranks": "8", "mesh.pipe": 4},
    "links": {"compress.backward.codec": "int8", "compress.backward.links": "0,2", "mesh.pipe": 3},
    "no links": {"compress.forward.codec": "int8", "compress.forward.links": "7", "mesh.pipe": 3},
    "stages": {"compress.data.stages": "0,2", "mesh.pipe": 2},
    "no stages": {"compress.data.stages": "7", "mesh.pipe": 2},
    "times": {f"compress.data.{name}": "1,2,3" for name in SECONDS} | {"mesh.pipe": 2},
    "codec of tables": {"compress.embedding.codec": "int8", "compress.embedding.options": {"block": 32}},
    "codec of tables in groups": {"compress.embedding.codec": "int8", "model.tied_head": False} | GROUPS,
    "codec of tables in two groups": {"compress.embedding.codec": "int8", "outer.groups": 4} | GROUPS,
    "codec of no groups": {"compress.outer.codec": "int8", "mesh.data": 2, "run.steps": 99},
    "ranks' batches of groups": {"outer.groups": 2, "batch.data_micro_batches": "3,1,2,2"} | GROUPS,
    "exchanges": {"outer.every": 7, "run.steps": 100, "mesh.data": 4},
    "exchanges of a prime": {"outer.every": 12, "outer.fragments": 3, "run.steps": 97, "mesh.data": 4},
    "fragments of layers": {"outer.every": 7, "outer.fragments": 7, "run.steps": 98, "mesh.data": 4},
    "fragments of layers, overlap": {"outer.every": 20, "outer.fragments": 5, "outer.overlap": 3, "mesh.data": 4},
    "stages that are measured": {"compress.data.stages": "selective", "mesh.pipe": 2} | GROUPS,
    "ranks that adapt": {"compress.data.stages": "all", "compress.data.adapt_every": 5} | GROUPS,
    "groups": {"outer.every": 10, "outer.groups": 3, "mesh.data": 8},
    "groups that sum": {
        "outer.every": 10, "outer.groups": 3, "mesh.data": 8, "compress.data.codec": "int8", "compress.data.inside": 2,
    },
    "sums of what is not compressed": {"compress.data.inside": 2, "mesh.data": 2},
    "sums of devices that share sequences": {
        "compress.data.codec": "int8", "compress.data.inside": 2, "mesh.data": 4, "mesh.context": 2,
    },
    "sums of ranks": {"compress.data.codec": "int8", "compress.data.inside": 3, "mesh.data": 4},
    "weights that are not split": {"compress.weights.codec": "int8", "mesh.shard": "none", "mesh.data": 2},
    "weights of one rank": {"compress.weights.codec": "int8", "compress.weights.options": {"block": 32}},
    "weights of groups": {"compress.weights.codec": "int8", "mesh.shard": "none"} | GROUPS,
    "shards of uneven ranks": {"mesh.shard": "weights", "mesh.data": 2, "batch.data_micro_batches": "5,3"},
    "shards of groups": {"mesh.shard": "weights", "mesh.shard_group": 2, "outer.groups": 2} | GROUPS,
    "shards of low rank": {"mesh.shard": "gradients", "mesh.data": 2, "compress.data.stages": "all"},
    "shards of some stages": {
        "mesh.shard": "weights", "mesh.data": 2, "mesh.pipe": 2, "compress.data.codec": "int8",
        "compress.data.stages": "0",
    },
    "shards of coded groups": {
        "mesh.shard": "weights", "mesh.data": 4, "mesh.shard_group": 2, "compress.data.codec": "int8",
    },
    "shards of tables": {"mesh.shard": "weights", "mesh.data": 2, "compress.embedding.codec": "int8"},
    "shards of tables apart": {"mesh.shard": "weights", "mesh.pipe": 2, "compress.embedding.sync": "unfused"},
    "keys of one device": {"compress.context.codec": "int8"},
    "keys of heads": {"compress.context.codec": "fp8", "mesh.context": 2, "mesh.context_form": "heads"},
    "weights of two groups": {"compress.weights.codec": "int8", "outer.groups": 2} | GROUPS | {"mesh.data": 2},
}  # fmt: skip
# Words of the rules about one setting: its range, its choices or its form.
ALONE = {
    "must be one of", "must be positive", "must be a finite number", "may be at most", "must not be negative",
    "must be in [0, 1", "must be 0 or more", "must be 1 or more", "must be positive integers joined by commas",
    "must be FIRST:END", "is in FLOP/s", "must name a directory", "has two data sets of the name",
    "must give each data set a positive number", "must be NAME=WEIGHT", "two weights; give it one",
    "a mixture repeats after at most", "must be links between stages", "must be none, all, selective",
    "as earlier versions called",
    "unknown configuration key", "must be of type", "must be numbers from 0 on", "run.loggers=", "must be a list",
    "missing{where}", "values, got {len(value)}",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _file_of_a_schedule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / SCHEDULE).write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n")


def wrong_by_themselves(values: dict) -> int:
    """Return how many parts of a configuration are refused without the others."""
    parts = nested(values)
    places, default = parts.pop("compress", {}), CompressConfig()
    sections = [(type(getattr(Config(), name)), name, part) for name, part in parts.items() if isinstance(part, dict)]
    sections += [(type(default.at(name)), f"compress.{name}", part) for name, part in places.items()]
    wrong = 0
    for cls, name, part in sections:
        try:
            read_section(cls, part, name)
        except UserError:
            wrong += 1
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_who_follows_an_advice_is_accepted(name):
    """Each part that is wrong by itself takes one step, and all between the parts takes one together."""
    assert steps_to_fit(CASES[name], most=wrong_by_themselves(CASES[name]) + 1)


def rules() -> dict[tuple[str, int], tuple[str, bool]]:
    """Return the text of each rule by its file and line, and whether it has advice."""
    found = {}
    for path in FOLDER.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        texts = {ast.unparse(x.targets[0]): ast.unparse(x.value) for x in nodes if isinstance(x, ast.Assign)}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "require":
                text = ast.unparse(node.args[1])
                found[path.name, node.lineno] = (texts.get(text, text), len(node.args) > 2)
    return found


def rule_of(error: UserError) -> tuple[str, int]:
    """Return the file and the line of the rule that has refused."""
    first = error.__context__ if isinstance(error.__context__, UserError) else error
    *_, caller, require = traceback.extract_tb(first.__traceback__)
    assert require.name == "require"
    return pathlib.Path(caller.filename).name, caller.lineno


def test_every_rule_about_several_settings_has_advice_that_is_followed():
    reached = {rule_of(error) for values in CASES.values() for error in [refusal(values)] if error}
    several = {rule for rule, (_, advises) in rules().items() if advises}
    assert len(several) > 50
    assert several == reached
    alone = [text for text, advises in rules().values() if not advises]
    assert [text for text in alone if not any(words in text for words in ALONE)] == []
    assert [words for words in ALONE if not any(words in text for text in alone)] == []


def test_so_is_who_follows_it_from_anywhere():
    """Settings drawn from sizes that divide each other rarely, many of them wrong at once: at most three steps."""
    draw = random.Random(0)
    sizes = {
        "model.family": ("gpt2", "llama"), "model.hidden": (96, 105, 1600, 130), "model.heads": (3, 4, 5, 25),
        "model.kv_heads": (0, 1, 2, 5), "model.vocab_size": (257, 50257), "model.sequence": (127, 128),
        "model.layers": (1, 3, 8), "mesh.tensor": (1, 2, 3, 4, 5), "mesh.data": (1, 2, 6), "mesh.pipe": (1, 2, 4),
        "mesh.sequence_parallel": (False, True), "mesh.shard": ("none", "optimizer", "weights"),
        "batch.global_batch": (16, 30),
        "batch.micro_batch": (2, 3), "run.steps": (40, 99), "optimizer.warmup_steps": (5, 60),
        "outer.every": (0, 0, 7, 10), "outer.fragments": (1, 3), "outer.groups": (0, 2, 3),
        "compress.backward.codec": ("", "int8"), "compress.backward.links": ("", "0,2"),
        "compress.data.stages": ("none", "0,2", "selective"), "compress.data.inside": (1, 2),
        "compress.weights.codec": ("", "int8"), "compress.embedding.codec": ("", "int8"),
        "compress.embedding.sync": ("auto", "fused"), "pipeline.pipe_layers": ("", "", "2,1"),
        "batch.data_micro_batches": ("", "", "2,3"), "profile": ("", "39:42"),
    }  # fmt: skip
    refused = 0
    for _ in range(40):
        values = {name: draw.choice(some) for name, some in sizes.items()}
        wrong = wrong_by_themselves(values)
        if wrong <= 2:
            refused += bool(steps_to_fit(values, most=wrong + 1))
    assert refused > 20


@pytest.mark.parametrize("tensor", [5, 25])
def test_the_vocabulary_is_padded_for_tensor(tensor):
    assert str(refusal(XL | {"mesh.tensor": tensor})).endswith(f"; model.vocab_multiple={128 * tensor} would fit")
