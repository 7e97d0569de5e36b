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

from compress import Codec
from paxtrain.config import Config
from paxtrain.model import transformer
from paxtrain.parallel import gradients, muon
from paxtrain.parallel.compression import Compression, settle_implementation
from paxtrain.parallel.layout import Layout, Params
from paxtrain.parallel.optimizer import learning_rate, make_optimizer
from paxtrain.pipeline import executor, virtual
from paxtrain.pipeline.stage import Stage
from paxtrain.schedule import buffers
from paxtrain.schedule import table as schedule

BATCH_SPEC = PartitionSpec("data")
# Every codec's state is one device's own.
CODEC_SPEC = PartitionSpec("data", "pipe", "tensor")

# XLA's usual estimate of a transfer's time is the data sheet's, which hides factors of a few kilobytes under a few
# kernels; by this one they lie under matrix products as well. Links are slower than their data sheet.
GPU_COMPRESSED_OPTIONS = {"xla_gpu_enable_analytical_latency_estimator": True}

# By default XLA keeps one collective in flight at a time: the pipeline's transfers would have to fit between two
# all-reduces of tensor parallelism. With a few at once each lies under a whole F or B, as test_gpu_compile.py asserts.
GPU_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


# XLA for CPUs moves F and B out of the loops of no or one trip in which stages skip them: all stages would run all ops.
CPU_OPTIONS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


@flax.struct.dataclass
class TrainState:
    """Everything that a step changes.

    Attributes:
        step: steps run, int32; it also seeds dropout.
        skipped: those of them whose gradients were not finite and that changed nothing, int32.
        params: float32 master weights in mesh layout.
        optimizer: optax's state, its arrays shaped like params and sharded like them; Muon's momentum as muon.py says.
        codec: states of the compression, see compression.Compression.init.
    """

    step: jax.Array
    skipped: jax.Array
    params: Params
    optimizer: Any
    codec: Any


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one configuration on one mesh.

    Attributes:
        stage_ranks: rank of each stage's factors over data, 0 for dense; None: as the configuration says once
            compression has started.
        record: messages that each link between stages keeps in its state, for a study.
        virtual: all devices of config.mesh on the one device of `mesh`: the same values, no collectives.
        codec: codec of the gradients between stages, in place of the LowRank that config.compress describes; see
            compression.Compression.
    """

    config: Config
    mesh: Mesh
    stage_ranks: tuple[int, ...] | None = None
    record: int = 0
    virtual: bool = False
    codec: Codec | None = None

    @functools.cached_property
    def layout(self) -> Layout:
        settled = transformer.settle_attention(self.config.model, self.mesh.devices.flat[0])
        if self.virtual and settled.separator >= 0:  # under vmap jax wants one mask per head for cuDNN
            settled = dataclasses.replace(settled, attention="xla")
        return Layout(dataclasses.replace(self.config, model=settled))

    @functools.cached_property
    def compression(self) -> Compression:
        device = self.mesh.devices.flat[0]
        implementation = settle_implementation(self.config, device, self.codec)
        return Compression(self.layout, implementation, self.record, self.codec)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each stage's factors over data in this trainer's step."""
        return self.compression.stages if self.stage_ranks is None else self.stage_ranks

    @property
    def platform(self) -> str:
        """ "gpu" or "cpu"."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        return make_optimizer(self.config, [self._shardings(specs) for specs in muon.route(self.layout)])

    @functools.cached_property
    def schedule(self) -> schedule.Schedule:
        c = self.config
        return schedule.build(c.pipeline.schedule, c.mesh.pipe, c.micro_batches, c.pipeline.virtual_stages)

    @functools.cached_property
    def buffers(self) -> buffers.Buffers:
        """The schedule's slots, proved right: a fraction of a second, before anything is compiled."""
        found = buffers.assign(self.schedule, self.compression.gradients(self.schedule))
        buffers.validate(self.schedule, found)
        return found

    # --- State --------------------------------------------------------------------------------------------------------

    def _init(self, key: jax.Array) -> TrainState:
        return self._from_params(transformer.init(self.config.model, key))

    def _from_params(self, canonical: Params) -> TrainState:
        params = self.layout.from_canonical(canonical)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, zero, params, self.transformation.init(params), self.compression.init())

    def _state_specs(self) -> TrainState:
        state, params = jax.eval_shape(self._init, jax.random.key(0)), self.layout.specs()
        mirror = muon.route(self.layout)[-1] if self.config.optimizer.name == "muon" else params
        masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        # Every subtree of the optimizer's state that mirrors the parameters, or some of them, takes their specs.
        optimizer = optax.tree_utils.tree_map_params(
            self.transformation,
            lambda x, spec: x if masked(x) else spec,
            state.optimizer,
            mirror,
            transform_non_params=lambda _: PartitionSpec(),
            is_leaf=masked,
        )
        codec = jax.tree.map(lambda _: CODEC_SPEC, state.codec)
        return TrainState(PartitionSpec(), PartitionSpec(), params, optimizer, codec)

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=_is_spec)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        return self._shardings(self._state_specs())

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
        tree = flax.serialization.to_state_dict(state)
        return self._map_params_like(self.layout.to_canonical, tree)

    def _from_canonical(self, tree: dict[str, Any]) -> TrainState:
        if set(tree) == {"params"}:
            return self._from_params(tree["params"])
        if "codec" not in tree:
            tree = {**tree, "codec": flax.serialization.to_state_dict(self.compression.init())}
        target = jax.eval_shape(self._init, jax.random.key(0))
        return flax.serialization.from_state_dict(target, self._map_params_like(self.layout.from_canonical, tree))

    @functools.cached_property
    def canonical_shardings(self) -> dict[str, Any]:
        leaves = functools.partial(jax.tree_util.tree_leaves_with_path, is_leaf=_is_spec)
        known = dict(leaves(self.layout.canonical_specs()))

        def canonical(specs: Params) -> Params:  # of all parameters or, in a part of Muon's state, of some
            return jax.tree_util.tree_map_with_path(lambda path, _: known[path], specs, is_leaf=_is_spec)

        specs = flax.serialization.to_state_dict(self._state_specs())
        return self._shardings(self._map_params_like(canonical, specs))

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
        """jit: the state -> nested dicts spread over the mesh; but for "codec" their arrays do not depend on it."""
        return jax.jit(self._to_canonical, out_shardings=self.canonical_shardings)

    @functools.cached_property
    def from_canonical(self) -> Any:
        """jit: a checkpoint's tree -> the state on this mesh; without "codec" or all but "params", those are new."""
        return jax.jit(self._from_canonical, out_shardings=self.state_shardings)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` of one device, over global arrays."""
        if self.virtual:
            mesh = self.config.mesh
            sizes = {"data": mesh.data, "pipe": mesh.pipe, "tensor": mesh.tensor}
            return virtual.shard_map(function, sizes, in_specs, out_specs)
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def stage(self, params: Params, tokens: jax.Array, key: jax.Array | None, splits: bool = False) -> Stage:
        """One device's stage, from its shards of the parameters and its data rank's tokens.

        Args:
            splits: its backward can be run in two parts even if the schedule has it whole.
        """
        c = self.config
        micro_batches = tokens.shape[0] // c.batch.micro_batch
        first_sample = lax.axis_index("data") * tokens.shape[0]
        tokens = tokens.reshape(micro_batches, c.batch.micro_batch, -1)
        weights = gradients.gather_weights(self.layout, params)
        program = dataclasses.replace(self.layout.program, splits=splits or self.layout.program.splits)
        return Stage(program, weights, tokens, key, first_sample)

    @jax.named_scope("sync")
    def _sum_loss(self, loss: jax.Array) -> jax.Array:
        return lax.psum(loss, ("data", "pipe")) / self.config.mesh.data

    def _local_gradients(self, params: Params, tokens: jax.Array, key: jax.Array | None, codec: Any) -> tuple:
        """Per device: loss, this device's shards of the mean gradients, codec state, what its stage left out."""
        table, compression = self.schedule, self.compression
        codec = jax.tree.map(lambda x: x[0, 0, 0], codec)
        stage = self.stage(params, tokens, key)
        between = {direction: codec[direction] for direction in ("backward", "forward")}
        loss, grads, between = executor.loss_and_gradients(
            stage, self.buffers, table.masked, compression.links, between
        )
        reduced = gradients.reduce_gradients(compression, self.ranks, grads, codec["data"])
        codec = jax.tree.map(lambda x: x[None, None, None], {**between, "data": reduced.state})
        return self._sum_loss(loss), reduced.gradients, codec, reduced.left_out[None]

    def loss_and_gradients(
        self, params: Params, tokens: jax.Array, key: jax.Array | None = None, codec: Any = None
    ) -> tuple[jax.Array, Params, Any, jax.Array]:
        """Gradients of the mean loss over the global batch. Traceable.

        Args:
            params: mesh layout, sharded by `layout.specs()`.
            tokens: int32 [global_batch, sequence + 1].
            key: uint32 [2], dropout's; None without dropout.
            codec: state of the compression; None: a fresh one.

        Returns:
            The loss; its gradients, sharded like the parameters; the compression's new state; and per stage the part of
            its gradients that compression over data left out, float32 [P].
        """
        specs, whole = self.layout.specs(), PartitionSpec()
        codec = self.compression.init() if codec is None else codec
        run = self.shard_map(
            self._local_gradients,
            in_specs=(specs, BATCH_SPEC, whole, CODEC_SPEC),
            out_specs=(whole, specs, CODEC_SPEC, PartitionSpec("pipe")),
        )
        return run(params, tokens, key, codec)

    @jax.named_scope("sync")
    def norm(self, grads: Params) -> jax.Array:
        """Norm of gradients in mesh layout, sharded as parameters, each parameter counted once. Traceable."""
        run = functools.partial(gradients.global_norm, self.layout)
        return self.shard_map(run, (self.layout.specs(),), PartitionSpec())(grads)

    @jax.named_scope("optimizer")
    def update(
        self, state: TrainState, loss: jax.Array, grads: Params, codec: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The optimizer's part of a step: gradients in, the next state out; nothing changes if they are not finite."""
        c = self.config
        # Materialized here, each parameter's update is one fusion in place; else XLA copies the optimizer state first.
        grads = lax.optimization_barrier(grads)
        norm = self.norm(grads)
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

    def _step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        c = self.config
        key = None
        if c.model.embedding_dropout or c.model.residual_dropout:
            key = jax.random.key_data(jax.random.fold_in(jax.random.key(c.run.seed), state.step))
        loss, grads, codec, left_out = self.loss_and_gradients(state.params, tokens, key, state.codec)
        state, metrics = self.update(state, loss, grads, codec)
        return state, metrics | ({"left_out": left_out} if any(self.ranks) else {})

    @functools.cached_property
    def step(self) -> Any:
        """jit: (state, donated; tokens) -> (state, {loss, grad_norm, learning_rate, finite, maybe left_out [P]})."""
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
        if self.platform != "gpu":
            return {} if self.schedule.masked else CPU_OPTIONS
        return GPU_OPTIONS | (GPU_COMPRESSED_OPTIONS if self.compression.between_stages else {})

    def _local_loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        stage = self.stage(params, tokens, None)
        table = schedule.forward_only(self.layout.stages, stage.micro_batches, self.layout.chunks)
        return self._sum_loss(executor.loss_only(stage, buffers.assign(table), table.masked))

    @functools.cached_property
    def evaluate(self) -> Any:
        """jit: (params, tokens) -> mean loss over the global batch, without dropout."""
        run = self.shard_map(self._local_loss, (self.layout.specs(), BATCH_SPEC), PartitionSpec())
        return jax.jit(run)
