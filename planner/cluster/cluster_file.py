"""The file of a cluster: JSON, perhaps with an .npz beside it for the links.

The JSON file, with all speeds in bytes/s and all times in seconds:

    {"version": 1, "name": "...", "source": "where the figures are from",
     "hosts": 16,                      or a list of names, as `hostname` prints them, or a hostlist: "node[001-016]"
     "devices_per_host": 8,
     "device": "a100-80gb",            a device of `devices` or of device_sheets.py, or "cpu"; or a list, one per host
     "devices": {"mine": {...}},       devices of one's own by name: peak_flops (bfloat16), bandwidth and memory, and if
                                       known single_flops (half of peak_flops), capability ([8, 0]), sms, and the share
                                       "reach" of peak_flops that large products reach (0.65); optional
     "sites": [0, 0, 1, 1],            the site of each host; optional
     "trunks": [{"hosts": ["n0", "n1"], "bandwidth": 125e6}, {"each": "site", "bandwidth": 125e6}],
                                       uplinks that hosts share: all bytes/s between these hosts and the others, in each
                                       direction; "each": "site" gives every site one; optional
     "memory": 85e9,                   bytes of one device; optional for a known GPU; or a list
     "nics": 1,                        flows that leave a host, and enter it, at full speed; more share
     "rails": true,                    device i of a host has NIC i * nics // devices_per_host, and one switch joins the
                                       k-th NICs of all hosts. Flows that change rails are moved inside a host first, as
                                       NCCL's PXN does; {"pxn": false, "oversubscription": 2}: they cross a spine with
                                       half of the hosts' bandwidth; optional, for GPUs
     "fan_out": 1,                     hosts with which a host exchanges data at once, each at its link's full speed;
                                       optional, 1: the NICs are all there is; below it (0.5) they are not full both
                                       ways at once. Only CPUs use it
     "links": ...,                     see below
     "compute": [...]}                 rows that planner.profile measured of layers, head and optimizer; optional

`links` has the latency `alpha` and the `bandwidth` of a single flow for each ordered pair of hosts (from, to), and on
the diagonal for two devices of one host. It is written in one of three ways:

    {"alpha": x, "bandwidth": m}       x a number or [H][H]; m [H][H], or several samples of it, [R][H][H]; optionally
                                       "measured", [H][H] true or false: the link was measured, or follows from others
    {"npz": "links.npz"}               the same as arrays of a file beside the JSON
    {"inside": {"alpha": x, "bandwidth": x}, "between": {...}, "racks": [0, 0, 1, ...], "across": {...},
     "sites": {...},
     "exceptions": [{"from": "n3", "to": "*", "alpha": x, "bandwidth": x}, ...]}
                                       a class each for pairs in a host, between hosts, across racks and between sites;
                                       `from` and `to` are host names, lists of them or "*"

In each form "nominal" lists the classes, "inside" and "between" hosts, whose bandwidths are a data sheet's. Plans take
the shares of these that links reach (`attained` in cluster.py). Without it, all of the third form are nominal, and none
of the others.

This module knows the fields of a `Cluster` by their names; `Cluster.load` and `Cluster.save` call it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from paxtrain import files
from paxtrain.config import SAVE_MODES
from paxtrain.config.model import FAMILIES
from paxtrain.errors import UserError
from paxtrain.files import find
from planner.cluster import hostlist
from planner.cluster.device_sheets import SHEETS, DeviceSheet
from planner.cluster.link_values import links_of, nominal_of
from planner.cluster.rails import Rails
from planner.cluster.trunks import Trunks
from planner.cluster.values import at_least, check_units, integer, number, only, per_host

VERSION = 1
_IN_JSON = 16  # hosts whose links are written into the JSON itself
_MOST = 1_000_000  # devices
MOST_HOSTS = 8192  # each matrix of links takes half a gigabyte then, and a plan needs several
# Keys of a row of the compute profile whose values are positive integers, and those whose values are seconds.
_SIZES = ("tensor", "micro_batch", "hidden", "heads", "sequence", "vocab")
_OPTIONAL_SIZES = ("key_value_heads", "ffn")
_SECONDS = ("forward", "backward", "head", "embedding", "optimizer")
_OPTIONAL_SECONDS = ("backward_input", "backward_weights")
_REQUIRED = ("hosts", "devices_per_host", "device", "links")
_NETWORK = ("nics", "fan_out", "sites", "trunks", "rails")
_KEYS = ("version", "name", "source", *_REQUIRED, "memory", "devices", *_NETWORK, "compute")


class Fields(TypedDict):
    """Fields of a cluster that its file gives; `Cluster` documents them."""

    name: str
    source: str
    hosts: tuple[str, ...]
    devices_per_host: int
    kinds: tuple[str, ...]
    memory: np.ndarray
    nics: int
    fan_out: float
    alpha: np.ndarray
    samples: np.ndarray
    measured: np.ndarray | None
    nominal: tuple[str, ...]
    compute: tuple[dict[str, Any], ...]
    named: bool
    sheets: Mapping[str, DeviceSheet]
    sites: tuple[int, ...]
    trunks: Trunks | None
    rails: Rails | None


def read(name: str | pathlib.Path) -> Fields:
    """Return the fields of the cluster in a file.

    Args:
        name: path of the file, or the name of a shipped one, such as "a100_16x8".

    Raises:
        UserError: the file cannot be read, or a link, host or device in it makes no sense or is in another unit.
    """
    path = pathlib.Path(find(str(name), "clusters", ".json"))
    instead = "name a JSON file as planner/cluster/cluster_file.py describes it"

    def checked(values: object) -> Fields:
        found = parse(values, path.parent)
        arrays = found["alpha"], found["samples"], found["memory"]
        check_units(found["hosts"], *arrays, found["trunks"], found["sheets"])
        return found

    return files.read_json(path, "cluster", instead, checked)


def parse(values: object, folder: pathlib.Path = pathlib.Path()) -> Fields:
    """Return the fields of the cluster that the JSON's values describe.

    Args:
        values: values of the JSON.
        folder: folder of the .npz that they may name.

    Raises:
        UserError: a key is unknown or missing, or a link, host or device makes no sense.
    """
    if not isinstance(values, dict):
        raise UserError(f"a cluster must be a JSON object, got {type(values).__name__}")
    version = values.get("version")
    if type(version) is not int or version != VERSION:  # True == 1, too
        raise UserError(f"version must be {VERSION}, got {version!r}")
    for key in values:
        if key not in _KEYS:
            raise UserError(f"unknown key {key}; known are {', '.join(_KEYS)}")
    for key in _REQUIRED:
        if key not in values:
            raise UserError(f"the key {key} is missing; needed are hosts, devices_per_host, device and links")
    hosts = _hosts(values["hosts"])
    devices = integer("devices_per_host", values["devices_per_host"])
    sheets = _sheets(values.get("devices", {}))
    kinds = tuple(_kind(value, sheets) for value in per_host("device", values["device"], len(hosts)))
    if "memory" not in values and "cpu" in kinds:
        raise UserError("memory is missing; a cluster of device cpu must say the bytes that one device may use")
    known = {**SHEETS, **sheets}
    memory = values.get("memory", [known[kind].memory for kind in kinds] if "memory" not in values else None)
    memory = np.array([number("memory", m) for m in per_host("memory", memory, len(hosts))])
    sites = _sites(values.get("sites"), len(hosts))
    alpha, samples, measured = links_of(values["links"], hosts, folder, sites)
    compute = _compute(values.get("compute", []), kinds)
    name = str(values.get("name", "cluster"))
    if not all(text.isprintable() for text in (name, *hosts)):
        raise UserError(f"name and hosts must be printable text, got {name!r} and {', '.join(map(repr, hosts[:3]))}")
    if len(hosts) * devices > _MOST:
        raise UserError(f"a cluster may have {_MOST:,} devices, got {len(hosts):,} hosts of {devices:,}")
    nics = integer("nics", values.get("nics", 1))
    return {
        "name": name,
        "source": str(values.get("source", "")),
        "hosts": hosts,
        "devices_per_host": devices,
        "kinds": kinds,
        "memory": memory,
        "nics": nics,
        "fan_out": at_least(0.5, "fan_out", values.get("fan_out", 1)),
        "alpha": alpha,
        "samples": samples,
        "measured": measured,
        "nominal": nominal_of(values["links"]),
        "compute": compute,
        "named": not isinstance(values["hosts"], int),
        "sheets": sheets,
        "sites": sites,
        "trunks": _trunks(values.get("trunks", []), hosts, sites),
        "rails": _rails(values.get("rails", False), nics, devices, kinds),
    }


def _kind(value: object, sheets: Mapping[str, DeviceSheet]) -> str:
    """Return a kind of device, which must be known."""
    known = (*sheets, *SHEETS)
    if not isinstance(value, str) or (value not in known and value != "cpu"):
        raise UserError(f"device must be one of {', '.join(known)} or cpu, or be described in devices, got {value!r}")
    return value


def _sheets(value: object) -> dict[str, DeviceSheet]:
    """Return the devices that a file describes itself, by name."""
    if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
        raise UserError(f'devices must be an object such as {{"mine": {{"peak_flops": 1e14, ...}}}}, got {value!r}')
    found = {}
    for name, entry in value.items():
        if not name.isprintable() or name in ("", "cpu", *SHEETS):
            raise UserError(f"devices: {name!r} must be a name of its own; known already are cpu, {', '.join(SHEETS)}")
        only(
            entry,
            ("peak_flops", "single_flops", "bandwidth", "memory", "capability", "sms", "reach"),
            f"devices.{name}.",
        )
        missing = [key for key in ("peak_flops", "bandwidth", "memory") if key not in entry]
        if missing:
            raise UserError(f"devices.{name} lacks {', '.join(missing)}; needed are peak_flops, bandwidth and memory")
        rates = {key: number(f"devices.{name}.{key}", entry[key]) for key in ("peak_flops", "bandwidth", "memory")}
        single = number(f"devices.{name}.single_flops", entry.get("single_flops", rates["peak_flops"] / 2))
        capability = entry.get("capability", [8, 0])
        if not (isinstance(capability, list) and len(capability) == 2 and all(type(n) is int for n in capability)):
            raise UserError(f"devices.{name}.capability must be two integers such as [8, 0], got {capability!r}")
        sms = integer(f"devices.{name}.sms", entry["sms"]) if "sms" in entry else 0
        reach = number(f"devices.{name}.reach", entry.get("reach", DeviceSheet.reach))
        if reach > 1:
            raise UserError(f"devices.{name}.reach is a share of peak_flops, so 1 is the most, got {reach:g}")
        sheet = DeviceSheet(single_flops=single, capability=(capability[0], capability[1]), sms=sms, **rates)
        found[name] = dataclasses.replace(sheet, reach=reach)
    return found


def _sites(value: object, hosts: int) -> tuple[int, ...]:
    """Return the site of each host, numbered from 0 in the order in which they come; empty if there is one."""
    if value is None:
        return ()
    names = [str(site) for site in per_host("sites", value, hosts)]
    return site_numbers(names)


def site_numbers(names: Sequence[object]) -> tuple[int, ...]:
    """Return the site of each host, numbered from 0 in the order of the hosts; empty if all are at one.

    Args:
        names: site of each host by its name, or by another number.
    """
    known = list(dict.fromkeys(names))
    return tuple(map(known.index, names)) if len(known) > 1 else ()


def _trunks(value: object, hosts: tuple[str, ...], sites: tuple[int, ...]) -> Trunks | None:
    """Return the uplinks that hosts share; None if there are none."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UserError(f'trunks must be a list such as [{{"each": "site", "bandwidth": 125e6}}], got {value!r}')
    known, behind, bandwidth = {name: i for i, name in enumerate(hosts)}, [], []
    for entry in value:
        only(entry, ("hosts", "each", "bandwidth"), "trunks: ")
        if "bandwidth" not in entry or ("hosts" in entry) == ("each" in entry):
            raise UserError(f'each of trunks must say bandwidth, and either hosts or "each": "site", got {entry!r}')
        rate = number("trunks.bandwidth", entry["bandwidth"])
        if "each" in entry:
            if entry["each"] != "site" or not sites:
                raise UserError(f'trunks: each may be "site" if sites has two or more, got {entry["each"]!r}')
            some = [np.array(sites) == site for site in sorted(set(sites))]
        else:
            some = [_behind(entry["hosts"], known)]
        behind += some
        bandwidth += [rate] * len(some)
    return Trunks(np.array(behind), np.array(bandwidth)) if behind else None


def _behind(names: object, known: Mapping[str, int]) -> np.ndarray:
    """Return whether each host is behind a trunk, bool [H]."""
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise UserError(f"trunks: hosts must be a list of hosts of the cluster, got {names!r}")
    chosen = hostlist.expand(given)
    if not set(chosen) <= set(known):
        raise UserError(f"trunks: hosts must be a list of hosts of the cluster, got {names!r}")
    found = np.zeros(len(known), bool)
    found[[known[name] for name in chosen]] = True
    if not found.any() or found.all():
        raise UserError(
            f"trunks: some hosts must be behind a trunk and some not, got {int(found.sum())} of {len(known)}"
        )
    return found


def _rails(value: object, nics: int, devices: int, kinds: Sequence[str]) -> Rails | None:
    """Return how flows change rails; None if there are no rails."""
    if not isinstance(value, bool | dict):
        raise UserError(
            f'rails must be true or an object such as {{"pxn": false, "oversubscription": 2}}, got {value!r}'
        )
    if value is False:
        return None
    given = {} if value is True else value
    only(given, ("pxn", "oversubscription"), "rails.")
    pxn = given.get("pxn", True)
    if not isinstance(pxn, bool):
        raise UserError(f"rails.pxn must be true or false, got {pxn!r}")
    if pxn and "oversubscription" in given:
        raise UserError('rails.oversubscription is of the spine, which no flow crosses with PXN; say "pxn": false, too')
    if "cpu" in kinds:
        raise UserError("rails need GPUs, each of which has its NIC, got device cpu; leave rails out")
    if devices % nics:
        raise UserError(f"nics must divide devices_per_host if there are rails, got {nics} for {devices} devices")
    return Rails(pxn, at_least(1, "rails.oversubscription", given.get("oversubscription", 1)))


def _compute(rows: object, kinds: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Return the rows of the compute profile, which must have all keys, with values that make sense."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError("compute must be a list of objects, as planner.profile writes it")
    seen: dict[tuple, int] = {}
    for place, row in enumerate(rows):
        missing = [key for key in ("kind", "save", "dtype", *_SIZES, *_SECONDS) if key not in row]
        if missing:
            raise UserError(f"compute row {place} lacks {', '.join(missing)}; profile again")
        for key in (*_SIZES, *(key for key in _OPTIONAL_SIZES if key in row)):
            integer(f"compute row {place}: {key}", row[key])
        for key in (*_SECONDS, *(key for key in _OPTIONAL_SECONDS if key in row)):
            number(f"compute row {place}: {key}", row[key], zero=key not in ("forward", "backward"))
        known_values = {"kind": kinds, "save": SAVE_MODES, "dtype": ("bfloat16", "float32"), "family": FAMILIES}
        for key, known in known_values.items():
            path = key == "family" and ":" in str(row.get(key))  # of an architecture of one's own
            if row.get(key, known[0]) not in known and not path:
                raise UserError(f"compute row {place}: {key} must be one of {', '.join(known)}, got {row[key]!r}")
        what = tuple(row.get(key) for key in (*known_values, *_SIZES, *_OPTIONAL_SIZES))
        if seen.setdefault(what, place) != place:
            raise UserError(f"compute rows {seen[what]} and {place} measure the same; leave one of them out")
    return tuple(rows)


def _check_count(hosts: int) -> None:
    if hosts > MOST_HOSTS:
        raise UserError(f"a cluster may have {MOST_HOSTS:,} hosts, got {hosts:,}; plan for a part of them")


def _hosts(value: object) -> tuple[str, ...]:
    """Return the names of the hosts, which are made up if the value is a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        count = integer("hosts", value)
        _check_count(count)
        return tuple(f"host{i:0{len(str(count - 1))}}" for i in range(count))
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"hosts must be a number or a list of names, got {value!r}")
    found = hostlist.expand(names)
    _check_count(len(found))
    if len(set(found)) != len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise UserError(f"hosts must have different names, but {twice} comes twice")
    return tuple(found)


def _uniform(values: Sequence[object]) -> object:
    """Return the one value of all hosts, or the list of values if they differ."""
    return values[0] if len(set(values)) == 1 else list(values)


def write(fields: Fields, path: str | pathlib.Path) -> None:
    """Write a cluster file; the links of more than _IN_JSON hosts go into an .npz beside it.

    Args:
        fields: fields of the cluster.
        path: path of the JSON.
    """
    path, hosts = pathlib.Path(path), fields["hosts"]
    arrays: dict[str, Any] = {"alpha": fields["alpha"], "bandwidth": fields["samples"]}
    if fields["measured"] is not None:
        arrays["measured"] = fields["measured"]
    if len(hosts) > _IN_JSON:
        beside = path.with_suffix(".npz")
        with files.replacing(beside) as new, new.open("wb") as file:
            np.savez_compressed(file, **arrays)
        links: dict[str, object] = {"npz": beside.name}
    else:
        links = {name: array.tolist() for name, array in arrays.items()}
    links |= {"nominal": list(fields["nominal"])} if fields["nominal"] else {}
    values = {
        "version": VERSION,
        "name": fields["name"],
        "source": fields["source"],
        "hosts": list(hosts) if fields["named"] else len(hosts),
        "devices_per_host": fields["devices_per_host"],
        "device": _uniform(fields["kinds"]),
        "memory": _uniform(fields["memory"].tolist()),
        "nics": fields["nics"],
        "fan_out": fields["fan_out"],
        "links": links,
        "compute": list(fields["compute"]),
    }
    if fields["sheets"]:
        described = {name: dataclasses.asdict(sheet) for name, sheet in fields["sheets"].items()}
        # Multiprocessors that are not known are 0 here, and not there.
        values["devices"] = {name: {k: v for k, v in one.items() if v} for name, one in described.items()}
    if fields["sites"]:
        values["sites"] = list(fields["sites"])
    if fields["trunks"]:
        values["trunks"] = [
            {"hosts": [name for name, one in zip(hosts, behind) if one], "bandwidth": rate}
            for behind, rate in fields["trunks"]
        ]
    if fields["rails"]:
        values["rails"] = fields["rails"].pxn or dataclasses.asdict(fields["rails"])
    files.write(path, json.dumps(values, indent=1) + "\n")
