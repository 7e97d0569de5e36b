"""The configuration of a run: its sections, and the checks that involve several of them.

Config files (configs/*.py) hold an ml_collections ConfigDict, which absl flags override. `load.from_dict` turns it into
these dataclasses at the edge, so that nothing below the mains sees a ConfigDict.
"""

import dataclasses
import functools
import math

import numpy as np

from paxtrain.config.checks import either, multiples_near, near, require, steps
from paxtrain.config.compress import SECONDS, CompressConfig
from paxtrain.config.data import DataConfig
from paxtrain.config.model import ModelConfig
from paxtrain.config.optimizer import OptimizerConfig, OuterConfig
from paxtrain.config.options import LINKED
from paxtrain.config.parallel import BatchConfig, MeshConfig, PipelineConfig
from paxtrain.config.run import CheckpointConfig, RunConfig


@dataclasses.dataclass(frozen=True)
class Config:
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
    profile: str = ""

    def __post_init__(self) -> None:
        model, mesh = self.model, self.mesh
        for name, size in model.split_sizes.items():
            require(
                size % mesh.tensor == 0,
                f"model.{name}={size} is not divisible by mesh.tensor={mesh.tensor}; "
                f"{self._tensor_that_fits()} would fit",
            )
        require(
            not mesh.sequence_parallel or model.sequence % mesh.tensor == 0,
            f"mesh.sequence_parallel splits model.sequence={model.sequence}, which is not divisible by "
            f"mesh.tensor={mesh.tensor}; model.sequence={multiples_near(mesh.tensor, model.sequence)} would fit",
        )
        self.batch.rank_micro_batches(mesh.data)
        require(
            self.pipeline.idle != "compute" or not self.uneven,
            f"pipeline.idle=compute needs data ranks that all run the same rows, but batch.data_micro_batches="
            f"{self.batch.data_micro_batches}; pipeline.idle=skip or auto would work",
        )
        self.pipeline.check_size(mesh.pipe, self.micro_batches)
        self.pipeline.layers_per_virtual_stage(model.layers, mesh.pipe)
        require(
            mesh.pipe > 1 or self.pipeline.virtual_stages == 1,
            f"pipeline.schedule={self.pipeline.schedule} needs mesh.pipe of 2 or more, got {mesh.pipe}",
        )
        opt, total = self.optimizer, self.run.steps
        decay = opt.decay_steps if opt.schedule == "wsd" else 0
        least = math.ceil((opt.warmup_steps + decay) / (self.outer.every or 1)) * (self.outer.every or 1)
        named = f"optimizer.warmup_steps={opt.warmup_steps}" + (f" and decay_steps={decay}" if decay else "")
        require(
            opt.warmup_steps + decay <= total,
            f"{named} {'do' if decay else 'does'} not fit into run.steps={total}; "
            f"{'shorter ones' if decay else f'optimizer.warmup_steps={total // 10}'}, or run.steps of "
            f"{least} or more, would fit",
        )
        require(
            self.checkpoint.resume or not self.run.resume_step,
            f"run.resume_step={self.run.resume_step} goes on from a checkpoint, and checkpoint.resume=False from none; "
            "leave one of them out",
        )
        steps("profile", self.profile, self.run.steps)
        self._check_compression()
        self._check_embedding()
        self._check_outer()
        self._check_inside()
        self._check_weights()

    def _tensor_that_fits(self) -> str:
        """Return a change that makes mesh.tensor divide the model, as a phrase: of the vocabulary, or of tensor."""
        model, tensor = self.model, self.mesh.tensor
        if vocabulary := model.vocabulary_for(tensor):
            return vocabulary
        split = self.mesh.sequence_parallel  # needs tensor of 2 or more
        sizes = [size for name, size in model.split_sizes.items() if name != "padded_vocab"]
        whole = math.gcd(*sizes, *([model.sequence] if split else []))
        found = near(math.gcd(whole, model.padded_vocab), tensor, lambda n: n > split)
        wider = [(n, model.vocabulary_for(n)) for n in near(whole, tensor, lambda n: n > split) if n not in found]
        phrases = [f"tensor={either(found)}"] * bool(found)
        phrases += [f"tensor={n} with {vocabulary}" for n, vocabulary in wider if vocabulary]
        return either(phrases or ["tensor=1 with mesh.sequence_parallel=False"])

    def _check_compression(self) -> None:
        """Require that the compression fits the mesh and the model."""
        c, pipe = self.compress, self.mesh.pipe
        for direction in ("backward", "forward"):
            part = c.at(direction)
            setting = f"codec={part.codec}" if part.codec else f"messages={part.chosen}"
            require(
                part.chosen == "none" or pipe > 1,
                f"compress.{direction}.{setting} needs messages between stages, but mesh.pipe=1; choose mesh.pipe of 2 "
                f"or more, or leave --config.compress.{direction} out",
            )
        require(
            c.embedding.sync != "fused" or pipe > 1,
            "compress.embedding.sync=fused needs tied copies of the embedding on the first and the last stage, "
            "but mesh.pipe=1 holds it once; choose auto",
        )
        require(
            c.embedding.sync == "auto" or self.model.tied_head,
            f"compress.embedding.sync={c.embedding.sync} is about the embedding's tied copies, but "
            "model.tied_head=False; choose auto",
        )
        ranks = c.backward.link_ranks(self.links)
        require(
            pipe == 1 or len(ranks) == self.links,
            f"compress.backward.ranks={c.backward.ranks} names {len(ranks)} links, but there are {self.links} "
            f"between {pipe} stages",
        )
        for place in LINKED:
            beyond = [link for link in c.at(place).on(self.links) if link >= self.links]
            require(
                pipe == 1 or not beyond,
                f"compress.{place}.links={c.at(place).links} names link {max(beyond, default=0)}, but "
                f"mesh.pipe={pipe} has links 0 to {self.links - 1}",
            )
        outside = [s for s in c.data.stages_of(pipe) if s >= pipe]
        require(
            not outside,
            f"compress.data.stages={c.data.stages} names stage {max(outside, default=0)}, but mesh.pipe={pipe} has "
            f"stages 0 to {pipe - 1}",
        )
        for name, values in zip(SECONDS, c.data.seconds, strict=True):
            require(
                not values or len(values) == pipe,
                f"compress.data.{name} names {len(values)} stages, but mesh.pipe={pipe}",
            )

    def _check_embedding(self) -> None:
        """Require that the embedding's gradients travel, if a codec is to encode them."""
        codec, tied = self.compress.embedding.codec, self.model.tied_head and self.mesh.pipe > 1
        require(
            not codec or tied or self.mesh.data > self.groups,
            f"compress.embedding.codec={codec} needs gradients of the embedding that travel over data or between the "
            f"two copies of a tied table, but mesh.data={self.mesh.data} in {self.groups} groups and mesh.pipe="
            f"{self.mesh.pipe} send none; choose mesh.data of {2 * self.groups} or more",
        )

    def _check_outer(self) -> None:
        """Require that groups and their exchanges fit the mesh and the length of the run."""
        check_groups(self.outer, self.run.steps, self.model.layers, self.batch, self.compress)
        data = self.mesh.data
        require(
            data % self.groups == 0,
            f"outer.groups={self.outer.groups} does not divide mesh.data={data}; "
            f"{either(near(data, self.groups, lambda n: data // n % self.compress.data.inside == 0) or [1])} would fit",
        )

    def _check_inside(self) -> None:
        """Require that groups of data ranks that sum gradients as they are fit the mesh, and are asked for."""
        inside, ranks = self.compress.data.inside, self.mesh.data // self.groups
        require(
            inside == 1 or self.compress.data.chosen != "none",
            f"compress.data.inside={inside} is about gradients that are compressed over data, but none are; choose "
            "--config.compress.data.codec, or --config.compress.data.stages=all for low rank",
        )
        of = f"mesh.data={self.mesh.data}" if self.groups == 1 else f"the {ranks} data ranks that train together"
        require(
            ranks % inside == 0,
            f"compress.data.inside={inside} does not divide {of}; {either(near(ranks, inside))} would fit",
        )

    def _check_weights(self) -> None:
        """Require that weights are gathered over the data ranks that train together, if a codec is to encode them."""
        codec, data, groups = self.compress.weights.codec, self.mesh.data, self.groups
        what, would = "gathered over data", "mesh.data of 2 or more"
        if groups > 1:
            what = f"gathered over data inside a group, and outer.every={self.outer.every} makes {groups} groups of "
            what += f"mesh.data={data}"
            would = f"mesh.data of {2 * groups} or more, or fewer outer.groups"
        require(
            not codec or (self.mesh.zero1 and data > groups),
            f"compress.weights.codec={codec} needs weights that are {what}; choose mesh.zero1=True and {would}",
        )

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
        """Return the number of links between stages; virtual stages add one from the last stage to the first."""
        return self.mesh.pipe - (self.pipeline.virtual_stages == 1)

    @property
    def profiled(self) -> range:
        """Return the steps that `profile` names."""
        return steps("profile", self.profile, self.run.steps)

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches per step of the data rank that has most; all have as many unless `uneven`."""
        return self.batch.micro_batches(self.mesh.data)

    @property
    def rank_micro_batches(self) -> tuple[int, ...]:
        """Return the micro-batches of each data rank in a step."""
        return self.batch.rank_micro_batches(self.mesh.data)

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
            f"compress.outer.codec={compress.outer.codec} needs groups that train apart; choose --config.outer.every",
        )
        return
    require(
        not batch.data_micro_batches,
        f"batch.data_micro_batches={batch.data_micro_batches} weighs sequences of data ranks that train "
        f"together, but with outer.every={outer.every} groups train apart; leave one of them out",
    )
    fits = near(steps, outer.every, lambda n: n % outer.fragments == 0 and outer.overlap < n // outer.fragments)
    above = math.ceil(steps / outer.every) * outer.every
    require(
        steps % outer.every == 0,
        f"outer.every={outer.every} does not divide run.steps={steps}, so the last steps would not be "
        f"exchanged; {either(fits) if fits else f'run.steps={above}'} would fit",
    )
    require(
        outer.fragments <= layers,
        f"outer.fragments={outer.fragments} is more than model.layers={layers}, and a fragment has whole layers; "
        f"{near(outer.every, layers)[0]} would fit",
    )
    data = compress.data
    for setting, given, known in (
        (f"stages={data.stages}", data.stages == "selective", "a list of stages"),
        (f"adapt_every={data.adapt_every}", data.adapt_every > 0, "0"),
    ):
        require(
            not given,
            f"compress.data.{setting} is decided by all data ranks together, but with outer.every={outer.every} groups "
            f"train apart; choose {known}",
        )
