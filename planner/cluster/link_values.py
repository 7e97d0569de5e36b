"""The links of a cluster's JSON as matrices: given by matrices, by an .npz, or by classes of links."""

import pathlib
from collections.abc import Mapping
from types import EllipsisType

import numpy as np

from paxtrain.errors import UserError
from planner.cluster import array_file, hostlist
from planner.cluster.values import number, only, per_host

NOMINAL = ("inside", "between")  # classes of links
_LinkIndex = EllipsisType | np.ndarray | tuple[np.ndarray, ...]  # index of links in a matrix [H, H]


def links_of(
    links: object, hosts: tuple[str, ...], folder: pathlib.Path, sites: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return alpha [H, H], samples [R, H, H], and which links were measured [H, H]; None: all.

    Args:
        links: the JSON's value.
        hosts: names of the hosts.
        folder: folder of the .npz that it may name.
        sites: site of each host; empty: there is one.
    """
    if not isinstance(links, dict):
        raise UserError(f"links must be an object, got {links!r}")
    if "npz" in links:
        only(links, ("npz", "nominal"))
        given: Mapping[str, object] = array_file.read(folder / str(links["npz"]), len(hosts))
        only(given, ("alpha", "bandwidth", "measured"), "links.npz: ")
    elif "between" in links or "inside" in links:
        return *_classes(links, hosts, sites), None
    else:
        only(links, ("alpha", "bandwidth", "measured", "nominal"))
        given = links
    measured = _measured(given["measured"], len(hosts)) if "measured" in given else None
    for name in ("alpha", "bandwidth"):
        if name not in given:
            raise UserError(f"links.{name} is missing; needed are alpha and bandwidth, an npz, or inside and between")
    alpha = _matrix("links.alpha", given["alpha"], hosts, zero=True)
    samples = _matrix("links.bandwidth", given["bandwidth"], hosts, zero=False)
    if alpha.ndim == 3:
        raise UserError("links.alpha must be a number or one matrix; only bandwidth may have several samples")
    return np.broadcast_to(alpha, (len(hosts),) * 2), samples.reshape(-1, len(hosts), len(hosts)), measured


def nominal_of(links: Mapping[str, object]) -> tuple[str, ...]:
    """Return the classes of links whose bandwidths are a data sheet's; those that `links_of` has read.

    Args:
        links: the JSON's value.
    """
    value = links.get("nominal", list(NOMINAL) if "between" in links else [])
    if not isinstance(value, list) or not set(map(str, value)) <= set(NOMINAL):
        raise UserError(f"links.nominal must be a list of some of {', '.join(NOMINAL)}, got {value!r}")
    return tuple(name for name in NOMINAL if name in value)


def _measured(value: object, hosts: int) -> np.ndarray:
    """Return which links were measured, bool [H, H]."""
    array = value if isinstance(value, np.ndarray) and value.dtype == bool else np.asarray(value, object)
    truths = array.dtype == bool or all(isinstance(x, bool | np.bool_) for x in array.ravel())
    if array.shape != (hosts, hosts) or not truths:
        raise UserError(f"links.measured must be true or false for {hosts} x {hosts} links")
    return array.astype(bool)


def _matrix(name: str, value: object, hosts: tuple[str, ...], zero: bool) -> np.ndarray:
    """Return an array of the value: [H, H], [R, H, H], or [] if `zero` is allowed."""
    size = len(hosts)
    try:
        array = np.array(value, float)
        kinds = {type(x) for x in np.array(value, object).flat} if isinstance(value, list) else set()
        if not kinds <= {int, float, type(None)}:  # None is nan
            raise ValueError("numpy takes texts and truth values for numbers")
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"{name} must be a matrix of {size} x {size} numbers for the {size} hosts, but its rows differ in length "
            "or hold something else (null for a missing link?)"
        ) from None
    if array.ndim == 0 and zero:
        return np.array(number(name, value, zero=True))
    if array.ndim not in (2, 3) or array.shape[-2:] != (size, size) or array.size == 0:
        given = " x ".join(map(str, array.shape)) or "a number"
        raise UserError(f"{name} must be a matrix of {size} x {size} for the {size} hosts, got {given}")
    bad = ~np.isfinite(array) | (array < 0) | ((array == 0) & (not zero))
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        a, b = place[-2:]
        where = f"from {hosts[a]} to {hosts[b]}" if a != b else f"inside {hosts[a]}"
        raise UserError(f"{name} {where} must be {'from 0 on' if zero else 'above 0'}, got {array[place]:g}")
    return array


def _classes(
    links: Mapping[str, object], hosts: tuple[str, ...], sites: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return alpha [H, H] and one sample of the bandwidth [1, H, H] of links that are given by classes.

    Args:
        links: the classes.
        hosts: names of the hosts.
        sites: site of each host; empty: there is one.
    """
    only(links, ("inside", "between", "racks", "across", "sites", "exceptions", "nominal"))
    size, index = len(hosts), {name: i for i, name in enumerate(hosts)}
    alpha, bandwidth = np.empty((size, size)), np.empty((size, size))

    def put(name: str, values: object, where: _LinkIndex, needed: bool = True) -> None:
        if not isinstance(values, dict):
            raise UserError(f"links.{name} must be an object with alpha and bandwidth, got {values!r}")
        if needed and not {"alpha", "bandwidth"} <= set(values):
            raise UserError(f"links.{name} must say alpha and bandwidth, got {', '.join(values) or 'nothing'}")
        if "alpha" in values:
            alpha[where] = number(f"links.{name}.alpha", values["alpha"], zero=True)
        if "bandwidth" in values:
            bandwidth[where] = number(f"links.{name}.bandwidth", values["bandwidth"])

    for name in ("inside", "between"):
        if name not in links:
            raise UserError(f"links.{name} is missing; classes need inside (a host) and between (hosts)")
    put("between", links["between"], ...)
    if ("racks" in links) != ("across" in links):
        raise UserError("links.racks and links.across go together; give both or neither")
    if "racks" in links:
        racks = np.array([str(rack) for rack in per_host("links.racks", links["racks"], size)])
        put("across", links["across"], racks[:, None] != racks[None])
    if ("sites" in links) != bool(sites):
        raise UserError("links.sites needs two sites or more in sites, and they need it; give both or neither")
    if sites:
        site = np.array(sites)
        put("sites", links["sites"], site[:, None] != site[None])
    diagonal = np.diag_indices(size)
    put("inside", links["inside"], diagonal)

    def chosen(value: object) -> list[int]:
        names = [value] if isinstance(value, str) else value
        if names == ["*"]:
            return list(range(size))
        texts = names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []
        found = hostlist.expand(texts)
        if not found or not set(found) <= set(index):
            raise UserError(f'from and to in links.exceptions must be hosts or "*", got {value!r}')
        return [index[name] for name in found]

    exceptions = links.get("exceptions", [])
    if not isinstance(exceptions, list):
        raise UserError(f"links.exceptions must be a list, got {exceptions!r}")
    for values in exceptions:
        if not isinstance(values, dict) or not {"from", "to"} <= set(values):
            raise UserError(f"each of links.exceptions must say from and to, got {values!r}")
        only(values, ("from", "to", "alpha", "bandwidth"), "links.exceptions: ")
        kept = alpha[diagonal].copy(), bandwidth[diagonal].copy()
        rows, columns = chosen(values["from"]), chosen(values["to"])
        put("exceptions", values, np.ix_(rows, columns), needed=False)
        if "*" in (values["from"], values["to"]):  # of the links between hosts
            alpha[diagonal], bandwidth[diagonal] = kept
    return alpha, bandwidth[None]
