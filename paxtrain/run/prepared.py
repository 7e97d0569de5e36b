"""A training run before and between its steps: its folder, its data, its state, its checkpoints."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Generator

import jax
import numpy as np
from jax.sharding import Mesh

from compress import Codec
from compress.codec import Tree
from paxtrain import files
from paxtrain.config import Config, OuterConfig, read_section, to_dict
from paxtrain.config.axes import in_words
from paxtrain.data import settings, tokenizer
from paxtrain.data.datasets import DataSets
from paxtrain.data.streams import StreamState
from paxtrain.devices import datasheets, host
from paxtrain.errors import UserError
from paxtrain.huggingface import importing
from paxtrain.model import parameters
from paxtrain.outer.timetable import Timetable
from paxtrain.outer.trainer import GroupedTrainer, trainer_of
from paxtrain.parallel import compressed_stages
from paxtrain.parallel.compression import checks
from paxtrain.parallel.compression.ranks import Ranks, StageRanks
from paxtrain.parallel.mesh import from_process_rows, process_rows
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.process import distributed
from paxtrain.process.progress import Progress
from paxtrain.process.stopping import Stop
from paxtrain.run import checkpoint, checkpoint_reading, checkpoint_record, metrics, report, sampling
from paxtrain.run.checkpoint_reading import Wanted
from paxtrain.run.checkpoint_record import Meta
from paxtrain.run.run_lock import RunLock
from paxtrain.tables import size, table

ProgramKey = tuple[Ranks, int | None]  # what a step's program depends on: ranks over data, and the exchange under it


def require_memory(trainer: Trainer) -> None:
    """Require that the machine has memory for the states that its virtual CPU devices hold.

    Raises:
        UserError: it has less, so that the system would kill the process while it makes them.
    """
    if trainer.platform != "cpu":
        return
    needed, there = host.bytes_here(jax.tree.leaves(trainer.abstract_state())), host.memory()
    if needed > there:
        mesh, devices = trainer.config.mesh, len(jax.local_devices())
        where = "one virtual CPU device" if devices == 1 else f"{devices} virtual CPU devices"
        model = f"a model of {size(parameters.published(trainer.config.model))} parameters"
        raise UserError(
            f"weights and optimizer of {model} take {size(needed, 'B')} on {where} ({in_words(mesh.sizes)}), and this "
            f"machine has {size(there, 'B')}; GPUs, more machines or a smaller model, as --config=tiny, would work"
        )


class PreparedRun:
    """A training run before and between its steps.

    The constructor checks all input before anything is compiled.

    Attributes:
        config: Configuration of the run.
        out: Folder of the run.
        primary: Whether this process writes files; it is process 0.
        talks: Whether this process prints.
        mesh: Device mesh with the axes (data, pipe, tensor).
        trainer: Trainer of the run.
        data: Training and validation data.
        progress: What this process does, for its watchdog.
        samples: Number of samples that training has consumed.
        tokens_per_step: Number of tokens of a global batch.
        stop: Request to stop, by SIGTERM.
        lock: Lock of the folder, on the process that writes files.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        progress: Progress | None = None,
        quiet: bool = False,
        codec: Codec | None = None,
    ) -> None:
        """Check the input.

        Args:
            config: Configuration of the run.
            mesh: Device mesh, as `make_mesh` returns it.
            progress: What this process does, for its watchdog; None: nobody watches.
            quiet: Whether to print nothing.
            codec: Codec of the gradients between stages, instead of the configuration's (see Trainer).

        Raises:
            UserError: The data, the tokenizer or the folder does not fit, or another run has the folder.
        """
        self.config = config
        self.quiet = quiet
        self.progress = progress or Progress()
        self.out = pathlib.Path(config.run.out)
        self.primary = jax.process_index() == 0
        self.talks = self.primary and not quiet
        home = self.out / sampling.CHECKPOINTS
        self._resumes = config.checkpoint.resume and bool(checkpoint_reading.finished_steps(home))
        if config.init and not self._resumes:
            _ = self._initial  # which checks it
        self.mesh, self.trainer = mesh, trainer_of(config, mesh, codec)
        self.data = DataSets(config)
        checks.check(self.trainer.compression)  # also decides which attention and which kernels run
        if isinstance(self.trainer, GroupedTrainer):
            self.trainer.exchange.check()
        require_memory(self.trainer)
        self._check_tokenizer()
        if self.primary:
            metrics.check_loggers(config.run.named_loggers)
        checkpoint.ensure_writable(self.out)
        self._ranks: StageRanks | None = None
        self._began = False  # whether the first state has the weights of `init`
        self._reset = ""  # the reason why the compression's state starts anew instead of from the checkpoint
        self._timetable = Timetable(config.outer, config.run.steps) if config.outer.every else None
        self._steps: dict[ProgramKey, jax.stages.Compiled] = {}
        self.shape = self.trainer.abstract_batch().shape
        self.rows = process_rows(self.trainer.batch_sharding, self.shape)
        # Rows of the batch that hold the same sample read it once.
        self._samples, self._places = np.unique(config.batch_samples[self.rows], return_inverse=True)
        self.tokens_per_step = config.batch.global_batch * config.model.sequence
        self.samples = 0
        self._stream: StreamState | None = None  # the state of the stream behind the last batch
        self.stop = Stop()
        self.lock = RunLock(self.out) if self.primary else None  # last, when all input is good

    @property
    def ranks(self) -> StageRanks:
        """Ranks of the stages' factors over data. They are known after `choose_ranks`."""
        assert self._ranks is not None
        return self._ranks

    @functools.cached_property
    def _initial(self) -> importing.Model:
        """The model whose weights the first state has."""
        return importing.Model(self.config.init, self.config.model)

    @property
    def _tokenizer(self) -> pathlib.Path:
        return self.out / sampling.TOKENIZER

    def _check_tokenizer(self) -> None:
        """Check that the data has the tokenizer of the weights, so that token ids keep their meaning.

        Raises:
            UserError: The tokenizers differ, or the data's is damaged.
        """
        if self.data.tokenizer.exists():
            tokenizer.load(self.data.tokenizer)  # find a damaged file now, not at the sample after training
        if not self._resumes and not self.config.init:
            return
        mine, of = (self._tokenizer, "the checkpoints") if self._resumes else (self._initial.tokenizer, "the model")
        paths = (mine, self.data.tokenizer)
        if all(path.exists() for path in paths) and not tokenizer.alike(*paths):
            other = "name another run.out" if self._resumes else "name another model with --config.init"
            raise UserError(
                f"{mine} of {of} and {paths[1]} of the data are different tokenizers; prepare the data with "
                f"--tokenizer={mine}, or {other}"
            )

    def _keep_tokenizer(self) -> None:
        """Copy the tokenizer of the model and of the data beside the checkpoints, so that sampling needs neither."""
        if self.primary and self._began:
            self._initial.keep(self.out)
        source = self.data.tokenizer
        target = self._tokenizer
        if self.primary and source.exists() and source.resolve() != target.resolve():
            files.write(target, source.read_bytes())
            if found := settings.of_run(settings.read(self.out), self.data.settings):
                files.write(self.out / settings.FILE, settings.text(found))

    # --- Data ---------------------------------------------------------------------------------------------------------

    def batches(self, name: str, start_sample: int = 0, part: str = "") -> Generator[jax.Array]:
        """Return an endless iterator over global batches, int32, as `Trainer.abstract_batch` describes them.

        Args:
            name: "train" or "validation".
            start_sample: Number of training samples to skip.
            part: Name of the validation set.
        """
        samples, streams = self._samples.tolist(), name == "train" and self.config.data.stream
        if name == "train":
            local = self.data.training(samples, start_sample, state=self._stream)
        else:
            local = self.data.validating(part, samples)
        try:
            for rows in local:
                if streams:
                    self._stream = local.get_state()
                yield from_process_rows(self.trainer.batch_sharding, self.shape, self.rows, rows[self._places])
        finally:
            if streams:
                local.close()  # while the interpreter lives, since its thread may wait

    @functools.cached_property
    def _evaluate(self) -> Callable[..., jax.Array]:
        return distributed.compiled_together(self.trainer.evaluate, "the evaluation")

    def _validate(self, state: TrainState, part: str) -> float:
        some = zip(range(self.config.run.eval_batches), self.batches("validation", part=part))
        with self.progress.doing("evaluating"):  # one update for each set, so that many sets do not look like a hang
            return float(np.mean([float(self._evaluate(state.params, batch)) for _, batch in some]))

    def validate(self, state: TrainState) -> dict[str, float]:
        """Return the mean loss over eval_batches batches of each validation set, by its name in the metrics."""
        return {metrics.validation_loss(part): self._validate(state, part) for part in self.data.validation}

    # --- State --------------------------------------------------------------------------------------------------------

    def start(self, checkpoints: checkpoint.Checkpoints) -> TrainState:
        """Return the state of the newest good checkpoint, or the initial state if there is none.

        Raises:
            UserError: The checkpoint does not fit the configuration, or all checkpoints are damaged.
        """
        if not self.config.checkpoint.resume:
            return self._begin()
        abstract = self.trainer.abstract_canonical()
        with self.progress.doing("restoring a checkpoint"):
            model, step = sampling.architecture(self.config.model), self.config.run.resume_step
            restored = checkpoints.restore(abstract, model, self._wanted(abstract), step)
        for problem in checkpoints.problems:
            self.say(problem)
        if restored is None:
            return self._begin()
        tree, meta = restored
        self._resume(meta, int(tree["skipped"]))
        return self.trainer.from_canonical(tree)

    def _begin(self) -> TrainState:
        """Return the state before the first step: the seed's, or with the weights of the model that `init` names.

        Raises:
            UserError: The model is damaged, or another one on other processes.
        """
        if not self.config.init:
            return self.trainer.init(self.config.run.seed)
        problem: UserError | OSError | None = None
        params: Tree = {}
        checksum = 0
        with self.progress.doing("reading a model"):
            try:
                params, checksum = self._initial.params(self.trainer.abstract_canonical()["params"])
            except (UserError, OSError) as error:
                problem = error
            distributed.agree(problem)
            found = distributed.gather_texts(str(checksum))
        if other := [i for i, one in enumerate(found) if one != found[0]]:
            raise UserError(
                f"init={self.config.init} is another model on process {other[0]} than on process 0; name a folder that "
                "all hosts share, or copy it to each"
            )
        self._began = True
        self.say(f"the run begins with the weights of {self.config.init}")
        return self.trainer.from_params(params)

    def _resume(self, meta: Meta, skipped: int) -> None:
        """Take the count of samples and the ranks from a checkpoint's metadata, and print what has changed since.

        Args:
            meta: Metadata of the checkpoint.
            skipped: Number of steps that changed nothing.
        """
        step, steps = meta["step"], self.config.run.steps
        if step > steps:
            raise UserError(
                f"{self.out} has a checkpoint of step {step}, but run.steps is {steps}; "
                "ask for more steps, or name another run.out"
            )
        self.samples = meta["samples"]
        if self._timetable and (before := _timetable(meta)):
            settled = before.settled if before.waited(step) is None else step
            self._timetable = dataclasses.replace(self._timetable, settled=settled)
        self.say(f"resumed from step {step}, {self.samples} samples consumed")
        if self.config.init:
            self.say(f"init={self.config.init} is not read, since the run has checkpoints")
        if step and (changed := report.changed_settings(meta["config"], self.config, step - skipped)):
            self.say(f"settings have changed: {changed}")
        if meta["data"] and meta["data"] != self.data.identity():
            anew = "; the stream begins anew" if self.config.data.stream else ""
            self.say(f"the data order has changed{anew}; the checkpoint's is {meta['data']}")
        elif self.config.data.stream:
            self._stream = meta.get("stream")
        if self._reset:
            self.say(self._reset)
        compression = meta.get("compression", {})
        if not self._reset and (changed := self.trainer.compression.changed(compression)):
            self.say(changed)
        if not compression.get("ranks") or self._reset or self.trainer.compression.reducer is None:
            return
        # The codecs' states say whether the mesh is the same, if they have any.
        if compression["identity"] != self.trainer.compression.identity() or compression["rule"] != self._rank_rule:
            self.say("ranks over data start anew, because the mesh or the settings that decide them have changed")
            return
        self._ranks = StageRanks.of(self.config, tuple(compression["ranks"]["chosen"]))
        self._ranks.resume(compression["ranks"])
        if self.config.compress.data.low_rank:
            self.say(f"ranks over data, by stage: {', '.join(map(str, self._ranks.current))}")

    @property
    def _rank_rule(self) -> Meta:
        """The settings that decide the ranks over data."""
        data = self.config.compress.data
        unused = ("codec", "options") if data.low_rank else ()
        return {name: value for name, value in vars(data).items() if name not in unused}

    def _wanted(self, abstract: dict[str, Tree]) -> Wanted:
        """Return the function that selects the keys to read: all, or all except the state of the compression."""
        mine = checkpoint_record.kinds({"codec": abstract["codec"]})

        def wanted(meta: Meta, arrays: dict[str, str], where: str) -> set[str]:
            self._check_groups({path.split("/")[0] for path in arrays}, where)
            self._check_pending(meta, where)
            saved = {path: kind for path, kind in arrays.items() if path.startswith("codec/")}
            self._reset = self.trainer.compression.why_reset(meta.get("compression", {}), saved, mine, where)
            return set(abstract) - {"codec"} if self._reset else set(abstract)

        return wanted

    def _check_groups(self, keys: set[str], where: str) -> None:
        """Require that a checkpoint has the state of groups if this run has groups, and none if it has none.

        Args:
            keys: Parts of the checkpoint's state.
            where: Name of the checkpoint, for messages.
        """
        here, every = isinstance(self.trainer, GroupedTrainer), self.config.outer.every
        if here == ("outer" in keys):
            return
        how = "without groups, and this run has groups" if here else "in groups, and this run has none"
        raise UserError(
            f"{where} was trained {how} (outer.every={every}); continue it as it was trained, or name another run.out"
        )

    def _check_pending(self, meta: Meta, where: str) -> None:
        """Require that an exchange which a checkpoint has in flight, or which is due next, arrives as it was meant to.

        Args:
            meta: Metadata of the checkpoint.
            where: Name of the checkpoint, for messages.
        """
        before, mine, step = _timetable(meta), self.config.outer, meta["step"]
        if before is None:
            return
        due = before.under(step + 1) is not None and before.waited(step) is None
        if due and self.config.run.steps == step:
            raise UserError(
                f"{where} has an exchange of groups that the next step would carry, but run.steps is {step}, too; "
                f"ask for run.steps={step + mine.every} or more"
            )
        if not due and not before.pending(step):
            return
        for name in ("every", "fragments", "overlap"):
            there, here = getattr(before.outer, name), getattr(mine, name)
            if there != here:
                raise UserError(
                    f"{where} has an exchange of groups {'due' if due else 'in flight'} that began with "
                    f"outer.{name}={there}, and this run has outer.{name}={here}; continue with {there}, or name "
                    "another run.out"
                )

    def choose_ranks(self, state: TrainState) -> None:
        """Choose the stages that compress over data, unless the checkpoint has chosen them."""
        if self._ranks is None:
            chosen = self.trainer.compression.levels
            if self.config.compress.data.stages == "selective" and self.trainer.compression.reducer is not None:
                times, source = compressed_stages.choose(self.trainer, state)
                stages = times.chosen()
                chosen = tuple(self.trainer.compression.level if s in stages else 0 for s in range(len(chosen)))
                self.say(table(report.stage_times(times, stages, source)))
            self._ranks = StageRanks.of(self.config, chosen)

    def _check_profile(self, steps: range) -> None:
        """Check that all profiled steps run one program, because the trace is read with that program's text.

        Raises:
            UserError: Ranks may change between the steps, or only some of them have an exchange of groups in them.
        """
        changes = [n + 1 for n in steps[:-1] if self.program(n) != self.program(n + 1) or self.ranks.due(n)]
        if changes:
            what = "gradients over data may change their ranks"
            if any(self.program(n)[1] is not None for n in steps):
                what = "an exchange of groups begins or ends"
            raise UserError(
                f"profile={self.config.profile} spans step {changes[0]}, at which {what}; name steps that all come "
                "before it, or steps from it on"
            )

    def program(self, number: int) -> ProgramKey:
        """Return what the program of the step of a number depends on."""
        return self.ranks.at(number), self._timetable.under(number) if self._timetable else None

    def step_of(self, number: int) -> jax.stages.Compiled:
        """Return the compiled training step for the step of this number."""
        program = self.program(number)
        if program not in self._steps:
            trainer = dataclasses.replace(self.trainer, stage_ranks=program[0])
            if isinstance(trainer, GroupedTrainer):
                trainer = dataclasses.replace(trainer, fragment=program[1])
            with self.progress.doing("compiling"):
                self._steps[program] = trainer.compile_step()
                distributed.wait_for_all(f"step {number} is compiled")
        return self._steps[program]

    def compile_all(self, first: int) -> None:
        """Compile the programs that are known to be needed: those of the first step, a round and the last step.

        Args:
            first: Number of the first step to run.
        """
        steps = self.config.run.steps
        for number in (first, steps, *range(first + 1, min(first + self.config.outer.every + 1, steps))):
            self.step_of(number)

    def after(self, number: int, state: TrainState) -> TrainState:
        """Start what follows the step of a number if there are groups: the end of an exchange, or a whole one.

        Args:
            number: Number of the step, counted from 1.
            state: State after the step. It is donated.
        """
        if self._timetable and isinstance(self.trainer, GroupedTrainer):
            if (fragment := self._timetable.joined(number)) is not None:
                state = self.trainer.joined(state, np.int32(fragment))
            if (fragment := self._timetable.waited(number)) is not None:
                with self.progress.doing("exchanging"):
                    state = self.trainer.exchanged(state, fragment)
        return state

    def save(self, checkpoints: checkpoint.Checkpoints, state: TrainState, step: int) -> None:
        """Start writing a checkpoint.

        Args:
            checkpoints: Open checkpoints of the run.
            state: State after the step.
            step: Number of the step.
        """
        meta = {
            "step": step,
            "samples": self.samples,
            "stream": self._stream,
            "model": sampling.architecture(self.config.model),
            "data": self.data.identity(),
            "config": to_dict(self.config),
            "settled": self._timetable.settled if self._timetable else 0,
            "compression": {
                "identity": self.trainer.compression.identity(),
                "link_ranks": self.trainer.compression.link_settings(),
                "ranks": self.ranks.to_json(),
                "rule": self._rank_rule,
            },
            "jax": jax.__version__,
        }
        with self.progress.doing("saving a checkpoint"):
            checkpoints.save(step, self.trainer.canonical(state), meta)

    def say(self, text: str) -> None:
        """Print a text on the first process."""
        if self.talks:
            print(text, flush=True)

    @property
    def peak(self) -> float | None:
        """Peak FLOP/s of one device, or None if it is not known."""
        return self.config.run.peak_flops or datasheets.peak_flops(self.trainer.mesh.devices.flat[0].device_kind)


def _timetable(meta: Meta) -> Timetable | None:
    """Return the timetable of the run that has written a checkpoint; None if it trained without groups.

    Args:
        meta: Metadata of the checkpoint.
    """
    config = meta.get("config", {})
    outer = read_section(OuterConfig, config.get("outer", {}), "outer")
    return Timetable(outer, config["run"]["steps"], meta.get("settled", 0)) if outer.every else None
