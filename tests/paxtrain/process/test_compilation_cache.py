import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from paxtrain.config import from_dict
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.process import compilation_cache as process


@pytest.fixture
def cache(tmp_path):
    """Let jax keep compiled programs in a folder."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_stay_in_the_folder_that_is_asked_for(cache, tmp_path):
    """Also after a trainer on several devices has turned the cache off."""
    folder = tmp_path / "programs"

    def kept(function):
        jax.clear_caches()
        jax.jit(function)(jnp.ones(3)).block_until_ready()
        return sorted(path.name for path in folder.glob("jit__lambda*-cache"))

    process.leave_unused()
    assert kept(lambda x: jnp.sin(x) * 3) == [] and not folder.exists()
    process.use(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    first = kept(lambda x: jnp.cos(x) * 3)
    assert len(first) == 1
    assert kept(lambda x: jnp.cos(x) * 3) == first
    assert len(kept(lambda x: jnp.cos(x) * 4)) == 2
    # They are found in another folder, too.
    every, folder = kept(lambda x: jnp.cos(x) * 4), folder.rename(tmp_path / "moved")
    process.use(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    assert kept(lambda x: jnp.cos(x) * 3) == every


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
