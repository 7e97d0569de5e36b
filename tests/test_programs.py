"""Equal programs are compiled once; with another text, other options or other devices they are not equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import programs

FAST = {"xla_backend_optimization_level": 0}


@pytest.fixture
def compiler(monkeypatch):
    """Share programs of any size, and return the list of those that were compiled."""
    compiled = []

    def compile_anew(backend, module, *arguments, real=programs.compiler.backend_compile_and_load):
        compiled.append(str(module))
        return real(backend, module, *arguments)

    monkeypatch.setattr(programs, "resident", lambda: 0)  # whatever the tests before this one have left
    shared = programs.once(compile_anew, least=0, most=3)
    monkeypatch.setattr(programs.compiler, "backend_compile_and_load", shared)
    return compiled


def run(factor: float, device: int = 0, options: dict | None = None) -> None:
    """Compile x -> sin(x) * factor as a new function, run it, and check what it gives and where."""
    x = jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[device])
    found = jax.jit(lambda x: jnp.sin(x) * factor).lower(x).compile(options)(x)
    assert found.devices() == {jax.devices()[device]}
    np.testing.assert_allclose(found, np.sin(np.arange(4)) * factor, rtol=1e-6)


def test_equal_programs_are_compiled_once(compiler):
    run(3)
    run(3)
    assert len(compiler) == 1
    run(4)
    run(3, options=FAST)
    run(3, device=1)
    assert len(compiler) == 4
    run(3, device=1)
    run(4)
    assert len(compiler) == 4
    run(3)  # three others were used since
    assert len(compiler) == 5


def test_a_process_that_holds_much_forgets_its_programs(compiler, monkeypatch):
    held = [2 << 30, 4 << 30, 2 << 30]
    monkeypatch.setattr(programs, "resident", lambda: held.pop(0))
    run(3)
    run(4)  # forgets the other one
    run(4)
    assert len(compiler) == 2
    run(3)
    assert len(compiler) == 3 and not held


def test_memory_goes_back_to_the_system():
    pieces = [bytes(1000) for _ in range(300_000)]
    full = programs.resident()
    if not full:
        pytest.skip("this system does not tell what a process holds")
    pieces.clear()
    programs.give_back()
    assert programs.resident() < full - (100 << 20)


def test_programs_that_call_the_host_are_compiled_each_time(compiler):
    for number in (1, 2):
        found = []
        jax.jit(lambda x: jax.debug.callback(found.append, x))(number)  # noqa: B023
        jax.effects_barrier()
        assert list(map(int, found)) == [number] and len(compiler) == number
