"""NCCL's topology of a host as XML, as NCCL_TOPO_DUMP_FILE makes it and NCCL_TOPO_FILE takes it.

    <system version="1">
      <cpu numaid="0" ...>
        <pci busid="0000:a1:00.0" class="0x060400" ...>
          <pci ...> <nic> <net name="mlx5_7" speed="200000" .../> </nic> </pci>
          <pci busid="0000:a4:00.0" ...>
            <gpu dev="0" sm="90" ...> <nvlink target="0000:f5:00.0" count="5" tclass="0x068000"/> </gpu>

Speeds are Mbit/s. NVLinks lead to another GPU (its bus address), or to a switch (class 0x068000), which joins all GPUs
that have links to it. Clouds ship such files for their virtual machines, whose drivers know less.
"""

import pathlib
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from paxtrain import files
from paxtrain.errors import UserError
from planner.given import units
from planner.given.host_topology import HostTopology, Nic

KIND = "NCCL topology"
_SWITCH = "0x068000"
_DEEPEST = 64  # elements inside each other
_MOST = 1024  # GPUs, or NICs

_Node = tuple[ElementTree.Element, tuple[ElementTree.Element, ...]]  # an element, and those around it


def read(path: str | pathlib.Path) -> HostTopology:
    """Return the topology of the host that an XML of NCCL describes.

    Raises:
        UserError: the file is no such XML, or has no GPUs, or speeds of another unit.
    """
    text = files.read_text(path, KIND)
    try:
        return _parse(str(path), text)
    except UserError as error:
        raise UserError(f"{KIND} {path}: {error}") from error


def _tree(text: str) -> ElementTree.Element:
    if "<!" in re.sub(r"<!--.*?-->", "", text, flags=re.S):
        raise UserError("it has declarations (<!...>), which NCCL does not write; give the file that NCCL has written")
    try:
        root = ElementTree.fromstring(re.sub(r"^\s*<\?xml[^>]*\?>", "", text).strip())
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"it is no whole XML ({error}); give what NCCL_TOPO_DUMP_FILE has written") from error
    if root.tag != "system":
        raise UserError(f"it begins with <{root.tag}>, and NCCL's topology with <system>; set NCCL_TOPO_DUMP_FILE")
    return root


def _walk(element: ElementTree.Element, around: tuple[ElementTree.Element, ...] = ()) -> Iterator[_Node]:
    """Yield all elements, each with those that it lies in."""
    if len(around) > _DEEPEST:
        raise UserError(f"elements lie more than {_DEEPEST} deep in each other; NCCL writes no such file")
    yield element, around
    for child in element:
        yield from _walk(child, (*around, element))


def _integer(element: ElementTree.Element, name: str) -> int:
    value = element.get(name, "")
    if not re.fullmatch(r"-?[0-9]{1,12}", value):
        raise UserError(f"<{element.tag}> has {name}={value!r}, which must be a whole number")
    return int(value)


def _parse(path: str, text: str) -> HostTopology:
    nodes = list(_walk(_tree(text)))
    found = [(element, around) for element, around in nodes if element.tag == "gpu"]
    gpus = sorted(found, key=lambda node: _integer(node[0], "dev"))
    nets = [(element, around) for element, around in nodes if element.tag == "net"]
    if not 1 <= len(gpus) <= _MOST or len(nets) > _MOST:
        raise UserError(f"it has {len(gpus)} <gpu> and {len(nets)} <net>; give the dump of a host with GPUs")
    if len({_integer(gpu, "dev") for gpu, _ in gpus}) < len(gpus):
        raise UserError("two <gpu> have the same dev, as if it were several hosts'; give the dump of one host")
    connected = [(net, around) for net, around in nets if _integer(net, "speed") > 0]
    nics = tuple(_nic(net) for net, _ in connected)
    near = tuple(_nearest(around, [outer for _, outer in connected]) for _, around in gpus)
    return HostTopology(path, len(gpus), _nvlinks(gpus), nics, near, tuple(_numa(around) for _, around in gpus))


def _nic(net: ElementTree.Element) -> Nic:
    name, speed = net.get("name", "?"), _integer(net, "speed")
    gbit = speed / 1000  # NCCL's unit is Mbit/s
    if gbit < 1:
        raise UserError(f"{name} has speed {speed}, which is {gbit:g} Gbit/s in NCCL's Mbit/s; is it in another unit?")
    return Nic(name, units.nic_rate(f"the speed of {name}", gbit))


def _numa(around: tuple[ElementTree.Element, ...]) -> str:
    return next((cpu.get("numaid", "?") for cpu in around if cpu.tag == "cpu"), "?")


def _distance(gpu: tuple[ElementTree.Element, ...], net: tuple[ElementTree.Element, ...]) -> int:
    """Return the bridges on the way from a GPU to a NIC; -1 if it leaves PCIe."""
    shared = sum(1 for a, b in zip(gpu, net) if a is b)
    if gpu[shared - 1].tag != "pci":
        return -1
    return sum(element.tag == "pci" for element in (*gpu[shared:], *net[shared:]))


def _nearest(gpu: tuple[ElementTree.Element, ...], nets: list[tuple[ElementTree.Element, ...]]) -> tuple[int, ...]:
    """Return the indices of the nearest NICs; () if all are behind the CPU."""
    distances = [_distance(gpu, net) for net in nets]
    least = min((distance for distance in distances if distance >= 0), default=None)
    return tuple(i for i, distance in enumerate(distances) if distance == least) if least is not None else ()


def _nvlinks(gpus: list[_Node]) -> int:
    """Return the NVLinks over which two GPUs reach each other, of the pair with the fewest."""
    to_switches, direct = [], []
    for gpu, around in gpus:
        own = around[-1].get("busid", "")
        links = [(link.get("target", ""), _integer(link, "count"), link.get("tclass")) for link in gpu.iter("nvlink")]
        to_switches.append(sum(count for _, count, kind in links if kind == _SWITCH))
        direct.append((own, {target.lower(): count for target, count, kind in links if kind != _SWITCH}))
    if min(to_switches) > 0:
        return min(to_switches)
    pairs = [reached.get(own.lower(), 0) for i, (own, _) in enumerate(direct) for _, reached in direct[:i]]
    return min(pairs, default=0)
