"""Programs that tests have in common, compiled once in a process, and GPUs to compile for."""

import collections
import ctypes
import gc
import pathlib
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax._src import compiler

from paxtrain.xla import aot


def gpus(kind: str = "h100", hosts: int = 1, per_host: int = 1) -> list[jax.Device]:
    """Return GPUs that are not there; without jax's CUDA plugin the test is skipped."""
    jax.devices()  # as in a process that already computes on the CPU
    try:
        return aot.devices(kind, hosts, per_host)
    except aot.Unavailable as reason:
        pytest.skip(str(reason))


def share() -> None:
    """Let jax take from memory a program that it has compiled before in this process.

    jax itself shares the programs of one function object, and every trainer has its own. The executable is the one that
    the compiler made. jax's cache on disk would load another one, whose collectives have no order (see
    `paxtrain.process.compilation_cache`).
    """
    compiler.backend_compile_and_load = once(compiler.backend_compile_and_load)


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 where Linux does not tell."""
    held = pathlib.Path("/proc/self/statm")
    return int(held.read_text().split()[1]) * resource.getpagesize() if held.exists() else 0


def give_back() -> None:
    """Give memory that nothing holds any more back to the system; glibc keeps most of a program's pieces otherwise."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def once(compile_anew: Callable, least: float = 0.1, most: int = 64, memory: int = 3 << 30) -> Callable:
    """Return a compiler that compiles a program once, as long as its text, its options and its devices are the same.

    So what a test patches is compiled anew if it changes the program, and only then.

    Args:
        compile_anew: the compiler, with the arguments of jax's.
        least: seconds of compiling from which a program is kept.
        most: number of programs to keep, the latest that were used; all of them would be gigabytes.
        memory: bytes of this process from which it forgets them all; one program of a long schedule has hundreds of MB.
    """
    kept: collections.OrderedDict[tuple, tuple[Any, Any]] = collections.OrderedDict()
    lock = threading.Lock()

    def compile_once(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        if host_callbacks:  # the text does not say which they are
            return compile_anew(backend, module, devices, options, host_callbacks)
        key = id(backend), str(module), options.SerializeAsString(), tuple(device.id for device in devices)
        with lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key][0]
        start = time.perf_counter()
        executable = compile_anew(backend, module, devices, options, host_callbacks)
        if time.perf_counter() - start >= least:
            with lock:
                if resident() > memory:
                    kept.clear()
                    give_back()
                kept[key] = executable, backend  # so that its id is no other one's
                if len(kept) > most:
                    kept.popitem(last=False)
        return executable

    return compile_once
