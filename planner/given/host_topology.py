"""What a host's topology says: its devices, the NVLinks between them, and which NICs are near which device."""

import dataclasses
from collections.abc import Sequence

from planner.given import units

# Bytes/s each way of one NVLink, by CUDA compute capability: NVIDIA's data sheets of V100 (6 links, 300 GB/s both ways
# together), A100 (12, 600), H100 (18, 900) and B200 (18, 1,800); its white papers of TU102 (2, 100) and GA102 (4,
# 112.5).
NVLINK = {(7, 0): 25e9, (7, 5): 25e9, (8, 0): 25e9, (8, 6): 14.0625e9, (9, 0): 25e9, (10, 0): 50e9}


@dataclasses.dataclass(frozen=True)
class Nic:
    """A NIC, or a port of one that is a network device of its own.

    Attributes:
        name: its name, such as mlx5_0.
        bandwidth: bytes/s; 0: not known.
    """

    name: str
    bandwidth: float = 0.0


@dataclasses.dataclass(frozen=True)
class HostTopology:
    """The topology of a host.

    Attributes:
        path: its file.
        devices: number of GPUs.
        nvlinks: NVLinks over which two GPUs reach each other, of the pair with the fewest; 0: some reach each other
            over PCIe only.
        nics: all NICs.
        near: indices of the NICs that are nearest to each GPU, [devices]; () if none is nearer than across the CPU.
        numa: NUMA node of each GPU, as the file writes it; () if it does not.
    """

    path: str
    devices: int
    nvlinks: int
    nics: tuple[Nic, ...]
    near: tuple[tuple[int, ...], ...]
    numa: tuple[str, ...] = ()

    def nvlink_rate(self, capability: tuple[int, int]) -> float:
        """Return the bytes/s each way between two GPUs over NVLink; 0: there is none, or its rate is not known.

        Args:
            capability: CUDA compute capability of the GPUs.
        """
        return self.nvlinks * NVLINK.get(capability, 0.0)


@dataclasses.dataclass(frozen=True)
class HostNics:
    """How the devices of a host share its NICs.

    Attributes:
        count: flows that leave the host at full speed; 0: the file has no NICs.
        rails: whether device i uses NIC i * count // devices.
        ports: NICs that one flow has to itself.
        bandwidth: bytes/s of such a flow; 0: not known.
        said: sentences on it.
    """

    count: int
    rails: bool
    ports: int
    bandwidth: float
    said: tuple[str, ...]


def _in_order(groups: Sequence[Sequence[int]], devices: int) -> bool:
    """Return whether the groups are equally many devices in a row each."""
    return [device for group in groups for device in group] == list(range(devices)) and len({*map(len, groups)}) == 1


def host_nics(topology: HostTopology) -> HostNics:
    """Return how the devices share the NICs: as rails if each device, or each group of neighbors, has its own."""
    used = sorted({nic for near in topology.near for nic in near})
    if not used:
        every = len(topology.nics)
        said = (f"{every} NICs, of which none is nearer to one device than to others",) if every else ()
        rates = [nic.bandwidth for nic in topology.nics]
        return HostNics(min(every, topology.devices), False, 1, min(rates, default=0.0), said)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, near in enumerate(topology.near):
        groups.setdefault(near, []).append(device)
    names = [", ".join(topology.nics[nic].name for nic in near) or "none" for near in topology.near]
    left = [nic.name for i, nic in enumerate(topology.nics) if i not in used]
    lines = [f"nearest NICs by device: {'; '.join(names)}" + (f" (near none: {', '.join(left)})" if left else "")]
    bandwidth = min(topology.nics[nic].bandwidth for nic in used)
    sizes = {len(near) for near in groups}
    apart = sum(map(len, groups)) == len(used) and len(sizes) == 1
    if not (apart and _in_order(list(groups.values()), topology.devices)):
        lines.append("the devices have not each their own NICs, so these are no rails")
        return HostNics(min(len(used), topology.devices), False, 1, bandwidth, tuple(lines))
    nics, devices = sizes.pop(), topology.devices // len(groups)
    if nics % devices == 0:
        ports = nics // devices
        return HostNics(topology.devices, len(groups) > 1, ports, ports * bandwidth, tuple(lines))
    rails = devices % nics == 0 and len(groups) > 1
    return HostNics(min(len(used), topology.devices), rails, 1, bandwidth, tuple(lines))


def told(topology: HostTopology) -> list[tuple[str, str]]:
    """Return what the file says, as rows of a table."""
    links = f"{topology.nvlinks} NVLinks to each other" if topology.nvlinks else "no NVLink between all of them"
    numa = f", on NUMA nodes {', '.join(topology.numa)}" if topology.numa else ""
    nics = host_nics(topology)
    rows = [(topology.path, f"{topology.devices} devices with {links}{numa}")]
    rows += [("", line) for line in nics.said]
    if nics.bandwidth:
        rows.append(("", f"a flow's NIC{'s' if nics.ports > 1 else ''}: {units.rate(nics.bandwidth)}"))
    return rows
