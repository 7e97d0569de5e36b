"""Conversion between the canonical parameters and the names and shapes of Hugging Face's transformers.

The architecture's table says what is what there. Files hold kernels as matrices and biases as vectors, and often two
arrays for a stacked one of ours (keys and values, gate and up), or one for several of ours. Only our vocabulary is
padded. Both pair rotary dims i and i + D/2.
"""

import collections
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paxtrain.config import ModelConfig, read_section
from paxtrain.config.model import FAMILIES
from paxtrain.errors import UserError
from paxtrain.model.imported import shipped
from paxtrain.model.parameters import architecture, by_names, stack, stacked, table, tree
from paxtrain.model.spec import Architecture, Parameter, Params

_FLOATS = ("float64", "float32", "float16", "bfloat16")


@functools.cache
def _known() -> dict[str, str]:
    """Return the families by model_type."""
    return {kind: family for family in FAMILIES for kind in shipped(family).model_types}


# --- Arrays -----------------------------------------------------------------------------------------------------------


def require_names(config: ModelConfig) -> None:
    """Require that the architecture has the names of Hugging Face's files.

    Raises:
        UserError: it is one of one's own that lacks some.
    """
    one, of = architecture(config), f"model.module={config.module}"
    if not one.model_types:
        raise UserError(f"{of} has no model_types, so it is no model of Hugging Face's files")
    if type(one).to_huggingface is Architecture.to_huggingface:
        raise UserError(f"{of} has model_types but no to_huggingface(), which gives its config.json")
    if nameless := [p.path for p in table(config) if not p.files]:
        raise UserError(f"{of} has no names in Hugging Face's files for {', '.join(nameless)}")


def _shapes(p: Parameter, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one array of the files, as it is here and, before it is transposed, as it is there."""
    here = tuple(size for i, size in enumerate(p.shape(config)) if i != p.stack)
    if p.role == "kernel":
        return here, (here[0], math.prod(here[1:]))
    return here, (math.prod(here),) if p.role == "bias" else here


def weights(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the arrays of transformers' state_dict by name.

    Args:
        params: canonical parameters in numpy.
        config: architecture.
    """
    require_names(config)
    found: dict[str, np.ndarray] = {}

    def add(p: Parameter, x: np.ndarray, layer: int = 0) -> None:
        axis = 0 if p.lead == "tables" else p.stack
        parts = [x] if axis is None else list(np.moveaxis(x, axis, 0))
        for name, part in zip(p.sources, parts, strict=True):
            part = part[: config.vocab_size] if p.own[0] == "vocab" else part.reshape(_shapes(p, config)[1])
            name = name.format(layer)
            before = [found[name].T if p.transposed else found[name]] if name in found else []
            whole = np.concatenate([*before, part], axis=-1)  # rows of one array follow each other by outputs
            found[name] = np.ascontiguousarray(whole.T if p.transposed else whole)

    arrays = [(p, params[p.names[0]]) for p in table(config)]
    for p, entry in arrays:
        if p.lead != "layers":
            add(p, entry[p.names[1]])
    for layer in range(config.layers):
        for p, entry in arrays:
            if p.lead == "layers" and layer in stack(config, p):
                add(p, entry[p.names[1]][p.names[2]][stack(config, p).index(layer)], layer)
    return found


def params(read: Callable[[str], np.ndarray], config: ModelConfig, vocabulary: int = 0, positions: int = 0) -> Params:
    """Return canonical parameters in numpy, float32.

    Args:
        read: function that returns the array of a name, of any float dtype.
        config: architecture.
        vocabulary: number of tokens of the arrays; the tables' rows of further ones are the mean row. 0: all.
        positions: number of rows of the arrays' position table, of which the first ones are taken. 0: all.

    Raises:
        UserError: an array has another shape than the architecture's, is quantized, or has numbers that are not finite.
    """
    require_names(config)
    sharing = collections.defaultdict[str, list[Parameter]](list)  # of one array of the files
    for p in table(config):
        sharing[p.files].append(p)

    def checked(name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array as float32, if it has the shape."""
        x = read(name)
        if x.dtype.name not in _FLOATS:
            raise UserError(f"array {name} is of {x.dtype.name}; {', '.join(_FLOATS)} can be imported")
        if x.shape != shape:
            of = config.module or config.family
            raise UserError(f"array {name} is {list(x.shape)}; a {of} model of these sizes has {list(shape)}")
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise UserError(
                f"array {name} has numbers that are not finite or too large for float32; "
                "its file is damaged, or was saved from a run that diverged"
            )
        return x

    def one(p: Parameter, name: str) -> np.ndarray:
        """Return an array of the files as it is here."""
        here, there = _shapes(p, config)
        if p.own[0] == "vocab":
            x = checked(name, (vocabulary or config.vocab_size, *there[1:]))
            x = np.concatenate([x, np.repeat(x.mean(0, keepdims=True), config.vocab_size - len(x), axis=0)])
            return np.pad(x, ((0, config.padded_vocab - config.vocab_size), (0, 0)))
        if p.own[0] == "positions":  # of a shorter sequence the first positions are the same
            return checked(name, (positions or there[0], *there[1:]))[: there[0]]
        rows = sharing[p.files]
        if len(rows) == 1:
            return (checked(name, there[::-1]).T if p.transposed else checked(name, there)).reshape(here)
        ends = np.cumsum([_shapes(row, config)[1][-1] for row in rows])
        there, end, size = (*there[:-1], int(ends[-1])), ends[rows.index(p)], there[-1]
        x = checked(name, there[::-1]).T if p.transposed else checked(name, there)
        return x[..., end - size : end].reshape(here)

    def joined(p: Parameter, layer: int = 0) -> np.ndarray:
        parts = [one(p, name.format(layer)) for name in p.sources]
        return np.stack(parts, axis=p.stack or 0) if len(parts) > 1 else parts[0]

    def canonical(p: Parameter) -> np.ndarray:
        if p.lead != "layers":
            return joined(p)
        found = np.empty(stacked(config, p), np.float32)
        for row, layer in enumerate(stack(config, p)):
            found[row] = joined(p, layer)
        return found

    return tree({names: canonical(p) for names, p in by_names(config).items()})


# --- Configuration ----------------------------------------------------------------------------------------------------


def to_config(config: ModelConfig, dtype: str) -> dict[str, object]:
    """Return the config.json of an architecture, without the ids of tokens that begin and end documents.

    Args:
        config: architecture.
        dtype: dtype of the saved arrays.
    """
    return {
        **architecture(config).to_huggingface(config),
        "model_type": architecture(config).model_types[0],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_head,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def from_config(values: Mapping[str, Any], where: str) -> dict[str, object]:
    """Return the fields of ModelConfig that a config.json determines.

    Args:
        values: content of the config.json.
        where: name of the file, for messages.

    Raises:
        UserError: the architecture is not implemented, or a size or the id of a token is missing or invalid.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _known():
        raise UserError(f"{where} is of model_type {kind!r}, which is not implemented; {', '.join(_known())} are")
    family = _known()[kind]
    if quantized := values.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise UserError(f"{where} is of a quantized model ({method}); take the one that it was made of")
    try:
        fields, demands = shipped(family).from_huggingface(values)
        fields = {"family": family, "vocab_size": values["vocab_size"], **fields}
    except KeyError as error:
        raise UserError(f"{where} lacks {error.args[0]}; is it the config.json of a {kind} model?") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"{where} has values that no {kind} model has: {error}") from error
    for name, (value, known) in demands.items():
        if value not in known:
            raise UserError(
                f"{where} says {name}={value!r}, which is not implemented; "
                f"{' or '.join(repr(x) for x in known)} would work"
            )
    model = read_section(ModelConfig, fields, f"{where}: model")
    try:
        table(model)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    _check_special(values, where)
    return fields


def _check_special(values: Mapping[str, Any], where: str) -> None:
    """Require that the tokens which begin and end a document are ids; those beyond the vocabulary are no tokens."""
    for name in ("bos_token_id", "eos_token_id"):
        found = values.get(name)
        for number in found if isinstance(found, list) else [] if found is None else [found]:
            if type(number) is not int or number < 0:
                raise UserError(
                    f"{where} says {name}={number!r}; it must be an id of the vocabulary, or null if there is no such "
                    "token"
                )
