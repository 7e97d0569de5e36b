"""One optimizer step and one evaluation, as jitted functions over global arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compress.codec import Codec, Identity
from paxtrain import buffers, gradients, model, pipeline, schedule
from paxtrain.config import Config
from paxtrain.layout import Layout, Params
from paxtrain.optimizer import learning_rate, make_optimizer
from paxtrain.stage import Stage

BATCH_SPEC = PartitionSpec("data")
IDENTITY = Identity()

# By default XLA keeps one collective in flight at a time: the pipeline's transfers would have to fit between two
# all-reduces of tensor parallelism. With a few at once each lies under a whole F or B, as test_gpu_compile.py asserts.
GPU_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


@flax.struct.dataclass
class TrainState:
    """Everything that a step changes.

    Attributes:
        step: steps run, int32; it also seeds dropout.
        skipped: those of them whose gradients were not finite and that changed nothing, int32.
        params: float32 master weights in mesh layout.
        optimizer: optax's state, its arrays shaped and sharded like params.
        codec: states of the codecs on the links.
    """

    step: jax.Array
    skipped: jax.Array
    params: Params
    optimizer: Any
    codec: Any


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one configuration on one mesh."""

    config: Config
    mesh: Mesh
    codec: Codec = IDENTITY

    @functools.cached_property
    def layout(self) -> Layout:
        settled = model.settle_attention(self.config.model, self.mesh.devices.flat[0])
        return Layout(dataclasses.replace(self.config, model=settled))

    @property
    def platform(self) -> str:
        """ "gpu" or "cpu"."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        return make_optimizer(self.config)

    @functools.cached_property
    def schedule(self) -> schedule.Schedule:
        c = self.config
        return schedule.build(c.pipeline.schedule, c.mesh.pipe, c.micro_batches, c.pipeline.virtual_stages)

    @functools.cached_property
    def buffers(self) -> buffers.Buffers:
        """The schedule's slots, proved right: a fraction of a second, before anything is compiled."""
        found = buffers.assign(self.schedule)
        buffers.validate(self.schedule, found)
        return found

    # --- State --------------------------------------------------------------------------------------------------------

    def _init(self, key: jax.Array) -> TrainState:
        return self._from_params(model.init(self.config.model, key))

    def _from_params(self, canonical: Params) -> TrainState:
        params = self.layout.from_canonical(canonical)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, zero, params, self.transformation.init(params), ())

    def _state_specs(self, params: Params) -> TrainState:
        state = jax.eval_shape(self._init, jax.random.key(0))
        # Every subtree of the optimizer's state that mirrors the parameters takes their specs.
        optimizer = optax.tree_utils.tree_map_params(
            self.transformation,
            lambda _, spec: spec,
            state.optimizer,
            params,
            transform_non_params=lambda _: PartitionSpec(),
        )
        return TrainState(PartitionSpec(), PartitionSpec(), params, optimizer, ())

    def _shardings(self, specs: Any) -> Any:
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        return self._shardings(self._state_specs(self.layout.specs()))

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH_SPEC)

    def abstract_state(self) -> TrainState:
        """The state as jax.ShapeDtypeStruct with shardings."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(self._init, jax.random.key(0)),
            self.state_shardings,
        )

    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """A global batch of tokens, int32 [global_batch, sequence + 1]."""
        c = self.config
        return jax.ShapeDtypeStruct(
            (c.batch.global_batch, c.model.sequence + 1), jnp.int32, sharding=self.batch_sharding
        )

    def init(self, seed: int) -> TrainState:
        """A fresh state, the same values on every mesh."""
        return jax.jit(self._init, out_shardings=self.state_shardings)(jax.random.key(seed))

    def from_params(self, canonical: Params) -> TrainState:
        """A fresh state around given canonical parameters."""
        return jax.jit(self._from_params, out_shardings=self.state_shardings)(canonical)

    # --- Canonical form, for checkpoints ------------------------------------------------------------------------------

    def _map_params_like(self, function: Callable[[Params], Params], tree: Any) -> Any:
        """Nested dicts with `function` applied to every subtree that mirrors the parameters."""
        if not isinstance(tree, dict):
            return tree
        if set(tree) == set(self.layout.shapes):
            return function(tree)
        return {key: self._map_params_like(function, value) for key, value in tree.items()}

    def _to_canonical(self, state: TrainState) -> dict[str, Any]:
        tree = flax.serialization.to_state_dict(state.replace(codec=()))
        return self._map_params_like(self.layout.to_canonical, tree)

    def _from_canonical(self, tree: dict[str, Any]) -> TrainState:
        target = jax.eval_shape(self._init, jax.random.key(0))
        return flax.serialization.from_state_dict(target, self._map_params_like(self.layout.from_canonical, tree))

    @functools.cached_property
    def canonical_shardings(self) -> dict[str, Any]:
        specs = flax.serialization.to_state_dict(self._state_specs(self.layout.specs()))
        return self._shardings(self._map_params_like(lambda _: self.layout.canonical_specs(), specs))

    def abstract_canonical(self) -> dict[str, Any]:
        """What a checkpoint holds, as jax.ShapeDtypeStruct with this mesh's shardings."""
        shapes = jax.eval_shape(lambda key: self._to_canonical(self._init(key)), jax.random.key(0))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self.canonical_shardings,
        )

    @functools.cached_property
    def canonical(self) -> Any:
        """jit: the state -> nested dicts whose arrays do not depend on the mesh, spread over it."""
        return jax.jit(self._to_canonical, out_shardings=self.canonical_shardings)

    @functools.cached_property
    def from_canonical(self) -> Any:
        """jit: a checkpoint's tree -> the state on this mesh."""
        return jax.jit(self._from_canonical, out_shardings=self.state_shardings)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _stage(self, params: Params, tokens: jax.Array, key: jax.Array | None) -> Stage:
        c = self.config
        micro_batches = tokens.shape[0] // c.batch.micro_batch
        first_sample = lax.axis_index("data") * tokens.shape[0]
        tokens = tokens.reshape(micro_batches, c.batch.micro_batch, -1)
        weights = gradients.gather_weights(self.layout, params)
        return Stage(self.layout.program, weights, tokens, key, first_sample)

    def _sum_loss(self, loss: jax.Array) -> jax.Array:
        return lax.pmean(lax.psum(loss, "pipe"), "data")

    def _local_gradients(self, params: Params, tokens: jax.Array, key: jax.Array | None, codec: Any) -> tuple:
        """Per device: loss, this device's shards of the mean gradients, codec state."""
        table = self.schedule
        stage = self._stage(params, tokens, key)
        loss, grads, codec = pipeline.loss_and_gradients(stage, self.buffers, table.masked, self.codec, codec)
        return self._sum_loss(loss), gradients.reduce_gradients(self.layout, grads), codec

    def loss_and_gradients(
        self, params: Params, tokens: jax.Array, key: jax.Array | None = None, codec: Any = ()
    ) -> tuple[jax.Array, Params, Any]:
        """Mean loss over the global batch, its gradients sharded like the parameters, codec state. Traceable.

        Args:
            params: mesh layout, sharded by `layout.specs()`.
            tokens: int32 [global_batch, sequence + 1].
            key: uint32 [2], dropout's; None without dropout.
        """
        specs, whole = self.layout.specs(), PartitionSpec()
        run = jax.shard_map(
            self._local_gradients,
            mesh=self.mesh,
            in_specs=(specs, BATCH_SPEC, whole, whole),
            out_specs=(whole, specs, whole),
            check_vma=False,
        )
        return run(params, tokens, key, codec)

    def _step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        c = self.config
        key = None
        if c.model.embedding_dropout or c.model.residual_dropout:
            key = jax.random.key_data(jax.random.fold_in(jax.random.key(c.run.seed), state.step))
        loss, grads, codec = self.loss_and_gradients(state.params, tokens, key, state.codec)
        # Materialized here, each parameter's update is one fusion in place; else XLA copies the optimizer state first.
        grads = lax.optimization_barrier(grads)
        norm = optax.tree.norm(self.layout.count_once(grads))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        if c.optimizer.clip_norm:
            scale = jnp.minimum(1.0, c.optimizer.clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, optimizer = self.transformation.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate(c)(state.step - state.skipped),
            "finite": finite,
        }
        state = TrainState(
            step=state.step + 1,
            skipped=state.skipped + ~finite,
            params=keep(params, state.params),
            optimizer=keep(optimizer, state.optimizer),
            codec=keep(codec, state.codec),
        )
        return state, metrics

    @functools.cached_property
    def step(self) -> Any:
        """jit: (state, donated; tokens) -> (state, {loss, grad_norm, learning_rate, finite})."""
        return jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, NamedSharding(self.mesh, PartitionSpec())),
        )

    def compile_step(self) -> jax.stages.Compiled:
        """The train step compiled for this mesh, before there is any data."""
        return self.step.lower(self.abstract_state(), self.abstract_batch()).compile(self.compiler_options)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for the train step on this mesh's platform."""
        return GPU_OPTIONS if self.platform == "gpu" else {}

    def _local_loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        stage = self._stage(params, tokens, None)
        table = schedule.forward_only(self.layout.stages, stage.micro_batches, self.layout.chunks)
        return self._sum_loss(pipeline.loss_only(stage, buffers.assign(table), table.masked, self.codec))

    @functools.cached_property
    def evaluate(self) -> Any:
        """jit: (params, tokens) -> mean loss over the global batch, without dropout."""
        run = jax.shard_map(
            self._local_loss,
            mesh=self.mesh,
            in_specs=(self.layout.specs(), BATCH_SPEC),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return jax.jit(run)
