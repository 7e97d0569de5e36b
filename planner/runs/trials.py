"""Measured training runs as a table: the CSV that planner.validate reads, to which job logs can be converted.

One row is one run of one configuration:

    cluster            any name; rows of one cluster share the constants that are fitted
    trainer            optional: who ran it, one of planner/runs/trainers.py; rows of one trainer share constants, too
    devices            devices that the run used
    devices_per_host   ranks fill host after host, unless placement says otherwise
    device_kinds       optional: one kind for all, or one per host joined by ";", as "A100;A100;V100"
    host_gbit          optional, likewise: Gbit/s of a host's network, each way
    intra_gbit         optional, likewise: Gbit/s between two devices of a host, each way
    device_gb          optional: memory of the smallest device, in 1e9 bytes; default: its data sheet's
    host_nics          optional: flows that leave a host, and enter it, at its full rate over their number; default: 1
    model              optional: its name
    family             optional: gpt2 (default) or llama
    hidden, heads, layers, seq, vocab
    kv_heads, ffn      optional: heads of keys and values (as heads), size of the feed-forward part (4 x hidden)
    tied_head          optional: 1 if the head uses the embedding's table; default: 1 for gpt2, 0 for llama
    experts, top_k, expert_ffn    optional: of a mixture of experts; such rows are read, but not predicted
    global_batch, micro_batch
    tp, dp, pp         tensor, data and pipe; ranks count tensor fastest, then data, then pipe
    context            optional: devices that share each sequence, in a ring; 1 if empty
    expert             optional: size of a further axis; rows with more than 1 are read, but not predicted
    sequence_parallel  optional: 1 if tensor ranks split the sequence between their matrices; default: 0
    sharding           optional: what is sharded over data: none (default), zero1, zero2 or zero3
    shard_group        optional: data ranks among which it is sharded; default: all
    stage_layers       optional: transformer layers of each stage joined by ";"; default: as equal as possible, or as
                       nanotron splits them (nanotron.py)
    schedule           optional: a schedule of paxtrain/schedule/schedules.py, as "eager_1f1b", or "1f1b:5" with 5
                       micro-batches in flight; anything else counts as 1f1b
    virtual_stages     optional: chunks of layers of each stage, all as large, if the schedule interleaves; default: 2
    data_micro_batches optional: micro-batches of each data rank joined by ";"; default: all have as many
    placement          optional: host of each tensor group joined by ";", numbered from 0, in the order of the ranks
    recompute          what the backward computes again: 0 or none, 1 or full, or scores, half_layers, half_products
    dtype              dtype of activations and weights: fp16, bf16 or fp32
    precision          optional: dtype of matrix products, fp8, mxfp8 or nvfp4 too; default: dtype
    seconds            seconds of one iteration; empty or inf: not run
    memory_gb          optional: peak of a device's allocated memory, in 1e9 bytes; nanotron's is the first stage's
    failed             optional: 1 if the run ran out of memory or crashed

Optional columns may be missing or empty. Other columns are kept and not read.
"""

import collections
import csv
import dataclasses
import functools
import io
import math
import pathlib
from collections.abc import Collection, Sequence

from paxtrain import files
from paxtrain.config import ModelConfig
from paxtrain.config.model import FAMILIES
from paxtrain.errors import UserError, whole
from paxtrain.schedule.schedules import FAMILY, names, spec_of
from planner.runs import nanotron
from planner.runs.trainers import TRAINERS

_SIZES = ("hidden", "heads", "layers", "seq", "vocab", "global_batch", "micro_batch", "tp", "dp", "pp")
_COUNTS = ("devices", "devices_per_host", *_SIZES)
_OF_HOSTS = ("device_kinds", "host_gbit", "intra_gbit", "device_gb", "host_nics")
_OF_RANKS = ("stage_layers", "schedule", "virtual_stages", "data_micro_batches", "placement")
_OF_MODELS = ("model", "family", "kv_heads", "ffn", "tied_head", "experts", "top_k", "expert_ffn")
_OF_PLANS = ("context", "expert", "sequence_parallel", "sharding", "shard_group", "precision")
_OF_RESULTS = ("memory_gb", "failed")
OPTIONAL = ("trainer", *_OF_HOSTS, *_OF_RANKS, *_OF_MODELS, *_OF_PLANS, *_OF_RESULTS)
COLUMNS = (
    *("cluster", "trainer", "devices", "devices_per_host"),
    *_OF_HOSTS,
    *_OF_MODELS[:2],
    *_SIZES[:5],
    *_OF_MODELS[2:],
    *_SIZES[5:],
    *_OF_PLANS[:-1],
    *_OF_RANKS,
    *("recompute", "dtype", "precision", "seconds"),
    *_OF_RESULTS,
)
_BYTES = {"fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2, "fp32": 4, "float32": 4, "tf32": 4, "float": 4}
RECOMPUTED = ("none", "full", "scores", "half_layers", "half_products")  # 0 and 1 stand for the first two
SHARDINGS = ("none", "zero1", "zero2", "zero3")
PRECISIONS = (*_BYTES, "fp8", "mxfp8", "nvfp4")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One row of the table. Attributes that are not listed are the module's columns.

    Attributes:
        device_kinds: kind of each host's devices; "" if unknown.
        host_bytes: bytes/s of each host's network; None if unknown.
        intra_bytes: bytes/s between two devices of each host; None if unknown.
        stage_layers: transformer layers of each stage.
        recompute: one of RECOMPUTED.
        schedule: its name, see `paxtrain.schedule.schedules.spec_of`.
        virtual_stages: chunks of layers of each stage.
        data_micro_batches: micro-batches of each data rank; empty: all have as many.
        placement: host of each tensor group, in the order of the ranks; empty: they fill host after host.
        element_bytes: bytes of one number of dtype.
        seconds: seconds of one iteration; None if not run.
        columns: the row as it was read.
        kv_heads: heads of keys and values; 0: as many as heads.
        context: devices that share each sequence.
        ffn: size of the feed-forward part; 0: 4 x hidden.
        shard_group: data ranks among which weights or their gradients are sharded; 0: all.
        precision: dtype of matrix products.
        memory: peak of a device's allocated memory, in bytes; None if unknown.
        device_bytes: memory of the smallest device; None: its data sheet's.
    """

    cluster: str
    devices: int
    devices_per_host: int
    device_kinds: tuple[str, ...]
    host_bytes: tuple[float, ...] | None
    intra_bytes: tuple[float, ...] | None
    hidden: int
    heads: int
    layers: int
    seq: int
    vocab: int
    global_batch: int
    micro_batch: int
    tp: int
    dp: int
    pp: int
    stage_layers: tuple[int, ...]
    recompute: str
    element_bytes: int
    seconds: float | None
    columns: dict[str, str] = dataclasses.field(repr=False, compare=False)
    schedule: str = "1f1b"
    virtual_stages: int = 1
    data_micro_batches: tuple[int, ...] = ()
    placement: tuple[int, ...] = ()
    trainer: str = ""
    host_nics: int = 1
    family: str = "gpt2"
    kv_heads: int = 0
    ffn: int = 0
    tied_head: bool = True
    experts: int = 0
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    sharding: str = "none"
    shard_group: int = 0
    precision: str = "bf16"
    memory: float | None = None
    device_bytes: float | None = None
    failed: bool = False

    @functools.cached_property
    def model(self) -> ModelConfig:
        """The model that was trained, without its experts; its vocabulary is padded so that it divides.

        Raises:
            UserError: there is no such model.
        """
        return ModelConfig(
            family=self.family,
            vocab_size=self.vocab,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            intermediate=self.ffn,
            tied_head=self.tied_head,
            sequence=self.seq,
            vocab_multiple=self.tp,
            dtype="bfloat16" if self.element_bytes == 2 else "float32",
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches per iteration of the pipeline that has most."""
        return max(self.data_micro_batches, default=self.global_batch // (self.dp * self.micro_batch))

    @property
    def seat(self) -> int:
        """Devices that share a layer: those of a tensor group, times those that share a sequence."""
        return self.tp * self.context

    @property
    def hosts(self) -> int:
        """Hosts that the run used."""
        return -(-self.devices // self.devices_per_host)

    @property
    def group(self) -> tuple[str, int, int, int, int]:
        """The givens of a choice of configuration: (cluster, hidden, layers, devices, global_batch)."""
        return self.cluster, self.hidden, self.layers, self.devices, self.global_batch

    @property
    def beyond(self) -> str:
        """The part of the run that no prediction knows: axes, experts, precisions; "" if all is known."""
        facts = {
            f"an expert axis of {self.expert}": self.expert > 1,
            f"{self.experts} experts": self.experts > 0,
            f"weights sharded over groups of {self.shard_group} data ranks": 0 < self.shard_group < self.dp,
            f"{self.sharding} with pp={self.pp}": self.sharding == "zero3" and self.pp > 1,
        }
        return ", ".join(text for text, here in facts.items() if here)

    @property
    def broken(self) -> bool:
        """The run fails whatever its memory: nanotron's split leaves the loss on no last stage."""
        if self.trainer != "nanotron" or self.columns.get("stage_layers"):
            return False
        return not nanotron.split(self.layers, self.hidden, self.model.ffn, self.vocab, self.pp).whole


_MOST, _HUGE = 10_000_000, 1e12  # largest count; largest rate or time
_MOST_CHUNKS = 1024


def _float(text: str) -> float:
    """Return the number that a text is, or nan; float() would also take digits of other scripts, and 1_0."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def _count(name: str, text: str) -> int:
    value = _float(text)
    if not (value >= 1 and value == int(value) if math.isfinite(value) else False):
        raise UserError(f"{name} must be a whole number from 1 on, got {text!r}")
    if value > _MOST:
        raise UserError(f"{name} must be {_MOST:,} at most, got {text!r}")
    return int(value)


def _positive(name: str, text: str) -> float:
    value = _float(text)
    if not value > 0:
        raise UserError(f"{name} must be above 0, got {text!r}")
    if not 1 / _HUGE < value < _HUGE:
        raise UserError(f"{name} must be from {1 / _HUGE:g} to {_HUGE:g}, got {text!r}")
    return value


def _gigabytes(name: str, text: str) -> float | None:
    """Return the bytes of a cell in 1e9 bytes; None if it is empty."""
    return _positive(name, text) * 1e9 if text else None


def _seconds(text: str) -> float | None:
    if text.lower() in ("", "inf", "+inf", "infinity", "nan"):
        return None
    return _positive("seconds (empty or inf: not run)", text)


def _per_host(name: str, text: str, hosts: int) -> list[str]:
    """Return one entry per host; a single entry counts for every host, and those of unused hosts are left out."""
    entries = [entry.strip() for entry in text.split(";")]
    if len(entries) == 1:
        return entries * hosts
    if len(entries) < hosts or "" in entries:
        raise UserError(f"{name}={text} must be one entry or one for each of the {hosts} hosts")
    return entries[:hosts]


def _rates(name: str, text: str, hosts: int) -> tuple[float, ...] | None:
    return tuple(_positive(name, rate) / 8 * 1e9 for rate in _per_host(name, text, hosts)) if text else None


def _stage_layers(text: str, trainer: str, n: dict[str, int], ffn: int) -> tuple[int, ...]:
    """Return the layers of each stage.

    Args:
        text: the cell.
        trainer: who ran it.
        n: counts of the row.
        ffn: size of the feed-forward part; 0: 4 x hidden.
    """
    layers, pp = n["layers"], n["pp"]
    if not text:
        if layers < pp:
            raise UserError(f"layers={layers} cannot fill pp={pp} stages; name stage_layers if some are empty")
        if trainer == "nanotron":
            return nanotron.split(layers, n["hidden"], ffn or 4 * n["hidden"], n["vocab"], pp).layers
        return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
    counts = tuple(found for entry in text.split(";") if (found := whole(entry.strip(), _MOST)) is not None)
    if len(counts) != pp or sum(counts) != layers:
        raise UserError(f"stage_layers={text} must be {pp} counts, one per stage, that add up to layers={layers}")
    return counts


def _schedule(name: str, stages: int, given: str) -> tuple[str, int]:
    """Return the schedule and its virtual stages: 1f1b's if the name is none of this project's.

    Args:
        name: schedule as the row has it.
        stages: stages of the pipeline.
        given: virtual stages as the row has them.
    """
    chunks = _count("virtual_stages", given) if given else 0
    if chunks > _MOST_CHUNKS:
        raise UserError(f"virtual_stages must be {_MOST_CHUNKS:,} at most, got {given!r}")
    in_flight = whole(name.removeprefix(FAMILY)) if name.startswith(FAMILY) else None
    known = name in names() or (in_flight is not None and stages <= in_flight < 2 * stages)
    if stages == 1 or not known:
        return "1f1b", 1
    spec = spec_of(name)
    return name, max(chunks, spec.least_chunks) if spec.interleaves else 1


def _integers(text: str) -> tuple[int, ...] | None:
    """Return numbers that are joined by ";"; None if they cannot be read."""
    found = [whole(entry.strip()) for entry in text.split(";")]
    return None if None in found else tuple(number for number in found if number is not None)


def _data_micro_batches(text: str, n: dict[str, int]) -> tuple[int, ...]:
    """Return the micro-batches of each data rank; empty: all have as many.

    Args:
        text: the cell.
        n: counts of the row.
    """
    dp, size, batch = n["dp"], n["micro_batch"], n["global_batch"]
    if not text:
        if batch % (dp * size):
            raise UserError(
                f"global_batch={batch} must be a multiple of dp={dp} x micro_batch={size}, or data_micro_batches must "
                "say how many each data rank has"
            )
        return ()
    found = _integers(text) or ()
    if len(found) != dp or min(found) < 1 or sum(found) * size != batch:
        raise UserError(
            f"data_micro_batches={text} must be {dp} counts from 1 on, one per data rank, that with micro_batch={size} "
            f"make global_batch={batch}"
        )
    return found


def _placement(text: str, n: dict[str, int], hosts: int) -> tuple[int, ...]:
    """Return the host of each tensor group; empty: they fill host after host.

    Args:
        text: the cell.
        n: counts of the row.
        hosts: number of hosts.
    """
    if not text:
        return ()
    found, groups = _integers(text) or (), n["dp"] * n["pp"]
    fits = max(collections.Counter(found).values(), default=0) * n["tp"] <= n["devices_per_host"]
    if len(found) != groups or max(found) >= hosts or not fits:
        raise UserError(
            f"placement={text} must name a host from 0 to {hosts - 1} for each of the {groups} tensor groups, and no "
            f"host for more than devices_per_host={n['devices_per_host']} of their devices"
        )
    return found


def _choice(name: str, text: str, among: Collection[str], default: str) -> str:
    """Return one of some words, in small letters."""
    found = text.lower() or default
    if found not in among:
        raise UserError(f"{name} must be one of {', '.join(among)}, got {text!r}")
    return found


def _flag(name: str, text: str, default: bool) -> bool:
    if text not in ("", "0", "1"):
        raise UserError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1" if text else default


def _recompute(text: str) -> str:
    names = ("0", "1", *RECOMPUTED)
    if not text:
        raise UserError(f"recompute must be one of {', '.join(names)}, got an empty cell")
    found = _choice("recompute", text, names, "")
    return {"0": "none", "1": "full"}.get(found, found)


def _optional_counts(row: dict[str, str], **defaults: int) -> dict[str, int]:
    """Return counts of cells that may be empty; 0, and n/a, count as empty."""
    given = {name: "" if row[name].lower() in ("0", "n/a") else row[name] for name in defaults}
    return {name: _count(name, given[name]) if given[name] else default for name, default in defaults.items()}


def parse(columns: dict[str, str]) -> Trial:
    """Parse one row of the table.

    Raises:
        UserError: a value cannot be read, or values contradict each other.
    """
    row = {name: (columns.get(name) or "").strip() for name in COLUMNS}
    if not row["cluster"]:
        raise UserError("cluster must have a name, got an empty cell")
    n = {name: _count(name, row[name]) for name in _COUNTS}
    more = _optional_counts(row, kv_heads=0, ffn=0, experts=0, context=1, expert=1, shard_group=0, host_nics=1)
    _ = _optional_counts(row, top_k=0, expert_ffn=0)  # which says what is wrong with them; nothing predicts them
    whole_mesh = n["tp"] * n["dp"] * n["pp"] * more["context"]
    if whole_mesh != n["devices"]:
        context = f" x context={more['context']}" if more["context"] > 1 else ""
        raise UserError(f"tp={n['tp']} x dp={n['dp']} x pp={n['pp']}{context} must make devices={n['devices']}")
    if n["tp"] % n["devices_per_host"] and n["devices_per_host"] % n["tp"]:
        raise UserError(f"tp={n['tp']} must divide devices_per_host={n['devices_per_host']} or be a multiple of it")
    dtype = _choice("dtype", row["dtype"], _BYTES, "")
    hosts = -(-n["devices"] // n["devices_per_host"])
    schedule, virtual_stages = _schedule(row["schedule"], n["pp"], row["virtual_stages"])
    family = _choice("family", row["family"], FAMILIES, "gpt2")
    trainer = _choice("trainer", row["trainer"], TRAINERS, "")
    trial = Trial(
        cluster=row["cluster"],
        trainer=trainer,
        device_kinds=tuple(_per_host("device_kinds", row["device_kinds"], hosts)),
        host_bytes=_rates("host_gbit", row["host_gbit"], hosts),
        intra_bytes=_rates("intra_gbit", row["intra_gbit"], hosts),
        stage_layers=_stage_layers(row["stage_layers"], trainer, n, more["ffn"]),
        recompute=_recompute(row["recompute"]),
        element_bytes=_BYTES[dtype],
        seconds=_seconds(row["seconds"]),
        columns=columns,
        schedule=schedule,
        virtual_stages=virtual_stages,
        data_micro_batches=_data_micro_batches(row["data_micro_batches"], n),
        placement=_placement(row["placement"], n, hosts),
        family=family,
        tied_head=_flag("tied_head", row["tied_head"], family == "gpt2"),
        sequence_parallel=_flag("sequence_parallel", row["sequence_parallel"], False),
        sharding=_choice("sharding", row["sharding"], SHARDINGS, "none"),
        precision=_choice("precision", row["precision"], PRECISIONS, dtype),
        memory=_gigabytes("memory_gb", row["memory_gb"]),
        device_bytes=_gigabytes("device_gb", row["device_gb"]),
        failed=_flag("failed", row["failed"], False),
        **n,
        **more,
    )
    if not trial.beyond:
        _ = trial.model  # which says what is wrong with its sizes
    return trial


def read(path: str | pathlib.Path) -> list[Trial]:
    """Read a table.

    Raises:
        UserError: the file cannot be read, columns are missing, a row is wrong (it is named by its line in the file),
            or no row has a measured time.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            names = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            lines = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"cannot read the trials {path} ({error}); name a CSV as planner/runs/trials.py describes it"
        ) from error
    if missing := [name for name in COLUMNS if name not in names and name not in OPTIONAL]:
        raise UserError(
            f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; it needs all of "
            f"{', '.join(name for name in COLUMNS if name not in OPTIONAL)}"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{path} names a column twice: {next(name for name in names if names.count(name) > 1)}")
    trials = []
    for line, row in lines:
        try:
            if None in row or None in row.values():
                raise UserError(f"it must have {len(names)} cells, as the first line has")
            trials.append(parse(row))
        except UserError as error:
            raise UserError(f"{path}, line {line}: {error}") from error
    if not any(trial.seconds for trial in trials):
        raise UserError(
            f"{path} has no usable row: none of {len(trials)} has seconds; at least one must have been measured"
        )
    return trials


def write(path: str | pathlib.Path, rows: Sequence[dict[str, object]]) -> None:
    """Write rows as CSV, with the keys of the first one as columns; a crash leaves the file old or new.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write(path, text.getvalue())
