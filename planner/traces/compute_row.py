"""A row of a cluster's compute from a trace of one GPU: the seconds in which kernels of F and of B ran.

The seconds that the device waited for launches are left out: profilers make launches slower, and a program that XLA
compiles has none. They are told beside the row. Of the head, the embedding and the optimizer a row has the data sheet's
seconds (planner.cost.compute) if the trace does not tell them; that is said.
"""

import dataclasses
import pathlib
from typing import Any

from paxtrain import files
from paxtrain.config import Config
from paxtrain.config.axes import TENSOR, layer_sizes
from paxtrain.devices import gpus
from paxtrain.errors import UserError
from paxtrain.model import parameters
from planner.cluster.device_sheets import SHEETS
from planner.cost import compute
from planner.traces import nsys, torch_trace, xla_trace
from planner.traces.kernels import NOTHING, SOME, WHOLE_LAYERS, GpuTrace, PartSeconds, part_seconds

KIND = "trace"
_WAITS = 0.1  # share of F's time in which the device waits for launches that is worth a warning
_ALPHA_INSIDE = 4e-6  # seconds; of a data sheet's collectives, as in configs/clusters


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """The facts that a trace does not have.

    Attributes:
        config: the model and its dtype; its save mode counts if the trace does not say what B runs again.
        micro_batch: sequences of a micro-batch.
        tensor: tensor-parallel size.
        layers: layers on the device; 0: all of the model.
        passes: micro-batches whose F and B the trace has; 0: as it tells.
        layers_only: whether it is of layers alone, without embedding, head and loss.
        device: device kind; "": as the trace names it.
    """

    config: Config
    micro_batch: int
    tensor: int = 1
    layers: int = 0
    passes: int = 0
    layers_only: bool = False
    device: str = ""


def read(path: str | pathlib.Path) -> GpuTrace:
    """Return a trace of torch.profiler, of jax.profiler or of Nsight Systems.

    Raises:
        UserError: it is none of these, or does not tell F from B.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            begins = file.read(len(nsys.MAGIC))
    except OSError as error:
        raise UserError(f"cannot read the {KIND} {path} ({error.strerror}); name a file that can be read") from error
    try:
        if begins == nsys.MAGIC:
            return nsys.read(path)
        text = files.read_text(path, KIND)
        nsys.refuse_summary(text)
        values = torch_trace.loads(text)
        for reader in (torch_trace, xla_trace):
            if reader.is_trace(values):
                return reader.parse(str(path), values)
        raise UserError("it has no kernels of a GPU; profile with CUDA activities, on a GPU")
    except UserError as error:
        raise UserError(f"{KIND} {path}: {error}") from error


def _kind(trace: GpuTrace, device: str) -> str:
    name = device or trace.device
    found = gpus.find(name) if name else None
    if found is None:
        what = f"names the device {name!r}, which is not known" if name else "names no device"
        raise UserError(f"{KIND} {trace.path} {what}; name its kind with --device, such as h100")
    return found


def _passes(trace: GpuTrace, options: TraceOptions) -> int:
    """Return the micro-batches of a trace, after seeing that it tells what a row needs."""
    passes = options.passes or trace.passes
    if options.passes and trace.passes and options.passes != trace.passes:
        raise UserError(
            f"{KIND} {trace.path} has {trace.passes} F with their B, not {options.passes}; leave --passes out"
        )
    if not passes:
        raise UserError(
            f"{KIND} {trace.path} has no F followed by B, or does not say how many; trace a whole training step, and "
            "give the number of its micro-batches with --passes if it is jax's or of a pipeline's stage"
        )
    if not (trace.head or options.layers_only):
        raise UserError(
            f"{KIND} {trace.path} does not tell the head from the layers: it has no loss that is known; trace "
            "operators as they run (no torch.compile, layers scanned in jax), or layers alone with --layers_only"
        )
    return passes


def _save(trace: GpuTrace, options: TraceOptions) -> str:
    """Return the save mode of the row: what B runs again says what F has kept."""
    save = options.config.pipeline.save
    if trace.recomputes == SOME:
        raise UserError(
            f"{KIND} {trace.path} runs {SOME} again in B, but not its products, as no save mode does; trace a run that "
            "recomputes whole layers or nothing"
        )
    if trace.recomputes == WHOLE_LAYERS:
        return save if save in ("inputs", "layer_inputs") else "layer_inputs"
    return "residuals" if trace.recomputes == NOTHING else save


def row(trace: GpuTrace, options: TraceOptions) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the row of a compute profile that a trace makes, and what was taken from it, as rows of a table.

    Raises:
        UserError: the trace does not tell F and B of a layer.
    """
    model, save = options.config.model, _save(trace, options)
    kind, passes, layers = _kind(trace, options.device), _passes(trace, options), options.layers or model.layers
    sizes = model.split_sizes.values()
    if any(size % options.tensor for size in sizes):
        raise UserError(f"--tensor={options.tensor} must divide the model's {', '.join(map(str, sizes))}")
    found = part_seconds(trace, layers, passes, options.tensor > 1)
    if not (found.forward > 0 and found.backward > 0):
        raise UserError(f"{KIND} {trace.path} has no kernels in F or in B of its layers; trace a whole training step")
    mesh = layer_sizes({TENSOR: options.tensor})
    inside = _ALPHA_INSIDE, gpus.ALL[kind].link
    sheet = compute.sheet(model, SHEETS[kind], mesh, options.micro_batch, save, inside)
    told = [
        *_told(trace, found, passes, layers),
        ("", f"save={save}: B runs {trace.recomputes or 'an unknown part'} again"),
    ]
    values = {"forward": found.forward, "backward": found.backward, "head": found.head, "embedding": found.embedding}
    count = parameters.whole(dataclasses.replace(model, layers=layers)) / options.tensor
    values["optimizer"] = found.optimizer / count if trace.ranks <= options.tensor else 0.0
    for name in ("head", "embedding", "optimizer"):
        if not values[name] or (options.layers_only and name != "optimizer"):
            values[name] = getattr(sheet, name)
            told.append(("", f"{name}: the data sheet's, since the trace does not tell it"))
    facts = {"kind": kind, "tensor": options.tensor, "micro_batch": options.micro_batch, "save": save}
    return facts | dict(zip(compute.PROFILED, compute.profiled(model), strict=True)) | values, told


def _told(trace: GpuTrace, found: PartSeconds, passes: int, layers: int) -> list[tuple[str, str]]:
    rows = [
        (trace.path, f"{len(trace.kernels):,} kernels, {passes} micro-batches, {layers} layers"),
        ("", f"a layer's F {found.forward * 1e3:.4g} ms, its B {found.backward * 1e3:.4g} ms"),
    ]
    if found.every:
        rows.append(("", f"launches every {found.every * 1e6:.3g} us, {1 / found.every:,.0f} a second"))
    if trace.passes:
        rows.append(("", f"no kernel runs in {found.idle:.0%} of F's time, which the row leaves out"))
    if trace.passes and found.idle > _WAITS:
        rows.append(("", "warning: the device waits for launches, or the profiler slowed them; a step takes longer so"))
    return rows
