"""The best permutation by its largest element, which bounds the slowest link of rings that use every host once.

It is found here because importing scipy's matching would take longer than a whole search's use of it.
"""

import numpy as np

Array = np.ndarray


def bottleneck(cost: Array) -> float:
    """Return the least value that the largest element of a permutation of a square matrix can have."""
    values = np.unique(cost[np.isfinite(cost)])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _permutes(cost <= values[middle]):
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def _permutes(allowed: Array) -> bool:
    """Return whether a permutation of the rows has allowed entries alone, bool [n, n].

    Rows are given columns one after another, along augmenting paths. Sets of columns are bits of integers.
    """
    columns = [int.from_bytes(row.tobytes(), "little") for row in np.packbits(allowed, axis=1, bitorder="little")]
    of_row, of_column, taken = [-1] * len(columns), [-1] * len(columns), 0
    for row in range(len(columns)):
        rows, before, seen = [row], [-1] * len(columns), 0  # rows that may give their columns up, and the row for whom
        for other in rows:
            if free := columns[other] & ~taken:
                column = (free & -free).bit_length() - 1
                before[column] = other
                break
            new = columns[other] & ~seen
            seen |= new
            while new:
                column = (new & -new).bit_length() - 1
                new &= new - 1
                before[column] = other
                rows.append(of_column[column])
        else:
            return False
        taken |= 1 << column
        while column >= 0:
            other = before[column]
            of_column[column], of_row[other], column = other, column, of_row[other]
            if other == row:
                break
    return True
