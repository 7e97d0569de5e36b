"""Forward, backward and optimizer of kernels that the host launched one by one, by the operators around the launches.

PyTorch runs backwards in threads of the autograd engine, each node inside `autograd::engine::evaluate_function: ...`.
What is recomputed there counts as B. A pass is F followed by B; what is launched after B and before the next F, such as
the clipping of gradients, is neither, and neither is what threads beside that of F launch. If some F have half as many
kernels again as others, as where a pipeline's stage runs several F in a row, the number of passes is not known.

The loss tells the head from the layers: in F the head begins with the last matrix product before the loss, and in B it
ends with the first product's gradient. The final norm counts as the layers'.
"""

import bisect
import collections
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from planner.traces.kernels import (
    BACKWARD,
    COLLECTIVE,
    EMBEDDING,
    FORWARD,
    HEAD,
    LAYERS,
    NOTHING,
    OPTIMIZER,
    OTHER,
    SOME,
    WHOLE_LAYERS,
    TracedKernel,
)

_OPTIMIZER = re.compile(r"^Optimizer\.step|(?i:\boptimizer[ _.-]?step)|(?i:^optimizer$)")
_BACKWARD = re.compile(
    r"autograd::engine::evaluate_function|Backward\d*(?:$|,)|(?i:^(?!.*forward).*(?<![a-z])backward(?![a-z]))"
)
_LOSS = re.compile(r"(?i)cross_?entropy|nll_loss|log_softmax")
_PRODUCT = re.compile(r"^aten::(?:linear|matmul|mm|addmm)\b|^Linear|_Linear\b")
_PRODUCT_GRADIENT = re.compile(r"(?:Mm|Addmm|Matmul|Linear\w*)Backward")
_EMBEDDING = re.compile(r"(?i)embedding")
# Operators that only F has, so that in B they are F's, run again: those of a layer's products, and others.
_EVEN = 1.5  # kernels of the longest F over those of the shortest
_AGAIN = re.compile(r"^aten::linear(?:$|,)|CheckpointFunctionBackward")
_SOME_AGAIN = re.compile(r"^aten::(?:native_layer_norm|rms_norm|scaled_dot_product_attention)(?:$|,)")


class Operator(NamedTuple):
    """An operator, or an annotated range, on a thread of the host; times in seconds."""

    name: str
    thread: int
    start: float
    end: float


class KernelLaunch(NamedTuple):
    """The launch of a kernel by a thread of the host; times in seconds."""

    thread: int
    time: float
    kernel: str
    start: float
    end: float


class Labelled(NamedTuple):
    """Kernels with their parts; the number of passes; whether the head is told apart; what B runs again of F."""

    kernels: tuple[TracedKernel, ...]
    passes: int
    head: bool
    recomputes: str


def _around(
    operators: Sequence[Operator], launches: Sequence[KernelLaunch]
) -> Iterator[tuple[KernelLaunch, list[str]]]:
    """Yield each launch with the names of the operators that it lies in, from the outermost on."""
    of_thread: dict[int, list[Operator]] = {}
    for operator in sorted(operators, key=lambda o: (o.start, -o.end)):
        of_thread.setdefault(operator.thread, []).append(operator)
    for thread, some in itertools.groupby(sorted(launches), key=lambda launch: launch.thread):
        waiting, stack = iter(of_thread.get(thread, [])), list[Operator]()
        following = next(waiting, None)
        for launch in some:
            while following is not None and following.start <= launch.time:
                stack = [operator for operator in stack if operator.end > following.start]
                stack.append(following)
                following = next(waiting, None)
            stack = [operator for operator in stack if operator.end >= launch.time]
            yield launch, [operator.name for operator in stack]


class _PhasedLaunch(NamedTuple):
    """A launch, its step (-1: outside), its phase as far as its operators tell, and whether it is an embedding's.

    `again` is what of F it belongs to, if it is B's.
    """

    launch: KernelLaunch
    step: int
    phase: str
    embedding: bool
    again: str


def _phase(names: Sequence[str], autograd: bool) -> str:
    if any(map(_OPTIMIZER.search, names)):
        return OPTIMIZER
    return BACKWARD if autograd or any(map(_BACKWARD.search, names)) else FORWARD


def _again(names: Sequence[str]) -> str:
    """Return what of F operators of B run again."""
    whole = any(map(_AGAIN.search, names))
    return WHOLE_LAYERS if whole else SOME if any(map(_SOME_AGAIN.search, names)) else NOTHING


def _step(time: float, steps: Sequence[tuple[float, float]]) -> int:
    """Return the number of the step that a time lies in; -1: none. Without steps all is one."""
    if not steps:
        return 0
    at = bisect.bisect_right(steps, (time, float("inf"))) - 1
    return at if at >= 0 and time <= steps[at][1] else -1


def label(
    operators: Sequence[Operator],
    launches: Sequence[KernelLaunch],
    steps: Sequence[tuple[float, float]] = (),
    autograd: Collection[int] = (),
) -> Labelled:
    """Return the kernels with their parts of the step.

    Args:
        operators: operators and annotated ranges of the host's threads.
        launches: launches of kernels.
        steps: start and end of each whole step, in order; (): the trace marks none, and all of it counts.
        autograd: threads of the autograd engine, if their operators are not in the trace.
    """
    found = []
    for launch, names in _around(operators, launches):
        phase, step = _phase(names, launch.thread in autograd), _step(launch.time, steps)
        again = _again(names) if phase == BACKWARD else NOTHING
        found.append(_PhasedLaunch(launch, step, phase, any(map(_EMBEDDING.search, names)), again))
    found = _of_one_thread(sorted((one for one in found if one.step >= 0), key=lambda one: one.launch.time))
    kernels = [_kernel(one, OTHER, -1, False) for one in found if one.phase == OTHER]
    phased = [one for one in found if one.phase != OTHER]
    runs = [list(some) for _, some in itertools.groupby(phased, key=lambda one: (one.step, one.phase))]
    lengths, heads, number = list[int](), 0, 0
    while number < len(runs):
        run, after = runs[number], runs[number + 1] if number + 1 < len(runs) else []
        if run[0].phase == FORWARD and after and (after[0].step, after[0].phase) == (run[0].step, BACKWARD):
            begin, end, known = _head(operators, run, after)
            heads += known
            kernels += [_kernel(one, FORWARD, len(lengths), one.launch.time >= begin) for one in run]
            kernels += [_kernel(one, BACKWARD, len(lengths), one.launch.time <= end) for one in after]
            lengths.append(len(run))
            number += 2
            continue
        phase = OPTIMIZER if run[0].phase == OPTIMIZER else OTHER
        kernels += [_kernel(one, phase, -1, False) for one in run]
        number += 1
    kinds = {one.again for one in found}
    recomputes = next((kind for kind in (WHOLE_LAYERS, SOME) if kind in kinds), NOTHING)
    passes = len(lengths) if lengths and max(lengths) <= _EVEN * min(lengths) else 0
    return Labelled(tuple(kernels), passes, 0 < heads == len(lengths), recomputes)


def _of_one_thread(found: list[_PhasedLaunch]) -> list[_PhasedLaunch]:
    """Return the launches with F's phase only on the thread that has most of it; that of others is OTHER."""
    counts = collections.Counter(one.launch.thread for one in found if one.phase == FORWARD)
    main = max(counts, key=lambda thread: counts[thread], default=None)
    return [one._replace(phase=OTHER) if one.phase == FORWARD and one.launch.thread != main else one for one in found]


def _kernel(one: _PhasedLaunch, phase: str, run: int, head: bool) -> TracedKernel:
    place = HEAD if head else EMBEDDING if one.embedding else LAYERS
    link = re.search(COLLECTIVE, one.launch.kernel) is not None
    return TracedKernel(one.launch.start, one.launch.end, one.launch.time, phase, place, run, link)


def _head(
    operators: Sequence[Operator], forward: Sequence[_PhasedLaunch], backward: Sequence[_PhasedLaunch]
) -> tuple[float, float, bool]:
    """Return when the head begins in F and ends in B, and whether there is a loss, without which neither is known."""
    first, turn, last = forward[0].launch.time, backward[0].launch.time, backward[-1].launch.time
    threads = {one.launch.thread for one in forward}
    of_forward = [o for o in operators if o.thread in threads and o.end >= first and o.start < turn]
    losses = [o.start for o in of_forward if _LOSS.search(o.name) and not _BACKWARD.search(o.name)]
    if not losses:
        return float("inf"), float("-inf"), False
    products = [o for o in of_forward if _PRODUCT.search(o.name) and o.start < min(losses)]
    latest = max(products, key=lambda o: o.start, default=None)
    begin = min((o.start for o in products if latest and o.end >= latest.end), default=min(losses))
    threads = {one.launch.thread for one in backward}
    gradients = [o for o in operators if o.thread in threads and o.end >= turn and o.start <= last]
    ends = [(o.start, o.end) for o in gradients if _PRODUCT_GRADIENT.search(o.name)]
    return begin, min(ends)[1] if ends else float("-inf"), bool(ends)
