"""Measures the links and the compute of the devices that a meeting's processes have.

Links between all pairs of hosts, and inside hosts, come from timed messages; compute from the trainer's own functions.
When the time limit comes, what has been measured is kept, and what has not is said.
"""

import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from paxtrain import tables
from paxtrain.config import Config
from paxtrain.devices.gpus import GPUS
from paxtrain.errors import UserError
from planner.cluster import link_fit
from planner.cluster.cluster import Cluster
from planner.cost import compute
from planner.measure import compute_timing, link_timing
from planner.measure.process_group import Meeting, check_reachable

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        sizes: bytes of the big messages; empty: as large as the links can send in the time.
        repeats: samples of every link, and of every compute time.
        rounds: of pairs of hosts at most, beyond which a random choice is measured.
        micro_batches, tensor: sizes whose compute is measured; tensor empty: what divides the devices of a host.
        time_limit: seconds for all of it; None: no limit.
        least: sizes whose compute is measured however late it is.
        compute_hosts: of each device kind, on which compute is measured; 0: all.
        all_reduces: whether all-reduces are timed, to be shown beside what the links say.
    """

    sizes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB)
    repeats: int = 5
    rounds: int = 63
    micro_batches: tuple[int, ...] = (1, 2, 4)
    tensor: tuple[int, ...] = ()
    time_limit: float | None = None
    least: int = 0
    compute_hosts: int = 0
    all_reduces: bool = True


@dataclasses.dataclass(frozen=True)
class Machines:
    """Who is there: hosts, their processes and devices.

    Attributes:
        hosts: names; of_process: by process, the index of its host.
        devices: of all hosts, host after host; per_host: how many each has.
        kinds: device kind of each host, a key of GPUS or "cpu". memory: bytes of one device of each.
        racks: by host, what the launcher or --rack says.
    """

    hosts: tuple[str, ...]
    of_process: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    per_host: int
    kinds: tuple[str, ...]
    memory: tuple[float, ...]
    racks: tuple[str, ...]


def _kind() -> tuple[str, float]:
    """This process's device kind and the memory of one device."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return "cpu", total / jax.local_device_count()
    for kind, gpu in GPUS.items():
        if gpu.name == device.device_kind:
            return kind, float(gpu.memory)
    raise UserError(
        f"{socket.gethostname()} has {device.device_kind}, of which paxtrain/devices/gpus.py knows nothing; "
        "add it there"
    )


def meet(meeting: Meeting, rack: str, name: str = "") -> Machines:
    """Learns who is there, and names the processes after their hosts.

    Args:
        name: of this process's host; empty: as the host calls itself.

    Raises:
        UserError: hosts that differ in their number of devices, an unknown device, or one that cannot be reached.
    """
    problem = ""
    try:
        kind, memory = _kind()
    except UserError as error:
        kind, memory, problem = "", 0.0, str(error)
    name = name or socket.gethostname()

    def verdict(values: list[Any]) -> list[Any]:
        if problem := next((value[-1] for value in values if value[-1]), ""):
            raise UserError(problem)
        return values

    roster = meeting.gather([name, jax.local_device_count(), kind, memory, rack, problem], verdict)
    hosts = tuple(dict.fromkeys(row[0] for row in roster))
    meeting.names = [row[0] if len(hosts) == len(roster) else f"{row[0]} (process {i})" for i, row in enumerate(roster)]
    of_process = tuple(hosts.index(row[0]) for row in roster)
    counts = [sum(row[1] for row in roster if row[0] == host) for host in hosts]
    odd = next((i for i, count in enumerate(counts) if count != counts[0]), None)
    if odd is not None:
        raise UserError(
            f"{hosts[0]} has {counts[0]} devices, but {hosts[odd]} has {counts[odd]}; give each host as many"
        )
    first = [roster[of_process.index(h)] for h in range(len(hosts))]
    check_reachable(meeting)
    return Machines(
        hosts=hosts,
        of_process=of_process,
        devices=tuple(sorted(jax.devices(), key=lambda d: (of_process[d.process_index], d.process_index, d.id))),
        per_host=counts[0],
        kinds=tuple(row[2] for row in first),
        memory=tuple(row[3] for row in first),
        racks=tuple(row[4] for row in first),
    )


# --- Links ------------------------------------------------------------------------------------------------------------

_PROBE = 16 * 1024  # bytes
_LARGEST = 16 * MIB


def _affordable(
    meeting: Meeting, machines: Machines, rounds: list[link_timing.Round], repeats: int, until: float
) -> tuple[int, int]:
    """Two sizes of messages, one four times the other, as large as half of the time that is left allows.

    Every pair sends a small message first, which says how slow the links are.
    """
    me = machines.hosts[machines.of_process[meeting.process]]
    with meeting.watch(me, "the other hosts in the first round of links"):
        exchange = link_timing.Exchange(machines.devices, rounds, (_PROBE,))
        times = [exchange(number) for number in range(len(rounds))]

    def verdict(values: list[list[list[Any]]]) -> int:
        # Of each round what its slowest pair takes, in both directions.
        slowest = [max(there[0] + back[0] for _, there, back in of_round) for of_round in zip(*values)]
        messages = repeats * link_timing.CALLS * link_timing.BACK_TO_BACK
        seconds = sum(slowest) * messages / _PROBE  # per byte
        size = _PROBE
        while size < _LARGEST and 4 * size * 1.25 * seconds < (until - time.monotonic()) / 2:
            size *= 4
        return size

    size = meeting.gather([dataclasses.astuple(t) for t in times], verdict)
    return size // 4, size


def measure_all_links(
    meeting: Meeting, machines: Machines, options: Options, until: float
) -> tuple[link_timing.Book, str]:
    """Runs the rounds, repeat after repeat, until all are done or the time is up; also what was left out."""
    rounds = link_timing.plan(len(machines.hosts), machines.per_host, options.rounds)
    sizes = options.sizes
    if rounds and not sizes:
        sizes = _affordable(meeting, machines, rounds, options.repeats, until)
    book = link_timing.Book(rounds, len(machines.hosts), machines.per_host, sizes, options.repeats)
    if not rounds:
        return book, ""
    mine = machines.of_process[meeting.process]
    me = machines.hosts[mine]
    with meeting.watch(me, "the other hosts while the links' programs were set up"):
        exchange = link_timing.Exchange(machines.devices, rounds, sizes)
    total = options.repeats * len(rounds)
    with tqdm(total=total, desc="links", unit="round", disable=meeting.process > 0) as progress:
        for done in range(total):
            repeat, number = divmod(done, len(rounds))
            partner = next((b if a == mine else a for a, b in rounds[number].hosts if mine in (a, b)), mine)
            with meeting.watch(me, machines.hosts[partner]):
                times = exchange(number)

            def verdict(values: list[Any], repeat: int = repeat, number: int = number) -> bool:
                seen: dict[int, list[link_timing.Times]] = {}
                for process, value in enumerate(values):
                    seen.setdefault(machines.of_process[process], []).append(link_timing.Times(*value))
                book.enter(repeat, number, seen)
                return time.monotonic() < until

            go_on = meeting.gather(dataclasses.astuple(times), verdict)
            progress.update()
            if not go_on and done + 1 < total:
                return book, f"{total - done - 1} of {total} rounds of links: the time limit came"
    return book, ""


# --- Compute ----------------------------------------------------------------------------------------------------------


def tensor_sizes(config: Config, per_host: int, chosen: Sequence[int]) -> tuple[int, ...]:
    """The tensor sizes to measure.

    Raises:
        UserError: a chosen one does not divide the devices of a host, or the model.
    """
    model = config.model
    fits = [t for t in range(1, per_host + 1) if not any(size % t for size in (per_host, *model.split_sizes.values()))]
    for size in chosen:
        if size not in fits:
            raise UserError(
                f"--tensor={size} must divide the {per_host} devices of a host and the model's "
                f"{', '.join(f'{name}={size}' for name, size in model.split_sizes.items())}; "
                f"{', '.join(map(str, fits))} would"
            )
    return tuple(chosen) or tuple(fits)


def compute_rows(
    machines: Machines, config: Config, tensor: int, micro_batch: int, values: list[dict[str, float] | None]
) -> list[dict[str, Any]]:
    """Rows of the compute profile, one per device kind: the median over its processes, but those that give None."""
    model, rows = config.model, []
    for kind in dict.fromkeys(machines.kinds):
        of_kind = [v for p, v in enumerate(values) if v and machines.kinds[machines.of_process[p]] == kind]
        row = {"kind": kind, "tensor": tensor, "micro_batch": micro_batch, "save": config.pipeline.save}
        row |= dict(zip(compute.PROFILED, compute.profiled(model), strict=True))
        rows.append(row | {name: statistics.median(v[name] for v in of_kind) for name in of_kind[0]})
    return rows


def measure_all_compute(
    meeting: Meeting, machines: Machines, config: Config, options: Options, until: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the compute profile, smallest sizes first, until the time is up; and what was left out, and why."""
    mine = machines.of_process[meeting.process]
    devices = machines.devices[mine * machines.per_host : (mine + 1) * machines.per_host]
    alike = [host for host, kind in enumerate(machines.kinds) if kind == machines.kinds[mine]]
    measures = mine in alike[: options.compute_hosts or None]
    cases = [(t, b) for t in tensor_sizes(config, machines.per_host, options.tensor) for b in options.micro_batches]
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    optimizer: dict[int, float] = {}
    began = time.monotonic()
    with tqdm(total=len(cases), desc="compute", unit="size", disable=meeting.process > 0) as progress:
        for done, (tensor, micro_batch) in enumerate(cases):
            began, last = time.monotonic(), time.monotonic() - began
            # The next size takes as long as the last one at least.
            time_left = done < options.least or began + last < until
            if not meeting.agree(time_left):
                left_out += [f"compute of tensor={t}, micro_batch={b}: the time limit came" for t, b in cases[done:]]
                break
            turns, problem = None, ""
            try:
                if not measures:
                    turns = compute_timing.Bystander(config)
                elif tensor not in optimizer:
                    steps = compute_timing.Optimizer(config, tensor, devices)
                    steps.sample()
                    optimizer[tensor] = statistics.median(steps.sample() for _ in range(options.repeats))
                turns = turns or compute_timing.Turns(config, tensor, micro_batch, devices)
            except jax.errors.JaxRuntimeError as error:
                problem = str(error).splitlines()[0]
            problem = meeting.gather(problem, lambda values: next(filter(None, values), ""))
            progress.update()
            if turns is None or problem:
                left_out.append(f"compute of tensor={tensor}, micro_batch={micro_batch}: {problem}")
                continue
            turns.settle(meeting.agree)
            samples = [turns.sample() for _ in range(options.repeats)]
            value = {kind: statistics.median(s[kind] for s in samples) for kind in turns.kinds}
            values = meeting.gather(value | {"optimizer": optimizer[tensor]} if measures else None)
            rows += compute_rows(machines, config, tensor, micro_batch, values)
    return rows, left_out


# --- The whole --------------------------------------------------------------------------------------------------------


def _all_reduces(
    meeting: Meeting, machines: Machines, filled: link_fit.Filled, nics: int, size: int
) -> list[tuple[str, str]]:
    """All-reduces over the hosts and inside them beside what rings over the links should take."""
    count = len(machines.hosts)
    slowness = 1 / np.median(filled.samples, axis=0)
    here = np.arange(count)
    there = np.roll(here, -1)
    ways = []
    if count > 1:
        # Collective libraries send in host order, round one way or the other.
        per_byte = min(slowness[here, there].max(), slowness[there, here].max())
        alpha = filled.alpha[here, there].max()
        ways.append(("over the hosts", "host", count, per_byte * max(machines.per_host / nics, 1.0), alpha))
    if machines.per_host > 1:
        ways.append(("inside a host", "device", machines.per_host, slowness.diagonal().max(), filled.alpha[0, 0]))
    rows = []
    for name, axis, ring, per_byte, alpha in ways:
        with meeting.watch(machines.hosts[machines.of_process[meeting.process]], f"the others in an all-reduce {name}"):
            seconds = link_timing.all_reduce(machines.devices, machines.per_host, axis, size)
        seconds = meeting.gather(seconds, max)
        links = 2 * (ring - 1) * (alpha + size / ring * per_byte)
        rows.append((f"all-reduce {name}", f"{tables.size(size, 'B')} in {seconds:.4g} s; a ring in order would take "
                                           f"{links:.4g} s by these links"))  # fmt: skip
    return rows


def profile(
    meeting: Meeting, machines: Machines, config: Config, options: Options, name: str
) -> tuple[Cluster, list[tuple[str, str]]]:
    """The cluster as measured, on every process, and what there is to say about it.

    Raises:
        UserError: a process was lost.
    """
    began = time.monotonic()
    limit = np.inf if options.time_limit is None else options.time_limit
    # Links may take half of the time, so that some of the compute is measured in any case.
    book, missing = measure_all_links(meeting, machines, options, began + limit / 2)
    rows, left_out = measure_all_compute(meeting, machines, config, options, began + limit)
    alpha, samples = book.links()
    if len(machines.devices) == 1:  # no link, but the file wants one
        alpha, samples = np.zeros((1, 1)), np.full((1, 1, 1), 1e12)
    numbers = {rack: i for i, rack in enumerate(dict.fromkeys(machines.racks))}
    values: list[Any] = []
    if meeting.process == 0:
        filled = link_fit.fill(alpha, samples, [numbers[rack] for rack in machines.racks])
        values = [filled.alpha.tolist(), filled.samples.tolist(), filled.measured.tolist(), filled.error, book.nics()]
    alpha, samples, measured, error, nics = meeting.agree(values)
    filled = link_fit.Filled(np.array(alpha), np.array(samples), np.array(measured), error)
    said = []
    if options.all_reduces and len(machines.devices) > 1:
        said = _all_reduces(meeting, machines, filled, nics, min(4 * MIB, int(book.sizes.max())))
    fitted = int((~filled.measured & ~np.eye(len(machines.hosts), dtype=bool)).sum())
    if fitted:
        said.append(("links not measured", f"{fitted}, fitted from the others by sender, receiver and racks; median "
                                           f"error on links held out {filled.error:.1%}"))  # fmt: skip
    said += [("left out", text) for text in (missing, *left_out) if text]
    source = f"python -m planner.profile on {time.strftime('%Y-%m-%d')}, jax {jax.__version__}"
    if fitted:
        source += f"; {fitted} links fitted, not measured"
    cluster = Cluster(
        name=name,
        source=source,
        hosts=machines.hosts,
        devices_per_host=machines.per_host,
        kinds=machines.kinds,
        memory=np.array(machines.memory),
        nics=nics,
        alpha=filled.alpha,
        samples=filled.samples,
        measured=filled.measured if fitted else None,
        compute=tuple(rows),
    )
    return cluster, said


def define_flags() -> None:
    """Defines the flags that all mains have that measure: --compute_hosts and --rack."""
    flags.DEFINE_integer(
        "compute_hosts", 0, "Hosts of each device kind whose compute is measured; 0: all.", lower_bound=0
    )
    rack = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    flags.DEFINE_string("rack", rack, "This host's rack.")
