"""The choice of attention; the model's numbers are compared in test_gpt2_reference.py and in the step's tests."""

import dataclasses
import types

import pytest

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError
from paxtrain.model.transformer import settle_attention


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ("", "cudnn"),
        ("--xla_gpu_deterministic_ops=true", "xla"),
        ("--xla_gpu_deterministic_ops", "xla"),
        ("--a=b --xla_gpu_exclude_nondeterministic_ops=1", "xla"),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", "cudnn"),
        ("--xla_gpu_deterministic_ops_too=true", "cudnn"),
    ],
)
def test_attention_is_not_cudnns_where_ops_are_deterministic(monkeypatch, flags, attention):
    monkeypatch.setenv("XLA_FLAGS", flags)
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    model = ModelConfig(dtype="bfloat16", hidden=512, heads=8)
    assert settle_attention(model, gpu).attention == attention
    asked = dataclasses.replace(model, attention="cudnn")
    if attention == "cudnn":
        assert settle_attention(asked, gpu) == asked
    else:
        with pytest.raises(UserError, match=r"cudnn fails with the deterministic ops .* auto or xla would work"):
            settle_attention(asked, gpu)
