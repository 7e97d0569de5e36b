"""A run that cannot begin says so before jax has compiled anything."""

import jax
import pytest
from jax import monitoring

from paxtrain.errors import UserError
from tests.paxtrain.training import configuration, started
from tests.small import corpus

SETTINGS = {
    "plain": {},
    "muon": {"optimizer.name": "muon"},
    "weights in shards": {"mesh.shard": "weights"},
    "low rank": {
        "compress.backward_messages": "all",
        "compress.backward_rank": 4,
        "compress.data_rank": 4,
        "compress.data_stages": "all",
    },
    "groups": {"outer.groups": 2, "outer.every": 5, "mesh.data": 4, "batch.global_batch": 16},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def compiled():
    """Return the list to which jax adds the seconds of each program that it compiles."""
    seen: list[float] = []

    def hear(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.clear_caches()  # an equal program of another test would not be compiled
    monitoring.register_event_duration_secs_listener(hear)
    yield seen
    monitoring.unregister_event_duration_listener(hear)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_damaged_tokenizer_is_refused_before_compiling(data, tmp_path, compiled, settings):
    home = tmp_path / "data"
    home.mkdir()
    for path in (data / "data").iterdir():
        (home / path.name).write_bytes(path.read_bytes())
    (home / "tokenizer.json").write_text("null")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a valid tokenizer"):
        started(configuration(tmp_path, tmp_path / "out", **settings))
    assert not compiled
    jax.jit(lambda x: x + 1)(1.0)
    assert compiled
