"""Reports of NVIDIA Nsight Systems: the sqlite export. What `nsys stats` prints does not tell F from B.

    nsys profile -t cuda,nvtx -o report python train.py
    nsys export --type sqlite -o report.sqlite report.nsys-rep

Of its tables these are read, with times in nanoseconds (https://docs.nvidia.com/nsight-systems/UserGuide/index.html,
SQLite schema reference):

    CUPTI_ACTIVITY_KIND_KERNEL     start, end, deviceId, correlationId, globalPid, shortName
    CUPTI_ACTIVITY_KIND_RUNTIME    start, correlationId, globalTid
    NVTX_EVENTS                    start, end, text or textId, globalTid; eventType 59 is a range of a thread
    ThreadNames, StringIds         names; PyTorch calls the threads of its autograd engine pt_autograd_0 and so on
    TARGET_INFO_GPU                id, name

Ranges tell operators (torch.autograd.profiler.emit_nvtx), or parts of the step by names such as forward and backward.
"""

import contextlib
import pathlib
import re
import sqlite3
from collections.abc import Iterator

from paxtrain.errors import UserError
from planner.traces import phases
from planner.traces.kernels import BACKWARD, GpuTrace
from planner.traces.phases import KernelLaunch, Operator

MAGIC = b"SQLite format 3\0"
_NANO = 1e-9
_MOST = 20_000_000  # rows of a table
_STEPS = 400_000_000  # instructions of sqlite's machine, some seconds
_UPDATE = re.compile(r"^Optimizer\.step|(?i:^optimizer(?:[ _.-]?step)?$)")
_SUMMARY = re.compile(r"Time \(%\)|Total Time \(ns\)|Instances")
_NEEDED = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("start", "end", "deviceId", "correlationId", "globalPid", "shortName"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "correlationId", "globalTid"),
    "StringIds": ("id", "value"),
}


def refuse_summary(text: str) -> None:
    """Refuse what `nsys stats` prints.

    Raises:
        UserError: the text is such a table.
    """
    if len(set(_SUMMARY.findall(text[:20_000]))) >= 2:
        raise UserError(
            "it has sums of kernels over the whole run, which do not tell F from B; give the sqlite export: nsys "
            "export --type sqlite report.nsys-rep"
        )


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[sqlite3.Connection]:
    """Open a file for reading only, with an end to what a query may take."""
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.set_progress_handler(lambda: 1, _STEPS)
        yield connection
    except (sqlite3.Error, UnicodeDecodeError) as error:  # of a table's or a column's name
        raise UserError(
            f"it is no whole sqlite export ({error}); make it again with nsys export --type sqlite"
        ) from error
    finally:
        connection.close()


def read(path: str | pathlib.Path) -> GpuTrace:
    """Return the trace of a sqlite export.

    Raises:
        UserError: the file is no such export, has no kernels of one GPU, or nothing tells F from B.
    """
    with _opened(pathlib.Path(path)) as connection:
        tables = {
            name: {row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')}
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            if re.fullmatch(r"\w+", name)
        }
        for name, columns in _NEEDED.items():
            if not set(columns) <= tables.get(name, set()):
                raise UserError(
                    f"it has no table {name} with {', '.join(columns)}; profile with nsys profile -t cuda,nvtx"
                )
        return _parse(str(path), connection, tables)


def _rows(connection: sqlite3.Connection, query: str, *kinds: type) -> list[tuple]:
    """Return the rows of a query, whose values must have these types; None may stand for a text."""
    found = connection.execute(f"{query} LIMIT {_MOST + 1}").fetchall()
    if len(found) > _MOST:
        raise UserError(f"a table has more than {_MOST:,} rows; profile fewer steps")
    for row in found:
        for value, kind in zip(row, kinds):
            if not isinstance(value, kind) and not (kind is str and value is None):
                raise UserError(f"a row has {value!r:.40} in place of {kind.__name__}; make the export again")
    return found


def _parse(path: str, connection: sqlite3.Connection, tables: dict[str, set[str]]) -> GpuTrace:
    names = dict(_rows(connection, "SELECT id, value FROM StringIds", int, str))
    kernels = _rows(
        connection,
        "SELECT start, end, deviceId, correlationId, globalPid, shortName FROM CUPTI_ACTIVITY_KIND_KERNEL",
        *(int,) * 6,
    )
    devices = sorted({kernel[2] for kernel in kernels})
    if len(devices) != 1:
        some = f" ({', '.join(map(str, devices[:4]))})" if devices else ""
        raise UserError(f"it has kernels of {len(devices)} GPUs{some}; profile a run on one, or one of its processes")
    calls = _rows(connection, "SELECT correlationId, globalTid, start FROM CUPTI_ACTIVITY_KIND_RUNTIME", int, int, int)
    # The upper bits of a thread's number are its process's.
    by_key = {(correlation, thread >> 24): (thread, start * _NANO) for correlation, thread, start in calls}
    launches = [
        KernelLaunch(*by_key[correlation, process >> 24], names.get(name) or "", start * _NANO, end * _NANO)
        for start, end, _, correlation, process, name in kernels
        if (correlation, process >> 24) in by_key
    ]
    if not launches:
        raise UserError("no launch of its kernels is there; profile with nsys profile -t cuda,nvtx")
    operators = _ranges(connection, tables, names)
    autograd = _autograd(connection, tables, names)
    found = phases.label(operators, launches, autograd=autograd)
    if not any(kernel.phase == BACKWARD for kernel in found.kernels):
        raise UserError(
            "nothing tells F from B: it has neither ranges named backward nor threads named pt_autograd_0; profile "
            "with -t cuda,nvtx and torch.autograd.profiler.emit_nvtx(), or put nvtx ranges around forward and backward"
        )
    updates = sum(_UPDATE.match(operator.name) is not None for operator in operators)
    return GpuTrace(path, _device(connection, tables, devices[0]), *found[:2], updates, *found[2:])


def _ranges(connection: sqlite3.Connection, tables: dict[str, set[str]], names: dict[int, str]) -> list[Operator]:
    """Return the NVTX ranges of threads."""
    columns = tables.get("NVTX_EVENTS", set())
    if not {"start", "end", "text", "globalTid", "eventType"} <= columns:
        return []
    text = "textId" if "textId" in columns else "NULL"
    query = f"SELECT start, end, globalTid, text, {text} FROM NVTX_EVENTS WHERE eventType = 59 AND end IS NOT NULL"
    rows = _rows(connection, query, int, int, int, str)
    return [
        Operator(text or names.get(number) or "", thread, start * _NANO, end * _NANO)
        for start, end, thread, text, number in rows
    ]


def _autograd(connection: sqlite3.Connection, tables: dict[str, set[str]], names: dict[int, str]) -> set[int]:
    """Return the threads of PyTorch's autograd engine."""
    if not {"nameId", "globalTid"} <= tables.get("ThreadNames", set()):
        return set()
    rows = _rows(connection, "SELECT nameId, globalTid FROM ThreadNames", int, int)
    return {thread for number, thread in rows if (names.get(number) or "").startswith("pt_autograd")}


def _device(connection: sqlite3.Connection, tables: dict[str, set[str]], number: int) -> str:
    if not {"id", "name"} <= tables.get("TARGET_INFO_GPU", set()):
        return ""
    return next(
        (name for key, name in _rows(connection, "SELECT id, name FROM TARGET_INFO_GPU", int, str) if key == number), ""
    )
