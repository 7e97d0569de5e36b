"""The training step: `Trainer` has the compiled functions of one configuration on one mesh.

A step runs the pipeline inside `shard_map`, which reduces the gradients over data (`reduction.py`), and updates the
weights with optax on global arrays:

    trainer = Trainer(config, make_mesh(config.mesh))
    state = trainer.init(seed=0)
    state, metrics = trainer.step(state, batch)      # batch: int32 [global_batch, sequence + 1]
    loss = trainer.evaluate(state.params, batch)
"""

import dataclasses
import functools
from collections.abc import Callable, Set
from typing import Any

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from compress import Codec
from compress.codec import Identity
from paxtrain.config import Config
from paxtrain.config.axes import PIPE, batch_axes, token_axes
from paxtrain.errors import UserError
from paxtrain.model import parameters, transformer
from paxtrain.model.spec import Scalars
from paxtrain.model.transformer import settle_attention
from paxtrain.parallel import compiler_options, gradients, muon
from paxtrain.parallel.compression.named import settle_implementation
from paxtrain.parallel.compression.settled import CodecStates, Compression
from paxtrain.parallel.layout import Layout, Params, is_spec
from paxtrain.parallel.mesh import batch_spec, device_spec, local, settle_context, spread
from paxtrain.parallel.optimizer import learning_rate, make_optimizer
from paxtrain.parallel.reduction import DataReduction, held_by
from paxtrain.parallel.weights import gather_weights
from paxtrain.pipeline import executor, virtual
from paxtrain.pipeline.collectives import position
from paxtrain.pipeline.program import share_of
from paxtrain.pipeline.stage import Stage
from paxtrain.process import compilation_cache, distributed
from paxtrain.schedule.buffers import Buffers, assign
from paxtrain.schedule.proof import validate
from paxtrain.schedule.schedules import build, forward_only
from paxtrain.schedule.table import Schedule
from paxtrain.schedule.uneven import assign_ranks


@flax.struct.dataclass
class TrainState:
    """The state that a training step changes.

    Attributes:
        step: Number of steps run, int32 []; it also seeds dropout.
        skipped: Number of steps whose gradients were not finite and that changed nothing else, int32 [].
        params: Master weights in mesh layout (see layout.py), float32.
        optimizer: State of optax, its arrays shaped and sharded like params; Muon's momentum is sharded as in muon.py.
        codec: State of the compression, as `Compression.init` returns it.
    """

    step: jax.Array
    skipped: jax.Array
    params: Params
    optimizer: optax.OptState
    codec: CodecStates


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The compiled functions of one configuration on one mesh.

    Attributes:
        config: Configuration of model, mesh, pipeline, batch, optimizer and compression.
        mesh: Device mesh as `make_mesh` returns it.
        stage_ranks: Rank of each stage's factors over data, 0 for dense; None: the ranks of the configuration after
            compression has started.
        record: Number of rows of the schedule whose messages each link between stages keeps in its state, for a study.
        virtual: Whether to emulate all devices of config.mesh on the one device of `mesh`: the same values, without
            collectives.
        codec: Codec of the gradients between stages, instead of the LowRank that config.compress describes (see
            `Compression`); None: as config.compress says.
        overlap: Whether the schedule's messages travel under compute; None: as the platform can.
    """

    config: Config
    mesh: Mesh
    stage_ranks: tuple[int, ...] | None = None
    record: int = 0
    virtual: bool = False
    codec: Codec | None = None
    overlap: bool | None = None
    _metrics_spec = PartitionSpec()

    def __post_init__(self) -> None:
        """Settle what the platform asks of the process; refuse groups (see paxtrain/outer/) and layers that fail."""
        c, every = self.config, self.config.outer.every
        if c.groups > 1:
            raise UserError(f"outer.every={every} trains in groups, which this program does not; leave outer.every out")
        transformer.check_layer(c.model, c.mesh.layer_sizes, c.mesh.sequence_parallel)
        if self.platform == "cpu" and self.mesh.size > 1:
            compilation_cache.leave_unused()

    @functools.cached_property
    def layout(self) -> Layout:
        """Placement of the parameters on the mesh."""
        settled = settle_attention(self.config.model, self.mesh.devices.flat[0])
        if self.virtual and settled.separator >= 0:  # under vmap jax requires one mask per head for cuDNN
            settled = dataclasses.replace(settled, attention="xla")
        mesh = self.config.mesh if self.virtual else settle_context(self.config.mesh, self.platform)
        return Layout(dataclasses.replace(self.config, model=settled, mesh=mesh))

    @functools.cached_property
    def compression(self) -> Compression:
        """Compression of gradients and activations on this mesh."""
        device = self.mesh.devices.flat[0]
        implementation = settle_implementation(self.config, device, self.codec)
        return Compression(self.layout, implementation, self.record, self.codec)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each stage's factors over data, 0 for dense."""
        return self.compression.levels if self.stage_ranks is None else self.stage_ranks

    @property
    def platform(self) -> str:
        """Platform of the devices: "gpu" or "cpu"."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def transformation(self) -> optax.GradientTransformation:
        """Optimizer without clipping, over global arrays in mesh layout."""
        return make_optimizer(self.config, [self._shardings(specs) for specs in muon.route(self.layout)])

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Pipeline schedule of a step."""
        c = self.config
        overlap = self.platform != "cpu" if self.overlap is None else self.overlap
        table = build(c.pipeline.schedule_key, c.mesh.pipe, c.micro_batches, c.pipeline.virtual_stages, overlap)
        return dataclasses.replace(table, masked=self._masked(c.pipeline.spec.masked))

    def _masked(self, may: bool) -> bool:
        """Return whether idle stages compute on scrap in a table that allows it, as pipeline.idle has it."""
        # Under vmap a loop that some devices skip costs all of them its trip.
        default = self.platform != "cpu" or self.virtual
        may = may and not self.config.uneven  # a data rank would compute on scrap while its pipeline could go on
        return may and {"compute": True, "skip": False, "auto": default}[self.config.pipeline.idle]

    @functools.cached_property
    def buffers(self) -> Buffers:
        """Buffer slots of the schedule, validated in a fraction of a second, before anything is compiled."""
        return self._assigned(self.schedule, self.compression.gradients(self.schedule))

    def _assigned(self, table: Schedule, compressed: Set[tuple[int, int]] = frozenset()) -> Buffers:
        """Return the slots of a table for all data ranks, proved."""
        if self.config.uneven:
            return assign_ranks(table, compressed, self.config.rank_micro_batches)
        found = assign(table, compressed)
        validate(table, found)
        return found.emulated() if self.virtual else found

    # --- State --------------------------------------------------------------------------------------------------------

    def _init(self, key: jax.Array) -> TrainState:
        return self._from_params(transformer.init(self.config.model, key))

    def _from_params(self, canonical: Params) -> TrainState:
        params = self.layout.from_canonical(canonical)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, zero, params, self.transformation.init(params), self.compression.init())

    def _state_specs(self) -> TrainState:
        state, params = jax.eval_shape(lambda: self._init(jax.random.key(0))), self.layout.specs()
        mirror = muon.route(self.layout)[-1] if self.config.optimizer.name == "muon" else params
        # Each subtree of the optimizer's state that mirrors all or some of the parameters takes their specs.
        optimizer = optax.tree_utils.tree_map_params(
            functools.partial(jax.eval_shape, self.transformation.init),  # optax itself would compile its zeros
            lambda x, spec: x if isinstance(x, optax.MaskedNode) else spec,
            state.optimizer,
            mirror,
            transform_non_params=lambda _: PartitionSpec(),
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        codec, whole = jax.tree.map(lambda _: device_spec(self.config.mesh), state.codec), PartitionSpec()
        return state.replace(step=whole, skipped=whole, params=params, optimizer=optimizer, codec=codec)

    def _shardings(self, specs: Any) -> Any:
        def of(spec: PartitionSpec) -> NamedSharding:  # a device that emulates all of them has everything
            return NamedSharding(self.mesh, PartitionSpec() if self.virtual else spec)

        return jax.tree.map(of, specs, is_leaf=is_spec)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """Shardings of the training state, in the structure of the state."""
        return self._shardings(self._state_specs())

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a global batch: its sequences are split over data."""
        return self._shardings(batch_spec(self.config.mesh))

    def abstract_state(self) -> TrainState:
        """Return the shapes of the training state, as jax.ShapeDtypeStruct with shardings."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(lambda: self._init(jax.random.key(0))),
            self.state_shardings,
        )

    def abstract_batch(self) -> jax.ShapeDtypeStruct:
        """Return the shape of a global batch of tokens: int32 [global_batch, sequence + 1].

        Its rows hold the samples that `Config.batch_samples` says; uneven data ranks have rows that no step reads.
        """
        shape = (len(self.config.batch_samples), self.config.model.sequence + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)

    def init(self, seed: int) -> TrainState:
        """Return the state before the first step, with the same values on every mesh.

        Args:
            seed: Seed of the weights.
        """
        made = jax.jit(self._init, out_shardings=self.state_shardings)
        return distributed.compiled_together(made, "the first state")(jax.random.key(seed))

    def from_params(self, canonical: Params) -> TrainState:
        """Return the state before the first step, with given weights.

        Args:
            canonical: Parameters in the canonical layout of `model.transformer`, float32.
        """
        return self._made_from_params(canonical)

    @functools.cached_property
    def _made_from_params(self) -> Callable[[Params], TrainState]:
        made = jax.jit(self._from_params, out_shardings=self.state_shardings)
        return distributed.compiled_together(made, "the first state of given weights")

    # --- Canonical form, for checkpoints ------------------------------------------------------------------------------

    def _to_canonical(self, state: TrainState) -> dict[str, Any]:
        tree = flax.serialization.to_state_dict(state)
        return self.layout.map_mirrors(self.layout.to_canonical, tree)

    def _from_canonical(self, tree: dict[str, Any]) -> TrainState:
        if "codec" not in tree:
            tree = {**tree, "codec": flax.serialization.to_state_dict(self.compression.init())}
        target = jax.eval_shape(lambda: self._init(jax.random.key(0)))
        return flax.serialization.from_state_dict(target, self.layout.map_mirrors(self.layout.from_canonical, tree))

    @functools.cached_property
    def canonical_shardings(self) -> dict[str, Any]:
        """Shardings of the canonical state, in its structure."""
        specs = flax.serialization.to_state_dict(self._state_specs())
        return self._shardings(self.layout.map_mirrors(self.layout.canonical_specs_of, specs))

    def abstract_canonical(self) -> dict[str, Any]:
        """Return the shapes of the canonical state, which a checkpoint holds, with shardings on this mesh."""
        shapes = jax.eval_shape(lambda: self._to_canonical(self._init(jax.random.key(0))))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self.canonical_shardings,
        )

    @functools.cached_property
    def canonical(self) -> Callable[[TrainState], dict[str, Any]]:
        """Compiled conversion of a state to the canonical state, which a checkpoint holds.

        The result is nested dicts of global arrays, distributed over the mesh. Only its entry "codec" depends on the
        mesh.
        """
        made = jax.jit(self._to_canonical, out_shardings=self.canonical_shardings)
        return distributed.compiled_together(made, "a checkpoint's form")

    @functools.cached_property
    def from_canonical(self) -> Callable[[dict[str, Any]], TrainState]:
        """Compiled conversion of a canonical state to the state on this mesh.

        The argument may lack "codec", which is then initialised as for the first step.
        """
        made = jax.jit(self._from_canonical, out_shardings=self.state_shardings)
        return distributed.compiled_together(made, "a checkpoint's state")

    # --- Steps --------------------------------------------------------------------------------------------------------

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return a function over global arrays that runs `function` on each device of the mesh.

        Args:
            function: Function of one device's parts of the arrays.
            in_specs: PartitionSpecs of its arguments.
            out_specs: PartitionSpecs of its results.
        """
        if self.virtual:
            return virtual.shard_map(function, self.config.mesh.device_sizes, in_specs, out_specs)
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def stage(
        self,
        params: Params,
        tokens: jax.Array,
        key: jax.Array | None,
        splits: bool = False,
        exact: bool = False,
        reduction: DataReduction | None = None,
    ) -> Stage:
        """Return the pipeline stage of one device. Call it inside `shard_map`.

        Args:
            params: The device's shards of the parameters in mesh layout.
            tokens: The data rank's part of the batch, int32 [rows / data, sequence + 1].
            key: Key of dropout, uint32 [2]; None without dropout.
            splits: Whether the backward can run in two parts even if the schedule does not split it.
            exact: Whether weights, and keys and values, travel as they are, although there are codecs for them.
            reduction: Reduction of the gradients, if this is a training step.
        """
        c = self.config
        share = share_of(self._data_rank(), c.rank_micro_batches, c.batch.micro_batch)
        tokens = tokens.reshape(-1, c.batch.micro_batch, tokens.shape[1])
        codec = None if exact else self.compression.weights_codec
        held = held_by(self.compression, codec, reduction)
        program = dataclasses.replace(self.layout.program, splits=splits or self.layout.program.splits)
        if exact:
            program = dataclasses.replace(program, group=program.group._replace(codec=Identity()))
        return Stage(program, gather_weights(self.layout, params, codec), tokens, key, share, held)

    def _data_rank(self) -> jax.Array:
        """Return the data rank of a device in the whole batch."""
        return position(self.config.mesh.over(*batch_axes()))

    @jax.named_scope("sync")
    def _sum_losses(self, loss: jax.Array, scalars: Scalars) -> tuple[jax.Array, Scalars]:
        """Return loss and layers' scalars of the whole mesh, in one collective."""
        own = jnp.stack([loss, *scalars.values()]) if scalars else loss
        sums = lax.psum(own, self.config.mesh.over(*token_axes(), PIPE)) / self.config.mesh.token_ranks
        return (sums[0], dict(zip(scalars, sums[1:], strict=True))) if scalars else (sums, {})

    def _local_gradients(self, params: Params, tokens: jax.Array, key: jax.Array | None, codec: CodecStates) -> tuple:
        """Return one device's results for `loss_and_gradients`, before they are assembled to global arrays."""
        table, compression, codec = self.schedule, self.compression, local(codec)
        between = {direction: codec[direction] for direction in ("backward", "forward")}
        reduction = DataReduction(compression, self.ranks, codec["data"], codec.get("embedding", ()))
        stage = self.stage(params, tokens, key, reduction=reduction)
        loss, grads, between, states, scalars = executor.loss_and_gradients(
            stage, self.buffers, table.masked, compression.links, between, reduction
        )
        reduced = reduction.finish(grads, states)
        tables = {"embedding": reduced.tables} if compression.tables is not None else {}
        codec = spread({**between, "data": reduced.state, **tables})
        loss, scalars = self._sum_losses(loss, scalars)
        return loss, reduced.gradients, codec, reduced.left_out[None], scalars

    def loss_and_gradients(
        self, params: Params, tokens: jax.Array, key: jax.Array | None = None, codec: CodecStates | None = None
    ) -> tuple[jax.Array, Params, CodecStates, jax.Array, Scalars]:
        """Return the mean loss over the global batch and its gradients. Traceable.

        If layers return scalars with weights (`Architecture.aux`), the gradients are those of the loss plus these.

        Args:
            params: Parameters in mesh layout, sharded by `layout.specs()`.
            tokens: Token batch, int32 [global_batch, sequence + 1], see `abstract_batch`.
            key: Key of dropout, uint32 [2]; None without dropout.
            codec: State of the compression; None: the initial state.

        Returns:
            The loss, float32 []; its gradients, shaped and sharded like the parameters; the new state of the
            compression; the relative error of each stage's compression over data, float32 [P] (see
            reduction.Reduced); and the layers' scalars by name, float32 [], as sums over the layers and means over
            the micro-batches.
        """
        specs, every, whole = self.layout.specs(), device_spec(self.config.mesh), PartitionSpec()
        codec = self.compression.init() if codec is None else codec
        results = whole, specs, every, PartitionSpec(PIPE), whole
        run = self.shard_map(self._local_gradients, (specs, batch_spec(self.config.mesh), whole, every), results)
        return run(params, tokens, key, codec)

    @jax.named_scope("sync")
    def norm(self, grads: Params) -> jax.Array:
        """Return the norm of gradients in mesh layout, with each parameter counted once. Traceable."""
        run = functools.partial(gradients.global_norm, self.layout)
        return self.shard_map(run, (self.layout.specs(),), PartitionSpec())(grads)

    @jax.named_scope("optimizer")
    def update(
        self, state: TrainState, loss: jax.Array, grads: Params, codec: CodecStates
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Clip the gradients and apply the optimizer. Traceable.

        If the loss or the norm is not finite, only the state's `step` and `skipped` change.

        Args:
            state: State before the step.
            loss: Mean loss over the batch, float32 [].
            grads: Its gradients in mesh layout.
            codec: New state of the compression.

        Returns:
            The state after the step, and the metrics loss, grad_norm (before clipping), learning_rate and finite.
        """
        if self.mesh.size > 1:
            # The barrier materializes the gradients, so that each parameter's update is one fusion in place. Without it
            # XLA copies the optimizer state first. On one device the layers' gradients are read where they are.
            grads = lax.optimization_barrier(grads)
        return self._apply(state, loss, grads, self.norm(grads), codec)

    def _apply(
        self, state: TrainState, loss: jax.Array, grads: Params, norm: jax.Array, codec: CodecStates
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return what `update` returns, given the norm of the gradients. No collective is in here."""
        c = self.config
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
            "learning_rate": learning_rate(c.optimizer, c.run.steps)(state.step - state.skipped),
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

    def _key(self, step: jax.Array) -> jax.Array | None:
        """Return the key of a step's dropout; None without dropout."""
        model, seed = self.config.model, self.config.run.seed
        drops = model.embedding_dropout or model.residual_dropout
        return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), step)) if drops else None

    def _step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        key = self._key(state.step)
        loss, grads, codec, left_out, scalars = self.loss_and_gradients(state.params, tokens, key, state.codec)
        state, metrics = self.update(state, loss, grads, codec)
        return state, metrics | self._metrics(left_out, scalars)

    def _metrics(self, left_out: jax.Array, scalars: Scalars) -> dict[str, jax.Array]:
        """Return the metrics that not all configurations have."""
        found = {one.metric: scalars[one.name] for one in parameters.aux(self.config.model)}
        return found | ({"left_out": left_out} if any(self.ranks) else {})

    @functools.cached_property
    def step(self) -> Any:
        """Jitted training step: (state, batch) -> (state, metrics).

        Args:
            state (TrainState): State before the step. It is donated: its arrays cannot be used afterwards.
            batch (jax.Array): Tokens, int32 [global_batch, sequence + 1], see `abstract_batch`. Each position predicts
                the next one.

        Returns:
            The state after the step, and a dictionary of metrics: loss and grad_norm, float32 []; learning_rate,
            float32 []; finite, bool []; left_out, float32 [P], the relative error of each stage's compression over
            data, if any stage compresses; and aux/NAME, float32 [], the layers' scalars if they have any.
        """
        return jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, NamedSharding(self.mesh, self._metrics_spec)),
        )

    def compile_step(self) -> jax.stages.Compiled:
        """Compile the training step for this mesh; it needs no data."""
        return self.step.lower(self.abstract_state(), self.abstract_batch()).compile(self.compiler_options)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for the training step on this mesh's platform."""
        between = self.compression.between_stages
        return compiler_options.of(self.config, self.platform, self.schedule.masked, between, self.virtual)

    def _local_loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        stage = self.stage(params, tokens, None, exact=True)
        table = forward_only(self.layout.stages, stage.micro_batches, self.layout.chunks, self.schedule.place)
        table = dataclasses.replace(table, masked=self._masked(table.masked))
        return self._sum_losses(executor.loss_only(stage, self._assigned(table), table.masked), {})[0]

    @functools.cached_property
    def evaluate(self) -> jax.stages.Wrapped:
        """Jitted evaluation: (params, batch) -> loss.

        Args:
            params (Params): Parameters in mesh layout: `state.params`.
            batch (jax.Array): Tokens, int32 [global_batch, sequence + 1], see `abstract_batch`.

        Returns:
            Mean loss over the batch in nats per token, float32 [], without dropout.
        """
        specs = self.layout.specs(), batch_spec(self.config.mesh)
        return jax.jit(self.shard_map(self._local_loss, specs, PartitionSpec()))
