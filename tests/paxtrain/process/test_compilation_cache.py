import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from paxtrain.config import from_dict
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer


@pytest.fixture
def cache(tmp_path):
    """Let jax keep compiled programs in a folder."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_on_several_cpu_devices_leaves_the_cache_of_programs(cache, devices):
    """XLA loads such programs without the order of their collectives; those of one device have none."""

    def kept(x):
        jax.jit(lambda y: y * x)(jnp.ones(3)).block_until_ready()
        return len(list(cache.iterdir()))

    first = kept(2.0)
    assert first > 0
    config = from_dict({"mesh": {"data": devices}, "model": {"layers": 2, "hidden": 16, "heads": 2}})
    Trainer(config, make_mesh(config.mesh, devices=jax.devices()[:devices]))
    assert (kept(3.0) > first) == (devices == 1)
