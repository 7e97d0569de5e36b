"""jax's private names exist in this jax, and a single module imports them, beside one of the tests."""

import ast
import pathlib

import jax

from paxtrain.process import jax_private

ROOT = pathlib.Path(__file__).parents[3]


def imports_private(source):
    """Return whether a source imports from jax._src or reads the attribute."""
    for node in ast.walk(ast.parse(source)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(module.startswith("jax._src") for module in modules):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            return True
    return False


def test_one_module_of_the_packages_imports_private_names():
    files = [path for top in ("compress", "paxtrain", "planner", "tests") for path in (ROOT / top).rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in files if imports_private(path.read_text())]
    assert found == ["paxtrain/process/jax_private.py", "tests/programs.py"]
    assert imports_private("import jax\njax._src.core") and imports_private("import jax._src.core")
    assert not imports_private("import jax\nx = '_src'")


def test_a_process_alone_has_no_coordinator():
    assert not jax.distributed.is_initialized()
    assert jax_private.coordination_client() is None
    assert jax_private.coordinator_address() is None
    assert jax_private.joined_processes() == 1


def test_open_mpi_completes_the_flags(monkeypatch):
    """Open MPI's variables give the count and the number; a coordinator from the flags is kept."""
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert jax_private.detect_launch("head:1234", None, None, 1) == ("head:1234", 4, 3)
    address, count, number = jax_private.detect_launch(None, None, None, 1)
    assert (address.split(":")[0], count, number) == ("10.96.0.1", 4, 3)
