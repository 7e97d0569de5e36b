"""The model section of the configuration: an architecture, its shape, its dtype and its attention."""

import dataclasses
import math
import pathlib
import pkgutil
from collections.abc import Mapping

from paxtrain.config.axes import AXES, TENSOR, parts
from paxtrain.config.checks import Checked, bounded, choice, each, multiples_near, near, positive, require
from paxtrain.config.options import NO_OPTIONS, OptionValues

_FOLDER = str(pathlib.Path(__file__).parents[1] / "architectures")
FAMILIES = tuple(sorted(one.name for one in pkgutil.iter_modules([_FOLDER])))  # by their files
MOST_VOCABULARY = 2**24  # ids
MOST_MULTIPLE = 2**16  # of vocab_multiple

# Largest heads of cuDNN's flash attention, and the CUDA compute capability from which on it takes them: Ampere, Hopper.
FLASH = {128: (8, 0), 256: (9, 0)}


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    """An architecture and its shape.

    Attributes:
        family: one of FAMILIES, each a file in paxtrain/architectures.
        vocab_size: number of token ids. The table is padded to a multiple of `vocab_multiple` on every mesh, so that
            checkpoints fit every mesh; padded rows never receive probability.
        layers: number of layers, L.
        hidden: size of a token's activations, H.
        heads: number of attention heads of each layer.
        kv_heads: heads of keys and values, each shared by heads/kv_heads queries; 0: as many as heads.
        head_size: size of a head, D; 0: hidden / heads.
        intermediate: size of the feed-forward part; 0: 4 * hidden.
        sequence: tokens of a sample, S.
        vocab_multiple: divisor of the rows of the padded tables.
        tied_head: whether the head uses the embedding's table.
        rope_theta: base of the rotary angles.
        rope_scaling: change of the angles for longer sequences, as Hugging Face's config.json says it, such as
            {"rope_type": "linear", "factor": 4.0}; see paxtrain.model.rotary.
        norm_epsilon: addend of a norm's variance or mean square.
        embedding_dropout: dropout rate after the embedding (GPT-2's embd_pdrop).
        residual_dropout: dropout rate on both residual branches (GPT-2's resid_pdrop).
        dtype: compute dtype, "bfloat16" or "float32". Parameters, their gradients' sum over micro-batches and the
            optimizer are always float32.
        attention: "auto" (cuDNN flash attention on GPUs in bfloat16, else XLA), "xla" or "cudnn".
        separator: id of the token with which documents begin; -1: all tokens of a sample are one document. A token that
            ends documents serves as well, as the first token of the next one. Attention stays within a document, and
            positions count from its beginning.
        options: further values of the architecture, named by its `options`.
        module: architecture of one's own in place of the family's, as package.module:Class.
    """

    family: str = "gpt2"
    vocab_size: int = 257
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 0
    head_size: int = 0
    intermediate: int = 0
    sequence: int = 128
    vocab_multiple: int = 128
    tied_head: bool = True
    rope_theta: float = 10_000.0
    rope_scaling: OptionValues = NO_OPTIONS
    norm_epsilon: float = 1e-5
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    dtype: str = "bfloat16"
    attention: str = "auto"
    separator: int = -1
    options: OptionValues = NO_OPTIONS
    module: str = ""

    def check(self) -> None:
        choice("model.family", self.family, tuple(FAMILIES))
        # Ten to a hundred times what the largest published models have.
        sizes = {"layers": 4096, "hidden": 2**18, "heads": 2**13, "kv_heads": 2**13, "intermediate": 2**20}
        sizes["head_size"] = 2**13
        bounded("model", self, vocab_size=MOST_VOCABULARY, vocab_multiple=MOST_MULTIPLE, sequence=2**24, **sizes)
        positive("model", self, "vocab_size", "layers", "hidden", "heads", "sequence", "vocab_multiple")
        positive("model", self, "rope_theta", "norm_epsilon")
        for name in ("kv_heads", "head_size", "intermediate"):
            require(getattr(self, name) >= 0, f"model.{name} must not be negative, got {getattr(self, name)}")
        for name in ("embedding_dropout", "residual_dropout"):
            rate = getattr(self, name)
            require(0 <= rate < 1, f"model.{name} must be in [0, 1), got {rate}")
        choice("model.dtype", self.dtype, ("bfloat16", "float32"))
        choice("model.attention", self.attention, ("auto", "xla", "cudnn"))
        heads = near(self.hidden, self.heads, lambda n: n % (self.kv_heads or n) == 0)
        require(
            self.head_size > 0 or self.hidden % self.heads == 0,
            f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}",
            each("model.heads", heads),
            each("model.hidden", multiples_near(self.heads, self.hidden)),
        )
        require(
            self.heads % self.key_value_heads == 0,
            f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}",
            each("model.kv_heads", near(self.heads, self.key_value_heads)),
        )
        require(
            -1 <= self.separator < self.vocab_size,
            f"model.separator must be an id below model.vocab_size={self.vocab_size}, or -1, got {self.separator}",
            each("model.vocab_size", [self.separator + 1] if self.separator > 0 else ()),
            {"model.separator": -1},
        )
        require(
            self.attention != "cudnn" or self.fits_flash,
            "model.attention=cudnn needs model.dtype=bfloat16, heads of a multiple of 8 up to 256 and, with a "
            f"separator, an even model.sequence, got {self.dtype}, {self.head_dim} and {self.sequence}",
            {"model.attention": "auto"},
        )

    @property
    def fits_flash(self) -> bool:
        """True if cuDNN has flash attention for this shape on some GPU; its masks need an even sequence."""
        small = self.head_dim % 8 == 0 and self.head_dim <= max(FLASH)
        return self.dtype == "bfloat16" and small and (self.separator < 0 or self.sequence % 2 == 0)

    @property
    def flash_capability(self) -> tuple[int, int]:
        """CUDA compute capability from which on cuDNN has flash attention for heads of this size."""
        return next((least for size, least in FLASH.items() if self.head_dim <= size), max(FLASH.values()))

    @property
    def padded_vocab(self) -> int:
        """Number of rows of a vocabulary table."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def ffn(self) -> int:
        """Size of the feed-forward part, F."""
        return self.intermediate or 4 * self.hidden

    @property
    def head_dim(self) -> int:
        """Size of an attention head, D."""
        return self.head_size or self.hidden // self.heads

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def tables(self) -> int:
        """Number of vocabulary tables: the embedding's, and the head's if it is untied."""
        return 1 if self.tied_head else 2

    @property
    def split_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism splits evenly, by name."""
        names = ("heads", "hidden", "key_value_heads", "ffn", "padded_vocab")
        return {name: getattr(self, name) for name in names}

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the dims of parameters by their logical names."""
        return {
            "layers": self.layers,
            "tables": self.tables,
            "vocab": self.padded_vocab,
            "positions": self.sequence,
            "embed": self.hidden,
            "heads": self.heads,
            "kv_heads": self.key_value_heads,
            "head": self.head_dim,
            "ffn": self.ffn,
        }

    def split_by(self, axis: str) -> dict[str, int]:
        """Return the sizes that an axis has to divide, by name; 1 for what the model has not."""
        if axis == TENSOR:
            return self.split_sizes
        pieces = AXES[axis].sequence
        each = {f"sequence // {pieces}": 1 if self.sequence % pieces else self.sequence // pieces} if pieces else {}
        return each | {dim: self.dims.get(dim, 1) for dim in AXES[axis].dims}

    def undivided(self, mesh: Mapping[str, int]) -> dict[str, int]:
        """Return the dims that axes of some sizes cannot split evenly, and their sizes."""
        return {dim: size for dim, size in self.dims.items() if size % parts(dim, mesh)}

    def vocabulary_for(self, tensor: int) -> int:
        """Return the vocab_multiple with which `tensor` divides the model; 0 if it does or cannot."""
        others = [size for name, size in self.split_sizes.items() if name != "padded_vocab"]
        multiple = math.lcm(self.vocab_multiple, tensor)
        wrong = self.padded_vocab % tensor and not any(size % tensor for size in others) and multiple <= MOST_MULTIPLE
        return multiple if wrong else 0
