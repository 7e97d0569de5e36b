"""Architectures beside the families GPT-2 and Llama. A file here is one; nothing else names it.

A configuration names one by its class, as it does with an architecture of one's own
(--config.model.module=paxtrain.architectures.gpt_neox:GPTNeoX), and the import from Hugging Face's layout finds it by
its `model_types`.
"""

import importlib
import pkgutil

from paxtrain.model.spec import Architecture


def paths() -> tuple[str, ...]:
    """Return the classes of the architectures as package.module:Class."""
    names = sorted(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    return tuple(f"{name}:{kind.__name__}" for name in names for kind in _classes(name))


def _classes(name: str) -> list[type[Architecture]]:
    some = (one for one in vars(importlib.import_module(name)).values() if isinstance(one, type))
    return [one for one in some if issubclass(one, Architecture) and one.__module__ == name]
