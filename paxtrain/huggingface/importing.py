"""Import: a model of transformers, with whose weights a run begins."""

import dataclasses
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from paxtrain import files
from paxtrain.config import ModelConfig
from paxtrain.data import settings
from paxtrain.data.tokenizer import FILE as TOKENIZER
from paxtrain.data.tokenizer import load
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion
from paxtrain.huggingface.files import CONFIG, ModelArrays, read_json
from paxtrain.model import parameters
from paxtrain.model.spec import Params

_SPECIAL = ("bos_token", "eos_token", "pad_token")


def _check_architecture(model: ModelConfig, fields: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Require that the configuration's model is the one whose `fields` the folder has."""
    mine, theirs = dataclasses.asdict(model), dict(fields)
    mine |= {"kv_heads": model.key_value_heads, "intermediate": model.ffn}
    mine["head_size"] = 0 if model.heads * model.head_dim == model.hidden else model.head_dim
    usual = parameters.architecture(model).options if mine["family"] == theirs["family"] else {}
    for name, known in (("options", usual), ("rope_scaling", {})):
        own, other = mine.pop(name, {}), theirs.pop(name, {})
        mine |= {f"{name}.{key}": own.get(key, known.get(key)) for key in (*own, *other)}
        theirs |= {f"{name}.{key}": other.get(key, known.get(key)) for key in (*own, *other)}
    if mine["vocab_size"] > theirs["vocab_size"]:  # tokens that were added; the tables get rows
        del theirs["vocab_size"]
    if mine["sequence"] < theirs.get("sequence", 0):  # the first positions are the same
        del theirs["sequence"]
    for name, zero in (("kv_heads", theirs["heads"]), ("intermediate", 4 * theirs["hidden"])):
        theirs[name] = theirs[name] or zero
    different = {name: value for name, value in theirs.items() if mine[name] != value}
    if different:
        options = " ".join(f"--config.model.{name}={value}" for name, value in different.items())
        raise UserError(
            f"{folder} is another model than --config describes, which has "
            f"{', '.join(f'{name}={mine[name]}' for name in different)}; add {options}"
        )


class Model:
    """A model in Hugging Face's layout, whose weights a run's first state has.

    Attributes:
        tokenizer: its tokenizer.json, which need not exist.
    """

    def __init__(self, folder: str | pathlib.Path, config: ModelConfig) -> None:
        """Check what needs no array to be read.

        Args:
            folder: folder of the model.
            config: architecture of the run, which must be the folder's.

        Raises:
            UserError: the architecture is not implemented or not the configuration's, or arrays are missing, left over
                or have other shapes.
        """
        self._folder, self._config = pathlib.Path(folder), config
        self.tokenizer = self._folder / TOKENIZER
        self._values = read_json(self._folder / CONFIG)
        fields = conversion.from_config(self._values, str(self._folder / CONFIG))
        _check_architecture(config, fields, self._folder)
        self._arrays = ModelArrays(self._folder)
        self._sizes = self._values["vocab_size"], self._values.get("n_positions", 0)
        shapes = conversion.shapes(config, *self._sizes)
        for name, shape in shapes.items():
            conversion.require_array(name, *self._arrays.header(name), shape, config)
        untied = conversion.shapes(dataclasses.replace(config, tied_head=False))
        # A file may hold a tied head once more.
        self._again = [name for name in untied if name not in shapes and name in self._arrays]
        self._arrays.require_no_others([*shapes, *self._again])
        if self.tokenizer.exists():
            load(self.tokenizer)

    def params(self, like: Params) -> tuple[Params, int]:
        """Return the canonical parameters as global arrays, and a checksum of all that was read.

        Every process reads all arrays, one after another, and keeps what its devices hold.

        Args:
            like: the parameters' shapes, with shardings.

        Raises:
            UserError: an array has numbers that are not finite, or a tied head differs from the embedding.
        """
        checksum = 0

        def read(name: str) -> np.ndarray:
            nonlocal checksum
            x = self._arrays(name)
            checksum = zlib.crc32(x.tobytes(), checksum)
            return x

        def place(names: tuple[str, ...], x: np.ndarray) -> jax.Array:
            found: Any = like
            for name in names:
                found = found[name]
            return jax.make_array_from_callback(x.shape, found.sharding, lambda index: x[index])

        [embedding] = (p.sources[0] for p in parameters.table(self._config) if p.path == "embedding/token")
        for name in self._again:
            if not np.array_equal(self._arrays(name), self._arrays(embedding)):
                raise UserError(
                    f"{self._folder} has a {name} that is not its {embedding}, though its {CONFIG} ties them; if it is "
                    f"the head, say tie_word_embeddings=false there and add --config.model.tied_head=False"
                )
        return conversion.params(read, self._config, *self._sizes, place), checksum

    def keep(self, out: pathlib.Path) -> None:
        """Keep the model's tokenizer and what it says of its special tokens, for sampling and exports.

        Its config.json may give tokens only by id, and several that end a text.

        Args:
            out: folder of the run.
        """
        if not self.tokenizer.exists():
            return
        kept, tokenizer = settings.read(self._folder), load(self.tokenizer)
        ids = {f"{name}_id": found for name in _SPECIAL if (found := self._values.get(f"{name}_id")) is not None}
        for name in _SPECIAL:
            number = ids.get(f"{name}_id")
            number = number[0] if isinstance(number, list) and number else number
            text = None
            if isinstance(number, int) and 0 <= number < self._values["vocab_size"]:
                text = tokenizer.id_to_token(number)
            if text is not None and not kept.get(name):
                kept[name] = text
        generation = self._folder / settings.GENERATION
        ids |= settings.read_object(generation) if generation.exists() else {}
        files.write(out / TOKENIZER, self.tokenizer.read_bytes())
        files.write(out / settings.FILE, settings.text(settings.CLASS | kept))
        files.write(out / settings.GENERATION, settings.text(ids))
