"""The loss probe: what is trained, what is written, and what is refused when it is read."""

import dataclasses
import json
import math
import re

import pytest

from paxtrain.config.options import OptionValues
from paxtrain.errors import UserError
from paxtrain.parallel.step import Trainer
from paxtrain.study import __main__ as study
from paxtrain.study import loss_probe, loss_probe_file, runs
from paxtrain.study.report import VariantResult
from tests import mains
from tests.paxtrain.study.test_study import QUICK, configuration
from tests.paxtrain.study.test_study import home as home  # a fixture

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


def trained(own, where=("backward", "data"), codecs=("int8", "lowrank"), ranks=(2,)):
    config = loss_probe.settled(own, 10)
    return config, loss_probe.variants(config, own, where, codecs, ranks)


def test_each_codec_is_alone_at_its_place():
    own = configuration(compress={"data_codec": "topk", "data_options": {"share": 0.2}, "error": "none"})
    config, some = trained(own, ("backward", "forward", "data"), ("int8", "topk", "lowrank"), (2, 3))
    assert len(some) == 1 + 3 * (2 + 2)
    assert config.run.steps == 10 and config.run.eval_every == 0 and config.optimizer.warmup_steps <= 2
    for variant in some:
        c, place = variant.config.compress, variant.name.partition(":")[0]
        compressed = [name for name in ("backward", "forward", "data") if c.at(name).chosen != "none"]
        assert compressed == ([] if place == "dense" else [place])
        assert c.data.start == 0 and c.error == "none"
        assert c.data.options == ({"share": 0.2} if variant.name == "data: topk share=0.2" else {})


def test_a_place_at_which_nothing_travels_is_not_probed():
    alone = configuration(mesh={"data": 1}, batch={"global_batch": 4})
    assert loss_probe.places(alone, ()) == ("backward", "forward")
    with pytest.raises(UserError, match=r"--axes=data probes gradients over data, but mesh\.data=1 .* of 2 or more"):
        loss_probe.places(alone, ("data",))
    with pytest.raises(UserError, match=r"--axes must be some of backward, .*, embedding with --probe, got 'between'"):
        loss_probe.places(alone, ("between",))
    one = configuration(pipe=1, mesh={"data": 1, "pipe": 1})
    with pytest.raises(UserError, match=r"mesh\.data=1 and mesh\.pipe=1 send none"):
        loss_probe.places(one, ())


def test_the_embedding_is_probed_if_it_is_asked_for():
    own = configuration()
    assert "embedding" not in loss_probe.places(own, ()) and loss_probe.places(own, ("embedding",)) == ("embedding",)
    _, some = trained(own, ("embedding",), ("int8", "lowrank"))
    assert [variant.name for variant in some] == ["dense", "embedding: int8"]
    c = some[1].config.compress
    assert (c.embedding.codec, c.embedding.sync) == ("int8", "auto")
    assert {c.at(place).chosen for place in ("backward", "forward", "data")} == {"none"}


def outcomes(**finals):
    return [
        VariantResult(name, name, seed, 0, {}, validation={10: final})
        for name, some in finals.items()
        for seed, final in enumerate(some)
    ]


@pytest.mark.parametrize(
    ("where", "changes"),
    [("backward", {"model": {"tied_head": False}}), ("data", {"pipe": 1, "mesh": {"data": 2, "pipe": 1}})],
)
def test_models_without_copies_of_the_embedding_are_probed(home, tmp_path, where, changes):
    config, some = trained(configuration(home, **changes), (where,))
    made = runs.Study(config, str(tmp_path), 1, some, real_mesh=False, examined=False, counted=False)
    assert [made._trained_as(variant).name for variant in some] == [variant.name for variant in some]


def test_losses_are_against_dense_of_the_same_seed(tmp_path):
    config, some = trained(configuration(), ("backward",), ("int8", "lowrank", "int4"))
    losses = {"dense": (2.0, 4.0), "backward: int8": (2.02, 4.0), "backward: rank 2": (2.2, 4.8)}
    losses["backward: int4"] = (math.nan, 4.0)
    table = loss_probe.write(config, some, outcomes(**losses), tmp_path)
    assert "| gradients between stages | int8 | +0.50 | 0.50 | +0.00 | +1.00 |" in table
    assert "| gradients between stages | int4 | diverges |" in table
    assert table in (tmp_path / loss_probe.PAGE).read_text()
    found = loss_probe_file.load(tmp_path / loss_probe_file.FILE)
    assert [(one.codec, one.rank) for one in found.codecs] == [("int8", 0), ("lowrank", 2)]
    assert found.codecs[1].losses == pytest.approx((0.1, 0.2))
    assert found.dense == (2.0, 4.0) and found.seeds == (0, 1) and found.steps == 10
    assert found.model == dataclasses.asdict(config.model)
    with pytest.raises(UserError, match="dense training diverged within 10 steps"):
        loss_probe.write(config, some, outcomes(**losses | {"dense": (math.inf, 4.0)}), tmp_path)


@pytest.mark.once
def test_codecs_are_trained_and_cost_what_they_should(home, tmp_path, monkeypatch):
    """Low rank costs more than eight bits, and the codec that changes nothing costs nothing.

    Its losses are those of dense training to the bit, except with the older fusions that conftest.py has jax 0.10 use:
    with them XLA rounds the last bit of some losses in another way.
    """
    monkeypatch.setattr(Trainer, "compiler_options", QUICK)
    own = configuration(home, batch={"global_batch": 8})
    config, some = trained(own, ("backward",), ("identity", "int8", "lowrank"), (1,))
    made = runs.Study(config, str(tmp_path), 2, some, real_mesh=False, examined=False, counted=False)
    loss_probe.write(config, some, made.run(workers=2), tmp_path)
    found = {one.label: one for one in loss_probe_file.load(tmp_path / loss_probe_file.FILE).codecs}
    assert found["identity"].losses == pytest.approx((0.0, 0.0), abs=1e-6)
    assert 1e-5 < max(map(abs, found["int8"].losses)) < 0.005
    assert found["rank 1"].mean > 5 * abs(found["int8"].mean)


def test_a_file_returns_as_it_was(tmp_path):
    codecs = (
        loss_probe_file.ProbedCodec("data", "topk", (0.01, -0.02), 0, OptionValues({"share": 0.1})),
        loss_probe_file.ProbedCodec("backward", "lowrank", (0.1, 0.2), 4),
    )
    made = loss_probe_file.LossProbe({"layers": 2}, (2, 4), 1, 50, 100, (0, 1), (2.0, 2.5), codecs)
    loss_probe_file.save(made, tmp_path / "probe.json")
    assert loss_probe_file.load(tmp_path / "probe.json") == made


CODEC = {"place": "data", "codec": "int8", "losses": [0.0, 0.1], "rank": 0, "options": {}}
VALUES = {"version": 1, "model": {}, "mesh": [2, 2], "micro_batch": 1, "steps": 5, "tokens": 10, "seeds": [0, 1]}
VALUES |= {"dense": [2.0, 2.1], "codecs": [CODEC]}
WRONG = {
    "another version": ({"version": 2}, "it must be an object with version 1, got"),
    "an unknown key": ({"more": 1}, "unknown configuration key more; known here: codecs, dense"),
    "a wrong type": ({"steps": "5"}, "steps must be of type int, got '5'"),
    "no steps": ({"steps": 0}, "steps must be from 1 to 2,147,483,647, got 0"),
    "endless steps": ({"steps": 10**19}, "steps must be from 1 to 2,147,483,647, got 10000000000000000000"),
    "a mesh of three": ({"mesh": [2, 2, 1]}, "mesh must have 2 values, got 3"),
    "a mesh of absurd size": ({"mesh": [10**300, 2]}, "mesh must be data ranks and stages, 1 to 2,147,483,647 each"),
    "a seed below 0": ({"seeds": [-1, 0]}, "seeds must be from 0 to 2,147,483,647"),
    "one seed": ({"seeds": [0], "dense": [2.0], "codecs": []}, "seeds must be 2 or more"),
    "a seed of text": ({"seeds": ["a", "b"]}, "seeds[0] must be of type int, got 'a'"),
    "a loss that is no number": ({"dense": [2.0, math.nan]}, "the losses of dense must be positive numbers"),
    "no loss": ({"dense": [2.0, 0.0]}, "the losses of dense must be positive numbers, got (2.0, 0.0)"),
    "too few losses": (
        {"codecs": [CODEC | {"losses": [0.1]}]},
        "data int8 must have a loss for each of 2 seeds",
    ),
    "an unknown place": ({"codecs": [CODEC | {"place": "up"}]}, "the codec 'int8' of up must be at one of backward"),
    "a rank of another": (
        {"codecs": [CODEC | {"rank": 2}]},
        "the codec 'int8' of data must have a name, and a rank if",
    ),
    "no rank": ({"codecs": [CODEC | {"codec": "lowrank"}]}, "the codec 'lowrank' of data must have a name, and a rank"),
    "a loss beyond floats": ({"dense": [2.0, 10**400]}, "dense[1] must be a finite number"),
    "losses whose noise is beyond floats": (
        {"codecs": [CODEC | {"losses": [-1e299, 1e299]}]},
        "the losses of data int8 must be numbers, got (-1e+299, 1e+299)",
    ),
    "too many": ({"codecs": [CODEC | {"codec": f"c{n}"} for n in range(13)]}, "codecs must have at most 12 of data"),
    "twice": ({"codecs": [CODEC, CODEC]}, "data int8 must be there once, got it 2 times"),
    "an option of options": (
        {"codecs": [CODEC | {"options": {"a": {}}}]},
        "the codec 'int8' of data: options.a must be a number",
    ),
    "no object": ({"codecs": [3]}, "codecs[0] must be a mapping, got 3"),
    "nothing": ({"codecs": [{}]}, "place, codec, losses missing in codecs[0]; known here"),
}


@pytest.mark.parametrize(("changes", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path, changes, sentence):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(VALUES))
    assert loss_probe_file.load(path).codecs[0].label == "int8"  # without the change it is read
    path.write_text(json.dumps(VALUES | changes))
    with pytest.raises(UserError, match=re.escape(f"probe {path}: {sentence}")):
        loss_probe_file.load(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--probe", "--frontier"], "--frontier and --probe are different studies; choose one"),
        (["--axes=data"], "--axes is of --frontier and --probe; add one of them"),
        (["--probe", "--seeds=1"], "--seeds must be 2 or more with --probe"),
        (["--probe", "--axes=between"], "--axes must be some of backward, forward, data, embedding with --probe"),
        (["--probe", "--codecs=int8,mine"], "compress.backward.codec=mine is no codec"),
        (["--probe", "--codecs=int8,"], "--codecs must be names joined by commas, got 'int8,'"),
        (["--probe", "--ranks=60"], "the largest useful rank is 21"),
        (["--probe", "--ranks=0"], "--ranks must be numbers from 1 on"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(home, tmp_path, monkeypatch, capfd, arguments, words):
    config = f"--config={study.__file__.replace('paxtrain/study/__main__.py', 'configs/study.py')}"
    data = [f"--config.data.{name}={home}/data/{name}" for name in ("train", "validation")]
    code = mains.run(monkeypatch, study, config, *data, f"--out={tmp_path / 'out'}", *arguments)
    said = capfd.readouterr().err
    assert code == 2 and words in said and said.startswith("error: ") and len(said.splitlines()) == 1, said
