"""The matrix that `nvidia-smi topo -m` prints.

            GPU0    GPU1    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID
    GPU0     X      NV18    PIX     SYS     0-55,112-167    0               N/A
    ...
    NIC Legend:
      NIC0: mlx5_0

NV# is a connection over # NVLinks. The others are over PCIe, from near to far: PIX (at most one bridge), PXB (several
bridges), PHB (a host bridge, typically the CPU), NODE (several host bridges of a NUMA node), SYS (across NUMA nodes).
Older drivers print the NICs' own names (mlx5_0) in place of NIC0. Between columns are tabs or blanks.
"""

import pathlib
import re

from paxtrain import files
from paxtrain.errors import UserError
from planner.given.host_topology import HostTopology, Nic

KIND = "output of nvidia-smi topo -m"
_MOST = 1024  # rows or columns
_NEAR = ("PIX", "PXB", "PHB")  # from near to far
_CELL = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS")
_HEADER = re.compile(r"^\s*GPU0\s+(?!X\b)\S")
_LEGEND = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)\s*$", re.M)


def read(path: str | pathlib.Path) -> HostTopology:
    """Return the topology of the host on which `nvidia-smi topo -m` was run.

    Raises:
        UserError: the file holds no whole matrix, or one that is not symmetric.
    """
    text = files.read_text(path, KIND)
    try:
        return _parse(str(path), text)
    except UserError as error:
        raise UserError(f"{KIND} {path}: {error}") from error


def _header(lines: list[str]) -> tuple[int, list[str]]:
    """Return the number of the line with the names of the columns, and those names."""
    for number, line in enumerate(lines):
        if _HEADER.match(line):
            names = line.partition("CPU Affinity")[0].split()
            if len(names) <= _MOST:
                return number, names
    raise UserError("there is no line with the columns GPU0 and so on; give all that `nvidia-smi topo -m` prints")


def _cells(line: str, columns: int, name: str) -> list[str]:
    """Return the cells of a row."""
    cells = line.split()[1 : columns + 1]
    bad = next((cell for cell in cells if not _CELL.fullmatch(cell)), None)
    if bad is not None or len(cells) < columns:
        what = f"has {bad!r}" if bad is not None else f"has {len(cells)} of {columns} connections"
        raise UserError(f"the row of {name} {what}; give the matrix as it was printed, with whole lines")
    return cells


def _parse(path: str, text: str) -> HostTopology:
    lines = text.splitlines()
    first, names = _header(lines)
    gpus = [name for name in names if re.fullmatch(r"GPU\d+", name)]
    if names[: len(gpus)] != [f"GPU{i}" for i in range(len(gpus))] or not gpus:
        raise UserError(f"the columns begin with {' '.join(names[:4])}; they must be GPU0, GPU1 and so on, each once")
    rows: dict[str, str] = {}
    for line in lines[first + 1 :]:
        name = line.split(maxsplit=1)[0] if line.split() else ""
        if name in names and name not in rows:
            rows[name] = line
    missing = [name for name in gpus if name not in rows]
    if missing:
        raise UserError(f"the row of {missing[0]} is missing; give all that `nvidia-smi topo -m` prints")
    cells = [_cells(rows[name], len(names), name) for name in gpus]
    count = len(gpus)
    for i in range(count):
        for j in range(count):
            if cells[i][j] != cells[j][i] or (cells[i][j] == "X") != (i == j):
                raise UserError(
                    f"GPU{i} reaches GPU{j} by {cells[i][j]} and is reached by {cells[j][i]}; give all of the matrix"
                )
    legend = dict(_LEGEND.findall(text))
    nics = tuple(Nic(legend.get(name, name)) for name in names[count:])
    pairs = [cells[i][j] for i in range(count) for j in range(i)]
    return HostTopology(
        path,
        count,
        min((int(cell[2:]) if cell.startswith("NV") else 0 for cell in pairs), default=0),
        nics,
        tuple(_nearest(row[count:]) for row in cells),
        _numa([rows[name] for name in gpus], len(names)),
    )


def _nearest(cells: list[str]) -> tuple[int, ...]:
    """Return the indices of the nearest NICs; () if all are as far as across host bridges."""
    best = next((kind for kind in _NEAR if kind in cells), None)
    return tuple(i for i, cell in enumerate(cells) if cell == best) if best else ()


def _numa(rows: list[str], columns: int) -> tuple[str, ...]:
    """Return the NUMA node of each GPU, which stands behind its cells and its cores."""
    found = [row.split()[columns + 2 : columns + 3] for row in rows]
    return tuple(value[0] for value in found) if all(found) else ()
