"""The mean over groups of the differences that they have made to their weights, as they are or through a reducer.

A difference is what the shared weights are more than a group's own. So it points where a gradient would. The layers'
kernels go through the reducer, each layer's as a separate array; norms, biases and the embedding travel as they are.
An exchange is of one fragment of the weights, which is all of them if there is a single one. All functions run per
device.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from compress.collectives import packed
from compress.reducer import Reducer, Shard, mean, stored
from compress.reducer import each as each_state
from paxtrain.config.axes import PIPE
from paxtrain.errors import UserError
from paxtrain.outer.fragments import LAYERS, Fragments
from paxtrain.parallel.compression.checks import require_parts
from paxtrain.parallel.compression.named import named_reducer
from paxtrain.parallel.layout import Layout, Params, names
from paxtrain.pipeline.collectives import permute

GROUP = "group"  # axis of the mesh over groups
_FLOAT32 = 4  # bytes
ParamPath = tuple[str, ...]
FragmentSlot = tuple[
    ParamPath, int
]  # path of a stack of layers' kernels, and the layer's place in the fragment's stack


@dataclasses.dataclass(frozen=True)
class GroupExchange:
    """The exchange between the groups of a run.

    Attributes:
        layout: layout of the parameters of one group.
        groups: number of groups.
    """

    layout: Layout
    groups: int

    @functools.cached_property
    def fragments(self) -> Fragments:
        """The fragments that are exchanged one after another."""
        return Fragments(self.layout)

    @functools.cached_property
    def reducer(self) -> Reducer | None:
        """Reducer of the layers' kernels; None: they travel as they are.

        Raises:
            UserError: there is none of the configured name, or its options do not fit.
        """
        c = self.layout.config.compress
        return named_reducer(c, "outer") if c.outer.codec else None

    @property
    def shard(self) -> Shard:
        """Part of the mean that a group keeps: all of it."""
        return Shard(GROUP if self.groups > 1 else None, self.groups, -1)

    @functools.cached_property
    def shapes(self) -> dict[ParamPath, tuple[int, ...]]:
        """Shapes of a device's part of the parameters in mesh layout, by path."""
        sizes, specs = self.layout.config.mesh.sizes, jax.tree.leaves(self.layout.specs())
        found = {}
        for (path, x), spec in zip(jax.tree_util.tree_leaves_with_path(self.layout.shapes), specs, strict=True):
            axes = [(entry,) if isinstance(entry, str) else entry or () for entry in (*spec, *[None] * x.ndim)]
            found[names(path)] = tuple(n // math.prod(sizes[a] for a in some) for n, some in zip(x.shape, axes))
        return found

    def part_shapes(self, fragment: int) -> dict[ParamPath, tuple[int, ...]]:
        """Return the shapes of a device's part of a fragment, by path.

        Args:
            fragment: number of the fragment.
        """
        if self.fragments.count == 1:
            return self.shapes
        layers, some = self.fragments.slots[fragment].shape[1], self.fragments.names(fragment)
        part = {path: shape for path, shape in self.shapes.items() if path[0] in some}
        return {path: (layers, *shape[1:]) if path[0] == LAYERS else shape for path, shape in part.items()}

    @functools.cached_property
    def kernels(self) -> tuple[tuple[FragmentSlot, ...], ...]:
        """The kernels of each fragment that go through the reducer."""
        return tuple(tuple(self._coded(fragment)) for fragment in range(self.fragments.count))

    def _coded(self, fragment: int) -> Iterator[FragmentSlot]:
        """Yield the kernels of a fragment that go through the reducer."""
        ratio = self.layout.config.compress.min_ratio
        for path, shape in self.part_shapes(fragment).items():
            kernel = self.layout.rows[path].role == "kernel"
            if kernel and self.reducer and self.reducer.takes(shape[1:], self.shard, ratio):
                yield from ((path, place) for place in range(shape[0]))

    def check(self) -> None:
        """Require that the reducer takes at least one kernel, and its codec the parts of all.

        Raises:
            UserError: it takes none, or its codec does not fit a kernel's part.
        """
        c = self.layout.config.compress
        if self.reducer is None:
            return
        kernels = [shape[1:] for path, shape in self.shapes.items() if self.layout.rows[path].role == "kernel"]
        require_parts(self.reducer, [(shape, self.shard) for shape in kernels])
        if not any(self.kernels):
            raise UserError(
                f"compress.outer.codec={c.outer.codec} makes no kernel of a layer {c.min_ratio:g} times smaller "
                f"(compress.min_ratio) in {self.groups} equal parts; choose other options or a smaller min_ratio"
            )

    def init(self) -> Any:
        """Return the reducer's first states of a device; () without a reducer."""
        if self.reducer is None:
            return ()
        paths = [path for kernels in self.kernels for path, _ in kernels]
        return stored([self.reducer.init(self.shapes[path][1:], self.shard) for path in paths])

    def weights(self, fragment: int) -> int:
        """Return the number of a device's weights in a fragment, with zeros in the place of layers that it lacks.

        Args:
            fragment: number of the fragment.
        """
        return sum(map(math.prod, self.part_shapes(fragment).values()))

    def sent(self, fragment: int = 0) -> float:
        """Return the bytes that a device sends in an exchange, if collectives run over rings.

        Args:
            fragment: number of the fragment that is exchanged.
        """
        coded = [self.shapes[path][1:] for path, _ in self.kernels[fragment]]
        dense = self.weights(fragment) - sum(map(math.prod, coded))
        through = sum(self.reducer.wire_bytes(shape, self.shard) for shape in coded) if self.reducer else 0.0
        return 2 * (self.groups - 1) / self.groups * _FLOAT32 * dense + through

    @jax.named_scope("outer")
    def mean_difference(self, shared: Params, own: Params, state: Any, fragment: int = 0) -> tuple[Params, Any]:
        """Return the mean over groups of shared - own, and the reducer's next states.

        Args:
            shared: a device's part of a fragment of the shared weights.
            own: its part of that fragment of its group's weights.
            state: the reducer's states on this device, those of all fragments.
            fragment: number of the fragment.
        """
        difference = jax.tree.map(jnp.subtract, shared, own)
        leaves, structure = jax.tree_util.tree_flatten_with_path(difference)
        arrays = {names(path): x for path, x in leaves}
        if self.kernels[fragment]:
            state = self._through_reducer(arrays, state, fragment)
        coded = dict.fromkeys(path for path, _ in self.kernels[fragment])
        dense = [path for path in arrays if path not in coded]
        for path, x in zip(dense, self._dense([arrays[path] for path in dense]), strict=True):
            arrays[path] = x
        tree = jax.tree.unflatten(structure, list(arrays.values()))
        return self._one_table(tree), state

    def _dense(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return the means of arrays over groups, in one collective if XLA does not bucket them (see weights.py)."""
        if self.groups == 1:
            return arrays

        def over(x: jax.Array) -> jax.Array:
            return lax.psum(x, GROUP) / self.groups

        return lax.platform_dependent(
            arrays, cpu=lambda some: packed(over, some), default=lambda some: [over(x) for x in some]
        )

    def _through_reducer(self, arrays: dict[ParamPath, jax.Array], state: Any, fragment: int) -> Any:
        """Replace stacks of kernels by their means over groups, and return the reducer's next states.

        Args:
            arrays: differences of a device by path; those that the reducer takes are changed.
            state: the reducer's states.
            fragment: number of the fragment.
        """
        assert self.reducer is not None
        reducer, kernels = self.reducer, self.kernels[fragment]
        first, before = self.shapes[kernels[0][0]], sum(map(len, self.kernels[:fragment]))
        structure = jax.tree.structure(jax.eval_shape(lambda: reducer.init(first[1:], self.shard)))
        states = each_state(state, structure, sum(map(len, self.kernels)))
        here = slice(before, before + len(kernels))
        some = [arrays[path][place] for path, place in kernels]
        means, states[here], _ = mean(reducer, states[here], some, [self.shard] * len(some))
        by_path: dict[ParamPath, list[jax.Array]] = {}
        for (path, _), x in zip(kernels, means, strict=True):
            by_path.setdefault(path, []).append(x)
        arrays |= {path: jnp.stack(rows) for path, rows in by_path.items()}
        return stored(states)

    def _one_table(self, tree: Params) -> Params:
        """Return differences whose last stage has the first one's of a tied table, since sums may differ in a bit."""
        if not self.layout.swaps or self.groups == 1 or "embedding" not in tree:
            return tree
        table = tree["embedding"]["token"]
        last = self.layout.stage_map.last
        moved = permute(table, PIPE, ((0, last),))
        table = jnp.where(lax.axis_index(PIPE) == last, moved, table)
        return {**tree, "embedding": {**tree["embedding"], "token": table}}
