"""Links that are alike: what their measurements share counts, and what is noise does not.

A search among placements chooses those whose links were measured best, by chance too. On a cluster of equal links it
would otherwise follow the noise, and predict more than there is.

Links are put into groups of about equal rates. In a group, the repeats of each link say how much of the differences is
noise, and each link moves towards the group's mean by that share:

    log rate = mean + t / (t + v) (measured log rate - mean)

v is the variance of a link's median by its repeats, and t that of the group's true rates. So links that truly differ
stay as they are, and equal ones become equal.

References:
    DerSimonian and Laird, Meta-analysis in clinical trials, Controlled Clinical Trials 7 (1986), for t.
    Efron and Morris, Data analysis using Stein's estimator and its generalizations, JASA 70 (1975), for the shrinkage.
"""

import numpy as np
from scipy import special

Array = np.ndarray

_APART = 4.0  # noise, in standard deviations of a difference of two links, that a gap between groups exceeds
_FEWEST = 4  # links of a group from which on their mean is better than each one's own rate (Efron and Morris)
_UNSURE = 5.0  # times the usual noise (variance) from which a link cannot tell groups apart


def pooled(samples: Array) -> Array:
    """Return measured rates, with the noise taken out that repeats show; ratios among a link's repeats stay.

    Args:
        samples: [R, H, H] bytes/s of each repeat, NaN if not measured; the diagonal, inside hosts, stays as it is.
    """
    repeats = (~np.isnan(samples)).sum(axis=0)
    between = (repeats > 0) & ~np.eye(len(repeats), dtype=bool)
    if not (repeats[between] > 1).any():  # nothing shows the noise
        return samples
    logs, count = np.log(samples[:, between]), repeats[between]
    rates, noise, usual = np.nanmedian(logs, axis=0), *_noise(logs, count)
    moved = np.zeros_like(rates)
    group = _groups(rates, noise, usual / count)
    for number in range(group.max() + 1):
        own = group == number
        moved[own] = _towards_mean(rates[own], noise[own])
    result = samples.copy()
    result[:, between] = np.exp(logs + moved)
    return result


def _noise(logs: Array, count: Array) -> tuple[Array, float]:
    """Return the variance of each link's median, and the usual variance of one repeat.

    A link's own repeats are few, so no link counts as quieter than usual.

    Args:
        logs: [R, N] logarithms of rates, NaN if not measured.
        count: [N] repeats of each link.
    """
    own = np.zeros(logs.shape[1])
    several = count > 1
    own[several] = np.nanvar(logs[:, several], axis=0, ddof=1)
    free = count[several] - 1
    usual = float(np.median(own[several] / (special.chdtri(free, 0.5) / free)))
    return np.maximum(own, usual) / count, usual


def _groups(rates: Array, noise: Array, usual: Array) -> Array:
    """Return the number of each link's group [N].

    Args:
        rates: [N] logarithms of the links' rates.
        noise: [N] variance of each.
        usual: [N] variance that is usual for a link with as many repeats.
    """
    sure = noise <= _UNSURE * usual
    sure |= not sure.any()
    order = np.flatnonzero(sure)[np.argsort(rates[sure], kind="stable")]
    gaps = np.diff(rates[order]) > _APART * np.sqrt(usual[order[1:]] + usual[order[:-1]])
    group = np.full(len(rates), -1)
    group[order] = np.concatenate([[0], np.cumsum(gaps)])
    # A link that is unsure belongs to the group of the nearest one that is sure, or is alone if it is far from it.
    at = np.searchsorted(rates[order], rates[~sure])
    sides = np.stack([order[np.maximum(at - 1, 0)], order[np.minimum(at, len(order) - 1)]])
    apart = np.abs(rates[sides] - rates[~sure])
    nearest = np.take_along_axis(sides, apart.argmin(axis=0)[None], 0)[0]
    alone = apart.min(axis=0) > _APART * np.sqrt(noise[~sure])
    group[~sure] = np.where(alone, group.max() + 1 + np.arange(len(nearest)), group[nearest])
    return np.unique(group, return_inverse=True)[1]


def _towards_mean(rates: Array, noise: Array) -> Array:
    """Return the distance by which each link of a group moves towards its mean.

    Args:
        rates: [N] logarithms of the links' rates.
        noise: [N] variance of each.
    """
    if len(rates) < _FEWEST or not noise.all():
        return np.zeros_like(rates)
    weights = 1 / noise
    mean = np.average(rates, weights=weights)
    excess = (weights * (rates - mean) ** 2).sum() - (len(rates) - 1)
    true = max(excess / (weights.sum() - (weights**2).sum() / weights.sum()), 0.0)
    mean = np.average(rates, weights=1 / (noise + true))
    return noise / (noise + true) * (mean - rates)
