"""Families beside what transformers computes for tiny random models, see tests/paxtrain/model/make_references.py.

The gradients of all on a mesh take minutes, so one of a kind is in the quick tests.
"""

import dataclasses
import json
import pathlib
import re
import types

import jax
import numpy as np
import pytest

from paxtrain.config import ModelConfig
from paxtrain.config.axes import layer_sizes
from paxtrain.config.model import FAMILIES
from paxtrain.config.options import OptionValues
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion
from paxtrain.model import parameters, transformer
from paxtrain.model.tensor_parallel import WHOLE
from paxtrain.model.transformer import settle_attention
from paxtrain.process.jax_private import without_cudnn
from paxtrain.run import sampling
from paxtrain.testing import check_model
from planner.program.cache import layer_program

REFERENCES = pathlib.Path(__file__).parents[1] / "model"
TOLERANCE = 1e-4  # of logits of up to 10
NAMES = sorted(
    path.name.removesuffix("_reference.npz")
    for path in REFERENCES.glob("*_reference.npz")
    if path.name.split("_reference")[0] not in ("gpt2", "llama", "gpt_neox")  # tests/paxtrain/huggingface has these
)
logits, loss = (jax.jit(function, static_argnums=2) for function in (transformer.logits, transformer.loss))


def theirs(name: str) -> tuple[dict, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(config.json, weights, what transformers computed with them)."""
    with np.load(REFERENCES / f"{name}_reference.npz") as file:
        arrays = dict(file)
    results = {key: arrays.pop(key) for key in ("ids", "logits", "loss")}
    return json.loads(str(arrays.pop("config"))), arrays, results


def model_of(values: dict, **changes: object) -> ModelConfig:
    fields = conversion.from_config(values, "config.json") | {"sequence": 24, "vocab_multiple": 8}
    return ModelConfig(**fields | {"dtype": "float32"} | changes)


def test_each_family_has_a_reference():
    assert {re.sub("_(llama3|serial)$", "", name) for name in NAMES} | {"gpt2"} == {*FAMILIES}


@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_transformers_does_and_goes_back_bit_by_bit(name):
    values, weights, results = theirs(name)
    model = model_of(values)
    params = conversion.params(weights.__getitem__, model)
    np.testing.assert_allclose(logits(params, results["ids"], model), results["logits"], atol=TOLERANCE)
    np.testing.assert_allclose(loss(params, results["ids"], model), results["loss"], atol=TOLERANCE)
    back = conversion.weights(params, model)
    assert back.keys() == weights.keys()
    for key, x in back.items():
        np.testing.assert_array_equal(x, weights[key], err_msg=key)
    again = conversion.from_config(conversion.to_config(model, "float32"), "config.json")
    assert again == conversion.from_config(values, "config.json")
    assert parameters.published(model) == sum(x.size for x in weights.values())


# What a family has besides a Llama, each by a value with which it would not show.
OTHERWISE = [
    ("llama_llama3", {"rope_scaling": {}}),
    ("qwen3", {"rope_scaling": {}}),
    ("qwen3", {"rope_scaling": {"attention_factor": 1.0}}),
    ("mistral", {"options": {"sliding_window": 4}}),
    ("gemma2", {"options": {"attn_logit_softcapping": 0.0}}),
    ("gemma2", {"options": {"final_logit_softcapping": 0.0}}),
    ("gemma2", {"options": {"sliding_window": 0}}),
    ("gemma2", {"options": {"query_pre_attn_scalar": 8}}),
    ("gemma3", {"options": {"sliding_window_pattern": 2}}),
    ("gemma3", {"options": {"rope_local_base_freq": 500.0}}),
    ("phi3", {"options": {"partial_rotary_factor": 1.0}}),
    ("smollm3", {"options": {"no_rope_layer_interval": 3}}),
    ("gpt_neox_serial", {"options": {"use_parallel_residual": True}}),
    ("gpt_neox_serial", {"options": {"rotary_pct": 0.5}}),
    ("granite", {"options": {"embedding_multiplier": 1.0}}),
    ("granite", {"options": {"residual_multiplier": 1.0}}),
    ("granite", {"options": {"attention_multiplier": 1.0}}),
    ("granite", {"options": {"logits_scaling": 1.0}}),
]


@pytest.mark.parametrize(
    ("name", "change"), OTHERWISE, ids=lambda x: x if isinstance(x, str) else "-".join(*x.values())
)
def test_another_value_would_show(name, change):
    values, weights, results = theirs(name)
    model = model_of(values)
    [(field, some)] = change.items()
    other = dataclasses.replace(model, **{field: OptionValues({**getattr(model, field), **some} if some else {})})
    params = conversion.params(weights.__getitem__, other)
    assert np.abs(logits(params, results["ids"], other) - results["logits"]).max() > 10 * TOLERANCE


def test_how_far_tokens_see_may_change_when_a_run_goes_on():
    """What else an option says is part of the model, but for one that says what is usual."""
    model = model_of(theirs("gemma3")[0])
    linear = OptionValues(rope_type="linear", factor=8.0)
    reach = {"sliding_window": 9, "rope_local_base_freq": 70.0}
    longer = dataclasses.replace(
        model, sequence=48, rope_theta=9e5, rope_scaling=linear, options=OptionValues(model.options | reach)
    )
    assert sampling.architecture(longer) == sampling.architecture(model)
    other = dataclasses.replace(model, options=OptionValues(model.options | {"query_pre_attn_scalar": 13}))
    assert sampling.architecture(other) != sampling.architecture(model)
    usual = dataclasses.replace(model_of(theirs("granite")[0]), options=OptionValues(logits_scaling=1.0))
    assert sampling.architecture(usual) == sampling.architecture(dataclasses.replace(usual, options=OptionValues()))


def small(name: str) -> ModelConfig:
    return model_of(theirs(name)[0], sequence=16, vocab_multiple=64)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_family_has_what_the_trainer_needs_of_a_model(name):
    assert len(check_model(small(name))) > 5


@pytest.mark.parametrize("name", NAMES)
def test_the_planner_knows_all_that_its_layer_does(name):
    model = dataclasses.replace(small(name), dtype="bfloat16")
    program = layer_program(model, layer_sizes({"tensor": 2}), False, "dots")
    assert program.forward.unknown == program.backward.unknown == ()
    found = sum(one.m * one.n * one.k * one.times for one in program.forward.products)  # of a sequence, tensor=2
    kernels = parameters.count(model, role="kernel")
    assert found == model.sequence * kernels // 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": {"window": 4}}, "model.options.window is no option of a llama, which has no options"),
        ({"family": "mistral", "options": {"window": 4}}, "no option of a mistral, which has sliding_window"),
        ({"family": "mistral", "options": {"sliding_window": "4"}}, "must be as 0 is, got '4'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' is not implemented .* default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "of the type linear needs factor, and lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor must be positive, got 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1.0}}, "beta is no value of the type linear"),
        ({"family": "gpt2", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "GPT-2 has learned positions"),
        ({"head_size": 7}, "7 of the 7 of a head turn; model.head_size=8 would fit"),
    ],
)
def test_what_it_cannot_be_is_a_sentence(change, words):
    values = {name: OptionValues(x) if isinstance(x, dict) else x for name, x in change.items()}
    with pytest.raises(UserError, match=words):
        parameters.table(ModelConfig(**{"family": "llama"} | values))


def gpu(capability: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="a GPU")


@pytest.mark.parametrize(
    ("family", "head_size", "capability", "attention"),
    [("gemma3", 256, "9.0", "cudnn"), ("gemma3", 256, "8.0", "xla"), ("gemma3", 128, "8.0", "cudnn")]
    + [("gemma2", 128, "9.0", "xla"), ("mistral", 264, "9.0", "xla")],
)
def test_attention_is_cudnns_where_it_has_heads_of_the_size_and_scores_have_no_bound(
    family, head_size, capability, attention
):
    model = ModelConfig(family=family, head_size=head_size)
    assert settle_attention(model, gpu(capability)).attention == attention
    if head_size <= 256:
        asked = dataclasses.replace(model, attention="cudnn")
        if attention == "cudnn":
            assert settle_attention(asked, gpu(capability)) == asked
        else:
            with pytest.raises(UserError, match=r"needs NVIDIA GPUs from Hopper on|has no bound of scores"):
                settle_attention(asked, gpu(capability))


@pytest.mark.parametrize(("name", "calls"), [("mistral", 1), ("gemma3", 2)])
def test_cudnns_kernel_skips_what_is_outside_a_window(name, calls):
    """Layers that differ in their windows have both kernels, of which one runs."""
    model = dataclasses.replace(small(name), dtype="bfloat16", attention="cudnn")
    p = {p.names[1:]: jax.ShapeDtypeStruct(p.shape(model), "bfloat16") for p in parameters.of_kind(model, "")}
    x = jax.ShapeDtypeStruct((1, model.sequence, model.hidden), "bfloat16")
    with without_cudnn():
        traced = jax.make_jaxpr(lambda p, x, i: transformer.layer(p, x, model, WHOLE, None, i)[0])(
            parameters.tree(p), x, jax.ShapeDtypeStruct((), "int32")
        )
    text = str(traced)
    assert text.count("dot_product_attention_fwd_wrapper[") == calls
    assert text.count("sliding_window_length=5") == 1
    program = layer_program(model, layer_sizes({}), False, "residuals")
    assert program.forward.unknown == () and sum(one.times for one in program.forward.fused) == 2
