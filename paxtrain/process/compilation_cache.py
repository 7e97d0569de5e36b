"""jax's cache of compiled programs on disk: where it is, and when not to use it."""

import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache


def leave_unused() -> None:
    """Compile all further programs of this process anew, although jax may have a cache of compiled programs on disk.

    XLA for CPUs runs the collectives of a program one after another, on all devices in one order. A program that it
    loads keeps this order among the collectives of one computation only: those inside of a loop run beside those around
    it, and where two meet, they take each other's values. Losses become NaN, or devices wait for each other for ever.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else jax keeps what it decided at its first program


def use(folder: pathlib.Path) -> None:
    """Keep all further programs of this process in a folder, and load those that are there.

    Programs with collectives must not be loaded on CPUs, see `leave_unused`; trainers on several devices call it.

    Args:
        folder: folder of the programs, which this machine wrote; it need not exist.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # else a program is known by its folder, too
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
