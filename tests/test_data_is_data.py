"""Files of data execute nothing when they are read, whatever is in them; docs/security.md lists them."""

import contextlib
import copy
import csv
import gc
import json
import os
import pathlib
import pickle
import shlex
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import SingleDeviceSharding

from paxtrain.config import BatchConfig, CheckpointConfig, CompressConfig, MeshConfig, PipelineConfig
from paxtrain.config import plan as plans
from paxtrain.data import token_files, tokenizer
from paxtrain.errors import UserError
from paxtrain.huggingface.files import ModelArrays
from paxtrain.huggingface.files import read_json as read_model_json
from paxtrain.run import checkpoint_reading, metrics
from paxtrain.run.checkpoint import Checkpoints
from paxtrain.schedule import table_file
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import LossProbe, ProbedCodec
from planner.cluster.cluster import Cluster
from planner.given import links, nccl_tests, nccl_xml, slurm_topology, topo_matrix
from planner.runs import trials
from planner.traced import compute_row
from tests.planner.examples import cluster
from tests.planner.given import logs
from tests.planner.traced import runs

pytestmark = pytest.mark.usefixtures("quiet_orbax")
TRIAL = {
    "cluster": "lab",
    "devices": "2",
    "devices_per_host": "1",
    "device_kinds": "A100;V100",
    "hidden": "64",
    "heads": "4",
    "layers": "2",
    "seq": "32",
    "vocab": "100",
    "global_batch": "4",
    "micro_batch": "2",
    "tp": "1",
    "dp": "2",
    "pp": "1",
    "recompute": "0",
    "dtype": "bf16",
    "seconds": "1.5",
}
STATE = {"params": {"w": np.arange(6.0, dtype=np.float32)}}
MODEL = {"hidden": 2}


class Touch:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, canary: pathlib.Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {shlex.quote(str(self.canary))}",)


def texts(canary):
    """Return texts that Python, shells, YAML and templates would execute."""
    yield f"__import__('os').system('touch {canary}')"
    yield f"$(touch {canary})"
    yield f"`touch {canary}`; touch {canary}"
    yield f"!!python/object/apply:os.system ['touch {canary}']"
    yield f"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}"
    yield f"=cmd|'touch {canary}'!A1"


def contents(good, canary):
    """Return contents of a file that hold code instead of data, or beside it."""
    pickled = pickle.dumps(Touch(canary))
    yield from (pickled, pickled + good, good + pickled)
    yield from (text.encode() for text in texts(canary))


def with_text(values, text):
    """Yield JSON values with the text in place of one of their leaves or keys, for each of them.

    Codecs are left out: a plan or a probe may name one as package.module:Class, which is imported.
    """
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inside:
        if str(key).endswith("codec"):
            continue
        changed = copy.copy(values)
        changed[key] = text
        yield changed
        for deeper in with_text(value, text):
            changed = copy.copy(values)
            changed[key] = deeper
            yield changed
        if isinstance(values, dict):
            yield {(text if name == key else name): value for name, value in values.items()}


def make_plan(folder):
    plan = plans.Plan(MeshConfig(data=2), PipelineConfig(), BatchConfig(), CompressConfig(), ("a", "b"), 1, (0, 1))
    plans.save(plan, folder / "plan.json")
    return lambda: plans.load(folder / "plan.json")


def make_cluster(folder):
    cluster(2, 2).save(folder / "cluster.json")
    return lambda: Cluster.load(folder / "cluster.json")


def make_large_cluster(folder):
    """Write a cluster whose links are in an .npz beside it."""
    cluster(80, 1).save(folder / "cluster.json")
    assert (folder / "cluster.npz").exists()
    return lambda: Cluster.load(folder / "cluster.json")


def make_trials(folder):
    with (folder / "trials.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, TRIAL)
        writer.writeheader()
        writer.writerow(TRIAL)
    return lambda: trials.read(folder / "trials.csv")


def make_schedule(folder):
    (folder / "mine.csv").write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")

    def read():
        try:
            table_file.load(str(folder / "mine.csv"))
        except ValueError as error:  # which the configuration makes a sentence of
            raise UserError(str(error)) from error

    return read


def make_probe(folder):
    probe = LossProbe({}, (2, 2), 1, 50, 100, (0, 1), (3.0, 3.1), (ProbedCodec("data", "int8", (0.0, 0.001)),))
    loss_probe_file.save(probe, folder / "probe.json")
    return lambda: loss_probe_file.load(folder / "probe.json")


def make_nccl_log(folder):
    path = folder / "all_reduce_perf.log"
    path.write_text(logs.log("all_reduce", ["a"] * 8, 1e-5, 4e11))
    return lambda: links.fit(nccl_tests.read(path))


def make_matrix(folder):
    shutil.copy(logs.DATA / "a100_4_gpus.topo", folder / "matrix")
    return lambda: topo_matrix.read(folder / "matrix")


def make_nccl_xml(folder):
    shutil.copy(logs.DATA / "h100_vm_nccl_topo.xml", folder / "topo.xml")
    return lambda: nccl_xml.read(folder / "topo.xml")


def make_slurm_topology(folder):
    shutil.copy(logs.DATA / "tree_topology.conf", folder / "topology.conf")
    return lambda: slurm_topology.read(folder / "topology.conf")


def make_trace(folder):
    runs.write(folder / "trace.json", runs.Run(layers=1, passes=1, steps=1).torch())
    return lambda: compute_row.read(folder / "trace.json")


def make_nsys_export(folder):
    runs.Run(layers=1, passes=1, steps=1).nsys(folder / "trace.sqlite")
    return lambda: compute_row.read(folder / "trace.sqlite")


def make_metrics(folder):
    (folder / metrics.FILE).write_text('{"step": 1, "loss": 2.5}\n')
    return lambda: metrics.read(folder / metrics.FILE)


def make_tokens(folder):
    with token_files.TokenWriter(folder / "train", 257) as writer:
        for _ in range(4):
            writer.extend(range(40))
            writer.end_document()
    load = token_files.load
    return lambda: list(load(folder / "train", vocab_size=257, sequence=8).read(0, 20))


def make_tokenizer(folder):
    tokenizer.bytes_tokenizer().save(str(folder / tokenizer.FILE))
    return lambda: tokenizer.load(folder / tokenizer.FILE).encode("a text")


def make_safetensors(folder):
    safetensors.numpy.save_file(STATE["params"], folder / "model.safetensors", metadata={"format": "pt"})
    return lambda: ModelArrays(folder)("w")


def make_model(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 2}))
    return lambda: read_model_json(folder / "config.json")


def make_checkpoints(folder):
    state = jax.device_put(STATE, jax.devices()[0])
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {"model": MODEL})
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(jax.devices()[0])), STATE
    )
    return lambda: checkpoint_reading.restore_params(folder, abstract["params"], MODEL)


FORMATS = [each for name, each in globals().items() if name.startswith("make_")]


# Where a checkpoint's metadata is damaged, orbax leaves coroutines behind that nobody awaits.
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__.removeprefix("make_"))
def test_what_is_read_is_not_executed(tmp_path, make):
    folder, canary = tmp_path / "files", tmp_path / "canary"
    folder.mkdir()
    read = make(folder)
    read()
    tried = 0

    def attempt(path, content):
        nonlocal tried
        path.write_bytes(content)
        with contextlib.suppress(UserError):
            read()
        tried += 1
        assert not canary.exists(), f"{path}: {content[:300]!r}"

    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        good = path.read_bytes()
        for content in contents(good, canary):
            attempt(path, content)
        if path.suffix == ".json" and len(good) < 10_000:
            for text in list(texts(canary))[:2]:
                for changed in with_text(json.loads(good), text):
                    attempt(path, json.dumps(changed).encode())
        if path.suffix == ".csv":
            head, *rows = good.decode().splitlines()
            for number in range(len(head.split(","))):
                for text in texts(canary):
                    cells = rows[0].split(",")
                    cells[number] = json.dumps(text).replace("\\", "")
                    attempt(path, "\n".join([head, ",".join(cells), *rows[1:]]).encode())
        path.write_bytes(good)
    assert tried >= 9
    gc.collect()  # what orbax has left ends here, not in another test


def test_arrays_of_objects_are_not_unpickled(tmp_path):
    """numpy's .npz may hold pickles, where its reader is told to take them."""
    canary = tmp_path / "canary"
    read = make_large_cluster(tmp_path)
    np.savez(tmp_path / "cluster.npz", alpha=np.array([Touch(canary)], object), bandwidth=np.array([1.0]))
    with pytest.raises(UserError):
        read()
    assert not canary.exists()
    with np.load(tmp_path / "cluster.npz", allow_pickle=True) as file:
        file["alpha"]
    assert canary.exists()  # the control


def test_the_canary_sings_where_a_pickle_is_read(tmp_path):
    canary = tmp_path / "canary"
    pickle.loads(next(iter(contents(b"", canary))))
    assert canary.exists()
