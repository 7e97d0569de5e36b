"""The seconds that small pieces of work take on every CPU, device and link of a job, between two steps.

Each is the median of some calls, compared only with what the same call took before. All programs are compiled at the
start. Links are timed in one direction at a time, at the end that receives, with a message as large as those between
stages.
"""

import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxtrain.process import distributed
from paxtrain.run.stragglers.suspects import (
    CPU,
    DEVICE,
    LINK,
    Suspect,
    SuspectSeconds,
    neighbors,
    of_this_process,
    rounds,
)

_CALLS = 5  # of which the median counts
_WORK = 0.02  # seconds of a device's work: many slices of a CPU that is shared
_HASHED = bytes(4 << 20)  # hashed in some milliseconds, without Python's lock
_LEAST_MESSAGE, _MOST_MESSAGE = 1 << 16, 1 << 24  # bytes
_PRODUCTS = 8  # in a turn of a device's work, so that launching turns does not count
_AXIS = "device"


def _of_calls(call: Callable[[], object]) -> float:
    """Return the median seconds of some calls."""
    return statistics.median(_seconds(call) for _ in range(_CALLS))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _hash() -> None:
    hashlib.blake2b(_HASHED)


class DeviceWork:
    """Matrix products on each of this process's devices at once, as many turns as take `_WORK` seconds at first."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """Compile the program, and choose the number of turns.

        Args:
            devices: Devices of this process.
        """
        self._devices = devices
        cpu = devices[0].platform == "cpu"
        width, dtype = (256, jnp.float32) if cpu else (2048, jnp.bfloat16)
        mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
        each, every = PartitionSpec(_AXIS), PartitionSpec()

        def turn(_: int, x: jax.Array) -> jax.Array:
            for _ in range(_PRODUCTS):
                x = jnp.tanh(x @ x)
            return x

        def local(x: jax.Array, turns: jax.Array) -> jax.Array:
            return lax.fori_loop(0, turns, turn, x[0])[None]

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(each, every), out_specs=each, check_vma=False)
        shape, sharding = (len(devices), width, width), NamedSharding(mesh, each)
        self._x = jax.jit(lambda: jnp.full(shape, 1 / width, dtype), out_shardings=sharding)()
        number = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, every))
        self._program = jax.jit(mapped).lower(self._x, number).compile()
        self._turns = 1
        self()
        while (seconds := min(max(self()) for _ in range(_CALLS)) * self._turns) < _WORK:
            self._turns *= min(max(int(_WORK / seconds), 2), 64)

    def __call__(self) -> list[float]:
        """Return the seconds of each device for one turn, which devices of a kind may be compared by."""
        began = time.perf_counter()
        shards = self._program(self._x, np.int32(self._turns)).addressable_shards
        waits = {shard.device: shard.data for shard in shards}
        seconds = dict.fromkeys(self._devices, 0.0)
        while waits:
            for device in [device for device, data in waits.items() if data.is_ready()]:
                seconds[device] = time.perf_counter() - began
                del waits[device]
            time.sleep(1e-4)  # leaves the core to a device that is a CPU
        return [value / self._turns for value in seconds.values()]


class LinkWork:
    """A message over each link between hosts over which neighbors in the mesh send."""

    def __init__(self, mesh: Mesh, host_of: Sequence[int], message: int) -> None:
        """Compile the programs; all processes call it.

        Args:
            mesh: Mesh of the run.
            host_of: Number of the host of each process.
            message: Bytes of a message between stages.
        """
        links = neighbors(mesh.devices, host_of)
        self._rounds = rounds(links)
        devices = list(mesh.devices.flat)
        # The links of each round that end at this process.
        me = jax.process_index()
        self._mine = [[link for link in some if devices[links[link][1]].process_index == me] for some in self._rounds]
        if not links:
            return
        flat = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
        each, every = PartitionSpec(_AXIS), PartitionSpec()
        pairs = [[links[link] for link in some] for some in self._rounds]

        def branch(some: Sequence[tuple[int, int]]) -> Callable[[jax.Array], jax.Array]:
            return lambda x: lax.ppermute(x, _AXIS, some)

        def send(x: jax.Array, number: jax.Array) -> jax.Array:
            return lax.switch(number, [branch(some) for some in pairs], x)

        def meet(x: jax.Array) -> jax.Array:
            return lax.psum(x[0, 0], _AXIS)

        size = min(max(message, _LEAST_MESSAGE), _MOST_MESSAGE) // 4
        shape, sharding = (len(devices), size), NamedSharding(flat, each)
        self._x = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)()
        number = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(flat, every))
        over = functools.partial(jax.shard_map, mesh=flat, check_vma=False)
        self._send = jax.jit(over(send, in_specs=(each, every), out_specs=each)).lower(self._x, number).compile()
        self._meet = jax.jit(over(meet, in_specs=each, out_specs=every)).lower(self._x).compile()
        distributed.wait_for_all("the probe of links is compiled")

    def __call__(self) -> SuspectSeconds:
        """Return the seconds of a message over each link that ends here. All processes call it together."""
        found: SuspectSeconds = {}
        for number, mine in enumerate(self._mine):
            send = functools.partial(self._run, number)
            seconds = []
            for _ in range(_CALLS):
                jax.block_until_ready(self._meet(self._x))
                seconds.append(_seconds(send))
            found |= {Suspect(LINK, *link): statistics.median(seconds) for link in mine}
        return found

    def _run(self, number: int) -> None:
        jax.block_until_ready(self._send(self._x, np.int32(number)))


class Probe:
    """The timed programs of this process and of its links."""

    def __init__(self, mesh: Mesh, host_of: Sequence[int], message: int) -> None:
        """Compile all programs; all processes call it.

        Args:
            mesh: Mesh of the run.
            host_of: Number of the host of each process.
            message: Bytes of a message between stages.
        """
        self._work = DeviceWork(of_this_process(mesh.devices.flat))
        self._links = LinkWork(mesh, host_of, message)

    def __call__(self) -> SuspectSeconds:
        """Return the seconds of each part that this process times. All processes call it together, between steps."""
        me = jax.process_index()
        found = self._links()  # first, which lets all processes begin with the rest at once
        calls = [self._work() for _ in range(_CALLS)]
        found |= {Suspect(DEVICE, me, i): statistics.median(seconds) for i, seconds in enumerate(zip(*calls))}
        return found | {Suspect(CPU, me): _of_calls(_hash)}
