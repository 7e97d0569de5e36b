"""The measurements of a study besides losses: bytes on the wire, errors of messages, spectra of gradients."""

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from compress.codecs.recorder import Record
from paxtrain.config import MeshConfig, ModelConfig
from paxtrain.config.axes import AXES, DATA, PIPE
from paxtrain.model import transformer
from paxtrain.parallel.layout import Params
from paxtrain.parallel.step import Trainer
from paxtrain.study.programs import at_ranks
from paxtrain.xla import traced
from paxtrain.xla.traced import TracedCollective

CsvRow = dict[str, Any]  # a row of a CSV file: numbers and names by column
BYTES = ("forward", "backward", "embedding", "all-reduce", "reduce-scatter", "all-gather")

# Bytes that each of n ranks of a collective sends over a ring, in multiples of its operand's bytes.
_RING = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-gather": lambda n: n - 1,
}


# --- Bytes on the wire ------------------------------------------------------------------------------------------------


# A partition's number is (data * stages + stage) * tensor + its rank in the tensor group.


def runs(trainer: Trainer, stage: int, op_name: str) -> bool:
    """Return whether a stage runs a collective of a loop that some stages skip.

    Args:
        trainer: trainer whose stages all have factors of the same rank.
        stage: number of the stage.
        op_name: named scopes of the collective, joined by slashes.
    """
    scopes = op_name.split("/")
    # The stages between skip the embedding's in a loop within its scope, except over gloo (weights.on_edges).
    skips = "embedding" in scopes and "while" in scopes[scopes.index("embedding") :]
    if skips and stage not in (0, trainer.config.mesh.pipe - 1):
        return False
    if "reduce_gradients" in scopes:
        # The stages that end the step reduce in its last row, the others behind the rows, in a loop that the first ones
        # skip (paxtrain.pipeline.executor). All run what is in neither: the gather of a tied table after its last sum.
        in_last_row = any(scope.startswith("rows_") for scope in scopes)
        behind = not in_last_row and "while" in scopes[: scopes.index("reduce_gradients")]
        return not (in_last_row or behind) or in_last_row == (stage in trainer.schedule.closing)
    return True


def asked(trainer: Trainer) -> list[TracedCollective]:
    """Return the collectives of a step, from its trace; nothing is compiled."""
    step = trainer.step.trace(trainer.abstract_state(), trainer.abstract_batch())
    return traced.collectives(step.jaxpr, trainer.platform)


def _sent_by_one(ops: list[TracedCollective], mesh: MeshConfig) -> collections.Counter[str]:
    """Return the bytes that one device sends in collectives by kind, without permutes and those of tensor groups."""
    sent: collections.Counter[str] = collections.Counter()
    for op in ops:
        # On CPUs a reduce-scatter is an all-to-all with sums behind it (compress.collectives.reduce_scatter).
        kind = "reduce-scatter" if op.kind == "all-to-all" else op.kind
        if kind in _RING and len({number // mesh.tensor for number in op.groups[0]}) > 1:
            sent[kind] += _RING[kind](len(op.groups[0])) * op.bytes * op.executions
    return sent


def _sent_by_permutes(ops: list[TracedCollective], mesh: MeshConfig) -> collections.Counter[str]:
    """Return the bytes that all devices send to other stages: "forward", "backward" or "embedding"."""
    sent: collections.Counter[str] = collections.Counter()

    def stage(number: int) -> int:
        return number // mesh.tensor % mesh.pipe

    for op in (op for op in ops if op.pairs):
        steps = {(stage(source), stage(target)) for source, target in op.pairs}
        # Only the swap of the tied embedding goes both ways at once.
        if steps == {(0, mesh.pipe - 1), (mesh.pipe - 1, 0)}:
            kind = "embedding"
        else:
            kind = "forward" if all(target == source + 1 for source, target in steps) else "backward"
        sent[kind] += op.bytes * op.executions * len(op.pairs)
    return sent


def alike(trainer: Trainer) -> dict[int, Trainer]:
    """Return a trainer for each rank over data that a stage has, whose stages all have it.

    In a program with different ranks the trace does not tell which stage takes which branch. So the bytes that a stage
    sends over data are read from the program whose stages are all like it.
    """
    return {rank: at_ranks(trainer, (rank,) * trainer.config.mesh.pipe) for rank in sorted(set(trainer.ranks))}


def wire_bytes(trainer: Trainer, by_rank: dict[int, list[TracedCollective]] | None = None) -> dict[str, int]:
    """Return the bytes that all devices together put on the links in a step, by the kinds BYTES, from its trace.

    Bytes within tensor groups, which are inside hosts, do not count; those inside groups of data ranks
    (compress.data.inside) do. Collectives are assumed to run over rings.

    Args:
        trainer: trainer on the real mesh, without virtual stages.
        by_rank: what the trainers `alike` have `asked` for; None: they are traced here.
    """
    mesh = trainer.config.mesh
    by_rank = by_rank or {rank: asked(one) for rank, one in alike(trainer).items()}
    total: collections.Counter[str] = collections.Counter()
    for stage, rank in enumerate(trainer.ranks):
        ops = [op for op in by_rank[rank] if op.certain or runs(trainer, stage, op.op_name)]
        for kind, sent in _sent_by_one(ops, mesh).items():
            total[kind] += round(sent * mesh.data * mesh.tensor)
    return {kind: total[kind] for kind in BYTES} | dict(_sent_by_permutes(by_rank[max(by_rank)], mesh))


# --- Messages between the stages --------------------------------------------------------------------------------------


class Messages(NamedTuple):
    """Messages of one sender in one step, in the order of their micro-batches.

    Attributes:
        micro_batches: micro-batch of each message.
        given: messages as the sender had them, float64 [n, ...].
        decoded: messages as they arrived, float64 [n, ...].
        error: error that each message left to the next one or, without error feedback, lost; float64 [n, ...].
    """

    micro_batches: list[int]
    given: np.ndarray
    decoded: np.ndarray
    error: np.ndarray


def messages(trainer: Trainer, codec: Any, direction: str, data: int, stage: int) -> Messages:
    """Return the messages that a stage of a data rank sent in the last step.

    Args:
        trainer: trainer that records all rows of its schedule.
        codec: state of its codecs, in numpy.
        direction: "backward" or "forward".
        data: number of the data rank.
        stage: number of the stage.
    """
    numbers = list(range(trainer.config.micro_batches))
    if direction == "backward":
        chosen = trainer.compression.gradients(trainer.schedule)
        numbers = [mb for mb in numbers if (stage, mb) in chosen]
    place = tuple({DATA: data, PIPE: stage}.get(axis, 0) for axis in AXES)
    record: Record = jax.tree.map(lambda x: x[(*place, 0)], codec[direction])
    # Schedules without virtual stages send in the order of the micro-batches.
    slots = record.slots[len(record.slots) - len(numbers) :]
    assert len(slots) == len(numbers), "the record has all messages of a step"
    given, decoded, residual = (
        np.asarray(ring)[slots].astype(np.float64) for ring in (record.given, record.decoded, record.residual)
    )
    # A codec without error feedback has no residual: its errors are lost.
    return Messages(numbers, given, decoded, residual if residual.any() else given - decoded)


def _norm(x: np.ndarray) -> float:
    """Return the Frobenius norm."""
    return float(np.linalg.norm(x))


def _ratio(a: float, b: float) -> float:
    """Return a / b, nan if b is 0."""
    return a / b if b else float("nan")


def _relative_mean(x: np.ndarray) -> float:
    """Return the mean of the elements, divided by their root mean square."""
    return _ratio(float(x.mean()), float(np.sqrt(np.mean(x**2))))


def _outer(gradients: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the running sums over micro-batches of g_i^T x_i, [n, H, H]: the gradients of a linear layer's weights."""

    def rows(a: np.ndarray) -> np.ndarray:
        return a.reshape(len(a), -1, a.shape[-1])

    return np.cumsum(rows(gradients).swapaxes(1, 2) @ rows(x), axis=0)


def message_errors(sent: Messages, activations: np.ndarray | None) -> Iterable[CsvRow]:
    """Yield the error of each message and, for gradients, its effect on the gradients of weights.

    Lazy error propagation leaves the gradient of a linear layer's weights an error of sum e_i (x_{i+1} - x_i)^T, up to
    the first and the last term. It is small if the error of a message is orthogonal to the change of the activations,
    or if both have no mean. Every layer multiplies gradients with different activations; those at the boundary stand
    for them here.

    Args:
        sent: messages of one sender in one step.
        activations: x of all micro-batches of the step at the same boundary, [m, B, S, H]; None for messages that are
            activations themselves.

    Yields:
        A row with micro_batch and relative_error, |decoded - given| / |given|. Rows of gradients also have
        weight_error, the same for the sums of g_i x_i^T over this step's messages so far. Those of all messages except
        the last also have cosine, of e_i with x_i - x_{i+1}. Their error_mean and change_mean are the means of these
        two, divided by their root mean squares.
    """
    lost = sent.decoded - sent.given
    if activations is not None:
        x = activations[sent.micro_batches]
        wrong, right = _outer(lost, x), _outer(sent.given, x)
    for i, number in enumerate(sent.micro_batches):
        row = {"micro_batch": number, "relative_error": _ratio(_norm(lost[i]), _norm(sent.given[i]))}
        if activations is not None:
            row["weight_error"] = _ratio(_norm(wrong[i]), _norm(right[i]))
            if i + 1 < len(x):
                error, change = sent.error[i], x[i] - x[i + 1]
                row["cosine"] = _ratio(float(np.vdot(error, change)), _norm(error) * _norm(change))
                row |= {"error_mean": _relative_mean(error), "change_mean": _relative_mean(change)}
        yield row


def link_errors(trainer: Trainer, codec: Any) -> list[CsvRow]:
    """Return the rows of `message_errors` for all compressed messages of the last step.

    The rows also have direction, link and data_rank. Link k joins the stages k and k+1.

    Args:
        trainer: trainer that records all rows of its schedule.
        codec: state of its codecs, in numpy.
    """
    c, rows = trainer.config, []
    for direction in ("backward", "forward"):
        if getattr(trainer.compression, direction) == "none":
            continue
        for link in range(c.mesh.pipe - 1):
            for data in range(c.mesh.data):
                activations = messages(trainer, codec, "forward", data, link).given
                backward = direction == "backward"
                sent = messages(trainer, codec, direction, data, link + backward)
                where = {"direction": direction, "link": link, "data_rank": data}
                rows += [where | row for row in message_errors(sent, activations if backward else None)]
    return rows


# --- Spectra ----------------------------------------------------------------------------------------------------------


def _singular_values(matrices: np.ndarray) -> np.ndarray:
    """Return singular values divided by the largest one, as a mean over matrices [m, n, k]."""
    values = np.linalg.svd(matrices, compute_uv=False)
    return np.mean(values / np.maximum(values[:, :1], np.finfo(np.float64).tiny), axis=0)


def activation_gradient_spectra(trainer: Trainer, codec: Any) -> dict[str, np.ndarray]:
    """Return the spectrum of the gradients that cross each link: singular values divided by the largest one.

    Each spectrum is the mean over the step's messages.

    Args:
        trainer: trainer that records all rows of its schedule.
        codec: state of its codecs, in numpy.
    """
    mesh, found = trainer.config.mesh, {}
    for link in range(mesh.pipe - 1):
        given = np.concatenate([messages(trainer, codec, "backward", d, link + 1).given for d in range(mesh.data)])
        found[f"stage {link + 1} to {link}"] = _singular_values(given.reshape(len(given), -1, given.shape[-1]))
    return found


@functools.lru_cache(maxsize=1)
def _gradient(config: ModelConfig) -> Callable[[Params, jax.Array], Params]:
    """Return the jitted gradient of a plain model's loss."""
    return jax.jit(jax.grad(functools.partial(transformer.loss, config=config)))


def weight_gradient_spectra(trainer: Trainer, params: Params, tokens: jax.Array) -> dict[str, np.ndarray]:
    """Return the spectrum of each kernel's gradients in a plain model: singular values divided by the largest one.

    Each spectrum is the mean over the layers.

    Args:
        trainer: trainer that has the model and the layout of the parameters.
        params: parameters in the mesh's layout.
        tokens: global batch, int32 [global_batch, sequence + 1].
    """
    gradients = _gradient(trainer.layout.config.model)(trainer.layout.to_canonical(params), tokens)
    found = {}
    for name, entry in gradients["layers"].items():
        if "kernel" in entry:
            kernel = np.asarray(entry["kernel"], np.float64)
            found[name] = _singular_values(kernel.reshape(*kernel.shape[:2], -1))
    return found
