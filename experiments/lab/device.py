"""Devices of a given speed: F, B and the loss are computed for real, and then take at least a given time.

Hosts that share two cores stretch each other's compute, and a quota evens that out only where compute is long beside
the scheduler's tick (docs/notes.md has a figure). A GPU leaves its host's cores alone while it computes, and so
does this device: what is left of an op's time it sleeps. Everything else, above all what crosses the links, takes the
time that it takes. A model has to be small enough that its real compute fits into that time with all hosts at once.

The op is a custom call that XLA looks up by name, so that compiled programs can be kept and loaded by other processes.
"""

import collections
import ctypes
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import State
from paxtrain.config import SAVE_MODES
from paxtrain.pipeline.program import Close, Params
from paxtrain.pipeline.stage import Stage
from planner.measure import machines

TOKENS = 128  # of a micro-batch, for which the times below are
LAYER = 8e-3  # seconds of F of a layer
HEAD = 8e-3  # of the loss and its gradient
BACKWARD = {save: 2 if save in ("residuals", "dots") else 3 for save in SAVE_MODES}  # of F; recomputation included

_INSTANT = 1e-6  # seconds of what takes none, as an op of 0 seconds is one that begins
_NAME = "paxtrain_device"
_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_began: dict[tuple[int, int], collections.deque[float]] = collections.defaultdict(collections.deque)
_busy: dict[int, float] = collections.defaultdict(float)  # when a device will have done what it was given
_lock = threading.Lock()
_slowness = 1.0  # times as long as said above; 0: as fast as the machine


def slow_down(factor: float) -> None:
    """Make ops take `times` times as long as documented above; 0: no longer than they need."""
    global _slowness
    _slowness = factor


@_SIGNATURE
def _hold(out: int, inputs: Any) -> None:
    """Copy the input; with microseconds given, first wait until the op that ends here is done.

    A device does one op after the other. XLA may run the beginning of one ahead of the end of another.
    """
    size, microseconds, device, op = ctypes.cast(inputs[1], ctypes.POINTER(ctypes.c_int32))[:4]
    ctypes.memmove(out, inputs[0], size)
    now = time.perf_counter()
    with _lock:
        began = _began[device, op]
        if not microseconds:
            began.append(now)
            return
        done = max(began.popleft(), _busy[device]) + _slowness * microseconds * 1e-6
        _busy[device] = max(done, now)
    if done > now:
        time.sleep(done - now)


def _at(x: jax.Array, seconds: float, op: int, *after: jax.Array) -> jax.Array:
    """Return x when the op has begun (0 seconds) or is done; of equal ops the first begun is done first.

    Args:
        x: any array.
        seconds: how long the op takes.
        op: number of the op.
        after: other arrays that must be there before.
    """
    axes = jax.sharding.get_abstract_mesh().axis_names  # those of `MeshConfig.device_sizes`
    words = [x.size * x.dtype.itemsize, round(seconds * 1e6), lax.axis_index(axes), op]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # Without a side effect XLA would start the clock of a loop's turns once for all of them.
    call = jax.ffi.ffi_call(_NAME, shape, has_side_effect=True, custom_call_api_version=1)
    return call(x, jnp.stack([jnp.int32(word) for word in words]), *after)


def _layers(stage: Stage) -> int:
    return sum(segment.count for segment in stage.program.segments)


def _clocked(close: Close, op: int, layer: float, layers: int, scanned: bool) -> Close:
    """Let the clock of a backward stand still while its layers' gradients are reduced.

    A layer of a scanned segment is reduced in the loop's next turn. Compressed gradients are reduced one after the
    other when the backward of all layers is done (paxtrain.pipeline.closing).

    Args:
        close: the reduction of a layer.
        op: number of the backward.
        layer: seconds of a layer.
        layers: how many there are.
        scanned: whether all are in one loop.
    """
    before: list[jax.Array] = []  # of the reduction before this one, of which XLA does not know that it comes first

    def reduce(total: Params, state: State) -> tuple[Params, State]:
        first, *rest = jax.tree.leaves(total)
        coded = bool(jax.tree.leaves(state))
        seconds = layer * layers if coded and not before else 0.0 if coded else layer
        first = _at(first, max(seconds, _INSTANT), op, *rest, *before)
        total = jax.tree.unflatten(jax.tree.structure(total), [first, *lax.optimization_barrier((rest, first))[0]])
        reduced, state = close.reduce(total, state)
        leaves, structure = jax.tree.flatten((reduced, state))
        leaves[0] = _at(leaves[0], 0.0, op, *leaves[1:])
        if coded or not scanned:
            before[:] = leaves[:1]
        return jax.tree.unflatten(structure, leaves)

    return close._replace(reduce=reduce)


def install() -> None:
    """Give this process's CPU devices this speed in all programs that are compiled from now on."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = make(ctypes.cast(_hold, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
    jax.ffi.register_ffi_target(_NAME, capsule, platform="cpu", api_version=0)
    forward, backward, head = Stage.forward, Stage.backward, Stage.head
    # Ops by number: the same in every process, as they are part of the programs that these share.

    def timed_forward(self: Stage, chunk: int, mb: Any, x: jax.Array, *rest: Any) -> Any:
        op, share = 3 * chunk, self.message.shape[0] * self.message.shape[1] / TOKENS
        y, *others = forward(self, chunk, mb, _at(x, 0.0, op), *rest)
        return _at(y, _layers(self) * LAYER * share, op), *others

    def timed_backward(
        self: Stage, chunk: int, mb: Any, residuals: Any, slot: Any, cotangents: Any, grads: Any, scratch: Any,
        close: Close | None = None, since: Any = None,
    ) -> Any:  # fmt: skip
        op, share = 3 * chunk + 1, self.message.shape[0] * self.message.shape[1] / TOKENS
        layer, layers = LAYER * BACKWARD[self.program.save] * share, _layers(self)
        if close:
            scanned = all(segment.scan for segment in self.program.segments)
            close = _clocked(close, op, layer, layers, scanned)
        cotangents = _at(cotangents[0], 0.0, op), *cotangents[1:]
        out, grads, *others = backward(self, chunk, mb, residuals, slot, cotangents, grads, scratch, close, since)
        if close:  # the layers have taken their time
            out = _at(out, _INSTANT, op, *jax.tree.leaves((grads.chunks[chunk], others[-1])))
        else:
            out = _at(out, layers * layer, op)
        return out, grads, *others

    def timed_head(self: Stage, mb: Any, y: jax.Array, *rest: Any) -> Any:
        op, share = 2, self.message.shape[0] * self.message.shape[1] / TOKENS
        loss, g, *others = head(self, mb, _at(y, 0.0, op), *rest)
        return loss, _at(g, HEAD * share, op), *others

    Stage.forward, Stage.backward, Stage.head = timed_forward, timed_backward, timed_head
    # A profile would otherwise take these ops' real compute times the processes on a core for the device's time.
    machines.crowded_cores = lambda roster: ()
