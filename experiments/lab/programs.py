"""Compiled programs that the processes of a cluster share: one compiles, and the others load its files.

Loading a program takes a process two seconds, tracing and lowering it first four more, and eight processes share two
cores. What is loaded is the compiler's own output for the module that the trainer lowers.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from paxtrain.process import jax_private


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """Compile anew: a loaded program for CPUs cannot be written again ("Function ... not found")."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Pickler that writes devices as their places in a mesh."""

    def __init__(self, file: io.BytesIO, devices: Sequence[jax.Device]) -> None:
        super().__init__(file)
        self._places = {device.id: place for place, device in enumerate(devices)}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, self.device_types):
            return "device", self._places[obj.id]
        return super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Unpickler that reads places in a mesh as its devices, and gives them to the program."""

    def __init__(self, file: io.BytesIO, devices: Sequence[jax.Device]) -> None:
        super().__init__(file, jax.devices()[0].client, devices)
        self.devices_by_id = dict(enumerate(devices))

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "exec":
            return super().persistent_load(pid)
        options = jax_private.compile_options(list(self.devices_by_id.values()))
        return self.backend.deserialize_executable(pid[1], self.execution_devices, options)


class Programs:
    """A folder of compiled programs, for devices of one kind in any order."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        # jaxlib looks up LAPACK's functions when one is first lowered, and a loaded program would call null pointers.
        jax.jit(jnp.linalg.qr).lower(jnp.ones((1, 1)))

    def _file(self, key: str) -> pathlib.Path:
        return self._folder / f"{key}.program"

    def compile(
        self, lowered: jax.stages.Lowered, options: dict[str, Any], devices: Sequence[jax.Device]
    ) -> tuple[str, bool]:
        """Compile a program unless it is there; return its key, and whether it was there."""
        settings = (
            jax.__version__,
            importlib.metadata.version("jaxlib"),
            os.environ.get("XLA_FLAGS", ""),
            sorted(options.items()),
        )
        key = hashlib.sha256(f"{settings} {len(devices)} {lowered.as_text()}".encode()).hexdigest()
        with (self._folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
            if self._file(key).exists():
                return key, True
            with _without_persistent_cache():
                self._write(key, lowered.compile(options), devices)
        return key, False

    def _write(self, key: str, compiled: jax.stages.Compiled, devices: Sequence[jax.Device]) -> None:
        arguments, in_tree = jax.tree.flatten(compiled.args_info)
        whole = io.BytesIO()
        _Pickler(whole, devices).dump(
            (compiled._executable._unloaded_executable, arguments, in_tree, compiled.out_tree, compiled._no_kwargs)
        )
        part = self._file(key).with_suffix(".part")
        part.write_bytes(zlib.compress(whole.getvalue(), 1))
        part.rename(self._file(key))

    def load(self, key: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
        """Return a program on these devices, which are in the order of its mesh."""
        whole = io.BytesIO(zlib.decompress(self._file(key).read_bytes()))
        executable, arguments, in_tree, out_tree, no_kwargs = _Unpickler(whole, devices).load()
        return jax.stages.Compiled(
            executable.load(), [], jax.tree.unflatten(in_tree, arguments), out_tree, no_kwargs=no_kwargs
        )
