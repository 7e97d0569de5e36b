"""The layer slots of a chunk, which all virtual stages share although their layers may be of several kinds.

Each slot holds layers of one kind. A virtual stage puts its layers, in their order, into the first slots that fit, and
leaves others empty. All devices run one program, so an empty slot costs memory, and a layer of it is skipped.
"""

from collections.abc import Sequence


def shared_slots(stages: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the kinds of the slots, so that each virtual stage finds its layers among them in order.

    Stages are merged one by one into a shortest common supersequence, which is the least for two; with layers of one
    kind the slots are as many as the longest stage's layers.

    Args:
        stages: kinds of the layers of each virtual stage.
    """
    found: tuple[str, ...] = ()
    for one in dict.fromkeys(map(tuple, stages)):
        found = _merged(found, one)
    return found


def _merged(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    """Return a shortest sequence in which both sequences are found in order."""
    left = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]  # length for a[i:] and b[j:]
    for i in range(len(a), -1, -1):
        for j in range(len(b), -1, -1):
            if i == len(a) or j == len(b):
                left[i][j] = len(a) - i + len(b) - j
            elif a[i] == b[j]:
                left[i][j] = 1 + left[i + 1][j + 1]
            else:
                left[i][j] = 1 + min(left[i + 1][j], left[i][j + 1])
    found, i, j = list[str](), 0, 0
    while i < len(a) and j < len(b):
        same, first = a[i] == b[j], left[i + 1][j] <= left[i][j + 1]
        found.append(a[i] if same or first else b[j])
        i, j = i + (same or first), j + (same or not first)
    return (*found, *a[i:], *b[j:])


def filled(slots: Sequence[str], layers: Sequence[str]) -> tuple[int, ...]:
    """Return the slot of each layer of a virtual stage: the first one of its kind behind that of the layer before.

    Args:
        slots: kinds of the slots, as `shared_slots` returns them.
        layers: kinds of the virtual stage's layers.
    """
    free = iter(range(len(slots)))
    return tuple(next(slot for slot in free if slots[slot] == kind) for kind in layers)
