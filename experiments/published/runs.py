"""Runs that others published: the table runs.csv, and the seconds of a step by what was published.

Columns, besides those of the model:

    run                a name
    trainer            whose trainer it was
    device             a device of planner/cluster/device_sheets.py, or of DEVICES
    devices            all of them, in hosts of 8
    host_gbit          Gbit/s of a host's network, all of its NICs together, each way
    tensor, pipe       sizes of these axes; ranks count tensor fastest, then data, then pipe
    chunks             chunks of a stage, of an interleaved schedule
    stage_layers       layers of each virtual stage joined by ";"; empty: as equal as possible
    recompute          what the backward runs again: none, full, scores (Megatron-LM's selective), half_layers or
                       half_products (torchtitan's selective layer and op)
    flash              1 if attention keeps no scores in memory
    sequence_parallel  1 if activations are split along the sequence between tensor ranks
    sharding           none, zero1 (the optimizer's state over data), fsdp (everything)
    overlap            1 if gradients are reduced over data under the backward
    split_messages     1 if tensor ranks send a part each of what they all hold
    accumulate         bytes a parameter that passes of their own move to add up the gradients of a micro-batch; 0: the
                       products add them up, or there is one micro-batch
    waits              1 if the host waits for each kernel before it launches the next (CUDA_LAUNCH_BLOCKING=1)
    published, unit    the figure: s, MFU, tokens/s of a device, TFLOP/s (with recomputation), model TFLOP/s
    source, place, url, read_at    where it was published, and where it was read for this table
    assumed            what the source does not say
    checked            the day on which the row was last held against its source

References:
    FLOPs with recomputation: Narayanan et al. 2021, equation 3. Model FLOPs of GPT: Korthikanti et al. 2022, equation
    7. Of Llama: 6 a parameter that multiplies a token, and 12 L H S for attention (Chowdhery et al. 2022, appendix B).
    Bytes of accumulation: 6 of Megatron-LM in 2021, which adds a float16 gradient to a float16 buffer
    (megatron/model/distributed.py), until its products did so; 18 of DeepSpeed's BF16_Optimizer, which makes a float32
    copy of a bfloat16 gradient and adds that (deepspeed/runtime/bf16_optimizer.py). Its tensor ranks send a part each
    (deepspeed/runtime/pipe/engine.py, is_pipe_partitioned).
"""

import csv
import dataclasses
import pathlib

from paxtrain.config import ModelConfig
from paxtrain.model import parameters
from planner.cluster.device_sheets import SHEETS, DeviceSheet

RUNS = pathlib.Path(__file__).with_name("runs.csv")
PER_HOST = 8
# torchtitan's H100s have HBM2e and a limit of 500 W. Its page says that their peak is not known (footnote 2).
_LIMITED = dataclasses.replace(SHEETS["h100"], bandwidth=2.4e12, memory=96e9)
DEVICES = {"h100-500w": _LIMITED}


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A run as it was published. Attributes that are not listed are the module's columns.

    Attributes:
        model: its model.
        data: size of the data axis.
        stage_layers: layers of each virtual stage.
        seconds: seconds of a step by the published figure.
        columns: the row as it was read.
    """

    name: str
    model: ModelConfig
    device: str
    devices: int
    host_bytes: float
    tensor: int
    pipe: int
    data: int
    chunks: int
    micro_batch: int
    global_batch: int
    stage_layers: tuple[int, ...]
    recompute: str
    flash: bool
    sequence_parallel: bool
    sharding: str
    overlap: bool
    split_messages: bool
    accumulate: int
    waits: bool
    seconds: float
    columns: dict[str, str] = dataclasses.field(repr=False)

    @property
    def sheet(self) -> DeviceSheet:
        """Data sheet of the device."""
        return DEVICES.get(self.device) or SHEETS[self.device]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data rank and step."""
        return self.global_batch // (self.data * self.micro_batch)


def _model(row: dict[str, str]) -> ModelConfig:
    llama = row["family"] == "llama"
    heads, vocab = int(row["heads"]), int(row["vocab"])
    return ModelConfig(
        family=row["family"],
        vocab_size=vocab,
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=heads,
        kv_heads=int(row["kv_heads"] or 0),
        intermediate=int(row["ffn"] or 0),
        sequence=int(row["sequence"]),
        tied_head=not llama,
    )


def model_flops(model: ModelConfig, batch: int) -> float:
    """Return the FLOPs of a step without recomputation, as published utilisations count them.

    Args:
        model: model that is trained.
        batch: sequences of a step.
    """
    h, s, layers, vocab = model.hidden, model.sequence, model.layers, model.vocab_size
    if parameters.traits(model).gated:
        return batch * s * (6 * (layers * parameters.count(model, role="kernel") + vocab * h) + 12 * layers * h * s)
    return 72 * batch * s * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))


def _recomputed_flops(model: ModelConfig, batch: int) -> float:
    """Return the FLOPs of a step whose layers run forward twice."""
    h, s, layers = model.hidden, model.sequence, model.layers
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + model.vocab_size / (16 * layers * h))


def _seconds(row: dict[str, str], model: ModelConfig, batch: int, sheet: DeviceSheet) -> float:
    """Return the seconds of a step by the published figure."""
    figure, devices = float(row["published"]), int(row["devices"])
    match row["unit"]:
        case "s":
            return figure
        case "tokens/s":
            return batch * model.sequence / (figure * devices)
        case "TFLOP/s":
            return _recomputed_flops(model, batch) / (figure * 1e12 * devices)
        case "model TFLOP/s":
            return model_flops(model, batch) / (figure * 1e12 * devices)
        case "MFU":
            return model_flops(model, batch) / (figure * sheet.peak_flops * devices)
    raise ValueError(f"no such unit: {row['unit']}")


def _run(row: dict[str, str]) -> PublishedRun:
    model, batch = _model(row), int(row["global_batch"])
    sheet = DEVICES.get(row["device"]) or SHEETS[row["device"]]
    tensor, pipe, chunks = int(row["tensor"]), int(row["pipe"]), int(row["chunks"])
    given = tuple(int(x) for x in row["stage_layers"].split(";") if x)
    each, more = divmod(model.layers, pipe * chunks)
    return PublishedRun(
        name=row["run"],
        model=model,
        device=row["device"],
        devices=int(row["devices"]),
        host_bytes=float(row["host_gbit"]) * 1e9 / 8,
        tensor=tensor,
        pipe=pipe,
        data=int(row["devices"]) // (tensor * pipe),
        chunks=chunks,
        micro_batch=int(row["micro_batch"]),
        global_batch=batch,
        stage_layers=given or tuple(each + (i < more) for i in range(pipe * chunks)),
        recompute=row["recompute"],
        flash=row["flash"] == "1",
        sequence_parallel=row["sequence_parallel"] == "1",
        sharding=row["sharding"],
        overlap=row["overlap"] == "1",
        split_messages=row["split_messages"] == "1",
        accumulate=int(row["accumulate"]),
        waits=row["waits"] == "1",
        seconds=_seconds(row, model, batch, sheet),
        columns=row,
    )


def read() -> list[PublishedRun]:
    """Return the runs of runs.csv, in its order."""
    with open(RUNS, newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]
