"""The model: what architectures are made of, tables of parameters and functions of a layer, split by tensor.

spec.py               what an architecture gives, and what a row of its table says
parameters.py         the table of a configuration's model, and what is counted by it
families.py           architectures by family, and of one's own by package.module:Class
transformer.py        the model of a configuration, for one device and for many; which attention it has
context.py            what a layer depends on besides its parameters; dropout
attention.py          attention, rotary positions
decoder.py            parts that decoders of Llama's kind share
rotary.py             angles of rotary positions, and their scalings
pointwise.py          norms and activations, which keep little for their backward
tensor_parallel.py    products with split kernels, and the collectives of a layer and the embedding over tensor
fragments.py          the number of the fragment that each layer is in, for groups that train apart (outer/)
cross_entropy.py      the head's loss and its gradients, without the logits of all tokens

The names below are the parts of a layer. Importing this package, a table or an architecture does not import jax; each
name below does when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paxtrain.model.attention import among as among
    from paxtrain.model.attention import attend as attend
    from paxtrain.model.attention import either as either
    from paxtrain.model.attention import heads as heads
    from paxtrain.model.attention import rotate as rotate
    from paxtrain.model.context import dropped as dropped
    from paxtrain.model.context import middle as middle
    from paxtrain.model.pointwise import exact_gelu as exact_gelu
    from paxtrain.model.pointwise import geglu as geglu
    from paxtrain.model.pointwise import gelu as gelu
    from paxtrain.model.pointwise import norm as norm
    from paxtrain.model.pointwise import split_norm as split_norm
    from paxtrain.model.pointwise import swiglu as swiglu
    from paxtrain.model.rotary import turns as turns
    from paxtrain.model.tensor_parallel import averaged as averaged
    from paxtrain.model.tensor_parallel import columns as columns
    from paxtrain.model.tensor_parallel import enter as enter
    from paxtrain.model.tensor_parallel import leave as leave
    from paxtrain.model.tensor_parallel import rows as rows

_EXPORTS = {
    "among": "attention",
    "attend": "attention",
    "averaged": "tensor_parallel",
    "columns": "tensor_parallel",
    "dropped": "context",
    "either": "attention",
    "enter": "tensor_parallel",
    "exact_gelu": "pointwise",
    "geglu": "pointwise",
    "gelu": "pointwise",
    "heads": "attention",
    "leave": "tensor_parallel",
    "middle": "context",
    "norm": "pointwise",
    "rotate": "attention",
    "rows": "tensor_parallel",
    "split_norm": "pointwise",
    "swiglu": "pointwise",
    "turns": "rotary",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'paxtrain.model' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    return getattr(importlib.import_module(f"paxtrain.model.{_EXPORTS[name]}"), name)
