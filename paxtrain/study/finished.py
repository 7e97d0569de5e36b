"""The finished runs of a study on disk: each is written as it ends, so that no later failure loses it."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import threading
import typing

from paxtrain import files
from paxtrain.config import to_dict
from paxtrain.errors import UserError
from paxtrain.study.report import VariantResult
from paxtrain.study.variants import Variant

FILE = "finished.jsonl"


def identity(variant: Variant, seed: int, about: tuple[bool, ...]) -> str:
    """Return what a run's result depends on, as a short text.

    Args:
        variant: variant of the run.
        seed: seed of the run.
        about: how it was run, besides its configuration.
    """
    said = json.dumps([variant.name, to_dict(variant.config), seed, about], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


class FinishedRuns:
    """The results in a folder, by identity; threads may add to them.

    Attributes:
        path: file of the results.
        results: results by identity.
        aside: file to which a start that does not resume has moved those of an earlier one; None: there were none.
    """

    def __init__(self, folder: pathlib.Path, resume: bool) -> None:
        """Read the results that are there, or begin without any.

        Args:
            folder: folder of the study.
            resume: whether results of an earlier start count.

        Raises:
            UserError: the file cannot be read or written.
        """
        self.path, self._lock = folder / FILE, threading.Lock()
        self.results: dict[str, VariantResult] = {}
        self.aside: pathlib.Path | None = None
        try:
            if self.path.exists() and resume:
                lines = self.path.read_text(errors="replace").splitlines()
                self.results = dict(found for line in lines if (found := _parsed(line)))
            elif self.path.exists() and self.path.stat().st_size:
                numbered = (self.path.with_suffix(f".{n}{self.path.suffix}") for n in itertools.count(1))
                self.aside = self.path.rename(next(path for path in numbered if not path.exists()))
            # Without what a crash has left of a line, and what an older version has written.
            files.write(self.path, "".join(_line(*one) for one in self.results.items()))
        except OSError as error:
            if files.is_full(error):
                raise
            reason = error.strerror
            raise UserError(f"cannot use {self.path} ({reason}); move it away, or name another --out") from error

    def add(self, identity: str, result: VariantResult) -> None:
        """Write a result; it is on disk when this returns."""
        with self._lock, self.path.open("a") as file:
            file.write(_line(identity, result))
            file.flush()
            os.fsync(file.fileno())


def _line(identity: str, result: VariantResult) -> str:
    return json.dumps({"identity": identity, "result": dataclasses.asdict(result)}) + "\n"


def _parsed(line: str) -> tuple[str, VariantResult] | None:
    """Return a line's identity and result, None if a crash has cut it off or its values are no result's."""
    try:
        values = json.loads(line)
        identity, found = values["identity"], VariantResult(**values["result"])
        found.validation = {int(step): float(loss) for step, loss in found.validation.items()}
        found.losses = [float(loss) for loss in found.losses]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    kinds = {name: typing.get_origin(hint) or hint for name, hint in typing.get_type_hints(VariantResult).items()}
    fit = isinstance(identity, str) and all(type(getattr(found, name)) is kind for name, kind in kinds.items())
    return (identity, found) if fit and found.validation else None
