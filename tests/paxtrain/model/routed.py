"""A mixture of experts that all see every token, with the loss that balances them: a layer that returns scalars."""

import jax
import jax.numpy as jnp

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Aux, Parameter, Params, Scalars, kernel, norm, vocabulary

EXPERTS = 4


class Routed(Architecture):
    """Each token weighs the experts by a softmax; `balance` is Switch Transformer's loss, 1 if all are used equally.

    References:
        Fedus et al. 2022, Switch Transformers, equation 4.
    """

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/router/kernel", f"layers embed {EXPERTS}"),
            kernel("layers/up/kernel", f"layers embed {EXPERTS} ffn"),
            kernel("layers/down/kernel", f"layers {EXPERTS} ffn embed", init="residual"),
            norm("final_norm/scale", "embed"),
        )

    def aux(self, config: ModelConfig) -> tuple[Aux, ...]:
        return Aux("balance", weight=0.5), Aux("busiest")

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> tuple[jax.Array, Scalars]:
        h = nn.norm(p["ln"], x, c.config.norm_epsilon)
        shares = jax.nn.softmax((h @ p["router"]["kernel"]).astype(jnp.float32))  # [B, S or S/T, experts]
        first = jax.nn.one_hot(shares.argmax(-1), EXPERTS).mean((0, 1))
        first, mean = (nn.averaged(part, c.group) for part in (first, shares.mean((0, 1))))
        scalars = {"balance": EXPERTS * (first * mean).sum(), "busiest": first.max()}

        wide = nn.gelu(nn.columns(p["up"], nn.enter(h, c.group), "up"))  # [B, S, experts, ffn / tensor]
        each = jnp.einsum("bsef,efh->bseh", wide, p["down"]["kernel"])
        each = nn.leave(each.reshape(*each.shape[:2], -1), c.group).reshape(*shares.shape, -1)
        return x + nn.dropped((shares.astype(x.dtype)[..., None] * each).sum(2), c, 1), scalars
