"""The fragments of a model, which groups exchange one after another (Streaming DiLoCo).

The tables and the last norm are in fragment 0. Each layer in turn goes to the fragment that has the fewest weights so
far, the first of several. Where fragments are equally large, that is the strided pattern of the paper. Which fragment a
layer is in depends on the model alone, so a checkpoint continues on another mesh.

References:
    Douillard et al. 2025, Streaming DiLoCo, https://arxiv.org/abs/2501.18512.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paxtrain.config.axes import PIPE
from paxtrain.config.checks import require
from paxtrain.model.fragments import layer_fragments
from paxtrain.parallel.layout import Layout, Params

LAYERS = "layers"  # entry of the parameters that has the stacks of layers


@dataclasses.dataclass(frozen=True)
class Fragments:
    """The fragments of the parameters in mesh layout; a single one is all of them.

    Attributes:
        layout: layout of the parameters of one group.
    """

    layout: Layout

    def __post_init__(self) -> None:
        """Require layers of one kind, if they are exchanged in parts."""
        kinds = sorted(set(self.layout.slot_kinds))
        require(
            self.count == 1 or len(kinds) == 1,
            f"outer.fragments={self.count} exchanges layers in turn, but those of this model are of the kinds "
            f"{', '.join(kinds)}; outer.fragments=1 exchanges all at once",
        )

    @property
    def count(self) -> int:
        """Number of fragments."""
        return self.layout.config.outer.fragments

    @functools.cached_property
    def of_layer(self) -> tuple[int, ...]:
        """Fragment of each layer, in model order."""
        return layer_fragments(self.layout.config.model, self.count)

    @functools.cached_property
    def of_slot(self) -> np.ndarray:
        """Fragment of each stage's layer slots, -1 for slots without a layer: int [stages, slots of a stage]."""
        layers = self.layout.layer_of.reshape(self.layout.stages, -1)
        return np.where(layers < 0, -1, np.array(self.of_layer)[layers])

    @functools.cached_property
    def slots(self) -> tuple[np.ndarray, ...]:
        """The slots of each fragment: int [stages, K]. A stage that has fewer layers of it fills up with no slots."""
        found, none = [], self.of_slot.shape[1]
        for fragment in range(self.count):
            rows = [np.flatnonzero(row == fragment) for row in self.of_slot]
            most = max(map(len, rows))
            found.append(np.stack([np.append(row, none + np.arange(most - len(row))) for row in rows]))
        return tuple(found)

    def names(self, fragment: int) -> tuple[str, ...]:
        """Return the entries of the parameters of which a fragment has a part."""
        every = tuple(self.layout.shapes)
        if self.count == 1:
            return every
        return tuple(name for name in every if (self.slots[fragment].size if name == LAYERS else fragment == 0))

    def take(self, params: Params, fragment: int) -> Params:
        """Return a device's part of a fragment; it has K layers, zeros where its stage has fewer.

        Args:
            params: The device's part of the parameters, or of a tree shaped like them.
            fragment: Number of the fragment.
        """
        if self.count == 1:
            return params
        found = {name: params[name] for name in self.names(fragment)}
        if LAYERS in found:
            slots = self._own_slots(fragment)
            found[LAYERS] = jax.tree.map(lambda x: x.at[slots].get(mode="fill", fill_value=0), found[LAYERS])
        return found

    def put(self, params: Params, part: Params, fragment: int) -> Params:
        """Return a device's part of the parameters in which a fragment is replaced.

        Args:
            params: The device's part of the parameters, or of a tree shaped like them.
            part: Its part of the fragment, as `take` returns it.
            fragment: Number of the fragment.
        """
        if self.count == 1:
            return part
        found = {**params, **part}
        if LAYERS in part:
            slots = self._own_slots(fragment)
            found[LAYERS] = jax.tree.map(
                lambda x, new: x.at[slots].set(new, mode="drop", unique_indices=True), params[LAYERS], part[LAYERS]
            )
        return found

    def _own_slots(self, fragment: int) -> jax.Array:
        """Return the slots of a fragment on the stage of the device, int [K]."""
        return jnp.asarray(self.slots[fragment], jnp.int32)[lax.axis_index(PIPE)]
