"""Bad input to the mains: exit code 2 and one sentence that says what was given and what would work, nothing compiled.

The mains run inside this process, except three that prove the exit code of a real one.
"""

import itertools
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from paxtrain.config import CheckpointConfig, ModelConfig
from paxtrain.huggingface import __main__ as huggingface
from paxtrain.parallel.step import Trainer
from paxtrain.run import checkpoint, metrics, sampling
from tests import mains
from tests.paxtrain import bad_files

compare, prepare, sample, train = (mains.load(f"paxtrain.{name}") for name in ("compare", "prepare", "sample", "train"))
ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny.py"

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Good data, and files of every bad kind."""
    home = tmp_path_factory.mktemp("home")
    bad_files.make(home)
    return home


@pytest.fixture
def run_main(monkeypatch, capfd):
    """run_main(words, module, *flags): checks exit code, form, and that what is said on stderr has the words."""

    def compiles(_):
        pytest.fail("something is compiled before the input is known to be good")

    for name in ("step", "evaluate", "from_canonical", "canonical"):
        monkeypatch.setattr(Trainer, name, property(compiles))
    monkeypatch.setattr(Trainer, "init", compiles)

    def run(words, module, *arguments):
        assert mains.run(monkeypatch, module, *arguments) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        check_form(captured.err)
        assert all(word in captured.err for word in words), captured.err

    return run


def in_home(texts, home):
    """Return flags or words with the folder of good data and bad files in place of {home}."""
    return [text.format(home=home) for text in texts]


def check_form(said):
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert said.endswith("\n")
    assert "Traceback" not in said


def training(home, out, *more):
    """Return flags of a run that would work on the eight devices without `more`."""
    files = [f"--config.data.{name}={home / name}" for name in ("train", "validation")]
    config = [flag for flag in more if flag.startswith("--config=")] or [f"--config={TINY}"]
    more = [flag for flag in more if flag not in config]
    return [*config, "--cpu_devices=8", f"--config.run.out={out}", *files, *more]


# Flags, and what the sentence must say: what was given, and what would work.
BAD_CONFIGURATION = {
    "mesh of 6 on 8 devices": (
        ["mesh.data=3", "mesh.tensor=1", "batch.global_batch=36"],
        ["mesh.data=3 x mesh.pipe=2 x mesh.tensor=1 is 6 devices", "there are 8", "product is 8"],
    ),
    "heads": (
        ["mesh.data=1", "mesh.pipe=1", "mesh.tensor=8"],
        ["model.heads=4", "mesh.tensor=8", "tensor=4 would fit"],
    ),
    "hidden": (["model.hidden=130"], ["model.hidden=130", "model.heads=4", "2 or 5 heads would fit"]),
    "family": (["model.family=bert"], ["'bert'", "gpt2, llama"]),
    "keys' heads of GPT-2": (["model.kv_heads=2"], ["model.kv_heads=2 needs model.family=llama", "0 would work"]),
    "keys' heads": (
        ["model.family=llama", "model.kv_heads=3"],
        ["model.kv_heads=3 does not divide model.heads=4", "2 or 4 would fit"],
    ),
    "keys' heads over tensor": (
        ["model.family=llama", "model.kv_heads=1"],
        ["model.key_value_heads=1", "mesh.tensor=2", "tensor=1 would fit"],
    ),
    "parts of the sequence": (
        ["mesh.sequence_parallel=True", "model.sequence=255"],
        ["model.sequence=255", "not divisible by mesh.tensor=2", "model.sequence=254 or 256 would fit"],
    ),
    "parts of the sequence over one device": (
        ["mesh.sequence_parallel=True", "mesh.tensor=1", "mesh.data=4"],
        ["mesh.sequence_parallel splits the sequence over tensor", "mesh.tensor=1", "mesh.tensor of 2 or more"],
    ),
    "odd heads": (
        ["model.family=llama", "model.heads=4", "model.hidden=12"],
        ["model.hidden=12 / model.heads=4 leaves 3", "an even number"],
    ),
    "fused without a tie": (
        ["model.tied_head=False", "compress.embedding.sync=fused"],
        ["compress.embedding.sync=fused", "model.tied_head=False", "choose auto"],
    ),
    "vocabulary": (["model.vocab_multiple=1"], ["model.padded_vocab=257", "mesh.tensor=2", "tensor=1 or 257"]),
    "layers": (
        ["mesh.pipe=8", "mesh.data=1", "mesh.tensor=1"],
        ["model.layers=4", "mesh.pipe=8", "at most 4 would fit"],
    ),
    "named layers": (["pipeline.pipe_layers=3,2"], ["3,2 adds up to 5", "4 layers"]),
    "batch": (["batch.global_batch=30"], ["batch.global_batch=30", "batch.micro_batch=4", "24 or 32 would fit"]),
    "micro-batches of too few ranks": (
        ["batch.data_micro_batches=8"],
        ["batch.data_micro_batches=8 names 1 data rank", "mesh.data=2", "leave it out"],
    ),
    "micro-batches that do not fit the batch": (
        ["batch.data_micro_batches=4,3"],
        ["batch.data_micro_batches=4,3", "takes 28 sequences", "batch.global_batch=32", "global_batch=28 would fit"],
    ),
    "a rank without micro-batches": (["batch.data_micro_batches=8,0"], ["positive integers", "'8,0'"]),
    "uneven ranks of groups": (
        ["batch.data_micro_batches=5,3", "outer.every=5"],
        ["batch.data_micro_batches=5,3", "outer.every=5", "leave one of them out"],
    ),
    "uneven ranks that compute on scrap": (
        ["batch.data_micro_batches=5,3", "pipeline.idle=compute"],
        ["pipeline.idle=compute", "batch.data_micro_batches=5,3", "pipeline.idle=skip or auto"],
    ),
    "schedule": (["pipeline.schedule=zigzag"], ["'zigzag'", "eager_1f1b, gpipe, 1f1b, interleaved_1f1b"]),
    "chunks": (["pipeline.virtual_stages=2"], ["pipeline.virtual_stages=2", "interleaved_1f1b", "eager_1f1b"]),
    "key": (["mesh.foo=1"], ["mesh.foo", "known here: data, pipe, reduce_dtype, sequence_parallel, tensor, zero1"]),
    "section": (["foo=1"], ["foo", "known here: batch, checkpoint, compress, data, mesh"]),
    "key of an unknown section": (["foo.bar=1"], ["foo", "--config.section.key=value"]),
    "key of a value": (["run.steps.bar=1"], ["run.steps.bar", "--config.section.key=value"]),
    "word for a number": (["mesh.data=two"], ["--config.mesh.data=two", "int"]),
    "fraction for a number": (["mesh.data=2.5"], ["--config.mesh.data=2.5", "int"]),
    "number for a section": (["mesh=3"], ["--config.mesh=3"]),
    "word for a truth value": (["mesh.zero1=perhaps"], ["--config.mesh.zero1=perhaps", "boolean"]),
    "word for another": (["mesh.sequence_parallel=yes"], ["--config.mesh.sequence_parallel=yes", "boolean"]),
    "compression without messages": (
        ["compress.backward.messages=all", "mesh.pipe=1", "mesh.data=4"],
        ["compress.backward.messages=all", "mesh.pipe=1", "mesh.pipe of 2 or more"],
    ),
    "fused without copies": (
        ["compress.embedding.sync=fused", "mesh.pipe=1", "mesh.data=4"],
        ["tied copies", "choose auto"],
    ),
    "warm-up of a short run": (
        ["run.steps=30", "optimizer.warmup_steps=40"],
        ["optimizer.warmup_steps=40 does not fit into run.steps=30", "warmup_steps=3, or run.steps of 40 or more"],
    ),
    "rank": (
        ["compress.backward.rank=0", "compress.backward.messages=all"],
        ["compress.backward.rank must be positive", "0"],
    ),
    "rank too large": (
        ["compress.backward.messages=all", "compress.backward.rank=200"],
        ["compress.backward.rank=200", "512 x 128", "the largest useful rank is 51"],
    ),
    "rank over data": (["compress.data.stages=all"], ["compress.data.rank=128", "the largest useful rank is 42"]),
    "stages": (["compress.data.stages=0,2"], ["compress.data.stages=0,2 names stage 2", "stages 0 to 1"]),
    "stages as words": (["compress.data.stages=early"], ["none, all, selective or stages", "'early'"]),
    "ranks by link": (
        ["compress.backward.messages=all", "compress.backward.ranks=4,4"],
        ["names 2 links", "there are 1"],
    ),
    "links as words": (
        ["compress.backward.codec=int8", "compress.backward.links=slow"],
        ["compress.backward.links must be links", "'slow'"],
    ),
    "links that are not there": (
        ["compress.forward.codec=int8", "compress.forward.links=0,1"],
        ["compress.forward.links=0,1 names link 1", "mesh.pipe=2 has links 0 to 0"],
    ),
    "links without a codec": (
        ["compress.backward.links=0"],
        ["compress.backward.links=0 says where", "compress.backward.messages is none"],
    ),
    "no codec": (
        ["compress.backward.codec=int5"],
        ["compress.backward.codec=int5 is no codec", "int4, int8", "package.module:Class"],
    ),
    "codec that cannot be imported": (
        ["compress.data.codec=no_such.module:Codec"],
        ["compress.data.codec=no_such.module:Codec cannot be imported", "PYTHONPATH"],
    ),
    "option of a codec": (
        ["compress.backward.codec=int8", "compress.backward.options.blok=3"],
        ["compress.backward.codec=int8 has no option 'blok'", "block, feedback, rotate"],
    ),
    "word for an option": (
        ["compress.data.codec=topk", "compress.data.options.share=half"],
        ["compress.data.codec=topk takes share of type float, got 'half'"],
    ),
    "option out of bounds": (
        ["compress.forward.codec=topk", "compress.forward.options.share=2.0"],
        ["compress.forward.codec=topk: share must be above 0 and at most 1, got 2"],
    ),
    "options without a codec": (["compress.data.options.share=0.5"], ["options.share", "lowrank", "data.codec"]),
    "rank of another codec": (
        ["compress.backward.codec=int8", "compress.backward.ranks=4"],
        ["compress.backward.ranks=4 is of lowrank", "compress.backward.codec is int8"],
    ),
    "codec without messages": (
        ["compress.backward.codec=int8", "mesh.pipe=1", "mesh.data=4"],
        ["compress.backward.codec=int8 needs messages between stages", "mesh.pipe of 2 or more"],
    ),
    "codec of weights that are not gathered": (
        ["compress.weights.codec=int8", "mesh.zero1=False"],
        ["compress.weights.codec=int8 needs weights that are gathered", "mesh.zero1=True"],
    ),
    "codec of weights in groups of one": (
        ["compress.weights.codec=int8", "outer.every=20"],
        ["inside a group, and outer.every=20 makes 2 groups of mesh.data=2", "mesh.data of 4 or more, or fewer outer"],
    ),
    "rank above a part between groups": (
        ["outer.every=20", "compress.outer.codec=remainder", "compress.outer.options.rank=1000"],
        ["the codec LowRankRemainder(rank=1000", "does not take messages of [", "rank 1000 is above the full rank"],
    ),
    "rank above a part over data": (
        ["compress.data.codec=remainder", "compress.data.options.rank=1000"],
        ["the codec LowRankRemainder(rank=1000", "does not take messages of [", "rank 1000 is above the full rank"],
    ),
    "rank above a part of weights": (
        ["compress.weights.codec=remainder", "compress.weights.options.rank=1000"],
        ["the codec LowRankRemainder(rank=1000", "does not take messages of [", "rank 1000 is above the full rank"],
    ),
    "low rank of weights": (["compress.weights.codec=lowrank"], ["compress.weights.codec=lowrank is not offered"]),
    "codec that saves nothing": (
        ["compress.data.codec=identity"],
        ["compress.data.codec=identity makes no kernel", "smaller min_ratio"],
    ),
    "times": (["compress.data.stage_seconds=1,2"], ["must be given together"]),
    "kernels": (["compress.implementation=triton"], ["triton needs NVIDIA A100", "cpu", "auto or xla"]),
    "negative": (["run.steps=-5"], ["run.steps must be positive", "-5"]),
    "warm-up": (["optimizer.warmup_steps=600"], ["optimizer.warmup_steps=600", "run.steps=500"]),
    "optimizer": (["optimizer.name=lion"], ["optimizer.name", "adamw, muon", "'lion'"]),
    "momentum": (["optimizer.muon_momentum=1.0"], ["optimizer.muon_momentum must be in [0, 1)", "1.0"]),
    "iterations": (["optimizer.muon_steps=0"], ["optimizer.muon_steps must be positive", "0"]),
    "size of updates": (["optimizer.muon_rms=-0.2"], ["optimizer.muon_rms must not be negative", "-0.2"]),
    "steps to profile": (["profile=12"], ["profile='12'", "FIRST:END", "10:13"]),
    "steps to profile as words": (["profile=a:b"], ["profile='a:b'", "10:13"]),
    "steps to profile backwards": (["profile=13:13"], ["profile=13:13", "no step", "13:14"]),
    "steps to profile from 0": (["profile=0:3"], ["profile=0:3", "counted from 1"]),
    "steps to profile without end": ([f"profile=1:{10**20}"], ["profile=1:", "run.steps=500"]),
    "steps to profile of thousands of digits": ([f"profile=1:{'9' * 5000}"], ["profile='1:9999", "10:13"]),
    "stages of thousands of digits": ([f"compress.data.stages={'9' * 5000}"], ["none, all, selective or stages"]),
    "stages in digits of another script": (
        ["compress.data.stages=\u0660"],
        ["none, all, selective or stages", "'\u0660'"],
    ),
    "ranks beyond floats": ([f"compress.backward.ranks={10**400}"], ["compress.backward.ranks must be numbers"]),
    "number in digits of another script": (["model.hidden=\uff11\uff12\uff18"], ["--config.model.hidden=", "0 to 9"]),
    "number with an underline": (["model.hidden=1_2_8"], ["--config.model.hidden=1_2_8 is no number"]),
    "weight in digits of another script": (
        ["data.train=a={home}/train", "data.weights=a=\u0661"],
        ["data.weights", "a positive number", "a=\u0661"],
    ),
    "weights without end": (
        ["data.train=a={home}/train,b={home}/few", f"data.weights=a=1/{10**3000},b=1/{10**3000 + 1}"],
        ["data.weights", "a positive number"],
    ),
    "steps to profile beyond": (["profile=499:502"], ["profile=499:502", "step 501", "run.steps=500"]),
    "seed": ([f"run.seed={2**64}"], ["run.seed may be at most 9,223,372,036,854,775,807"]),
    "missing data": (["data.train=nowhere/train"], ["nowhere/train"]),
    "missing validation": (["data.validation=nowhere/validation"], ["nowhere/validation"]),
    "empty index": (["data.train={home}/empty"], ["empty.idx is empty", "write the data set again"]),
    "empty tokens": (["data.train={home}/no_ids"], ["no_ids.bin"]),
    "cut index": (["data.train={home}/cut_index"], ["cut_index.idx is cut off", "40 bytes"]),
    "cut tokens": (["data.train={home}/cut_ids"], ["cut_ids.bin", "100 bytes"]),
    "no index": (["data.train={home}/magic"], ["magic.idx is not a Megatron index", "NOTMAGIC!", "MMIDIDX"]),
    "sets without weights": (
        ["data.train=a={home}/train,b={home}/few"],
        ["the data sets a, b", "data.weights is empty"],
    ),
    "weight of no set": (["data.train=a={home}/train", "data.weights=a=1,c=2"], ["'c'", "data.train has a"]),
    "negative weight": (
        ["data.train=a={home}/train,b={home}/few", "data.weights=a=1,b=-0.5"],
        ["a positive number", "b=-0.5"],
    ),
    "name clash": (
        ["data.validation=a={home}/train,a={home}/few"],
        ["data.validation", "two data sets of the name a"],
    ),
    "set with too few tokens": (
        ["data.train=a={home}/train,b={home}/few", "data.weights=a=1,b=1"],
        ["few.bin has 20 tokens", "model.sequence=128"],
    ),
    "validation set that is missing": (["data.validation=a={home}/train,b=nowhere/x"], ["nowhere/x"]),
    "sets of different tokenizers": (
        ["data.train=a={home}/first/train,b={home}/second/train", "data.weights=a=1,b=1"],
        ["first/tokenizer.json and", "second/tokenizer.json are different tokenizers", "the same one"],
    ),
    "tokenizer that is none": (
        ["data.train={home}/first/train"],
        ["first/tokenizer.json is not a valid tokenizer.json"],
    ),
    "a flat name of older versions": (
        ["compress.backward_rank=4"],
        ["--config.compress.backward_rank is written --config.compress.backward.rank now"],
    ),
    "a value of older versions": (
        ["compress.data=all"],
        ["--config.compress.data is written --config.compress.data.stages now"],
    ),
    "an option of older versions": (
        ["compress.backward.codec=int8", "compress.backward_options.block=32"],
        ["--config.compress.backward_options.block is written --config.compress.backward.options.block now"],
    ),
    "separator outside the vocabulary": (["model.separator=257"], ["model.separator", "model.vocab_size=257"]),
    "separator that separates nothing": (
        ["model.separator=7"],
        ["train.bin begins with token 0 and ends with token 256", "model.separator=7", "or -1 for none"],
    ),
    "small vocabulary": (["model.vocab_size=100"], ["train.bin", "100"]),
    "long sequences": (["model.sequence=512"], ["train.bin has 257 tokens", "model.sequence=512", "at most 256"]),
    "unwritable": (["run.out=/dev/null/x"], ["cannot write to /dev/null/x", "name a directory that can be written"]),
    "output is a file": (["run.out={home}/a_file"], ["cannot write to", "a_file", "name a directory"]),
}


@pytest.mark.parametrize(("overrides", "words"), BAD_CONFIGURATION.values(), ids=BAD_CONFIGURATION.keys())
def test_training_with_a_bad_configuration(home, tmp_path, run_main, overrides, words):
    before = files(home)
    overrides = [f"--config.{override}" for override in in_home(overrides, home)]
    run_main(words, train, *training(home, tmp_path / "out", *overrides))
    assert not (tmp_path / "out").exists()
    assert files(home) == before


BAD_FLAGS = {
    "missing configuration file": (["--config=nowhere.py"], ["nowhere.py", "name one such as configs/tiny.py"]),
    "folder as configuration file": (["--config={home}"], ["directory", "name one such as configs/tiny.py"]),
    "configuration file that is no Python": (["--config={home}/syntax.py"], ["syntax.py, line 1"]),
    "configuration file without its imports": (["--config={home}/imports.py"], ["no_such_module"]),
    "configuration file that looks for a key": (["--config={home}/key.py"], ["model"]),
    "positional argument": (
        ["configs/tiny.py"],
        ["unexpected argument 'configs/tiny.py'", "--config.section.key=value"],
    ),
    "unknown flag": (["--meshes=3"], ["'meshes'"]),
    "no number": (["--cpu_devices=many"], ["--cpu_devices=many"]),
    "negative number": (["--cpu_devices=-1"], ["--cpu_devices=-1", "[0, 1024]"]),
    "devices without end": (["--cpu_devices=40000"], ["--cpu_devices=40000", "[0, 1024]"]),
    "digits of another script": (["--cpu_devices=\u0668"], ["--cpu_devices=\u0668 is no number", "0 to 9"]),
    "digits of another script, apart": (["--cpu_devices", "\u0668"], ["--cpu_devices=\u0668 is no number"]),
    "processes without end": (
        ["--coordinator=localhost:1234", f"--num_processes={2**64}", "--process_id=0"],
        [f"--num_processes={2**64}", "[1, 65536]"],
    ),
    "no address": (["--coordinator=garbage", "--num_processes=2", "--process_id=0"], ["HOST:PORT", "'garbage'"]),
    "no port": (["--coordinator=localhost:0", "--num_processes=2", "--process_id=1"], ["1 to 65535", "'localhost:0'"]),
    "no time limit": (["--coordinator_timeout=inf"], ["--coordinator_timeout=inf", "[1, 1000000]"]),
    "no number of seconds": (["--coordinator_timeout=nan"], ["--coordinator_timeout=nan", "a number of seconds"]),
    "part of the flags": (["--num_processes=2"], ["--coordinator, --process_id missing", "go together"]),
    "process out of range": (
        ["--coordinator=localhost:1234", "--num_processes=2", "--process_id=2"],
        ["--process_id must be in [0, 2)", "got 2"],
    ),
    "missing plan": (["--plan=nowhere.json"], ["nowhere.json", "name a plan.json"]),
    "plan for 4 devices": (["--plan={home}/four.json"], ["is 4 devices", "there are 8", "product is 8"]),
    "plan that is no JSON": (["--plan={home}/no_json.json"], ["no_json.json", "line 1", "name a plan.json"]),
    "plan with a device twice": (["--plan={home}/twice.json"], ["twice.json", "device_order", "4 devices once"]),
    "plan for another model": (["--plan={home}/eight.json"], ["model.layers=4", "mesh.pipe=8", "at most 4"]),
}


@pytest.mark.parametrize(("given", "words"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_training_with_bad_flags(home, tmp_path, run_main, given, words):
    run_main(words, train, *training(home, tmp_path / "out", *in_home(given, home)))
    assert not (tmp_path / "out").exists()


def test_configuration_files_without_overrides(home, run_main):
    """Without them nothing looks into it while flags are parsed."""
    run_main(["nowhere.py"], train, "--config=nowhere.py")
    run_main(["get_config() must return a ConfigDict"], train, f"--config={home / 'none.py'}")


def test_a_checkpoint_of_another_architecture_is_left_alone(home, tmp_path, run_main):
    architecture = sampling.architecture(ModelConfig(hidden=64, layers=6))
    with checkpoint.Checkpoints(tmp_path / sampling.CHECKPOINTS, CheckpointConfig()) as checkpoints:
        checkpoints.save(7, {"params": {"w": jnp.arange(8.0)}}, {"model": architecture, "step": 7})
    before = files(tmp_path)
    run_main(("another model", "hidden", "64", "128", "layers", "6", "4"), train, *training(home, tmp_path))
    assert before.items() <= files(tmp_path).items()


def files(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ["--checkpoint must have a value"]),
        (["--checkpoint={home}"], ["no checkpoint in {home}/checkpoints", "name the checkpoint directory"]),
        (["--checkpoint={home}/nowhere"], ["no checkpoint in {home}/nowhere"]),
        (["--checkpoint={home}", "--tokens=0"], ["--tokens=0", "positive"]),
        (["--checkpoint={home}", "--temperature=hot"], ["--temperature=hot", "float"]),
        (["--checkpoint={home}", "--temperature=nan"], ["--temperature must be a number", "nan"]),
        (["--checkpoint={home}", "--seed=9223372036854775808"], ["--seed=9223372036854775808"]),
        (["--checkpoint={home}", "def"], ["unexpected argument 'def'", "--prompt="]),
    ],
)
def test_sampling(home, run_main, given, words):
    run_main(in_home(words, home), sample, *in_home(given, home))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--input={home}/nowhere.txt"], ["nowhere.txt names no files", "text files, folders or globs"]),
        (["--input="], ["--input", "text files, folders or globs"]),
        (["--input={home}/latin1.txt"], ["latin1.txt is not UTF-8", "0xf6 at offset 2", "convert the file"]),
        (["--input={home}/a_file", "--tokenizer=words"], ["--tokenizer=words", "bytes", "bpe", "gpt2"]),
        (["--input={home}/a_file", "--vocab_size=1000"], ["--vocab_size=1000", "--tokenizer=bpe"]),
        (["--input={home}/a_file", "--tokenizer=bpe", f"--vocab_size={2**32}"], ["is too large", "16,777,216 ids"]),
        (["--input={home}/a_file", "--out=/dev/null/x"], ["cannot write to /dev/null/x", "writable directory"]),
        (["{home}/a_file"], ["unexpected argument", "--input="]),
    ],
)
def test_preparing(home, tmp_path, run_main, given, words):
    out = [] if any(flag.startswith("--out") for flag in given) else [f"--out={tmp_path / 'out'}"]
    run_main(words, prepare, *out, *in_home(given, home))
    assert not list((tmp_path / "out").glob("*")), "nothing is left by halves"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ["say export or import", "got nothing"]),
        (["expert"], ["say export or import", "got 'expert'"]),
        (["export"], ["export needs --checkpoint"]),
        (["export", "--checkpoint={home}", "--out={home}/hf"], ["no checkpoint in {home}/checkpoints"]),
        (["export", "--dtype=float16"], ["--dtype=float16", "float32|bfloat16"]),
        (["import", "--model={home}"], ["import needs --config"]),
        (["import", "--model={home}", f"--config={TINY}"], ["there is no {home}/config.json"]),
        (["import", "--model={home}/a_file", f"--config={TINY}"], ["{home}/a_file/config.json cannot be read"]),
        (["import", "--model={home}", "--config=nowhere.py"], ["nowhere.py"]),
        (["import", "--model={home}", f"--config={TINY}", "--out={home}/hf"], ["--out is for export", "run.out"]),
        (["export", "--checkpoint={home}", "--out={home}/hf", f"--config={TINY}"], ["--config is for import"]),
    ],
)
def test_models_of_hugging_face(home, run_main, given, words):
    run_main(in_home(words, home), huggingface, *in_home(given, home))
    assert not (home / "hf").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ["--runs must have a value"]),
        (["--runs={home}/nowhere"], ["nowhere/metrics.jsonl"]),
        (["--runs="], ["--runs names no folder", "--runs=runs/a,runs/b"]),
        (["--runs={home}/run", "--out={home}/nowhere/a.png"], ["cannot write to {home}/nowhere/a.png", "No such file"]),
        (["--runs={home}/run", "--out={home}/a.txt"], ["--out={home}/a.txt", "a .png"]),
        (["{home}/run"], ["unexpected argument", "--runs=FOLDER,FOLDER"]),
    ],
)
def test_comparing_runs(home, tmp_path, run_main, given, words):
    with metrics.Metrics(home / "run", primary=True) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 1.0})
    defaults = [f"--runs={home / 'run'}"] * bool(given) + [f"--out={tmp_path / 'out.png'}"]
    run_main(in_home(words, home), compare, *defaults, *in_home(given, home))


def test_commands_leave_with_2(home, tmp_path):
    """Really: the flags of the default configuration file are read earlier there, and eight devices are really made."""
    out = tmp_path / "out"
    more = ("--config.mesh.data=3", "--config.mesh.tensor=1", "--config.batch.global_batch=36")
    commands = {
        "is 6 devices, but there are 8": ["paxtrain.train", *training(home, out, *more)],
        "mesh.foo": ["paxtrain.train", "--config.mesh.foo=1", f"--config.run.out={out}"],
        "no checkpoint in": ["paxtrain.sample", f"--checkpoint={home}"],
    }
    processes = [
        subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for command in commands.values()
    ]
    for words, process in itertools.zip_longest(commands, processes):
        _, said = process.communicate(timeout=300)
        check_form(said)
        assert words in said
        assert process.returncode == 2
    assert not out.exists()
