"""Published measurements converted to the table of planner.fit.trials.

amp_homogeneous.json     52 trials of AMP (Li et al., NeurIPS 2022) on 4 hosts x 4 T4; failed ones become rows that
                         were not run. AMP counts 30 layers: embedding, a no-op, 24 transformer layers, two no-ops,
                         the head and a no-op; stage_layers has the transformer layers among them.
vtrain_single_node.csv   1,440 iteration times of vTrain (Bang et al., MICRO 2024) on one host of A100 with NVLink
                         (300 GB/s each way), full recompute, vocabulary 51,200, fp16.
"""

import csv
import json
import pathlib

from paxtrain.errors import UserError
from planner.fit import trials

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


def convert(source: str | pathlib.Path, out: str | pathlib.Path) -> None:
    """Convert a published file to a table.

    Args:
        source: one of the files that this module names.
        out: the CSV to write.

    Raises:
        UserError: the source cannot be read, is none of these files or has a trial that makes no sense, or the CSV
            cannot be written.
    """
    source = pathlib.Path(source)
    try:
        text = source.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {source} ({error}); name one of the files of planner/fit/published.py") from error
    try:
        rows = amp(text) if source.suffix == ".json" else vtrain(text)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(f"{source} is none of the files that planner/fit/published.py names ({error!r})") from error
    for number, row in enumerate(rows, 1):
        try:
            trials.parse({name: str(value) for name, value in row.items()})
        except UserError as error:
            raise UserError(f"{source}, trial {number}: {error}") from error
    if not rows:
        raise UserError(f"{source} has no rows; it is none of the files that planner/fit/published.py names")
    try:
        trials.write(out, rows)
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}); name a file in an existing folder") from error
