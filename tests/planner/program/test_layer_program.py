"""Programs of layers against counts by hand, which follow from the model's equations and from what its code keeps."""

import collections
import json

import jax
import pytest

from paxtrain.config import ModelConfig
from paxtrain.config.axes import layer_sizes
from paxtrain.errors import UserError
from planner.program import cache as programs
from planner.program import reading
from planner.program.layer_program import Bytes, LayerProgram, MatrixProduct

LLAMA = {"family": "llama", "heads": 16, "kv_heads": 4, "intermediate": 1536}
MODELS = {
    "gpt2": {"attention": "cudnn"},
    "narrow gpt2": {"intermediate": 1280, "attention": "xla", "dtype": "float32", "residual_dropout": 0.1},
    "gpt2 documents": {"attention": "cudnn", "separator": 7, "residual_dropout": 0.1},
    "llama": {**LLAMA, "attention": "cudnn"},
    "wide llama": {**LLAMA, "hidden": 1024, "sequence": 512, "attention": "xla", "dtype": "float32"},
    "llama documents": {**LLAMA, "attention": "xla", "separator": 7, "residual_dropout": 0.1},
}
MESHES = [(1, False), (2, False), (2, True), (4, True)]
SAVES = ("dots", "layer_inputs", "residuals")
CASES = [(name, *mesh) for name in MODELS for mesh in MESHES]


@pytest.fixture(autouse=True, scope="module")
def shared_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def forget():
    programs.layer_program.cache_clear()
    programs._programs.cache_clear()


@pytest.fixture
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "paxtrain" / "programs"
    forget()


def model(name="gpt2", **changes) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 500, "hidden": 512, "heads": 8, "sequence": 256} | MODELS[name] | changes)


def kernels(m: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """Return the sizes [in, out] of a layer's matrices on one device: of queries, keys and values, out, up, down."""
    h, part, ffn = m.hidden, m.hidden // tensor, m.ffn // tensor
    if m.family == "llama":
        return [(h, part), (h, 2 * m.key_value_heads * m.head_dim // tensor), (part, h), (h, 2 * ffn), (ffn, h)]
    return [(h, 3 * part), (part, h), (h, ffn), (ffn, h)]


def layer_program(m: ModelConfig, tensor: int, sequence: bool, save: str) -> LayerProgram:
    """Return the program of a model's layers on a tensor group."""
    return programs.layer_program(m, layer_sizes({"tensor": tensor}), sequence, save)


def products(found: tuple[MatrixProduct, ...]) -> dict:
    """Return how often each product is computed; [M, K] x [K, N] is also [N, K] x [K, M]."""
    count = collections.Counter()
    for one in found:
        m, n, k, batch = one.sizes(3)
        count[min(m, n), max(m, n), k, batch] += one.times
    return dict(count)


def product(m, n, k, batch=1, times=1):
    return MatrixProduct(m, n, k, batch, times=times)


@pytest.mark.parametrize(("name", "tensor", "sequence"), CASES)
def test_products_are_those_of_the_models_equations(name, tensor, sequence):
    m, batch = model(name), 3
    tokens, of_kernels = batch * m.sequence, kernels(m, tensor)
    found = layer_program(m, tensor, sequence, "residuals")
    assert products(found.forward.products) == products(product(tokens, o, i) for i, o in of_kernels)
    assert products(found.backward.products) == products(product(tokens, i, o) for i, o in of_kernels)
    assert products(found.weights.products) == products(product(i, o, tokens) for i, o in of_kernels)
    assert not found.weights.attention + found.weights.fused + found.weights.collectives
    # Queries that share keys and values are rows of one product, if XLA computes it.
    s, d, shared = m.sequence, m.head_dim, 1 if m.attention == "cudnn" else m.heads // m.key_value_heads
    rows, heads = shared * s, batch * m.heads // shared // tensor
    scores, contexts = product(rows, s, d, heads), product(rows, d, s, heads)
    kind, other = ("fused", "attention") if m.attention == "cudnn" else ("attention", "fused")
    assert products(getattr(found.forward, kind)) == products([scores, contexts])
    again = m.attention == "cudnn"  # flash attention's backward makes the scores again
    backward = [scores._replace(times=1 + again), contexts, product(s, d, rows, heads, times=2)]
    assert products(getattr(found.backward, kind)) == products(backward)
    assert not getattr(found.forward, other) + getattr(found.backward, other)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(("name", "tensor", "sequence"), CASES)
def test_products_that_run_again_are_those_that_the_backward_needs(name, tensor, sequence, save):
    """With inputs alone kept, what `down` makes is needed by nothing."""
    m, batch = model(name), 3
    again = [product(batch * m.sequence, o, i) for i, o in kernels(m, tensor)[:-1] if save == "layer_inputs"]
    found, plain = (layer_program(m, tensor, sequence, x) for x in (save, "residuals"))
    assert products(found.forward.products) == products(plain.forward.products)
    assert products(found.weights.products) == products(plain.weights.products)
    assert products(found.backward.products) == products([*plain.backward.products, *again])


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(("name", "tensor", "sequence"), CASES)
def test_collectives_are_two_a_pass_and_what_runs_again(name, tensor, sequence, save):
    """B gathers with sequence parallelism what neither F kept nor a product makes."""
    m = model(name)
    found = layer_program(m, tensor, sequence, save)
    whole = m.sequence * m.hidden * (2 if m.dtype == "bfloat16" else 4)
    again = save == "layer_inputs"
    if tensor == 1:
        forward = backward = {}
    elif sequence:
        gathered = 2 * (save != "residuals")
        forward = {("all-gather", whole // tensor): 2, ("reduce-scatter", whole): 2}
        backward = {("all-gather", whole // tensor): 2 + gathered, ("reduce-scatter", whole): 2 + again}
    else:
        forward, backward = {("all-reduce", whole): 2}, {("all-reduce", whole): 2 + again}
    for part, expected in ((found.forward, forward), (found.backward, backward)):
        assert all(one.axes == ("tensor",) and one.bytes.fixed == 0 for one in part.collectives)
        assert {(one.kind, one.bytes.each): one.times for one in part.collectives} == expected


def kept_by_hand(m: ModelConfig, tensor: int, sequence: bool, save: str) -> tuple[float, float]:
    """Return what F of one sequence leaves for B, and what B adds for W, in bytes.

    F leaves activations [S, H] between the split matrices, which sequence parallelism shards, and [S, H/T] inside of
    them; softmax sums or, with XLA's attention and everything saved, its [S, S] probabilities; with everything saved
    the inputs of all matrices, of which those behind a norm are always whole, the norms' statistics, and what dropout
    needs; the documents' beginnings [S] or, with flash attention and everything saved, the mask [S, S].

    B leaves the gradients of what the layer's matrices make, if they find no place among what F left.
    """
    flash, llama, drop = m.attention == "cudnn", m.family == "llama", m.residual_dropout > 0
    item, t, parts, apart = 2 if m.dtype == "bfloat16" else 4, m.sequence, tensor if sequence else 1, m.separator >= 0
    part, between, one = m.hidden / tensor, m.hidden / parts, m.sequence * (2 if m.dtype == "bfloat16" else 4)
    up = (2 if llama else 1) * m.ffn / tensor
    wide = (2 * m.hidden + 2 * m.key_value_heads * m.head_dim) / tensor + up
    sums = 4 * t * m.heads / tensor
    ends = 2 * m.hidden * sequence
    if save == "layer_inputs":
        return one * between + apart * 4 * t, 0
    if save == "dots":
        kept = one * (2 * between + wide + flash * part) + sums * flash + apart * 4 * t
        return kept, one * (2 * m.hidden * (1 + sequence) + (up if llama else m.ffn / tensor))
    kept = one * (2 * between + 2 * m.hidden + wide + m.ffn / tensor) + 4 * t * (2 if llama else 4) / parts
    kept += drop * 2 * t * (item + 1) * between
    kept += one * part + sums if flash else sums * (2 + t * (9 + item) / 4)
    kept += apart * flash * one * t
    queries = 0 if drop and tensor == 1 else part
    left = queries + 2 * m.key_value_heads * m.head_dim / tensor if llama else 3 * part
    return kept, one * (ends + left)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(("name", "tensor", "sequence"), CASES)
def test_bytes_are_those_counted_by_hand(name, tensor, sequence, save):
    m = model(name)
    found = layer_program(m, tensor, sequence, save)
    kept, left = kept_by_hand(m, tensor, sequence, save)
    table = 16 * m.sequence * m.head_dim * (m.family == "llama" and save == "residuals")  # cosines and sines
    if jax.__version__.startswith("0.10."):
        assert found.kept.each == pytest.approx(kept, rel=0.002)
        assert found.kept.fixed == pytest.approx(table, abs=32)
    else:  # which keeps less if everything is saved
        assert found.kept.each <= 1.002 * kept < 1.12 * found.kept.each
        assert found.kept.fixed <= table + 32
    if save != "layer_inputs":
        assert found.left == Bytes(0, int(left))


@pytest.mark.parametrize(
    ("name", "save", "forward", "backward"),
    [("gpt2", "residuals", 30.0, 34.3), ("gpt2", "dots", 24.0, 58.3), ("llama", "residuals", 22.4, 50.4)],
)
def test_passes_move_what_xlas_kernels_do(name, save, forward, backward):
    """Expected are the bytes of a layer's kernels without products, over those of [B, S, H], compiled for an H100."""
    sizes = {"hidden": 2048, "heads": 16, "sequence": 2048}
    sizes |= {"kv_heads": 8, "intermediate": 5632} if name == "llama" else {}
    itself = {"gpt2": "paxtrain.architectures.gpt2:GPT2", "llama": "paxtrain.architectures.llama:Llama"}[name]
    found = layer_program(model(name, module=itself, **sizes), 1, False, save)
    once = 2048 * 2048 * 2
    assert found.forward.moved.each / once == pytest.approx(forward, rel=0.05)
    assert found.moved.each / once == pytest.approx(backward, rel=0.05)
    # B and W move more if they are apart and make the same things anew.
    assert found.backward.moved.each + found.weights.moved.each >= found.moved.each
    assert not found.forward.unknown + found.backward.unknown + found.weights.unknown


def test_programs_scale_with_the_micro_batch(monkeypatch):
    """They are the same if they are read with another number of sequences."""
    first = layer_program(model("gpt2 documents"), 2, True, "residuals")
    monkeypatch.setattr(reading, "_PRIMES", (211, 223))
    found = reading.read(model("gpt2 documents", layers=1), layer_sizes({"tensor": 2}), True, "")
    assert found["residuals"] == first


def test_a_program_is_read_once_and_damaged_files_are_read_anew(private_cache, monkeypatch):
    first = layer_program(model(), 2, False, "dots")
    [path] = private_cache.iterdir()
    read, found = [], {save: layer_program(model(), 2, False, save) for save in SAVES}
    monkeypatch.setattr(reading, "read", lambda *how: read.append(how) or found)
    forget()
    assert layer_program(model(layers=7), 2, False, "dots") == first and not read
    stored = json.loads(path.read_text())
    changed = {**stored, "value": {**stored["value"], "dots": stored["value"]["residuals"]}}
    for text in ("", "{}", "[]", "5", "\x00", path.read_text()[:-9], json.dumps(changed), "[" * 10**5):
        path.write_text(text)
        forget()
        assert layer_program(model(), 2, False, "dots") == first and read.pop()
        assert json.loads(path.read_text()) == stored
    for other in (model(hidden=1024), model(attention="xla"), model(separator=7)):
        assert layer_program(other, 2, False, "dots") and read.pop()
    monkeypatch.setattr(programs, "_fingerprint", lambda: "another model")
    forget()
    assert layer_program(model(), 2, False, "dots") == first and read


def test_a_cache_that_cannot_be_written_is_none(private_cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert layer_program(model(), 1, False, "layer_inputs").kept.each == 256 * 512 * 2


@pytest.mark.parametrize(
    ("name", "tensor", "sequence", "wrong"),
    [
        ("gpt2", 3, False, "model.heads=8 and model.hidden=512 and model.key_value_heads=8 and model.ffn=2048"),
        ("llama", 8, False, "model.key_value_heads=4"),
        ("gpt2", 4, True, "model.sequence=258"),
    ],
)
def test_an_axis_that_divides_no_layer_is_refused(name, tensor, sequence, wrong):
    message = f"a tensor axis of {tensor} devices cannot split {wrong}; a divisor could"
    with pytest.raises(UserError, match=f"^{message}$"):
        layer_program(model(name, sequence=258), tensor, sequence, "dots")
