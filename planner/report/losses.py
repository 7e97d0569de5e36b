"""Losses that the study or a probe saw for kinds of compression, for plans that compress and for those that could.

The study's figures are those of docs/study.md, which says on which model they were seen; a test compares them.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paxtrain.config import ModelConfig
from paxtrain.study.loss_probe_file import WORDS, LossProbe, ProbedCodec, excess
from planner.cost.candidate import Candidate

SOURCE = "docs/study.md"
WIDTH, WIDE = (
    64,
    256,
)  # hidden sizes of the study's model, of which its ranks are a part, and of the frontier's large one
LONG, SHORT, LARGE = 300, 50, 120  # steps of the study's runs with one seed, and of the frontier's with either model
SEEDS = 3  # of the frontier
# Codecs with an option that says how much of a message they keep, and its default.
AMOUNTS: Mapping[str, tuple[str, float]] = {"remainder": ("rank", 4), "topk": ("share", 0.05)}
_RANK = "rank"
_EPILOGUE, _ALL, _FORWARD, _DATA, _INSIDE = "epilogue", "all", "forward", "data", "data inside"
_WHAT = {
    _EPILOGUE: "epilogues",
    _ALL: "all messages",
    _FORWARD: "activations",
    _DATA: "gradients over data",
    _INSIDE: "gradients over data between groups",
    "embedding": "the embedding's gradients",
    "weights": "gathered weights",
    "outer": "differences between groups",
    "context": "keys and values",
}
_UNPROBED = ("weights", "outer", "context")  # what a probe does not compress
_WIDER = {_EPILOGUE: _ALL, _INSIDE: _DATA}  # what includes more messages, or is summed over more ranks


class CompressionKind(NamedTuple):
    """Messages and the codec that they go through.

    Attributes:
        codec: name of the codec; "" for low rank.
        what: a key of _WHAT, or several joined by "+".
        options: options of the codec that are not the default, by name, without the one of AMOUNTS.
    """

    codec: str
    what: str
    options: tuple[tuple[str, object], ...] = ()

    @property
    def words(self) -> str:
        """Codec, options and messages in words: "fp8 format=e5m2 of all messages"."""
        name = " ".join([self.codec or "low rank", *(f"{key}={value}" for key, value in self.options)])
        return f"{name} of {' and '.join(_WHAT[what] for what in self.what.split('+'))}"


class SeenLoss(NamedTuple):
    """A loss that the study saw.

    Attributes:
        run: name of the run, or of the codec on the frontier, on the page.
        amount: rank of the factors, or share that is kept; 0 for codecs without one.
        percent: percentage by which the validation loss was above dense training's, as on the page: "+1.72", or with
            the lowest and the highest of the seeds "+0.16 (-0.03 to +0.51)".
        steps: optimizer steps after which that was.
        width: hidden size of the model.
    """

    run: str
    amount: float
    percent: str
    steps: int
    width: int = WIDTH

    @property
    def words(self) -> str:
        """Loss in words, with the spread over the seeds if there were several."""
        mean, _, spread = self.percent.partition(" ")
        over = f" ({spread[1:-1]} over {SEEDS} seeds)" if spread else ""
        return f"{mean}% loss{over} after {self.steps} steps"


# Codec, amount and options by name on the frontier.
_CODECS: Mapping[str, tuple[str, float, Mapping[str, object]]] = {
    "rank 16": ("", 16, {}),
    "int8": ("int8", 0, {}),
    "fp8 e4m3": ("fp8", 0, {}),
    "fp8 e5m2": ("fp8", 0, {"format": "e5m2"}),
    "int4 + rank 2": ("remainder", 2, {}),
    "int4": ("int4", 0, {}),
    "int4 rotated": ("int4", 0, {"rotate": True}),
    "top 5%": ("topk", 0.05, {}),
    "rank 4": ("", 4, {}),
    "sign": ("sign", 0, {}),
}
# Losses with gradients between stages compressed, and with those over data.
_FRONTIER = {
    "rank 16": ("+0.85 (+0.27 to +1.86)", "+0.09 (-0.75 to +1.40)"),
    "int8": ("+0.16 (-0.03 to +0.51)", "+0.11 (-0.16 to +0.49)"),
    "fp8 e4m3": ("+0.30 (-0.05 to +0.96)", "-0.01 (-0.03 to -0.00)"),
    "fp8 e5m2": ("+0.01 (-0.04 to +0.09)", "+0.23 (-0.10 to +0.70)"),
    "int4 + rank 2": ("+0.13 (-0.28 to +0.65)", "+0.06 (+0.05 to +0.09)"),
    "int4": ("+0.10 (+0.02 to +0.15)", "+0.12 (-0.10 to +0.28)"),
    "int4 rotated": ("+0.00 (-0.12 to +0.10)", "+0.49 (+0.12 to +1.17)"),
    "top 5%": ("+6.95 (+5.34 to +8.85)", "+5.79 (+4.70 to +7.11)"),
    "rank 4": ("+6.56 (+5.28 to +8.64)", "+0.55 (-0.04 to +1.28)"),
    "sign": ("+5.41 (+3.76 to +8.47)", "+4.39 (+2.11 to +5.64)"),
}
_LARGE_FRONTIER = {
    "rank 16": ("+2.90 (+2.47 to +3.21)", "-0.10 (-0.51 to +0.22)"),
    "int8": ("+0.10 (+0.00 to +0.16)", "+0.09 (+0.01 to +0.25)"),
    "fp8 e4m3": ("+0.06 (-0.29 to +0.57)", "-0.09 (-0.18 to +0.05)"),
    "fp8 e5m2": ("+0.04 (-0.20 to +0.35)", "-0.07 (-0.27 to +0.22)"),
    "int4 + rank 2": ("+0.27 (-0.35 to +0.80)", "+0.03 (-0.18 to +0.19)"),
    "int4": ("+0.01 (-0.09 to +0.12)", "+0.04 (-0.39 to +0.37)"),
    "int4 rotated": ("+0.11 (-0.34 to +0.72)", "+0.05 (-0.27 to +0.33)"),
    "top 5%": ("+22.37 (+21.67 to +22.98)", "+24.50 (+22.08 to +26.73)"),
    "rank 4": ("+17.67 (+14.53 to +20.97)", "+2.83 (+2.39 to +3.42)"),
    "sign": ("+13.07 (+9.66 to +19.81)", "+8.00 (+6.38 to +10.18)"),
}
_WITHOUT_FEEDBACK = (("error", "none"),)
_RUNS = (
    (CompressionKind("", _ALL, _WITHOUT_FEEDBACK), SeenLoss("CB without LEP, all messages", 16, "+1.70", LONG)),
    (CompressionKind("", _ALL), SeenLoss("CB, all messages", 16, "+1.72", LONG)),
    (CompressionKind("", _ALL), SeenLoss("CB, all messages, rank 8", 8, "+4.3", LONG)),
    (CompressionKind("", _ALL), SeenLoss("CB, all messages, rank 4", 4, "+7.5", LONG)),
    (CompressionKind("", _EPILOGUE), SeenLoss("CB, epilogue", 16, "+0.10", LONG)),
    (CompressionKind("", f"{_EPILOGUE}+{_DATA}"), SeenLoss("CB epilogue + FE + SC", 16, "+0.15", LONG)),
    (CompressionKind("", f"{_ALL}+{_FORWARD}+{_DATA}"), SeenLoss("everything, activations too", 16, "+4.54", LONG)),
)


def _by_kind() -> Mapping[CompressionKind, Sequence[SeenLoss]]:
    """Return the losses of the study's runs and of its frontier by what was compressed."""
    found = collections.defaultdict(list)
    for kind, loss in _RUNS:
        found[kind].append(loss)
    for name, (codec, amount, options) in _CODECS.items():
        for what, small, large in zip((_ALL, _DATA), _FRONTIER[name], _LARGE_FRONTIER[name], strict=True):
            kind = CompressionKind(codec, what, tuple(sorted(options.items())))
            found[kind].append(SeenLoss(name, amount, small, SHORT))
            found[kind].append(SeenLoss(name, amount, large, LARGE, WIDE))
    return dict(found)


SEEN = _by_kind()


# --- Of a plan --------------------------------------------------------------------------------------------------------


class _Compressed(NamedTuple):
    """The compressed parts of a plan.

    Attributes:
        kind: codec, options and messages.
        amount: rank of the factors, or share that is kept; 0 for codecs without one.
    """

    kind: CompressionKind
    amount: float


def _compressed(c: Candidate) -> list[_Compressed]:
    """Return all that a candidate compresses."""
    places = {
        "backward": (c.backward != "none", c.backward, c.backward_rank),
        "forward": (c.compresses_forward, _FORWARD, c.coded.forward_rank),
        "data": (c.data_rank > 0, _INSIDE if c.inside > 1 else _DATA, c.data_rank),
        "embedding": (c.compresses_embedding, "embedding", 0),
        "weights": (c.compresses_weights, "weights", 0),
        "outer": (c.compresses_outer, "outer", 0),
        "context": (c.compresses_keys, "context", 0),
    }
    found = []
    for place, (used, what, rank) in places.items():
        if used:
            codec, options = c.coded.name(place), dict(c.coded.options_of(place))
            option, usual = AMOUNTS.get(codec, ("", 0))
            amount = options.pop(option, usual) if codec else rank
            found.append(_Compressed(CompressionKind(codec, what, tuple(sorted(options.items()))), float(amount)))
    return found


def words(candidate: Candidate) -> str:
    """Return what the study saw of a candidate's compression, with the source, or "" if it compresses nothing."""
    found = _compressed(candidate)
    if not found:
        return ""
    together = found[0].kind._replace(what="+".join(one.kind.what for one in found))
    if together in SEEN and len({(one.kind.codec, one.kind.options) for one in found}) == 1:
        return f"the study saw {_quoted(together, found)} ({SOURCE})"
    each = [_alone(one) for one in found]
    if len(found) > 1:
        return f"the study has no loss for these together, but alone: {'; '.join(each)} ({SOURCE})"
    [one] = found
    if SEEN.keys() & {one.kind, _wider(one.kind)}:
        return f"the study saw {each[0]} ({SOURCE})"
    measures = "; make study measures one" if one.kind.codec and one.kind.what != "outer" else ""
    return f"the study has no loss for {one.kind.words} ({SOURCE}){measures}"


def _wider(kind: CompressionKind) -> CompressionKind:
    """Return the same compression of more messages, or over more ranks; the kind itself if there is none."""
    return kind._replace(what=_WIDER.get(kind.what, kind.what))


def _alone(one: _Compressed) -> str:
    """Return the losses of runs that compressed this alone, or else more than this, in words."""
    for kind in (one.kind, _wider(one.kind)):
        if kind in SEEN:
            return _quoted(kind, [one])
    return f"nothing for {one.kind.words}"


def _quoted(kind: CompressionKind, found: Sequence[_Compressed]) -> str:
    """Return the losses of the runs whose rank or share is the nearest, and which one they do not have, in words.

    Args:
        kind: what the runs compressed, a key of SEEN.
        found: what a plan compresses.
    """
    seen = SEEN[kind]
    near = min((one.amount for one in seen), key=lambda amount: sum(abs(amount - one.amount) for one in found))
    small, large = ([one for one in seen if one.amount == near and one.width == size] for size in (WIDTH, WIDE))
    saw = f"{' and '.join(one.words for one in small)} for {kind.words}"
    more = "".join(f", and with a width of {WIDE} {one.words}" for one in large)
    if not near:
        return saw + more
    unit = AMOUNTS.get(kind.codec, (_RANK, 0))[0]
    width = f" of a width of {WIDTH}" if unit == _RANK else ""
    others = [one for one in found if one.amount != near]
    missing = " or ".join(f"{unit} {one.amount:g}" + f" of {_WHAT[one.kind.what]}" * (len(found) > 1) for one in others)
    return f"{saw} at {unit} {near:g}{width}{more}" + f", and nothing at {missing}" * bool(others)


# --- Of a probe -------------------------------------------------------------------------------------------------------


class Budgeted(NamedTuple):
    """A choice of codecs within a budget of loss.

    Attributes:
        probe: losses that were seen.
        path: file that has them.
        budget: most loss, as a share of dense training's.
        codecs: the chosen codecs, at most one of each place.
    """

    probe: LossProbe
    path: str
    budget: float
    codecs: tuple[ProbedCodec, ...]


def probed_words(budgeted: Budgeted, candidate: Candidate, model: ModelConfig) -> str:
    """Return what the probe saw of a candidate's compression, in words.

    Args:
        budgeted: the choice that led to the candidate.
        candidate: plan.
        model: model that is planned for.
    """
    b, probe, c = budgeted, budgeted.probe, candidate
    used = {"backward": c.backward != "none", "forward": c.compresses_forward, "data": c.data_rank > 0}
    used |= {"embedding": c.compresses_embedding}
    some = [one for one in b.codecs if used[one.place]]
    source = f"the probe {b.path} ({len(probe.seeds)} seeds, {probe.steps} steps"
    other = _differences(probe.model, model)
    source += f", of another model: {other})" if other else ")"
    beside = [one.kind.words for one in _compressed(c) if one.kind.what in _UNPROBED]
    unknown = f"; not probed: {' and '.join(beside)}, as configured" if beside else ""
    if not some:
        return (
            f"nothing {'else ' * bool(beside)}is compressed: no codec of {source} makes a step quicker within a budget "
            f"of {b.budget:.2%} loss{unknown}"
        )
    each = ", ".join(f"{one.label} of {WORDS[one.place]} {one.mean:+.2%} ± {one.noise:.2%}" for one in some)
    mean, noise = excess(some)
    together = f", {mean:+.2%} ± {noise:.2%} together" if len(some) > 1 else ""
    return f"{source} saw {each}{together}, of a budget of {b.budget:.2%} loss{unknown}"


def _differences(there: Mapping[str, object], model: ModelConfig) -> str:
    """Return the settings in which a probe's model differs from the planned one; "" if it is the same."""
    here = {name: value for name, value in dataclasses.asdict(model).items() if name != "attention"}
    return ", ".join(
        f"{name}={there[name]} instead of {value}"
        for name, value in here.items()
        if name in there and there[name] != value
    )
