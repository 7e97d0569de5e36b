"""Lengths of documents, and how evenly attention within them spreads over devices that share sequences."""

from collections.abc import Iterable, Sequence

import numpy as np

from paxtrain.data.token_files import TokenFile, samples_per_epoch

FILE = "lengths.csv"  # the histogram, beside the token files
_COLUMNS = "set,least,most,documents,tokens"
_MOST_TOKENS = 2**23  # that are read to tell the balance


def histogram(lengths: Sequence[int] | np.ndarray) -> list[tuple[int, int, int, int]]:
    """Return rows (least, most, documents, tokens) of documents by length, each up to a power of two.

    Args:
        lengths: tokens of each document.
    """
    sizes = np.asarray(lengths, np.int64)
    kinds = np.ceil(np.log2(np.maximum(sizes, 1))).astype(int)
    rows = []
    for kind in np.unique(kinds).tolist():
        own = sizes[kinds == kind]
        rows.append((2**kind // 2 + 1 if kind else 0, 2**kind, len(own), int(own.sum())))
    return rows


def text(lengths: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return the content of the histogram's file, given the name of each set and its documents' tokens."""
    lines = [f"{name},{','.join(map(str, row))}" for name, own in lengths for row in histogram(own)]
    return "\n".join([_COLUMNS, *lines, ""])


def pairs(tokens: np.ndarray, separator: int, context: int) -> np.ndarray:
    """Return how many pairs of tokens that see each other each device has, int64 [samples, context].

    A token sees those before it in its document, and itself. A document begins with a separator, as
    model.transformer.document_starts has it. Device i has the parts i and 2C - 1 - i of a sequence.

    Args:
        tokens: ids [samples, S].
        separator: id with which documents begin.
        context: number of devices C that share a sequence.
    """
    index = np.arange(tokens.shape[1])
    seen = index + 1 - np.maximum.accumulate(np.where(tokens == separator, index, 0), axis=1)
    parts = seen.reshape(len(tokens), 2 * context, -1).sum(axis=2)
    return parts[:, :context] + parts[:, : context - 1 : -1]


def imbalance(sets: Iterable[tuple[TokenFile, float]], sequence: int, separator: int, context: int) -> float:
    """Return the pairs of the busiest device of each sequence over the mean of its devices, for samples of data sets.

    Args:
        sets: files of tokens, and their shares of the samples.
        sequence: tokens of a sample.
        separator: id with which documents begin.
        context: number of devices that share a sequence.
    """
    busiest = mean = 0.0
    for file, share in sets:
        every = samples_per_epoch(len(file), sequence)
        places = np.unique(np.linspace(0, every - 1, max(min(every, _MOST_TOKENS // sequence), 1)).astype(int))
        for place in places.tolist():
            own = pairs(file.sample(place, sequence)[None, :-1], separator, context)
            busiest += share * float(own.max()) / len(places)
            mean += share * float(own.mean()) / len(places)
    return busiest / mean
