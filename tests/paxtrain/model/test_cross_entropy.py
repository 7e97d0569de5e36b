"""The head's loss by pieces of tokens, against float64, and what it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from paxtrain.model import cross_entropy

TOKENS, HIDDEN, VOCABULARY, ROWS = 20, 16, 53, 64  # the last 11 rows are padding


def arrays(dtype=jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the head's input [2, 10, H], a table and targets; logits are far apart, and padding has the largest."""
    x = jax.random.normal(jax.random.key(0), (2, TOKENS // 2, HIDDEN), dtype)
    table = 3 * jax.random.normal(jax.random.key(1), (ROWS, HIDDEN), dtype)
    table = table.at[VOCABULARY:].multiply(10)
    return x, table, jax.random.randint(jax.random.key(2), x.shape[:2], 0, VOCABULARY)


def reference(x, table, targets) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the summed loss and its gradients by x and by the table, in float64."""
    x, table, targets = np.float64(x).reshape(-1, HIDDEN), np.float64(table), np.asarray(targets).reshape(-1)
    logits = (x @ table.T)[:, :VOCABULARY]
    normalizer = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    loss = (normalizer - logits[np.arange(TOKENS), targets]).sum()
    g = np.exp(logits - normalizer[:, None]) - (np.arange(VOCABULARY) == targets[:, None])
    padded = np.pad(g, ((0, 0), (0, ROWS - VOCABULARY)))
    return loss, (padded @ table).reshape(2, -1, HIDDEN), padded.T @ x


@pytest.fixture(params=[8, 20, 2048], ids=["pieces and a rest", "one piece", "a rest"])
def piece(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "PIECE", request.param)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.usefixtures("piece")
def test_loss_and_gradients_are_those_of_float64(ranks):
    """With 8 ranks each has a part of the vocabulary, the last one only padding; the gradient of x is their sum."""
    x, table, targets = arrays()
    before = jax.random.normal(jax.random.key(3), table.shape)
    axis = "tensor" if ranks > 1 else None

    def run(x, table, targets, total):
        loss, g, total = cross_entropy.losses_and_gradients(x, table, targets, VOCABULARY, axis, 0.5, total)
        return loss, jax.lax.psum(g, axis) if axis else g, total

    if axis:
        whole, rows = PartitionSpec(), PartitionSpec(axis)
        mesh = Mesh(np.array(jax.devices()[:ranks]), (axis,))
        specs = {"in_specs": (whole, rows, whole, rows), "out_specs": (whole, whole, rows)}
        run = jax.shard_map(run, mesh=mesh, check_vma=False, **specs)
    found = jax.jit(run)(x, table, targets, before)
    loss, g, total = reference(x, table, targets)
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    np.testing.assert_allclose(found[1], 0.5 * g, atol=2e-6 * np.abs(g).max())
    np.testing.assert_allclose(found[2], before + 0.5 * total, atol=2e-6 * np.abs(total).max())
    assert np.array_equal(found[2][VOCABULARY:], before[VOCABULARY:])


@pytest.mark.usefixtures("piece")
def test_autodiff_gives_the_same():
    x, table, targets = arrays()

    @jax.jit
    def run(x, table):
        return jax.value_and_grad(
            lambda x, table: 3 * cross_entropy.cross_entropy(x, table, targets, VOCABULARY, None), (0, 1)
        )(x, table)

    loss, (g, total) = run(x, table)
    expected, *gradients = reference(x, table, targets)
    np.testing.assert_allclose(loss, 3 * expected / TOKENS, rtol=1e-6)
    for found, wanted in zip((g, total), gradients, strict=True):
        np.testing.assert_allclose(found, 3 * wanted / TOKENS, atol=1e-6 * np.abs(wanted).max())
    alone = cross_entropy.cross_entropy(x, table, targets, VOCABULARY, None)  # without a gradient
    np.testing.assert_allclose(alone, expected / TOKENS, rtol=1e-6)


def test_normalizers_read_once_are_those_read_twice():
    """The form of GPUs, in which a reduction merges pairs; some logits are padding, and one token has nothing else."""
    logits = 30 * jax.random.normal(jax.random.key(0), (6, 40))
    logits = logits.at[:, 30:].set(cross_entropy._LOWEST).at[3].set(cross_entropy._LOWEST)
    lowered = jax.jit(cross_entropy._largest_and_sum).trace(logits).lower(lowering_platforms=("cuda",))
    assert "stablehlo.reduce" in lowered.as_text() and lowered.as_text().count("stablehlo.reduce") == 1
    largest, total = cross_entropy._once(logits)
    np.testing.assert_array_equal(largest, logits.max(axis=1))
    np.testing.assert_allclose(total, jnp.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1), rtol=1e-5)


def products_and_arrays(jaxpr) -> tuple[int, set[int]]:
    """Return the matrix products of a jaxpr, each trip of its loops counted, and the sizes of its float32 arrays."""
    count, sizes = 0, {a.aval.size for e in jaxpr.eqns for a in e.outvars if a.aval.dtype == jnp.float32}
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                more, found = products_and_arrays(inner)
                count, sizes = count + more * equation.params.get("length", 1), sizes | found
    return count, sizes


def test_three_products_of_each_piece_and_never_the_logits_of_all_tokens(monkeypatch):
    arguments = (*arrays(jnp.bfloat16), VOCABULARY, None, 1.0, jnp.zeros((ROWS, HIDDEN)))

    def read(size):
        monkeypatch.setattr(cross_entropy, "PIECE", size)
        x, table, targets, *static, total = arguments
        traced = jax.make_jaxpr(lambda *a: cross_entropy.losses_and_gradients(*a[:3], *static, a[3]))
        return products_and_arrays(traced(x, table, targets, total).jaxpr)

    count, sizes = read(5)
    assert count == 3 * 4
    assert 5 * ROWS in sizes and TOKENS * ROWS not in sizes
    assert TOKENS * ROWS in read(TOKENS)[1]  # the control
