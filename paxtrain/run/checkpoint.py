"""Checkpoints: written in the background, verified when read, restored onto any mesh.

A checkpoint holds the canonical state, a nested dict of global arrays, and a JSON record. The record has the run's
metadata and, for each array, dtype, shape and a fingerprint of its bits. Decompression does not notice every damaged
byte, while the fingerprint does, on any mesh.
"""

import contextlib
import functools
import json
import math
import pathlib
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint.multihost import get_barrier_sync_fn

from paxtrain.config import CheckpointConfig
from paxtrain.errors import UserError

Tree = Any
Meta = dict[str, Any]
# Function of a checkpoint's metadata, the kinds of its arrays by path, and its name; returns the top-level keys to
# read.
Wanted = Callable[[Meta, dict[str, str], str], set[str]]

_SET_ASIDE = "set_aside"
_VISIBLE = 90.0  # seconds until a network folder shows what another host has created; NFS caches names for 60 s
_UNFINISHED = ".orbax-checkpoint-tmp"


def ensure_writable(path: str | pathlib.Path) -> None:
    """Create a directory if it is missing, and check that files can be written there.

    Raises:
        UserError: It cannot be created or written.
    """
    try:
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise UserError(f"cannot write to {path} ({error.strerror}); name a directory that can be written") from error


@jax.jit
def fingerprint(x: jax.Array) -> jax.Array:
    """Return a fingerprint that depends on each bit of x and its position, and not on how x is sharded.

    It is the sum modulo 2**32 of each element's bits, mixed with its flat index by MurmurHash3's fmix32. The mixer is
    one to one, so that a change of a single element always shows. Any other change goes unnoticed once in 2**32 cases.
    Without the mixer two flipped signs would cancel.

    Args:
        x: Array of any shape, with bool or at most 32 bits for each element.

    Returns:
        uint32 [].
    """
    if x.dtype == jnp.bool_:
        bits = x.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[dim + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * stride
    h = bits ^ (index * np.uint32(0x9E3779B1))
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> np.uint32(16)), dtype=jnp.uint32)


def _by_path(tree: Tree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def kinds(tree: Tree) -> dict[str, str]:
    """Return dtype and shape of each array by its path, as a checkpoint's record stores them."""
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in _by_path(tree).items()}


@jax.jit
def _all_fingerprints(tree: Tree) -> Tree:
    return jax.tree.map(fingerprint, tree)


def _fingerprints(tree: Tree) -> dict[str, int]:
    # One program, and after the state is computed: many small collective programs can starve the CPU backend's threads.
    sums = _by_path(_all_fingerprints(jax.block_until_ready(tree)))
    return {path: int(value) for path, value in jax.device_get(sums).items()}


def _checksum(record: Meta) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def finished_steps(directory: pathlib.Path) -> list[int]:
    """Return the steps of the finished checkpoints in a directory, ascending; it need not exist."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def _same_everywhere(directory: pathlib.Path) -> list[int]:
    """Return the steps that process 0 sees, on every process, once they are visible here or time is up.

    Processes may see different states of a folder on a network.
    """
    steps = finished_steps(directory)
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    given = np.array((steps + [0] * count)[:count], np.int32)
    steps = [int(step) for step in multihost_utils.broadcast_one_to_all(given)]
    until = time.monotonic() + _VISIBLE
    while not set(steps) <= set(finished_steps(directory)) and time.monotonic() < until:
        time.sleep(0.5)
    return steps


def _read(directory: pathlib.Path, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
    # Orbax ends a restore at a barrier, which a process with damaged files never reaches. So each process reads as if
    # it were alone, and `_try` lets them agree.
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
    )
    with ocp.Checkpointer(handler, multiprocessing_options=options) as reader:
        return reader.restore(directory / str(step), args=ocp.args.Composite(**{item: args}))[item]


def _read_record(directory: pathlib.Path, step: int) -> Meta:
    record = _read(directory, step, "record", ocp.args.JsonRestore())
    checksum = record.pop("checksum")
    if checksum != _checksum(record):
        raise ValueError("its metadata is damaged")
    return record


def _read_state(directory: pathlib.Path, step: int, abstract: Tree) -> Tree:
    args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return _read(
        directory, step, "state", ocp.args.PyTreeRestore(item=abstract, restore_args=args, partial_restore=True)
    )


def _try(read: Callable[[], Any], joined: bool) -> tuple[Any, str]:
    """Return the result of `read` and "", or None and why it failed, here or (if joined) on another process."""
    try:
        result, reason = read(), ""
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # not the checkpoint's fault
    except Exception as error:  # damaged files make orbax and tensorstore raise nearly anything
        result, reason = None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if joined:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.array(bool(reason))))
        if failed.size and not reason:
            result, reason = None, f"process {failed[0]} cannot read it"
    return result, reason


def _differences(saved: Meta, expected: Meta) -> str:
    missing = "absent"
    keys = sorted(saved.keys() | expected.keys())
    pairs = [(key, saved.get(key, missing), expected.get(key, missing)) for key in keys]
    different = [f"{key} is {there} there and {here} here" for key, there, here in pairs if there != here]
    return ", ".join(different[:8]) + (f" and {len(different) - 8} more" if len(different) > 8 else "")


def _require_same(record: Meta, abstract: Tree, model: Meta, where: str) -> None:
    """Check that a checkpoint has the expected architecture and arrays; parts that are not read may differ.

    Raises:
        UserError: They differ.
    """
    # The saved one went through JSON, which turns tuples into lists.
    different = _differences(record["meta"]["model"], json.loads(json.dumps(model)))
    if different:
        raise UserError(f"{where} is of another model: {different}; use the same model or name another directory")
    saved = {path: kind for path, kind in record["arrays"].items() if path.split("/")[0] in abstract}
    different = _differences(saved, kinds(abstract))
    if different:
        raise UserError(f"{where} holds other arrays: {different}; use the configuration that it was saved with")


def _restore(
    directory: pathlib.Path,
    abstract: Tree,
    model: Meta,
    steps: list[int],
    problems: list[str],
    wanted: Wanted | None = None,
) -> tuple[int, Tree, Meta] | None:
    """Return step, state and metadata of the newest good checkpoint, or None.

    Args:
        directory: Folder of the checkpoints.
        abstract: Shapes and shardings of the state.
        model: Architecture, compared with the checkpoint's.
        steps: Steps to try, ascending.
        problems: List to which a sentence is appended for each damaged checkpoint.
        wanted: Function that selects the keys of `abstract` to read; None: all.
    """
    # If all arrays are on this process's devices, other processes may not be reading.
    joined = not all(leaf.sharding.is_fully_addressable for leaf in jax.tree.leaves(abstract))
    for step in reversed(steps):
        where = f"checkpoint {step} in {directory}"
        record, reason = _try(functools.partial(_read_record, directory, step), joined)
        if not reason:
            parts = set(abstract) if wanted is None else wanted(record["meta"], record["arrays"], where)
            chosen = {key: value for key, value in abstract.items() if key in parts}
            _require_same(record, chosen, model, where)
            state, reason = _try(functools.partial(_read_state, directory, step, chosen), joined)
        if not reason:
            found = _fingerprints(state)
            damaged = [path for path, value in found.items() if value != record["fingerprints"][path]]
            if not damaged:
                return step, state, record["meta"]
            reason = f"the bits of {', '.join(damaged[:4])} have changed since it was saved"
        _report(problems, f"{where} is damaged ({reason}) and not used")
    return None


def _report(problems: list[str], problem: str) -> None:
    problems.append(problem)
    logging.warning("%s", problem)


def _chosen(directory: pathlib.Path, step: int | None) -> list[int]:
    steps = finished_steps(directory)
    if not steps:
        raise UserError(f"no checkpoint in {directory}; name the checkpoint directory of a training run")
    if step is None:
        return steps
    if step not in steps:
        raise UserError(f"no checkpoint of step {step} in {directory}; there are {', '.join(map(str, steps))}")
    return [step]


def _none_good(directory: pathlib.Path, steps: list[int]) -> UserError:
    listed = ", ".join(map(str, steps))
    return UserError(
        f"no checkpoint in {directory} is good (tried {listed}; reasons above); "
        "put back a good copy, or name another directory to start anew"
    )


def read_meta(directory: str | pathlib.Path, step: int | None = None) -> Meta:
    """Return the metadata of the newest checkpoint whose record is intact, or of the one of `step`.

    Arrays are not read. A process may call this function alone.

    Raises:
        UserError: There is no checkpoint, none of that step, or none whose record is intact.
    """
    directory = pathlib.Path(directory).absolute()
    steps = _chosen(directory, step)
    for candidate in reversed(steps):
        record, reason = _try(functools.partial(_read_record, directory, candidate), joined=False)
        if not reason:
            return record["meta"]
        _report([], f"checkpoint {candidate} in {directory} is damaged ({reason}) and not used")
    raise _none_good(directory, steps)


def restore_params(
    directory: str | pathlib.Path, abstract: Tree, model: Meta, step: int | None = None
) -> tuple[Tree, Meta]:
    """Read the parameters alone, from the newest good checkpoint or the one of `step`.

    A process may call this function alone if `abstract` is on its own devices.

    Args:
        directory: Folder of the checkpoints.
        abstract: jax.ShapeDtypeStructs with shardings, in the structure of state["params"].
        model: Architecture, compared with meta["model"] before any array is read.
        step: Step of the checkpoint; None: the newest good one.

    Returns:
        Parameters and metadata.

    Raises:
        UserError: There is no good checkpoint, or it is of another model.
    """
    directory = pathlib.Path(directory).absolute()
    steps = _chosen(directory, step)
    restored = _restore(directory, {"params": abstract}, model, steps, [])
    if restored is None:
        raise _none_good(directory, steps)
    return restored[1]["params"], restored[2]


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

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._wait = get_barrier_sync_fn()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        error = sys.exception()
        if error is not None:
            self.failure = error
            raise error
        self._wait(key=key, timeout_ms=timeout_ms)


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without its question about SIGTERM, since jax counts such questions (see stopping.py)."""

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The checkpoints of one training run.

    Checkpoints newer than the restored one are not of this run's past: they are damaged, or `restore` was not called.
    Before the first save they are moved to the subdirectory set_aside, so that they neither block a step number nor
    count among the newest. Every process of a run calls every method.

    Attributes:
        problems: Sentences about what `restore` found wrong.
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
        self._barrier = _Barrier()

    def restore(self, abstract: Tree, model: Meta, wanted: Wanted | None = None) -> tuple[Tree, Meta] | None:
        """Read the newest good checkpoint onto the mesh of `abstract`.

        Args:
            abstract: jax.ShapeDtypeStructs with shardings, in the structure of the state. Top-level keys of the saved
                state that are missing here are not read.
            model: Architecture, compared with meta["model"] before any array is read.
            wanted: Function that selects the top-level keys of `abstract` to read, from a checkpoint's metadata, the
                kinds of its arrays by path, and its name for messages; default: all keys.

        Returns:
            State and metadata, or None if nothing has been saved.

        Raises:
            UserError: The checkpoint is of another model or has other arrays, or no checkpoint is good.
        """
        steps = _same_everywhere(self._directory)
        for path in self._directory.glob(f"*{_UNFINISHED}*"):
            step = path.name.split(".")[0]
            _report(self.problems, f"checkpoint {step} in {self._directory} was never finished and is left out")
        restored = _restore(self._directory, abstract, model, steps, self.problems, wanted)
        if restored is None:
            if steps:
                raise _none_good(self._directory, steps)
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
        record: Meta = {"meta": meta, "arrays": kinds(state), "fingerprints": _fingerprints(state)}
        record["checksum"] = _checksum(record)
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), record=ocp.args.JsonSave(record))
        with self._named():
            self._manager.save(step, args=args, force=True)

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

    def close(self) -> None:
        """Wait for the last save, then end the background threads.

        Raises:
            RuntimeError: The last checkpoint could not be written.
        """
        if self._manager is not None:
            with self._named():
                self._manager.close()
            self._manager = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> ocp.CheckpointManager:
        if jax.process_index() == 0:
            ensure_writable(self._directory)
            for step in finished_steps(self._directory):
                if step > self._restored_step:
                    self._set_aside(step)
        multihost_utils.sync_global_devices("paxtrain.run.checkpoint: set aside")
        policies = ocp.checkpoint_managers
        keep: list[Any] = [policies.LatestN(self._config.keep)]
        if self._config.keep_every:
            keep.append(policies.EveryNSteps(self._config.keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(barrier_sync_fn=self._barrier),
        )
        return _Manager(self._directory, options=options)

    def _set_aside(self, step: int) -> None:
        home = self._directory / _SET_ASIDE
        home.mkdir(exist_ok=True)
        number = sum(path.name.split(".")[0] == str(step) for path in home.iterdir())
        target = home / (f"{step}.{number}" if number else str(step))
        (self._directory / str(step)).rename(target)
        logging.warning("checkpoint %d is not of this run's past: moved to %s", step, target)
