"""Layers of two kinds, as in models whose first layers are dense: c.kind says which, and kernels are of one of them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Demand, Parameter, Params, Scalars, kernel, norm, vocabulary
from tests.paxtrain.model.routed import EXPERTS, Routed

DENSE, EXPERT = ("dense",), ("experts",)


class Mixed(Routed):
    """A dense layer first, then three with experts to each further dense one."""

    model_types = ("mixed",)

    def kinds(self, config: ModelConfig) -> tuple[str, ...]:
        return tuple("experts" if i % 4 else "dense" for i in range(config.layers))

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        experts = " ".join(f"layers.{{}}.experts.{e}" for e in range(EXPERTS))
        return (
            vocabulary(config, "embed"),
            norm("layers/ln/scale", "layers embed", "layers.{}.norm"),
            kernel("layers/wide/kernel", "layers embed ffn", "layers.{}.wide", kinds=DENSE),
            kernel("layers/narrow/kernel", "layers ffn embed", "layers.{}.narrow", kinds=DENSE, init="residual"),
            kernel("layers/router/kernel", f"layers embed {EXPERTS}", "layers.{}.router", kinds=EXPERT),
            kernel("layers/up/kernel", f"layers embed {EXPERTS} ffn", experts.replace("experts", "up"), kinds=EXPERT),
            kernel(
                "layers/down/kernel",
                f"layers {EXPERTS} ffn embed",
                experts.replace("experts", "down"),
                kinds=EXPERT,
                init="residual",
            ),
            norm("final_norm/scale", "embed", "norm"),
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> tuple[jax.Array, Scalars]:
        if c.kind == "experts":
            return super().layer(p, x, c)
        h = nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group)
        y = nn.rows(p["narrow"], nn.gelu(nn.columns(p["wide"], h, "up")), c.group)
        nothing = jnp.float32(0)
        return x + nn.dropped(y, c, 1), {"balance": nothing, "busiest": nothing}

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return {"num_hidden_layers": config.layers}

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        return {"layers": values["num_hidden_layers"]}, {}
