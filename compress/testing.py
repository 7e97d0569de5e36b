"""Properties that every codec and reducer has: `check` raises if one does not hold.

    compress.testing.check(MyCodec())

The trainer relies on each of them. They are about bits, bytes and sums, not about how well a codec approximates.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from compress.codec import Codec, Pairs, State, Tree, Wire, array_bytes, check_codec, codec_name
from compress.collectives import reduce_scatter
from compress.reducer import Reducer, Scattered, Shard, mean

_Mlir: TypeAlias = Any  # a module or an operation of MLIR, for which jax has no public type

RANKS = 4  # data ranks that vmap emulates
_MESSAGES = 6
_KERNEL = (64, 96)
_EMULATED = jax.ShapeDtypeStruct((RANKS, *_KERNEL), jnp.float32)
_FEWER_PASSES = 6  # how many times fewer passes than XLA's program for CPUs a kernel may make

# Bytes that each of n ranks of a collective sends over a ring, in multiples of its operand's bytes.
_RING: dict[str, Callable[[int], float]] = {
    "stablehlo.all_reduce": lambda n: 2 * (n - 1) / n,
    "stablehlo.reduce_scatter": lambda n: (n - 1) / n,
    "stablehlo.all_to_all": lambda n: (n - 1) / n,
    "stablehlo.all_gather": lambda n: n - 1,
    "stablehlo.collective_permute": lambda n: 1,
}


def check(codec: Codec | Reducer, shape: tuple[int, ...] = (2, 32, 64), dtype: DTypeLike = "float32") -> list[str]:
    """Check the properties that the trainer needs of a codec, between stages and over data, or of a reducer.

    Args:
        codec: codec, or reducer of gradients over data, to check.
        shape: shape of a message between stages; a reducer gets kernels of [64, 96].
        dtype: dtype of a message between stages.

    Returns:
        The properties that hold. With one device the bytes of the compiled program are not among them.

    Raises:
        AssertionError: a property does not hold; the message says which, and what was seen.
    """
    if isinstance(codec, Reducer):
        return [_run(codec, name, function) for name, function in _reducer_properties(codec)]
    found = [_run(codec, name, function) for name, function in _codec_properties(codec, shape, dtype)]
    return found + check(Scattered(codec))


def _run(codec: object, name: str, function: Callable[[], bool | None]) -> str:
    """Check one property and return its name; it is marked if it could not be checked here."""
    try:
        told = function()
    except AssertionError as error:
        raise AssertionError(f"{codec_name(codec)}: {name}: {error}") from error
    return name if told is not False else f"{name} (not checked: one device)"


def _codec_properties(
    codec: Codec, shape: tuple[int, ...], dtype: DTypeLike
) -> Iterator[tuple[str, Callable[[], bool | None]]]:
    """Yield names and checks of a codec's properties; the arguments are those of `check`."""
    for name, function in {
        "state, wire and message have the right shapes": _shapes,
        "a message's declared bytes are those of the program": _wire_bytes,
        "declared passes are not far below those of the program": _passes,
        "sender and receiver decode the same bits": _same_bits,
        "a message that is not sent leaves the state alone": _inactive,
        "zeros stay finite, and a later message arrives": _zeros,
        "a message that is not finite arrives as such": _not_finite,
        "what arrives and what is left add up": _adds_up,
        "a saved state continues bit for bit": _resumes,
    }.items():
        yield name, functools.partial(function, codec, shape, dtype)


def _given(shape: tuple[int, ...], dtype: DTypeLike) -> list[jax.Array]:
    """Return the messages to send: a common part, and one of each."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=shape)
    return [jnp.asarray(common + rng.normal(size=shape), dtype) for _ in range(_MESSAGES)]


def _bits(tree: Tree) -> list[bytes]:
    """Return the bytes of all arrays of a tree."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def _sum(arrays: Sequence[jax.Array | np.ndarray]) -> np.ndarray:
    """Return the sum of arrays in float64."""
    return np.sum([np.asarray(x, np.float64) for x in arrays], axis=0)


def _shapes(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    try:
        check_codec(codec, shape, dtype)
        hash(codec)
    except (ValueError, TypeError) as error:
        raise AssertionError(str(error)) from error
    assert " at 0x" not in codec_name(codec), "its repr shows an address; make it a frozen dataclass"


def _wire_bytes(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> bool | None:
    if len(jax.devices()) < 2:
        return False
    declared = codec.wire_bytes(shape, dtype)

    def step(x: jax.Array) -> jax.Array:
        wire, _ = codec.encode(codec.init(shape, dtype), x[0])
        return codec.decode(codec.exchange(wire, _Hop(((0, 1),))), x[0])[None]

    sent, _ = _sent(step, jax.ShapeDtypeStruct((2, *shape), dtype), "pipe", 2)
    assert sent == declared, f"wire_bytes says {declared}, the program sends {sent}"
    return None


class _Hop:
    """A crossing of one link, for tests."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def send(self, wire: Wire, pairs: Pairs) -> Wire:
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, "pipe", pairs), wire)

    def receives(self, pairs: Pairs) -> jax.Array:
        return jnp.isin(lax.axis_index("pipe"), jnp.array([receiver for _, receiver in pairs]))


def _sent(function: Callable[[Tree], Tree], x: Tree, axis: str, ranks: int) -> tuple[float, float]:
    """Return the bytes that one rank sends in a function's collectives, if they run over rings, by its StableHLO.

    The first are those among all ranks and between groups of them, the second those inside groups of neighbours.
    """
    mesh = jax.make_mesh((ranks,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    spec = PartitionSpec(axis)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    module: _Mlir = jax.jit(mapped).lower(x).compiler_ir("stablehlo")
    sent = [0.0, 0.0]
    for op in _operations(module.operation):
        if op.name in _RING:
            groups = _groups(op, ranks)
            near = len(groups) > 1 and bool((np.diff(groups) == 1).all())
            sent[near] += _RING[op.name](len(groups[0])) * sum(_size(str(operand.type)) for operand in op.operands)
    return sent[0], sent[1]


def _operations(op: _Mlir) -> Iterator[_Mlir]:
    """Yield the operations in an MLIR operation."""
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _groups(op: _Mlir, ranks: int) -> list[list[int]]:
    """Return the ranks that exchange with each other in a collective; a permute is among all of them."""
    text = str(op.attributes["replica_groups"]) if "replica_groups" in op.attributes else ""
    if not text.startswith("dense"):  # jax 0.12 names the mesh's only axis instead of all ranks
        return [list(range(ranks))]
    # As in dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>.
    rows = re.findall(r"\[([\d, ]+)\]", text)
    return [list(map(int, row.split(","))) for row in rows] or [[0]]


def _size(text: str) -> float:
    """Return the bytes of a tensor type as text, such as tensor<2x3xf32>."""
    *dims, element = text.removeprefix("tensor<").removesuffix(">").split("x")
    bits = 8 if element == "i1" else int("".join(c for c in element.partition("E")[0] if c.isdigit()))
    return math.prod(map(int, dims)) * bits / 8


def _passes(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Compare with the bytes that XLA counts in the programs compiled for this device, which fuse less than kernels."""
    message = jax.ShapeDtypeStruct(shape, "float32")
    state = jax.eval_shape(lambda: codec.init(shape, "float32"))
    wire, _ = jax.eval_shape(codec.encode, state, message)
    encode = jax.jit(lambda state, x: codec.encode(state, x, True)).lower(state, message)
    decode = jax.jit(lambda wire: codec.decode(wire, message)).lower(wire)
    moved = sum((lowered.compile().cost_analysis() or {}).get("bytes accessed", 0.0) for lowered in (encode, decode))
    # By itself each of the two programs reads its argument and writes its result; in a step that is others' work.
    found = moved / array_bytes(shape, "float32") - 4
    declared = codec.passes().encode + codec.passes().decode
    assert found <= _FEWER_PASSES * declared, f"passes() says {declared:g}, the program makes {found:.3g}"


@functools.lru_cache(maxsize=8)
def _jitted_codec(codec: Codec, shape: tuple[int, ...], dtype: np.dtype) -> tuple[jax.stages.Wrapped, ...]:
    """Return (state, x, active) -> (wire, state) and wire -> x, each compiled once for all properties."""
    like = jax.ShapeDtypeStruct(shape, dtype)
    return jax.jit(codec.encode), jax.jit(lambda wire: codec.decode(wire, like))


def _coder(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.stages.Wrapped, ...]:
    """Return what `_jitted_codec` returns."""
    settled: Any = codec  # a Protocol is not known to be hashable
    return _jitted_codec(settled, shape, np.dtype(dtype))


def _same_bits(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    @jax.jit
    def sender(state: State, x: jax.Array) -> tuple[Wire, State, jax.Array]:
        wire, state = codec.encode(state, x, True)
        return wire, state, codec.decode(wire, x)

    _, receiver = _coder(codec, shape, dtype)
    state = codec.init(shape, dtype)
    for x in _given(shape, dtype):
        wire, state, decoded = sender(state, x)
        assert _bits(decoded) == _bits(receiver(wire)), "decode gives other bits beside encode than by itself"


def _inactive(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    encode, _ = _coder(codec, shape, dtype)
    state = codec.init(shape, dtype)
    for i, x in enumerate(_given(shape, dtype)):
        _, after = encode(state, x, jnp.bool_(False))
        assert _bits(after) == _bits(state), f"encode with active=False changed the state before message {i}"
        _, state = encode(state, x, jnp.bool_(True))


def _zeros(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    encode, decode = _coder(codec, shape, dtype)
    state, zero = codec.init(shape, dtype), jnp.zeros(shape, dtype)
    for x in (zero, zero, *_given(shape, dtype)[:3]):
        wire, state = encode(state, x, jnp.bool_(True))
        decoded = decode(wire)
        assert np.isfinite(np.asarray(decoded, np.float64)).all(), "a zero message arrives as one that is not finite"
    assert np.any(np.asarray(decoded)), "after zero messages every message arrives as zeros"


def _not_finite(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    encode, decode = _coder(codec, shape, dtype)
    for value in (np.nan, np.inf, -np.inf):
        x = np.array(_given(shape, dtype)[0])
        x.reshape(-1)[x.size // 3] = value
        wire, _ = encode(codec.init(shape, dtype), jnp.asarray(x), jnp.bool_(True))
        arrived = np.asarray(decode(wire), np.float64)
        assert not np.isfinite(arrived).all(), f"a message with one {value} arrives as a finite one"


def _adds_up(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    (encode, decode), state, decoded = _coder(codec, shape, dtype), codec.init(shape, dtype), []
    given, sent = _given(shape, dtype), jnp.bool_(True)
    for x in given:
        wire, state = encode(state, x, sent)
        decoded.append(decode(wire))
    left = _sum([codec.residual(state, given[0])])
    if left.any():
        _require_sum(_sum(given), _sum(decoded), left, dtype)
        return
    zero = jnp.zeros(shape, dtype)

    def brings(state: State) -> bool:
        return bool(np.any(np.asarray(decode(encode(state, zero, sent)[0]))))

    _require_nothing(brings(codec.init(shape, dtype)), brings(state))


def _require_nothing(first: bool, later: bool) -> None:
    """Require that `residual` returns the error that a codec keeps.

    Args:
        first: whether a message of zeros brings something before any other one.
        later: whether it does after messages of which `residual` says that nothing is left.
    """
    assert first or not later, "residual says that nothing is left, but a message of zeros brings what was"


def _require_sum(given: np.ndarray, arrived: np.ndarray, left: np.ndarray, dtype: DTypeLike) -> None:
    """Require that what arrives and what is left are what was given."""
    tolerance = 8 * _MESSAGES * float(jnp.finfo(dtype).eps) * np.abs(given).max()
    missing = np.abs(given - arrived - left).max()
    assert missing <= tolerance, f"given, arrived and residual differ by {missing:.2g}, more than {tolerance:.2g}"


def _resumes(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    (encode, _), given, sent = _coder(codec, shape, dtype), _given(shape, dtype), jnp.bool_(True)
    state = codec.init(shape, dtype)
    for x in given[:3]:
        _, state = encode(state, x, sent)
    saved = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), state)
    for x in given[3:]:
        (wire, state), (again, saved) = encode(state, x, sent), encode(saved, x, sent)
        assert _bits((wire, state)) == _bits((again, saved)), "a state that was saved and read again goes on otherwise"


# --- Over data --------------------------------------------------------------------------------------------------------

# (states, gradients) -> (means, states, residuals) of all emulated ranks.
_EmulatedReduction: TypeAlias = jax.stages.Compiled


def _reducer_properties(reducer: Reducer) -> Iterator[tuple[str, Callable[[], bool | None]]]:
    """Yield names and checks of a reducer's properties."""
    for name, function in {
        "declared bytes over data are those of the program": _reduced_bytes,
        "declared passes over data are not far below those of the program": _reduced_passes,
        "ranks that need the whole mean have the same bits of it": _same_means,
        "means over data and what ranks have left out add up": _means_add_up,
        "zero gradients stay finite": _zero_gradients,
        "a gradient that is not finite makes a mean that is not": _gradient_not_finite,
        "a saved state over data continues bit for bit": _reducer_resumes,
    }.items():
        yield name, functools.partial(function, reducer)


def _shards(ranks: int = RANKS) -> list[Shard]:
    """Return one shard of each kind: rows, columns, and all of the mean."""
    return [Shard("data", ranks, dim) for dim in (0, 1, -1)]


def _gradients(steps: int = _MESSAGES) -> list[jax.Array]:
    """Return the gradients of each step, [RANKS, *kernel], a part of which is the same on all ranks."""
    rng = np.random.default_rng(1)
    common = rng.normal(size=_KERNEL)
    return [jnp.asarray(common + rng.normal(size=(RANKS, *_KERNEL)), jnp.float32) for _ in range(steps)]


def _reduction(reducer: Reducer, shard: Shard) -> _EmulatedReduction:
    """Return the compiled step (states, gradients) -> (means, states, residuals) of all emulated ranks."""
    settled: Any = reducer  # a Protocol is not known to be hashable
    return _compiled(settled, shard)


@functools.lru_cache(maxsize=8)
def _compiled(reducer: Reducer, shard: Shard) -> _EmulatedReduction:
    """Return what `_reduction` returns."""

    def one(state: State, x: jax.Array) -> tuple[jax.Array, State, jax.Array]:
        means, states, _ = mean(reducer, [state], [x], [shard])
        return means[0], states[0], reducer.residual(states[0], x, shard)

    state = jax.eval_shape(lambda: _start(reducer, shard))
    return jax.jit(jax.vmap(one, axis_name="data")).lower(state, _EMULATED).compile()


def _start(reducer: Reducer, shard: Shard) -> State:
    """Return the first state of all emulated ranks."""
    state = reducer.init(_KERNEL, shard)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (RANKS, *jnp.shape(x))), state)


def _assembled(means: jax.Array, shard: Shard) -> np.ndarray:
    """Return the mean that all ranks have together, in float64."""
    parts = np.asarray(means, np.float64)
    return parts[0] if shard.dim < 0 else np.concatenate(list(parts), axis=shard.dim)


def _reduced_bytes(reducer: Reducer) -> bool | None:
    ranks = min(RANKS, len(jax.devices()))
    if ranks < 2:
        return False
    for shard in _shards(ranks):

        def step(x: jax.Array, shard: Shard = shard) -> jax.Array:
            return mean(reducer, [reducer.init(_KERNEL, shard)], [x[0]], [shard])[0][0][None]

        inside = sum(sent for _, sent in reducer.inside_traffic(_KERNEL, shard))
        declared = {"wire_bytes": reducer.wire_bytes(_KERNEL, shard), "inside_traffic": inside}
        found = _sent(step, jax.ShapeDtypeStruct((ranks, *_KERNEL), jnp.float32), "data", ranks)
        for (name, said), sent in zip(declared.items(), found, strict=True):
            assert math.isclose(sent, said, rel_tol=1e-9), (
                f"for dim={shard.dim} of {ranks} ranks {name} says {said:g}, the program sends {sent:g}"
            )
    return None


def _reduced_passes(reducer: Reducer) -> None:
    """Compare with the bytes that XLA counts in the program that emulates all ranks, beyond those of plain means."""
    shard = _shards()[0]
    plain = jax.jit(jax.vmap(lambda own: reduce_scatter(own, "data", shard.dim) / RANKS, axis_name="data"))
    moved, dense = (
        (compiled.cost_analysis() or {}).get("bytes accessed", 0.0)
        for compiled in (_reduction(reducer, shard), plain.lower(_EMULATED).compile())
    )
    found = (moved - dense) / RANKS / array_bytes(_KERNEL, "float32")
    declared = reducer.passes().encode + reducer.passes().decode
    assert found <= _FEWER_PASSES * declared, f"passes() says {declared:g}, the program makes {found:.3g}"


def _same_means(reducer: Reducer) -> None:
    shard = _shards()[-1]
    means, _, _ = _reduction(reducer, shard)(_start(reducer, shard), _gradients()[0])
    assert len(set(map(bytes, (np.asarray(x).tobytes() for x in means)))) == 1, "the ranks' means differ"


def _means_add_up(reducer: Reducer) -> None:
    for shard in _shards():
        state, means = _start(reducer, shard), []
        for x in _gradients():
            found, state, residuals = _reduction(reducer, shard)(state, x)
            means.append(_assembled(found, shard))
        left = np.asarray(residuals, np.float64)
        if left.any():
            given = _sum([np.asarray(x, np.float64).mean(0) for x in _gradients()])
            _require_sum(given, _sum(means), left.mean(0), "float32")
            continue
        run, zero = _reduction(reducer, shard), jnp.zeros(_EMULATED.shape)
        first, later = (bool(np.any(np.asarray(run(some, zero)[0]))) for some in (_start(reducer, shard), state))
        _require_nothing(first, later)


def _zero_gradients(reducer: Reducer) -> None:
    for shard in _shards():
        state = _start(reducer, shard)
        for x in (jnp.zeros(_EMULATED.shape), *_gradients(2)):
            means, state, _ = _reduction(reducer, shard)(state, x)
            assert np.isfinite(np.asarray(means)).all(), "zero gradients make a mean that is not finite"
        assert np.any(np.asarray(means)), "after zero gradients every mean is zero"


def _gradient_not_finite(reducer: Reducer) -> None:
    for shard in _shards():
        for value in (np.nan, np.inf):
            x = np.array(_gradients(1)[0])
            x[RANKS - 1, 5, 7] = value
            means, _, _ = _reduction(reducer, shard)(_start(reducer, shard), jnp.asarray(x))
            assert not np.isfinite(np.asarray(means)).all(), f"a gradient with one {value} makes a finite mean"


def _reducer_resumes(reducer: Reducer) -> None:
    for shard in _shards():
        step, state = _reduction(reducer, shard), _start(reducer, shard)
        first, *rest = _gradients(3)
        _, state, _ = step(state, first)
        saved = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), state)
        for x in rest:
            (means, state, _), (again, saved, _) = step(state, x), step(saved, x)
            assert _bits((means, state)) == _bits((again, saved)), "a state that was read again goes on otherwise"
