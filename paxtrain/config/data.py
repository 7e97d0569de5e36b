"""The data section of the configuration: the token files of a run, and their proportions."""

import dataclasses
import math
import re
from fractions import Fraction

from paxtrain.config.checks import OUT, Checked, bounded, positive, require, shown
from paxtrain.errors import UserError

# The weights, scaled to integers, add up to the period of the mixture in samples.
LONGEST_PERIOD = 10_000

_NAMED = re.compile(r"([\w.-]+)=(.+)")
# Without limits 1e999999999 would take long to expand, and numbers of thousands of digits cannot be shown.
_NUMBER = re.compile(r"(\d{1,30}\.?\d{0,30}|\.\d{1,30})(e[+-]?\d\d?)?|\d{1,30}/\d{1,30}", re.IGNORECASE | re.ASCII)
_EXAMPLE = "web=runs/web/train,code=runs/code/train"


def _sets(key: str, text: str, several: bool = False) -> dict[str, str]:
    """Return the prefixes by name; one without a name, or `several`, are the set of the name ""."""
    matches = [_NAMED.fullmatch(part.strip()) for part in text.split(",")]
    if not any(matches) and (several or len(matches) == 1):
        return {"": text}
    found: dict[str, str] = {}
    for match in matches:
        if not match:
            example = "web=web/*.parquet,code=code.jsonl.gz" if several else _EXAMPLE
            one = "files without names" if several else "one prefix"
            raise UserError(f"{key} must be {one}, or named data sets as {example}, got {text!r}")
        name, prefix = match.groups()
        require(name not in found, f"{key} has two data sets of the name {name}; give each a different name")
        found[name] = prefix
    return found


def _weight(name: str, text: str) -> Fraction:
    try:
        weight = Fraction(text if _NUMBER.fullmatch(text) else 0)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    require(
        weight > 0,
        f"data.weights must give each data set a positive number, got {name}={text}; "
        "leave a set without samples out of data.train",
    )
    return weight


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """Token files written by paxtrain.prepare (Megatron-LM's .bin/.idx), named without the suffix.

    Attributes:
        train: one training set, "runs/data/train", or several with names that are mixed,
            "web=runs/web/train,code=runs/code/train".
        validation: one validation set, or several with names, likewise; each has a separate validation loss.
        weights: shares of several training sets, "web=0.7,code=0.3"; only their proportions count.
        stream: files of text that are tokenized while the run trains, in place of data.train: paths, folders and globs
            joined by commas, or several sets with names, "web=web/*.parquet,code=code.jsonl.gz", each one path, folder
            or glob. Their tokenizer is that of the validation data. "": none.
        json_key: key of the text in the objects of streamed JSON, and name of its column in Parquet.
        shuffle: whether to shuffle the samples of a training set in each epoch; False: they come in the file's order. A
            stream's files are shuffled in each epoch, and its documents in windows of 1,024.
        prefetch: batches read ahead.
        verify: compare the files with the checksums that paxtrain.prepare wrote, before anything else; sets of at most
            64 MiB always are.
    """

    train: str = "runs/data/train"
    weights: str = ""
    validation: str = "runs/data/validation"
    stream: str = ""
    json_key: str = "text"
    shuffle: bool = True
    prefetch: int = 2
    verify: bool = False

    def check(self) -> None:
        bounded("data", self, prefetch=4096)
        positive("data", self, "prefetch")
        _ = self.mixture, self.validation_sets  # both raise if a text is wrong

    @property
    def train_sets(self) -> dict[str, str]:
        """Prefixes of the training sets by name, or their inputs if they are streamed."""
        return _sets("data.stream", self.stream, True) if self.stream else _sets("data.train", self.train)

    @property
    def validation_sets(self) -> dict[str, str]:
        """Prefixes of the validation sets by name."""
        return _sets("data.validation", self.validation)

    @property
    def mixture(self) -> dict[str, int]:
        """Number of samples of each training set in a period of the mixture, by name; names are sorted."""
        sets, key = sorted(self.train_sets), "data.stream" if self.stream else "data.train"
        names, equal = ", ".join(sets), {"data.weights": ",".join(f"{name}=1" for name in sets)}
        if not self.weights and len(sets) == 1:
            return {sets[0]: 1}
        require(
            bool(self.weights),
            f"{key} has the data sets {names}, but data.weights is empty",
            equal,
        )
        require(
            sets != [""],
            f"data.weights={self.weights} needs data sets with names as {_EXAMPLE}, got {key}="
            f"{self.stream or self.train}",
            {"data.weights": OUT},
        )
        given: dict[str, Fraction] = {}
        for part in self.weights.split(","):
            name, equals, weight = part.strip().partition("=")
            require(bool(equals), f"data.weights must be NAME=WEIGHT joined by commas, got {self.weights!r}")
            require(name in sets, f"data.weights names the data set {name!r}, but {key} has {names}", equal)
            require(name not in given, f"data.weights gives the data set {name} two weights; give it one")
            given[name] = _weight(name, weight)
        missing = [name for name in sets if name not in given]
        require(
            not missing,
            f"data.weights={self.weights} has no weight for {', '.join(missing)}, but {key} has {names}",
            equal,
        )
        common = math.lcm(*(weight.denominator for weight in given.values()))
        whole = {name: int(given[name] * common) for name in sets}
        divisor = math.gcd(*whole.values())
        period = sum(whole.values()) // divisor
        samples = f"{period:,}" if period < 10**20 else shown(period)
        require(
            period <= LONGEST_PERIOD,
            f"data.weights={self.weights} are proportions of {samples} samples, and a mixture repeats after at most "
            f"{LONGEST_PERIOD:,}; round the weights, with a sum of 1 to four decimals",
        )
        return {name: count // divisor for name, count in whole.items()}
