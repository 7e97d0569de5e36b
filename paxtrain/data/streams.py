"""Training sets whose text is read, tokenized and cut into samples while a run trains, with grain.

    files -> documents -> shuffled in windows -> ids -> samples of sequence + 1 tokens -> the mixture -> global batches

Every process reads all of it and keeps its rows, so that sample n is the same on any mesh. The state of the iterator
is a few numbers, which a checkpoint holds: documents are read again from the file, and no token is stored.
"""

import itertools
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

from paxtrain import tables
from paxtrain.config import Config
from paxtrain.data import settings, tokenizer
from paxtrain.data.corpus import documents, input_files
from paxtrain.data.mixture import Mixture
from paxtrain.errors import UserError

WINDOW = 1024  # documents that are shuffled among themselves
_AT_ONCE = 64  # documents that the tokenizer encodes at once, on all cores
StreamState = dict[str, Any]  # JSON values


def _tuples(state: Any) -> Any:
    """Return a state with tuples in place of lists, which JSON has made of them and grain takes for other values."""
    if isinstance(state, dict):
        return {name: _tuples(value) for name, value in state.items()}
    return tuple(map(_tuples, state)) if isinstance(state, list) else state


class _Documents(grain.DatasetIterator):
    """The documents of files without end, in epochs; without a seed in the files' order."""

    def __init__(self, files: Sequence[str], json_key: str, seed: Sequence[int] | None) -> None:
        super().__init__()
        self._files, self._json_key, self._seed = files, json_key, seed
        self.set_state({"epoch": 0, "file": 0, "document": 0})

    def get_state(self) -> StreamState:
        return {"epoch": self._epoch, "file": self._file, "document": self._document}

    def set_state(self, state: StreamState) -> None:
        self._epoch, self._file, self._document = state["epoch"], state["file"], state["document"]
        self._open()

    def _open(self) -> None:
        order = range(len(self._files))
        if self._seed is not None:
            order = np.random.default_rng([*self._seed, self._epoch]).permutation(order).tolist()
        texts = documents([self._files[order[self._file]]], self._json_key)
        self._texts = itertools.islice(texts, self._document, None)

    def __next__(self) -> str:
        while True:
            for text in self._texts:
                self._document += 1
                if text:
                    return text
            epochs, self._file = divmod(self._file + 1, len(self._files))
            self._epoch, self._document = self._epoch + epochs, 0
            self._open()


class _Source(grain.IterDataset):
    """A dataset of `_Documents`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self._arguments = arguments

    def __iter__(self) -> _Documents:
        return _Documents(*self._arguments)


class _MixedSamples(grain.DatasetIterator):
    """The samples of several sets in the order of their mixture."""

    def __init__(self, iterators: Mapping[str, grain.DatasetIterator], mixture: Mixture) -> None:
        super().__init__(list(iterators.values()))
        self._iterators, self._mixture, self._sample = iterators, mixture, 0

    def get_state(self) -> StreamState:
        return {"sample": self._sample, "sets": {name: each.get_state() for name, each in self._iterators.items()}}

    def set_state(self, state: StreamState) -> None:
        self._sample = state["sample"]
        for name, each in self._iterators.items():
            each.set_state(state["sets"][name])

    def __next__(self) -> np.ndarray:
        chosen, _ = self._mixture(self._sample)
        self._sample += 1
        return next(self._parents[chosen])


class _Mixed(grain.IterDataset):
    """A dataset of `_MixedSamples`."""

    def __init__(self, sets: Mapping[str, grain.IterDataset], mixture: Mixture) -> None:
        super().__init__(list(sets.values()))
        self._sets, self._mixture = sets, mixture

    def __iter__(self) -> _MixedSamples:
        return _MixedSamples({name: iter(each) for name, each in self._sets.items()}, self._mixture)


class _Encode(grain.experimental.FlatMapTransform):
    """The ids of each of some documents."""

    max_fan_out = _AT_ONCE

    def __init__(self, folder: pathlib.Path) -> None:
        """Load the tokenizer of a folder.

        Raises:
            UserError: it has none, or it is damaged.
        """
        known = settings.read(folder)
        begin, end = settings.marks(known)
        self._tokenizer = tokenizer.load(folder / tokenizer.FILE)
        self._tokenizer.encode_special_tokens = known.get("split_special_tokens", True)
        self.size, self._cuts = tokenizer.vocabulary_size(self._tokenizer), tokenizer.cuts(self._tokenizer)
        self._begin = [] if begin is None else [self._tokenizer.token_to_id(begin)]
        self._end = self._tokenizer.token_to_id(end or tokenizer.END_OF_TEXT)
        if None in (*self._begin, self._end):
            raise UserError(f"{folder} does not say which token ends documents; make its data with paxtrain.prepare")

    def flat_map(self, element: Sequence[str]) -> list[np.ndarray]:
        cut = [list(tokenizer.pieces(text)) if self._cuts else [text] for text in element]
        message = "the tokenizer cannot encode the text"
        found = iter(tokenizer.encoded(self._tokenizer, list(itertools.chain(*cut)), message))
        whole = [[each.ids for each in itertools.islice(found, len(pieces))] for pieces in cut]
        return [np.array([*self._begin, *itertools.chain(*ids), self._end], np.int32) for ids in whole]


class Streams:
    """The training sets of a run that are streamed."""

    def __init__(self, config: Config, tokenizer_file: pathlib.Path) -> None:
        """Look into all files, and check for what would stop a run that can be seen at their beginnings.

        Args:
            config: configuration of the run.
            tokenizer_file: tokenizer.json, beside which lies what begins and ends documents.

        Raises:
            UserError: an input names no file, a file's beginning cannot be read, or the tokenizer does not fit.
        """
        self._config, self._weights = config, config.data.mixture
        if not tokenizer_file.exists():
            raise UserError(
                f"data.stream is encoded by the tokenizer of the validation data, but there is no {tokenizer_file}; "
                "prepare some text for data.validation with paxtrain.prepare"
            )
        self._encode = _Encode(tokenizer_file.parent)
        model = config.model
        if self._encode.size > model.vocab_size:
            raise UserError(
                f"{tokenizer_file} has {self._encode.size} ids, more than model.vocab_size={model.vocab_size}; set "
                "model.vocab_size to its number"
            )
        inputs = config.data.train_sets
        self._files = {name: input_files(inputs[name].split(","), "data.stream") for name in self._weights}
        for name, files in self._files.items():
            for file in files:
                next(documents([file], config.data.json_key), None)
            if next(filter(None, documents(files, config.data.json_key)), None) is None:
                raise UserError(f"data.stream={inputs[name]} has no text; name files that have some")

    def training(
        self, rows: Sequence[int], seed: int | None = None, state: StreamState | None = None
    ) -> grain.DatasetIterator:
        """Return an iterator over rows of the global batches, int32 [len(rows), sequence + 1], without end.

        Args:
            rows: rows of each global batch that this process keeps.
            seed: seed of the order; None: the configuration's.
            state: state of such an iterator, of any rows and batch size, from which to go on; None: from the start.
        """
        c, length = self._config, self._config.model.sequence + 1
        seed, sets = c.run.seed if seed is None else seed, {}
        for name, files in self._files.items():
            own = [seed, *name.encode()]
            found: grain.IterDataset = _Source(files, c.data.json_key, own if c.data.shuffle else None)
            if c.data.shuffle:
                shuffling = int(np.random.SeedSequence(own).generate_state(1)[0])
                found = grain.experimental.WindowShuffleIterDataset(found, window_size=WINDOW, seed=shuffling)
            found = grain.experimental.FlatMapIterDataset(found.batch(_AT_ONCE, batch_fn=list), self._encode)
            found = found.map(lambda ids: {"ids": ids})
            found = grain.experimental.ConcatThenSplitIterDataset(found, length_struct={"ids": length})
            sets[name] = found.map(lambda packed: packed["ids"])
        mixed = _Mixed(sets, Mixture(list(self._weights.values())))
        batches = mixed.batch(c.batch.global_batch, batch_fn=lambda samples: np.stack([samples[row] for row in rows]))
        ahead = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=c.data.prefetch)
        iterator = iter(ahead)
        if state is not None:
            iterator.set_state(_tuples(state))
        return iterator

    def identity(self) -> StreamState:
        """Return the values that determine sample n; files are identified by their sizes in order."""
        c, sets = self._config, {}
        for name, files in self._files.items():
            sizes = list(map(os.path.getsize, files))
            checksum = zlib.crc32(repr(sizes).encode())
            sets[name] = {"bytes": sum(sizes), "sizes": checksum, "weight": self._weights[name]}
        order = {"seed": c.run.seed, "sequence": c.model.sequence, "shuffle": c.data.shuffle}
        return {"stream": sets, "json_key": c.data.json_key} | order

    def describe(self) -> list[tuple[str, str]]:
        """Return the table row of each set: its share, and its files."""
        rows, whole = [], sum(self._weights.values())
        for name, files in self._files.items():
            size = tables.size(sum(map(os.path.getsize, files)), "bytes")
            share = f"{self._weights[name] / whole:.4g} of all samples, " if name else ""
            rows.append((f"train on {name or 'a stream'}", f"{share}read from {len(files):,} files of {size}"))
        return rows
