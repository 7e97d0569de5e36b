"""Conversion between the canonical parameters and the names and shapes of Hugging Face's transformers.

The architecture's table says what is what there. Files hold kernels as matrices and biases as vectors, and often two
arrays for a stacked one of ours (keys and values, gate and up), or one for several of ours. Only our vocabulary is
padded. Both pair rotary dims i and i + D/2.
"""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paxtrain.config import ModelConfig, read_section
from paxtrain.config.model import FAMILIES
from paxtrain.errors import UserError
from paxtrain.model.families import shipped
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


def shapes(config: ModelConfig, vocabulary: int = 0, positions: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of Hugging Face's files by name.

    Args:
        config: architecture.
        vocabulary: number of tokens of the arrays. 0: all of the architecture's.
        positions: number of rows of the arrays' position table. 0: as many as the architecture has.
    """
    require_names(config)
    found: dict[str, tuple[int, ...]] = {}
    for p in table(config):
        *rows, last = _shapes(p, config)[1]
        if p.own[0] == "vocab":
            rows = [vocabulary or config.vocab_size]
        if p.own[0] == "positions":
            rows = [positions or rows[0]]
        for name in p.sources:
            for layer in stack(config, p) if p.lead == "layers" else (0,):
                key = name.format(layer)
                before = found[key][:: -1 if p.transposed else 1][-1] if key in found else 0
                found[key] = (*rows, before + last)[:: -1 if p.transposed else 1]
    return found


def require_array(name: str, dtype: str, shape: Sequence[int], right: tuple[int, ...], config: ModelConfig) -> None:
    """Require that an array of the files has a float dtype and the right shape.

    Args:
        name: its name.
        dtype: its dtype.
        shape: its shape.
        right: shape that it must have.
        config: architecture, for messages.

    Raises:
        UserError: it has another shape, or is quantized.
    """
    if dtype not in _FLOATS:
        raise UserError(f"array {name} is of {dtype}; {', '.join(_FLOATS)} can be imported")
    if tuple(shape) != right:
        of = config.module or config.family
        raise UserError(f"array {name} is {list(shape)}; a {of} model of these sizes has {list(right)}")


def params(
    read: Callable[[str], np.ndarray],
    config: ModelConfig,
    vocabulary: int = 0,
    positions: int = 0,
    place: Callable[[tuple[str, ...], np.ndarray], Any] = lambda _, x: x,
) -> Params:
    """Return canonical parameters, float32.

    Args:
        read: function that returns the array of a name, of any float dtype.
        config: architecture.
        vocabulary: number of tokens of the arrays; the tables' rows of further ones are the mean row. 0: all.
        positions: number of rows of the arrays' position table, of which the first ones are taken. 0: all.
        place: function of a parameter's path and its numpy array, whose result is returned in its place.

    Raises:
        UserError: an array has another shape than the architecture's, is quantized, or has numbers that are not finite.
    """
    there = shapes(config, vocabulary, positions)
    sharing = collections.defaultdict[str, list[Parameter]](list)  # of one array of the files
    for p in table(config):
        sharing[p.files].append(p)

    def one(p: Parameter, name: str) -> np.ndarray:
        """Return an array of the files as it is here."""
        x = read(name)
        require_array(name, x.dtype.name, x.shape, there[name], config)
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise UserError(
                f"array {name} has numbers that are not finite or too large for float32; "
                "its file is damaged, or was saved from a run that diverged"
            )
        if p.own[0] == "vocab":
            x = np.concatenate([x, np.repeat(x.mean(0, keepdims=True), config.vocab_size - len(x), axis=0)])
            return np.pad(x, ((0, config.padded_vocab - config.vocab_size), (0, 0)))
        x, here = x.T if p.transposed else x, _shapes(p, config)[0]
        if p.own[0] == "positions":  # of a shorter sequence the first positions are the same
            return x[: here[0]]
        rows = sharing[p.files]
        if len(rows) > 1:
            sizes = [_shapes(row, config)[1][-1] for row in rows]
            begin = sum(sizes[: rows.index(p)])
            x = x[..., begin : begin + sizes[rows.index(p)]]
        return x.reshape(here)

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

    return tree({names: place(names, canonical(p)) for names, p in by_names(config).items()})


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
