"""The record of a checkpoint: the run's metadata and, for each array, dtype, shape and a fingerprint of its bits.

Decompression does not notice every damaged byte. The fingerprint does, on any mesh.
"""

import json
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from compress.codec import Tree
from paxtrain.errors import UserError
from paxtrain.process import distributed
from paxtrain.tables import some

Meta = dict[str, Any]  # JSON values


@jax.jit
def fingerprint(x: jax.Array) -> jax.Array:
    """Return a fingerprint that depends on each bit of x and its position, and not on how x is sharded.

    It is the sum modulo 2**32 of each element's bits, mixed with its flat index by MurmurHash3's fmix32. The mixer is
    one to one, so a change of a single element always shows. Any other change goes unnoticed once in 2**32 cases.
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


def _by_path(tree: Tree) -> dict[str, jax.Array]:
    """Return the arrays by path, with names joined by slashes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def kinds(tree: Tree) -> dict[str, str]:
    """Return dtype and shape of each array by its path, as a checkpoint's record stores them."""
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in _by_path(tree).items()}


_all_fingerprints = distributed.compiled_together(
    jax.jit(lambda tree: jax.tree.map(fingerprint, tree)), "fingerprints of a checkpoint"
)


def fingerprints(tree: Tree) -> dict[str, int]:
    """Return the fingerprint of each array by its path."""
    # This is one program, and it starts once the state is computed: many small collective programs can starve the
    # threads of the CPU backend.
    sums = _by_path(_all_fingerprints(jax.block_until_ready(tree)))
    return {path: int(value) for path, value in jax.device_get(sums).items()}


def _checksum(record: Meta) -> int:
    """Return a checksum of a record, which must not include one."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def make(state: Tree, meta: Meta) -> Meta:
    """Return the record of a state.

    Args:
        state: Canonical state, a nested dict of global jax.Arrays.
        meta: Metadata, a dict of JSON values.
    """
    record: Meta = {"meta": meta, "arrays": kinds(state), "fingerprints": fingerprints(state)}
    return record | {"checksum": _checksum(record)}


def checked(record: Meta) -> Meta:
    """Return a record without its checksum.

    Raises:
        ValueError: The checksum is wrong.
    """
    rest = dict(record)
    if rest.pop("checksum") != _checksum(rest):
        raise ValueError("its metadata is damaged")
    return rest


def _differences(saved: Meta, expected: Meta) -> str:
    """Return the keys whose values differ, as a phrase; "" if none does."""
    missing = "absent"
    keys = sorted(saved.keys() | expected.keys())
    pairs = [(key, saved.get(key, missing), expected.get(key, missing)) for key in keys]
    different = [f"{key} is {there} there and {here} here" for key, there, here in pairs if there != here]
    return some(different)


def require_same(record: Meta, abstract: Tree, model: Meta, where: str) -> None:
    """Check that a checkpoint has the expected architecture and arrays; parts that are not read may differ.

    Args:
        record: Record of the checkpoint.
        abstract: Shapes of the parts of the state that are read.
        model: Expected architecture.
        where: Name of the checkpoint, for messages.

    Raises:
        UserError: The architecture or an array differs.
    """
    # The saved architecture went through JSON, which turns tuples into lists. Older versions saved more settings.
    before = {name: value for name, value in record["meta"]["model"].items() if name in model}
    different = _differences(before, json.loads(json.dumps(model)))
    if different:
        raise UserError(f"{where} is of another model: {different}; use the same model or name another directory")
    saved = {path: kind for path, kind in record["arrays"].items() if path.split("/")[0] in abstract}
    different = _differences(saved, kinds(abstract))
    if different:
        raise UserError(f"{where} holds other arrays: {different}; use the configuration that it was saved with")
