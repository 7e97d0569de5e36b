"""The compress section of the configuration: which messages and gradients are compressed, and how."""

import dataclasses

from paxtrain.config.checks import bounded, choice, numbers, positive, require
from paxtrain.config.options import LINKED, NO_OPTIONS, OTHERS, PLACES, CodecOptions
from paxtrain.errors import whole

SECONDS = ("stage_seconds", "reduce_seconds", "compressed_seconds")
LOW_RANK = "lowrank"
# Settings that are options of low rank, by place.
_RANKS = {"backward": ("backward_ranks",), "forward": (), "data": ("data_adapt_every",)}


@dataclasses.dataclass(frozen=True)
class CompressConfig:
    """Compression of what crosses the links; low rank is Optimus-CC's (Song et al. 2023).

    Attributes:
        backward: compressed activation gradients between stages: "none", "epilogue" (those of the pipeline's drain,
            which no compute hides) or "all".
        backward_rank: rank of their factors.
        backward_codec: codec of these gradients (--config.compress.backward.codec): a name of compress.codecs.named or
            package.module:Class. Empty: lowrank. If one is named, backward=none means all.
        backward_options: its options, the fields of its class (--config.compress.backward.options.NAME); those of
            lowrank are `backward_rank`, `backward_ranks`, `error`, `factors` and `form`.
        backward_ranks: rank of each link's factors, such as "16,8,16"; empty: backward_rank for all. The link between
            stages 0 and 1 comes first. With virtual stages the link between the last stage and the first comes last.
        backward_links: links on which these gradients are compressed (--config.compress.backward.links), such as "0,2",
            counted as for backward_ranks; empty: all. On the others they travel as they are.
        forward: compressed activations between stages, "none" or "all"; beyond the paper.
        forward_rank: rank of their factors.
        forward_codec: codec of the activations, as backward_codec.
        forward_options: its options.
        forward_links: links on which the activations are compressed, as backward_links.
        error: form of lazy error propagation, which adds the error of a compressed message to the next one on its link:
            "lazy" (kept as factors, the fewest bytes), "explicit", or "none".
        factors: dtype on the wire between stages: "float32", "bfloat16", "int8" (a scale per column), or "auto": the
            compute dtype.
        form: method of the factors: "solve" (normal equations, no orthogonalisation) or "qr" (to check it).
        embedding: synchronisation of the tied embedding's two gradients: "fused", "unfused" (the baseline: a mean over
            data of each, then their sum), or "auto": fused if there are two copies.
        embedding_codec: codec of these gradients, over data and between the two stages
            (--config.compress.embedding.codec), as backward_codec, but never lowrank. Empty: they travel as they are.
        embedding_options: its options.
        data: stages whose gradients are compressed over data (PowerSGD, Vogels et al. 2019): "none", "all", a list as
            "0,1", or "selective": those whose reductions would end the step.
        data_codec: codec of these gradients, as backward_codec; a class may also be a compress.Reducer.
        data_options: its options.
        data_inside: data ranks of a group, neighbours with fast links (--config.compress.data.inside). Gradients are
            summed inside groups as they are, and compressed between them only. 1: each rank is a group.
        weights_codec: codec of the layers' kernels as they are gathered over data before a step, with mesh.zero1; as
            backward_codec, but never lowrank. Empty: they are gathered as they are.
        weights_options: its options.
        outer_codec: codec of the differences that groups exchange (outer.every), as data_codec, but never lowrank.
            Empty: they travel as they are.
        outer_options: its options.
        data_rank: rank of their factors; the highest rank if ranks adapt.
        data_start: fraction of the run's steps before data-parallel compression starts.
        data_adapt_every: steps between adaptations of each stage's rank to its residual; 0: ranks stay. The residual is
            the part of the gradient that compression leaves out, 0 to 1, by norm.
        data_rank_min: lowest rank that adaptation chooses.
        residual_low: residual below which the rank halves.
        residual_high: residual above which the rank doubles.
        stage_seconds: for data=selective, the time at which each stage's last backward ends, joined by commas; this and
            the next two are measured before the first step if they are empty.
        reduce_seconds: for data=selective, the seconds of each stage's dense reduction.
        compressed_seconds: for data=selective, the seconds of each stage's compressed reduction.
        min_ratio: smallest ratio of a matrix's bytes to its factors' bytes; other matrices stay dense.
        implementation: implementation of the passes over whole matrices: "xla", "triton" or "mosaic" (Pallas kernels),
            or "auto": triton on H100 and H200 GPUs for ranks up to 128 and on A100 GPUs for ranks up to 64, and mosaic
            on B200 GPUs (triton with a jax before 0.11.2).
    """

    backward: str = "none"
    backward_codec: str = ""
    backward_options: CodecOptions = NO_OPTIONS
    backward_rank: int = 16
    backward_ranks: str = ""
    backward_links: str = ""
    forward: str = "none"
    forward_codec: str = ""
    forward_options: CodecOptions = NO_OPTIONS
    forward_rank: int = 16
    forward_links: str = ""
    error: str = "lazy"
    factors: str = "auto"
    form: str = "solve"
    embedding: str = "auto"
    embedding_codec: str = ""
    embedding_options: CodecOptions = NO_OPTIONS
    data: str = "none"
    data_codec: str = ""
    data_options: CodecOptions = NO_OPTIONS
    data_inside: int = 1
    weights_codec: str = ""
    weights_options: CodecOptions = NO_OPTIONS
    outer_codec: str = ""
    outer_options: CodecOptions = NO_OPTIONS
    data_rank: int = 128
    data_start: float = 0.1
    data_adapt_every: int = 0
    data_rank_min: int = 4
    residual_low: float = 0.3
    residual_high: float = 0.6
    stage_seconds: str = ""
    reduce_seconds: str = ""
    compressed_seconds: str = ""
    min_ratio: float = 2.0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        choice("compress.backward", self.backward, ("none", "epilogue", "all"))
        choice("compress.forward", self.forward, ("none", "all"))
        choice("compress.error", self.error, ("lazy", "explicit", "none"))
        choice("compress.factors", self.factors, ("auto", "float32", "bfloat16", "int8"))
        choice("compress.form", self.form, ("solve", "qr"))
        choice("compress.embedding", self.embedding, ("auto", "fused", "unfused"))
        choice("compress.implementation", self.implementation, ("auto", "xla", "triton", "mosaic"))
        bounded("compress", self)
        positive("compress", self, "backward_rank", "forward_rank", "data_rank", "data_rank_min")
        require(
            self.data_inside > 0,
            f"compress.data.inside must be 1 or more data ranks of a group, got {self.data_inside}",
        )
        require(0 <= self.data_start < 1, f"compress.data_start must be in [0, 1), got {self.data_start}")
        require(self.min_ratio >= 0, f"compress.min_ratio must not be negative, got {self.min_ratio}")
        require(
            self.data_adapt_every >= 0, f"compress.data_adapt_every must not be negative, got {self.data_adapt_every}"
        )
        require(
            self.data_rank_min <= self.data_rank,
            f"compress.data_rank_min={self.data_rank_min} must not be above compress.data_rank={self.data_rank}",
        )
        require(
            0 <= self.residual_low < self.residual_high <= 1,
            f"compress.residual_low={self.residual_low} must be below compress.residual_high={self.residual_high}, "
            "both in [0, 1]",
        )
        ranks = numbers("compress.backward_ranks", self.backward_ranks, int)
        require(
            all(rank > 0 for rank in ranks),
            f"compress.backward_ranks must be positive integers joined by commas, got {self.backward_ranks!r}",
        )
        for place in LINKED:
            self._check_links(place)
        if self.data not in ("none", "all", "selective"):
            require(
                all(whole(stage) is not None for stage in self.data.split(",")),
                f"compress.data must be none, all, selective or stages joined by commas such as 0,1, got {self.data!r}",
            )
        for place in PLACES:
            self._check_codec(place)
        for place in OTHERS:
            self._check_other(place)
        require(
            not self.embedding_codec or self.embedding != "unfused",
            f"compress.embedding.codec={self.embedding_codec} needs the fused synchronisation of the embedding, got "
            "compress.embedding=unfused; choose auto",
        )
        given = [bool(getattr(self, name)) for name in SECONDS]
        require(
            all(given) or not any(given),
            f"compress.{', compress.'.join(SECONDS)} must be given together or not at all",
        )
        for name in SECONDS:
            numbers(f"compress.{name}", getattr(self, name), float)

    def _check_links(self, place: str) -> None:
        """Require that the links of a place of LINKED are numbers, and that something is compressed on them."""
        given = getattr(self, f"{place}_links")
        require(
            not given or all(whole(link) is not None for link in given.split(",")),
            f"compress.{place}.links must be links between stages joined by commas such as 0,2, got {given!r}",
        )
        require(
            not given or self.chosen(place) != "none",
            f"compress.{place}.links={given} says where messages are compressed, but compress.{place} is none; name a "
            f"codec with --config.compress.{place}.codec, or leave the links out",
        )

    def _check_other(self, place: str) -> None:
        """Require that a place of OTHERS has a codec besides low rank if it has options."""
        codec, options = getattr(self, f"{place}_codec"), getattr(self, f"{place}_options")
        why = {
            "weights": "weights are not close to any low rank",
            "outer": "its ranks are those of gradients",
            "embedding": "each of a step's words has a gradient of its own",
        }[place]
        require(codec != LOW_RANK, f"compress.{place}.codec={LOW_RANK} is not offered: {why}; choose int8")
        require(
            not options or codec != "",
            f"compress.{place}.options.{next(iter(options), '')} is an option of a codec; name one with "
            f"--config.compress.{place}.codec",
        )

    def _check_codec(self, place: str) -> None:
        """Require that a place's codec and its options fit each other, as far as that is known without the codec."""
        codec, options = getattr(self, f"{place}_codec"), getattr(self, f"{place}_options")
        if self.low_rank(place):
            require(
                not options,
                f"compress.{place}.options.{next(iter(options), '')} is an option of a codec, but compress.{place} has "
                f"lowrank, whose options are compress.{place}_rank, error, factors and form; name a codec with "
                f"--config.compress.{place}.codec",
            )
            return
        for name in _RANKS[place]:
            value = getattr(self, name)
            require(
                not value,
                f"compress.{name}={value} is of {LOW_RANK}, but compress.{place}.codec is {codec}; leave it out, or "
                f"choose --config.compress.{place}.codec={LOW_RANK}",
            )

    def low_rank(self, place: str) -> bool:
        """Return whether what is compressed at a place, one of PLACES, goes through the low-rank codec."""
        return getattr(self, f"{place}_codec") in ("", LOW_RANK)

    def chosen(self, place: str) -> str:
        """Return what goes through the codec of a place: "none", "epilogue", "all", or stages.

        With a codec that is named, "none" means "all".
        """
        asked = getattr(self, place)
        return "all" if asked == "none" and getattr(self, f"{place}_codec") else asked

    def over_data(self, ranks: int) -> str:
        """Return what `chosen` says of data, on a number of data ranks: "none" if they are all in one group."""
        return "none" if 1 < ranks == self.data_inside else self.chosen("data")

    @property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """Numbers per stage of stage_seconds, reduce_seconds and compressed_seconds; each empty if not given."""
        return tuple(numbers(name, getattr(self, name), float) for name in SECONDS)

    def data_stages(self, pipe: int) -> tuple[int, ...]:
        """Return which of `pipe` stages compress over data by the configuration alone; "selective" has none yet."""
        chosen = self.chosen("data")
        if chosen in ("none", "selective"):
            return ()
        return tuple(range(pipe)) if chosen == "all" else tuple(sorted({int(s) for s in chosen.split(",")}))

    def links(self, place: str, links: int) -> tuple[int, ...]:
        """Return which of `links` links between stages compress the messages of a place of LINKED."""
        given = getattr(self, f"{place}_links")
        return tuple(sorted({int(link) for link in given.split(",")})) if given else tuple(range(links))

    def link_ranks(self, links: int) -> tuple[int, ...]:
        """Return the rank of the gradients on each of `links` links between stages."""
        ranks = numbers("compress.backward_ranks", self.backward_ranks, int)
        return ranks or (self.backward_rank,) * links
