"""The links of a cluster from logs of nccl-tests: latency of a hop and bandwidth of a flow, inside and between hosts.

A ring over n ranks on h hosts takes for an all-reduce of S bytes

    t = 2 (n-1) alpha + 2 (n-1)/n S / B

and half of both for an all-gather or a reduce-scatter; sendrecv takes alpha + S/B. Of the 2 (n-1) steps, 2 (h-1) count
as hops between hosts, as in NCCL's own estimate (nccl, src/graph/tuning.cc, nInterSteps). The line t = a + b S is
fitted by least squares of the relative errors: b over the sizes from 1 MiB on, a over all sizes. `planner.profile` has
messages of such sizes, too. If there are no sizes so small that they show a, alpha is not known.

B is what a ring of that time would send through each link. Between hosts all NICs of a host carry it together. NCCL may
use trees, or switches that add (NVLink SHARP, InfiniBand SHARP), which send fewer bytes through the links than a ring.
Then B is above what the link does, and predicts the collective, but not a single flow.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.link_fit import fit_line
from planner.given import nccl_tests, units
from planner.given.nccl_tests import NcclLog

_LARGE = 1 << 20  # bytes from which a message shows bandwidth
_SMALL = 1 << 16  # bytes up to which a message shows latency
_MISFIT = 0.3  # median relative error of a line that says little
# Tests by how well they show a link inside hosts, which collectives use most, and one flow between hosts.
_INSIDE = ("all_reduce", "reduce_scatter", "all_gather", "sendrecv")
_BETWEEN = ("sendrecv", "reduce_scatter", "all_gather", "all_reduce")
# A hop inside hosts over one between them if only logs between hosts are given: that of configs/clusters.
_INSIDE_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class FittedLog:
    """A log and its line.

    Attributes:
        log: the log.
        start: a, in seconds; None: no size is small enough to show it.
        bandwidth: B, in bytes/s.
        error: median relative error of the line.
        worst: largest relative error of the line.
    """

    log: NcclLog
    start: float | None
    bandwidth: float
    error: float
    worst: float

    @property
    def hops(self) -> tuple[int, int]:
        """Return the steps of the ring inside hosts and between them."""
        ranks, hosts = self.log.ranks, len(self.log.names)
        if self.log.test == "sendrecv":
            return (1, 0) if hosts == 1 else (0, 1)
        times = 2 if self.log.test == "all_reduce" else 1
        return times * (ranks - hosts), times * (hosts - 1)

    @property
    def devices(self) -> int:
        """Return the devices per host that took part."""
        return self.log.ranks // len(self.log.names)


def fit(log: NcclLog) -> FittedLog:
    """Return a log with its line.

    Raises:
        UserError: its sizes show no bandwidth, or its hosts have different numbers of ranks.
    """
    counts = {name: log.hosts.count(name) for name in log.names}
    if len(set(counts.values())) > 1:
        some = ", ".join(f"{name}: {count}" for name, count in list(counts.items())[:4])
        raise UserError(
            f"{nccl_tests.KIND} {log.path}: hosts have different numbers of ranks ({some}); use equally many"
        )
    large = log.sizes >= _LARGE
    if large.sum() < 2:
        raise UserError(
            f"{nccl_tests.KIND} {log.path}: it has {int(large.sum())} sizes from 1 MiB on, which show no bandwidth; "
            "run the test with -b 8 -e 4G -f 2"
        )
    over, slope = fit_line(log.sizes[large], log.seconds[large])
    start = None
    if log.sizes.min() <= _SMALL:
        start = float(fit_line(log.sizes, log.seconds)[0])
    line = np.where(large, over, over if start is None else start) + slope * log.sizes
    errors = np.abs(line / log.seconds - 1)
    bandwidth = nccl_tests.factor(log.test, log.ranks) / float(slope)
    return FittedLog(log, start, bandwidth, float(np.median(errors)), float(errors.max()))


def told(fitted: FittedLog) -> list[tuple[str, str]]:
    """Return what a log says, as rows of a table."""
    log = fitted.log
    where = f"on {log.names[0]}" if len(log.names) == 1 else f"over {len(log.names)} hosts of {fitted.devices}"
    peak = log.busbw.max()
    rows = [
        (log.path, f"{log.test} of {log.ranks} ranks {where}, {len(log.sizes)} sizes"),
        ("", f"busbw {units.rate(fitted.bandwidth)}; the highest in the log: {units.rate(peak)}"),
        ("", f"the line misses times by {fitted.error:.0%} in the median and by {fitted.worst:.0%} at most"),
    ]
    if fitted.error > _MISFIT:
        rows.append(("", "warning: that is no line; the machine may have been busy, so run the test again"))
    if log.test == "all_reduce" and len(log.names) == 2:
        rows.append(
            ("", "warning: over two hosts NCCL may use trees, which beat a ring; NCCL_ALGO=RING shows the network")
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Link:
    """A class of links.

    Attributes:
        alpha: seconds of a hop; None: not known.
        bandwidth: bytes/s of a flow.
        source: where the figures are from.
        nominal: the bandwidth is a data sheet's.
    """

    alpha: float | None
    bandwidth: float
    source: str
    nominal: bool = False


def _best(logs: Sequence[FittedLog], order: Sequence[str]) -> list[FittedLog]:
    """Return the logs of the test that shows a link best."""
    test = next(test for test in order if any(fitted.log.test == test for fitted in logs))
    return [fitted for fitted in logs if fitted.log.test == test]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _source(chosen: Sequence[FittedLog], what: str) -> str:
    return f"{chosen[0].log.test}_perf{what} ({', '.join(pathlib.Path(fitted.log.path).name for fitted in chosen)})"


def inside(logs: Sequence[FittedLog]) -> Link | None:
    """Return the links inside hosts; None if no log is of one host.

    Args:
        logs: all logs.
    """
    here = [fitted for fitted in logs if len(fitted.log.names) == 1]
    if not here:
        return None
    chosen = _best(here, _INSIDE)
    # Sendrecv shows a hop's latency by itself.
    starts = _best(here, _INSIDE[::-1]) if all(fitted.start is None for fitted in chosen) else chosen
    alpha = _median([None if one.start is None else one.start / one.hops[0] for one in starts])
    bandwidth = statistics.median(fitted.bandwidth for fitted in chosen)
    return Link(alpha, bandwidth, _source(chosen, " inside hosts"))


def nics(logs: Sequence[FittedLog]) -> int | None:
    """Return the flows that leave a host at full speed: a ring over all devices beside one flow; None: not known.

    Args:
        logs: logs between hosts.
    """
    flows = [fitted.bandwidth for fitted in logs if fitted.log.test == "sendrecv"]
    rings = [fitted for fitted in logs if fitted.log.test != "sendrecv"]
    if not flows or not rings:
        return None
    most = max(fitted.devices for fitted in rings)
    ratio = statistics.median(fitted.bandwidth for fitted in rings) / statistics.median(flows)
    return int(np.clip(round(ratio), 1, most))


def between(logs: Sequence[FittedLog], inner: float | None, count: int) -> Link:
    """Return the links between hosts.

    Args:
        logs: logs between hosts, at least one.
        inner: seconds of a hop inside hosts; None: not known.
        count: NICs of a host, over which the flows of its devices spread.
    """
    chosen = _best(logs, _BETWEEN)
    alpha = _median([_outer(fitted, inner) for fitted in chosen])
    bandwidth = statistics.median(flow(fitted, count) for fitted in chosen)
    shared = chosen[0].log.test != "sendrecv" and min(count, chosen[0].devices) > 1
    return Link(alpha, bandwidth, _source(chosen, f" over {count} NICs" if shared else ""))


def flow(fitted: FittedLog, count: int) -> float:
    """Return the bytes/s of one flow: what a ring sends through a host's NICs, of which each carries a part.

    Args:
        fitted: a log between hosts.
        count: NICs of a host.
    """
    return fitted.bandwidth / (1 if fitted.log.test == "sendrecv" else min(count, fitted.devices))


def _outer(fitted: FittedLog, inner: float | None) -> float | None:
    """Return the seconds of a hop between hosts."""
    if fitted.start is None:
        return None
    steps, hops = fitted.hops
    if inner is None:
        return fitted.start / (_INSIDE_SHARE * steps + hops)
    return max(fitted.start - steps * inner, inner * hops) / hops


def pairs(logs: Sequence[FittedLog], inner: float | None, count: int) -> dict[tuple[str, str], Link]:
    """Return the links of single pairs of hosts, if several pairs were measured apart; {} otherwise.

    Args:
        logs: logs between hosts.
        inner: as `between` takes it.
        count: as `between` takes it.
    """
    of_two: dict[tuple[str, str], list[FittedLog]] = {}
    for fitted in logs:
        if len(fitted.log.names) == 2:
            first, second = sorted(fitted.log.names)
            of_two.setdefault((first, second), []).append(fitted)
    return {pair: between(some, inner, count) for pair, some in of_two.items()} if len(of_two) > 1 else {}


def split(
    logs: Sequence[FittedLog], racks_of: Callable[[tuple[str, ...]], list[str]] | None
) -> tuple[list[FittedLog], list[FittedLog]]:
    """Return the logs between hosts of one rack, and those across racks.

    Args:
        logs: all logs.
        racks_of: function that returns the racks of hosts; None: there is one.
    """
    several = [fitted for fitted in logs if len(fitted.log.names) > 1]
    if racks_of is None:
        return several, []
    across = [fitted for fitted in several if len(set(racks_of(fitted.log.names))) > 1]
    return [fitted for fitted in several if fitted not in across], across
