"""The finished runs of a study on disk: each is written as it ends, so that no later failure loses it."""

import dataclasses
import hashlib
import json
import os
import pathlib
import threading

from paxtrain.config import to_dict
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
    """The results in a folder, by identity; threads may add to them."""

    def __init__(self, folder: pathlib.Path, resume: bool) -> None:
        """Read the results that are there, or begin without any.

        Args:
            folder: folder of the study.
            resume: whether results of an earlier start count.
        """
        self.path, self._lock = folder / FILE, threading.Lock()
        self.results: dict[str, VariantResult] = {}
        if resume and self.path.exists():
            lines = self.path.read_text().splitlines()
            self.results = dict(found for line in lines if (found := _parsed(line)))
        kept = [_line(*one) for one in self.results.items()]
        self.path.write_text("".join(kept))  # without what a crash left of a line

    def add(self, identity: str, result: VariantResult) -> None:
        """Write a result; it is on disk when this returns."""
        with self._lock, self.path.open("a") as file:
            file.write(_line(identity, result))
            file.flush()
            os.fsync(file.fileno())


def _line(identity: str, result: VariantResult) -> str:
    return json.dumps({"identity": identity, "result": dataclasses.asdict(result)}) + "\n"


def _parsed(line: str) -> tuple[str, VariantResult] | None:
    """Return a line's identity and result, None if a crash has cut it off."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    found = VariantResult(**values["result"])
    found.validation = {int(step): loss for step, loss in found.validation.items()}
    return values["identity"], found
