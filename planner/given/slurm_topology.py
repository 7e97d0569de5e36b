"""SLURM's topology.conf, and what `scontrol show topology` prints: which hosts share a leaf switch or a block.

    SwitchName=leaf1 Nodes=node[01-08]            topology/tree: a switch of hosts,
    SwitchName=spine Switches=leaf[1-2]           and one of switches
    BlockName=block1 Nodes=node[1-32]             topology/block: a block of hosts
    BlockSizes=30,120

Names of parameters are case insensitive, and # begins a comment
(https://slurm.schedmd.com/topology.conf.html). SLURM's LinkSpeed has no unit and is not used, so rates of links must
come from elsewhere. If hosts have a NIC at each of several leaf switches, as rails have, those with the same switches
are one rack.
"""

import dataclasses
import pathlib
import re

from paxtrain import files
from paxtrain.errors import UserError
from planner.cluster import hostlist

KIND = "SLURM topology"
_PARAMETER = re.compile(r"([A-Za-z]+)=(\S*)")


@dataclasses.dataclass(frozen=True)
class SlurmTopology:
    """The hosts of a cluster by their leaf switches or blocks.

    Attributes:
        path: its file.
        racks: name of the switch or block (of several: joined by +) of each host.
        blocks: whether they are blocks.
    """

    path: str
    racks: dict[str, str]
    blocks: bool

    def of(self, hosts: tuple[str, ...]) -> list[str]:
        """Return the rack of each of some hosts.

        Raises:
            UserError: a host is in none.
        """
        missing = [host for host in hosts if host not in self.racks]
        if missing:
            raise UserError(
                f"{KIND} {self.path} has no host {missing[0]}; it has {', '.join(list(self.racks)[:4])}, ..."
            )
        return [self.racks[host] for host in hosts]


def read(path: str | pathlib.Path) -> SlurmTopology:
    """Return the racks that a file describes.

    Raises:
        UserError: the file names no hosts, or its lines contradict each other.
    """
    text = files.read_text(path, KIND)
    try:
        return _parse(str(path), text)
    except UserError as error:
        raise UserError(f"{KIND} {path}: {error}") from error


def _parse(path: str, text: str) -> SlurmTopology:
    leaves: dict[str, list[str]] = {}  # hosts of each
    blocks: dict[str, list[str]] = {}
    for line in text.replace("\\\n", " ").replace("\\\r\n", " ").splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        values = {name.lower(): value for name, value in _PARAMETER.findall(line)}
        kind = next((kind for kind in ("switchname", "blockname", "blocksizes") if kind in values), None)
        if kind is None:
            raise UserError(f"the line {line[:60]!r} has no SwitchName=, BlockName= or BlockSizes=; give topology.conf")
        if kind == "blocksizes" or (kind == "switchname" and values.get("switches")):
            continue  # `scontrol show topology` lists the hosts below switches of switches, too
        name, hosts = values[kind], hostlist.expand([values.get("nodes", "")])
        into = blocks if kind == "blockname" else leaves
        if not name or not hosts or name in into:
            raise UserError(f"the line {line[:60]!r} must have a name of its own and Nodes=, as in leaf1 Nodes=n[1-8]")
        into[name] = hosts
    if not leaves and not blocks:
        raise UserError("it names no switch and no block with Nodes=; give the topology.conf of the cluster")
    if leaves and blocks:
        raise UserError("it has both SwitchName= and BlockName=; give those of one topology")
    found: dict[str, list[str]] = {}
    for name, hosts in (leaves or blocks).items():
        for host in hosts:
            found.setdefault(host, []).append(name)
    return SlurmTopology(path, {host: "+".join(names) for host, names in found.items()}, bool(blocks))


def told(topology: SlurmTopology) -> list[tuple[str, str]]:
    """Return what the file says, as rows of a table."""
    racks: dict[str, int] = {}
    for rack in topology.racks.values():
        racks[rack] = racks.get(rack, 0) + 1
    kind = "blocks" if topology.blocks else "leaf switches"
    some = ", ".join(f"{name} ({count})" for name, count in list(racks.items())[:4]) + (
        ", ..." if len(racks) > 4 else ""
    )
    return [(topology.path, f"{len(topology.racks):,} hosts at {len(racks):,} {kind}: {some}")]
