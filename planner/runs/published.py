"""Published measurements converted to the table of planner.runs.trials.

amp_homogeneous.json     52 trials of AMP (Li et al., NeurIPS 2022) on 4 hosts x 4 T4; failed ones become rows that
                         were not run. AMP counts 30 layers: embedding, a no-op, 24 transformer layers, two no-ops,
                         the head and a no-op; stage_layers has the transformer layers among them.
vtrain_single_node.csv   1,440 iteration times of vTrain (Bang et al., MICRO 2024) on one host of A100 with NVLink
                         (300 GB/s each way), full recompute, vocabulary 51,200, fp16.
ultrascale*.csv          steps of the Ultra-Scale Playbook (Hugging Face, 2025): nanotron on hosts of 8 H100 with 3,200
                         Gbit/s of EFA each, Llama shapes; with the peaks of memory, and with the runs that failed.
mpt_fsdp*.csv            steps of llm-foundry's benchmarks (MosaicML): MPT under FSDP, on hosts of 8 GPUs with 1,600
                         Gbit/s of RoCE each.
megatron_bridge.csv      pre-training steps of Megatron-Bridge's performance pages (NVIDIA). An NVLink domain of GB200
                         or GB300 counts as a host of 64. Other rows, of fine-tuning, are left out.

A file is known by its first line, not by its name.
"""

import csv
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from paxtrain.errors import UserError
from planner.runs import logs, trials
from planner.runs.trials import Trial

_GIB = 2**30 / 1e9  # nanotron's "Mem Alloc (GB)" is in 2^30 bytes (nanotron/logging.py, create_table_log)
_AMP_BEFORE = 2  # layers that AMP counts before the first transformer layer


def amp(text: str) -> list[dict[str, object]]:
    """Return the rows of AMP's trials.

    Its GPT-2 345M has 16 heads. AMP does not state whether activations are recomputed; 0 is assumed.
    """
    rows = []
    for trial in json.loads(text):
        config, model, cluster = trial["config"], trial["model"], trial["cluster"]
        ends = [min(max(b - _AMP_BEFORE, 0), model["layers"]) for b in config["stage_boundaries"]]
        rows.append(
            {
                "cluster": "amp_16xT4",
                "devices": cluster["nodes"] * cluster["gpus_per_node"],
                "devices_per_host": cluster["gpus_per_node"],
                "device_kinds": "T4",
                "host_gbit": ";".join(map(str, cluster["inter_gbps"])),
                "intra_gbit": ";".join(map(str, cluster["intra_gbps"])),
                "hidden": model["hidden"],
                "heads": 16,
                "layers": model["layers"],
                "seq": model["seq"],
                "vocab": model["vocab"],
                "global_batch": config["global_batch"],
                "micro_batch": config["micro_batch"],
                "tp": config["tp"],
                "dp": config["dp"],
                "pp": config["pp"],
                "stage_layers": ";".join(str(b - a) for a, b in zip(ends, ends[1:])),
                "recompute": 0,
                "dtype": "fp16",
                "seconds": trial["measured_seconds"] or "",
            }
        )
    return rows


def vtrain(text: str) -> list[dict[str, object]]:
    """Return the rows of vTrain's single-node measurements."""
    names = ("devices", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp")
    fixed = {
        "cluster": "vtrain_8xA100",
        "devices_per_host": 8,
        "device_kinds": "A100",
        "intra_gbit": 2400,
        "vocab": 51200,
        "recompute": 1,
        "dtype": "fp16",
    }
    rows = []
    header, *lines = csv.reader(text.splitlines())
    if len(header) != len(names) + 1 or not header[0].startswith("# GPUs"):
        raise ValueError(f"the columns are {header}")
    for line in lines:
        row = {**fixed, **dict(zip(names, line)), "seconds": float(line[-1]) / 1000}
        rows.append({name: row.get(name, "") for name in trials.COLUMNS})
    return rows


def ultrascale(text: str) -> list[dict[str, object]]:
    """Return the rows of the Ultra-Scale Playbook's benchmark."""
    fixed = {
        **{"cluster": "ultrascale", "trainer": "nanotron", "family": "llama", "device_kinds": "H100"},
        **{"host_gbit": 3200, "host_nics": 8, "intra_gbit": 3600, "recompute": "none", "dtype": "bf16"},
    }
    rows = []
    for row in csv.DictReader(text.splitlines()):
        sharding = "zero1" if row["zero"] == "1" else "none"
        peak = f"{float(row['memory_gb']) * _GIB:.6g}" if row["memory_gb"] else ""
        rows.append(_row({**row, **fixed, "seq": row["sequence"], "sharding": sharding, "memory_gb": peak}))
    return rows


_MPT_SHARDINGS = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "none"}


def mpt(text: str) -> list[dict[str, object]]:
    """Return the rows of llm-foundry's benchmark; ALiBi stands for learned positions, which cost as little."""
    rows = []
    for row in csv.DictReader(text.splitlines()):
        kind = row["device"].upper().replace("_", "-")
        hopper = kind.startswith("H100")
        fixed = {
            **{"cluster": f"mpt {kind}", "trainer": "llm-foundry", "family": "gpt2", "tied_head": 1},
            **{"device_kinds": kind.removesuffix("-80GB") if hopper else kind, "devices_per_host": 8},
            **{"host_gbit": 3200 if hopper else 1600, "host_nics": 8, "intra_gbit": 3600 if hopper else 2400},
            **{"tp": 1, "pp": 1, "dp": row["devices"], "dtype": "bf16"},
        }
        more = {
            "seq": row["sequence"],
            "sharding": _MPT_SHARDINGS[row["sharding"]],
            "precision": "fp8" if "fp8" in row["precision"] else "",
        }
        rows.append(_row({**row, **fixed, **more}))
    return rows


# _SHAPE of each model, as its own configuration has it.
_BRIDGE_MODELS = {
    "LLAMA3_8B": (32, 4096, 32, 8, 14336, 128256),
    "LLAMA3_70B": (80, 8192, 64, 8, 28672, 128256),
    "LLAMA3.1_405B": (126, 16384, 128, 8, 53248, 128256),
    "GPT OSS 120B": (36, 2880, 64, 8, 2880, 201088, 128, 4, 2880),
    "Qwen3_30B_a3B": (48, 2048, 32, 4, 6144, 151936, 128, 8, 768),
}
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k", "expert_ffn")
# Devices of a host, Gbit/s of its network, and Gbit/s of NVLink each way, by the data sheets of the systems.
_BRIDGE_SYSTEMS = {
    "DGX-H100": (8, 3200, 3600),
    "DGX-B200": (8, 3200, 7200),
    "DGX-B300": (8, 6400, 7200),
    "DGX-GB200": (64, 25600, 7200),
    "DGX-GB300": (64, 51200, 7200),
}


def bridge(text: str) -> list[dict[str, object]]:
    """Return the pre-training rows of Megatron-Bridge's pages; of two precisions in one row the first."""
    rows = []
    for line in csv.DictReader(text.splitlines()):
        row = {name: cell.split(" (")[0] for name, cell in line.items()}
        model = row["model"]
        if not row["kind"].startswith("Pre-Training"):
            continue
        per_host, net, nvlink = _BRIDGE_SYSTEMS[row["system"]]
        devices, tp, pp, cp = (int(row[name]) for name in ("devices", "tp", "pp", "cp"))
        virtual, batch = int(row["vp"]) if row["vp"].isdigit() else 1, int(row["global_batch"])
        precision = row["precision"].lower()
        fixed = {
            **{"cluster": row["system"], "trainer": "megatron-lm", "family": "llama", "tied_head": 0, "model": model},
            **dict(zip(_SHAPE, _BRIDGE_MODELS[model])),
            **{"devices_per_host": min(per_host, devices), "device_kinds": row["system"].removeprefix("DGX-")},
            **{"host_gbit": net, "host_nics": min(per_host, devices), "intra_gbit": nvlink, "seq": row["sequence"]},
            **{"dp": devices // (tp * pp * cp), "context": cp, "expert": row["ep"]},
            **{"sequence_parallel": int(tp > 1), "sharding": "zero3" if row["fsdp"] not in ("", "0") else "zero1"},
            **{"recompute": "none", "dtype": "bf16", "precision": "fp8" if precision.startswith("fp8") else precision},
            **({"schedule": "interleaved_1f1b", "virtual_stages": virtual} if virtual > 1 and pp > 1 else {}),
        }
        seconds = batch * int(row["sequence"]) / (float(row["tokens_per_second_per_gpu"]) * devices)
        rows.append(_row({**row, **fixed, "seconds": f"{seconds:.6g}"}))
    return rows


def _row(values: dict[str, Any]) -> dict[str, object]:
    return {name: values.get(name, "") for name in trials.COLUMNS}


_READERS: dict[str, Callable[[str], list[dict[str, object]]]] = {
    "# GPUs": vtrain,
    "model,layers,hidden,heads,kv_heads,ffn,tied_head": ultrascale,
    "model,layers,hidden,heads,ffn,sequence,vocab,parameters": mpt,
    "release,kind,model,system": bridge,
}


def _reader(source: pathlib.Path, text: str) -> Callable[[str], list[dict[str, object]]] | None:
    """Return what reads a published file; None if it is none."""
    if source.suffix == ".json":
        return amp
    return next((read for start, read in _READERS.items() if text.lstrip("\ufeff").startswith(start)), None)


def _rows_of(source: pathlib.Path, text: str) -> list[dict[str, object]] | None:
    """Return the rows of a published file; None if it is none."""
    if (reader := _reader(source, text)) is None:
        return None
    try:
        rows = reader(text)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(f"{source} is none of the files that planner/runs/published.py names ({error!r})") from error
    if not rows:
        raise UserError(f"{source} has no rows; it is none of the files that planner/runs/published.py names")
    return rows


def read(source: str | pathlib.Path) -> list[Trial]:
    """Return the trials of a table, or of a published file.

    Raises:
        UserError: the file cannot be read or has a row that makes no sense.
    """
    try:
        rows = _rows_of(pathlib.Path(source), pathlib.Path(source).read_text())
    except (OSError, UnicodeDecodeError):
        rows = None  # what is wrong, the reader of tables says
    return trials.read(source) if rows is None else _trials(source, rows)


def _trials(source: str | pathlib.Path, rows: list[dict[str, object]]) -> list[Trial]:
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(trials.parse({name: str(value) for name, value in row.items()}))
        except UserError as error:
            raise UserError(f"{source}, trial {number}: {error}") from error
    return found


def convert(source: str | pathlib.Path, out: str | pathlib.Path, given: Mapping[str, str] | None = None) -> None:
    """Convert a published file to a table, or add the run of a log to one.

    Args:
        source: one of the files that this module names, or a log that planner.runs.logs knows.
        out: the CSV to write.
        given: cells of a log's row, which it does not say.

    Raises:
        UserError: the source cannot be read, is none of these files or has a trial that makes no sense, or the CSV
            cannot be written, or is no table.
    """
    try:
        text = pathlib.Path(source).read_text()
        rows = _rows_of(pathlib.Path(source), text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {source} ({error}); name one of the files of planner/runs/published.py"
        ) from error
    if rows is None:
        if (found := logs.read(text)) is None:
            raise UserError(
                f"{source} is none of the files that planner/runs/published.py names, and no log that logs.py does"
            )
        before = trials.read(out) if pathlib.Path(out).exists() else []
        rows = [logs.row(found, given or {})]
        _trials(source, rows)
        rows = [*(_row(one.columns) for one in before), *rows]
    elif given:
        raise UserError(f"{source} says all of its runs; leave {next(iter(given))}= out, which is for logs")
    else:
        _trials(source, rows)
    try:
        trials.write(out, rows)
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}); name a file in an existing folder") from error
