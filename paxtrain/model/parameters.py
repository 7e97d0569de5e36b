"""The parameters of a configuration's model: its architecture's table, and what is counted by it. No jax."""

import functools
from collections.abc import Mapping
from typing import Any

from paxtrain.config import ModelConfig
from paxtrain.model.gpt2 import GPT2
from paxtrain.model.llama import Llama
from paxtrain.model.spec import Architecture, Parameter, Params

ARCHITECTURES: dict[str, Architecture] = {"gpt2": GPT2(), "llama": Llama()}  # by ModelConfig.family


def architecture(config: ModelConfig) -> Architecture:
    """Return the architecture of a model."""
    return ARCHITECTURES[config.family]


@functools.lru_cache(maxsize=1024)
def table(config: ModelConfig) -> tuple[Parameter, ...]:
    """Return the table of a model's parameters."""
    return architecture(config).parameters(config)


@functools.lru_cache(maxsize=1024)
def by_names(config: ModelConfig) -> dict[tuple[str, ...], Parameter]:
    """Return the same by the keys of each path, in jax's order of nested dictionaries."""
    return {p.names: p for p in sorted(table(config), key=lambda p: p.names)}


def tree(leaves: Mapping[tuple[str, ...], Any]) -> Params:
    """Return values by path as nested dictionaries."""
    found: Params = {}
    for names, leaf in leaves.items():
        inner = found
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = leaf
    return found
