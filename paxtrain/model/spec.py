"""An architecture: its parameters as a table, from which all that counts, splits or names them follows; its layer."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.config.axes import AXES, PIPE, TENSOR, UNSPLIT, parts

if TYPE_CHECKING:  # they import jax, which takes long
    import jax

    from paxtrain.model.context import LayerContext

Params: TypeAlias = dict[str, Any]
Demand: TypeAlias = tuple[object, tuple[object, ...]]  # what a config.json says, and what is implemented
Role: TypeAlias = Literal["kernel", "norm", "bias", "table"]
Init: TypeAlias = Literal["normal", "residual", "ones", "zeros"]
Scalars: TypeAlias = "dict[str, jax.Array]"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A row of an architecture's table: one array of the canonical parameters, stacked over layers.

    Attributes:
        path: place in the tree of parameters, such as "layers/qkv/kernel".
        dims: a word for each dim, such as "layers embed 3 heads*head": a logical name, names with * between, a number.
            An axis splits the dim that begins with a name of its record (paxtrain/config/axes.py); no array has two.
        files: names in Hugging Face's files, with {} for the layer's number. Several arrays are stacked here, along the
            dim that is a number or "tables". Rows with the same name share its array, one behind the other along
            its outputs.
        role: "kernel" of a matrix product with every token, "norm", "bias", or "table" whose rows are looked up.
        kinds: kinds of the layers that have it; (): all layers.
        init: "normal" N(0, 0.02), "residual" N(0, 0.02 / sqrt(2 L)), "ones" or "zeros".
        transposed: Hugging Face's files hold the kernel as [out, in].
    """

    path: str
    dims: str
    files: str = ""
    role: Role = "kernel"
    init: Init = "normal"
    transposed: bool = False
    kinds: tuple[str, ...] = ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The keys of its path."""
        return tuple(self.path.split("/"))

    @functools.cached_property
    def lead(self) -> str:
        """The dim that stacks layers or tables, or ""; the mesh layout has a dim of stages in its place."""
        first = self.dims.partition(" ")[0]
        return first if first in AXES[PIPE].dims else ""

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The dims without `lead`: those of one layer's array, or of one table."""
        return tuple(self.dims.split()[bool(self.lead) :])

    def of(self, kind: str) -> bool:
        """Return whether layers of a kind have it."""
        return not self.kinds or kind in self.kinds

    def split_by(self, axis: str) -> int | None:
        """Return the place in `own` of the dim that an axis of the mesh splits, or None."""
        return next((i for i, dim in enumerate(self.own) if dim.partition("*")[0] in AXES[axis].dims), None)

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """The names of `files`."""
        return tuple(self.files.split())

    @functools.cached_property
    def stack(self) -> int | None:
        """The place in `own` of the dim along which several arrays of the files are stacked, or None."""
        numbers = [i for i, dim in enumerate(self.own) if dim.isdecimal()]
        return numbers[0] if len(self.sources) > 1 and numbers else None

    @property
    def decays(self) -> bool:
        """True if weight decay applies."""
        return self.role in ("kernel", "table")

    @property
    def cast(self) -> bool:
        """True if a step uses it in the compute dtype; norms and biases are small and stay in float32."""
        return self.role in ("kernel", "table")

    def shape(self, config: ModelConfig, mesh: Mapping[str, Any] = UNSPLIT) -> tuple[Any, ...]:
        """Return the sizes of its `own` dims on a device.

        Args:
            config: the model's shape.
            mesh: sizes of axes by name, ints or arrays of ints; others have one device.
        """
        known, dims = config.dims, [dim.split("*") for dim in self.own]
        return tuple(math.prod(known[x] if x in known else int(x) for x in dim) // parts(dim[0], mesh) for dim in dims)


kernel = functools.partial(Parameter, role="kernel")
norm = functools.partial(Parameter, role="norm", init="ones")
bias = functools.partial(Parameter, role="bias", init="zeros")
table = functools.partial(Parameter, role="table")


def vocabulary(config: ModelConfig, embedding: str = "", head: str = "lm_head.weight") -> Parameter:
    """Return the vocabulary's table, or those of the embedding and of an untied head, which a stage holds one of.

    Args:
        config: the model's shape.
        embedding: name of the embedding's table in Hugging Face's files; "": neither has one.
        head: name of the head's table there.
    """
    if config.tied_head:
        return table("embedding/token", "vocab embed", embedding)
    return table("embedding/token", "tables vocab embed", f"{embedding} {head}" if embedding else "")


class Aux(NamedTuple):
    """A scalar that every layer returns beside its output, such as the loss that balances experts.

    The run reports it as aux/NAME: its sum over the layers, and mean over micro-batches and data ranks.

    Attributes:
        name: its name.
        weight: factor with which it is added to the loss whose gradients are trained; 0: it is only reported.
    """

    name: str
    weight: float = 0.0

    @property
    def metric(self) -> str:
        """Its name in the metrics of a run."""
        return f"aux/{self.name}"


class Architecture:
    """The description of a family of models. `config`, which its functions get, is the model's shape.

    Attributes:
        model_types: its names in Hugging Face's config.json; the first one is that of exports.
        axes: mesh axes that may split its parameters, since its layers run the collectives over them.
        options: its further values (--config.model.options.NAME) and what they are by default; `option` returns one.
        reach: those options that say how far tokens see or where they are, which may change when a run goes on.
    """

    model_types: tuple[str, ...] = ()
    axes: tuple[str, ...] = (TENSOR,)
    options: Mapping[str, Any] = MappingProxyType({})
    reach: tuple[str, ...] = ()

    def option(self, config: ModelConfig, name: str) -> Any:
        """Return the value of one of its options."""
        return config.options.get(name, self.options[name])

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        """Return the table of parameters: below "layers" a layer's, below "embedding" and "final_norm" the others."""
        raise NotImplementedError

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        """Return what its config.json says besides what those of all models say."""
        raise NotImplementedError

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        """Return the fields of ModelConfig that a config.json determines, and what it must say of other things.

        Args:
            values: content of the config.json.
        """
        raise NotImplementedError

    def kinds(self, config: ModelConfig) -> tuple[str, ...]:
        """Return each layer's kind, in model order; `layer` reads it as c.kind, and parameters may have some only."""
        return ("",) * config.layers

    def aux(self, config: ModelConfig) -> tuple[Aux, ...]:
        """Return the scalars that `layer` returns beside its output."""
        return ()

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array | tuple[jax.Array, Scalars]":
        """Return the output of one layer, [B, S, H] in the compute dtype; if `aux` names scalars, also those by name.

        The scalars are float32 [], and equal on all devices of a tensor group (see `paxtrain.model.averaged`).

        Args:
            p: one layer's parameters, without the leading dim.
            x: [B, S, H] in the compute dtype.
            c: what else the layer depends on.
        """
        raise NotImplementedError

    def embedding_scale(self, config: ModelConfig) -> float:
        """Return the factor of the tokens' rows of the embedding's table."""
        return 1.0

    def flash(self, config: ModelConfig) -> bool:
        """Return whether its attention may be cuDNN's, whose scores have no bound."""
        return True

    def logit_cap(self, config: ModelConfig) -> float:
        """Return c of the head's logits, c tanh(logits / c); 0: they are as they are."""
        return 0.0

    def head(self, p: Params, y: "jax.Array", c: "LayerContext") -> "jax.Array":
        """Return what is multiplied with the head's table, [B, S, H] in the compute dtype: the normalized y.

        Args:
            p: parameters of "final_norm".
            y: the last layer's output, [B, S, H] in the compute dtype.
            c: what else it depends on, with the number of layers as its index.
        """
        return nn.norm(p, y, c.config.norm_epsilon)
