"""Compiled programs that the processes of a cluster share."""

from jax._src import cache_key


def share_programs() -> None:
    """Lets all processes find a program that one of them has compiled, whatever the order of the devices.

    On GPUs jax leaves out of a program's key in the persistent cache what differs from process to process, and the
    order of the devices, both of which a loaded program is told anew. On CPUs it does not, so that eight processes
    would compile each program eight times, and again for every placement.
    """
    whole = cache_key._hash_serialized_compile_options
    cache_key._hash_accelerator_config = cache_key._hash_devices
    cache_key._hash_serialized_compile_options = lambda hashed, options, **_: whole(
        hashed, options, strip_device_assignment=True
    )
