"""The metrics of a run: metrics.jsonl, TensorBoard, wandb, a progress line, and model FLOPs utilisation."""

import json
import math
import pathlib
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Self, TextIO

from absl import logging
from tqdm import tqdm

from paxtrain import files
from paxtrain.config import ModelConfig
from paxtrain.errors import UserError, library
from paxtrain.model import parameters

MetricsLine = dict[str, Any]  # a line of the metrics: its "step", and scalars by name
FILE, SET_ASIDE, WANDB_ID = "metrics.jsonl", "metrics_set_aside.jsonl", "wandb_id"
VALIDATION = "validation_loss"
_HUGE = 1e300  # above all scalars; some integers in JSON are too large for a float


def mfu(tokens_per_second: float, model: ModelConfig, devices: int, peak: float) -> float:
    """Return the model FLOPs utilisation, 0 to 1: the model's FLOP/s over the peak of all devices.

    Args:
        tokens_per_second: Speed of the whole mesh.
        model: Configuration of the model.
        devices: Number of devices of the mesh.
        peak: Peak FLOP/s of one device.
    """
    return tokens_per_second * parameters.flops_per_token(model) / (devices * peak)


def _plain(value: Any) -> Any:
    """Return a JSON value: numpy and jax scalars become Python's, and values that are not finite become None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> MetricsLine | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or abs(record["step"]) > 2**53:
        return None
    numbers = [value for value in record.values() if value is not None]
    return record if all(isinstance(value, int | float) and abs(value) < _HUGE for value in numbers) else None


def _lines(records: Iterable[MetricsLine]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def read(path: str | pathlib.Path) -> list[MetricsLine]:
    """Return the records of a metrics.jsonl in the order of its lines, without lines that a crash cut short.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read metrics from {path} ({error}); name the {FILE} of a training run") from error
    return [record for record in map(_parse, lines) if record is not None]


def validation_loss(part: str) -> str:
    """Return the name of a data set's validation loss: "validation_loss/web", or "validation_loss" without a name."""
    return f"{VALIDATION}/{part}" if part else VALIDATION


def validation_names(records: Iterable[MetricsLine]) -> list[str]:
    """Return the names of the validation losses in records, in the order of their first appearance."""
    names = (name for record in records for name in record)
    return [name for name in dict.fromkeys(names) if name.split("/")[0] == VALIDATION]


def validation_losses(records: list[MetricsLine], step: int) -> dict[str, float]:
    """Return the finite validation losses of a step, by name."""
    there = [record for record in records if record["step"] == step]
    return {n: r[n] for r in there for n in validation_names([r]) if r[n] is not None}


class _TensorBoard:
    """The writer of files for TensorBoard."""

    def __init__(self, out: pathlib.Path, last: int, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter  # the import takes a quarter of a second, and only the primary needs it

        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=last + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """The writer of a run of Weights & Biases, which goes on when the run does."""

    def __init__(self, out: pathlib.Path, last: int, config: Mapping[str, Any]) -> None:
        wandb, known = _wandb(), out / WANDB_ID
        if last < 0 or not known.exists():
            files.write(known, secrets.token_hex(8))
        try:
            self._run = wandb.init(dir=str(out), id=known.read_text(), resume="allow", config=dict(config))
        except wandb.Error as error:
            raise UserError(f"run.loggers=wandb cannot begin ({error}); WANDB_MODE=offline needs no server") from error
        # Its own count of steps cannot go back, as a run does that repeats steps after its last checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _wandb() -> ModuleType:
    return library("wandb", "run.loggers has wandb")


def check_loggers(loggers: Iterable[str]) -> None:
    """Check that loggers can begin, and let wandb ask for its key on a terminal.

    Raises:
        UserError: wandb is named, and is not installed or knows no key.
    """
    if "wandb" not in loggers:
        return
    wandb = _wandb()
    try:
        if wandb.setup().settings.mode == "online":
            wandb.login()
    except wandb.Error as error:
        raise UserError(
            f"run.loggers has wandb, which knows no key ({error}); run `wandb login`, or set WANDB_MODE=offline"
        ) from error


class Metrics:
    """The writer of scalars by step to out/metrics.jsonl and to loggers, such as TensorBoard in out/tensorboard.

    It is a context manager.
    """

    def __init__(
        self,
        out: str | pathlib.Path,
        primary: bool,
        resumed: int | None = None,
        set_aside: bool = False,
        loggers: Iterable[str] = ("tensorboard",),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files, and drop the lines of steps that this run repeats.

        Args:
            out: Folder of the run.
            primary: Whether this process writes; on other processes every method does nothing.
            resumed: Step of the checkpoint from which the run continues; None: it starts at step 0.
            set_aside: Whether these lines are of another run's future, and so are appended to metrics_set_aside.jsonl.
            loggers: Names of the loggers, as run.loggers has them.
            config: Configuration of the run, which loggers show; None: none.

        Raises:
            UserError: A logger cannot begin.
        """
        self._file: TextIO | None = None
        if not primary:
            return
        last = -1 if resumed is None else resumed
        path = pathlib.Path(out) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        records = read(path) if path.exists() else []
        kept, later = (_lines(r for r in records if (r["step"] > last) == after) for after in (False, True))
        if set_aside and later:
            aside = path.with_name(SET_ASIDE)
            files.write(aside, (aside.read_text() if aside.exists() else "") + later)
            logging.warning("metrics after step %d are not of this run's past: moved to %s", max(last, 0), aside)
        files.write(path, kept)
        self._file = path.open("a", buffering=1)
        kinds: dict[str, type[_TensorBoard] | type[_Wandb]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}
        self._loggers = [kinds[name](path.parent, last, config or {}) for name in loggers]

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line, {"step": step, **values}.

        Args:
            step: Number of the step.
            values: Scalars by name. The figures read "loss", the names of `validation_loss`, "learning_rate" and
                "skipped" (true for a step whose gradients were not finite).
        """
        if self._file is None:
            return
        plain = {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")
        scalars = {name: value for name, value in plain.items() if isinstance(value, int | float)}
        for logger in self._loggers:
            logger.write(step, scalars)

    def close(self, failed: bool = False) -> None:
        """Flush and close the files.

        Args:
            failed: Whether an error has ended the run, which wandb shows.
        """
        if self._file is not None:
            self._file.close()
            for logger in self._loggers:
                logger.close(failed)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class ProgressLine:
    """A progress bar on a terminal, or a line every few seconds in a log file.

    It is a context manager.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        primary: bool = True,
        file: TextIO | None = None,
        seconds_between_lines: float = 10.0,
    ) -> None:
        """Start the clock, and show the bar on a terminal.

        Args:
            total: Number of steps of the whole run.
            initial: Number of steps done before a resume.
            primary: Whether this process shows anything.
            file: Output; None: stderr.
            seconds_between_lines: Time between lines in a log file; the last step always has a line.
        """
        self._total = total
        self._initial = initial
        self._primary = primary
        self._file = file or sys.stderr
        self._seconds = seconds_between_lines
        self._start = time.monotonic()
        self._last_line = -math.inf
        self._bar: tqdm | None = None
        if primary and self._file.isatty():
            self._bar = tqdm(total=total, initial=initial, file=self._file, unit="step", dynamic_ncols=True)

    def update(self, step: int, losses: Mapping[str, float], tokens_per_second: float, step_seconds: float) -> None:
        """Show how far the run is.

        Args:
            step: Number of steps done.
            losses: Loss of the last step, and other such figures, by name.
            tokens_per_second: Speed of the last step.
            step_seconds: Duration of the last step.
        """
        if not self._primary:
            return
        speed = f"{tqdm.format_sizeof(tokens_per_second)} tokens/s, {step_seconds * 1e3:.4g} ms/step"
        figures = f"{', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())}, {speed}"
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last_line < self._seconds and step < self._total:
            return
        self._last_line = now
        done = max(step - self._initial, 1)
        left = tqdm.format_interval((now - self._start) / done * (self._total - step))
        self.say(f"step {step}/{self._total}: {figures}, {left} left")

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._file)
        elif self._primary:
            print(text, file=self._file, flush=True)

    def close(self) -> None:
        """Close the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
