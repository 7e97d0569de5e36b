"""Links that were not measured, from those that were: a sender, a receiver and a pair of racks each have a factor.

    log(seconds per byte of a -> b) = c + sender[a] + receiver[b] + racks[rack(a), rack(b)]

by ridge regression, so that a host seen seldom keeps to the mean. Links inside a host have a factor per host only.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

_RIDGE = 0.3  # in units of one link's weight
_TESTED = 0.1  # share of the measured links that the fit's error is told from


@dataclasses.dataclass(frozen=True, eq=False)
class Filled:
    """All links, measured or fitted.

    Attributes:
        alpha: [H, H] seconds.
        samples: [R, H, H] bytes/s.
        measured: [H, H] bool, whether the link was ever measured.
        error: median relative error of the bandwidth of measured links that the fit did not see; NaN where nothing was
            filled in.
    """

    alpha: np.ndarray
    samples: np.ndarray
    measured: np.ndarray
    error: float


def multiplicative(values: np.ndarray, racks: Sequence[int]) -> np.ndarray:
    """All of [H, H] positive values from those off the diagonal that are not NaN, smoothed; the diagonal means nothing.

    Args:
        values: [H, H], NaN where unknown; at least one off the diagonal is known.
        racks: [H] of each host.
    """
    hosts, racks = len(values), np.asarray(racks)
    count = racks.max() + 1
    known = ~np.isnan(values) & ~np.eye(hosts, dtype=bool)
    a, b = np.nonzero(known)
    logs = np.log(values[a, b])
    mean = logs.mean()
    columns = np.stack([a, hosts + b, 2 * hosts + racks[a] * count + racks[b]])
    rows = np.broadcast_to(np.arange(len(a)), columns.shape)
    width = 2 * hosts + count * count
    ones = np.ones(columns.size)
    matrix = sparse.csr_matrix((ones, (rows.ravel(), columns.ravel())), shape=(len(a), width))
    found = linalg.lsqr(matrix, logs - mean, damp=_RIDGE, atol=1e-10, btol=1e-10)[0]
    sender, receiver, pairs = found[:hosts], found[hosts : 2 * hosts], found[2 * hosts :].reshape(count, count)
    return np.exp(mean + sender[:, None] + receiver[None] + pairs[racks[:, None], racks[None]])


def _held_out_error(per_byte: np.ndarray, racks: Sequence[int], seed: int) -> float:
    """Median relative error at a tenth of the known links, fitted from the rest."""
    known = np.argwhere(~np.isnan(per_byte) & ~np.eye(len(per_byte), dtype=bool))
    chosen = np.random.default_rng(seed).permutation(known)[: max(1, round(_TESTED * len(known)))]
    a, b = chosen.T
    rest = per_byte.copy()
    rest[a, b] = np.nan
    if np.isnan(rest[~np.eye(len(rest), dtype=bool)]).all():
        return np.nan
    return float(np.median(np.abs(multiplicative(rest, racks)[a, b] / per_byte[a, b] - 1)))


def _filled(values: np.ndarray, racks: Sequence[int]) -> np.ndarray:
    """[H, H] with the unknown ones fitted; on the diagonal, where some are known, with their median."""
    diagonal = np.eye(len(values), dtype=bool)
    result = values.copy()
    unknown = np.isnan(values)
    if (unknown & ~diagonal).any():
        result = np.where(unknown & ~diagonal, multiplicative(values, racks), result)
    inside = values[diagonal]
    # With one device per host no link inside a host exists: the quickest between hosts stands for it, never used.
    inside = np.nanmedian(inside) if not np.isnan(inside).all() else result[~diagonal].min(initial=np.inf)
    return np.where(unknown & diagonal, inside, result)


def fill(alpha: np.ndarray, samples: np.ndarray, racks: Sequence[int], seed: int = 0) -> Filled:
    """Fills in what was not measured: a link from its other samples, and one without any from the fit.

    Args:
        alpha: [H, H] seconds, NaN where unknown.
        samples: [R, H, H] bytes/s, NaN where unknown; repeats without any are dropped.
        racks: [H] of each host, from 0 on.
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
