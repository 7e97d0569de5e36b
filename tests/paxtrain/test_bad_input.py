"""Bad input to the mains: exit code 2 and one sentence that says what was given and what would work, nothing compiled.

The mains run inside this process, except three that prove the exit code of a real one.
"""

import itertools
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from paxtrain.config import CheckpointConfig, ModelConfig
from paxtrain.devices import host
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
def refused(home, monkeypatch, capfd, tmp_path):
    """Return refused(module, *flags): the sentence on stderr, after a check of its form and of the exit code."""

    def compiles(_):
        pytest.fail("something is compiled before the input is known to be good")

    for name in ("step", "evaluate", "from_canonical", "canonical"):
        monkeypatch.setattr(Trainer, name, property(compiles))
    monkeypatch.setattr(Trainer, "init", compiles)

    def run(module, *arguments):
        arguments = [str(argument).format(home=home) for argument in arguments]
        assert mains.run(monkeypatch, module, *arguments) == 2, arguments
        captured = capfd.readouterr()
        assert captured.out == "", arguments
        check_form(captured.err)
        for folder, word in ((home, "HOME"), (tmp_path, "OUT"), (ROOT, "ROOT")):
            captured = captured._replace(err=captured.err.replace(str(folder), word))
        # Of the libraries whose versions differ, only what they are asked is ours.
        said = re.sub(r"(tokenizer.json): .*", r"\1: ...", captured.err.removeprefix("error: ").strip())
        return re.sub(r"[\w./-]*python[\d.]* -m", "python -m", said)

    return run


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


BAD_CONFIGURATION = {
    "mesh of 6 on 8 devices": ["mesh.data=3", "mesh.tensor=1", "batch.global_batch=36"],
    "heads": ["mesh.data=1", "mesh.pipe=1", "mesh.tensor=8"],
    "hidden": ["model.hidden=130"],
    "family": ["model.family=bert"],
    "keys' heads of GPT-2": ["model.kv_heads=2"],
    "keys' heads": ["model.family=llama", "model.kv_heads=3"],
    "keys' heads over tensor": ["model.family=llama", "model.kv_heads=1"],
    "parts of the sequence": ["mesh.sequence_parallel=True", "model.sequence=255"],
    "parts of the sequence over one device": ["mesh.sequence_parallel=True", "mesh.tensor=1", "mesh.data=4"],
    "odd heads": ["model.family=llama", "model.heads=4", "model.hidden=12"],
    "fused without a tie": ["model.tied_head=False", "compress.embedding.sync=fused"],
    "vocabulary": ["model.vocab_multiple=1"],
    "layers": ["mesh.pipe=8", "mesh.data=1", "mesh.tensor=1"],
    "named layers": ["pipeline.pipe_layers=3,2"],
    "batch": ["batch.global_batch=30"],
    "micro-batches of too few ranks": ["batch.data_micro_batches=8"],
    "micro-batches that do not fit the batch": ["batch.data_micro_batches=4,3"],
    "a rank without micro-batches": ["batch.data_micro_batches=8,0"],
    "uneven ranks of groups": ["batch.data_micro_batches=5,3", "outer.every=5"],
    "uneven ranks that compute on scrap": ["batch.data_micro_batches=5,3", "pipeline.idle=compute"],
    "schedule": ["pipeline.schedule=zigzag"],
    "chunks": ["pipeline.virtual_stages=2"],
    "key": ["mesh.foo=1"],
    "section": ["foo=1"],
    "key of an unknown section": ["foo.bar=1"],
    "key of a value": ["run.steps.bar=1"],
    "word for a number": ["mesh.data=two"],
    "fraction for a number": ["mesh.data=2.5"],
    "number for a section": ["mesh=3"],
    "word for a truth value": ["mesh.sequence_parallel=perhaps"],
    "word for another": ["mesh.sequence_parallel=yes"],
    "compression without messages": ["compress.backward.messages=all", "mesh.pipe=1", "mesh.data=4"],
    "fused without copies": ["compress.embedding.sync=fused", "mesh.pipe=1", "mesh.data=4"],
    "warm-up of a short run": ["run.steps=30", "optimizer.warmup_steps=40"],
    "rank": ["compress.backward.rank=0", "compress.backward.messages=all"],
    "rank too large": ["compress.backward.messages=all", "compress.backward.rank=200"],
    "rank over data": ["compress.data.stages=all"],
    "stages": ["compress.data.stages=0,2"],
    "stages as words": ["compress.data.stages=early"],
    "ranks by link": ["compress.backward.messages=all", "compress.backward.ranks=4,4"],
    "links as words": ["compress.backward.codec=int8", "compress.backward.links=slow"],
    "links that are not there": ["compress.forward.codec=int8", "compress.forward.links=0,1"],
    "links without a codec": ["compress.backward.links=0"],
    "no codec": ["compress.backward.codec=int5"],
    "codec that cannot be imported": ["compress.data.codec=no_such.module:Codec"],
    "option of a codec": ["compress.backward.codec=int8", "compress.backward.options.blok=3"],
    "word for an option": ["compress.data.codec=topk", "compress.data.options.share=half"],
    "option out of bounds": ["compress.forward.codec=topk", "compress.forward.options.share=2.0"],
    "options without a codec": ["compress.data.options.share=0.5"],
    "rank of another codec": ["compress.backward.codec=int8", "compress.backward.ranks=4"],
    "codec without messages": ["compress.backward.codec=int8", "mesh.pipe=1", "mesh.data=4"],
    "codec of weights that are not gathered": ["compress.weights.codec=int8", "mesh.shard=none"],
    "codec of weights in groups of one": ["compress.weights.codec=int8", "outer.every=20"],
    "rank above a part between groups": [
        "outer.every=20",
        "compress.outer.codec=remainder",
        "compress.outer.options.rank=1000",
    ],
    "rank above a part over data": ["compress.data.codec=remainder", "compress.data.options.rank=1000"],
    "rank above a part of weights": ["compress.weights.codec=remainder", "compress.weights.options.rank=1000"],
    "rank above keys": [
        "mesh.data=1",
        "mesh.context=2",
        "compress.context.codec=remainder",
        "compress.context.options.rank=1000",
    ],
    "low rank of weights": ["compress.weights.codec=lowrank"],
    "codec that saves nothing": ["compress.data.codec=identity"],
    "times": ["compress.data.stage_seconds=1,2"],
    "kernels": ["compress.implementation=triton"],
    "negative": ["run.steps=-5"],
    "warm-up": ["optimizer.warmup_steps=600"],
    "optimizer": ["optimizer.name=lion"],
    "momentum": ["optimizer.muon_momentum=1.0"],
    "iterations": ["optimizer.muon_steps=0"],
    "size of updates": ["optimizer.muon_rms=-0.2"],
    "steps to profile": ["profile=12"],
    "steps to profile as words": ["profile=a:b"],
    "steps to profile backwards": ["profile=13:13"],
    "steps to profile from 0": ["profile=0:3"],
    "steps to profile without end": [f"profile=1:{10**20}"],
    "steps to profile of thousands of digits": [f"profile=1:{'9' * 5000}"],
    "stages of thousands of digits": [f"compress.data.stages={'9' * 5000}"],
    "stages in digits of another script": ["compress.data.stages=\u0660"],
    "ranks beyond floats": [f"compress.backward.ranks={10**400}"],
    "number in digits of another script": ["model.hidden=\uff11\uff12\uff18"],
    "number with an underline": ["model.hidden=1_2_8"],
    "weight in digits of another script": ["data.train=a={home}/train", "data.weights=a=\u0661"],
    "weights without end": [
        "data.train=a={home}/train,b={home}/few",
        f"data.weights=a=1/{10**3000},b=1/{10**3000 + 1}",
    ],
    "steps to profile beyond": ["profile=499:502"],
    "seed": [f"run.seed={2**64}"],
    "missing data": ["data.train=nowhere/train"],
    "missing validation": ["data.validation=nowhere/validation"],
    "empty index": ["data.train={home}/empty"],
    "empty tokens": ["data.train={home}/no_ids"],
    "cut index": ["data.train={home}/cut_index"],
    "cut tokens": ["data.train={home}/cut_ids"],
    "no index": ["data.train={home}/magic"],
    "sets without weights": ["data.train=a={home}/train,b={home}/few"],
    "weight of no set": ["data.train=a={home}/train", "data.weights=a=1,c=2"],
    "negative weight": ["data.train=a={home}/train,b={home}/few", "data.weights=a=1,b=-0.5"],
    "name clash": ["data.validation=a={home}/train,a={home}/few"],
    "set with too few tokens": ["data.train=a={home}/train,b={home}/few", "data.weights=a=1,b=1"],
    "validation set that is missing": ["data.validation=a={home}/train,b=nowhere/x"],
    "sets of different tokenizers": ["data.train=a={home}/first/train,b={home}/second/train", "data.weights=a=1,b=1"],
    "tokenizer that is none": ["data.train={home}/none/train"],
    "separator outside the vocabulary": ["model.separator=257"],
    "separator that separates nothing": ["model.separator=7"],
    "small vocabulary": ["model.vocab_size=100"],
    "long sequences": ["model.sequence=512"],
    "unknown logger": ["run.loggers=tensorboard,mlflow"],
    "stream without a tokenizer": ["data.stream=nowhere/*.parquet"],
    "weights of streams": ["data.stream=a=x.jsonl,b=y.jsonl", "data.weights=a=1"],
    "unwritable": ["run.out=/dev/null/x"],
    "no model to begin with": ["init={home}"],
    "file as a model to begin with": ["init={home}/a_file"],
    "output is a file": ["run.out={home}/a_file"],
}


def test_a_logger_that_is_not_installed(home, tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = refused(train, *training(home, tmp_path / "out", "--config.run.loggers=tensorboard,wandb"))
    assert re.fullmatch(r"run\.loggers has wandb, which needs wandb \(.*\); pip install wandb", said)


def test_training_with_a_bad_configuration(home, tmp_path, refused, snapshot):
    before, said = files(home), []
    for what, overrides in BAD_CONFIGURATION.items():
        flags = [f"--config.{override}" for override in overrides]
        said += [f"{what}:", f"    {refused(train, *training(home, tmp_path / 'out', *flags))}"]
    assert not (tmp_path / "out").exists() and files(home) == before
    snapshot("bad_configuration.txt", "\n".join(said))


BAD_FLAGS = {
    "missing configuration file": ["--config=nowhere.py"],
    "folder as configuration file": ["--config={home}"],
    "configuration file that is no Python": ["--config={home}/syntax.py"],
    "configuration file without its imports": ["--config={home}/imports.py"],
    "configuration file that looks for a key": ["--config={home}/key.py"],
    "configuration file with a number as a key": ["--config={home}/number.py"],
    "configuration file with keys that cannot be sorted": ["--config={home}/mixed.py"],
    "positional argument": ["configs/tiny.py"],
    "configuration without its flag": ["tiny"],
    "override without its flag": ["run.steps=3"],
    "unknown flag": ["--meshes=3"],
    "flag that is a key of two sections": ["--schedule=1f1b"],
    "flag that is a key, with its section": ["--pipeline.schedule=1f1b"],
    "flag that is a key, misspelled": ["--lerning_rate=1"],
    "flag that is misspelled": ["--cpu_device=8"],
    "key that is misspelled": ["--config.run.step=3"],
    "section that is misspelled": ["--config.runs.steps=3"],
    "key of another section": ["--config.run.global_batch=8"],
    "no number": ["--cpu_devices=many"],
    "negative number": ["--cpu_devices=-1"],
    "devices without end": ["--cpu_devices=40000"],
    "digits of another script": ["--cpu_devices=\u0668"],
    "digits of another script, apart": ["--cpu_devices", "\u0668"],
    "processes without end": ["--coordinator=localhost:1234", f"--num_processes={2**64}", "--process_id=0"],
    "no address": ["--coordinator=garbage", "--num_processes=2", "--process_id=0"],
    "no port": ["--coordinator=localhost:0", "--num_processes=2", "--process_id=1"],
    "no time limit": ["--coordinator_timeout=inf"],
    "no number of seconds": ["--coordinator_timeout=nan"],
    "part of the flags": ["--num_processes=2"],
    "process out of range": ["--coordinator=localhost:1234", "--num_processes=2", "--process_id=2"],
    "missing plan": ["--plan=nowhere.json"],
    "plan for 4 devices": ["--plan={home}/four.json"],
    "plan that is no JSON": ["--plan={home}/no_json.json"],
    "plan with a device twice": ["--plan={home}/twice.json"],
    "plan for another model": ["--plan={home}/eight.json"],
}


def test_training_with_bad_flags(home, tmp_path, refused, snapshot):
    said = []
    for what, flags in BAD_FLAGS.items():
        said += [f"{what}:", f"    {refused(train, *training(home, tmp_path / 'out', *flags))}"]
    assert not (tmp_path / "out").exists()
    said += ["override before its file:", f"    {refused(train, '--config.run.steps=3', '--config=tiny')}"]
    # Without overrides nothing looks into a configuration file while flags are parsed.
    said += [
        "without overrides:",
        *(f"    {refused(train, f'--config={name}')}" for name in ("no.py", "{home}/none.py")),
    ]
    snapshot("bad_flags.txt", "\n".join(said))


def test_a_model_that_this_machine_cannot_hold_is_refused(home, tmp_path, refused, monkeypatch):
    said = refused(train, *training(home, tmp_path / "out", "--config.model.layers=3000", "--config.model.hidden=4096"))
    assert re.fullmatch(
        r"weights and optimizer of a model of 604 G parameters take [\d.]+ TB on 8 virtual CPU devices "
        r"\(data=2 pipe=2 tensor=2\), and this machine has [\d.]+ [GT]B; GPUs, more machines or a smaller model, as "
        "--config=tiny, would work",
        said,
    )
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(host, "memory", lambda: 10**6)
    assert "take 11.5 MB on 8 virtual CPU devices" in refused(train, *training(home, tmp_path / "out"))


def test_a_checkpoint_of_another_architecture_is_left_alone(home, tmp_path, refused):
    architecture = sampling.architecture(ModelConfig(hidden=64, layers=6))
    with checkpoint.Checkpoints(tmp_path / sampling.CHECKPOINTS, CheckpointConfig()) as checkpoints:
        checkpoints.save(7, {"params": {"w": jnp.arange(8.0)}}, {"model": architecture, "step": 7})
    before = files(tmp_path)
    said = refused(train, *training(home, tmp_path))
    assert all(word in said for word in ("another model", "hidden", "64", "128", "layers", "6", "4")), said
    assert before.items() <= files(tmp_path).items()


def files(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


SAMPLING = [
    [],
    ["--checkpoint={home}"],
    ["--checkpoint={home}/nowhere"],
    ["--checkpoint={home}", "--tokens=0"],
    ["--checkpoint={home}", "--temperature=hot"],
    ["--checkpoint={home}", "--temperature=nan"],
    ["--checkpoint={home}", "--seed=9223372036854775808"],
    ["--checkpoint={home}", "def"],
]

PREPARING = [
    ["--input={home}/nowhere.txt"],
    ["--input="],
    ["--input={home}/latin1.txt"],
    ["--input={home}/a_file", "--tokenizer=words"],
    ["--input={home}/a_file", "--vocab_size=1000"],
    ["--input={home}/a_file", "--tokenizer=bpe", f"--vocab_size={2**32}"],
    ["--input={home}/a_file", "--out=/dev/null/x"],
    ["{home}/a_file"],
]

HUGGINGFACE = [
    [],
    ["expert"],
    ["export"],
    ["export", "--checkpoint={home}", "--out={home}/hf"],
    ["export", "--dtype=float16"],
    ["import"],
]

COMPARING = [
    [],
    ["--runs={home}/nowhere"],
    ["--runs="],
    ["--runs={home}/run", "--out={home}/nowhere/a.png"],
    ["--runs={home}/run", "--out={home}/a.txt"],
    ["{home}/run"],
]


def test_sampling_preparing_exporting_and_comparing(home, tmp_path, refused, snapshot):
    with metrics.Metrics(home / "run", primary=True) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 1.0})
    said = ["sample:", *(f"    {refused(sample, *flags)}" for flags in SAMPLING)]
    out = tmp_path / "out"
    said += ["prepare:", *(f"    {refused(prepare, f'--out={out}', *flags)}" for flags in PREPARING)]
    said += ["huggingface:", *(f"    {refused(huggingface, *flags)}" for flags in HUGGINGFACE)]
    usual = [f"--runs={home / 'run'}", f"--out={tmp_path / 'out.png'}"]
    said += ["compare:", *(f"    {refused(compare, *usual[not flags :], *flags)}" for flags in COMPARING)]
    assert not list(out.glob("*")) and not (home / "hf").exists(), "nothing is left by halves"
    snapshot("bad_flags_of_other_mains.txt", "\n".join(said))


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
