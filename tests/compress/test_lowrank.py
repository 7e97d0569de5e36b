"""The low-rank codec: its wire, its errors, and that error feedback sends them with the next message."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress import lowrank
from compress.codec import wire_bytes
from compress.codecs.recorder import Recorder
from compress.lowrank import LowRank

SHAPE, RANK, STEPS = (2, 20, 24), 6, 24
N, K = 40, 24
LIKE = {dtype: jax.ShapeDtypeStruct(SHAPE, dtype) for dtype in ("float32", "bfloat16")}
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
CONFIGURATIONS = [
    ("lazy", "float32", "float32"),
    ("lazy", "float32", "bfloat16"),
    ("lazy", "bfloat16", "bfloat16"),
    ("lazy", "bfloat16", "int8"),
    ("explicit", "float32", "float32"),
    ("explicit", "bfloat16", "bfloat16"),
    ("none", "float32", "float32"),
    ("none", "float32", "int8"),
]


def messages(dtype, steps=STEPS, seed=0):
    """Return messages like gradients of micro-batches: a common part of decaying spectrum plus a part of each."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(N, K)) * np.arange(1, K + 1.0) ** -1
    own = rng.normal(size=(steps, N, K))
    return jnp.asarray((common + 0.3 * own).reshape(steps, *SHAPE), dtype)


class Trajectory(NamedTuple):
    """Messages as given, wires, messages as the sender decodes them, residuals and states, stacked over messages."""

    given: jax.Array
    wires: tuple
    decoded: jax.Array
    residual: jax.Array
    states: tuple


@functools.partial(jax.jit, static_argnums=0)
def run(codec, given, active=True, rank=None):
    """Return the trajectory of a link."""
    dtype = given.dtype.name

    def step(state, x_active):
        wire, state = codec.encode(state, *x_active)
        return state, (wire, codec.decode(wire, LIKE[dtype]), codec.residual(state, LIKE[dtype]), state)

    active = jnp.broadcast_to(active, len(given))
    start = codec.init(SHAPE, dtype)
    _, found = jax.lax.scan(step, start if rank is None else lowrank.restrict(start, rank), (given, active))
    return Trajectory(given, *found)


@functools.cache
def trajectory(error, dtype, factors):
    codec = LowRank(RANK, error=error, factors=factors)
    return codec, run(codec, messages(dtype))


def float64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def bits(tree):
    """Return every array of a tree as bytes, for exact comparisons."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def lost(t):
    """Return the part of the given messages that neither arrived nor is left to be sent, per element."""
    return np.abs(float64(t.given).sum(0) - float64(t.decoded).sum(0) - float64(t.residual[-1])).max()


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids="-".join)
def test_trajectory(configuration):
    error, dtype, factors = configuration
    codec, t = trajectory(*configuration)
    # The receiver's program is another one.
    decode = jax.jit(lambda wire: codec.decode(wire, LIKE[dtype]))
    for i in range(STEPS):
        assert bits(decode(jax.tree.map(lambda x, i=i: np.asarray(x)[i], t.wires))) == bits(t.decoded[i])
    # The wire has the factors in their dtype and nothing else.
    assert {x.dtype.name for x in jax.tree.leaves(t.wires)} == {factors} | ({"float32"} if factors == "int8" else set())
    assert sum(x.nbytes for x in jax.tree.leaves(t.wires)) == STEPS * wire_bytes(codec, SHAPE, dtype)
    # After each message, the residual is exactly the part that did not arrive, and smaller than the message.
    before = np.concatenate([np.zeros((1, *SHAPE)), float64(t.residual[:-1])])
    message = (jnp.float32(before) + t.given.astype("float32")).astype(dtype)
    left = (message.astype("float32") - t.decoded.astype("float32")).astype(dtype)
    if error != "none":
        assert bits(left) == bits(t.residual)
    norms = np.linalg.norm(np.stack([float64(left), float64(message)]).reshape(2, STEPS, -1), axis=-1)
    assert (norms[0] < norms[1]).all()
    # In the sum over messages nothing is lost, unless errors are forgotten.
    rounding = STEPS * EPS[dtype] * np.abs(float64(message)).max()
    assert (lost(t) <= rounding) == (error != "none")
    assert error != "none" or lost(t) > 100 * rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_explicit_and_lazy_decode_alike(dtype):
    explicit, lazy = (trajectory(error, dtype, dtype)[1] for error in ("explicit", "lazy"))
    assert bits(explicit.decoded) == bits(lazy.decoded)
    assert bits(explicit.residual) == bits(lazy.residual)


def test_ranks_of_links():
    """Links of one program have different ranks; columns beyond a link's rank are zero and need not travel."""
    codec, alone = trajectory("lazy", "bfloat16", "int8")
    ranks = (0, 1, 4, RANK)
    found = jax.vmap(functools.partial(run, codec), (None, None, 0))(alone.given, True, jnp.array(ranks))
    decode = jax.jit(jax.vmap(lambda wire: codec.decode(wire, LIKE["bfloat16"])))
    errors = []
    for i, rank in enumerate(ranks):
        _, wires, decoded, residual, states = jax.tree.map(lambda x, i=i: np.asarray(x)[i], found)
        for columns in (states.q, states.first, wires.p.values, wires.w.values):
            assert not columns[..., rank:].any()
            assert columns.any(axis=-2)[..., :rank].all()
        narrow = lowrank.narrow(wires, rank)
        assert sum(x.nbytes for x in jax.tree.leaves(narrow)) == STEPS * rank * (N + K + 2 * 4)
        assert bits(decode(lowrank.widen(narrow, RANK))) == bits(decode(wires))
        assert np.isfinite(decoded).all()
        errors.append(np.linalg.norm(float64(residual[-1])))
    assert errors == sorted(errors, reverse=True)
    # The link of full rank gives what it gives in a separate program, up to the rounding of sums in another order.
    assert np.linalg.norm(float64(decoded[0]) - float64(alone.decoded[0])) < 0.01 * np.linalg.norm(float64(decoded[0]))


def sent_by_stage_2(x, target, a, b):
    """Return the gradients that stage 2 (b) of a linear model sends to stage 1 (a), for x [m, N, inputs]."""
    return jax.grad(lambda h: 0.5 * jnp.sum((h @ b - target) ** 2) / N)(x @ a)


def test_lazy_error_propagation_of_a_linear_model():
    """dW's error is sum_i (x_{i+1} - x_i)^T e_i plus a term of the last message, so it is small if inputs are alike.

    Summation by parts gives this form to dW's error, sum_i x_i^T (e_{i-1} - e_i). Without error feedback it is another.
    """
    rng = np.random.default_rng(0)
    shapes = (N, 10), (12, N, 10), (12, N, K), (10, K), (K, K)
    common, own, target, a, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def run(codec, gradients):
        start = codec.init((N, K), "float32")
        return jax.lax.scan(lambda state, g: (codec.encode(state, g)[1], None), start, gradients)[0]

    errors = {}
    for error in ("lazy", "none"):
        for spread in (0.05, 1.0):
            x = common + np.float32(spread) * own
            codec = Recorder(LowRank(4, error=error, factors="float32"), 12)
            record = run(codec, sent_by_stage_2(x, target, a, b))
            x, given, decoded, e = map(np.float64, (x, record.given, record.decoded, record.residual))
            weight_gradient = functools.partial(np.einsum, "inc,ink->ck", x)
            identity = np.einsum("inc,ink->ck", x[1:] - x[:-1], e[:-1]) - x[-1].T @ e[-1]
            off, scale = weight_gradient(decoded - given), np.linalg.norm(weight_gradient(given))
            assert (np.linalg.norm(off - identity) < 1e-6 * scale) == (error == "lazy")
            errors[error, spread] = np.linalg.norm(off) / scale
    assert errors["lazy", 0.05] < 0.4 * errors["none", 0.05]
    assert errors["lazy", 1.0] > 0.6 * errors["none", 1.0]


def test_errors_stay_bounded_over_ten_thousand_messages():
    """Error feedback bounds the loss of a link; without it, the loss grows with every message."""
    k, n = 6, 8
    common = jax.random.normal(jax.random.key(0), (n, k))

    @functools.partial(jax.jit, static_argnums=0)
    def run(codec):
        def step(carry, key):
            state, balance = carry
            x = common + jax.random.normal(key, (n, k))
            wire, state = codec.encode(state, x)
            balance = balance + x - codec.decode(wire, x)
            return (state, balance), (jnp.linalg.norm(codec.residual(state, x)), jnp.linalg.norm(balance))

        start = (codec.init((n, k), "float32"), jnp.zeros((n, k)))
        return jax.lax.scan(step, start, jax.random.split(jax.random.key(1), 10_000))[1]

    residual, balance = run(LowRank(2, factors="float32"))
    assert residual[1000:].max() < 1.5 * residual[:1000].max()
    np.testing.assert_allclose(residual, balance, rtol=1e-2)
    _, forgotten = run(LowRank(2, error="none", factors="float32"))
    assert forgotten[-1] > 50 * residual.max()


def test_implementations_agree():
    """The comparison takes a first message, because small differences grow in later ones."""
    x = messages("float32", 1)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def send(codec):
        wire, state = codec.encode(codec.init(SHAPE, "float32"), x)
        return codec.decode(wire, x), codec.residual(state, x)

    sent = [send(LowRank(RANK, factors="float32", implementation=name)) for name in ("xla", "interpret")]
    for decoded, residual in sent:
        np.testing.assert_allclose(decoded + residual, x, atol=1e-5)
        assert np.linalg.norm(decoded - sent[0][0]) < 1e-4 * np.linalg.norm(x)
    full_rank = send(LowRank(K, factors="float32"))[0]
    assert np.linalg.norm(full_rank - x) < 1e-5 * np.linalg.norm(x)


def test_bad_arguments():
    for bad in ({"error": "lasy"}, {"factors": "int4"}, {"rank": 0}):
        with pytest.raises(ValueError, match=r"unknown|at least"):
            LowRank(**{"rank": 4} | bad)
    with pytest.raises(ValueError, match="rank 25 is above the full rank of a 40 x 24 message"):
        LowRank(25).init(SHAPE, "float32")
    assert hash(LowRank(4)) == hash(LowRank(4)) != hash(LowRank(5))


def whole_matrices(function, shape, *arguments) -> int:
    """Return how many arrays of a shape the kernels of a function read and write."""

    def of(jaxpr) -> int:
        found = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                found += sum(math.prod(v.aval.shape) == math.prod(shape) for v in (*eqn.invars, *eqn.outvars))
            else:
                found += sum(of(inner.jaxpr) for inner in eqn.params.values() if hasattr(inner, "jaxpr"))
        return found

    return of(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize("error", ["none", "lazy", "explicit"])
def test_declared_passes_are_the_matrices_that_its_kernels_read_and_write(error):
    shape, codec = (128, 256), LowRank(16, error, implementation="interpret")
    x = jnp.zeros(shape, jnp.bfloat16)
    state = codec.init(shape, x.dtype)
    wire, _ = jax.eval_shape(codec.encode, state, x)
    wire = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), wire)
    encode = whole_matrices(lambda state, x: codec.encode(state, x, jnp.bool_(True)), shape, state, x)
    decode = whole_matrices(lambda wire: codec.decode(wire, x), shape, wire)
    assert (encode, decode) == codec.passes()[:2]
