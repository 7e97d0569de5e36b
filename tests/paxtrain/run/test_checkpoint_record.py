"""The fingerprint of an array depends on its bits and their places, and not on how it is sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paxtrain.run import checkpoint_record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32", "bool"])
def test_fingerprint_sees_bits_and_places_but_not_the_mesh(dtype):
    random = np.random.default_rng(0)
    x = (random.normal(size=(8, 6)) > 0) if dtype == "bool" else jnp.asarray(random.integers(1, 99, size=(8, 6)), dtype)
    x = np.asarray(x)
    reference = int(checkpoint_record.fingerprint(x))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    for spec in [("a", "b"), ("b", None), (("a", "b"), None)]:
        assert (
            int(checkpoint_record.fingerprint(jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))))
            == reference
        )
    negative = x.copy().view(np.uint8).reshape(8, -1)
    top = x.dtype.itemsize - 1
    # Two flipped signs (or truths) cancel in a plain sum of bits modulo 2**32.
    for row in (0, 1):
        negative[row, top] ^= 1 if dtype == "bool" else 0x80
    assert int(checkpoint_record.fingerprint(negative.view(x.dtype).reshape(8, 6))) != reference
    assert int(checkpoint_record.fingerprint(np.ascontiguousarray(x[::-1]))) != reference
