"""Trains a GPT: python -m paxtrain.train --config=configs/gpt2_125m.py --config.mesh.pipe=4 [--plan=plan.json]."""

import dataclasses
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from paxtrain import sample
from paxtrain.config import Config, from_dict, plan, to_dict
from paxtrain.data import tokenizer
from paxtrain.data.datasets import DataSets
from paxtrain.errors import UserError, run
from paxtrain.parallel import selective
from paxtrain.parallel.mesh import cpu_devices, from_process_rows, host_major, make_mesh, place, process_rows
from paxtrain.parallel.ranks import Ranks, StageRanks
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.process import distributed, supervised
from paxtrain.process.stopping import Stop
from paxtrain.profiling.profiler import Profiler
from paxtrain.run import checkpoint, metrics, plots, report

LOSSES = "loss.png"


class Run:
    """One training run: its files, its data, its loop.

    Everything that can be wrong with the input is found while this is made, before anything is compiled.
    """

    def __init__(self, config: Config, mesh: Mesh, progress: supervised.Progress | None = None) -> None:
        """`progress` is told of steps and of what happens between them; None: nobody is."""
        self.config = config
        self.progress = progress or supervised.Progress({})
        self.out = pathlib.Path(config.run.out)
        self.primary = jax.process_index() == 0
        self.trainer = Trainer(config, mesh)
        self.progress.placed(place(mesh))
        self.data = DataSets(config)
        self.trainer.compression.check()  # settles attention and kernels, too
        self._check_tokenizer()
        checkpoint.ensure_writable(self.out)
        self.ranks: StageRanks | None = None
        self._reset = ""  # why the state of the compression is not the checkpoint's
        self._steps: dict[Ranks, jax.stages.Compiled] = {}
        self.shape = (config.batch.global_batch, config.model.sequence + 1)
        self.rows = process_rows(self.trainer.batch_sharding, self.shape)
        self.tokens_per_step = config.batch.global_batch * config.model.sequence
        self.samples = 0
        self._stop = Stop()

    @property
    def _tokenizer(self) -> pathlib.Path:
        return self.out / sample.TOKENIZER

    def _check_tokenizer(self) -> None:
        """Demands that the data's ids mean what they did where the checkpoints are from."""
        resumes = self.config.checkpoint.resume and checkpoint.finished_steps(self.out / sample.CHECKPOINTS)
        paths = (self._tokenizer, self.data.tokenizer)
        if self.data.tokenizer.exists():
            tokenizer.load(self.data.tokenizer)  # else a damaged one would show when all is trained, by the sample
        if resumes and all(path.exists() for path in paths) and not tokenizer.alike(*paths):
            raise UserError(
                f"{paths[0]}, which goes with the checkpoints there, and {paths[1]} are different tokenizers; prepare "
                f"the data with --tokenizer={paths[0]}, or name another run.out"
            )

    def _keep_tokenizer(self) -> None:
        """Copies the data's tokenizer beside the checkpoints, so that they can be sampled from anywhere."""
        source = self.data.tokenizer
        target = self._tokenizer
        if self.primary and source.exists() and source.resolve() != target.resolve():
            shutil.copyfile(source, target)

    # --- Data ---------------------------------------------------------------------------------------------------------

    def batches(self, name: str, start_sample: int = 0, part: str = "") -> Iterator[jax.Array]:
        """Global batches to train on ("train") or of one part of "validation", without end."""
        training = name == "train"
        local = self.data.training(self.rows, start_sample) if training else self.data.validating(part, self.rows)
        for rows in local:
            yield from_process_rows(self.trainer.batch_sharding, self.shape, self.rows, rows)

    def _validate(self, state: TrainState, part: str) -> float:
        some = zip(range(self.config.run.eval_batches), self.batches("validation", part=part))
        with self.progress.doing("evaluating"):  # each set by itself: their number is no reason to take one for stuck
            return float(np.mean([float(self.trainer.evaluate(state.params, batch)) for _, batch in some]))

    def validate(self, state: TrainState) -> dict[str, float]:
        """Mean loss over the first eval_batches global batches of each validation set, named as in the metrics."""
        return {metrics.validation_loss(part): self._validate(state, part) for part in self.data.validation}

    # --- State --------------------------------------------------------------------------------------------------------

    def start(self, checkpoints: checkpoint.Checkpoints) -> TrainState:
        """The state of the newest good checkpoint, or a fresh one."""
        if self.config.checkpoint.resume:
            abstract = self.trainer.abstract_canonical()
            with self.progress.doing("restoring a checkpoint"):
                restored = checkpoints.restore(abstract, sample.architecture(self.config.model), self._wanted(abstract))
            for problem in checkpoints.problems:
                self.say(problem)
            if restored is not None:
                tree, meta = restored
                step, steps = meta["step"], self.config.run.steps
                if step > steps:
                    raise UserError(
                        f"{self.out} has a checkpoint of step {step}, but run.steps is {steps}; "
                        "ask for more steps, or name another run.out"
                    )
                self.samples = meta["samples"]
                self.say(f"resumed from step {step}, {self.samples} samples consumed")
                if meta["data"] and meta["data"] != self.data.identity():
                    self.say(f"the data order is another one than before ({meta['data']})")
                if self._reset:
                    self.say(self._reset)
                compression = meta.get("compression", {})
                if compression.get("ranks") and not self._reset and self.config.compress.data != "none":
                    if compression["rule"] == self._rank_rule:
                        self.ranks = StageRanks.of(self.config, tuple(compression["ranks"]["chosen"]))
                        self.ranks.resume(compression["ranks"])
                        self.say(f"ranks over data, by stage: {', '.join(map(str, self.ranks.current))}")
                    else:
                        self.say("ranks over data start anew: what decides them is configured differently now")
                return self.trainer.from_canonical(tree)
        return self.trainer.init(self.config.run.seed)

    @property
    def _rank_rule(self) -> dict[str, Any]:
        """What decides the ranks over data."""
        names = ("data", "data_rank", "data_rank_min", "data_start", "data_adapt_every")
        names += ("residual_low", "residual_high", "stage_seconds", "reduce_seconds", "compressed_seconds")
        return {name: getattr(self.config.compress, name) for name in names}

    def _wanted(self, abstract: dict[str, Any]) -> checkpoint.Wanted:
        """All that a checkpoint has, but for a state of the compression that is not continued."""
        mine = checkpoint.kinds({"codec": abstract["codec"]})

        def wanted(meta: checkpoint.Meta, arrays: dict[str, str], where: str) -> set[str]:
            if {path.split("/")[0] for path in arrays} == {"params"}:  # an imported model
                return {"params"}
            saved = {path: kind for path, kind in arrays.items() if path.startswith("codec/")}
            self._reset = self.trainer.compression.why_reset(meta.get("compression", {}), saved, mine, where)
            return set(abstract) - {"codec"} if self._reset else set(abstract)

        return wanted

    def choose_ranks(self, state: TrainState) -> None:
        """Settles which stages compress over data, where the checkpoint has not."""
        if self.ranks is None:
            chosen = self.trainer.compression.stages
            if self.config.compress.data == "selective":
                times, source = selective.choose(self.trainer, state)
                stages = times.chosen()
                chosen = tuple(self.config.compress.data_rank if s in stages else 0 for s in range(len(chosen)))
                self.say(report.table(report.stage_times(times, stages, source)))
            self.ranks = StageRanks.of(self.config, chosen)

    def _check_profile(self, steps: range) -> None:
        """Demands that the profiled steps are of one program, whose parts the trace is sorted by."""
        changes = [n + 1 for n in steps[:-1] if self.ranks.at(n) != self.ranks.at(n + 1) or self.ranks.due(n)]
        if changes:
            raise UserError(
                f"profile={self.config.profile} goes across step {changes[0]}, from which on gradients over data may "
                "have other ranks; name steps before it, or from it on"
            )

    def step_of(self, number: int) -> jax.stages.Compiled:
        """The compiled train step of that number."""
        ranks = self.ranks.at(number)
        if ranks not in self._steps:
            with self.progress.doing("compiling"):
                self._steps[ranks] = dataclasses.replace(self.trainer, stage_ranks=ranks).compile_step()
                distributed.wait_for_all(f"step {number} is compiled")
        return self._steps[ranks]

    def save(self, checkpoints: checkpoint.Checkpoints, state: TrainState, step: int) -> None:
        meta = {
            "step": step,
            "samples": self.samples,
            "model": sample.architecture(self.config.model),
            "data": self.data.identity(),
            "config": to_dict(self.config),
            "compression": {
                "identity": self.trainer.compression.identity(),
                "link_ranks": self.trainer.compression.link_ranks(),
                "ranks": self.ranks.to_json(),
                "rule": self._rank_rule,
            },
            "jax": jax.__version__,
        }
        with self.progress.doing("saving a checkpoint"):
            checkpoints.save(step, self.trainer.canonical(state), meta)

    # --- The loop -----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if self.primary:
            print(text, flush=True)

    def train(self) -> bool:
        """Trains, reports, and leaves a checkpoint, the metrics and a figure; returns whether all steps are done."""
        home = self.out / sample.CHECKPOINTS
        # SIGTERM is caught until the last checkpoint is on disk; what fails is told before that is waited for.
        with (
            self._stop,
            checkpoint.Checkpoints(home, self.config.checkpoint) as checkpoints,
            self.progress,
        ):
            state = self.start(checkpoints)
            self._keep_tokenizer()
            first = int(state.step)
            profiler = Profiler(self.config, self.trainer.mesh, first)
            self.choose_ranks(state)
            self._check_profile(profiler.steps)
            began = time.perf_counter()
            self.step_of(first + 1)
            self.step_of(self.config.run.steps)  # with compression over data started: all that needs memory is known
            memory = max((s.memory_analysis() for s in self._steps.values()), key=lambda m: m.temp_size_in_bytes)
            described = report.describe(self.trainer, memory, time.perf_counter() - began)
            self.say(report.table(described + self.data.describe()))
            with metrics.Metrics(self.out, self.primary, resumed=first if first else None) as writer, profiler:
                untrained = self._untrained(state, writer)
                state, speed = self._loop(state, first, checkpoints, writer, profiler)
                self.progress.now("finishing")
                done = int(state.step)
                validation = self.validate(state) if done == self.config.run.steps else None
                if validation is not None:
                    self._record(writer, done, validation)
            self.save(checkpoints, state, done)
        if self.primary:
            plots.plot_losses(self.out / metrics.FILE, self.out / LOSSES)
        if validation is None:
            self.say(f"stopped by SIGTERM after step {done}; the same command continues from its checkpoint")
            return False
        self._summary(untrained, validation, speed, int(state.skipped))
        return True

    def _untrained(self, state: TrainState, writer: metrics.Metrics) -> dict[str, float]:
        """The validation losses before the first step: measured now, or read back after a resume."""
        if int(state.step) > 0:
            return self._recorded(0)
        losses = self.validate(state)
        self._record(writer, 0, losses)
        return losses

    def _recorded(self, step: int) -> dict[str, float]:
        path = self.out / metrics.FILE
        return metrics.validation_losses(metrics.read(path), step) if path.exists() else {}

    def _record(self, writer: metrics.Metrics, step: int, losses: dict[str, float]) -> None:
        """Writes what the metrics do not have yet: a run that is started again at its end adds nothing."""
        known = self._recorded(step)
        if new := {name: loss for name, loss in losses.items() if name not in known}:
            writer.write(step, new)

    def _loop(
        self,
        state: TrainState,
        first: int,
        checkpoints: checkpoint.Checkpoints,
        writer: metrics.Metrics,
        profiler: Profiler,
    ) -> tuple[TrainState, float]:
        """All steps; the figures of step n-1 are handled while step n runs. Returns the state and tokens/s."""
        c, batches = self.config, self.batches("train", self.samples)
        started, pending, last_time = time.perf_counter(), None, time.perf_counter()
        paused = 0.0
        number = first
        with metrics.Progress(c.run.steps, first, self.primary) as progress:

            def handle(n: int, values: dict[str, jax.Array]) -> None:
                nonlocal last_time
                values = jax.device_get(values)
                self.progress.finished(n)
                now = time.perf_counter()
                seconds, last_time = now - last_time, now
                speed = self.tokens_per_step / seconds
                record = {
                    "loss": values["loss"],
                    "grad_norm": values["grad_norm"],
                    "learning_rate": values["learning_rate"],
                    "skipped": not values["finite"],
                    "step_seconds": seconds,
                    "tokens_per_second": speed,
                }
                if self._peak:
                    record["mfu"] = metrics.mfu(speed, c.model, c.mesh.devices, self._peak)
                if "left_out" in values and values["finite"]:
                    self.ranks.observe(values["left_out"])
                    record |= {f"left_out_stage_{s}": x for s, x in enumerate(values["left_out"])}
                if n % c.run.log_every == 0 or not values["finite"]:
                    writer.write(n, record)
                if not values["finite"]:
                    progress.say(f"step {n}: gradients are not finite, nothing was changed")
                progress.update(n, float(values["loss"]), speed, seconds)

            profiler.resume(first)
            for number in range(first + 1, c.run.steps + 1):
                checkpoints.check()
                if number == self.ranks.start + 1 and number > 1:
                    ranks = ", ".join(map(str, self.ranks.current))
                    progress.say(f"step {number}: compression over data starts, ranks by stage {ranks}")
                with profiler.reading():
                    batch = next(batches)
                with profiler.step(number):
                    state, values = self.step_of(number)(state, batch)
                self.samples += c.batch.global_batch
                if pending:
                    handle(*pending)
                pending = (number, values)
                due = c.run.eval_every and number % c.run.eval_every == 0 and number < c.run.steps
                save = c.checkpoint.every and number % c.checkpoint.every == 0
                stop = self._stop.now()
                adapt = self.ranks.due(number)
                if due or save or stop or adapt or profiler.turns(number):
                    profiler.pause(values)
                    handle(*pending)
                    pending, began = None, time.perf_counter()
                    if number == profiler.last:
                        with self.progress.doing("reading the profile"):
                            writer.write(number, profiler.finish(self.step_of(number), progress.say))
                    if adapt and self.ranks.adapt():
                        ranks = ", ".join(map(str, self.ranks.current))
                        progress.say(f"step {number}: ranks of the stages' gradients over data are now {ranks}")
                    if due:
                        writer.write(number, self.validate(state))
                    if save:
                        self.save(checkpoints, state, number)
                    profiler.resume(number)
                    paused += time.perf_counter() - began
                    last_time = time.perf_counter()
                if stop:
                    break
            if pending:
                handle(*pending)
        return state, (number - first) * self.tokens_per_step / (time.perf_counter() - started - paused)

    @property
    def _peak(self) -> float | None:
        return self.config.run.peak_flops or metrics.peak_flops(self.trainer.mesh.devices.flat[0].device_kind)

    def _summary(self, untrained: dict[str, float], validation: dict[str, float], speed: float, skipped: int) -> None:
        rows = [
            *report.losses("validation loss", validation),
            *report.losses("untrained", untrained),
            *([("speed", f"{report.size(speed)}tokens/s")] if speed else [("steps", "all were done before")]),
            ("checkpoint", str(self.out / sample.CHECKPOINTS)),
            ("metrics", str(self.out / metrics.FILE)),
            ("loss curve", str(self.out / LOSSES)),
        ]
        if self._peak and speed:
            mfu = metrics.mfu(speed, self.config.model, self.config.mesh.devices, self._peak)
            rows.append(("MFU", f"{mfu:.1%} of {self._peak:.3g} FLOP/s per device"))
        if skipped:
            rows.append(("skipped steps", f"{skipped}, their gradients were not finite"))
        self.say(report.table(rows))
        if self.primary and self.config.run.sample_tokens and (self.out / sample.TOKENIZER).exists():
            try:
                text = sample.sample(self.out, "\n", self.config.run.sample_tokens, seed=self.config.run.seed)
            except UserError as error:  # a tokenizer may make no token of "\n"; all is trained and saved
                text = f"none, {error}"
            self.say(f"a sample:\n{text}")


def train(config: Config, chosen: plan.Plan | None, names: Sequence[str], progress: supervised.Progress) -> bool:
    """Trains with all processes, which have joined; returns whether all steps are done.

    Args:
        config: with the plan's sections, if there is one.
        chosen: the plan that says which device is where in the mesh; None: they are taken in order.
        names: the host name of every process, for a plan that names hosts.

    Raises:
        UserError: on every process, if one of them has found bad input.
    """
    training, problem = None, None
    try:
        devices = host_major(chosen.hosts, names) if chosen and chosen.hosts else None
        mesh = make_mesh(config.mesh, chosen.device_order or None if chosen else None, devices)
        training = Run(config, mesh, progress)
    except UserError as error:
        problem = error
    distributed.agree(problem)
    return training.train()


def define_flags() -> None:
    """Defines this main's flags."""
    flags.DEFINE_string("plan", None, "A plan.json that overrides mesh, pipeline, batch and compress.")
    flags.DEFINE_integer("cpu_devices", 0, "Virtual CPU devices per process; 0: what the mesh needs.", lower_bound=0)
    distributed.define_flags()
    # Unknown keys are let through: from_dict says which there are.
    config_flags.DEFINE_config_file(
        "config", "configs/tiny.py", "The configuration file.", lock_config=False, accept_new_attributes=True
    )
    # A file that could not be loaded raises when it is first used: here, while flags are parsed.
    flags.register_validator("config", lambda config: hasattr(config, "items"), "get_config() must return a ConfigDict")


def main(argv: Sequence[str]) -> None:
    """Reads the configuration, joins the other processes, trains."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; overrides are written --config.section.key=value")
    options = flags.FLAGS
    chosen = plan.load(options.plan) if options.plan else None
    config = chosen.apply(options.config) if chosen else from_dict(options.config)
    # Only the CPU backend reads this; on GPU clusters it changes nothing.
    processes = options.num_processes or distributed.expected_processes(os.environ)
    jax.config.update("jax_num_cpu_devices", options.cpu_devices or cpu_devices(config.mesh, processes))
    with supervised.Progress(os.environ) as progress:
        distributed.initialize(
            options.coordinator,
            options.num_processes,
            options.process_id,
            options.coordinator_timeout,
            supervised.heartbeat(os.environ),
        )
        train(config, chosen, distributed.host_names() if chosen and chosen.hosts else [], progress)


if __name__ == "__main__":
    run(main, define_flags)
