"""Checkpoints of a run: written in the background, kept as configured, and restored.

A checkpoint holds the canonical state, a nested dict of global arrays, and its record (see checkpoint_record.py).
"""

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.multihost import get_barrier_sync_fn

from compress.codec import Tree
from paxtrain import files
from paxtrain.config import CheckpointConfig
from paxtrain.process import distributed
from paxtrain.run import checkpoint_reading, checkpoint_record
from paxtrain.run.checkpoint_reading import Wanted
from paxtrain.run.checkpoint_record import Meta

_SET_ASIDE = "set_aside"
_UNFINISHED = ".orbax-checkpoint-tmp"
_WRITTEN = "async_write_complete"  # orbax's barrier before a checkpoint of several processes gets its name
# Orbax measures its limit by the wall clock, which may be set while a checkpoint is written. The watchdog
# (`paxtrain.process.progress`) notices a save that hangs.
_LIMIT = 20 * 86_400  # seconds


def ensure_writable(path: str | pathlib.Path) -> None:
    """Create a directory if it is missing, and check that files can be written there.

    Raises:
        UserError: It cannot be created or written; OSError: the disk is full.
    """
    with files.writable(path, "name a directory that can be written"):
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0")


class _Barrier:
    """The barrier of orbax's background threads on all processes, which also notices a failed save.

    Orbax reports the error of a save once, to the first caller that looks. If that is
    `CheckpointManager.check_for_errors`, orbax's thread that waits for the save sees no error, and deletes the
    checkpoints that the failed one should have replaced. If the thread is first, `check_for_errors` sees no error. The
    thread then waits, in a `finally` block, for the other processes, which wait for the failed save. So this project
    never asks orbax. The error passes through this barrier, which keeps it and ends the thread.

    Attributes:
        failure: Error of a save, or None.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        """Wait as orbax does.

        Args:
            sync: function that brings to disk what this process has written, before the checkpoint gets its name.
        """
        self.failure: BaseException | None = None
        self._sync, self._wait = sync, get_barrier_sync_fn()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        error = sys.exception()
        if error is not None:
            self.failure = error
            raise error
        if _WRITTEN in key:
            try:
                self._sync()
            except OSError as unwritten:
                self.failure = unwritten
                raise
        self._wait(key=key, timeout_ms=timeout_ms)


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which calls a function between the naming of a checkpoint and the end of those it replaces.

    It does not ask about SIGTERM, since jax counts such questions (see stopping.py).
    """

    def __init__(
        self, directory: pathlib.Path, options: ocp.CheckpointManagerOptions, named: Callable[[], None]
    ) -> None:
        self._when_named = named
        super().__init__(directory, options=options)

    def check_for_errors(self) -> None:
        """Do as orbax does; it asks on process 0 once a checkpoint has its name, and removes older ones then."""
        super().check_for_errors()
        self._when_named()

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The checkpoints of one training run.

    Checkpoints newer than the restored one are not of this run's past: they are damaged, `restore` went back to an
    older one, or it was not called. Before the first save they are moved to the subdirectory set_aside, so that they
    neither block a step number nor count among the newest. Every process of a run calls every method.

    Attributes:
        problems: Sentences about what `restore` found.
    """

    def __init__(self, directory: str | pathlib.Path, config: CheckpointConfig) -> None:
        """Name the folder; nothing is read or written yet.

        Args:
            directory: Folder of the checkpoints.
            config: Which checkpoints to keep.
        """
        self.problems: list[str] = []
        self._directory = pathlib.Path(directory).absolute()
        self._config = config
        self._restored_step = -1
        self._manager: ocp.CheckpointManager | None = None
        self._barrier = _Barrier(self._sync_unfinished)

    @property
    def writing(self) -> bool:
        """True while a checkpoint is being written in the background."""
        return self._manager is not None and self._manager.is_saving_in_progress()

    def restore(
        self, abstract: Tree, model: Meta, wanted: Wanted | None = None, step: int = 0
    ) -> tuple[Tree, Meta] | None:
        """Read the newest good checkpoint onto the mesh of `abstract`, or that of a step.

        Args:
            abstract: jax.ShapeDtypeStructs with shardings, in the structure of the state. Top-level keys of the saved
                state that are missing here are not read.
            model: Architecture, compared with meta["model"] before any array is read.
            wanted: Function that selects the top-level keys of `abstract` to read, from a checkpoint's metadata, the
                kinds of its arrays by path, and its name for messages; default: all keys.
            step: Step to go back to, unless the newest checkpoint is of a run that has done so; 0: the newest.

        Returns:
            State and metadata, or None if nothing has been saved.

        Raises:
            UserError: The checkpoint is of another model or has other arrays, or no checkpoint is good, or there is
                none of the step.
        """
        steps = checkpoint_reading.same_everywhere(self._directory)
        for path in self._directory.glob(f"*{_UNFINISHED}*"):
            unfinished = f"checkpoint {path.name.split('.')[0]} in {self._directory} was never finished and is left out"
            checkpoint_reading.report(self.problems, unfinished)
        if step:
            if checkpoint_reading.went_back(self._directory, step, steps):
                followed = f"run.resume_step={step} was followed before, so the newest checkpoint since is used"
                checkpoint_reading.report(self.problems, followed)
            else:
                steps = checkpoint_reading.only(self._directory, step, steps)
        restored = checkpoint_reading.restore(self._directory, abstract, model, steps, self.problems, wanted)
        if restored is None:
            if steps:
                raise checkpoint_reading.none_good(self._directory, steps)
            return None
        self._restored_step, state, meta = restored
        return state, meta

    def save(self, step: int, state: Tree, meta: Meta) -> None:
        """Start to write a checkpoint, and return when the state may be donated.

        The checkpoint gets its name when it is complete. A step that this run has saved or restored is not written
        again.

        Args:
            step: Number of the step.
            state: Canonical state, a nested dict of global jax.Arrays.
            meta: Metadata of JSON values; "model" is the architecture.

        Raises:
            RuntimeError: This checkpoint or an earlier one could not be written.
        """
        if self._manager is None:
            self._manager = self._open()
        if step in self._manager.all_steps():
            return
        record = checkpoint_record.make(state, meta)
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), record=ocp.args.JsonSave(record))
        with self._named():
            self._manager.save(step, args=args, force=True)

    def _sync_unfinished(self) -> None:
        """Bring the checkpoint that is being written to disk; orbax has closed its files and renames it next."""
        for path in self._directory.glob(f"*{_UNFINISHED}*"):
            files.sync_tree(path)

    def _sync_names(self) -> None:
        """Bring the names of the finished checkpoints to disk, and the little that orbax writes last."""
        if jax.process_index() == 0:
            for step in checkpoint_reading.finished_steps(self._directory)[-1:]:
                files.sync_tree(self._directory / str(step))
            files.sync_folder(self._directory)

    def _sync_named(self) -> None:
        """Bring a new name to disk; orbax passes over an error here, so `check` tells of it."""
        try:
            self._sync_names()
        except OSError as unwritten:
            self._barrier.failure = unwritten
            raise

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an error in the block into a sentence about the checkpoint."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise  # not the checkpoint's fault
        except Exception as error:  # orbax and tensorstore have many
            # Tensorstore's message has the full path several times, and then all of its settings.
            text, *_ = str(error).replace(f"{self._directory}/", "").split(" [tensorstore_spec=")
            raise RuntimeError(f"a checkpoint could not be written to {self._directory}: {text}") from error

    def check(self) -> None:
        """Raise if the last save is known to have failed, because steps that are not saved may be lost.

        Raises:
            RuntimeError: The checkpoint could not be written.
        """
        with self._named():
            if self._barrier.failure is not None:
                raise self._barrier.failure

    def wait(self) -> None:
        """Return when all saved checkpoints are on disk.

        Raises:
            RuntimeError: A checkpoint could not be written.
        """
        if self._manager is not None:
            with self._named():
                self._manager.wait_until_finished()
                self._sync_names()

    def close(self) -> None:
        """Wait for the last save, then end the background threads.

        Raises:
            RuntimeError: The last checkpoint could not be written.
        """
        if self._manager is not None:
            with self._named():
                self._manager.close()
                self._sync_names()
            self._manager = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> ocp.CheckpointManager:
        if jax.process_index() == 0:
            ensure_writable(self._directory)
            for step in checkpoint_reading.finished_steps(self._directory):
                if step > self._restored_step:
                    self._set_aside(step)
        distributed.wait_for_all("checkpoints are set aside")
        policies = ocp.checkpoint_managers
        keep: list[Any] = [policies.LatestN(self._config.keep)]
        if self._config.keep_every:
            keep.append(policies.EveryNSteps(self._config.keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                timeout_secs=_LIMIT,
                barrier_sync_fn=self._barrier,
                post_finalization_callback=self._sync_unfinished,  # which orbax calls before it gives the name
            ),
        )
        return _Manager(self._directory, options, self._sync_named)

    def _set_aside(self, step: int) -> None:
        home = self._directory / _SET_ASIDE
        home.mkdir(exist_ok=True)
        number = sum(path.name.split(".")[0] == str(step) for path in home.iterdir())
        target = home / (f"{step}.{number}" if number else str(step))
        (self._directory / str(step)).rename(target)
        logging.warning("checkpoint %d is not of this run's past: moved to %s", step, target)
