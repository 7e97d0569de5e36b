"""The collectives of a traced program, read from its jaxpr, in seconds and without compiling.

A jaxpr says what a program asks of the links. XLA may join collectives, which changes no bytes, and drops those whose
results are not used. On CPUs it also widens bfloat16, which a jaxpr shows as it is on accelerators.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

# Kinds by the names of jax's primitives; ranks of an axis give their values to each other in no others.
KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
_LOCAL = ("axis_index", "pvary", "pcast")  # they name an axis, and send nothing


@dataclasses.dataclass(frozen=True)
class TracedCollective:
    """One collective of a traced program.

    Attributes:
        kind: one of paxtrain.xla.hlo.COLLECTIVES.
        bytes: bytes of one participant's operands: for an all-gather its shard, for a reduce-scatter all that it
            reduces.
        pairs: (source, target) devices of a collective-permute, as positions in `mesh.devices.flat`.
        groups: groups of devices that exchange values, likewise; empty for a collective-permute.
        executions: number of times that one execution of the program runs it. A loop whose trips are counted at run
            time counts once.
        certain: whether every device runs it: it is in no loop whose trips are counted at run time.
        op_name: named scopes that it comes from, and "while/body" for each loop around it, as HLO has them.
    """

    kind: str
    bytes: int
    pairs: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    executions: int
    certain: bool
    op_name: str


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The place of an equation: the mesh's axes, its turns, whether all devices come there, and the scopes."""

    sizes: Mapping[str, int]
    executions: int = 1
    certain: bool = True
    scopes: tuple[str, ...] = ()

    def inside(self, *scopes: str, turns: int = 1, certain: bool = True) -> "_Scope":
        """Return the place of the equations of a loop or a call here."""
        certain = self.certain and certain
        return _Scope(self.sizes, self.executions * turns, certain, (*self.scopes, *filter(None, scopes)))


def collectives(jaxpr: core.ClosedJaxpr, platform: str) -> list[TracedCollective]:
    """Return every collective that a program asks for inside `jax.shard_map`.

    Args:
        jaxpr: the traced program, as `jax.jit(f).trace(...).jaxpr` is.
        platform: platform whose branches of `lax.platform_dependent` count, such as "cpu" or "cuda".

    Raises:
        NotImplementedError: the program has a collective that this module does not know.
    """
    return list(_within(jaxpr.jaxpr, _Scope({}), platform))


def _within(jaxpr: Any, place: _Scope, platform: str) -> Iterator[TracedCollective]:
    """Yield the collectives of a jaxpr without constants, in order."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        here = place.inside(str(equation.source_info.name_stack))
        if name in KINDS:
            yield _collective(equation, here)
        elif name == "cond":
            possible = branches(params, platform)
            for branch in possible:
                yield from _within(branch.jaxpr, here.inside(certain=len(possible) == 1), platform)
        elif name == "scan":
            turns = here.inside("while", "body", turns=params["length"])
            yield from _within(params["jaxpr"].jaxpr, turns, platform)
        elif name == "while":
            yield from _within(params["body_jaxpr"].jaxpr, here.inside("while", "body", certain=False), platform)
        elif name == "shard_map":
            yield from _within(params["jaxpr"], dataclasses.replace(here, sizes=params["mesh"].shape), platform)
        else:
            if {"axis_name", "axes"} & params.keys() and "axis_index_groups" in params and name not in _LOCAL:
                raise NotImplementedError(f"{name} may be a collective, whose bytes are not known here")
            for inner in core.jaxprs_in_params(params):
                yield from _within(inner, here, platform)


def branches(params: Mapping[str, Any], platform: str) -> Sequence[Any]:
    """Return the branches of a conditional that can run: all, or the platform's if it is one over platforms."""
    platforms = params.get("branches_platforms")
    if platforms is None:
        return params["branches"]
    own = [i for i, names in enumerate(platforms) if names is None or platform in names]
    return [params["branches"][own[0]]]


def axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes that a collective runs over, by its equation's parameters."""
    named = params.get("axes", params.get("axis_name"))
    return named if isinstance(named, tuple) else (named,)


def _collective(equation: Any, place: _Scope) -> TracedCollective:
    """Return the collective of an equation."""
    params, kind = equation.params, KINDS[equation.primitive.name]
    rows = _groups(place.sizes, axes(params), params.get("axis_index_groups"))
    pairs: tuple[tuple[int, int], ...] = ()
    if kind == "collective-permute":
        pairs, rows = tuple((row[a], row[b]) for row in rows for a, b in params["perm"]), ()
    size = sum(math.prod(x.aval.shape) * np.dtype(x.aval.dtype).itemsize for x in equation.invars)
    return TracedCollective(kind, size, pairs, rows, place.executions, place.certain, "/".join(place.scopes))


def _groups(
    sizes: Mapping[str, int], axes: Sequence[str], parts: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that exchange values.

    Args:
        sizes: size of each axis of the mesh by name, the major one first.
        axes: axes over which they exchange, the major one first.
        parts: positions on the axes that exchange with each other; None: all.
    """
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    ids = np.moveaxis(ids, [list(sizes).index(axis) for axis in axes], range(-len(axes), 0))
    rows = ids.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()
    chosen = parts or [range(len(rows[0]))]
    return tuple(tuple(row[i] for i in part) for row in rows for part in chosen)
