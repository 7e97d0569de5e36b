"""The logs of nccl-tests: all_reduce_perf, all_gather_perf, reduce_scatter_perf and sendrecv_perf.

A log has a line for each rank and a row for each size, with times in us and bandwidths in GB/s (1e9 bytes/s):

    #  Rank  0 Group  0 Pid 295203 on    node005 device  0 [0x18] NVIDIA H100 80GB HBM3
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
       134217728      33554432     float     sum      -1    613.3  218.85  382.99      0    614.3  218.48  382.34      0

Older versions print no group, no root, and an error instead of the number of wrong values. Launchers and terminals put
something before each line, and NCCL_DEBUG=INFO puts lines of its own between them.

algbw is size over time. busbw is algbw times what a ring sends of each byte, which is 2(n-1)/n for an all-reduce over n
ranks, (n-1)/n for an all-gather and a reduce-scatter, whose size is that of the whole array, and 1 for sendrecv, in
which each rank sends to the next one and receives from the one before (nccl-tests, doc/PERFORMANCE.md).
"""

import dataclasses
import math
import pathlib
import re

import numpy as np

from paxtrain import files
from paxtrain.errors import UserError

KIND = "nccl-tests log"
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s+(.+)", re.A
)
_TYPES = r"(?:u?int(?:8|32|64)|half|float|double|bfloat16|f8e4m3|f8e5m2|fp8_e4m3|fp8_e5m2)"
_NUMBER = r"(-?\d{1,30}(?:\.\d{0,30})?(?:e[+-]?\d{1,4})?|-?nan|-?inf)"
_TIMES = rf"{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+(\S+)"
_BEGIN = re.compile(rf"(?:^|[\s:>|\]])(\d{{1,18}})\s+(\d+)\s+{_TYPES}\b", re.A)  # a size, a count and a type
_LIKE_A_ROW = re.compile(rf"(?:\s|^){_TYPES}\s+\w+\s+\S*[0-9]|{_BEGIN.pattern}", re.A)
_ROW = re.compile(rf"{_BEGIN.pattern}\s+(\w+)(?:\s+(-?\d{{1,9}}))?\s+{_TIMES}\s+{_TIMES}\s*$", re.A)
_COMMAS = re.compile(r"\s\d+,\d+\s+\d+,\d+\s")
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)")
_END = "Avg bus bandwidth"
TESTS = ("all_reduce", "all_gather", "reduce_scatter", "sendrecv")
_OTHERS = ("alltoall", "alltoallv", "broadcast", "gather", "hypercube", "reduce", "scatter")
_NAME = re.compile(rf"(?<![A-Za-z])({'|'.join((*TESTS, *_OTHERS))})_perf")
# Half of the last printed digit, of times and of bandwidths.
_LAST_DIGIT = 0.006


@dataclasses.dataclass(frozen=True, eq=False)
class NcclLog:
    """The log of one run.

    Attributes:
        path: its file.
        test: "all_reduce", "all_gather", "reduce_scatter" or "sendrecv".
        hosts: host of each rank, [n].
        devices: name of each rank's device, as the driver reports it, [n].
        sizes: bytes of the sizes, rising, [K].
        seconds: quicker one of the out-of-place and the in-place time, [K].
        busbw: what the log calls bus bandwidth at that time, in bytes/s, [K].
    """

    path: str
    test: str
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    sizes: np.ndarray
    seconds: np.ndarray
    busbw: np.ndarray

    @property
    def ranks(self) -> int:
        """Return n."""
        return len(self.hosts)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the hosts once each, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.hosts))


def factor(test: str, ranks: int) -> float:
    """Return busbw over algbw: what a ring over the ranks sends through each link of each byte of the size."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "sendrecv": 1.0}.get(test, (ranks - 1) / ranks)


@dataclasses.dataclass(frozen=True)
class _TimedSize:
    """A row of the table: bytes, seconds, and algbw and busbw in bytes/s."""

    size: int
    root: int
    seconds: float
    algbw: float
    busbw: float


def read(path: str | pathlib.Path) -> NcclLog:
    """Return a log.

    Raises:
        UserError: the file is no whole log of one of the four tests, or its figures contradict each other.
    """
    text = files.read_text(path, KIND)
    try:
        return _parse(str(path), text)
    except UserError as error:
        raise UserError(f"{KIND} {path}: {error}") from error


def _parse(path: str, text: str) -> NcclLog:
    lines = text.splitlines()
    hosts, devices = _ranks(lines)
    rows = _rows(lines)
    _check_end(text)
    test = _test(path, text, rows, len(hosts))
    _check_bandwidths(rows, factor(test, len(hosts)), test, len(hosts))
    best: dict[int, _TimedSize] = {}
    for row in rows:  # a size may come several times
        if row.size not in best or row.seconds < best[row.size].seconds:
            best[row.size] = row
    found = [best[size] for size in sorted(best)]
    sizes = np.array([row.size for row in found], float)
    seconds, busbw = np.array([row.seconds for row in found]), np.array([row.busbw for row in found])
    return NcclLog(path, test, hosts, devices, sizes, seconds, busbw)


def _ranks(lines: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return host and device of each rank."""
    found: dict[int, tuple[str, str]] = {}
    for line in lines:
        match = _RANK.search(line)
        if match is None:
            continue
        rank, host, device = int(match[1]), match[2], match[4].strip()
        if rank in found:
            raise UserError(
                f"rank {rank} comes twice, on {found[rank][0]} and on {host}; give each run a file, and if one run of "
                "several processes prints that, build nccl-tests with MPI=1"
            )
        found[rank] = host, device
    if not found:
        raise UserError('there are no lines "#  Rank  0 ... on HOST device  0 ..."; give all that the test has printed')
    if sorted(found) != list(range(len(found))):
        missing = next(rank for rank in range(len(found)) if rank not in found)
        raise UserError(f"the line of rank {missing} is missing; give all that the test has printed")
    if len(found) == 1:
        raise UserError("there is one rank, which sends nothing; run the test over two devices or more")
    ranks = [found[rank] for rank in range(len(found))]
    return tuple(host for host, _ in ranks), tuple(device for _, device in ranks)


def _rows(lines: list[str]) -> list[_TimedSize]:
    found = []
    for line in lines:
        if line.lstrip().startswith("#") or _LIKE_A_ROW.search(line) is None:
            continue
        if _COMMAS.search(line):
            raise UserError(
                "the table has decimal commas; give the log as the test has printed it, with decimal points"
            )
        match = _ROW.search(line)
        if match is None:
            raise UserError(
                f"the row {line.strip()[:60]!r} is cut short or mixed with other output; give the whole log"
            )
        found.append(_row(match))
    if not found:
        raise UserError("there is no row of times; give all that the test has printed")
    return found


def _row(match: re.Match) -> _TimedSize:
    """Return a row with the quicker one of its two times."""
    size, root = int(match[1]), int(match[4] or -1)
    for wrong in (match[8], match[12]):
        if wrong.isdecimal() and wrong.strip("0"):
            raise UserError(f"the row of {size:,} bytes has {wrong:.20} wrong values; NCCL's times mean nothing then")
    values = [[float(match[i]) for i in range(first, first + 3)] for first in (5, 9)]
    for time, algbw, busbw in values:
        if not all(map(math.isfinite, (time, algbw, busbw))) or time <= 0 or min(algbw, busbw) < 0:
            raise UserError(
                f"the row of {size:,} bytes has a time of {time:g} us and {algbw:g} GB/s; run the test again"
            )
    time, algbw, busbw = min(values)
    return _TimedSize(size, root, time * 1e-6, algbw * 1e9, busbw * 1e9)


def _check_end(text: str) -> None:
    bounds = _OUT_OF_BOUNDS.search(text)
    if bounds and bounds[1].strip("0"):
        raise UserError(
            f"{bounds[1]:.20} values were out of bounds; NCCL computed wrong results, and its times mean nothing"
        )
    if _END not in text:
        raise UserError(f'the log is cut short: it has no line "# {_END}"; give all that the test has printed')


def _test(path: str, text: str, rows: list[_TimedSize], ranks: int) -> str:
    """Return the name of the test, which the log, its command line, its file's name or its bandwidths tell."""
    names = _NAME.findall(text) or _NAME.findall(pathlib.Path(path).name)
    if names:
        if names[0] not in TESTS:
            raise UserError(
                f"{names[0]}_perf is not read here; give the log of {', '.join(f'{t}_perf' for t in TESTS)}"
            )
        return names[0]
    known = [row for row in rows if row.busbw > 1e9]
    ratio = float(np.median([row.busbw / row.algbw for row in known])) if known else math.nan
    if any(row.root >= 0 for row in rows) or not math.isclose(ratio, factor("all_reduce", ranks), rel_tol=0.02):
        raise UserError("nothing says which test it is; name the file like the test, such as all_gather_perf.log")
    if ranks == 2:
        raise UserError("with two ranks all-reduce and sendrecv look alike; name the file all_reduce_perf.log or so")
    return "all_reduce"


def _check_bandwidths(rows: list[_TimedSize], expected: float, test: str, ranks: int) -> None:
    """Require that the bandwidths are those of the times, in GB/s, and of the test."""
    for row in rows:
        algbw = row.size / row.seconds
        if abs(row.algbw - algbw) > 0.01 * algbw + _LAST_DIGIT * 1e9:
            times = row.algbw / algbw
            hint = "in Gbit/s" if 7.5 < times < 8.5 else "of another unit or of other times"
            raise UserError(
                f"the row of {row.size:,} bytes says {row.algbw / 1e9:g} GB/s, but its size over its time is "
                f"{algbw / 1e9:.4g} GB/s; the column seems {hint}, so give the log as it was printed"
            )
        if abs(row.busbw - expected * algbw) > 0.01 * row.busbw + _LAST_DIGIT * 1e9:
            raise UserError(
                f"the row of {row.size:,} bytes has a busbw of {row.busbw / 1e9:g} GB/s, but {test} over {ranks} ranks "
                f"makes {expected * algbw / 1e9:.4g} of its algbw; is it the log of another test?"
            )
