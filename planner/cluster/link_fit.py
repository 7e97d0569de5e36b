"""Fits of links: one link to the times of its messages, and links that were not measured to those that were.

For the second each sender, each receiver and each ordered pair of racks has a factor:

    log(seconds per byte of a -> b) = c + sender[a] + receiver[b] + racks[rack(a), rack(b)]

The fit is a ridge regression, so the factors of a host with few measured links stay close to the mean. Links inside
hosts are not part of it; the median of the measured ones stands for the others.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

_RIDGE = 0.3  # damping, in units of one link's weight
_TESTED = 0.1  # share of the measured links that are held out to estimate the fit's error


@dataclasses.dataclass(frozen=True, eq=False)
class Filled:
    """All links, measured or fitted.

    Attributes:
        alpha: [H, H] seconds of latency.
        samples: [R, H, H] bytes/s in each repeat.
        measured: [H, H] bool, whether the link was ever measured.
        error: median relative error of the seconds per byte of measured links that were held out of the fit; NaN if no
            link between hosts was filled in.
    """

    alpha: np.ndarray
    samples: np.ndarray
    measured: np.ndarray
    error: float


def fit_line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit the latency and the seconds per byte of messages by least squares of the relative errors.

    Neither is negative.

    Args:
        sizes: [K] bytes.
        seconds: [..., K].

    Returns:
        Latency [...] in seconds, and seconds per byte [...], which are above zero.
    """
    sizes = np.asarray(sizes, float)
    # (a + b s) / t = 1, whose normal equations are two by two.
    u, v = 1 / seconds, sizes / seconds
    uu, uv, vv, u1, v1 = (x.sum(-1) for x in (u * u, u * v, v * v, u, v))
    determinant = uu * vv - uv * uv
    through_zero = v1 / vv
    if len(sizes) == 1:
        return np.zeros_like(through_zero), through_zero
    latency = (vv * u1 - uv * v1) / determinant
    slope = (uu * v1 - uv * u1) / determinant
    bent = (latency < 0) | (slope <= 0)
    return np.where(bent, 0.0, latency), np.where(bent, through_zero, slope)


def multiplicative(values: np.ndarray, racks: Sequence[int]) -> np.ndarray:
    """Return the fitted values [H, H] of all links between hosts; ignore the diagonal.

    Args:
        values: [H, H] positive values, NaN if unknown. At least one off the diagonal must be known.
        racks: [H] rack of each host, numbered from 0.
    """
    hosts, rack = len(values), np.asarray(racks)
    count = rack.max() + 1
    known = ~np.isnan(values) & ~np.eye(hosts, dtype=bool)
    a, b = np.nonzero(known)
    logs = np.log(values[a, b])
    mean = logs.mean()
    columns = np.stack([a, hosts + b, 2 * hosts + rack[a] * count + rack[b]])
    rows = np.broadcast_to(np.arange(len(a)), columns.shape)
    width = 2 * hosts + count * count
    ones = np.ones(columns.size)
    matrix = sparse.csr_matrix((ones, (rows.ravel(), columns.ravel())), shape=(len(a), width))
    found = linalg.lsqr(matrix, logs - mean, damp=_RIDGE, atol=1e-10, btol=1e-10)[0]
    sender, receiver, pairs = found[:hosts], found[hosts : 2 * hosts], found[2 * hosts :].reshape(count, count)
    return np.exp(mean + sender[:, None] + receiver[None] + pairs[rack[:, None], rack[None]])


def _held_out_error(per_byte: np.ndarray, racks: Sequence[int], seed: int) -> float:
    """Return the median relative error of the fit at a tenth of the known links, which it does not see."""
    known = np.argwhere(~np.isnan(per_byte) & ~np.eye(len(per_byte), dtype=bool))
    chosen = np.random.default_rng(seed).permutation(known)[: max(1, round(_TESTED * len(known)))]
    a, b = chosen.T
    rest = per_byte.copy()
    rest[a, b] = np.nan
    if np.isnan(rest[~np.eye(len(rest), dtype=bool)]).all():
        return np.nan
    return float(np.median(np.abs(multiplicative(rest, racks)[a, b] / per_byte[a, b] - 1)))


def _filled(values: np.ndarray, racks: Sequence[int]) -> np.ndarray:
    """Return values [H, H] without NaNs: fitted ones between hosts, the median of the known ones on the diagonal."""
    diagonal = np.eye(len(values), dtype=bool)
    result = values.copy()
    unknown = np.isnan(values)
    if (unknown & ~diagonal).any():
        result = np.where(unknown & ~diagonal, multiplicative(values, racks), result)
    inside = values[diagonal]
    # With one device per host there are no links inside hosts. The fastest link between hosts then fills the diagonal,
    # and nothing uses it.
    inside = np.nanmedian(inside) if not np.isnan(inside).all() else result[~diagonal].min(initial=np.inf)
    return np.where(unknown & diagonal, inside, result)


def fill(alpha: np.ndarray, samples: np.ndarray, racks: Sequence[int], seed: int = 0) -> Filled:
    """Fill in the links and samples that were not measured.

    A missing sample of a measured link is the median of its other samples. A link without any sample is fitted.

    Args:
        alpha: [H, H] seconds of latency, NaN if unknown.
        samples: [R, H, H] bytes/s, NaN if unknown. Repeats without any known sample are dropped.
        racks: [H] rack of each host, numbered from 0.
        seed: seed of the choice of links that are held out to estimate the fit's error.
    """
    samples = samples[~np.isnan(samples).all(axis=(1, 2))]
    seen = ~np.isnan(samples).all(axis=0)
    per_byte = np.full(alpha.shape, np.nan)
    per_byte[seen] = 1 / np.nanmedian(samples[:, seen], axis=0)
    measured = seen.copy()
    off = ~np.eye(len(alpha), dtype=bool)
    error = _held_out_error(per_byte, racks, seed) if (~seen & off).any() else np.nan
    whole = 1 / _filled(per_byte, racks)
    return Filled(_filled(alpha, racks), np.where(np.isnan(samples), whole, samples), measured, error)
