"""Make a cluster's file of what you have, without measuring: logs of nccl-tests, topologies, traces of one GPU.

    python -m planner.cluster_of --nccl_tests=one_host.log,two_hosts.log --topo=topo.txt --out=cluster.json

It prints what it took from each file, in GB/s and Gbit/s, and what it assumed. docs/measure.md says how to get the
files.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from paxtrain import files, tables
from paxtrain.command_line import group, run
from paxtrain.errors import UserError
from planner.given import joining, links, nccl_tests, nccl_xml, slurm_topology, topo_matrix

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
    with group("What the files do not say"):
        flags.DEFINE_string("hosts", "", "Number of hosts, or their names, as node[01-16].")
        flags.DEFINE_string("device", "", "Device kind, such as h100, if the files name none that is known.")
        flags.DEFINE_integer("nics", 0, "NICs of a host; 0: as the files tell.", 0, 1024)
        flags.DEFINE_float("nic_gbit", 0, "Gbit/s of a NIC; 0: as the files tell.", 0)


def _given(f: flags.FlagValues) -> joining.Given:
    """Return what the flags name, read."""
    logs = tuple(links.fit(nccl_tests.read(path)) for path in f.nccl_tests)
    topologies = [topo_matrix.read(f.topo)] if f.topo else []
    topologies += [nccl_xml.read(f.nccl_xml)] if f.nccl_xml else []
    slurm = slurm_topology.read(f.slurm_topology) if f.slurm_topology else None
    if not (logs or topologies):
        raise UserError(f"no log and no topology of a host was given; {HINT}")
    return joining.Given(logs, tuple(topologies), slurm, f.hosts, f.device, f.nics, f.nic_gbit, f.name)


def main(argv: Sequence[str]) -> None:
    """Read the files, tell what they say, and write the cluster's file."""
    f = flags.FLAGS
    out = pathlib.Path(f.out)
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out={out} must be a file in a folder that is there")
    given = _given(f)
    values, taken = joining.join(given)
    with files.writable(out, "name another file with --out"):
        files.write(out, json.dumps(values, indent=1) + "\n")
    print(tables.table([*joining.told(given), *taken, ("written", str(out))]))


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
