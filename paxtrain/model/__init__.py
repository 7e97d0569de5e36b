"""The model: architectures as tables of parameters and functions of a layer, and tensor parallelism inside them.

gpt2.py llama.py      the architectures: parameters, and a layer that reads aloud
spec.py               what an architecture gives, and what a row of its table says
parameters.py         the table of a configuration's model, and what is counted by it
imported.py           architectures of one's own, by package.module:Class
transformer.py        the model of a configuration, for one device and for many
context.py            what a layer depends on besides its parameters; dropout
attention.py          attention, rotary positions, the choice of the implementation
pointwise.py          norms and activations, which keep little for their backward
tensor_parallel.py    products with split kernels, and the collectives of a layer and the embedding over tensor
fragments.py          the fragments in which groups that train apart exchange the layers
cross_entropy.py      the head's loss and its gradients, without the logits of all tokens

The names below are the parts of a layer. Importing this package, a table or an architecture does not import jax; each
name below does when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paxtrain.model.attention import attend as attend
    from paxtrain.model.attention import heads as heads
    from paxtrain.model.attention import rotate as rotate
    from paxtrain.model.context import dropped as dropped
    from paxtrain.model.context import middle as middle
    from paxtrain.model.pointwise import gelu as gelu
    from paxtrain.model.pointwise import norm as norm
    from paxtrain.model.pointwise import swiglu as swiglu
    from paxtrain.model.tensor_parallel import averaged as averaged
    from paxtrain.model.tensor_parallel import columns as columns
    from paxtrain.model.tensor_parallel import enter as enter
    from paxtrain.model.tensor_parallel import leave as leave
    from paxtrain.model.tensor_parallel import rows as rows

_EXPORTS = {
    "attend": "attention",
    "averaged": "tensor_parallel",
    "columns": "tensor_parallel",
    "dropped": "context",
    "enter": "tensor_parallel",
    "gelu": "pointwise",
    "heads": "attention",
    "leave": "tensor_parallel",
    "middle": "context",
    "norm": "pointwise",
    "rotate": "attention",
    "rows": "tensor_parallel",
    "swiglu": "pointwise",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'paxtrain.model' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    return getattr(importlib.import_module(f"paxtrain.model.{_EXPORTS[name]}"), name)
