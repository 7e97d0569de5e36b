"""The configuration of a run: its sections, and the checks that involve several of them.

Config files (configs/*.py) hold an ml_collections ConfigDict, which absl flags override. `load.from_dict` turns it into
these dataclasses at the edge, so that nothing below the mains sees a ConfigDict.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from paxtrain.config.axes import AXES, TENSOR, more_axes
from paxtrain.config.checks import OUT, Checked, Way, each, multiples_near, near, require, steps
from paxtrain.config.compress import SECONDS, CompressConfig
from paxtrain.config.data import DataConfig
from paxtrain.config.model import ModelConfig
from paxtrain.config.optimizer import OptimizerConfig, OuterConfig
from paxtrain.config.options import LINKED
from paxtrain.config.parallel import CONTEXT_FORMS, BatchConfig, MeshConfig, PipelineConfig
from paxtrain.config.run import CheckpointConfig, RunConfig
from paxtrain.schedule.stage_map import StageMap


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """The configuration of one training run, with the checks that involve several sections.

    Attributes:
        model: architecture.
        mesh: sizes of the mesh axes.
        pipeline: flow of micro-batches through the stages.
        batch: sequences per step and micro-batch.
        compress: compression of messages and gradients.
        optimizer: optimizer and learning-rate schedule.
        outer: groups of data ranks that train apart, and the outer optimizer that joins them.
        data: token files.
        checkpoint: interval of checkpoints, and which are kept.
        run: length, folder and reports of the run.
        init: folder of a model in Hugging Face's layout, with whose weights a run without checkpoints begins; "": the
            seed's.
        profile: "10:13" traces the steps 10, 11 and 12 into the run's folder (paxtrain/profiling/profiler.py); "":
            none.
    """

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    batch: BatchConfig = BatchConfig()
    compress: CompressConfig = CompressConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    outer: OuterConfig = OuterConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    init: str = ""
    profile: str = ""

    depth = 0

    def check(self) -> None:
        model, mesh = self.model, self.mesh
        steps("profile", self.profile, self.run.steps)
        self._check_sequence()
        self._check_split()
        require(
            not mesh.sequence_parallel or model.sequence % mesh.tensor == 0,
            f"mesh.sequence_parallel splits model.sequence={model.sequence}, which is not divisible by "
            f"mesh.tensor={mesh.tensor}",
            each("model.sequence", multiples_near(mesh.tensor, model.sequence)),
            {"mesh.sequence_parallel": False},
        )
        require(
            not (self.data.stream and self.run.log_samples),
            f"run.log_samples tells places in token files, which data.stream={self.data.stream} does not have",
            {"run.log_samples": False},
        )
        self.batch.rank_micro_batches(mesh)
        require(
            self.pipeline.idle != "compute" or not self.uneven,
            f"pipeline.idle=compute needs data ranks that all run the same rows, but batch.data_micro_batches="
            f"{self.batch.data_micro_batches}",
            each("pipeline.idle", ("skip", "auto")),
        )
        self._check_schedule()
        self._check_steps()
        self._check_compression()
        self._check_embedding()
        self._check_outer()
        self._check_inside()
        self._check_weights()
        self._check_keys()
        self._check_shard()

    def _check_split(self) -> None:
        """Require that axes divide what they split, each together with those before it that split the same."""
        model, sizes, axes = self.model, self.mesh.sizes, (TENSOR, *more_axes())
        for i, axis in enumerate(axes):
            whole = math.gcd(*(size for name, size in model.split_by(axis).items() if name != "padded_vocab"))
            vocabulary = model.vocabulary_for(sizes[axis]) if axis == TENSOR else 0
            for name, size in model.split_by(axis).items():
                over = [*(other for other in axes[:i] if name in AXES[other].dims), axis]
                fits = each(f"mesh.{axis}", near(whole, sizes[axis]))
                require(
                    size % math.prod(sizes[other] for other in over) == 0,
                    f"model.{name}={size} is not divisible by {' x '.join(f'mesh.{o}={sizes[o]}' for o in over)}",
                    {"model.vocab_multiple": vocabulary} if vocabulary else fits,
                )

    def _check_sequence(self) -> None:
        """Require that devices that share sequences have equal parts, and heads if they exchange tokens for them."""
        model, sizes, sequence = self.model, self.mesh.sizes, self.mesh.sequence_parallel
        for axis in (name for name, size in sizes.items() if AXES[name].sequence and size > 1):
            parts = AXES[axis].sequence * sizes[axis] * (sizes[TENSOR] if sequence else 1)
            require(
                model.sequence % parts == 0,
                f"mesh.{axis}={sizes[axis]}{' with mesh.sequence_parallel' * sequence} splits model.sequence="
                f"{model.sequence} into {parts} equal parts, which it cannot be",
                each("model.sequence", multiples_near(parts, model.sequence)),
                {f"mesh.{axis}": 1},
            )
        over = sizes[TENSOR] * self.mesh.context
        require(
            self.mesh.context_form != "heads" or model.key_value_heads % over == 0,
            f"mesh.context_form=heads splits {model.key_value_heads} heads of keys over mesh.tensor={sizes[TENSOR]} x "
            f"mesh.context={self.mesh.context}, which do not divide them",
            each("mesh.context_form", [form for form in CONTEXT_FORMS if form != "heads"]),
        )

    def _check_schedule(self) -> None:
        """Require that the schedule is one for the mesh, the layers and the batch."""
        pipeline, pipe = self.pipeline, self.mesh.pipe
        given, size = pipeline.in_flight, (pipe, pipeline.virtual_stages, self.micro_batches)
        require(
            not given or pipe <= given < 2 * pipe,
            f"pipeline.in_flight={given} is not between mesh.pipe={pipe}, which is 1f1b, and 2 * mesh.pipe - 1 = "
            f"{2 * pipe - 1}",
            each("pipeline.in_flight", [pipe if given < pipe else 2 * pipe - 1, 0]),
        )
        stages, chunks, m = pipeline.spec.size or size
        batch = {"batch.global_batch": self.mesh.ranks * self.batch.micro_batch * m, "batch.data_micro_batches": OUT}
        require(
            size == (stages, chunks, m),
            f"pipeline.schedule={pipeline.schedule} has {stages} stages of {chunks} chunks and {m} micro-batches, but "
            f"mesh.pipe={pipe}, pipeline.virtual_stages={size[1]} and the batch has {size[2]} micro-batches",
            {"mesh.pipe": stages, "pipeline.virtual_stages": chunks} | batch,
            {"pipeline.schedule": PipelineConfig.schedule},
        )
        pipeline.layers_per_virtual_stage(self.model.layers, pipe)
        require(
            pipe > 1 or pipeline.virtual_stages == 1,
            f"pipeline.schedule={pipeline.schedule} needs mesh.pipe of 2 or more, got {pipe}",
            {"mesh.pipe": 2},
            {"pipeline.schedule": PipelineConfig.schedule, "pipeline.virtual_stages": 1},
        )

    def _check_steps(self) -> None:
        """Require that what is counted in steps fits into the run."""
        opt, total = self.optimizer, self.run.steps
        decay = opt.decay_steps if opt.schedule == "wsd" else 0
        least = math.ceil((opt.warmup_steps + decay) / (self.outer.every or 1)) * (self.outer.every or 1)
        named = f"optimizer.warmup_steps={opt.warmup_steps}" + (f" and decay_steps={decay}" if decay else "")
        shorter = {"optimizer.warmup_steps": total // 10}
        if decay:
            shorter["optimizer.decay_steps"] = total // 5 or 1
        require(
            opt.warmup_steps + decay <= total,
            f"{named} {'do' if decay else 'does'} not fit into run.steps={total}",
            shorter,
            {"run.steps": least},
        )
        require(
            self.checkpoint.resume or not self.run.resume_step,
            f"run.resume_step={self.run.resume_step} goes on from a checkpoint, and checkpoint.resume=False from none",
            {"run.resume_step": 0},
            {"checkpoint.resume": True},
        )

    def _check_compression(self) -> None:
        """Require that the compression fits the mesh and the model."""
        c, pipe = self.compress, self.mesh.pipe
        for direction in ("backward", "forward"):
            part = c.at(direction)
            setting = f"codec={part.codec}" if part.codec else f"messages={part.chosen}"
            require(
                part.chosen == "none" or pipe > 1,
                f"compress.{direction}.{setting} needs messages between stages, but mesh.pipe=1",
                {"mesh.pipe": 2},
                {f"compress.{direction}": OUT},
            )
            require(
                part.chosen == "none" or not self.stage_map.folded,
                f"compress.{direction}.{setting} compresses what goes one way over each link, but pipeline.schedule="
                f"{self.pipeline.schedule} sends it both ways",
                {f"compress.{direction}": OUT},
                {"pipeline.schedule": PipelineConfig.schedule, "pipeline.virtual_stages": 1},
            )
        require(
            c.embedding.sync != "fused" or len(self.stage_map.ends) > 1,
            "compress.embedding.sync=fused needs tied copies of the embedding on the first and the last stage, "
            f"but {'mesh.pipe=1' if pipe == 1 else f'pipeline.schedule={self.pipeline.schedule}'} holds it once",
            {"compress.embedding.sync": "auto"},
            [{"mesh.pipe": 2}] * (pipe == 1),
        )
        require(
            c.embedding.sync == "auto" or self.model.tied_head,
            f"compress.embedding.sync={c.embedding.sync} is about the embedding's tied copies, but "
            "model.tied_head=False",
            {"compress.embedding.sync": "auto"},
            {"model.tied_head": True},
        )
        ranks = c.backward.link_ranks(self.links)
        require(
            pipe == 1 or len(ranks) == self.links,
            f"compress.backward.ranks={c.backward.ranks} names {len(ranks)} links, but there are {self.links} "
            f"between {pipe} stages",
            {"compress.backward.ranks": _joined((ranks + ranks[-1:] * self.links)[: self.links])},
            {"compress.backward.ranks": OUT},
        )
        for place in LINKED:
            links = c.at(place).on(self.links)
            there = [link for link in links if link < self.links]
            require(
                pipe == 1 or len(there) == len(links),
                f"compress.{place}.links={c.at(place).links} names link {max(links, default=0)}, but "
                f"mesh.pipe={pipe} has links 0 to {self.links - 1}",
                each(f"compress.{place}.links", [_joined(there)] if there else ()),
                {f"compress.{place}.links": OUT},
            )
        stages = c.data.stages_of(pipe)
        held = [stage for stage in stages if stage < pipe]
        require(
            len(held) == len(stages),
            f"compress.data.stages={c.data.stages} names stage {max(stages, default=0)}, but mesh.pipe={pipe} has "
            f"stages 0 to {pipe - 1}",
            {"compress.data.stages": _joined(held) if held else "all"},
            {"mesh.pipe": max(stages, default=0) + 1},
        )
        for name, values in zip(SECONDS, c.data.seconds, strict=True):
            require(
                not values or len(values) == pipe,
                f"compress.data.{name} names {len(values)} stages, but mesh.pipe={pipe}",
                {"mesh.pipe": len(values)},
                {f"compress.data.{other}": OUT for other in SECONDS},
            )

    def _check_embedding(self) -> None:
        """Require that the embedding's gradients travel, if a codec is to encode them."""
        codec = self.compress.embedding.codec
        tied = self.model.tied_head and len(self.stage_map.ends) > 1
        require(
            not codec or tied or self.mesh.data > self.groups,
            f"compress.embedding.codec={codec} needs gradients of the embedding that travel over data or between the "
            f"two copies of a tied table, but mesh.data={self.mesh.data} in {self.groups} groups and mesh.pipe="
            f"{self.mesh.pipe} send none",
            self._larger_groups(),
            each("mesh.pipe", (2,) if self.model.tied_head else ()),
            {"compress.embedding": OUT},
        )

    def _check_outer(self) -> None:
        """Require that groups and their exchanges fit the mesh and the length of the run."""
        check_groups(self.outer, self.run.steps, self.model.layers, self.batch, self.compress)
        data = self.mesh.data
        require(
            data % self.groups == 0,
            f"outer.groups={self.outer.groups} does not divide mesh.data={data}",
            each("outer.groups", near(data, self.groups)),
        )

    def _check_inside(self) -> None:
        """Require that groups of data ranks that sum gradients as they are fit the mesh, and are asked for."""
        inside, ranks = self.compress.data.inside, self.mesh.data // self.groups
        require(
            inside == 1 or self.compress.data.chosen != "none",
            f"compress.data.inside={inside} is about gradients that are compressed over data, but none are",
            {"compress.data.stages": "all"},
            {"compress.data.inside": 1},
        )
        of = f"mesh.data={self.mesh.data}" if self.groups == 1 else f"the {ranks} data ranks that train together"
        require(
            ranks % inside == 0,
            f"compress.data.inside={inside} does not divide {of}",
            each("compress.data.inside", near(ranks, inside)),
        )
        require(
            inside == 1 or self.mesh.replicas == self.mesh.data or self.mesh.copies > 1,
            f"compress.data.inside={inside} makes groups of data ranks, but mesh.context={self.mesh.context} devices "
            "reduce gradients with each of them",
            {"compress.data.inside": 1},
            {"mesh.context": 1},
        )

    def _check_weights(self) -> None:
        """Require that weights are gathered over the data ranks that train together, if a codec is to encode them."""
        codec, data, groups = self.compress.weights.codec, self.mesh.data, self.groups
        what = "gathered over data"
        if groups > 1:
            what = f"gathered over data inside a group, and outer.every={self.outer.every} makes {groups} groups of "
            what += f"mesh.data={data}"
        require(
            not codec or (self.mesh.zero1 and data > groups),
            f"compress.weights.codec={codec} needs mesh.shard=optimizer or more, and weights that are {what}",
            ({"mesh.shard": "optimizer"} | way for way in (self._larger_groups() if data == groups else [{}])),
            {"compress.weights": OUT},
        )

    def _check_keys(self) -> None:
        """Require that devices send each other keys and values, if a codec is to encode them."""
        codec, mesh = self.compress.context.codec, self.mesh
        require(
            not codec or (mesh.context > 1 and mesh.context_form != "heads"),
            f"compress.context.codec={codec} takes keys and values that devices which share sequences send each other, "
            f"not those of mesh.context={mesh.context} with mesh.context_form={mesh.context_form}",
            each("mesh.context_form", ("ring", "gather")) if mesh.context > 1 else {"mesh.context": 2},
            {"compress.context": OUT},
        )

    def _check_shard(self) -> None:
        """Require that each micro-batch can reduce-scatter its gradients, if their sums are sharded."""
        shard, compress = self.mesh.shard, self.compress
        if not self.mesh.shards_sums:
            return
        ways = each("mesh.shard", ("optimizer",))
        require(
            not (self.mesh.shard_group and self.outer.every),
            f"mesh.shard_group={self.mesh.shard_group} sums gradients between groups in each step, and outer.every="
            f"{self.outer.every} lets groups train apart",
            {"mesh.shard_group": 0},
            {"outer": OUT},
        )
        require(
            not self.uneven,
            f"mesh.shard={shard} needs data ranks that run the same micro-batches, but batch.data_micro_batches="
            f"{self.batch.data_micro_batches}",
            {"batch.data_micro_batches": OUT},
            ways,
        )
        self._check_shard_codec()
        for name in ("codec", "sync"):
            value = getattr(compress.embedding, name)
            require(
                value in ("", "auto", "fused"),
                f"mesh.shard={shard} reduces the embedding's gradients over data in each micro-batch, and "
                f"compress.embedding.{name}={value} those of a step",
                {f"compress.embedding.{name}": OUT},
                ways,
            )

    def _check_shard_codec(self) -> None:
        """Require that a codec of gradients fits sums in shards: on all stages, or between groups of data ranks."""
        mesh, data = self.mesh, self.compress.data
        if data.chosen == "none":
            return
        out = {"compress.data": OUT}, {"mesh.shard": "optimizer", "mesh.shard_group": 0}
        require(
            not data.low_rank,
            f"mesh.shard={mesh.shard} has sums of gradients in shards, which low rank (compress.data) does not take",
            {"compress.data.codec": "int8", "compress.data.stages": OUT, "compress.data.adapt_every": OUT},
            *out,
        )
        require(
            len(data.stages_of(mesh.pipe)) == mesh.pipe,
            f"mesh.shard={mesh.shard} compresses gradients over data on all stages or on none, but "
            f"compress.data.stages={data.stages}",
            {"compress.data.stages": "all"},
            *out,
        )
        require(
            mesh.copies == 1 or data.inside == mesh.shard_group,
            f"mesh.shard_group={mesh.shard_group} compresses gradients between its groups, as they are summed inside, "
            f"but compress.data.inside={data.inside}",
            {"compress.data.inside": mesh.shard_group},
            {"mesh.shard_group": 0},
            out[0],
        )

    def _larger_groups(self) -> Iterator[Way]:
        """Yield ways to several data ranks that train together."""
        if self.outer.groups or not self.outer.every:
            yield {"mesh.data": 2 * self.groups}
        yield from each("outer.groups", near(self.mesh.data, self.groups - 1) if self.groups > 1 else ())

    @property
    def groups(self) -> int:
        """Number of groups of data ranks that train apart; 1 without an outer optimizer."""
        return (self.outer.groups or self.mesh.data) if self.outer.every else 1

    def of_group(self) -> "Config":
        """Return the configuration of one group: its data ranks and its part of the batch."""
        groups = self.groups
        return dataclasses.replace(
            self,
            mesh=dataclasses.replace(self.mesh, data=self.mesh.data // groups),
            batch=dataclasses.replace(self.batch, global_batch=self.batch.global_batch // groups),
            outer=dataclasses.replace(self.outer, groups=1) if self.outer.every else self.outer,
        )

    @property
    def links(self) -> int:
        """Return the number of links between stages; see `StageMap.links`."""
        return self.stage_map.links

    @property
    def stage_map(self) -> StageMap:
        """Return which stage holds which virtual stage."""
        return self.pipeline.spec.place(self.mesh.pipe, self.pipeline.virtual_stages)

    @property
    def profiled(self) -> range:
        """Return the steps that `profile` names."""
        return steps("profile", self.profile, self.run.steps)

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches per step of the data rank that has most; all have as many unless `uneven`."""
        return max(self.rank_micro_batches)

    @property
    def rank_micro_batches(self) -> tuple[int, ...]:
        """Return the micro-batches of each data rank in a step."""
        return self.batch.rank_micro_batches(self.mesh)

    @property
    def uneven(self) -> bool:
        """Return whether data ranks have different numbers of micro-batches."""
        return len(set(self.rank_micro_batches)) > 1

    @functools.cached_property
    def batch_samples(self) -> np.ndarray:
        """Sample of the global batch in each row of the array that a step takes, int [rows].

        Samples go to data rank after data rank, and to micro-batch after micro-batch in each. The array has as many
        rows for each rank. A rank with fewer micro-batches has its samples in the last ones; the rows before hold its
        first sample, and no step reads them.
        """
        size, counts = self.batch.micro_batch, np.array(self.rank_micro_batches)
        firsts = np.cumsum(counts) - counts
        inside = np.arange(size * counts.max()) - size * (counts.max() - counts)[:, None]
        return (size * firsts[:, None] + np.maximum(inside, 0)).ravel()

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Return the layers of each virtual stage, in the order of the forward pass."""
        return self.pipeline.layers_per_virtual_stage(self.model.layers, self.mesh.pipe)


def check_groups(outer: OuterConfig, steps: int, layers: int, batch: BatchConfig, compress: CompressConfig) -> None:
    """Require that groups and their exchanges fit the other sections, whatever the mesh is.

    Args:
        outer: groups of data ranks.
        steps: steps of the run.
        layers: layers of the model.
        batch: the batch.
        compress: compression of messages and gradients.

    Raises:
        UserError: they do not.
    """
    if not outer.every:
        require(
            not compress.outer.codec,
            f"compress.outer.codec={compress.outer.codec} needs groups that train apart",
            each("outer.every", itertools.islice(near(steps, 50), 1)),
            {"compress.outer": OUT},
        )
        return
    require(
        not batch.data_micro_batches,
        f"batch.data_micro_batches={batch.data_micro_batches} weighs sequences of data ranks that train "
        f"together, but with outer.every={outer.every} groups train apart",
        {"batch.data_micro_batches": OUT},
        {"outer": OUT},
    )
    fragments = outer.fragments
    require(
        steps % outer.every == 0,
        f"outer.every={outer.every} does not divide run.steps={steps}, so the last steps would not be exchanged",
        each("outer.every", near(steps, outer.every, lambda n: n % fragments == 0 and outer.overlap < n // fragments)),
        each("run.steps", multiples_near(outer.every, steps)),
    )
    require(
        fragments <= layers,
        f"outer.fragments={fragments} is more than model.layers={layers}, and a fragment has whole layers",
        each("outer.fragments", near(outer.every, layers, lambda n: n <= layers and outer.overlap < outer.every // n)),
        {"model.layers": fragments},
    )
    data = compress.data
    for name, given, known in (("stages", data.stages == "selective", "all"), ("adapt_every", data.adapt_every > 0, 0)):
        require(
            not given,
            f"compress.data.{name}={getattr(data, name)} is decided by all data ranks together, but with "
            f"outer.every={outer.every} groups train apart",
            {f"compress.data.{name}": known},
            {"outer": OUT},
        )


def _joined(values: Iterable[int]) -> str:
    return ",".join(map(str, values))
