"""Make a cluster's file of what you have, without measuring: logs of nccl-tests, topologies, traces of one GPU.

    python -m planner.cluster_of --nccl_tests=one_host.log,two_hosts.log --topo=topo.txt --out=cluster.json

It prints what it took from each file, in GB/s and Gbit/s, and what it assumed. docs/measure.md says how to get the
files.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from paxtrain import files, tables
from paxtrain import flags as shared_flags
from paxtrain.command_line import group, run
from paxtrain.config import from_dict
from paxtrain.errors import UserError, printable, whole
from planner.given import joining, links, nccl_tests, nccl_xml, slurm_topology, topo_matrix
from planner.given.hardware import Given
from planner.traces import compute_row
from planner.traces.compute_row import TraceOptions

HINT = "give files with flags, as --nccl_tests=all_reduce_perf.log"


def define_flags() -> None:
    """Define the flags of this main."""
    flags.DEFINE_string("out", "cluster.json", "The cluster file to write.")
    flags.DEFINE_string("name", "cluster", "The cluster's name.")
    with group("Files"):
        flags.DEFINE_list(
            "nccl_tests", [], "Logs of all_reduce_perf, all_gather_perf, reduce_scatter_perf, sendrecv_perf."
        )
        flags.DEFINE_string("topo", "", "What `nvidia-smi topo -m` prints on a host.")
        flags.DEFINE_string("nccl_xml", "", "What NCCL_TOPO_DUMP_FILE has written on a host.")
        flags.DEFINE_string("slurm_topology", "", "SLURM's topology.conf, or what `scontrol show topology` prints.")
        flags.DEFINE_list("trace", [], "Traces of one GPU: torch.profiler's or jax's JSON, or nsys's sqlite export.")
    with group("What the files do not say"):
        flags.DEFINE_string("hosts", "", "Number of hosts, or their names, as node[01-16].")
        flags.DEFINE_string("device", "", "Device kind, such as h100, if the files name none that is known.")
        flags.DEFINE_integer("nics", 0, "NICs of a host; 0: as the files tell.", 0, 1024)
        flags.DEFINE_float("nic_gbit", 0, "Gbit/s of a NIC; 0: as the files tell.", 0)
    with group("What the traces do not say"):
        flags.DEFINE_list("micro_batch", [], "Sequences of a micro-batch: one number, or one for each trace.")
        flags.DEFINE_integer("tensor", 1, "Tensor-parallel size of the traced run.", 1)
        flags.DEFINE_integer("layers", 0, "Layers on the traced GPU; 0: all of the model.", 0)
        flags.DEFINE_integer("passes", 0, "Micro-batches whose F and B a trace has; 0: as it tells.", 0)
        flags.DEFINE_bool("layers_only", False, "The traces are of layers alone, without embedding, head and loss.")
        shared_flags.define_config("config", None, "The traced model: a file, or the name of one in configs/.")


def _given(f: flags.FlagValues) -> Given:
    """Return what the flags name, read."""
    logs = tuple(links.fit(nccl_tests.read(path)) for path in f.nccl_tests)
    topologies = [topo_matrix.read(f.topo)] if f.topo else []
    topologies += [nccl_xml.read(f.nccl_xml)] if f.nccl_xml else []
    slurm = slurm_topology.read(f.slurm_topology) if f.slurm_topology else None
    if not (logs or topologies):
        raise UserError(f"no log and no topology of a host was given; {HINT}")
    return Given(logs, tuple(topologies), slurm, f.hosts, f.device, f.nics, f.nic_gbit, f.name)


def _compute(f: flags.FlagValues) -> tuple[list[dict[str, Any]], joining.TableRows]:
    """Return the rows of compute that the traces make, and what they say."""
    if not f.trace:
        return [], []
    sizes = [whole(value.strip()) for value in f.micro_batch]
    if not (sizes and all(sizes)) or len(sizes) not in (1, len(f.trace)):
        raise UserError(
            f"--micro_batch must be the sequences of a micro-batch, one number or one for each of the {len(f.trace)} "
            f"traces, got {','.join(f.micro_batch)!r}"
        )
    if f.config is None:
        raise UserError("--trace needs the model that was traced; name it with --config, such as --config=gpt_8b")
    config = from_dict(f.config)
    rows, told = [], []
    for path, size in zip(f.trace, sizes * (len(f.trace) if len(sizes) == 1 else 1)):
        options = TraceOptions(config, size or 0, f.tensor, f.layers, f.passes, f.layers_only, f.device)
        row, lines = compute_row.row(compute_row.read(path), options)
        rows.append(row)
        told += lines
    return rows, told


def main(argv: Sequence[str]) -> None:
    """Read the files, tell what they say, and write the cluster's file."""
    f = flags.FLAGS
    out = pathlib.Path(f.out)
    with files.writable(out, "name another file with --out"):
        if out.is_dir() or not out.parent.is_dir():
            raise UserError(f"--out={out} must be a file in a folder that is there")
    given = _given(f)
    compute, traced = _compute(f)
    values, taken = joining.join(given, compute)
    with files.writable(out, "name another file with --out"):
        files.write(out, json.dumps(values, indent=1) + "\n")
    rows = [*joining.told(given), *traced, *taken, ("written", str(out))]
    print(tables.table([(printable(what), printable(text)) for what, text in rows]))


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
