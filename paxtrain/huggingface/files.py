"""The files of a model in Hugging Face's layout: config.json, *.safetensors and their index."""

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import safetensors

from paxtrain import files
from paxtrain.data.settings import read_object
from paxtrain.errors import UserError

CONFIG, ONE_FILE = "config.json", "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
# Arrays besides the weights in old files: masks, and angles that follow from rope_theta.
_NO_WEIGHTS = re.compile(r".*(att(entio)?n\.(masked_)?bias|rotary_emb\.inv_freq)")
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}  # safetensors' words for dtypes


def write_json(path: pathlib.Path, values: Mapping[str, object]) -> None:
    """Write an object as JSON."""
    files.write(path, json.dumps(values, indent=2) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the object that a file of a model holds as JSON.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    return read_object(path, f"init names a folder with {CONFIG} and *.safetensors")


class ModelArrays:
    """The arrays of a model's folder, each read from its memory-mapped file when it is asked for."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Open the files.

        Raises:
            UserError: a file cannot be read, or the index is none.
        """
        if (folder / INDEX).exists():
            places = read_json(folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise UserError(f"{folder / INDEX} must have a weight_map from names to files")
            names = sorted(set(places.values()))
        else:
            names = [ONE_FILE]
            if not (folder / ONE_FILE).exists() and (old := sorted(folder.glob("pytorch_model*.bin"))):
                raise UserError(
                    f"{folder} has its arrays in {old[0].name}, which is not read because it may hold any program; "
                    "save the model again with transformers' save_pretrained, which writes *.safetensors"
                )
        self._folder = folder
        self._holder: dict[str, safetensors.safe_open] = {}
        for file in names:
            try:
                opened = safetensors.safe_open(folder / file, framework="flax")
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(
                    f"{folder / file} cannot be read ({' '.join(str(error).split())}); all of a model's *.safetensors "
                    "are needed"
                ) from error
            self._holder |= dict.fromkeys(opened.keys(), opened)

    def __contains__(self, name: str) -> bool:
        return name in self._holder

    def _key(self, name: str) -> str:
        """Return the name that an array has here.

        Raises:
            UserError: there is none of that name.
        """
        # Files of a model without its head, such as the original GPT-2 files, lack the names' first part.
        for key in (name, name.partition(".")[2]):
            if key in self._holder:
                return key
        raise UserError(f"{self._folder} has no array {name}; its *.safetensors are of another model than its {CONFIG}")

    def __call__(self, name: str) -> np.ndarray:
        """Return an array by its name.

        Raises:
            UserError: there is none of that name.
        """
        key = self._key(name)
        return np.asarray(self._holder[key].get_tensor(key))

    def header(self, name: str) -> tuple[str, list[int]]:
        """Return an array's dtype and shape, which its file's header says.

        Raises:
            UserError: there is none of that name.
        """
        key = self._key(name)
        described = self._holder[key].get_slice(key)
        code = described.get_dtype()
        kind, bits = code.rstrip("0123456789"), code.lstrip("BFIU")
        return _KINDS.get(kind, kind) + bits if kind + bits == code else code, described.get_shape()

    def require_no_others(self, names: Iterable[str]) -> None:
        """Require that the folder has no arrays but those named: a further one means another architecture.

        Raises:
            UserError: there is one, such as a scale.
        """
        left = sorted(self._holder.keys() - {self._key(name) for name in names})
        left = [key for key in left if not _NO_WEIGHTS.fullmatch(key)]
        if left:
            raise UserError(
                f"{self._folder} has arrays that its {CONFIG} does not account for, {left[0]} first of {len(left)}; "
                "models with further biases and quantized ones cannot be imported"
            )
