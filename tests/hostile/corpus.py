"""Absurd, damaged and misleading values, and files that are changed by them."""

import copy
import json
import random
from typing import Any

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


def damaged(rng: random.Random, name: str, content: bytes) -> bytes:
    """Return a changed content of a file, by its name."""
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
