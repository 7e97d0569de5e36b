"""Logs as nccl-tests prints them, of links whose latency and bandwidth are known."""

import pathlib

import numpy as np

DATA = pathlib.Path(__file__).parent / "data"
SIZES = tuple(8 << i for i in range(0, 31, 1))  # 8 B to 8 GiB
_REDOP = {"all_gather": "none", "sendrecv": "none"}


def factor(test: str, ranks: int) -> float:
    """Return busbw over algbw, as nccl-tests' doc/PERFORMANCE.md has it."""
    return {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "sendrecv": 1.0,
    }[test]


def log(
    test: str,
    hosts: list[str],
    start: float,
    bandwidth: float,
    sizes: tuple[int, ...] = SIZES,
    noise: float = 0.0,
    device: str = "NVIDIA H100 80GB HBM3",
) -> str:
    """Return the log of a test whose times are start + factor * size / bandwidth, with relative noise.

    Args:
        test: "all_reduce", "all_gather", "reduce_scatter" or "sendrecv".
        hosts: host of each rank.
        start: seconds of the smallest message.
        bandwidth: bytes/s.
        sizes: sizes in bytes.
        noise: standard deviation of the times' relative noise.
        device: the device's name.
    """
    random = np.random.default_rng(0)
    lines = [f"# Collective test starting: {test}_perf", "# Using devices"]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid {1000 + rank:6d} on {host:>10s} device {rank % 8:2d} [{rank:02x}] {device}"
        for rank, host in enumerate(hosts)
    ]
    lines.append(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw"
    )
    for size in sizes:
        cells = []
        for _ in range(2):
            seconds = (start + factor(test, len(hosts)) * size / bandwidth) * (1 + noise * random.standard_normal())
            algbw = size / seconds / 1e9
            cells.append(f"{_time(seconds * 1e6)} {algbw:7.2f} {algbw * factor(test, len(hosts)):7.2f}      0")
        lines.append(
            f"{size:12d}  {size // 4:12d}     float  {_REDOP.get(test, 'sum'):>6s}      -1  {'  '.join(cells)}"
        )
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0", "#", ""])


def _time(us: float) -> str:
    """Return microseconds in 7 columns, as nccl-tests' getFloatStr does: the larger, the fewer digits."""
    return f"{us:7.2f}" if us < 100 else f"{us:7.1f}" if us < 10_000 else f"{us:7.0f}"
