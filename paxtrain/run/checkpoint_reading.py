"""The reader of checkpoints: it restores the newest good one, verified against its record, onto any mesh."""

import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from compress.codec import Tree
from paxtrain.errors import UserError, whole
from paxtrain.process import distributed
from paxtrain.run import checkpoint_record
from paxtrain.run.checkpoint_record import Meta

# Function that returns the top-level keys to read, given a checkpoint's metadata, the kinds of its arrays by path, and
# its name.
Wanted = Callable[[Meta, dict[str, str], str], set[str]]

_VISIBLE = 90.0  # seconds until a network folder shows what another host has created; NFS caches names for 60 s


def finished_steps(directory: pathlib.Path) -> list[int]:
    """Return the steps of the finished checkpoints in a directory, ascending; it need not exist.

    Raises:
        UserError: There is a file of that name, or the folder cannot be read.
    """
    try:
        if directory.is_file():
            raise UserError(f"{directory} is a file; move it away, or name another run.out")
        if not directory.is_dir():
            return []
        return sorted(int(path.name) for path in directory.iterdir() if whole(path.name) is not None)
    except OSError as error:  # a name that is too long, too
        raise UserError(f"cannot read {directory} ({error.strerror}); name another run.out") from error


def same_everywhere(directory: pathlib.Path) -> list[int]:
    """Return the steps that process 0 sees, once they are visible on this process or 90 seconds have passed.

    Every process gets the same steps, although processes may see different states of a folder on a network.
    """
    steps = finished_steps(directory)
    if jax.process_count() == 1:
        return steps
    steps = json.loads(distributed.gather_texts(json.dumps(steps))[0])
    until = time.monotonic() + _VISIBLE
    while not set(steps) <= set(finished_steps(directory)) and time.monotonic() < until:
        time.sleep(0.5)
    return steps


def _read(directory: pathlib.Path, step: int, item: str, args: ocp.args.CheckpointArgs) -> Tree:
    """Return the "record" or the "state" of a checkpoint."""
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
    return checkpoint_record.checked(_read(directory, step, "record", ocp.args.JsonRestore()))


def _read_state(directory: pathlib.Path, step: int, abstract: Tree) -> Tree:
    args = ocp.checkpoint_utils.construct_restore_args(abstract)
    return _read(
        directory, step, "state", ocp.args.PyTreeRestore(item=abstract, restore_args=args, partial_restore=True)
    )


def _try(read: Callable[[], Tree], joined: bool) -> tuple[Tree, str]:
    """Return the result of `read` and "", or None and why it failed here or (if joined) on another process."""
    try:
        result, reason = read(), ""
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # not the checkpoint's fault
    except Exception as error:  # damaged files make orbax and tensorstore raise nearly anything
        result, reason = None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if joined:
        failed = np.flatnonzero(distributed.allgather(np.array(bool(reason))))
        if failed.size and not reason:
            result, reason = None, f"process {failed[0]} cannot read it"
    return result, reason


def restore(
    directory: pathlib.Path,
    abstract: Tree,
    model: Meta,
    steps: list[int],
    problems: list[str],
    wanted: Wanted | None = None,
) -> tuple[int, Tree, Meta] | None:
    """Return step, state and metadata of the newest good checkpoint, or None if no checkpoint is good.

    Args:
        directory: Folder of the checkpoints.
        abstract: Shapes and shardings of the state.
        model: Architecture, compared with the checkpoint's.
        steps: Steps to try, ascending.
        problems: List of sentences; the function appends one for each damaged checkpoint.
        wanted: Function that selects the keys of `abstract` to read; None: all.

    Raises:
        UserError: A checkpoint belongs to another model or has other arrays.
    """
    # If all arrays are on this process's devices, other processes may not be reading.
    joined = not all(leaf.sharding.is_fully_addressable for leaf in jax.tree.leaves(abstract))
    for step in reversed(steps):
        where = f"checkpoint {step} in {directory}"
        record, reason = _try(functools.partial(_read_record, directory, step), joined)
        if not reason:
            parts = set(abstract) if wanted is None else wanted(record["meta"], record["arrays"], where)
            chosen = {key: value for key, value in abstract.items() if key in parts}
            checkpoint_record.require_same(record, chosen, model, where)
            state, reason = _try(functools.partial(_read_state, directory, step, chosen), joined)
        if not reason:
            found = checkpoint_record.fingerprints(state)
            damaged = [path for path, value in found.items() if value != record["fingerprints"][path]]
            if not damaged:
                return step, state, record["meta"]
            reason = f"the bits of {', '.join(damaged[:4])} have changed since it was saved"
        report(problems, f"{where} is damaged ({reason}) and not used")
    return None


def report(problems: list[str], problem: str) -> None:
    """Append a sentence to those about damaged or unfinished checkpoints, and log it."""
    problems.append(problem)
    logging.warning("%s", problem)


def only(directory: pathlib.Path, step: int, steps: list[int]) -> list[int]:
    """Return the steps to try if one is asked for: that one alone.

    Args:
        directory: Folder of the checkpoints.
        step: Step that is asked for.
        steps: Steps of its checkpoints.

    Raises:
        UserError: It is not one of `steps`.
    """
    if step not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
        raise UserError(f"no checkpoint of step {step} in {directory}; {there}")
    return [step]


def went_back(directory: pathlib.Path, step: int, steps: list[int]) -> bool:
    """Return whether the newest checkpoint was made by a run with run.resume_step=`step`; process 0 decides.

    Args:
        directory: Folder of the checkpoints.
        step: Step that is asked for.
        steps: Steps of its checkpoints.
    """
    found = False
    if steps and jax.process_index() == 0:
        with contextlib.suppress(UserError):  # no record is intact, so the one of the step is not either
            found = read_meta(directory).get("config", {}).get("run", {}).get("resume_step") == step
    return json.loads(distributed.gather_texts(json.dumps(found))[0])


def _chosen(directory: pathlib.Path, step: int | None) -> list[int]:
    """Return the finished steps to try, ascending: the given one, or all."""
    steps = finished_steps(directory)
    if not steps:
        raise UserError(f"no checkpoint in {directory}; name the checkpoint directory of a training run")
    return steps if step is None else only(directory, step, steps)


def none_good(directory: pathlib.Path, steps: list[int]) -> UserError:
    """Return the error of a directory in which no checkpoint is good.

    Args:
        directory: Folder of the checkpoints.
        steps: Steps that were tried.
    """
    listed = ", ".join(map(str, steps))
    return UserError(
        f"no checkpoint in {directory} is good (tried {listed}; reasons above); "
        "put back a good copy, or name another directory to start anew"
    )


def read_meta(directory: str | pathlib.Path, step: int | None = None) -> Meta:
    """Return the metadata of the checkpoint of `step`, or of the newest one whose record is intact.

    The function reads no arrays. A process may call it alone.

    Args:
        directory: Folder of the checkpoints.
        step: Step of the checkpoint; None: the newest one whose record is intact.

    Raises:
        UserError: There is no checkpoint, none of that step, or none whose record is intact.
    """
    directory = pathlib.Path(directory).absolute()
    steps = _chosen(directory, step)
    for candidate in reversed(steps):
        record, reason = _try(functools.partial(_read_record, directory, candidate), joined=False)
        if not reason:
            return record["meta"]
        report([], f"checkpoint {candidate} in {directory} is damaged ({reason}) and not used")
    raise none_good(directory, steps)


def restore_params(
    directory: str | pathlib.Path, abstract: Tree, model: Meta, step: int | None = None
) -> tuple[Tree, Meta]:
    """Return parameters and metadata of the checkpoint of `step`, or of the newest good one.

    Nothing else of the state is read. A process may call the function alone if `abstract` is on its own devices.

    Args:
        directory: Folder of the checkpoints.
        abstract: jax.ShapeDtypeStructs with shardings, in the structure of state["params"].
        model: Architecture, compared with meta["model"] before any array is read.
        step: Step of the checkpoint; None: the newest good one.

    Raises:
        UserError: There is no good checkpoint, or it belongs to another model.
    """
    directory = pathlib.Path(directory).absolute()
    steps = _chosen(directory, step)
    restored = restore(directory, {"params": abstract}, model, steps, [])
    if restored is None:
        raise none_good(directory, steps)
    return restored[1]["params"], restored[2]
