"""Export: a checkpoint of a run, written as a model of transformers."""

import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
from huggingface_hub import split_state_dict_into_shards_factory
from tokenizers import Tokenizer
from tqdm import tqdm

from paxtrain import files
from paxtrain.data.tokenizer import END_OF_TEXT
from paxtrain.errors import UserError
from paxtrain.huggingface import architectures
from paxtrain.huggingface.files import CONFIG, INDEX, ONE_FILE, SETTINGS, read_json, write_json
from paxtrain.run import checkpoint, checkpoint_reading, sampling

DTYPES = ("float32", "bfloat16")
SHARD = "5GB"  # largest file, as in transformers


def _save(arrays: dict[str, np.ndarray], folder: pathlib.Path, dtype: str) -> None:
    """Write the arrays as one file, or as several with an index."""

    def size(x: np.ndarray) -> int:
        return x.size * jnp.dtype(dtype).itemsize

    split = split_state_dict_into_shards_factory(
        arrays, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    for file, names in tqdm(split.filename_to_tensors.items(), desc="writing", disable=not split.is_sharded):
        some = {name: jnp.asarray(arrays[name], dtype) for name in names}
        with files.replacing(folder / file) as new:
            safetensors.flax.save_file(some, new, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)


def _special(settings: Mapping[str, object], name: str, tokenizer: Tokenizer, vocabulary: int) -> int | None:
    """Return the id of the token that settings name, as text or as an object with its content, if the model has it."""
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    number = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return number if number is not None and number < vocabulary else None


def _settings(run: pathlib.Path, tokenizer: Tokenizer) -> dict[str, object]:
    """Return a run's tokenizer_config.json: an imported model's, or one that fits the tokenizers of prepared data."""
    if (run / SETTINGS).exists():
        return read_json(run / SETTINGS)
    known = tokenizer.token_to_id(END_OF_TEXT) is not None
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT) if known else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}


def export(
    directory: str | pathlib.Path, out: str | pathlib.Path, *, step: int | None = None, dtype: str = "float32"
) -> None:
    """Write a run's checkpoint as a model of transformers.

    Args:
        directory: folder of the run.
        out: folder of the model, which must not hold one yet.
        step: step of the checkpoint; None: the newest good one.
        dtype: dtype of the saved arrays, one of DTYPES.

    Raises:
        UserError: there is no good checkpoint, or `out` holds a model or cannot be written.
    """
    folder = pathlib.Path(out)
    if (folder / CONFIG).exists() or (folder / ONE_FILE).exists():
        raise UserError(f"--out={out} holds a model already; name another folder, or empty it")
    checkpoint_reading.read_meta(pathlib.Path(directory) / sampling.CHECKPOINTS, step)
    checkpoint.ensure_writable(folder)
    params, config, tokenizer = sampling.load(directory, step)
    _save(architectures.weights(jax.device_get(params), config.model), folder, dtype)
    settings = _settings(pathlib.Path(directory), tokenizer) | {"model_max_length": config.model.sequence}
    begin, end = (_special(settings, name, tokenizer, config.model.vocab_size) for name in ("bos_token", "eos_token"))
    tokenizer.save(str(folder / sampling.TOKENIZER))
    write_json(folder / SETTINGS, settings)
    # Written last, so that a folder with this file is complete.
    write_json(folder / CONFIG, architectures.to_config(config.model, dtype, begin=begin, end=end))
