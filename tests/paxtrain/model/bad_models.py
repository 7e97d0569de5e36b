"""Architectures that are refused: by their tables, by what their layers return, or by `check_model`."""

import jax
import jax.numpy as jnp

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Aux, Parameter, Params, Scalars, bias, kernel, norm, vocabulary
from tests.paxtrain.model.parallel_block import ParallelBlock
from tests.paxtrain.model.recurrence import Recurrence
from tests.paxtrain.model.routed import Routed


class Plain(Architecture):
    """A feed-forward part alone, which nothing is wrong with."""

    more: tuple[Parameter, ...] = ()

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/up/kernel", "layers embed ffn"),
            kernel("layers/down/kernel", "layers ffn embed"),
            norm("final_norm/scale", "embed"),
            *self.more,
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group)
        return x + nn.rows(p["down"], nn.gelu(nn.columns(p["up"], h, "up")), c.group)


# --- Tables -----------------------------------------------------------------------------------------------------------


class Twice(Plain):
    more = (norm("layers/ln/scale", "layers embed"),)


class Strange(Plain):
    more = (kernel("layers/gate/kernel", "layers embed experts"),)


class Unstacked(Plain):
    more = (kernel("layers/gate/kernel", "embed ffn"),)


class Elsewhere(Plain):
    more = (kernel("router/kernel", "layers embed ffn"),)


class Headless(Plain):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return super().parameters(config)[:-1]


class Indivisible(Plain):
    more = (kernel("layers/gate/kernel", "layers embed 3*ffn"),)


class SplitTwice(Plain):
    more = (kernel("layers/gate/kernel", "layers ffn ffn"),)


class Vector(Plain):
    more = (kernel("layers/gate/kernel", "layers ffn"),)


class UnknownRole(Plain):
    more = (Parameter("layers/gate/kernel", "layers embed ffn", role="weight"),)  # type: ignore[arg-type]


class UnknownInit(Plain):
    more = (Parameter("layers/gate/kernel", "layers embed ffn", init="Normal"),)  # type: ignore[arg-type]


class WideNorm(Plain):
    more = (bias("final_norm/bias", "ffn"),)


class OneName(Plain):
    more = (kernel("layers/gate/kernel", "layers embed ffn", "gate.weight"),)


class SameName(Plain):
    more = (
        kernel("layers/gate/kernel", "layers embed 2 ffn", "h.{}.gate h.{}.up"),
        kernel("layers/other/kernel", "layers embed ffn", "h.{}.gate"),
    )


class FewNames(Plain):
    more = (kernel("layers/gate/kernel", "layers embed 3 ffn", "h.{}.a h.{}.b"),)


class NoParameters(Architecture):
    pass


class Rows(Plain):
    more = (("layers/gate/kernel", "layers embed ffn"),)  # type: ignore[assignment]


class Raises(Plain):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return super().parameters(config.shape)  # type: ignore[attr-defined]


class WithArguments(Plain):
    def __init__(self, depth: int):
        pass


# --- Layers -----------------------------------------------------------------------------------------------------------


class Shorter(Plain):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return super().layer(p, x, c)[:, 1:]


class Wider(Plain):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return super().layer(p, x, c).astype(jnp.float32)


class Pair(Plain):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return super().layer(p, x, c), x  # type: ignore[return-value]


class Misspelt(Plain):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return x + p["upp"]["kernel"]


class Inherited(ParallelBlock):
    """Has no parameter of those that its layer reads first; the layer is another file's."""

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return tuple(p for p in super().parameters(config) if p.names[1] != "ln")


class Whole(Plain):
    """Takes the kernel for a whole one."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return super().layer(p, x, c) + p["up"]["kernel"].reshape(c.config.hidden, c.config.ffn).sum()


class NoScalars(Plain):
    def aux(self, config: ModelConfig) -> tuple[Aux, ...]:
        return (Aux("balance"),)


class OtherScalars(NoScalars):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> tuple[jax.Array, Scalars]:
        return super().layer(p, x, c), {"balanced": x.mean()}


class FewKinds(Plain):
    def kinds(self, config: ModelConfig) -> tuple[str, ...]:
        return ("dense",)


class NoSuchKind(Plain):
    more = (kernel("layers/gate/kernel", "layers embed ffn", kinds=("gated",)),)


class KindOutside(Plain):
    more = (bias("final_norm/bias", "embed", kinds=("",)),)


class TwoOfOneName(Plain):
    def aux(self, config: ModelConfig) -> tuple[Aux, ...]:
        return Aux("balance"), Aux("balance", 0.5)


class PathAsName(Plain):
    def aux(self, config: ModelConfig) -> tuple[Aux, ...]:
        return (Aux("aux/balance"),)


class NoWeight(Plain):
    def aux(self, config: ModelConfig) -> tuple[Aux, ...]:
        return (Aux("balance", float("nan")),)


class NamesOnly(Plain):
    def aux(self, config: ModelConfig) -> tuple[Aux, ...]:
        return ("balance",)  # type: ignore[return-value]


# --- What only `check_model` finds ------------------------------------------------------------------------------------


class NoSum(Plain):
    """Forgets `leave`."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.norm(p["ln"], x, c.config.norm_epsilon)
        return x + nn.gelu(nn.columns(p["up"], h, "up")) @ p["down"]["kernel"]


class NoEnter(Plain):
    """Forgets `enter`, whose backward sums the gradients of a tensor group."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.norm(p["ln"], x, c.config.norm_epsilon)
        return x + nn.rows(p["down"], nn.gelu(nn.columns(p["up"], h, "up")), c.group)


class KeepsNaN(Plain):
    """Divides by a length that is zero while a stage is idle."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return super().layer(p, x / jnp.linalg.norm(x, axis=-1, keepdims=True), c)


class Unused(Plain):
    """Has a parameter that its layer does not read."""

    more = (kernel("layers/gate/kernel", "layers embed ffn"),)


class SeesAhead(Plain):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return super().layer(p, x, c) + x.mean(axis=1, keepdims=True)


class OneDocument(Recurrence):
    """Carries its state into the next document."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return super().layer(p, x, LayerContext(c.config, c.group, c.dropout, c.index, None))


class OwnPart(Routed):
    """Forgets `averaged`: each device has the scalars of its part of the sequence."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> tuple[jax.Array, Scalars]:
        y, scalars = super().layer(p, x, c)
        return y, scalars | {"busiest": x.astype("float32").mean()}
