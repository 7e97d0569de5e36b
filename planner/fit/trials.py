"""Measured training runs as a table: the CSV that planner.validate reads, to which job logs can be converted.

One row is one run of one configuration:

    cluster            any name; rows of one cluster share the constants that are fitted
    devices            devices that the run used
    devices_per_host   ranks fill host after host
    device_kinds       optional: one kind for all, or one per host joined by ";", as "A100;A100;V100"
    host_gbit          optional, likewise: Gbit/s of a host's network, each way
    intra_gbit         optional, likewise: Gbit/s between two devices of a host, each way
    hidden, heads, layers, seq, vocab
    global_batch, micro_batch
    tp, dp, pp         tensor, data and pipe; ranks count tensor fastest, then data, then pipe
    stage_layers       optional: transformer layers of each stage joined by ";"; default: as equal as possible
    recompute          1 if activations are recomputed in the backward pass, else 0
    dtype              dtype of activations and weights: fp16, bf16 or fp32
    seconds            seconds of one iteration; empty or inf: not run

Optional columns may be missing or empty. Other columns are kept and not read.
"""

import csv
import dataclasses
import math
import pathlib
from collections.abc import Sequence

from paxtrain.errors import UserError

OPTIONAL = ("device_kinds", "host_gbit", "intra_gbit", "stage_layers")
COLUMNS = (
    "cluster",
    "devices",
    "devices_per_host",
    "device_kinds",
    "host_gbit",
    "intra_gbit",
    "hidden",
    "heads",
    "layers",
    "seq",
    "vocab",
    "global_batch",
    "micro_batch",
    "tp",
    "dp",
    "pp",
    "stage_layers",
    "recompute",
    "dtype",
    "seconds",
)

_COUNTS = (
    "devices",
    "devices_per_host",
    "hidden",
    "heads",
    "layers",
    "seq",
    "vocab",
    "global_batch",
    "micro_batch",
    "tp",
    "dp",
    "pp",
)
_BYTES = {"fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2, "fp32": 4, "float32": 4, "tf32": 4, "float": 4}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One row of the table. Attributes that are not listed are the module's columns.

    Attributes:
        device_kinds: kind of each host's devices; "" if unknown.
        host_bytes: bytes/s of each host's network; None if unknown.
        intra_bytes: bytes/s between two devices of each host; None if unknown.
        stage_layers: transformer layers of each stage.
        element_bytes: bytes of one number of dtype.
        seconds: seconds of one iteration; None if not run.
        columns: the row as it was read.
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
    recompute: bool
    element_bytes: int
    seconds: float | None
    columns: dict[str, str] = dataclasses.field(repr=False, compare=False)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per pipeline and iteration."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def hosts(self) -> int:
        """Hosts that the run used."""
        return -(-self.devices // self.devices_per_host)

    @property
    def group(self) -> tuple[str, int, int, int, int]:
        """The givens of a choice of configuration: (cluster, hidden, layers, devices, global_batch)."""
        return self.cluster, self.hidden, self.layers, self.devices, self.global_batch

    @property
    def cell(self) -> tuple[int, int, int]:
        """The main factors of a layer's cost: (hidden, micro_batch, tp)."""
        return self.hidden, self.micro_batch, self.tp


_MOST, _HUGE = 10_000_000, 1e12  # largest count; largest rate or time


def _count(name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 1 and value == int(value) if math.isfinite(value) else False):
        raise UserError(f"{name} must be a whole number from 1 on, got {text!r}")
    if value > _MOST:
        raise UserError(f"{name} must be {_MOST:,} at most, got {text!r}")
    return int(value)


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UserError(f"{name} must be above 0, got {text!r}")
    if not 1 / _HUGE < value < _HUGE:
        raise UserError(f"{name} must be from {1 / _HUGE:g} to {_HUGE:g}, got {text!r}")
    return value


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


def _stage_layers(text: str, layers: int, pp: int) -> tuple[int, ...]:
    if not text:
        if layers < pp:
            raise UserError(f"layers={layers} cannot fill pp={pp} stages; name stage_layers if some are empty")
        return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
    try:
        counts = tuple(int(entry) for entry in text.split(";"))
    except ValueError:
        counts = ()
    if len(counts) != pp or sum(counts) != layers or min(counts) < 0:
        raise UserError(f"stage_layers={text} must be {pp} counts, one per stage, that add up to layers={layers}")
    return counts


def parse(columns: dict[str, str]) -> Trial:
    """Parse one row of the table.

    Raises:
        UserError: a value cannot be read, or values contradict each other.
    """
    row = {name: (columns.get(name) or "").strip() for name in COLUMNS}
    if not row["cluster"]:
        raise UserError("cluster must have a name, got an empty cell")
    n = {name: _count(name, row[name]) for name in _COUNTS}
    if n["tp"] * n["dp"] * n["pp"] != n["devices"]:
        raise UserError(f"tp={n['tp']} x dp={n['dp']} x pp={n['pp']} must make devices={n['devices']}")
    if n["global_batch"] % (n["dp"] * n["micro_batch"]):
        raise UserError(
            f"global_batch={n['global_batch']} must be a multiple of dp={n['dp']} x micro_batch={n['micro_batch']}"
        )
    if row["recompute"] not in ("0", "1"):
        raise UserError(f"recompute must be 0 or 1, got {row['recompute']!r}")
    if row["dtype"].lower() not in _BYTES:
        raise UserError(f"dtype must be one of {', '.join(_BYTES)}, got {row['dtype']!r}")
    hosts = -(-n["devices"] // n["devices_per_host"])
    return Trial(
        cluster=row["cluster"],
        device_kinds=tuple(_per_host("device_kinds", row["device_kinds"], hosts)),
        host_bytes=_rates("host_gbit", row["host_gbit"], hosts),
        intra_bytes=_rates("intra_gbit", row["intra_gbit"], hosts),
        stage_layers=_stage_layers(row["stage_layers"], n["layers"], n["pp"]),
        recompute=row["recompute"] == "1",
        element_bytes=_BYTES[row["dtype"].lower()],
        seconds=_seconds(row["seconds"]),
        columns=columns,
        **n,
    )


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
            f"cannot read the trials {path} ({error}); name a CSV as planner/fit/trials.py describes it"
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
    """Write rows as CSV, with the keys of the first one as columns."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
