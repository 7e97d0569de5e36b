"""Eight virtual CPU devices for every test, and a fast compiler; set before anything starts the backend."""

import gc
import os

import jax
import pytest

from paxtrain.process import setup
from tests import programs

# Most of the tests' time is compiling, and most of that is making machine code of fusions: without LLVM's optimizations
# and without the emitters of fusions it takes half, and a fifth less again if it is not cut into parts for many cores.
# Shapes and collectives stay. Processes that tests start inherit it.
_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# XLA ends the process if a device is 40 s late for a collective, which happens on a busy machine of few cores.
_FLAGS += " --xla_cpu_collective_call_terminate_timeout_seconds=240"
if jax.__version_info__ < (0, 11):  # later versions do not know the flag, and abort
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", _FLAGS)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as paxtrain does, for the tests that do not import it

jax.config.update("jax_num_cpu_devices", 8)
programs.share()
# Tracing makes millions of objects that stay, and by default each 700 of them start a collection of garbage.
gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def set_aside_what_is_left():
    """Set aside what a file's tests have left, so that later collections of garbage do not go through it again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quiet_orbax():
    """Hide orbax's messages about reads that it gives up, as mains do; pytest would fail the running test for them."""
    with setup.quiet_orbax():
        yield


@pytest.fixture
def snapshot(request):
    """Return snapshot(name, text), which compares a text with the reviewed file snapshots/NAME beside the test.

    If the environment variable UPDATE_SNAPSHOTS is set, it writes the file.
    """

    def check(name, text):
        path, lines = request.path.parent / "snapshots" / name, text.splitlines()
        if os.environ.get("UPDATE_SNAPSHOTS"):
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(lines) + "\n")
        assert path.read_text().splitlines() == lines

    return check
