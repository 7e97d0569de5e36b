"""The compress section of the configuration: which messages and gradients are compressed, and how."""

import dataclasses
from typing import Any, ClassVar

from paxtrain.config.checks import OUT, Checked, bounded, choice, numbers, positive, require
from paxtrain.config.options import NO_OPTIONS, OptionValues
from paxtrain.errors import whole

SECONDS = ("stage_seconds", "reduce_seconds", "compressed_seconds")
LOW_RANK = "lowrank"


@dataclasses.dataclass(frozen=True)
class PlaceConfig(Checked):
    """A place at which something is compressed, the part compress.PLACE of the configuration.

    Attributes:
        codec: codec of what travels there: a name of compress.codecs.named or package.module:Class. Empty: lowrank, or
            none where low rank is not offered.
        options: its options, the fields of its class (--config.compress.PLACE.options.NAME); those of lowrank are
            `rank`, `ranks`, `error` and `factors`.
    """

    codec: str = ""
    options: OptionValues = NO_OPTIONS

    depth = 2
    place, asked = "", ""  # name of the place, and of the setting that says what is compressed
    dense = ""  # why low rank is not offered

    def check(self) -> None:
        at, option = f"compress.{self.place}", next(iter(self.options), "")
        require(
            not self.dense or self.codec != LOW_RANK,
            f"{at}.codec={LOW_RANK} is not offered: {self.dense}",
            {f"{at}.codec": "int8"},
            {f"{at}.codec": OUT},
        )
        require(
            not self.dense or not option or self.codec != "",
            f"{at}.options.{option} is an option of a codec, and --config.{at}.codec names none",
            {f"{at}.options": OUT},
        )


@dataclasses.dataclass(frozen=True)
class RankedConfig(PlaceConfig):
    """A place at which low rank is the usual codec.

    Attributes:
        rank: rank of low rank's factors.
    """

    rank: int = 16

    of_low_rank: ClassVar[tuple[str, ...]] = ()  # settings that no other codec has

    def check(self) -> None:
        at = f"compress.{self.place}"
        bounded(at, self)
        positive(at, self, "rank")
        require(
            not self.low_rank or not self.options,
            f"{at}.options.{next(iter(self.options), '')} is an option of a codec, but {at} has {LOW_RANK}, whose "
            f"options are {at}.rank, error and factors",
            {f"{at}.options": OUT},
        )
        for name in self.of_low_rank:
            value = getattr(self, name)
            require(
                self.low_rank or not value,
                f"{at}.{name}={value} is of {LOW_RANK}, but {at}.codec is {self.codec}",
                {f"{at}.{name}": OUT},
                {f"{at}.codec": LOW_RANK},
            )

    @property
    def low_rank(self) -> bool:
        """True if what is compressed goes through the low-rank codec."""
        return self.codec in ("", LOW_RANK)

    @property
    def chosen(self) -> str:
        """Part that goes through the codec: "none", "epilogue", "all", or stages; with a codec "none" means "all"."""
        asked: str = getattr(self, self.asked)
        return "all" if asked == "none" and self.codec else asked


@dataclasses.dataclass(frozen=True)
class ForwardConfig(RankedConfig):
    """Compressed activations between stages; beyond the paper.

    Attributes:
        messages: which messages: "none" or "all". If a codec is named, none means all.
        links: links on which these messages are compressed, such as "0,2"; empty: all. On the others they travel as
            they are. The link between stages 0 and 1 comes first. With virtual stages the link between the last stage
            and the first comes last.
    """

    messages: str = "none"
    links: str = ""

    place, asked = "forward", "messages"
    kinds: ClassVar[tuple[str, ...]] = ("none", "all")

    def check(self) -> None:
        super().check()
        at = f"compress.{self.place}"
        choice(f"{at}.messages", self.messages, self.kinds)
        require(
            not self.links or all(whole(link) is not None for link in self.links.split(",")),
            f"{at}.links must be links between stages joined by commas such as 0,2, got {self.links!r}",
        )
        require(
            not self.links or self.chosen != "none",
            f"{at}.links={self.links} says where messages are compressed, but {at}.messages is none",
            {f"{at}.links": OUT},
            {f"{at}.messages": "all"},
        )

    def on(self, links: int) -> tuple[int, ...]:
        """Return which of `links` links between stages compress these messages."""
        return tuple(sorted({int(link) for link in self.links.split(",")})) if self.links else tuple(range(links))


@dataclasses.dataclass(frozen=True)
class BackwardConfig(ForwardConfig):
    """Compressed activation gradients between stages.

    Attributes:
        messages: which messages: "none", "epilogue" (those of the pipeline's drain, which no compute hides) or "all".
            If a codec is named, none means all.
        ranks: rank of each link's factors, such as "16,8,16", counted as for `links`; empty: `rank` for all.
    """

    ranks: str = ""

    place = "backward"
    kinds = ("none", "epilogue", "all")
    of_low_rank = ("ranks",)

    def check(self) -> None:
        super().check()
        require(
            all(rank > 0 for rank in numbers("compress.backward.ranks", self.ranks, int)),
            f"compress.backward.ranks must be positive integers joined by commas, got {self.ranks!r}",
        )

    def link_ranks(self, links: int) -> tuple[int, ...]:
        """Return the rank of the gradients on each of `links` links between stages."""
        return numbers("compress.backward.ranks", self.ranks, int) or (self.rank,) * links


@dataclasses.dataclass(frozen=True)
class OverDataConfig(RankedConfig):
    """Compressed gradients over data (PowerSGD, Vogels et al. 2019); a codec may also be a compress.Reducer.

    Attributes:
        rank: rank of low rank's factors; the highest rank if ranks adapt.
        stages: stages whose gradients are compressed: "none", "all", a list as "0,1", or "selective": those whose
            reductions would end the step. If a codec is named, none means all.
        inside: data ranks of a group, neighbours with fast links. Gradients are summed inside groups as they are, and
            compressed between them only. 1: each rank is a group.
        start: fraction of the run's steps before compression starts.
        adapt_every: steps between adaptations of each stage's rank to its residual; 0: ranks stay. The residual is the
            part of the gradient that compression leaves out, 0 to 1, by norm.
        rank_min: lowest rank that adaptation chooses.
        residual_low: residual below which the rank halves.
        residual_high: residual above which the rank doubles.
        stage_seconds: for stages=selective, the time at which each stage's last backward ends, joined by commas; this
            and the next two are measured before the first step if they are empty.
        reduce_seconds: for stages=selective, the seconds of each stage's dense reduction.
        compressed_seconds: for stages=selective, the seconds of each stage's compressed reduction.
    """

    rank: int = 128
    stages: str = "none"
    inside: int = 1
    start: float = 0.1
    adapt_every: int = 0
    rank_min: int = 4
    residual_low: float = 0.3
    residual_high: float = 0.6
    stage_seconds: str = ""
    reduce_seconds: str = ""
    compressed_seconds: str = ""

    place, asked = "data", "stages"
    of_low_rank = ("adapt_every",)

    def check(self) -> None:
        super().check()
        at = "compress.data"
        positive(at, self, "rank_min")
        require(self.inside > 0, f"{at}.inside must be 1 or more data ranks of a group, got {self.inside}")
        require(0 <= self.start < 1, f"{at}.start must be in [0, 1), got {self.start}")
        require(self.adapt_every >= 0, f"{at}.adapt_every must not be negative, got {self.adapt_every}")
        require(
            self.rank_min <= self.rank,
            f"{at}.rank_min={self.rank_min} must not be above {at}.rank={self.rank}",
            {f"{at}.rank_min": self.rank},
            {f"{at}.rank": self.rank_min},
        )
        require(
            0 <= self.residual_low < self.residual_high <= 1,
            f"{at}.residual_low={self.residual_low} must be below {at}.residual_high={self.residual_high}, both in "
            "[0, 1]",
            {f"{at}.{name}": getattr(type(self), name) for name in ("residual_low", "residual_high")},
        )
        if self.stages not in ("none", "all", "selective"):
            require(
                all(whole(stage) is not None for stage in self.stages.split(",")),
                f"{at}.stages must be none, all, selective or stages joined by commas such as 0,1, got {self.stages!r}",
            )
        given = [bool(getattr(self, name)) for name in SECONDS]
        require(
            all(given) or not any(given),
            f"{', '.join(f'{at}.{name}' for name in SECONDS)} must be given together or not at all",
            {f"{at}.{name}": OUT for name, some in zip(SECONDS, given) if some},
        )
        for name in SECONDS:
            numbers(f"{at}.{name}", getattr(self, name), float)

    def over(self, members: int) -> str:
        """Return what `chosen` says, on a number of data ranks: "none" if they are all in one group."""
        return "none" if 1 < members == self.inside else self.chosen

    @property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """Numbers per stage of stage_seconds, reduce_seconds and compressed_seconds; each empty if not given."""
        return tuple(numbers(name, getattr(self, name), float) for name in SECONDS)

    def stages_of(self, pipe: int) -> tuple[int, ...]:
        """Return which of `pipe` stages compress by the configuration alone; "selective" has none yet."""
        if self.chosen in ("none", "selective"):
            return ()
        return tuple(range(pipe)) if self.chosen == "all" else tuple(sorted({int(s) for s in self.chosen.split(",")}))


@dataclasses.dataclass(frozen=True)
class TablesConfig(PlaceConfig):
    """Gradients of the vocabulary's table and of positions. A codec takes them over data and between two copies.

    Attributes:
        sync: synchronisation of the tied embedding's two gradients: "fused", "unfused" (the baseline: a mean over data
            of each, then their sum), or "auto": fused if there are two copies.
    """

    sync: str = "auto"

    place, asked = "embedding", "sync"
    dense = "each of a step's words has a gradient of its own"

    def check(self) -> None:
        super().check()
        choice("compress.embedding.sync", self.sync, ("auto", "fused", "unfused"))
        require(
            not self.codec or self.sync != "unfused",
            f"compress.embedding.codec={self.codec} needs the fused synchronisation of the embedding, got "
            "compress.embedding.sync=unfused",
            {"compress.embedding.sync": "auto"},
            {"compress.embedding.codec": OUT},
        )


@dataclasses.dataclass(frozen=True)
class WeightsConfig(PlaceConfig):
    """The layers' kernels as they are gathered over data, with any mesh.shard but none."""

    place = "weights"
    dense = "weights are not close to any low rank"


@dataclasses.dataclass(frozen=True)
class ExchangesConfig(PlaceConfig):
    """The differences that groups exchange (outer.every); a codec may also be a compress.Reducer."""

    place = "outer"
    dense = "its ranks are those of gradients"


@dataclasses.dataclass(frozen=True)
class ContextConfig(PlaceConfig):
    """Keys and values that devices of a context group send each other, as a ring or gathered (mesh.context_form)."""

    place = "context"
    dense = "keys and values are not close to any low rank"


@dataclasses.dataclass(frozen=True)
class CompressConfig(Checked):
    """Compression of what crosses the links; low rank is Optimus-CC's (Song et al. 2023).

    Attributes:
        backward: activation gradients between stages.
        forward: activations between stages.
        data: gradients over data.
        embedding: gradients of the vocabulary's table and of positions.
        weights: weights that are gathered over data.
        outer: differences that groups exchange.
        context: keys and values that devices of a context group send each other.
        error: form of lazy error propagation, which adds the error of a compressed message to the next one on its link:
            "lazy" (kept as factors, the fewest bytes), "explicit", or "none".
        factors: dtype of low rank's factors on the wire between stages: "float32", "bfloat16", "int8" (a scale per
            column), or "auto": the compute dtype.
        min_ratio: smallest ratio of a matrix's bytes to its factors' bytes; other matrices stay dense.
        implementation: implementation of the passes over whole matrices: "xla", "triton" (Pallas kernels), or "auto":
            triton on H100, H200 and B200 GPUs for ranks up to 128 and on A100 GPUs for ranks up to 64.
    """

    backward: BackwardConfig = BackwardConfig()
    forward: ForwardConfig = ForwardConfig()
    data: OverDataConfig = OverDataConfig()
    embedding: TablesConfig = TablesConfig()
    weights: WeightsConfig = WeightsConfig()
    outer: ExchangesConfig = ExchangesConfig()
    context: ContextConfig = ContextConfig()
    error: str = "lazy"
    factors: str = "auto"
    min_ratio: float = 2.0
    implementation: str = "auto"

    def check(self) -> None:
        choice("compress.error", self.error, ("lazy", "explicit", "none"))
        choice("compress.factors", self.factors, ("auto", "float32", "bfloat16", "int8"))
        choice("compress.implementation", self.implementation, ("auto", "xla", "triton"))
        bounded("compress", self)
        require(self.min_ratio >= 0, f"compress.min_ratio must not be negative, got {self.min_ratio}")

    def at(self, place: str) -> Any:
        """Return the part of a place, one of config.options' PLACES and OTHERS."""
        return getattr(self, place)

    def changed(self, **changes: Any) -> "CompressConfig":
        """Return the section with some values replaced: changed(error="none", backward={"rank": 8})."""
        parts = {
            name: dataclasses.replace(getattr(self, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return dataclasses.replace(self, **parts)
