"""The data sets of a run: opened, checked, mixed for training, and read separately for validation."""

import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grain
import numpy as np

from paxtrain import tables
from paxtrain.config import Config
from paxtrain.data import documents, settings, token_files
from paxtrain.data.mixture import Mixture
from paxtrain.data.streams import Streams, StreamState
from paxtrain.data.token_files import TokenFile
from paxtrain.data.tokenizer import FILE as TOKENIZER
from paxtrain.data.tokenizer import alike
from paxtrain.errors import UserError


def _require_one_tokenizer(files: Iterable[TokenFile]) -> None:
    """Require that all files with a tokenizer have the same one; otherwise equal ids would differ in meaning."""
    folders = dict.fromkeys(pathlib.Path(file.prefix).parent for file in files)
    found = [path for path in (folder / TOKENIZER for folder in folders) if path.exists()]
    for path in found[1:]:
        if not alike(found[0], path):
            raise UserError(
                f"{found[0]} and {path} are different tokenizers, so the ids of one data set mean something else in "
                "the other; prepare all of them with the same one"
            )
    known = [(path, settings.marks(values)) for path in found if (values := settings.read(path.parent))]
    for path, marks in known[1:]:
        if marks != known[0][1]:
            (begin, end), (other_begin, other_end) = known[0][1], marks
            raise UserError(
                f"documents beside {known[0][0]} begin with {begin or 'their text'} and end with {end}, beside {path} "
                f"with {other_begin or 'their text'} and {other_end}; prepare all with the same --begin_of_text and "
                "--end_of_text"
            )


class DataSets:
    """The training and validation sets of a run. Sample n is the same for any mesh, batch size and resumption.

    Attributes:
        train: token files of the training sets by name; a single set without a name has the name "". None if they are
            streamed.
        validation: token files of the validation sets by name, likewise.
    """

    def __init__(self, config: Config) -> None:
        """Open all files and check for anything that would stop a run.

        Raises:
            UserError: a file is unusable (see token_files.load), or the data sets have different tokenizers.
        """
        self._config, model = config, config.model

        def load(prefix: str) -> TokenFile:
            return token_files.load(
                prefix,
                vocab_size=model.vocab_size,
                sequence=model.sequence,
                separator=model.separator,
                verify=config.data.verify,
            )

        self._weights = config.data.mixture
        streamed = bool(config.data.stream)
        self.train = {} if streamed else {name: load(config.data.train_sets[name]) for name in self._weights}
        self.validation = {name: load(prefix) for name, prefix in config.data.validation_sets.items()}
        _require_one_tokenizer([*self.train.values(), *self.validation.values()])
        self._streams = Streams(config, self.tokenizer) if streamed else None

    @property
    def _known(self) -> list[TokenFile]:
        """The sets whose tokenizer is that of the training sets."""
        return list((self.train or self.validation).values())

    @property
    def tokenizer(self) -> pathlib.Path:
        """Path of the sets' tokenizer.json, or of where it would lie if no training set has one.

        Streamed sets have that of the validation sets.
        """
        paths = [pathlib.Path(file.prefix).with_name(TOKENIZER) for file in self._known]
        return next((path for path in paths if path.exists()), paths[0])

    @property
    def settings(self) -> list[settings.TokenizerSettings]:
        """The settings of the training sets' tokenizers, without sets that have none."""
        folders = dict.fromkeys(pathlib.Path(file.prefix).parent for file in self._known)
        return [found for folder in folders if (found := settings.read(folder))]

    def training(
        self,
        rows: Sequence[int],
        start_sample: int = 0,
        seed: int | None = None,
        state: StreamState | None = None,
    ) -> grain.DatasetIterator:
        """Return this process's rows of the global training batches without end, int32 [len(rows), sequence + 1].

        Every set has separate epochs. Their order depends on the seed and the set's name, not on other sets or
        weights.

        Args:
            rows: rows of each global batch that this process reads.
            start_sample: number of samples consumed before.
            seed: seed of the order; None: the configuration's.
            state: state of the iterator of a stream after as many samples, which says what to go on with; None: the
                stream begins.
        """
        if self._streams:
            return self._streams.training(rows, seed, state)
        c = self._config
        place = self._placing(c.run.seed if seed is None else seed)

        def sample(number: int) -> np.ndarray:
            name, found = place(number)
            return self.train[name].sample(found, c.model.sequence)

        return token_files.stream(
            sample,
            global_batch=c.batch.global_batch,
            rows=rows,
            start_sample=start_sample,
            prefetch=c.data.prefetch,
        )

    def _placing(self, seed: int) -> Callable[[int], tuple[str, int]]:
        """Return the function from a sample's number to its set and its place there."""
        c, names = self._config, list(self.train)
        orders = {
            name: token_files.order(
                file, c.model.sequence, seed=[seed, *name.encode()] if name else seed, shuffle=c.data.shuffle
            )
            for name, file in self.train.items()
        }
        mixture = Mixture(list(self._weights.values()))

        def place(number: int) -> tuple[str, int]:
            chosen, own_number = mixture(number)
            return names[chosen], int(orders[names[chosen]][own_number])

        return place

    def places(self, start_sample: int) -> str:
        """Return where the samples of a global batch lie: SET:PLACE or PLACE each, which begins at PLACE * sequence.

        Args:
            start_sample: number of samples consumed before the batch.
        """
        place = self._placing(self._config.run.seed)
        found = map(place, range(start_sample, start_sample + self._config.batch.global_batch))
        return " ".join(f"{name}:{at}" if name else str(at) for name, at in found)

    def validating(self, name: str, rows: Sequence[int]) -> grain.DatasetIterator:
        """Return this process's rows of the global batches of one validation set, in the file's order."""
        c = self._config
        return token_files.batches(
            self.validation[name],
            sequence=c.model.sequence,
            global_batch=c.batch.global_batch,
            rows=rows,
            shuffle=False,
            prefetch=c.data.prefetch,
        )

    def identity(self) -> dict[str, Any]:
        """Return the values that determine sample n.

        A file is identified by its length and its first million tokens.
        """
        if self._streams:
            return self._streams.identity()
        sets = {
            name: {"tokens": len(file), "beginning": zlib.crc32(file.read(0, min(len(file), 1_000_000)).tobytes())}
            for name, file in self.train.items()
        }
        mixed = {name: {**each, "weight": self._weights[name]} for name, each in sets.items()}
        order = {"seed": self._config.run.seed, "sequence": self._config.model.sequence}
        in_order = {} if self._config.data.shuffle else {"shuffle": False}
        return sets.get("", {"sets": mixed}) | order | in_order

    def _balance(self) -> list[tuple[str, str]]:
        """Return the table row that says how evenly documents spread attention over devices that share sequences."""
        mesh, model = self._config.mesh, self._config.model
        if mesh.context == 1 or model.separator < 0 or mesh.context_form == "heads":
            return []
        sets = ((file, self._weights[name]) for name, file in self.train.items())
        busiest = documents.imbalance(sets, model.sequence, model.separator, mesh.context)
        what = f"the busiest of {mesh.context} devices has {busiest:.2f} times the mean's attention within documents"
        return [("sharing sequences", what)]

    def describe(self) -> list[tuple[str, str]]:
        """Return table rows: of each named set its share and number of epochs in the run; the balance over context."""
        if self._streams:
            return self._streams.describe()
        if "" in self.train:
            return self._balance()
        c, rows = self._config, self._balance()
        for name, file in self.train.items():
            share = self._weights[name] / sum(self._weights.values())
            samples = share * c.run.steps * c.batch.global_batch
            epochs = samples / token_files.samples_per_epoch(len(file), c.model.sequence)
            size = tables.size(len(file), "tokens")
            rows.append((f"train on {name}", f"{share:.4g} of all samples, {epochs:.3g} epochs of {size}"))
        return rows
