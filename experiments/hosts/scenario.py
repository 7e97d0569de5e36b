"""Scenarios: the speeds of a cluster's links. Each is a JSON file, in scenarios/ or elsewhere.

    {"what": "a sentence", "devices_per_host": 1, "share": 0.2,     of one core for each host
     "slowness": 1,                                 devices take so many times as long as lab/device.py says
     "links": {...}, "shuffle": true}                                hosts in a random order that the plan does not know

`links`, in Mbit/s:

    {"all": 100}
    {"inside": 200, "between": 40, "racks": 2}          racks of equal size
    {"inside": 200, "uplink": 40, "racks": 2}           racks whose hosts share an uplink to the others
    {"uplink": 40}                                      one uplink a host, for all that it sends and gets
    {"all": 100, "slow_host": 20}                       one host's links are slower, both ways
    {"all": 100, "spread_of": "configs/clusters/a100_16x8_measured.json"}   each link by as much above or below the mean
                                                        as a link of that measured cluster, drawn at random
    {"rates": [[0, 50, ...], ...]}                      from row to column
"""

import dataclasses
import json
import pathlib

import numpy as np

from experiments.hosts.network import Uplinks
from paxtrain.errors import UserError

FOLDER = pathlib.Path(__file__).parent / "scenarios"
ROOT = pathlib.Path(__file__).resolve().parents[2]
_KEYS = {"what", "devices_per_host", "share", "slowness", "links", "shuffle"}
LEAST = 0.01  # Mbit/s
_KINDS = (
    {"all"},
    {"inside", "between", "racks"},
    {"inside", "uplink", "racks"},
    {"uplink"},
    {"all", "slow_host"},
    {"all", "spread_of"},
    {"rates"},
)


@dataclasses.dataclass(frozen=True, eq=False)
class Scenario:
    """Links of a cluster.

    Attributes:
        rates: [H, H] Mbit/s from row to column; the diagonal means nothing.
        devices_per_host: virtual devices of each.
        share: of one core for each host.
        slowness: of the devices, times as long as in other scenarios: several on a host need more of its core.
        uplinks: that hosts of a rack share; None: each pair of hosts has a link of its own.
    """

    name: str
    what: str
    rates: np.ndarray
    devices_per_host: int = 1
    share: float | None = None
    slowness: float = 1.0
    uplinks: Uplinks | None = None

    @property
    def hosts(self) -> int:
        return len(self.rates)

    @property
    def sites(self) -> list[str]:
        """Return the name of each host's site, where hosts share an uplink; all empty otherwise."""
        shared = self.uplinks is not None and len(set(self.uplinks.rack)) < self.hosts
        return [f"site{rack}" if shared else "" for rack in (self.uplinks.rack if self.uplinks else [0] * self.hosts)]

    def moved(self, hosts: np.ndarray) -> "Scenario":
        """Return the links among running processes that put process i onto host hosts[i].

        Hosts differ in their links alone, so a placement is made by giving the processes the links of the hosts on
        which it puts them: all placements of a mesh run the same compiled program.
        """
        uplinks = self.uplinks and self.uplinks.moved(hosts)
        return dataclasses.replace(self, rates=self.rates[np.ix_(hosts, hosts)], uplinks=uplinks)

    def scaled(self, factor: float) -> "Scenario":
        """Return the same scenario with all links faster by a factor."""
        uplinks = self.uplinks and dataclasses.replace(self.uplinks, mbit=self.uplinks.mbit * factor)
        return dataclasses.replace(self, rates=self.rates * factor, uplinks=uplinks)


def names() -> list[str]:
    """Return the names of the lab's scenarios."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str, hosts: int, seed: int = 0) -> Scenario:
    """Return the scenario of this name, or of a JSON file.

    Raises:
        UserError: there is none, or it makes no sense for so many hosts.
    """
    path = pathlib.Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the scenario {name!r} ({error}); name one of {', '.join(names())} or a JSON file"
        ) from error
    try:
        return _parse(values, path.stem, hosts, seed)
    except UserError as error:
        raise UserError(f"scenario {name}: {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"scenario {name} has a value of the wrong kind ({error}); rates are Mbit/s") from error


def _parse(values: dict, name: str, hosts: int, seed: int) -> Scenario:
    if not isinstance(values, dict) or set(values) - _KEYS or "links" not in values:
        raise UserError(f"it must be a JSON object with links and maybe {', '.join(sorted(_KEYS - {'links'}))}")
    rates = _rates(values["links"], hosts, np.random.default_rng(seed))
    share, devices = values.get("share"), values.get("devices_per_host", 1)
    if devices not in (1, 2, 4):
        raise UserError(f"devices_per_host must be 1, 2 or 4, got {devices!r}")
    if share is not None and not 0 < share <= 1:
        raise UserError(f"share must be above 0 and at most 1 core, got {share!r}")
    slowness = values.get("slowness", 1.0)
    if not isinstance(slowness, int | float) or not slowness > 0:
        raise UserError(f"slowness must be a number above 0, got {slowness!r}")
    uplinks = None
    if "uplink" in values["links"]:
        racks = _racks(values["links"].get("racks", hosts), hosts)
        uplinks = Uplinks(tuple(racks.tolist()), float(values["links"]["uplink"]))
    found = Scenario(name, values.get("what", ""), rates, devices, share, float(slowness), uplinks)
    return found.moved(np.random.default_rng(seed + 1).permutation(hosts)) if values.get("shuffle") else found


def _racks(count: int, hosts: int) -> np.ndarray:
    """Return the rack of each host [H]."""
    if type(count) is not int or count < 1 or hosts % count:
        raise UserError(f"{hosts} hosts do not divide into {count} racks")
    return np.arange(hosts) // (hosts // count)


def _rates(links: dict, hosts: int, random: np.random.Generator) -> np.ndarray:
    """Return [H, H] rates in Mbit/s."""
    if not isinstance(links, dict) or set(links) not in _KINDS:
        kinds = "; ".join(", ".join(sorted(kind)) for kind in _KINDS)
        raise UserError(f"links must have the keys of one of these: {kinds}; got {links!r}")
    if "rates" in links:
        rates = np.array(links["rates"], float)
        if rates.shape != (hosts, hosts):
            raise UserError(f"its rates are of shape {rates.shape}, but --hosts={hosts}")
    elif "racks" in links:
        rack, across = _racks(links["racks"], hosts), links.get("between", links.get("uplink"))
        rates = np.where(rack[:, None] == rack, float(links["inside"]), float(across))
    else:
        rates = np.full((hosts, hosts), float(links.get("all", links.get("uplink"))))
        if "slow_host" in links:
            slow = hosts // 2  # not the first one, where much happens anyway
            rates[slow], rates[:, slow] = links["slow_host"], links["slow_host"]
        if "spread_of" in links:
            rates *= _spread(links["spread_of"], hosts, random)
    if not (rates[~np.eye(hosts, dtype=bool)] >= LEAST).all():
        raise UserError(f"all rates must be at least {LEAST:g} Mbit/s")
    return rates


def _spread(name: str, hosts: int, random: np.random.Generator) -> np.ndarray:
    """Return [H, H] factors around 1, drawn from the links of a measured cluster."""
    from planner.cluster import cluster as clusters
    from planner.cluster.cluster import Cluster

    measured = Cluster.load(ROOT / name)
    between = measured.bandwidth[clusters.between(measured)]
    return random.choice(between / between.mean(), (hosts, hosts))
