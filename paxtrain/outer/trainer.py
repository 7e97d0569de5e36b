"""The trainer of groups: every group takes its own steps, and every H steps an exchange joins them.

The mesh has a fourth axis, `group`, before data. A group is a trainer's mesh (data, pipe, tensor), and everything
inside of a step belongs to one group: the step has no collective over `group`. What groups have apart (weights, the
optimizer's state, codecs' states) has a leading dim of groups, split over `group`. What they share (the shared
weights, which are the model of evaluations and checkpoints, and the outer momentum) is the same on all groups.

The weights may be exchanged in fragments, one after another, and while the next step runs (timetable.py). Then the
program of that step has the exchange in it: XLA runs programs of a device one after another, so that only within a
program anything lies under anything else.

References:
    Douillard et al. 2023, DiLoCo, https://arxiv.org/abs/2311.08105.
    Douillard et al. 2025, Streaming DiLoCo, https://arxiv.org/abs/2501.18512.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compress import Codec
from compress.codec import codec_name
from paxtrain.config import Config
from paxtrain.config.axes import AXES, batch_axes
from paxtrain.outer.exchange import GROUP, GroupExchange
from paxtrain.outer.fragments import LAYERS
from paxtrain.parallel.compression.settled import CodecStates
from paxtrain.parallel.layout import Params, is_spec, names
from paxtrain.parallel.mesh import device_spec
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.pipeline import virtual
from paxtrain.process import distributed
from paxtrain.tables import size


@flax.struct.dataclass
class OuterState:
    """The state that groups keep besides a training state.

    Attributes:
        params: Weights of each group in mesh layout, [groups, ...].
        skipped: Steps that each group has skipped, because its gradients were not finite, int32 [groups].
        momentum: State of the outer optimizer.
    """

    params: Params
    skipped: jax.Array
    momentum: optax.OptState


@flax.struct.dataclass
class GroupedState(TrainState):
    """The state of groups. Its params are the shared weights, and its skipped is the most that a group has skipped.

    Attributes:
        outer: What the groups keep besides.
    """

    outer: OuterState


def trainer_of(config: Config, mesh: Mesh, codec: Codec | None = None) -> Trainer:
    """Return the trainer of a configuration, with groups or without.

    Args:
        config: Configuration of the run.
        mesh: Device mesh as `make_mesh` returns it.
        codec: Codec of the gradients between stages, instead of the configuration's (see Trainer).
    """
    return grouped(config, mesh, codec=codec) if config.outer.every else Trainer(config, mesh, codec=codec)


def grouped(config: Config, mesh: Mesh, **more: Any) -> "GroupedTrainer":
    """Return the trainer of a configuration with groups.

    Args:
        config: Configuration of the run; its outer.every is above 0.
        mesh: Device mesh as `make_mesh` returns it.
        more: Attributes of Trainer, by name.
    """
    groups = config.groups if mesh.size > 1 else 1  # a single device emulates all, or there is only one
    data, *rest = mesh.devices.shape
    devices = mesh.devices.reshape(groups, data // groups, *rest)
    axes = Mesh(devices, (GROUP, *AXES), axis_types=(mesh.axis_types[0],) * (1 + len(AXES)))
    return GroupedTrainer(config.of_group(), axes, groups=config.groups, **more)


def _is_params(x: object) -> bool:
    return isinstance(x, dict)


def _apart(specs: Any) -> Any:
    """Return the specs of arrays that have a leading dim of groups besides."""
    return jax.tree.map(lambda spec: PartitionSpec(GROUP, *spec), specs, is_leaf=is_spec)


@dataclasses.dataclass(frozen=True)
class GroupedTrainer(Trainer):
    """The compiled functions of groups that train apart. Its configuration is that of one group.

    Attributes:
        groups: Number of groups.
        fragment: Fragment whose exchange runs under the step; None: the step has no exchange.
    """

    groups: int = 1
    fragment: int | None = None
    _metrics_spec = PartitionSpec(GROUP)

    @functools.cached_property
    def exchange(self) -> GroupExchange:
        """The exchange between the groups."""
        return GroupExchange(self.layout, self.groups)

    @functools.cached_property
    def outer(self) -> optax.GradientTransformation:
        """Outer optimizer: Nesterov's momentum on the mean of the differences."""
        outer = self.config.outer
        return optax.sgd(outer.lr, outer.momentum or None, nesterov=True)

    def sent(self) -> list[float]:
        """Return the bytes that a device sends in the exchange of each fragment, if collectives run over rings."""
        return [self.exchange.sent(fragment) for fragment in range(self.config.outer.fragments)]

    def fullest(self) -> "GroupedTrainer":
        """Return the trainer whose step takes the most memory: the one over the largest fragment's exchange, if any."""
        outer = self.config.outer
        largest = max(range(outer.fragments), key=self.exchange.weights) if outer.overlap else None
        return dataclasses.replace(self, fragment=largest)

    def describe(self) -> list[tuple[str, str]]:
        """Return rows for the run's first table, whose mesh and batch are those of one group."""
        outer, data, sent = self.config.outer, self.config.mesh.data, self.sent()
        what = f"{self.groups} of {data} data rank{'s' if data > 1 else ''} each train apart (mesh and batch: of one)"
        reducer = self.exchange.reducer
        through = f" through {codec_name(getattr(reducer, 'codec', reducer))}" if reducer else ""
        when = f"every {outer.every} steps"
        if outer.fragments > 1:
            when += f" in {outer.fragments} fragments, one every {outer.every // outer.fragments} steps"
        how = f"{when}, {size(sum(sent), 'B')} from a device{through}"
        step = f"learning rate {outer.lr:g}, momentum {outer.momentum:g}"
        rows = [("groups", what), ("exchange", f"{how}; {step}")]
        if outer.overlap:
            after = f"{outer.overlap} step{'s' if outer.overlap > 1 else ''} after it was sent"
            rows.append(("overlap", f"under the next step; taken {after}, with {outer.mix:g} of a group's own weights"))
        average = f"{size(sum(sent) / outer.every, 'B')} a step from a device on average"
        return [*rows, ("between groups", f"{average}, {size(max(sent), 'B')} in a step at most")]

    def report(self) -> list[tuple[str, str]]:
        """Return rows for the table at a run's end: what a device sends to other groups in all steps."""
        outer, sent, steps = self.config.outer, self.sent(), self.config.run.steps
        rounds = steps // outer.every
        what = f"{rounds * outer.fragments} exchanges, {size(rounds * sum(sent), 'B')} from a device in {steps} steps"
        return [("between groups", f"{what} of these settings, {size(max(sent), 'B')} in a step at most")]

    # --- State --------------------------------------------------------------------------------------------------------

    def _each(self, tree: Any) -> Any:
        """Return a tree with a leading dim of groups, which are all equal."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.groups, *jnp.shape(x))), tree)

    def _first_codec(self) -> CodecStates:
        every = (self.groups, *self.config.mesh.sizes.values())
        outer = jax.tree.map(lambda x: jnp.broadcast_to(x, (*every, *jnp.shape(x))), self.exchange.init())
        return {**self._each(self.compression.init()), "outer": outer}

    def _from_params(self, canonical: Params) -> GroupedState:
        one = super()._from_params(canonical)
        outer = OuterState(self._each(one.params), self._each(one.skipped), self.outer.init(one.params))
        return GroupedState(one.step, one.skipped, one.params, self._each(one.optimizer), self._first_codec(), outer)

    def _state_specs(self) -> GroupedState:
        one: Any = super()._state_specs()
        momentum = optax.tree_utils.tree_map_params(
            self.outer, lambda _, spec: spec, one.outer.momentum, one.params, is_leaf=is_spec
        )
        outer: Any = OuterState(_apart(one.params), _apart(one.skipped), momentum)
        return one.replace(optimizer=_apart(one.optimizer), codec=_apart(one.codec), outer=outer)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a global batch: its sequences go to group after group, and to data rank after data rank."""
        return NamedSharding(self.mesh, PartitionSpec((GROUP, *batch_axes())))

    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """Return the shape of the global batch of all groups."""
        one = super().abstract_batch()
        shape = (self.groups * one.shape[0], *one.shape[1:])
        return jax.ShapeDtypeStruct(shape, one.dtype, sharding=self.batch_sharding)

    # --- Canonical form, for checkpoints ------------------------------------------------------------------------------

    def _map_state(self, function: Callable[[Params], Params], each: Callable[[Params], Params], tree: Any) -> Any:
        """Apply functions to the subtrees of a state that mirror the parameters."""
        outer, momentum = tree["outer"], self.layout.map_mirrors(function, tree["outer"]["momentum"])
        return {
            **tree,
            "params": function(tree["params"]),
            "optimizer": self.layout.map_mirrors(each, tree["optimizer"]),
            "outer": {**outer, "params": each(outer["params"]), "momentum": momentum},
        }

    def _to_canonical(self, state: TrainState) -> dict[str, Any]:
        one = self.layout.to_canonical
        return self._map_state(one, jax.vmap(one), flax.serialization.to_state_dict(state))

    def _from_canonical(self, tree: dict[str, Any]) -> GroupedState:
        if "codec" not in tree:
            tree = {**tree, "codec": flax.serialization.to_state_dict(self._first_codec())}
        target = jax.eval_shape(lambda: self._init(jax.random.key(0)))
        one = self.layout.from_canonical
        return flax.serialization.from_state_dict(target, self._map_state(one, jax.vmap(one), tree))

    @functools.cached_property
    def canonical_shardings(self) -> dict[str, Any]:
        """Shardings of the canonical state, in its structure."""
        canonical = self.layout.canonical_specs_of
        specs = flax.serialization.to_state_dict(self._state_specs())
        return self._shardings(self._map_state(canonical, lambda specs: _apart(canonical(specs)), specs))

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _over_all(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return a function over global arrays that runs `function` on each device, with the axis `group`."""
        if self.virtual:
            sizes = {GROUP: self.groups, **self.config.mesh.sizes}
            return virtual.shard_map(function, sizes, in_specs, out_specs)
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return a function over arrays with a leading dim of groups; see `Trainer.shard_map`."""

        def one(*arguments: Any) -> Any:
            found = function(*jax.tree.map(lambda x: x[0], arguments))
            return jax.tree.map(lambda x: x[None], found)

        return self._over_all(one, _apart(in_specs), _apart(out_specs))

    def _data_rank(self) -> jax.Array:
        return lax.axis_index(GROUP) * self.config.mesh.ranks + super()._data_rank()

    def _step(self, state: Any, tokens: jax.Array) -> tuple[GroupedState, dict[str, jax.Array]]:
        key, codec, outer = self._key(state.step), dict(state.codec), state.outer
        codec.pop("outer")
        weights, difference = outer.params, None
        if self.fragment is not None:
            # The first barrier takes the fragment before the step changes it, so that the weights are not copied.
            part = self._part(weights, self.fragment, apart=True)
            weights, part = lax.optimization_barrier((weights, part))
            difference = self._difference(state, part, self.fragment)
        own: Any = TrainState(state.step, outer.skipped, weights, state.optimizer, codec)
        tokens = tokens.reshape(self.groups, -1, tokens.shape[1])
        loss, grads, codec, left_out, scalars = self.loss_and_gradients(own.params, tokens, self._each(key), codec)
        if self.mesh.size > 1:
            # See Trainer.update. What has come of the exchange waits here, so that it lies under the gradients.
            grads, difference = lax.optimization_barrier((grads, difference))
        axes: Any = own.replace(step=None, skipped=0, params=0, optimizer=0, codec=0)
        update = jax.vmap(self._apply, (axes, 0, 0, 0, 0), (axes, 0), spmd_axis_name=None if self.virtual else GROUP)
        with jax.named_scope("optimizer"):
            new, metrics = update(own, loss, grads, self.norm(grads), codec)
        if difference is not None and self.fragment is not None:
            _, state = self._outer_step(state, difference, self.fragment)
            state = state.replace(skipped=outer.skipped.max())
        outer = OuterState(new.params, new.skipped, state.outer.momentum)
        codec = {**new.codec, "outer": state.codec["outer"]}
        state = GroupedState(new.step, state.skipped, state.params, new.optimizer, codec, outer)
        return state, metrics | self._metrics(left_out, scalars)

    def _part(self, params: Params, fragment: int, apart: bool = False) -> Params:
        """Return a fragment of parameters in mesh layout, as global arrays."""
        fragments, over = self.exchange.fragments, self.shard_map if apart else self._over_all
        if fragments.count == 1:
            return params
        take = functools.partial(fragments.take, fragment=fragment)
        return over(take, (self.layout.specs(),), self._part_specs(fragment))(params)

    def _replaced(self, params: Params, part: Params, fragment: int, apart: bool = False) -> Params:
        """Return parameters in mesh layout, as global arrays, with another fragment."""
        fragments, over = self.exchange.fragments, self.shard_map if apart else self._over_all
        if fragments.count == 1:
            return part
        put, specs = functools.partial(fragments.put, fragment=fragment), self.layout.specs()
        return over(put, (specs, self._part_specs(fragment)), specs)(params, part)

    def _part_specs(self, fragment: int) -> Params:
        specs = self.layout.specs()
        return {name: specs[name] for name in self.exchange.fragments.names(fragment)}

    def _difference(self, state: Any, own: Params, fragment: int) -> tuple[Params, Any]:
        """Return the mean difference of a fragment over groups, and the reducer's next states. All is sent here."""
        specs, states = self._part_specs(fragment), _apart(device_spec(self.config.mesh))

        def local(shared: Params, own: Params, codec: Any) -> tuple[Params, Any]:
            own, codec = jax.tree.map(lambda x: x[0], own), jax.tree.map(lambda x: x[(0,) * len(states)], codec)
            found, new = self.exchange.mean_difference(shared, own, codec, fragment)
            return found, jax.tree.map(lambda x: x[(None,) * len(states)], new)

        run = self._over_all(local, (specs, _apart(specs), states), (specs, states))
        return run(self._part(state.params, fragment), own, state.codec["outer"])

    def _outer_step(self, state: Any, found: tuple[Params, Any], fragment: int) -> tuple[Params, GroupedState]:
        """Take the outer step with a fragment.

        Returns:
            The fragment's new shared weights, and the state with them; the groups' own weights are as before.
        """
        (difference, left), trees = found, state.outer.momentum
        shared = self._part(state.params, fragment)
        momentum = jax.tree.map(lambda tree: self._part(tree, fragment), trees, is_leaf=_is_params)
        updates, momentum = self.outer.update(difference, momentum, shared)
        new = optax.apply_updates(shared, updates)
        momentum = jax.tree.map(
            lambda tree, part: self._replaced(tree, part, fragment), trees, momentum, is_leaf=_is_params
        )
        outer = state.outer.replace(momentum=momentum)
        params = self._replaced(state.params, new, fragment)
        return new, state.replace(params=params, codec={**state.codec, "outer": left}, outer=outer)

    def _exchanged(self, state: Any, fragment: int = 0) -> GroupedState:
        own = self._part(state.outer.params, fragment, apart=True)
        part, state = self._outer_step(state, self._difference(state, own, fragment), fragment)
        params = self._replaced(state.outer.params, self._each(part), fragment, apart=True)
        outer = state.outer.replace(params=params)
        return state.replace(skipped=state.outer.skipped.max(), outer=outer)

    @functools.cached_property
    def exchanged(self) -> Callable[..., GroupedState]:
        """Compiled exchange: (state, fragment=0) -> the state in which all groups have its new shared weights.

        The state before is donated. Each fragment has a program.
        """
        shardings = self.state_shardings
        programs = [
            distributed.compiled_together(
                jax.jit(
                    functools.partial(self._exchanged, fragment=fragment),
                    donate_argnums=0,
                    in_shardings=(shardings,),
                    out_shardings=shardings,
                ),
                "the exchange of the groups",
            )
            for fragment in range(self.config.outer.fragments)
        ]
        return lambda state, fragment=0: programs[fragment](state)

    def _joined(self, state: Any, fragment: jax.Array) -> GroupedState:
        mix, of_slot = self.config.outer.mix, self.exchange.fragments.of_slot.reshape(-1)

        def mixed(path: tuple, own: jax.Array, shared: jax.Array) -> jax.Array:
            mine = fragment == 0
            if names(path)[0] == LAYERS:
                mine = (of_slot == fragment).reshape(-1, *[1] * (shared.ndim - 1))
            return jnp.where(mine, mix * own + (1 - mix) * shared, own)

        params = jax.tree_util.tree_map_with_path(mixed, state.outer.params, state.params)
        return state.replace(outer=state.outer.replace(params=params))

    @functools.cached_property
    def joined(self) -> Callable[[Any, Any], GroupedState]:
        """Compiled mixing: (state, fragment) -> the state in which groups have taken a fragment of the shared weights.

        Of each weight, outer.mix is a group's own, and the rest the shared one. The state before is donated. Nothing
        travels, and one program serves all fragments.
        """
        shardings = self.state_shardings
        made = jax.jit(
            self._joined,
            donate_argnums=0,
            in_shardings=(shardings, NamedSharding(self.mesh, PartitionSpec())),
            out_shardings=shardings,
        )
        return distributed.compiled_together(made, "the mixing of the groups' weights")

    @functools.cached_property
    def evaluate(self) -> jax.stages.Wrapped:
        """Jitted evaluation of the shared weights: (params, batch) -> loss, see Trainer."""

        def loss(params: Params, tokens: jax.Array) -> jax.Array:
            return lax.pmean(self._local_loss(params, tokens), GROUP)

        return jax.jit(self._over_all(loss, (self.layout.specs(), self.batch_sharding.spec), PartitionSpec()))


def on_host(figures: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the metrics of a step; those of groups are the means over the groups of this process's devices.

    Groups do not wait for each other within a step, so no process knows the metrics of all.

    Args:
        figures: Metrics as a compiled step returns them.
    """
    return {name: _on_host(x) for name, x in figures.items()}


def _on_host(x: jax.Array) -> np.ndarray:
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
    if tuple(spec)[:1] != (GROUP,):
        return jax.device_get(x)
    shards = {shard.index[0].indices(x.shape[0])[0]: np.asarray(shard.data) for shard in x.addressable_shards}
    rows = np.concatenate([shards[start] for start in sorted(shards)])
    return np.asarray(rows.all(axis=0) if rows.dtype == bool else rows.mean(axis=0))
