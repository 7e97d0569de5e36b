"""Absurd, damaged and misleading values, and files that are changed by them."""

import copy
import io
import json
import random
import struct
from typing import Any

import numpy as np

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
WRONG_TOKENS = [-1, 257, 2**40, "x", 1.5, True, float("nan")]
# Files of JSON whose numbers must be numbers, and the keys below which they may be anything.
STRICT: dict[str, tuple[str, ...]] = {
    "plan.json": ("predicted",),
    "cluster.json": (),
    "arrays.json": (),
    "probe.json": ("model",),
    "constants.json": (),
    "model/config.json": (),
}
NO_COUNTS = ("cluster", "device_kinds", "dtype", "stage_layers")  # columns of trials that are no single number
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


def _nodes(value: Any, path: tuple = ()) -> list[tuple]:
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _nodes(inner, (*path, key))
    if isinstance(value, list):
        for i, inner in enumerate(value[:4]):
            found += _nodes(inner, (*path, i))
    return found


def _replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = _replaced(value[path[0]], path[1:], new)
    return value


def _json(rng: random.Random, content: bytes) -> bytes:
    """Return a JSON file with one of its values or keys changed."""
    value = json.loads(content)
    path = rng.choice(_nodes(value))
    kind = rng.randrange(8)
    if kind == 0:
        return b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    if kind == 1:
        return json.dumps(_replaced(value, path, "@")).replace('"@"', "[" * 50_000 + "]" * 50_000).encode()
    if kind == 2 and path and isinstance(path[-1], str):
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return json.dumps(value).encode()
    if kind == 3:
        return json.dumps(_replaced(value, path, "@")).replace('"@"', "9" * 5000).encode()
    return json.dumps(_replaced(value, path, rng.choice(LEAVES))).encode()


def _bytes(rng: random.Random, content: bytes) -> bytes:
    """Return a file that was cut, or in which bits or bytes are others."""
    place = rng.randrange(max(len(content), 1))
    kind = rng.randrange(6)
    if kind == 0:
        return b""
    if kind == 1:
        return content[:place]
    if kind == 2:
        return content[:place] + b"\0" * 8 + content[place + 8 :]
    if kind == 3:
        return content[:place] + bytes(rng.randrange(256) for _ in range(8)) + content[place + 8 :]
    if kind == 4:
        return content[:place] + b"\xff\xff\xff\xff\xff\xff\xff\x7f" + content[place + 8 :]
    return bytes(rng.randrange(256) for _ in range(200))


def _csv(rng: random.Random, content: bytes) -> bytes:
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = rng.randrange(len(rows))
    column = rng.randrange(len(rows[row]))
    rows[row][column] = rng.choice([*HUGE, *NO_NUMBERS, *LOOKALIKES, *NEGATIVE, "", "x" * 200_000, "\0"])
    return "\n".join(",".join(each) for each in rows).encode("utf-8", "surrogateescape")


def _archive(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Return an .npz with an array that must be refused, and what is wrong with it."""
    arrays = dict(np.load(io.BytesIO(content)))
    name, kind = rng.choice(sorted(arrays)), rng.randrange(5)
    if kind < 4:
        value = [np.nan, np.inf, -1.0, "x"][kind]
        arrays[name] = np.full((2, 2), value)
    else:
        arrays[name] = arrays[name][:1]
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue(), f"{name} of {arrays[name].ravel()[0]} {arrays[name].shape}"


def _forged(rng: random.Random, content: bytes) -> bytes:
    """Return an .npz whose headers claim another shape or dtype."""
    old, new = rng.choice(
        [(b"(2, 2)", b"(9, 9)"), (b"(2, 2)", b"(2, 2,"), (b"<f8", b"|O8"), (b"<f8", b"<c8"), (b"(2, 2)", b"10**99")]
    )
    return content.replace(old, new)


def _safetensors(rng: random.Random, content: bytes) -> bytes:
    """Return arrays with one of the values or keys of their header changed."""
    (length,) = struct.unpack("<Q", content[:8])
    header = _json(rng, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def _wrong_number(rng: random.Random, name: str, content: bytes) -> tuple[bytes, str]:
    """Return a file of JSON with a number that is none, and which one it is."""
    value = json.loads(content)
    free = STRICT[name]
    places = []
    for path in _nodes(value):
        inner = value
        for key in path:
            inner = inner[key]
        if isinstance(inner, int | float) and not set(free) & set(path):
            places.append((path, inner))
    path, inner = rng.choice(places)
    choices = WRONG_TOKENS if str(path[-1]).endswith("_token_id") else WRONG
    choices = [*choices, 1.0, 2] if path == ("version",) else choices
    new = rng.choice(choices)
    if type(inner) is bool and new is True:
        new = 1
    return json.dumps(_replaced(value, path, new)).encode(), f"{'.'.join(map(str, path))}={str(new)[:20]}"


def refused(rng: random.Random, name: str, content: bytes) -> tuple[bytes, str] | None:
    """Return a content of a file that must be refused, and what is wrong with it; None if there is no such change."""
    if name in STRICT:
        return _wrong_number(rng, name, content)
    if name.endswith(".npz"):
        return _archive(rng, content)
    if name.endswith(".safetensors"):
        return content[:-4] + struct.pack("<f", rng.choice([float("nan"), float("inf")])), "a weight that is not finite"
    if name == "own_tokenizer.json":
        return json.dumps(json.loads(content) | {"pre_tokenizer": EXPLODES}).encode(), "a pattern without end"
    if name == "trials.csv":
        rows = [line.split(",") for line in content.decode().splitlines()]
        column = rng.choice([i for i, title in enumerate(rows[0]) if title not in NO_COUNTS])
        cells = [cell for cell in (*NO_NUMBERS, *LOOKALIKES) if rows[0][column] != "seconds" or cell not in NOT_RUN]
        rows[rng.randrange(1, len(rows))][column] = cell = rng.choice(cells)
        return "\n".join(map(",".join, rows)).encode(), f"{rows[0][column]}={cell}"
    if name == "schedule.csv":
        many = "9" * 5000 + "F0", "x" * 200_000, "0F99999999"
        cell = rng.choice(["\u0661F\u0660", *many, "0F0", "0X0", "0F1_0", "-1F0"])
        lines = content.decode().splitlines()
        return "\n".join([f"{cell},{lines[0]}", *lines[1:]]).encode(), cell[:20]
    return None


def damaged(rng: random.Random, name: str, content: bytes) -> bytes:
    """Return a changed content of a file, by its name."""
    if name.endswith(".npz") and rng.random() < 0.5:
        return _forged(rng, content)
    if name.endswith(".safetensors") and rng.random() < 0.6:
        return _safetensors(rng, content)
    if name.endswith(".py"):
        return rng.choice(CONFIGURATIONS).encode("utf-8", "surrogateescape")
    if name.endswith(".csv"):
        return _csv(rng, content) if rng.random() < 0.8 else _bytes(rng, content)
    if name.endswith(".json") and rng.random() < 0.8:
        return _json(rng, content)
    if name.endswith(".jsonl") and rng.random() < 0.8:
        lines = content.decode().splitlines()
        place = rng.randrange(len(lines))
        lines[place] = _json(rng, lines[place].encode()).decode()
        return "\n".join(lines).encode()
    return _bytes(rng, content)
