"""Absurd, damaged and misleading values, and files that are changed by them."""

import copy
import io
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

HUGE = ["10000000", "4294967296", "1000000000000000", "9223372036854775807", "18446744073709551616", "9" * 5000]
NO_NUMBERS = ["nan", "inf", "-inf", "1e999", "abc", "0x10", "1.5.2", "--1", "1 2"]
LOOKALIKES = ["\u0661\u0662\u0663", "\uff11\uff12", "\u00b2", "1_0", "\u09e9", "\u2167"]
NEGATIVE = ["-1", "-9223372036854775808", "-0.5"]
TEXTS = [
    "",
    " ",
    "a b",
    "a;b",
    "$(id)",
    "`id`",
    "a\nb",
    "a'b\"c",
    "é",
    "%s%n",
    "-",
    "../..",
    "/",
    "/dev/null",
    "/proc/self/mem",
    "x" * 5000,
    "\udcff\udcfe",
    "[",
    "{}",
    "None",
    "true",
    "@",
    "\x1b[31mred",
    "~",
    "*",
    "a=b",
    "[::1",
    "0",
]
LEAVES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "7",
    "\u0661",
    [],
    {},
    [[]],
    [1],
    {"a": 1},
    ["x"] * 3,
    "9" * 5000,
    [0] * 100000,
]

# What no number in a file may be. Text in quotes is no number, and neither is a truth value.
WRONG = [float("nan"), float("inf"), -float("inf"), "x", "7", [], {}, True, 10**400]
WRONG_TOKENS = [-1, "x", 1.5, True, float("nan")]  # an id beyond the vocabulary is no token, which is allowed
# Files of JSON whose numbers must be numbers, and the keys below which they may be anything.
STRICT: dict[str, tuple[str, ...]] = {
    "plan.json": ("predicted",),
    "cluster.json": (),
    "arrays.json": (),
    "probe.json": ("model",),
    "constants.json": (),
    "model/config.json": (),
}
NO_COUNTS = (
    "cluster",
    "device_kinds",
    "dtype",
    "model",
    "schedule",
    "stage_layers",
)  # columns of trials that are no single number
NOT_RUN = ("nan", "inf")  # as the seconds of a trial
EXPLODES = {"type": "Split", "pattern": {"Regex": "(a|aa)+$b"}, "behavior": "Isolated", "invert": False}

CONFIGURATIONS = [
    "def get_config():\n    return 1 / 0\n",
    "def get_config():\n    return [][1]\n",
    "def get_config():\n    assert False, 'no'\n",
    "import sys\ndef get_config():\n    sys.exit(5)\n",
    "raise SystemExit\n",
    "def get_config():\n    raise Exception('a\\nb')\n",
    "def get_config():\n    return get_config()\n",
    "get_config = 3\n",
    "def get_config(x):\n    return x\n",
    "def get_config():\n    return {'model': 3}\n",
    "def get_config():\n    return None\n",
    "\0",
    "def get_config():\n    return {1: 2}\n",
    "def get_config():\n    return {'model': {'hidden': object()}}\n",
    "from ml_collections import ConfigDict as C\ndef get_config():\n    return C({'model': {'hidden': 'x' * 10**6}})\n",
    "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'model': [1]})\n",
    "raise RecursionError('deep')\n",
    "raise MemoryError\n",
    "import no.such.module\n",
    "x = '\\ud800'\nraise ValueError(x)\n",
]


def either(*kinds: st.SearchStrategy) -> st.SearchStrategy:
    """Return a strategy that takes each kind equally often, however many kinds that has; `one_of` would not."""
    return st.sampled_from(kinds).flatmap(lambda kind: kind)


def _nodes(value: Any, path: tuple = ()) -> list[tuple]:
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _nodes(inner, (*path, key))
    if isinstance(value, list):
        for i, inner in enumerate(value[:4]):
            found += _nodes(inner, (*path, i))
    return found


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _edited(value: Any, path: tuple, text: str | None) -> bytes:
    """Return JSON with the text in the place of one of its values; None leaves the value out, with its key."""
    if not path:
        return (text or "").encode()
    value = copy.deepcopy(value)
    inner = _at(value, path[:-1])
    inner[path[-1]] = "@"
    if text is None:
        del inner[path[-1]]
        return json.dumps(value).encode()
    return json.dumps(value).replace('"@"', text).encode()


def _json(content: bytes) -> st.SearchStrategy[bytes]:
    """Return JSON files with one of their values or keys changed."""
    value = json.loads(content)
    paths = st.sampled_from(_nodes(value))
    leaves = st.sampled_from([json.dumps(leaf) for leaf in LEAVES])
    texts = either(leaves, leaves, leaves, st.none(), st.just("9" * 5000), st.just("[" * 50_000 + "]" * 50_000))
    edited = st.builds(_edited, st.just(value), paths, texts)
    return either(*[edited] * 7, st.just(b'{"a":' * 100_000 + b"1" + b"}" * 100_000))


def _bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """Return files that were cut, or in which bytes are others."""
    places = st.integers(0, max(len(content) - 1, 0))
    eight = either(st.just(b"\0" * 8), st.just(b"\xff" * 7 + b"\x7f"), st.binary(min_size=8, max_size=8))
    other = st.builds(lambda place, new: content[:place] + new + content[place + 8 :], places, eight)
    noise = st.binary(min_size=200, max_size=200)
    return either(st.just(b""), places.map(lambda place: content[:place]), noise, other, other, other)


@st.composite
def _csv(draw: st.DrawFn, content: bytes) -> bytes:
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = draw(st.sampled_from(rows))
    cells = [*NO_NUMBERS, *LOOKALIKES, *NEGATIVE, *HUGE, "", "x" * 200_000, "\0"]
    row[draw(st.integers(0, len(row) - 1))] = draw(st.sampled_from(cells))
    return "\n".join(map(",".join, rows)).encode("utf-8", "surrogateescape")


@st.composite
def _lines(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.splitlines()
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = draw(_json(lines[place]))
    return b"\n".join(lines)


# What the headers of an .npz claim, and another shape or dtype.
FORGED = [(b"(2, 2)", b"(9, 9)"), (b"(2, 2)", b"(2, 2,"), (b"<f8", b"|O8"), (b"<f8", b"<c8"), (b"(2, 2)", b"10**99")]


def _safetensors(content: bytes) -> st.SearchStrategy[bytes]:
    """Return arrays with one of the values or keys of their header changed."""
    (length,) = struct.unpack("<Q", content[:8])
    headers = _json(content[8 : 8 + length])
    return headers.map(lambda header: struct.pack("<Q", len(header)) + header + content[8 + length :])


def damaged(name: str, content: bytes) -> st.SearchStrategy[bytes]:
    """Return changed contents of a file, by its name."""
    kind = name.rpartition(".")[2]
    if kind == "py":
        return st.sampled_from([text.encode("utf-8", "surrogateescape") for text in CONFIGURATIONS])
    if kind == "npz":
        return either(st.sampled_from([content.replace(*pair) for pair in FORGED]), _bytes(content))
    change = {"json": _json, "jsonl": _lines, "csv": _csv, "safetensors": _safetensors}.get(kind)
    return either(*[change(content)] * 3, _bytes(content)) if change else _bytes(content)


@st.composite
def _wrong_array(draw: st.DrawFn, name: str, content: bytes) -> tuple[bytes, str]:
    arrays = dict(np.load(io.BytesIO(content)))
    key, value = draw(st.sampled_from(sorted(arrays))), draw(st.sampled_from([None, np.nan, np.inf, -1.0, "x"]))
    arrays[key] = arrays[key][:1] if value is None else np.full((2, 2), value)
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue(), f"{key} of {arrays[key].ravel()[0]} {arrays[key].shape}"


@st.composite
def _wrong_number(draw: st.DrawFn, name: str, content: bytes) -> tuple[bytes, str]:
    value = json.loads(content)
    places = [path for path in _nodes(value) if isinstance(_at(value, path), int | float)]
    path = draw(st.sampled_from([path for path in places if not set(STRICT[name]) & set(path)]))
    choices = WRONG_TOKENS if str(path[-1]).endswith("_token_id") else WRONG
    new = draw(st.sampled_from([*choices, 1.0, 2] if path == ("version",) else choices))
    if new is True and type(_at(value, path)) is bool:
        new = 1
    return _edited(value, path, json.dumps(new)), f"{'.'.join(map(str, path))}={str(new)[:20]}"


def _wrong_weight(name: str, content: bytes) -> st.SearchStrategy[tuple[bytes, str]]:
    values = st.sampled_from([float("nan"), float("inf")])
    return values.map(lambda value: (content[:-4] + struct.pack("<f", value), f"a weight of {value}"))


def _endless(name: str, content: bytes) -> st.SearchStrategy[tuple[bytes, str]]:
    text = json.dumps(json.loads(content) | {"pre_tokenizer": EXPLODES})
    return st.just((text.encode(), "a pattern without end"))


@st.composite
def _wrong_trial(draw: st.DrawFn, name: str, content: bytes) -> tuple[bytes, str]:
    titles, *rows = [line.split(",") for line in content.decode().splitlines()]
    column = draw(st.sampled_from([i for i, title in enumerate(titles) if title not in NO_COUNTS]))
    cells = [cell for cell in (*NO_NUMBERS, *LOOKALIKES) if titles[column] != "seconds" or cell not in NOT_RUN]
    draw(st.sampled_from(rows))[column] = cell = draw(st.sampled_from(cells))
    return "\n".join(map(",".join, [titles, *rows])).encode(), f"{titles[column]}={cell}"


@st.composite
def _wrong_log(draw: st.DrawFn, name: str, content: bytes) -> tuple[bytes, str]:
    lines = content.decode().splitlines()
    place = draw(st.sampled_from([i for i, line in enumerate(lines) if " float " in line]))
    cells = lines[place].split()
    column = draw(st.sampled_from([0, 5, 6, 7, 9, 10, 11]))  # the size, and times and bandwidths
    cells[column] = cell = draw(st.sampled_from([*NO_NUMBERS, *LOOKALIKES, "-7", "12,5", "9" * 5000]))
    lines[place] = "  ".join(cells)
    return "\n".join(lines).encode(), f"{cell[:20]} in column {column}"


def _wrong_schedule(name: str, content: bytes) -> st.SearchStrategy[tuple[bytes, str]]:
    cells = ["0F0", "0X0", "-1F0", "0F1_0", "\u0661F\u0660", "0F99999999", "9" * 5000 + "F0", "x" * 200_000]
    return st.sampled_from(cells).map(lambda cell: (f"{cell},".encode() + content, cell[:20]))


# Changes of a file that must be refused, by the end of its name: the contents, and what is wrong with each.
REFUSED: dict[str, Callable[[str, bytes], st.SearchStrategy[tuple[bytes, str]]]] = {
    **dict.fromkeys(STRICT, _wrong_number),
    ".npz": _wrong_array,
    ".safetensors": _wrong_weight,
    "own_tokenizer.json": _endless,
    "trials.csv": _wrong_trial,
    ".log": _wrong_log,
    "schedule.csv": _wrong_schedule,
}


def changed(name: str, content: bytes) -> st.SearchStrategy[tuple[bytes, str]]:
    """Return contents of a file, each with what must be refused in it, or "" if a main may take it."""
    harmless = damaged(name, content).map(lambda made: (made, ""))
    wrong = [make(name, content) for end, make in REFUSED.items() if name.endswith(end)]
    return either(*wrong * 2, *[harmless] * 3)
