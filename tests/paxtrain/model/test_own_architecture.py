"""An architecture that is only named as package.module:Class trains on any mesh: all else reads its table."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest

import paxtrain
from paxtrain.config.axes import UNSPLIT, layer_sizes
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion
from paxtrain.huggingface.exporting import export
from paxtrain.model import parameters, transformer
from paxtrain.model import tensor_parallel as tp
from paxtrain.parallel.optimizer import decay_mask
from paxtrain.run import metrics, sampling
from paxtrain.testing import check_model
from paxtrain.testing.layers import random_params
from tests import small
from tests.paxtrain import training
from tests.paxtrain.model.parallel_block import ParallelBlock
from tests.sources import ROOT

HERE = pathlib.Path(__file__).parent
BLOCK, RECURRENCE = "tests.paxtrain.model.parallel_block:ParallelBlock", "tests.paxtrain.model.recurrence:Recurrence"
BAD, SCALED = "tests.paxtrain.model.bad_models:", "tests.paxtrain.model.scaled:Scaled"
ROUTED, MIXED = "tests.paxtrain.model.routed:Routed", "tests.paxtrain.model.mixed:Mixed"
SHAPE = {"kv_heads": 2, "intermediate": 48}


def config(module=BLOCK, mesh=None, **pipeline):
    model = {**SHAPE, "vocab_multiple": 64, "module": module}
    return small.config(model=model, mesh=mesh or {}, pipeline=pipeline)


def test_its_parameters_are_those_of_its_table():
    model = config().model
    layer = 32 + 32 * 32 + 32 * 2 * 16 + 32 * 48 + 32 * 32 + 48 * 32
    assert parameters.published(model) == 4 * layer + 61 * 32 + 32
    assert sum(x.size for x in jax.tree.leaves(transformer.shapes(model))) == 4 * layer + 64 * 32 + 32
    assert parameters.flops_per_token(model) == 6 * (4 * layer + 61 * 32 + 32) + 12 * 4 * 32 * 16
    mask = decay_mask(model, transformer.shapes(model))
    assert mask["layers"]["ln"] == {"scale": False} and mask["layers"]["kv"] == {"kernel": True}
    assert sampling.architecture(model)["module"] == BLOCK


BAD_TABLES = {
    "Twice": "has the parameter layers/ln/scale 2 times",
    "Strange": "layers/gate/kernel has the dim experts; known are layers, .*and products",
    "Unstacked": "layers/gate/kernel has the dims 'embed ffn'; those of layers begin with layers",
    "Elsewhere": "has the parameter router/kernel; paths are layers/MODULE/NAME and embedding/token",
    "Headless": "lacks final_norm/scale",
    "Indivisible": r"has the dims 'layers embed 3\*ffn'; tensor splits the first factor",
    "SplitTwice": "of which tensor could split ffn and ffn; write the size of one as a number",
    "Vector": "is a kernel with the dims 'layers ffn'; a kernel has two or more",
    "UnknownRole": "its role must be one of kernel, norm, bias, table, got 'weight'",
    "UnknownInit": "its init must be one of normal, residual, ones, zeros, got 'Normal'",
    "WideNorm": "final_norm/bias has the dims 'ffn'; 'embed' would work",
    "OneName": "has the name gate.weight in .* files; one of layers has {} for the layer's number",
    "SameName": "has the name h.{}.gate of Hugging Face's files 2 times",
    "FewNames": "has 2 names in Hugging Face's files for 3 arrays stacked by 'layers embed 3 ffn'",
    "NoParameters": r"its parameters\(\) raises NotImplementedError",
    "Rows": r"its parameters\(\) must return a tuple of paxtrain.model.spec.Parameter",
    "Raises": r"its parameters\(\) raises AttributeError in line \d+: 'ModelConfig' object has no attribute 'shape'",
    "WithArguments": r"must be made without arguments \(.*'depth'\)",
    "Missing": r"Missing: the module tests.paxtrain.model.bad_models has no class Missing; it has .*Plain, Twice, ",
    "jax": "is no architecture; derive its class",
}


@pytest.mark.parametrize(("module", "words"), BAD_TABLES.items(), ids=BAD_TABLES)
def test_a_table_that_cannot_be_trained_is_refused(module, words):
    with pytest.raises(UserError, match=words):
        parameters.table(config(BAD + module).model)


@pytest.mark.parametrize(
    ("module", "words"),
    {
        "nowhere:Block": r"nowhere:Block cannot be imported .*; put its package on PYTHONPATH",
        "json:Block": r"json:Block: the module json has no class Block; it has no architecture$",
        "json": r"json has no class; write package.module:Class$",
        "strange:Block": r"strange:Block cannot be imported: its module raises AttributeError: .* 'missing'",
    }.items(),
)
def test_a_class_that_cannot_be_imported_is_refused(module, words, tmp_path, monkeypatch):
    (tmp_path / "strange.py").write_text("import json\n\njson.missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=words):
        parameters.table(config(module).model)


@pytest.mark.parametrize(
    ("module", "tensor", "words"),
    [
        ("Shorter", 1, r"its layer\(\) is given x as float32\[1,16,32\] and returns float32\[1,15,32\]"),
        ("Pair", 1, r"and returns \(float32\[1,16,32\], float32\[1,16,32\]\); it must return the same shape and dtype"),
        ("Misspelt", 1, r"its layer\(\) raises KeyError in line \d+: 'upp'"),
        ("Inherited", 1, r"its layer\(\) raises KeyError in line \d+ of parallel_block.py: 'ln'"),
        ("NoScalars", 1, r"returns float32\[1,16,32\]; it must .* beside it {balance: float32\[\]}, as its aux\(\)"),
        ("OtherScalars", 1, r"returns \(float32\[1,16,32\], {balanced: float32\[\]}\); it must"),
        ("Whole", 2, r"its layer\(\) raises TypeError in line \d+: cannot reshape"),
    ],
)
def test_a_layer_that_cannot_be_trained_is_refused_before_anything_runs(module, tensor, words):
    c = config(BAD + module, mesh={"tensor": tensor})
    with pytest.raises(UserError, match=words):
        small.trainer(c)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("TwoOfOneName", "has the name balance 2 times"),
        ("PathAsName", "has the name 'aux/balance'; letters, digits and underscores would work"),
        ("NoWeight", "gives balance the weight nan; a finite number would work"),
        ("NamesOnly", "must return a tuple of paxtrain.model.spec.Aux"),
    ],
)
def test_scalars_that_cannot_be_trained_are_refused(module, words):
    with pytest.raises(UserError, match=rf"{module}: its aux\(\) {words}"):
        parameters.aux(config(BAD + module).model)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("FewKinds", r"its kinds\(\) returns 1 kinds for model.layers=4; it must return a string for each layer"),
        ("NoSuchKind", r"its kinds\(\) lacks gated, of which layers/gate/kernel is; it has ''"),
        ("KindOutside", "final_norm/bias is of the kinds ; only layers have kinds"),
    ],
)
def test_kinds_that_do_not_fit_the_layers_are_refused(module, words):
    with pytest.raises(UserError, match=rf"{module}: {words}"):
        parameters.kinds(config(BAD + module).model)


def test_weights_of_layers_of_two_kinds_go_to_files_and_back_by_the_layers_numbers():
    model = config(MIXED).model
    params = jax.tree.map(np.asarray, random_params(model))
    files = conversion.weights(params, model)
    assert {name for name in files if name.startswith("layers.0.")} == {
        f"layers.0.{n}" for n in ("norm", "wide", "narrow")
    }
    np.testing.assert_array_equal(files["layers.2.up.1"], params["layers"]["up"]["kernel"][1, :, 1])
    again = conversion.params(files.__getitem__, model)
    jax.tree.map(np.testing.assert_array_equal, params["layers"], again["layers"])


def test_layers_of_two_kinds_are_counted_each():
    model = config(MIXED).model
    dense, experts = 32 + 2 * 32 * 48, 32 + 32 * 4 + 2 * 32 * 4 * 48
    assert parameters.published(model) == dense + 3 * experts + 61 * 32 + 32
    assert parameters.flops_per_token(model) == 6 * (dense + 3 * experts + 61 * 32 + 32)


def test_a_layer_that_returns_another_dtype_is_refused():
    model = dataclasses.replace(config(BAD + "Wider").model, dtype="bfloat16")
    with pytest.raises(UserError, match=r"given x as bfloat16\[1,16,32\] and returns float32\[1,16,32\]"):
        transformer.check_layer(model, UNSPLIT, False)
    transformer.check_layer(dataclasses.replace(model, module=BAD + "Plain"), layer_sizes({"tensor": 2}), True)


def test_embedding_and_head_may_be_its_own():
    """Those of a plain model say the same with other tables, which an untied head has apart."""
    model = dataclasses.replace(config(SCALED).model, tied_head=False, layers=1)
    params = transformer.init(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 61)
    plain = params | {"embedding": {"token": params["embedding"]["token"] * np.array([32**0.5, 1])[:, None, None]}}
    plain["final_norm"] = {"scale": 1 + params["final_norm"]["scale"]}
    right = transformer.logits(plain, tokens, dataclasses.replace(model, module=BAD + "Plain"))
    np.testing.assert_allclose(transformer.logits(params, tokens, model), right, rtol=1e-5, atol=1e-6)

    rows = transformer.cast(params, model)["embedding"]
    x, pull = jax.vjp(lambda p: transformer.embed(p, tokens, model, tp.WHOLE), rows)
    zeros = jax.tree.map(np.zeros_like, rows)
    found = transformer.embed_gradient(jax.tree.map(jax.numpy.asarray, zeros), tokens, x, model, tp.WHOLE, None)
    np.testing.assert_allclose(found["token"], pull(x)[0]["token"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_embedding_and_head_of_its_own_train_on_a_mesh():
    check_model(SCALED, schedules=["1f1b"])


def test_without_heads_no_attention_is_counted():
    model = config(RECURRENCE).model
    layer = 32 + 32 * 3 * 48 + 3 * 48 + 48 * 32
    assert parameters.flops_per_token(model) == 6 * (4 * layer + 61 * 32 + 32)


def test_the_page_shows_the_file_and_the_parts_of_a_layer():
    page = (ROOT / "docs" / "models.md").read_text()
    [shown] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert (HERE / "parallel_block.py").read_text().partition('"""\n\n')[2] == shown
    assert sorted(re.findall(r"^\| `nn\.(\w+)\(", page, re.M)) == sorted(paxtrain.model.__all__)
    dims = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)?) \|", page.partition("| part |")[0], re.M)
    assert set(re.findall(r"\w+", " ".join(dims))) == {*config().model.dims} - {"tables"}


def test_what_only_the_families_have_says_so(monkeypatch):
    c = config()
    for change, words in (
        ({}, "has no model_types"),
        ({"model_types": ("mine",)}, r"has model_types but no to_huggingface\(\)"),
        (
            {"model_types": ("mine",), "to_huggingface": dict},
            "has no names in .* files for embedding/token, layers/ln/",
        ),
    ):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=words):
            for name, value in change.items():
                patch.setattr(ParallelBlock, name, value)
            conversion.weights({}, c.model)


@pytest.mark.slow
def test_it_trains_continues_and_samples_by_name(tmp_path):
    home = small.corpus(tmp_path)
    short = {
        "run.steps": 2,
        "model.layers": 2,
        "model.hidden": 32,
        "model.sequence": 32,
        "mesh.data": 1,
        "mesh.pipe": 2,
    }
    given = short | {"data.train": str(home / "data/train"), "data.validation": str(home / "data/validation")}
    given |= {"mesh.tensor": 1, "batch.global_batch": 8, "batch.micro_batch": 2, "run.out": str(home / "run")}
    given |= {"run.eval_batches": 1, "run.sample_tokens": 4, "optimizer.warmup_steps": 1, "pipeline.scan_layers": "on"}

    def trained(steps):
        config = paxtrain.load_config("tiny", given | {"run.steps": steps}, model=ROUTED)
        assert config.model.module == ROUTED
        return training.started(config).train()

    assert trained(2).step == 2
    further = trained(3)
    assert further.finished and list(further.steps) == [1, 2, 3] and np.isfinite(further.losses).all()
    for line in metrics.read(home / "run" / metrics.FILE):
        if "loss" in line:  # of two layers; equal use of the experts has the balance 1 in each
            assert 1.9 < line["aux/balance"] < 8 and 0.5 <= line["aux/busiest"] <= 2
    assert isinstance(paxtrain.sample(home / "run", "12", 4), str)
    with pytest.raises(UserError, match="has no model_types, so it is no model of Hugging Face's files"):
        export(home / "run", home / "exported")
    with pytest.raises(UserError, match="module"):
        training.started(paxtrain.load_config("tiny", given | {"run.steps": 4}, model=BLOCK)).train()
